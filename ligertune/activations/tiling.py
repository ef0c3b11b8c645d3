"""Tiled layers: token-wise layers run on some thousand tokens at a time, in the forward and in the backward.

A gated MLP has 3 F elements per token between its projections, and with LoRA up to 5 F in its backward. On a long row
that is most of a checkpointed layer's memory. A tiled layer saves its input only, and has those tensors for one tile
at a time: the backward runs each tile again and adds the tiles' gradients of its parameters, in float32 if they are
narrower. Tiles are independent, because each token's output depends on that token alone.

A norm in front of a tiled layer belongs to its tiles: the layer saves the norm's input, which the residual stream has
anyway, and neither the norm's output nor its gradient exists for the whole row.

The layer's second run in the backward stops before it computes a tiled MLP: `_Input` saves the input first, and
torch.utils.checkpoint ends at the last saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from ligertune_kernels.autograd import no_double_backward
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.any_types import AnyModule
from ligertune.errors import UserError
from ligertune.models.shape import base_of, text_layers
from ligertune.patching.lora.joint_lora import leave_siblings, rows_of
from ligertune.patching.mlps.kernel_mlps import KernelMLP
from ligertune.patching.module_patch import ModulePatch, has_own_hooks, patch_module, unpatch_module
from ligertune.patching.norms.kernel_norms import KernelNorm

Layer = Callable[[Tensor], Tensor]  # (1, N, E) -> (1, N, F), token by token


class _Input(torch.autograd.Function):
    """x unchanged, saved for `_Tiled`. anchor: a parameter, so that there is a node if x itself needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None]:
        return dx, None


class _Tiled(torch.autograd.Function):
    """layer(x), tile by tile. x: (..., E), whose values the backward reads from `saved`, the node of `_Input`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Any, layer: Layer, tile: int, *parameters: Tensor) -> Tensor:
        kind = x.device.type
        ctx.saved = saved
        ctx.layer = layer
        ctx.tile = tile
        ctx.parameters = parameters
        enabled = torch.is_autocast_enabled(kind)
        ctx.autocast = {"device_type": kind, "enabled": enabled, "dtype": torch.get_autocast_dtype(kind)}
        return _each_tile(layer, x, tile)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), needs_dx = ctx.saved.saved_tensors, ctx.saved.needs_input_grad[0]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
        rows = rows_of(x)
        d_rows = rows_of(dy)
        gradients: list[Tensor | None] = [None] * len(ctx.parameters)
        for start in range(0, len(rows), ctx.tile):
            tile = slice(start, start + ctx.tile)
            given = rows[tile][None].detach().requires_grad_(needs_dx)
            wanted = [*([given] if needs_dx else []), *ctx.parameters]
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                found = list(torch.autograd.grad(ctx.layer(given), wanted, d_rows[tile][None], allow_unused=True))
            if dx is not None:
                rows_of(dx)[tile] = found.pop(0)[0]
            gradients = [_sum(*pair) for pair in zip(gradients, found, strict=True)]
            del found, given  # or they would exist next to those of the next tile
        sums = zip(gradients, ctx.parameters, strict=True)
        return dx, None, None, None, *(None if total is None else total.to(p.dtype) for total, p in sums)


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a tile's gradient of a parameter to those of the tiles before it, in float32 or wider."""
    if gradient is None:
        return total
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)


def _each_tile(layer: Layer, x: Tensor, tile: int) -> Tensor:
    """Return layer(x) (..., F) in one buffer, to which each tile is copied."""
    rows = rows_of(x)
    first = layer(rows[:tile][None])[0]
    out = first.new_empty(len(rows), first.shape[-1])
    out[:tile] = first
    del first  # one tile at a time exists in addition to the buffer
    for start in range(tile, len(rows), tile):
        out[start : start + tile] = layer(rows[start : start + tile][None])[0]
    return out.view(*x.shape[:-1], out.shape[-1])


