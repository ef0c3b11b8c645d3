"""The memory plan of MLPs without a gate: what their activation saves is tried out, not listed."""

from dataclasses import replace

import pytest
import torch
from support.models.tiny_families import tiny_family
from torch import nn

from ligertune.models.shape import read_shape, text_layers
from ligertune.planning.memory.activation_bytes import ActivationPolicy, layer_bytes

TOKENS = 64
# family -> elements of the width that are saved: of ReLU² and GELU two, of GELU's formula in torch five
SAVED = {"nemotron": 2, "falcon": 2, "gpt_neox": 2, "starcoder2": 2, "gpt2": 5, "gptj": 5, "persimmon": 2}


def saved_bytes(module: nn.Module, hidden: int) -> float:
    """Return the bytes per token that autograd saves besides weights and the input."""
    x = torch.randn(1, TOKENS, hidden, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in known) / TOKENS


@pytest.mark.parametrize("family", SAVED)
def test_saved_bytes_of_an_mlp_without_a_gate(family):
    model = tiny_family("causal", family)
    layer = read_shape(model).layer
    without = replace(layer, mlp=0, mlp_in=False, mlp_out=False)
    counted, rest = (layer_bytes(one, ActivationPolicy(), 4, TOKENS) for one in (layer, without))
    assert counted - rest - 4 * layer.hidden == SAVED[family] * 4 * layer.mlp
    assert saved_bytes(text_layers(model)[-1].mlp, layer.hidden) == SAVED[family] * 4 * layer.mlp


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_gates_are_recognised(family):
    """phi3 has gate and up in one matrix."""
    assert read_shape(tiny_family("causal", family)).layer.ungated is None


def test_a_block_of_an_mlp_alone():
    shape = read_shape(tiny_family("causal", "nemotron_h"))
    (block,) = (one for one, _ in shape.other_layers if one.mlp and one.experts is None)
    assert (block.heads, block.mixer, block.ungated) == (0, None, (1, False))


@pytest.mark.parametrize(
    "family, first", [("lfm2", "feed_forward.w1"), ("opt", "fc1"), ("falcon", "mlp.dense_h_to_4h")]
)
def test_the_width_is_that_of_the_layer(family, first):
    """LFM2 changes the configured width; OPT and Falcon have other names for it."""
    model = tiny_family("causal", family)
    width = text_layers(model)[-1].get_submodule(first).out_features
    assert read_shape(model).layer.mlp == width != getattr(model.config, "intermediate_size", None)
