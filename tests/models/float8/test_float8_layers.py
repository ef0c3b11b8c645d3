"""Float8 linear layers: which ones are converted, on which machines, and that they train like the original ones."""

import copy
import dataclasses
from importlib.util import find_spec

import pytest
import torch
import transformers
from support.models import tiny_models
from torch import nn

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.attention.choice import ATTENTIONS
from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.models.float8.float8_layers import MULTIPLE_OF, float8_linears, to_float8, to_torchao_float8
from ligertune.patching.mlps.kernel_mlps import gives_new_unseen_output
from ligertune.patching.patch import patch
from ligertune.planning.precision import check_float8, float8_notes
from ligertune.recipe import Recipe

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install torchao")
CONVERSIONS = [to_float8, pytest.param(to_torchao_float8, marks=needs_torchao)]
each_conversion = pytest.mark.parametrize("convert", CONVERSIONS, ids=["ours", "torchao"])
BATCH = tiny_models.batch(rows=2, length=MULTIPLE_OF)
H100 = Machine(
    vendor="nvidia", device="cuda", name="NVIDIA H100", arch="sm90", device_count=1, memory_bytes=80 << 30,
    has_bfloat16=True, peak_flops=None, peak_bandwidth=None, world_size=1, torch_version="2.11",
)  # fmt: skip
# Allowed errors of one step at width 64, which averages fewer roundings than a real model.
LOSS, GRADIENT = 5e-3, 0.45  # measured over the families: 2.8e-3, and 0.39 of the worst parameter's norm


def recipe(**train: object) -> Recipe:
    needed = {"model": {"model_name_or_path": "m"}, "data": {"datasets": [{"path": "d"}]}}
    return Recipe.model_validate({**needed, "checkpoint": {"output_dir": "o"}, "train": train})


