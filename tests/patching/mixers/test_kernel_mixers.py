"""Mixers of hybrid models: every family's function is recognised, computes the same, and keeps documents apart."""

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from ligertune_kernels import causal_conv1d_step_reference
from ligertune_kernels.ops.recurrence import package_functions
from ligertune_kernels.ops.recurrence.kda import kda_functions
from ligertune_kernels.ops.recurrence.ssd import mamba_functions
from support.models.tiny_families import families, tiny_family
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ligertune.attention.document_isolation import check_document_isolation, document_leak
from ligertune.data.batching.collate import collate_packed
from ligertune.data.examples import Example
from ligertune.errors import UserError
from ligertune.patching.mixers.kernel_mixers import KernelMixer
from ligertune.patching.mixers.mixer_functions import CONVOLUTION, OPS
from ligertune.patching.mixers.recognise_mixers import MixerSpec, is_mixer, op_of, recognise_mixer, state_carriers
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch, unpatch
from ligertune.patching.probe import Refusal

LENGTHS = (7, 40, 1, 33, 2, 1, 3)


def has_mixers(model_type: str) -> bool:
    """Return whether the family's file defines a convolution, and no recurrence that kernels do not have."""
    if model_type in LEFT_ALONE:
        return False
    folder = Path(transformers.__file__).parent / "models" / model_type.removesuffix("_text")
    code = "".join(file.read_text("utf-8") for file in folder.glob("modeling_*.py"))
    return "def causal_conv1d_fn" in code and not any(name in code for name in OTHER_RECURRENCES)


OTHER_RECURRENCES = ("def mamba_selective_scan",)
# families that do not pack, and what says so
LEFT_ALONE = {"inkling_text": "causal_conv1d_fn of its InklingShortConvolution gets no places of documents"}
# families that pack with eager attention alone, and what says so with another; Qwen4's sparse attention needs a mask
IN_EAGER = {
    "qwen4_exp_text": "takes no packed rows",
    "inkling2_text": "this model has attention sinks in its Inkling2FullAttention",
    "inkling2_loop_text": "this model has attention sinks in its Inkling2LoopFullAttention",
}
ROUNDS_MORE = ("bailing_hybrid",)  # gradients of a document alone are further than 1e-5 from float64
# experts in torch or routers, which take no float64
FLOAT32 = ("nemotron_h", "inkling2_text", "inkling2_loop_text")
IMAGE_TEXT = ("glm5_next",)  # vision-language models that `patch` takes and no recipe trains
FAMILIES = sorted(name for kind, name in families() if (kind == "causal" or name in IMAGE_TEXT) and has_mixers(name))