def tiled(layer: Layer, x: Tensor, parameters: list[Tensor], tile: int) -> Tensor:
    """Return layer(x) (..., F), computed `tile` tokens at a time. parameters: all that the layer trains."""
    normed = getattr(x, "normed", None)
    if normed is not None and normed.version == x._version and torch.is_grad_enabled():
        parameters = [*parameters, *trained_parameters(normed.norm)]
        norm = normed.norm
        return tiled(lambda rows: layer(KernelNorm.forward(norm, rows)), normed.source, parameters, tile)
    if not (torch.is_grad_enabled() and (x.requires_grad or parameters)):
        return _each_tile(layer, x, tile)
    given = _Input.apply(x, None if x.requires_grad else parameters[0])
    return _Tiled.apply(given, given.grad_fn, layer, tile, *parameters)


@dataclass(frozen=True)
class Normed:
    """How a norm's output was made: by which norm, and of what. version: of the output, to see a write to it."""

    norm: nn.Module
    source: Tensor
    version: int


class TiledNorm(KernelNorm):
    """Mixin of a norm whose output tells its readers how it was made."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Any = super().forward(hidden_states, *args, **kwargs)
        if torch.is_grad_enabled() and not (args or kwargs or has_own_hooks(self)):
            output.normed = Normed(self, hidden_states, output._version)
        return output


class TiledMLP(KernelMLP):
    """Mixin of a gated MLP that runs `patch_spec.tile` tokens at a time."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) != 1:
            return super().forward(*args, **kwargs)
        return tiled(super().forward, given[0], trained_parameters(self), self.patch_spec.tile)


class TiledLinear(ModulePatch):
    """Mixin of a linear layer, or of peft's LoRA layer around one, which makes three copies of its output otherwise."""

    patch_spec: int  # tokens per tile

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            return super().forward(x, *args, **kwargs)
        return tiled(super().forward, x, trained_parameters(self), self.patch_spec)


def trained_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that get gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def tile_layers(model: PreTrainedModel, tile: int) -> int:
    """Let the patched MLPs and norms of the decoder layers work on `tile` tokens at a time; return the number of MLPs.

    Raises UserError if there is none.
    """
    modules = _modules(model)
    mlps = [module for module in modules if getattr(module, "patch_mixin", None) is KernelMLP]
    if not mlps:
        raise UserError(
            f"train.tiled_mlp: no MLP of {type(model).__name__} is one that our kernels compute.", hint="Leave it out."
        )
    for mlp in mlps:
        spec = mlp.patch_spec
        unpatch_module(mlp)
        patch_module(mlp, TiledMLP, replace(spec, tile=tile))
    for norm in modules:
        if getattr(norm, "patch_mixin", None) is KernelNorm:
            spec = norm.patch_spec
            unpatch_module(norm)
            patch_module(norm, TiledNorm, spec)
    return len(mlps)


def tile_projections(model: PreTrainedModel, tile: int) -> int:
    """Let the other linear layers of the decoder layers, with or without adapters, work on `tile` tokens at a time.

    Call it after adapters were added. Returns the number of layers.
    """
    modules = _modules(model)
    inside = {id(part) for mlp in modules if isinstance(mlp, TiledMLP) for part in mlp.modules()}
    # the parts of an adapter's layer run within the tiles of that layer
    inside |= {id(part) for m in modules if hasattr(m, "base_layer") for part in m.modules() if part is not m}
    linear = (m for m in modules if isinstance(getattr(m, "base_layer", m), nn.Linear) and id(m) not in inside)
    found = [module for module in linear if getattr(module, "patch_spec", None) is None]
    for module in found:
        mixin: type[ModulePatch] = TiledLinear
        if isinstance(module, ModulePatch):  # `kernels.lora`; each tile would compute the outputs of all siblings
            leave_siblings(module)
            mixin = _tiled(module.patch_mixin)
            unpatch_module(module)
        patch_module(module, mixin, tile)
    return len(found)


@cache
def _tiled(mixin: type[ModulePatch]) -> type[ModulePatch]:
    """Return a mixin whose tiles run the forward of `mixin`."""
    return type(f"Tiled{mixin.__name__}", (TiledLinear, mixin), {"__module__": __name__})


def _modules(model: PreTrainedModel) -> list[AnyModule]:
    """Return all modules of the language model's decoder layers; none if the layers are not understood."""
    layers = text_layers(base_of(model))
    return [] if layers is None else list(layers.modules())
