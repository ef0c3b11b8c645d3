"""Norm outputs and gated products recomputed in the backward: the same bits, and no memory in between.

The reference path has no in-place backward. On a machine without a GPU tests/kernels/test_under_interpreter.py runs
some tests once more, with the kernels.
"""

import copy
import pickle

import pytest
import torch
import transformers
from support.models import tiny_models
from support.rerun_interpreted import DEVICE, RUNS_TRITON
from support.storages import MadeStorages
from torch import nn

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.attention.torch_attention import deterministic_backward
from ligertune.models.trainable import apply_method
from ligertune.patching.mlps.kernel_mlps import gives_new_unseen_output
from ligertune.patching.patch import patch, unpatch
from ligertune.patching.recompute import mark_recomputable, recompute_inputs
from ligertune.planning.options import MethodOptions

FAMILIES = ("llama", "qwen2", "gemma2", "phi3")  # plain; with biases; offset norms and GeGLU; packed projections
ROWS, LENGTH = 2, 6  # 12 tokens: the interpreter is slow
BATCH = tiny_models.batch(rows=ROWS, length=LENGTH, device=DEVICE)
HIDDEN, MLP, LAYERS, FP32 = 64, 96, 2, 4
# of each layer the outputs of both norms and the gated product are freed
SAVED = LAYERS * ROWS * LENGTH * (2 * HIDDEN + MLP) * FP32


def pair(
    family: str = "llama", method: str = "full", *, how: str | bool = True, **spec: object
) -> tuple[nn.Module, nn.Module]:
    """Return the same model patched without and with `recompute`."""
    made = []
    for recompute in (False, how):
        model = tiny_models.make(family).to(DEVICE)
        patch(model, recompute=recompute)
        made.append(apply_method(model, MethodOptions(type=method, **spec)).train())
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backward(loss: torch.Tensor, **options: object) -> None:
    """Run a backward in which attention adds in one order on a GPU, too."""
    with deterministic_backward(DEVICE == "cuda"):
        loss.backward(**options)


def train_once(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**BATCH).loss
    backward(loss)
    return loss.detach(), gradients(model)


def assert_equal(one, other) -> None:
    """To the bit: (loss, gradients by name)."""
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys() and one[1]
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


def kept_by(model: nn.Module) -> int:
    """Return the bytes made by the forward of one batch that are alive before its backward."""
    with MadeStorages(model) as made:
        loss = model(**BATCH).loss
    kept = made.alive()
    loss.backward()
    return kept


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_bit_is_as_without(family):
    """Also norms of heads and after the MLP, experts, one norm for attention and MLP, and unknown norms."""
    plain, recomputed = pair(family)
    assert_equal(train_once(plain), train_once(recomputed))


@pytest.mark.parametrize(
    "config",
    [
        # An eps that no default hides: layer_norm's own is 1e-5.
        transformers.PhiConfig(**tiny_models.BASE, layer_norm_eps=0.1),
        transformers.MptConfig(
            vocab_size=tiny_models.VOCAB, d_model=HIDDEN, n_heads=4, n_layers=LAYERS, layer_norm_epsilon=0.1
        ),
    ],
    ids=["with a bias", "without"],
)
def test_layer_norms_are_recomputed(config):
    plain = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)
    recomputed = copy.deepcopy(plain)
    patch(plain)
    rows = {row.kernel: row.applied for row in patch(recomputed, recompute=True).rows}
    assert rows["recompute"] == rows["layer_norm"] > LAYERS
    assert kept_by(recomputed) <= kept_by(plain) - LAYERS * ROWS * LENGTH * HIDDEN * FP32
    assert_equal(train_once(plain), train_once(recomputed))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_under_autocast(family, weights):
    plain, recomputed = (model.to(weights) for model in pair(family))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_equal(train_once(plain), train_once(recomputed))


PRODUCTS = LAYERS * ROWS * LENGTH * MLP * FP32


@pytest.mark.parametrize(("how", "saved"), [(True, SAVED), ("norms", SAVED - PRODUCTS), ("mlps", PRODUCTS)])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_freed_after_the_forward(family, how, saved):
    plain, recomputed = pair(family, how=how)
    assert kept_by(plain) - kept_by(recomputed) == saved
    assert_equal(train_once(plain), train_once(recomputed))


def test_outputs_that_an_adapter_reads_are_freed():
    """Except that of the first norm: no gradient goes through it, so it keeps no sources."""
    plain, recomputed = pair(method="lora", lora_r=4)
    assert kept_by(plain) - kept_by(recomputed) == SAVED - ROWS * LENGTH * HIDDEN * FP32
    assert_equal(train_once(plain), train_once(recomputed))


def test_casts_are_freed_under_autocast():
    """q, k, v, gate and up save one cast each. The reference also keeps wide copies of gate and up."""
    plain, recomputed = pair()
    wide = 0 if RUNS_TRITON else 2 * MLP
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kept_by(plain) - kept_by(recomputed) == LAYERS * ROWS * LENGTH * (5 * HIDDEN + MLP - wide) * 2


def test_nothing_stays_after_the_backward():
    left = []
    for model in pair():
        with MadeStorages(model) as made:
            loss = model(**BATCH).loss
            loss.backward()
            model.zero_grad()
            del loss
        left.append(made.alive())
    assert left[1] == left[0] < 100  # transformers 5.17 itself keeps one small tensor


def test_one_recomputation_serves_all_readers():
    """Several layers read one output: it is recomputed once in each backward."""
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return 2 * x

    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    recompute_inputs(layers)
    x = torch.randn(2, 3, requires_grad=True)
    y = mark_recomputable(2 * x, double, x)
    total = sum(layer(y) for layer in layers).sum()
    for expected in (1, 2):
        total.backward(retain_graph=True)
        assert len(calls) == expected
    torch.testing.assert_close(layers[0].weight.grad, 2 * (2 * x).sum(0).expand(3, 3))