# the others have the code of one of these
FAST = {"qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "mamba2", "nemotron_h", "kimi_linear"}


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return a tiny model of the family, in float32 and with slow decay, as transformers computes it."""
    return tiny_family("image-text" if request.param in IMAGE_TEXT else "causal", request.param).eval()


def documents(model: PreTrainedModel) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randint(3, 100, (length,), generator=generator).numpy() for length in LENGTHS)
    return [Example(ids, ids, "") for ids in rows]


def attend_in_documents(model: PreTrainedModel) -> None:
    if model.config.model_type in IMAGE_TEXT:
        pytest.skip("no recipe trains the family")
    model.set_attn_implementation("eager" if model.config.model_type in IN_EAGER else "per_document")


def packed_logits(model: PreTrainedModel) -> torch.Tensor:
    batch = collate_packed(documents(model), pad_token_id=0)
    del batch["labels"]
    return model(**batch, use_cache=False).logits[0]


def test_families_are_found() -> None:
    assert set(FAMILIES) >= FAST


def test_a_patched_model_computes_the_same(model) -> None:
    plain = copy.deepcopy(model)
    report = patch(model, rope=False, norm=False, mlp=False, loss="torch")
    mixers = sum(isinstance(module, KernelMixer) for module in model.modules())
    rows = [row for row in report.rows if row.kernel in OPS]
    assert sum(row.applied for row in rows) == mixers > 0 and not any(row.left for row in rows)
    ids = torch.randint(3, 100, (2, 90), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0  # left padding
    losses = [
        m(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss for m in (model, plain)
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            largest = float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5 * largest + 1e-8)


def test_left_padding_does_not_enter_the_state(model) -> None:
    patch(model, loss="torch")
    ids = torch.randint(3, 100, (1, 30), generator=torch.Generator().manual_seed(2))
    padded = torch.cat((torch.full((1, 9), 5), ids), 1)
    mask = (torch.arange(39) >= 9).long()[None]
    positions = (torch.arange(39) - 9).clamp(min=0)[None]
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        behind = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 9:]
    torch.testing.assert_close(behind, alone, rtol=1e-4, atol=1e-5)


def logits_and_gradients(model: PreTrainedModel, compute: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the logits of all documents and the gradients of every parameter, by name."""
    shape = (sum(LENGTHS), model.config.get_text_config().vocab_size)
    grads = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    logits = compute()
    torch.autograd.backward(logits, grads.to(logits.dtype))
    return {"logits": logits, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def each_alone(model: PreTrainedModel) -> torch.Tensor:
    rows = [torch.tensor(example.input_ids)[None] for example in documents(model)]
    return torch.cat([model(input_ids=ids).logits[0] for ids in rows])


@pytest.mark.parametrize(
    "dtype, within", [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.float64, 1e-6)]
)
def test_a_packed_document_equals_itself_alone(dtype, within, model) -> None:
    """In float64, where only what the model rounds to float32 differs, and slowly in float32.

    In float32, packed and alone round in other orders. Where alone is further than 1e-5 from float64, as one gradient
    of Bailing-hybrid is (2.6e-5 of its largest number), packed may be as far from float64.
    """
    family = model.config.model_type
    if family in FLOAT32:
        dtype, within = torch.float32, 1e-5
    exact = copy.deepcopy(model).double() if dtype is torch.float32 and family in ROUNDS_MORE else None
    model.to(dtype)
    patch(model, loss="torch")
    attend_in_documents(model)
    install_packing_checks(model)
    packed = logits_and_gradients(model, lambda: packed_logits(model))
    alone = logits_and_gradients(model, lambda: each_alone(model))
    expected = alone
    if exact is not None:
        patch(exact, loss="torch")
        attend_in_documents(exact)
        expected = logits_and_gradients(exact, lambda: each_alone(exact))
    assert packed.keys() == expected.keys()
    for name, value in expected.items():
        rounding = float((alone[name] - value).detach().abs().max())
        atol = max(rounding, within * max(1.0, float(value.detach().abs().max())))
        torch.testing.assert_close(packed[name], value, rtol=within, atol=atol, check_dtype=False)
    assert document_leak(model, multiple_of=1) < within


def test_the_loss_of_one_short_document_has_the_gradients_of_it_alone(model) -> None:
    """Documents of 1 to 3 tokens, one by one, relative to the largest gradient of each parameter.

    In float64: in float32 such a gradient has few terms, and transformers' own is up to 3e-4 from float64.
    """
    if model.config.model_type in FLOAT32:
        pytest.skip("the family takes no float64")
    model.double()
    patch(model, loss="torch")
    attend_in_documents(model)
    install_packing_checks(model)
    packed = packed_logits(model)
    grads = torch.randn(packed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    start = 0
    for example, length in zip(documents(model), LENGTHS, strict=True):
        own = slice(start, start + length)
        start += length
        if length > 3:
            continue
        alone = model(input_ids=torch.tensor(example.input_ids)[None]).logits[0]
        of_packed = torch.autograd.grad(packed[own], parameters, grads[own], retain_graph=True, allow_unused=True)
        of_alone = torch.autograd.grad(alone, parameters, grads[own], allow_unused=True)
        for parameter, ours, theirs in zip(parameters, of_packed, of_alone, strict=True):
            ours, theirs = (torch.zeros_like(parameter) if one is None else one for one in (ours, theirs))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=max(1e-12, 5e-5 * float(theirs.abs().max())))


@pytest.mark.parametrize("model_type, why", [*LEFT_ALONE.items(), *IN_EAGER.items()])
def test_a_model_whose_layers_cannot_keep_documents_apart_is_refused(model_type, why) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    model = tiny_family("causal", model_type).eval()
    patch(model, loss="torch")
    model.set_attn_implementation("per_document")
    install_packing_checks(model)
    with pytest.raises(UserError, match=why):
        check_document_isolation(model, multiple_of=1)


@pytest.mark.parametrize("function", OPS)
def test_a_leak_is_found_before_training(function, model, monkeypatch) -> None:
    """Each op once without the places of documents, from freshly initialised decays."""
    if not any(function in (CONVOLUTION, op_of(module)) for module in model.modules() if is_mixer(module)):
        pytest.skip("the family has no such recurrence")
    module = {"ssd": mamba_functions, "kda": kda_functions}.get(function, package_functions)
    original = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *args, documents, **options: original(*args, **options))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.constant_(parameter, math.log(16))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    patch(model, loss="torch")
    attend_in_documents(model)
    install_packing_checks(model)
    with pytest.raises(UserError, match="documents of a packed row see each other"):
        check_document_isolation(model, multiple_of=1)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_generation_with_a_cache_gives_the_same_tokens(model) -> None:
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(3))
    answers = []
    for _ in range(2):
        answers.append(model.generate(ids, max_new_tokens=12, do_sample=False))
        patch(model, loss="torch")
    assert torch.equal(*answers)
    unpatch(model)
    assert not any(isinstance(module, KernelMixer) for module in model.modules())


