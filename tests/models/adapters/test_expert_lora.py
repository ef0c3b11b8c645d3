"""LoRA of experts in split form computes what PEFT's ParamWrapper does, in every layout of the weights."""

import copy

import pytest
import torch
from ligertune_kernels.ops.moe.experts import ExpertLayout, GatedActivation, experts
from peft.tuners.lora.layer import ParamWrapper
from tiny_families import tiny_family
from torch import nn

from ligertune.models.adapters.expert_lora import expert_adapters, merge_parameters
from ligertune.models.trainable import apply_method
from ligertune.planning.options import MethodOptions

X, E, K, N = 4, 64, 2, 13
LAYOUTS = {
    "mixtral": ({}, ExpertLayout()),
    "gpt_oss": (
        {"activation": GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)},
        ExpertLayout(transposed=True, interleaved=True),
    ),
}


def wrapped_experts(family: str) -> ParamWrapper:
    """Return the experts of a tiny model with random adapters, as PEFT wraps them."""
    model = apply_method(tiny_family("causal", family), MethodOptions(type="lora", lora_r=3))
    randomise(model)
    return model.base_model.model.model.layers[0].mlp.experts


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    """Return expert indices and weights (N, K); expert 1 gets no token."""
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(X - 1, generator=generator)[:K] for _ in range(N)])
    return torch.where(index == 1, 3, index), torch.rand(N, K, generator=generator)


def outcome(outer: ParamWrapper, call) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of every A and B."""
    x = torch.randn(N, E, generator=torch.Generator().manual_seed(2)).requires_grad_()
    outer.zero_grad()
    y = call(x, *routing())
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in outer.parameters() if p.requires_grad)]


def split(outer: ParamWrapper, options: dict, layout: ExpertLayout):
    base = outer.get_base_layer()

    def call(x, index, weights):
        return experts(
            x, index, weights, base.gate_up_proj, base.down_proj,
            getattr(base, "gate_up_proj_bias", None), getattr(base, "down_proj_bias", None),
            layout=layout, **options, **expert_adapters(outer, transposed=layout.transposed),
        )  # fmt: skip

    return call


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("family", LAYOUTS)
def test_output_and_gradients_equal_pefts(family):
    outer = wrapped_experts(family)
    expected = outcome(outer, lambda *args: ParamWrapper.forward(outer, *args))
    assert len(expected) == 6  # A and B of two weights
    assert_near(outcome(outer, split(outer, *LAYOUTS[family])), expected)


def test_weights_that_peft_takes_the_other_way_round():
    """Without `is_transposed` (Llama 4) PEFT takes the outputs of transposed weights for their inputs."""
    outer = wrapped_experts("gpt_oss")
    base = outer.get_base_layer()
    del base.is_transposed
    for wrapper in (outer, outer.base_layer):
        wrapper.in_features, wrapper.out_features = wrapper.out_features, wrapper.in_features
        a, b = wrapper.lora_A["default"], wrapper.lora_B["default"]
        a.weight.data, b.weight.data = (
            torch.randn(a.weight.shape[0], b.weight.shape[0]) / 8, torch.randn(a.weight.shape[1], b.weight.shape[1]) / 8
        )  # fmt: skip
        wrapper._did_swap_in_out_features = True
    delta = outer.get_delta_weight("default")  # (X, F, E)
    a, b, scale = expert_adapters(outer, transposed=True)["down_lora"]
    torch.testing.assert_close(scale * (b @ a).transpose(1, 2), delta)


@pytest.mark.parametrize("family", LAYOUTS)
def test_merging_equals_pefts_in_float32_and_rounds_once_in_bfloat16(family):
    outer = wrapped_experts(family)
    exact = copy.deepcopy(outer)
    exact.merge()
    exact.base_layer.merge()
    merge_parameters(outer)
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(getattr(outer.get_base_layer(), name), getattr(exact.get_base_layer(), name))
    assert outer.merged and outer.base_layer.merged
    narrow = wrapped_experts(family)
    narrow.get_base_layer().to(torch.bfloat16)
    wide = copy.deepcopy(narrow)
    wide.get_base_layer().float()
    for wrapper in (narrow, wide):
        merge_parameters(wrapper)
    for name in ("gate_up_proj", "down_proj"):
        once = getattr(wide.get_base_layer(), name).bfloat16()
        assert torch.equal(getattr(narrow.get_base_layer(), name), once)


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
