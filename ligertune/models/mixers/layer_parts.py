"""What a layer of a hybrid model consists of: attention, a mixer, an MLP, or several of them, and the mixer's sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from ligertune.any_types import AnyModule
from ligertune.patching.mixers.recognise_mixers import op_of, state_carriers
from ligertune.planning.memory.mixer_shapes import (
    ChannelDeltaShape,
    ConvolutionShape,
    DeltaRuleShape,
    Mamba2Shape,
    MixerShape,
)
from ligertune.planning.memory.model_shape import LayerShape

# Linear layers by the input they save for the backward. Attention itself saves o_proj's input.
ATTENTION_IN = {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa", "c_attn",
                "Wqkv"}  # fmt: skip
MIXER_OUT = {"o_proj", "out_proj"}  # also of gated attention


@dataclass(frozen=True)
class LayerParts:
    """mixer: one of known sizes. A layer whose mixer has others counts as one with attention."""

    attention: bool = True
    mlp: bool = True
    mixer: nn.Module | None = None


def parts_of_layers(layers: Iterable[nn.Module]) -> list[LayerParts]:
    """Return the parts of each layer. In a model without a mixer, each has attention and an MLP."""
    layers = list(layers)
    mixers = [_mixer_of(layer) for layer in layers]
    if not any(mixers):
        return [LayerParts()] * len(mixers)
    return [_parts_of(layer, mixer) for layer, mixer in zip(layers, mixers, strict=True)]


def _mixer_of(layer: nn.Module) -> nn.Module | None:
    return next((module for module in layer.modules() if _shape_of(module) is not None), None)


def _parts_of(layer: nn.Module, mixer: nn.Module | None) -> LayerParts:
    mixing = set() if mixer is None else set(mixer.modules())
    attention = mixer is None and bool(state_carriers(layer))
    mlp = False
    for child in layer.children():
        modules = dict(child.named_modules())
        outside = {name.rpartition(".")[2] for name, module in modules.items() if module not in mixing}
        attends = bool(ATTENTION_IN & outside)
        attention |= attends
        mlp |= mixing.isdisjoint(modules.values()) and not attends and any(p.ndim >= 2 for p in child.parameters())
    return LayerParts(attention, mlp, mixer)


def _shape_of(module: AnyModule) -> MixerShape | None:
    """Return the sizes of a mixer; None for another module, and a mixer whose sizes are not known."""
    op = op_of(module)
    if op == "gated_delta_rule" and hasattr(module, "head_k_dim"):
        return DeltaRuleShape(
            module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim, repeats=_repeats_keys(module)
        )
    if op == "ssd" and hasattr(module, "ssm_state_size"):
        sizes = module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size, module.chunk_size
        own_input = module.hidden_size if hasattr(module, "ssm_in_multiplier") else 0
        return Mamba2Shape(*sizes, has_norm=getattr(module, "mamba_rms_norm", True), own_input=own_input)
    if op == "kda" and hasattr(module, "head_dim"):
        return ChannelDeltaShape(module.num_heads, module.head_dim, module.head_dim)
    if op == "causal_conv1d" and hasattr(module, "in_proj") and isinstance(getattr(module, "conv", None), nn.Conv1d):
        return ConvolutionShape(module.conv.in_channels)
    return None


def with_mixer(shape: LayerShape, mixer: nn.Module) -> LayerShape:
    """Return the sizes of a layer with those of its mixer."""
    inside = [(name, p) for name, p in mixer.named_parameters() if p.requires_grad and p.ndim >= 2]
    norms = sum(p.numel() for name, p in mixer.named_parameters() if p.ndim == 1 and "norm" in name)
    reads_input = any(not {"conv1d", "conv", *MIXER_OUT} & set(name.split(".")) for name, _ in inside)
    attends = shape.heads > 0 and shape.attn_in
    trains_out = any(MIXER_OUT & set(name.split(".")) for name, _ in inside)
    return replace(
        shape, norms=shape.norms - norms, attn_in=reads_input or attends, mixer=_shape_of(mixer), mixer_out=trains_out
    )


def _repeats_keys(mixer: AnyModule) -> bool:
    """Return whether the mixer's own code repeats its keys for the value heads that share them."""
    code = inspect.unwrap(type(mixer).forward).__code__
    return mixer.num_v_heads > mixer.num_k_heads and "repeat_interleave" in code.co_names
