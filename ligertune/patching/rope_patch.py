"""Rotary position embeddings: rebuild an attention's forward so that it calls `apply_rope`.

A modelling file keeps its rotary function as a global that every model of the family shares, so replacing it there
would change other models. `ShadowedRope` runs the same byte code on a private copy of the file's globals, in which only
the recognised rotary functions differ. The copy has no `__name__`: torch.compile imports a function's globals by module
name where there is one, and would find the original; without one it guards on the dict itself.

Decorators around the forward (transformers' `deprecate_kwarg`) are rebuilt around the new one.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from ligertune_kernels import apply_rope
from ligertune_kernels.ops.attention.rope import apply_rope_reference
from torch import Tensor, nn

from ligertune.attention.image_attention import STAND_INS, cuts_pictures_apart
from ligertune.patching.module_patch import Patch
from ligertune.patching.probe import Refusal, answer, numbers

Layout = Literal["half", "pairs", "pairs_from_halves", "tokens_first"]

# half: dimension i turns with i + R/2.  pairs: 2i turns with 2i + 1, and cos says so (each value twice in a row).
# pairs_from_halves: the same, but cos comes as for half and the function reorders it (GLM).
# tokens_first: as half, in fp32, of q and k (T, H, D) with cos (T, D): the towers of the Qwen family.
LAYOUTS: tuple[Layout, ...] = ("half", "pairs", "pairs_from_halves")
PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")


@dataclass(frozen=True)
class RopeSpec:
    """The rotary functions that a forward calls, all of them ones we have: (name, layout) each."""

    functions: tuple[tuple[str, Layout], ...]
    pictures: bool = False  # the forward also attends to one picture after another (`image_attention`)
    kernel = "apply_rope"


def is_rotary(module: nn.Module) -> bool:
    """Does its forward call a rotary function of its modelling file? What the report counts as applied or left."""
    return bool(_rotary_names(type(module)))


@functools.cache
def _rotary_names(cls: type[nn.Module]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return tuple(name for name in (code.co_names if code else ()) if name.startswith("apply_rotary"))


def recognise_rope(module: nn.Module) -> RopeSpec | Refusal:
    """The rotary functions of ours that this attention can call instead of its own, or why there are none."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    return _rope_spec(type(module))


@functools.cache
def _rope_spec(cls: type[nn.Module]) -> RopeSpec | Refusal:
    forward = _decorators(cls.forward)[-1]
    if hasattr(forward, "__wrapped__") or not isinstance(forward, types.FunctionType):
        return Refusal("its forward is wrapped by a decorator that is not a plain function")
    if _reads_module_name(forward.__code__):
        return Refusal("its forward reads __name__")
    functions = []
    for name in _rotary_names(cls):
        if name not in forward.__globals__:
            return Refusal(f"{name} is no global of its module")
        layout = _layout(forward.__globals__[name])
        if isinstance(layout, Refusal):
            return layout
        functions.append((name, layout))
    pictures = cuts_pictures_apart(forward.__code__.co_names + _keywords(forward.__code__))
    return RopeSpec(tuple(functions), pictures)


