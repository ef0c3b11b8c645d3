"""Rotary position embeddings: an attention's forward calls `apply_rope` instead of its modelling file's function.

A modelling file keeps its rotary function as a global that every model of the family shares, so replacing it there
would change other models. `KernelRope` runs the same byte code on a private copy of the globals, in which only the
recognised rotary functions differ.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from ligertune_kernels import apply_rope
from ligertune_kernels.ops.attention.rope import apply_rope_reference
from torch import Tensor, nn

from ligertune.attention.image_attention import IMAGE_ATTENTION_GLOBALS, attends_per_image
from ligertune.patching.module_patch import ModulePatch, decorator_chain, names_in, rebuild_function
from ligertune.patching.probe import Definition, Refusal, answer, close, definition_of, numbers

Layout = Literal["half", "pairs", "pairs_from_halves", "tokens_first"]

# Which dimensions rotate together, R of them:
# half: i with i + R/2.  pairs: 2i with 2i + 1, each value of cos twice in a row.
# pairs_from_halves: as pairs, but cos is laid out as for half and the function reorders it (GLM).
# tokens_first: as half, in fp32, of q and k (T, H, D) with cos (T, D): the vision towers of the Qwen family.
LAYOUTS: tuple[Layout, ...] = ("half", "pairs", "pairs_from_halves")
PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")


@dataclass(frozen=True)
class RopeSpec:
    """The rotary functions that a forward calls and our kernel computes: (name, layout) each."""

    functions: tuple[tuple[str, Layout], ...]
    per_image: bool = False  # the forward also attends within one image after another (`image_attention`)
    kernel = "apply_rope"


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module's forward calls a rotary function of its modelling file."""
    return bool(_rotary_names(type(module).forward))


@functools.cache
def _rotary_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return tuple(name for name in (code.co_names if code else ()) if name.startswith("apply_rotary"))