def test_an_output_that_was_written_over_is_kept_as_it_is():
    layer = nn.Linear(3, 3)
    recompute_inputs(nn.ModuleList([layer]))
    x = torch.randn(2, 3, requires_grad=True)
    y = mark_recomputable(2 * x, lambda x: 2 * x, x).mul_(5)
    layer(y).sum().backward()
    torch.testing.assert_close(layer.weight.grad, (10 * x).sum(0).expand(3, 3))


@pytest.mark.parametrize("written", ["source", "weight"])
def test_sources_must_not_be_written_over(written):
    layer = nn.Linear(3, 3)
    recompute_inputs(nn.ModuleList([layer]))
    x = torch.randn(2, 3, requires_grad=True)
    loss = layer(mark_recomputable(2 * x, lambda x: 2 * x, x)).sum()
    with torch.no_grad():
        (x if written == "source" else layer.weight).mul_(2)
    with pytest.raises(RuntimeError, match="has been written over since the forward"):
        loss.backward()


def test_two_backwards_through_one_graph():
    """With in-place kernels the second is refused as before; else it gives the same once more."""
    found = []
    for model in pair():
        loss = model(**BATCH).loss
        backward(loss, retain_graph=True)
        first = gradients(model)
        if RUNS_TRITON:
            with pytest.raises(RuntimeError, match="run the forward again"):
                backward(loss)
            found.append((loss, first))
        else:
            backward(loss)
            found.append((loss, gradients(model)))
            assert not torch.equal(first["model.norm.weight"], found[-1][1]["model.norm.weight"])
    assert_equal(*found)


def test_gradients_of_some_inputs_alone():
    """A recomputation that one backward left unread is right for the next backward."""
    found = []
    for model in pair():
        loss = model(**BATCH).loss
        weight = model.model.layers[0].self_attn.q_proj.weight
        with deterministic_backward(DEVICE == "cuda"):
            (alone,) = torch.autograd.grad(loss, [weight], retain_graph=not RUNS_TRITON)
        if not RUNS_TRITON:
            backward(loss)
        found.append((alone, gradients(model) | {"alone": alone}))
    assert_equal(*found)


def test_micro_batches_accumulate():
    found = []
    for model in pair():
        losses = [model(**tiny_models.batch(length=LENGTH, seed=seed, device=DEVICE)).loss for seed in (1, 2)]
        backward(sum(losses))  # both graphs alive at once
        backward(model(**BATCH).loss)
        found.append((losses[1].detach(), gradients(model)))
    assert_equal(*found)


@pytest.mark.parametrize("kind", [True, "offload"])
def test_under_checkpointing_nothing_is_recomputed(kind):
    plain, recomputed = pair()
    for model in (plain, recomputed):
        checkpoint_layers(model, kind)
    assert_equal(train_once(plain), train_once(recomputed))
    assert kept_by(plain) == kept_by(recomputed)


@pytest.mark.parametrize(
    "spec", [{}, {"lora_dropout": 0.5}, {"use_dora": True}, {"lora_target_modules": ["q_proj", "down_proj"]}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_adapters(family, spec):
    if family == "phi3" and "lora_target_modules" in spec:
        spec = {"lora_target_modules": ["qkv_proj", "down_proj"]}
    plain, recomputed = pair(family, method="lora", lora_r=4, **spec)
    found = []
    for model in (plain, recomputed):
        torch.manual_seed(0)  # of the dropout
        found.append(train_once(model))
    assert_equal(*found)


def test_evaluation_and_generation_mark_nothing():
    _, model = pair()
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(vars(args[0]).copy()))
    with torch.no_grad():
        model(**BATCH)
    assert seen == [{}]


def test_the_head_and_other_models_are_left_alone():
    other = tiny_models.make("llama")
    model = tiny_models.make("llama")
    rows = {row.kernel: row.applied for row in patch(model, loss="torch", recompute=True).rows}
    assert rows["recompute"] == 2 * LAYERS + 1 + LAYERS
    assert type(model.lm_head) is nn.Linear
    assert type(other.model.layers[0].mlp.down_proj) is nn.Linear
    assert all(type(m) is not nn.Linear for m in model.model.modules())


def test_linear_layers_that_recompute_their_input_may_still_be_overwritten():
    _, model = pair()
    attention = model.model.layers[0].self_attn
    projections, x = (attention.q_proj, attention.k_proj), torch.ones(attention.q_proj.in_features)
    assert all(gives_new_unseen_output(one, x) for one in projections)
    attention.q_proj.register_forward_hook(lambda *_: None)
    nn.utils.parametrizations.weight_norm(attention.k_proj)
    assert not any(gives_new_unseen_output(one, x) for one in projections)


def test_unpatch_restores_and_copies_stay_patched():
    plain = tiny_models.make("llama")
    before = {name: type(module) for name, module in plain.named_modules()}
    model = copy.deepcopy(plain)
    patch(model, recompute=True)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model]
    assert len({tuple(type(module) for module in one.modules()) for one in copies}) == 1
    unpatch(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_patching_again_changes_nothing_and_another_recompute_needs_unpatch():
    model = tiny_models.make("llama")
    first, again = (patch(model, recompute=True) for _ in range(2))
    assert [row.applied for row in first.rows] == [row.applied for row in again.rows]
    with pytest.raises(ValueError, match="unpatch the model first"):
        patch(model)
    unpatch(model)
    patch(model)
    with pytest.raises(ValueError, match="unpatch the model first"):
        patch(model, recompute=True)