def _decorators(forward: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return a forward's decorators, outermost first, and the function that they decorate.

    The list ends early, with a function that has `__wrapped__`, where a decorator cannot be rebuilt: it has to be a
    Python function that closes over what it wraps.
    """
    chain = [forward]
    while (wrapped := getattr(chain[-1], "__wrapped__", None)) is not None:
        cells = getattr(chain[-1], "__closure__", None) or ()
        if sum(cell.cell_contents is wrapped for cell in cells) != 1:
            break
        chain.append(wrapped)
    return chain


def _reads_module_name(code: types.CodeType) -> bool:
    """Return whether a function or one inside it reads the global `__name__`, which the private copy lacks."""
    reads = any(step.opname == "LOAD_GLOBAL" and step.argval == "__name__" for step in dis.get_instructions(code))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return reads or any(map(_reads_module_name, inner))


def _keywords(code: types.CodeType) -> tuple[str, ...]:
    """Names of keywords in the calls that a function makes, those of its comprehensions too."""
    found: tuple[str, ...] = ()
    for constant in code.co_consts:
        if isinstance(constant, tuple) and all(isinstance(name, str) for name in constant):
            found += constant
        elif isinstance(constant, types.CodeType):
            found += constant.co_names + _keywords(constant)
    return found


# (head dim, batch of cos and sin, dtype): cos shared by the batch or not; the result's dtype; 8 of 12 dimensions turned
CASES = ((8, 1, torch.float32), (8, 2, torch.float32), (8, 1, torch.bfloat16), (12, 1, torch.float32))
TURNED = 8


def _layout(function: Callable[..., Any]) -> Layout | Refusal:
    """The layout for which `apply_rope` equals a rotary function, told by its values."""
    target = function.forward if isinstance(function, nn.Module) else function
    name = getattr(function, "__name__", type(function).__name__)
    parameters = tuple(inspect.signature(target).parameters)
    if parameters == PARAMETERS[:4]:
        turns = _turns_tokens_first(function)
        return "tokens_first" if turns else Refusal(f"{name} turns no way that apply_rope knows")
    if parameters != PARAMETERS:
        return Refusal(f"{name} does not take ({', '.join(PARAMETERS)})")
    equal = [layout for layout in LAYOUTS if all(_equals(function, layout, *case) for case in CASES)]
    return equal[0] if len(equal) == 1 else Refusal(f"{name} turns no way that apply_rope knows")


def _equals(function: Callable[..., Any], layout: Layout, head_dim: int, batch: int, dtype: torch.dtype) -> bool:
    # (B, H, T, D), strided as attention has them
    q, k = (numbers(2, 5, heads, head_dim, seed=heads, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    angles = numbers(batch, 5, TURNED // 2, seed=7)
    given = answer(function, q, k, *(t.to(dtype) for t in _cos_sin(angles, layout)))
    if isinstance(given, Refusal):
        return head_dim > TURNED  # a function for whole heads only: its callers ask for nothing else
    order: Layout = "half" if layout == "half" else "pairs"
    cos, sin = (t.to(dtype) for t in _cos_sin(angles, order))
    ours = apply_rope_reference(q, k, cos, sin, interleaved=order == "pairs")
    slack = 1e-5 if dtype == torch.float32 else 0.05  # models round every product, we round once
    return isinstance(given, tuple) and len(given) == 2 and all(map(_close, given, ours, (slack, slack)))


def _turns_tokens_first(function: Callable[..., Any]) -> bool:
    """Whether it equals `apply_rope` of q and k (T, H, D), with cos and sin (T, D)."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (numbers(5, 4, 8, seed=seed, dtype=dtype) for seed in (4, 2))
        cos, sin = _cos_sin(numbers(1, 5, 4, seed=7), "half")
        given = answer(function, q, k, cos[0], sin[0])
        ours = apply_rope_reference(*(t.transpose(0, 1)[None] for t in (q, k)), cos, sin)
        slack = 1e-5 if dtype == torch.float32 else 1e-2
        same = isinstance(given, tuple) and len(given) == 2
        if not same or not all(map(_close, given, (t[0].transpose(0, 1) for t in ours), (slack, slack))):
            return False
    return True


def _close(given: Any, ours: Tensor, slack: float) -> bool:
    same_form = isinstance(given, Tensor) and given.shape == ours.shape and given.dtype == ours.dtype
    return same_form and torch.allclose(given, ours, rtol=slack, atol=slack)


def _cos_sin(angles: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """angles (B, T, R/2) -> cos, sin (B, T, R) in the order in which a model with this layout makes them."""
    both = angles.repeat_interleave(2, dim=-1) if layout == "pairs" else torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _rotary_function(theirs: Callable[..., Any], layout: Layout, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """`apply_rope` under the signature of transformers' rotary functions.

    q (B, H, T, D), k (B, K, T, D), cos and sin (B or 1, T, R); with unsqueeze_dim 2: q (B, T, H, D), k (B, T, K, D).
    What else a caller may send (Pixtral: unsqueeze_dim 0; trained angles) goes to the model's own function.
    """

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim not in (1, 2) or q.ndim != 4 or cos.ndim != 3 or cos.requires_grad:
            return theirs(q, k, cos, sin, unsqueeze_dim)
        if layout == "pairs_from_halves":
            cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = apply_rope(q, k, cos, sin, interleaved=layout != "half")
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)

    rotary.__name__ = rotary.__qualname__ = name
    return rotary


def _tokens_first(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """`apply_rope` of q, k (T, H, D) and cos, sin (T, D)."""

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = apply_rope(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        return q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1)

    rotary.__name__ = rotary.__qualname__ = name
    return rotary


def _private_globals(forward: types.FunctionType, spec: RopeSpec) -> dict[str, Any]:
    """Return a copy of the globals of a forward in which the functions of `spec` are ours."""
    theirs = forward.__globals__
    ours = {name: value for name, value in theirs.items() if name != "__name__"}
    for name, layout in spec.functions:
        plain = layout != "tokens_first"
        ours[name] = _rotary_function(theirs[name], layout, name) if plain else _tokens_first(name)
    return ours | STAND_INS if spec.pictures else ours


def _rebuilt(theirs: types.FunctionType, spec: RopeSpec) -> types.FunctionType:
    """Return the same forward, with the same decorators, on private globals."""
    *decorators, innermost = _decorators(theirs)
    forward = _copy(innermost, _private_globals(innermost, spec), innermost.__closure__)
    for decorator in reversed(decorators):
        cells = (
            types.CellType(forward) if cell.cell_contents is decorator.__wrapped__ else cell
            for cell in decorator.__closure__
        )
        wrapped, forward = forward, _copy(decorator, decorator.__globals__, tuple(cells))
        forward.__wrapped__ = wrapped
    return forward


def _copy(
    function: types.FunctionType, namespace: Mapping[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    # a code object of its own: torch.compile keeps graphs by code object, and one decorator serves many functions
    code = function.__code__.replace()
    copied = types.FunctionType(code, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__wrapped__  # update_wrapper sets it; `copied` calls something else
    return copied


class ShadowedRope(Patch):
    """Mixin of an attention module: its own forward, on globals whose rotary functions are ours."""

    @classmethod
    def class_body(cls, original: type[nn.Module], spec: RopeSpec) -> dict[str, Any]:
        return {"forward": _rebuilt(original.forward, spec)}
