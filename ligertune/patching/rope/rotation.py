"""Rotation: how a call of a model's rotary function becomes a call of `apply_rope`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from ligertune_kernels import apply_rope
from torch import Tensor, nn

Pairing = Literal["half", "pairs", "pairs to halves"]
Table = Literal["column", "pair", "first half", "complex"]
Columns = Literal["all", "first", "last"]
Alone = Literal["tensor", "pair"]
HEADS_ARGUMENT = "unsqueeze_dim"  # transformers' name of the argument that tells where q has its heads
_NO_PARAMETER = ""  # the name of a parameter that a rotary function does not have: no call gives a value for it

# Options of apply_rope. Pairs that leave as halves: latent attention as in DeepSeek V3.
PAIRINGS: dict[Pairing, dict[str, bool]] = {
    "half": {"interleaved": False, "deinterleave": False},
    "pairs": {"interleaved": True, "deinterleave": False},
    "pairs to halves": {"interleaved": True, "deinterleave": True},
}


class Form(NamedTuple):
    """Form of a call. heads_argument: the value of unsqueeze_dim, None if the function has none."""

    q_dims: int
    table_dims: int
    heads_argument: int | None = None


Axes = tuple[tuple[Form, int], ...]


@dataclass(frozen=True)
class Rotation:
    """What a rotary function computes, of which R of D columns of a head rotate.

    arguments: its first parameters, by position, as "q", "k", "cos", "sin" and "complex" (cos + i sin).
    pairing: which columns rotate together: i with i + R/2, or 2i with 2i + 1.
    table: the columns of cos: one per column of x; one per pair; one per column, of which the first half is read.
    axes: forms of call, each with the axis of the heads in q (B, ., ., D); without a batch, as if B were 1.
    """

    arguments: tuple[str, ...]
    pairing: Pairing
    table: Table
    axes: Axes
    backwards: bool = False  # by the opposite angle (nanochat)
    columns: Columns = "all"  # which of a head's columns rotate, if not all do
    keeps_dtype: bool = False  # the result has the dtype of x; otherwise tables in fp32 make it fp32
    alone: Alone | None = None  # what it returns where k is None; None if it needs k


class _Call(NamedTuple):
    """A call of a rotary function in the terms of `apply_rope`."""

    q: Tensor  # (B, H, T, D)
    k: Tensor | None  # (B, K, T, D)
    cos: Tensor
    sin: Tensor
    rotary_dim: int


def rotary_function(
    original: Callable[..., Any],
    rotation: Rotation,
    *,
    rotate: Callable[..., Any] = apply_rope,
    otherwise: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function with the parameters of `original` that calls `rotate`.

    Calls that `rotation` does not describe go to `otherwise`, by default `original`: other shapes, trained tables.
    """
    otherwise = original if otherwise is None else otherwise
    parameters = inspect.signature(target_of(original)).parameters
    names = tuple(parameters)
    role = dict(zip(rotation.arguments, parameters, strict=False))
    q_name = role["q"]
    k_name = role.get("k", _NO_PARAMETER)
    cos_name = role["cos"] if "cos" in role else role["complex"]
    sin_name = role.get("sin", _NO_PARAMETER)
    defaults = {name: p.default for name, p in parameters.items() if name not in role.values()}
    default_axis = defaults.pop(HEADS_ARGUMENT, None)
    # Numbers in a tuple: torch.compile of torch 2.11 fails on a dict whose keys are tuples.
    forms = tuple((form.q_dims, form.table_dims, form.heads_argument, axis) for form, axis in rotation.axes)
    needs_k = "k" in role and rotation.alone is None
    one = "k" not in role or rotation.alone == "tensor"
    pairing = PAIRINGS[rotation.pairing]
    all_or_first = rotation.columns != "last"

    def rotary(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        q, k, cos = given.get(q_name), given.get(k_name), given.get(cos_name)
        if q is None or cos is None or (k is None and needs_k):
            return otherwise(*args, **kwargs)
        argument = given.get(HEADS_ARGUMENT, default_axis)
        axis = None
        for q_dims, table_dims, value, its_axis in forms:
            if q.ndim == q_dims and cos.ndim == table_dims and argument == value:
                axis = its_axis
        other = any(given.get(name, default) is not default for name, default in defaults.items())
        if axis is None or other:
            return otherwise(*args, **kwargs)
        call = _call(rotation, axis, q, k, cos, given.get(sin_name))
        if call is None:
            return otherwise(*args, **kwargs)
        if all_or_first:
            rotated = rotate(call.q, call.k, call.cos, call.sin, rotary_dim=call.rotary_dim, **pairing)
        else:
            rotated = _rotate_last(call, partial(rotate, **pairing))
        if axis != 1 or q.ndim != 4:
            rotated = tuple(_restore(y, axis, q.ndim) for y in rotated)
        return rotated[0] if k is None and one else rotated

    rotary.__name__ = rotary.__qualname__ = getattr(original, "__name__", type(original).__name__)
    return rotary


def target_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Python function behind a rotary function: transformers may turn one into a module."""
    return function.forward if isinstance(function, nn.Module) else function


def _call(rotation: Rotation, axis: int, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor | None) -> _Call | None:
    """Return the call in the terms of `apply_rope`, or None if it has no such terms. sin: None with a complex table."""
    if sin is None:
        cos, sin = torch.view_as_real(cos).unbind(-1)
    if cos.requires_grad or sin.requires_grad:
        return None
    if cos.ndim == 2:  # shared by all sequences, or there is no batch
        cos = cos[None]
        sin = sin[None]
    if q.dtype != cos.dtype and not rotation.keeps_dtype and not _autocasts(q.device.type):
        wide = torch.promote_types(q.dtype, cos.dtype)
        q = q.to(wide)
        k = None if k is None else k.to(wide)
    q = _heads_first(q, axis)
    k = None if k is None else _heads_first(k, axis)
    (batch, _, n_tokens, head_dim), (table_batch, table_tokens, width) = q.shape, cos.shape
    rotary_dim = 2 * width if rotation.table in ("pair", "complex") else width
    fits = rotary_dim == head_dim or (rotary_dim < head_dim and rotation.columns != "all")
    fits = fits and table_tokens == n_tokens and table_batch in (1, batch)
    if not fits or (k is not None and (k.shape[0], *k.shape[2:]) != (batch, n_tokens, head_dim)):
        return None
    if rotation.table == "first half":
        cos = cos[..., : width // 2]
        sin = sin[..., : width // 2]
    return _Call(q, k, cos, -sin if rotation.backwards else sin, rotary_dim)


def _autocasts(device_type: str) -> bool:
    """Return whether attention will cast q and k anyway."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _heads_first(x: Tensor, axis: int) -> Tensor:
    """Return q or k as (B, H, T, D). axis: where x (B, ., ., D) has its heads; x may lack the batch."""
    x = x if x.ndim == 4 else x[None]
    return x if axis == 1 else x.transpose(1, 2)


def _restore(x: Tensor | None, axis: int, ndim: int) -> Tensor | None:
    """Return q or k in the form that `_heads_first` was given."""
    if x is None:
        return None
    x = x if axis == 1 else x.transpose(1, 2)
    return x if ndim == 4 else x.squeeze(0)


def _rotate_last(call: _Call, rotate: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
    """Rotate the last columns of a head; `apply_rope` rotates the first ones."""
    kept = call.q.shape[-1] - call.rotary_dim
    last_of_k = None if call.k is None else call.k[..., kept:]
    q, k = rotate(call.q[..., kept:], last_of_k, call.cos, call.sin, rotary_dim=call.rotary_dim)
    if not kept:
        return q, k
    q = torch.cat((call.q[..., :kept], q), dim=-1)
    if call.k is not None:
        k = torch.cat((call.k[..., :kept], k), dim=-1)
    return q, k