CACHES = ("cache", "past_key_values", "cache_params")  # their names in versions and families


def in_parts(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a prompt in two parts and one token, with a cache; no part is a multiple of a chunk."""
    logits, cache = [], {}
    with torch.no_grad():
        for part in ids.split((70, 12, 1), 1):
            output = model(input_ids=part, use_cache=True, **cache)
            cache = {name: output[name] for name in CACHES if output.get(name) is not None}
            logits.append(output.logits)
    return torch.cat(logits, 1)


def test_a_prompt_in_parts_goes_through_the_cache_as_without_kernels(model) -> None:
    """As without, not as a whole: Bamba of transformers 5.24 itself has other logits in the second part."""
    ids = torch.randint(3, 100, (2, 83), generator=torch.Generator().manual_seed(7))
    expected = in_parts(model, ids)
    patch(model, loss="torch")
    torch.testing.assert_close(in_parts(model, ids), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("hidden_act", "gelu", "its activation is gelu; kernels have silu"),
        ("linear_conv_kernel_dim", 9, "its convolution has 9 taps; kernels have 2 to 8"),
    ],
)
def test_a_mixer_with_another_convolution_stays_transformers(key, value, why) -> None:
    config = tiny_family("causal", "qwen3_5_text").config
    setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    mixers = [module for module in model.modules() if is_mixer(module)]
    assert mixers and {recognise_mixer(mixer) for mixer in mixers} == {Refusal(why)}
    ids = torch.randint(3, 100, (1, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        patch(model, loss="torch")
        torch.testing.assert_close(model(input_ids=ids).logits, plain, rtol=1e-4, atol=1e-5)
    assert len(state_carriers(model)) == len(mixers)


def torch_chunk_gated_delta_rule(query, key, value, g, beta, **kwargs):
    """Compute something else under the name of the rule."""
    return value * beta[..., None], None


class OtherMixer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])[0]


def torch_causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    """Compute the convolution, and leave the state to the caller."""
    return causal_conv1d_step_reference(hidden_states, conv_state.clone(), weight, bias, activation=activation)


class UpdatingMixer(nn.Module):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch_causal_conv1d_update(x, state, x[0])


def rule(query, key, value, g, beta, **options):
    """Return the gated delta rule under the arguments of packages."""
    return package_functions.chunk_gated_delta_rule(query, key, value, g, beta, **options)


def heads_in_turns(query, key, value, g, beta, **options):
    """Give value head 2 key head 0, where ours has key head 1."""
    repeats = value.shape[2] // key.shape[2]
    return rule(query.repeat(1, 1, repeats, 1), key.repeat(1, 1, repeats, 1), value, g, beta, **options)


def bounded_decay(query, key, value, g, beta, **options):
    return rule(query, key, value, g.clamp(min=-5), beta, **options)


def reversed_rule(query, key, value, g, beta, reverse=False, **options):
    return rule(query, key, value, g, beta, **options)


@functools.wraps(rule)
def doubled(*args, **options):
    out, state = rule(*args, **options)
    return 2 * out, state


@functools.wraps(rule)
def counted(*args, **options):
    return rule(*args, **options)


@pytest.mark.parametrize(
    "function, why",
    [
        (heads_in_turns, "it shares keys among value heads in another way"),
        (bounded_decay, "it computes another recurrence"),
        (reversed_rule, "it takes reverse, which kernels do not have"),
        (doubled, "it computes another recurrence"),
        (counted, None),
    ],
)
def test_a_rule_that_differs_where_it_can_is_left_alone(function, why, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "torch_chunk_gated_delta_rule", function)
    found = recognise_mixer(OtherMixer())
    assert isinstance(found, MixerSpec) if why is None else found == Refusal(f"torch_chunk_gated_delta_rule: {why}")


def test_a_function_that_does_not_move_its_state_is_left_alone() -> None:
    found = recognise_mixer(UpdatingMixer())
    assert found == Refusal("torch_causal_conv1d_update: it computes another convolution")


def test_a_function_that_computes_something_else_is_left_alone() -> None:
    found = recognise_mixer(OtherMixer())
    assert found == Refusal("torch_chunk_gated_delta_rule: it computes another recurrence")
