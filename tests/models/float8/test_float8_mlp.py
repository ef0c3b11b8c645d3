"""Gated MLPs of float8 layers: the bits of the layers alone, which MLPs are taken, and the plan's line."""

import copy

import peft
import pytest
import torch
from support.models import tiny_models
from torch import Tensor, nn

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.models.float8.float8_layers import float8_linears, to_float8
from ligertune.models.float8.float8_linear import hold_frozen_weights, scales_of
from ligertune.models.float8.float8_mlp import Float8MLP, float8_mlps
from ligertune.patching.mlps.kernel_mlps import KernelMLP
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.patch import patch, unpatch

STEPS = 3  # the first has no history of scales


def models(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, nn.Module]:
    """Return a model with float8 MLPs, and one whose MLPs call float8 layers one after the other."""
    fused = tiny_models.make("llama").to(dtype)
    patch(fused)
    to_float8(fused)
    separate = copy.deepcopy(fused)
    separate_scales = scales_of(separate)
    for module in separate.modules():
        if isinstance(module, Float8MLP):
            spec = module.patch_spec
            unpatch_module(module)
            patch_module(module, KernelMLP, spec)
    assert separate_scales is not scales_of(fused)
    return fused, separate


def train(model: nn.Module, *, micro_batches: int = 1) -> list[Tensor]:
    """Return the losses and gradients of STEPS steps, the scales after them, and the loss of an evaluation."""
    found = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            loss = model(**tiny_models.batch(rows=2, length=16, seed=10 * step + micro_batch)).loss
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(model(**tiny_models.batch(rows=1, length=7)).loss)
        model.train()
        scales_of(model).update(lambda amax: amax)
    return [*found, scales_of(model).history]


def fused_mlps(model: nn.Module) -> int:
    """Return how many MLPs compute with SwiGLU's float8 kernels."""
    names = []
    mlps = [module for module in model.modules() if isinstance(module, KernelMLP)]
    hooks = [mlp.register_forward_hook(lambda mlp, args, y: names.append(y.grad_fn.name())) for mlp in mlps]
    model(**tiny_models.batch(rows=2, length=16))
    for hook in hooks:
        hook.remove()
    assert len(names) == len(mlps) == 2
    return sum("Float8MLP" in name for name in names)


@pytest.mark.parametrize("how", ["plain", "checkpointed, two micro-batches", "frozen"])
def test_losses_gradients_and_scales_are_those_of_the_layers_alone(how):
    both = models(torch.float32 if how == "plain" else torch.bfloat16)
    if how.startswith("checkpointed"):
        for model in both:
            checkpoint_layers(model)
    if how == "frozen":  # adapters on the attention alone
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        both = [(torch.manual_seed(1), peft.get_peft_model(model, config))[1] for model in both]
        assert [hold_frozen_weights(model) for model in both] == [14, 14]
    found, expected = (train(model, micro_batches=1 + how.startswith("checkpointed")) for model in both)
    assert [fused_mlps(model) for model in both] == [2, 0]
    assert len(found) == len(expected) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_mlp_with_adapters_or_hooks_calls_its_layers():
    fused, separate = models()
    seen = []
    for model in (fused, separate):
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: seen.append(True))
    found, expected = train(fused), train(separate)
    assert len(seen) == 4 * STEPS and [fused_mlps(model) for model in (fused, separate)] == [1, 0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    adapted = peft.get_peft_model(fused, peft.LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False))
    assert fused_mlps(adapted) == 0


def test_the_product_of_gate_and_up_is_not_saved():
    fused, _ = models()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    y = fused.model.layers[0].mlp(x)
    float8_input, scale = (64, 32), ()
    assert [(tuple(t.shape), t.element_size()) for t in y.grad_fn.saved_tensors] == [
        ((32, 96), 2), ((32, 96), 2), (float8_input, 1), (scale, 4),
    ]  # fmt: skip


def test_unpatched_mlps_are_the_original_ones():
    fused, _ = models()
    unpatch(fused)
    assert not any(isinstance(module, KernelMLP) for module in fused.modules())


@pytest.mark.parametrize(
    ("family", "changes", "line"),
    [
        ("llama", {}, (2, 0, "")),
        ("llama", {"mlp_bias": True}, (0, 2, "2 LlamaMLP: a projection has a bias")),
        ("llama", {"intermediate_size": 100}, (0, 2, "2 LlamaMLP: a projection is not in float8")),
        ("gemma", {}, (0, 2, "2 GemmaMLP: not down(silu(gate) * up)")),
        ("phi3", {}, (0, 2, "2 Phi3MLP: one layer computes gate and up")),
        ("mixtral", {}, (0, 0, "none found")),
    ],
)
def test_the_plan_counts_the_mlps_and_says_why_others_are_left(family, changes, line):
    model = tiny_models.make(family, **changes)
    patch(model)
    found = float8_mlps(model, float8_linears(model).taken)
    assert (found.line().applied, found.line().left, found.line().note) == line
    if line[0]:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["gate_proj"]))
        assert (found.line().applied, found.line().note) == (0, "2 an adapter adds to its products")
