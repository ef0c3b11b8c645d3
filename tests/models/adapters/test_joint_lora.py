"""LoRA layers that share their input compute together, with the results of each alone, and only where they share it."""

import copy
import gc

import pytest
import torch
from support.models import tiny_models
from torch import nn

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.models.trainable import apply_method
from ligertune.patching.lora import joint_lora
from ligertune.patching.lora.fused_lora import fuse_adapters
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions


@pytest.fixture
def sizes(monkeypatch):
    """The number of layers that each call computes."""
    found, update = [], joint_lora.joint_update
    monkeypatch.setattr(joint_lora, "joint_update", lambda x, layers: found.append(len(layers)) or update(x, layers))
    return found


def adapted(family: str = "llama", *, joint: bool, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    model = tiny_models.make(family).to(dtype)
    patch(model)
    model = apply_method(model, MethodOptions(type="lora", lora_r=4, **changes), seed=1, fused=True).train()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    if not joint:
        for module in model.modules():
            joint_lora._SIBLINGS_OF.pop(module, None)
    return model


def passes(model: nn.Module, count: int = 2) -> list[torch.Tensor]:
    """Return losses and gradients of a few passes."""
    losses = []
    for _ in range(count):
        loss = model(**tiny_models.batch(), use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family, scale_of_k", [("llama", 2.0), ("qwen2", 0.3), ("gemma2", 2.0)])
def test_layers_that_share_their_input_have_the_gradients_of_each_alone(family, scale_of_k, checkpointed, sizes):
    found = []
    for joint in (False, True):
        model = adapted(family, joint=joint)
        for name, module in model.named_modules():
            if name.endswith("k_proj"):
                module.scaling["default"] = scale_of_k
        if checkpointed:
            checkpoint_layers(model.get_base_model(), True)
        found.append(passes(model))
        assert sizes.count(3) == sizes.count(2) == (2 * 2 * (1 + checkpointed) if joint else 0)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ["qkv", "vkq", "qqkvv"])
def test_each_layer_answers_for_the_tensor_that_it_gets(order, sizes):
    """Calls in any order, with the same tensor or with another one."""
    block = next(module for module in adapted(joint=True).modules() if hasattr(module, "q_proj"))
    alone = copy.deepcopy(block)
    x, other = (torch.randn(2, 3, block.q_proj.base_layer.in_features, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for tensors in ([x], [x, other], [other, other, x], [x]):
            for i, name in enumerate(order):
                layer, tensor = f"{name}_proj", tensors[i % len(tensors)]
                torch.testing.assert_close(getattr(block, layer)(tensor), getattr(alone, layer)(tensor))
    assert 3 in sizes


def test_a_layer_computes_alone_once_a_sibling_is_gone(sizes):
    block = next(module for module in adapted(joint=True).modules() if hasattr(module, "q_proj"))
    alone = copy.deepcopy(block)
    x = torch.randn(2, 3, block.q_proj.base_layer.in_features, dtype=torch.float64)
    block.k_proj = nn.Identity()
    gc.collect()
    with torch.no_grad():
        torch.testing.assert_close(block.q_proj(x), alone.q_proj(x))
    assert 3 not in sizes


def test_the_layers_of_cross_attention_are_not_joined():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, hidden_states, key_value_states=None):
            return hidden_states

    class SelfAttention(Attention):
        def forward(self, hidden_states, attention_mask=None):
            return hidden_states

    found = []
    for cls in (Attention, SelfAttention):
        module = cls()
        joint_lora.join_siblings(module, nn.Linear)
        found.append(joint_lora.siblings_of(module.q_proj) is not None)
    assert found == [False, True]


def test_an_output_that_nobody_uses_has_no_gradient():
    first, second = (
        joint_lora.LoraTerms(torch.randn(2, 8, requires_grad=True), torch.randn(4, 2, requires_grad=True), 0.5,
                             torch.randn(4, 8), torch.randn(4)) for _ in range(2)
    )  # fmt: skip
    x = torch.randn(3, 8, requires_grad=True)
    joint_lora.joint_update(x, [first, second])[1].sum().backward()
    expected = (
        second.scale * torch.ones(3, 4) @ second.b.detach() @ second.a.detach() + torch.ones(3, 4) @ second.weight
    )
    torch.testing.assert_close(x.grad, expected)
    assert first.b.grad is None and not first.a.grad.any() and second.b.grad.any()


def test_layers_that_are_more_than_low_rank_are_not_joined(sizes):
    passes(adapted(joint=True, dtype=torch.float32, use_dora=True))
    assert sizes == []


def test_layers_with_dropout_are_joined(sizes):
    """tests/models/adapters/test_fused_dropout.py compares their gradients with peft's."""
    passes(adapted(joint=True, lora_dropout=0.5))
    assert sizes.count(3) == sizes.count(2) == 2 * 2


def test_a_copy_of_a_model_computes_alone():
    model = adapted(joint=True)
    passes(model)
    copied = copy.deepcopy(model)
    for module in copied.modules():
        assert joint_lora.siblings_of(module) is None
    assert fuse_adapters(copied) == 0


def switch_off(block: nn.Module, x: torch.Tensor) -> None:
    block.k_proj.enable_adapters(False)


def write_over_the_input(block: nn.Module, x: torch.Tensor) -> None:
    x.add_(1)


def step(block: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        block.k_proj.lora_A["default"].weight.add_(1)


@pytest.mark.parametrize("change", [switch_off, write_over_the_input, step])
def test_an_output_is_computed_again_after_a_change(change):
    """The siblings get the same tensor, but something has changed since the first one computed all outputs."""
    block = next(module for module in adapted(joint=True).modules() if hasattr(module, "q_proj"))
    alone = copy.deepcopy(block)
    x = torch.randn(2, 3, block.q_proj.base_layer.in_features, dtype=torch.float64)
    with torch.no_grad():
        block.q_proj(x)
        before = block.k_proj(x)
        block.q_proj(x)
    change(block, x)
    if change is not write_over_the_input:
        change(alone, x)
    found = block.k_proj(x)
    assert found.requires_grad == (change is not switch_off)  # the outputs of no_grad are not used
    torch.testing.assert_close(found, alone.k_proj(x))
    assert not torch.allclose(found, before)