def recognise_rope(module: nn.Module) -> RopeSpec | Refusal:
    """Return which rotary functions of an attention `apply_rope` can compute, or why it cannot replace all of them."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    return _rope_spec(type(module), definition_of(type(module)))


@functools.cache
def _rope_spec(cls: type[nn.Module], definition: Definition) -> RopeSpec | Refusal:
    forward = decorator_chain(cls.forward)[-1]
    if hasattr(forward, "__wrapped__") or not isinstance(forward, types.FunctionType):
        return Refusal("its forward is wrapped by a decorator that is not a plain function")
    if _reads_module_name(forward.__code__):
        return Refusal("its forward reads __name__")
    functions = []
    for name in _rotary_names(cls.forward):
        if name not in forward.__globals__:
            return Refusal(f"{name} is no global of its module")
        layout = _layout(forward.__globals__[name])
        if isinstance(layout, Refusal):
            return layout
        functions.append((name, layout))
    return RopeSpec(tuple(functions), attends_per_image(names_in(forward.__code__)))


def _reads_module_name(code: types.CodeType) -> bool:
    """Return whether a function or one inside it reads the global `__name__`, which `rebuild_function` removes."""
    reads = any(step.opname == "LOAD_GLOBAL" and step.argval == "__name__" for step in dis.get_instructions(code))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return reads or any(map(_reads_module_name, inner))


# (head dim, batch of cos and sin, dtype): cos shared by the batch or not; another dtype; 8 of 12 dimensions rotated
CASES = ((8, 1, torch.float32), (8, 2, torch.float32), (8, 1, torch.bfloat16), (12, 1, torch.float32))
ROTATED = 8


def _layout(function: Callable[..., Any]) -> Layout | Refusal:
    """Return the layout with which `apply_rope` equals a rotary function on a few numbers."""
    target = function.forward if isinstance(function, nn.Module) else function
    name = getattr(function, "__name__", type(function).__name__)
    parameters = tuple(inspect.signature(target).parameters)
    if parameters == PARAMETERS[:4]:
        known = _rotates_tokens_first(function)
        return "tokens_first" if known else Refusal(f"{name} rotates in no way that apply_rope knows")
    if parameters != PARAMETERS or inspect.signature(target).parameters["unsqueeze_dim"].default != 1:
        return Refusal(f"{name} does not take ({', '.join(PARAMETERS)}=1)")
    equal = [layout for layout in LAYOUTS if all(_equals(function, layout, *case) for case in CASES)]
    return equal[0] if len(equal) == 1 else Refusal(f"{name} rotates in no way that apply_rope knows")


def _equals(function: Callable[..., Any], layout: Layout, head_dim: int, batch: int, dtype: torch.dtype) -> bool:
    """Compare with `apply_rope`: q, k (B, H, T, D), strided as attention has them."""
    q, k = (numbers(2, 5, heads, head_dim, seed=heads, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    angles = numbers(batch, 5, ROTATED // 2, seed=7)
    given = answer(function, q, k, *(t.to(dtype) for t in _cos_sin(angles, layout)))
    if isinstance(given, Refusal):
        return head_dim > ROTATED  # a function for whole heads only: its callers do not need more
    order: Layout = "half" if layout == "half" else "pairs"
    cos, sin = (t.to(dtype) for t in _cos_sin(angles, order))
    # models round every product, our kernel rounds once
    ours = apply_rope_reference(q, k, cos, sin, interleaved=order == "pairs")
    return _both_close(given, ours, slack=1e-5 if dtype == torch.float32 else 0.05)


def _rotates_tokens_first(function: Callable[..., Any]) -> bool:
    """Return whether it equals `apply_rope` of q and k (T, H, D), with cos and sin (T, D)."""
    cos, sin = _cos_sin(numbers(1, 5, 4, seed=7), "half")
    for dtype, slack in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        q, k = (numbers(5, 4, 8, seed=seed, dtype=dtype) for seed in (4, 2))
        ours = apply_rope_reference(*(t.transpose(0, 1)[None] for t in (q, k)), cos, sin)
        if not _both_close(answer(function, q, k, cos[0], sin[0]), [t[0].transpose(0, 1) for t in ours], slack=slack):
            return False
    return True


def _both_close(given: Any, ours: Sequence[Tensor], *, slack: float) -> bool:
    """Compare two tensors each: shape, dtype and values."""
    two = isinstance(given, tuple) and len(given) == 2
    return two and all(close(a, b, rtol=slack, atol=slack) for a, b in zip(given, ours, strict=True))


def _cos_sin(angles: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return cos and sin (B, T, R) of angles (B, T, R/2), in the order of a model with this layout."""
    both = angles.repeat_interleave(2, dim=-1) if layout == "pairs" else torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _rotary_function(original: Callable[..., Any], layout: Layout, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `apply_rope` with the signature of transformers' rotary functions.

    q (B, H, T, D), k (B, K, T, D), cos and sin (B or 1, T, R); with unsqueeze_dim 2: q (B, T, H, D), k (B, T, K, D).
    Other calls (Pixtral: unsqueeze_dim 0; trained angles; Qwen 4: q alone) go to `original`, the model's own function.
    tokens_first: q, k (T, H, D), cos and sin (T, D).
    """

    def rotary(
        q: Tensor, k: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if k is None or cos is None or unsqueeze_dim not in (1, 2) or q.ndim != 4 or cos.ndim != 3 or cos.requires_grad:
            return original(q, k, cos, sin, unsqueeze_dim)
        if layout == "pairs_from_halves":
            cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = apply_rope(q, k, cos, sin, interleaved=layout != "half")
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)

    def tokens_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = apply_rope(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        return q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1)

    replacement = tokens_first if layout == "tokens_first" else rotary
    replacement.__name__ = replacement.__qualname__ = name
    return replacement


class KernelRope(ModulePatch):
    """Mixin of an attention module: its own forward, with our rotary functions."""

    @classmethod
    def class_body(cls, original: type[nn.Module], spec: RopeSpec) -> dict[str, Any]:
        namespace = decorator_chain(original.forward)[-1].__globals__
        ours = {name: _rotary_function(namespace[name], layout, name) for name, layout in spec.functions}
        if spec.per_image:
            ours |= IMAGE_ATTENTION_GLOBALS
        return {"forward": rebuild_function(original.forward, ours)}