def train_once(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**BATCH).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a parameter's gradient, relative to the gradient's norm."""
    assert found.keys() == expected.keys() and found
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


# ---- which layers

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("llama", (14, 0, "")),
        ("phi3", (8, 0, "")),  # packed projections
        ("mixtral", (8, 2, "2 MixtralExperts: its experts are no linear layers")),
    ],
)
def test_linear_layers_are_converted_and_the_head_is_not(family, counts):
    found = float8_linears(tiny_models.make(family))
    assert found.counts() == counts
    assert all(name.startswith("model.layers.") for name in found.taken)


def test_a_router_is_not_converted():
    config = transformers.AfmoeConfig(**SIZES, num_experts=16, num_dense_layers=0, head_dim=16)
    with torch.device("meta"):
        found = float8_linears(transformers.AutoModelForCausalLM.from_config(config))
    assert found.left["gate: chooses experts"] == 2
    assert not any("router" in name for name in found.taken)


def test_sizes_that_float8_cannot_multiply_are_skipped_and_reported():
    config = tiny_models.config_of("llama", intermediate_size=100)
    with torch.device("meta"):
        found = float8_linears(transformers.AutoModelForCausalLM.from_config(config))
    assert found.counts()[:2] == (8, 6)
    assert "2 down_proj: 100 x 64, not multiples of 16" in found.counts()[2]


def test_a_model_without_convertible_layers_is_refused():
    config = tiny_models.config_of("llama", hidden_size=24, num_attention_heads=1, num_key_value_heads=1)
    with torch.device("meta"), pytest.raises(UserError, match="no linear layer of this LlamaForCausalLM"):
        float8_linears(transformers.AutoModelForCausalLM.from_config(config))


def test_the_vision_tower_is_not_converted():
    text = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(
            transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
        )
    found = float8_linears(model)
    assert len(found.taken) == 14 and not any("visual" in name for name in found.taken)


def test_batches_are_padded_to_a_multiple_that_float8_multiplies():
    """The weight's gradient is a product over tokens, and batches are padded to the attention's multiple."""
    assert all(row.multiple_of % MULTIPLE_OF == 0 for row in ATTENTIONS)


# ---- which machines


@pytest.mark.parametrize(
    ("vendor", "arch", "refused"),
    [
        ("nvidia", "sm80", True), ("nvidia", "sm86", True), ("nvidia", "sm89", False), ("nvidia", "sm90", False),
        ("nvidia", "sm100", False), ("amd", "gfx90a", True), ("amd", "gfx942", False), ("amd", "gfx1100", True),
        ("amd", "gfx1151", True), ("amd", "gfx950", False), ("amd", "gfx1201", False), ("cpu", "x86_64", False),
    ],
)  # fmt: skip
def test_gpus_without_float8_are_refused(vendor, arch, refused):
    machine = dataclasses.replace(H100, vendor=vendor, arch=arch)
    check_float8(recipe(), machine)
    if refused:
        with pytest.raises(UserError, match=rf"train.fp8: NVIDIA H100 \({arch}\) does not multiply in float8"):
            check_float8(recipe(fp8=True), machine)
    else:
        check_float8(recipe(fp8="torchao"), machine)


def test_our_kernels_are_refused_where_float8_has_another_bias():
    machine = dataclasses.replace(H100, vendor="amd", arch="gfx942")
    with pytest.raises(UserError, match=r"train\.fp8: true: our kernels do not write the float8 of NVIDIA H100"):
        check_float8(recipe(fp8=True), machine)
    for arch in ("gfx950", "gfx1201"):  # e4m3fn, as NVIDIA's
        check_float8(recipe(fp8=True), dataclasses.replace(machine, arch=arch))


def test_the_plan_notes_when_float8_does_not_pay():
    fast = [recipe(), recipe(fp8=True), recipe(fp8="torchao", torch_compile=True)]
    assert [float8_notes(each, H100) for each in fast] == [()] * 3
    assert "without train.torch_compile" in float8_notes(recipe(fp8="torchao"), H100)[0]
    on_cpu = dataclasses.replace(H100, vendor="cpu")
    assert all("emulated" in float8_notes(each, on_cpu)[0] for each in fast[1:])


# ---- training, emulated


@each_conversion
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_step_is_close_to_the_unquantised_one_and_equal_without_our_kernels(family, convert):
    exact = tiny_models.make(family)
    patched, plain = copy.deepcopy(exact), copy.deepcopy(exact)
    patch(patched)
    convert(patched)
    convert(plain)
    truth, (loss, gradients), (plain_loss, plain_gradients) = map(train_once, (exact, patched, plain))
    assert 1e-5 < abs(float(loss / truth[0]) - 1) < LOSS
    assert largest_error(gradients, truth[1]) < GRADIENT
    # Everything between the products differs by fp32 rounding only, which moves no value to another float8.
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-5)
    assert largest_error(gradients, plain_gradients) < 1e-4


@each_conversion
def test_weights_and_their_names_stay_the_same(convert):
    model = tiny_models.make("qwen2")  # with biases
    before, weights = list(model.state_dict()), {name: p.data_ptr() for name, p in model.named_parameters()}
    convert(model)
    assert list(model.state_dict()) == before
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is not nn.Linear


@each_conversion
def test_no_kernel_overwrites_the_output_of_a_float8_layer(convert):
    """Only plain nn.Linear layers are known not to save their outputs for the backward."""
    model = tiny_models.make("llama")
    patch(model)
    mlp = model.model.layers[0].mlp
    x = torch.ones(mlp.gate_proj.in_features)
    assert all(gives_new_unseen_output(layer, x) for layer in (mlp.gate_proj, mlp.up_proj))
    convert(model)
    assert not any(gives_new_unseen_output(layer, x) for layer in (mlp.gate_proj, mlp.up_proj))


@each_conversion
def test_checkpointed_layers_give_the_same_gradients(convert):
    kept = tiny_models.make("llama")
    convert(kept)
    again = copy.deepcopy(kept)
    checkpoint_layers(again)
    one, other = train_once(kept), train_once(again)
    assert torch.equal(one[0], other[0])
    assert largest_error(other[1], one[1]) == 0
