"""Recognise rotary functions that `apply_rope` can compute, whatever their parameters are called.

A function is probed with tables in which every number differs, so that each order of the columns, each reading of the
tables and each direction gives other results. It is recognised if exactly one `Rotation` gives its results.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from ligertune_kernels.ops.attention.rope import apply_rope_reference
from torch import Tensor

from ligertune.patching.module_patch import names_in
from ligertune.patching.probe import Definition, Refusal, answer, close, numbers
from ligertune.patching.rope.rotation import (
    HEADS_ARGUMENT,
    PAIRINGS,
    Alone,
    Axes,
    Columns,
    Form,
    Rotation,
    Table,
    rotary_function,
    target_of,
)

ARGUMENTS = (
    ("q", "k", "cos", "sin"),
    ("q", "k", "complex"),  # Llama 4, DeepSeek V2
    ("q", "cos", "sin"),  # Gemma 3n, Gemma 4, DeepSeek V4
    ("q", "sin", "cos"),  # GPT-J, CodeGen
    ("q", "complex"),
)
# With the argument unsqueeze_dim and without it; three dimensions are the towers of the Qwen family.
FORMS: dict[bool, tuple[Form, ...]] = {
    True: (Form(4, 3, 1), Form(4, 3, 2), Form(4, 2, 0), Form(3, 2, 1)),
    False: (Form(4, 3), Form(4, 2), Form(3, 2)),
}
ROTATED = 8  # columns of a head that rotates as a whole
WIDER = 12  # columns of a head of which only ROTATED rotate
# Models round every product, and our kernel rounds once: the families of transformers 5.24 need 1 % of the tolerance in
# float32 and 13 % in bfloat16. The nearest other rotation needs 260,000 times as much in float32.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def helpers_of(function: Callable[..., Any] | None) -> Definition:
    """Return the functions that a rotary function calls, directly or not: a new `rotate_half` is another rotation."""
    found: dict[Hashable, None] = {}
    waiting = [] if function is None else [target_of(function)]
    while waiting:
        plain = inspect.unwrap(waiting.pop())
        if isinstance(plain, types.FunctionType):
            named = (plain.__globals__.get(name) for name in sorted(names_in(plain.__code__)))
            new = [value for value in named if isinstance(value, types.FunctionType) and value not in found]
            found |= dict.fromkeys(new)
            waiting += new
    return tuple(found)


def recognise_rotation(function: Callable[..., Any]) -> Rotation | Refusal:
    """Return the only rotation with which `apply_rope` equals a rotary function, or why there is none."""
    return _recognise(function, helpers_of(function))


@functools.cache
def _recognise(function: Callable[..., Any], helpers: Definition) -> Rotation | Refusal:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that cast complex numbers, for example
        return _probed(function)


def _probed(function: Callable[..., Any]) -> Rotation | Refusal:
    name = getattr(function, "__name__", type(function).__name__)
    found = _equal_rotations(function)
    if len(found) != 1:
        return Refusal(f"{name} is no rotation that apply_rope has; PyTorch computes it as before")
    rotation = replace(found[0], columns=_columns(function, found[0]), alone=_alone(function, found[0]))
    rotation = replace(rotation, keeps_dtype=_keeps_dtype(function, rotation))
    rotation = replace(rotation, axes=_axes(function, rotation))
    if all(probe.agrees(function, rotation) for probe in _more_probes(rotation)):
        return rotation
    return Refusal(f"{name} is a rotation for some shapes and dtypes only; PyTorch computes it as before")


@dataclass(frozen=True)
class _Probe:
    """A call of a rotary function. batch: of the tables; alone: without k."""

    form: Form
    head_dim: int = ROTATED
    batch: int = 2
    dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype = torch.float32
    alone: bool = False

    def call(self, function: Callable[..., Any], rotation: Rotation) -> Any | Refusal:
        """Return the result for the arguments of `rotation`: q and k are strided as attention has them."""
        axis = dict(rotation.axes)[self.form]
        # B, T, H, K and D all differ: a function that reads another axis fails, or returns another shape
        q, k = (numbers(2, 5, heads, self.head_dim, seed=heads, dtype=self.dtype) for heads in (4, 3))
        q, k = (x if axis == 2 else x.transpose(1, 2) for x in (q, k))
        width = ROTATED // 2 if rotation.table in ("pair", "complex") else ROTATED
        cos, sin = (numbers(self.batch, 5, width, seed=seed) for seed in (7, 8))
        q, k = (q, k) if self.form.q_dims == 4 else (q[0], k[0])
        cos, sin = (cos, sin) if self.form.table_dims == 3 else (cos[0], sin[0])
        tables = {"cos": cos.to(self.table_dtype), "sin": sin.to(self.table_dtype), "complex": torch.complex(cos, sin)}
        given = {"q": q, "k": None if self.alone else k, **tables}
        options = {} if self.form.heads_argument is None else {HEADS_ARGUMENT: self.form.heads_argument}
        return answer(functools.partial(function, *(given[role] for role in rotation.arguments), **options))

    def agrees(self, function: Callable[..., Any], rotation: Rotation) -> bool:
        """Return whether a function gives what `apply_rope` gives in its place."""
        ours = rotary_function(function, rotation, rotate=apply_rope_reference, otherwise=_refuse)
        return _same(self.call(function, rotation), self.call(ours, rotation), ROUNDING[self.dtype])


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise ValueError("the rotation does not describe this call")


def _same(given: Any, ours: Any, rounding: float) -> bool:
    """Compare a tensor, or a pair whose second may be None: shape, dtype and values."""
    if isinstance(ours, tuple):
        alike = isinstance(given, tuple) and len(given) == len(ours)
        return alike and all(_same(a, b, rounding) for a, b in zip(given, ours, strict=True))
    if ours is None:
        return given is None
    return isinstance(ours, Tensor) and close(given, ours, rtol=rounding, atol=rounding)


def _equal_rotations(function: Callable[..., Any]) -> list[Rotation]:
    """Return the rotations that agree in the first form of call for which some do."""
    parameters = inspect.signature(target_of(function)).parameters
    forms = FORMS[HEADS_ARGUMENT in parameters]
    for arguments, form, axis in itertools.product(_possible_arguments(parameters), forms, (1, 2)):
        tables: tuple[Table, ...] = ("complex",) if "complex" in arguments else ("column", "first half", "pair")
        for table in tables:
            probe = _Probe(form)
            first = Rotation(arguments, "half", table, ((form, axis),))
            if isinstance(probe.call(function, first), Refusal):
                continue
            directions = itertools.product(PAIRINGS, (False, True))
            rotations = (replace(first, pairing=pairing, backwards=backwards) for pairing, backwards in directions)
            if found := [rotation for rotation in rotations if probe.agrees(function, rotation)]:
                return found
    return []


def _possible_arguments(parameters: Mapping[str, inspect.Parameter]) -> list[tuple[str, ...]]:
    """Return the rows of ARGUMENTS with which a function can be called by position, and nothing else."""
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters.values()):
        return []
    required = sum(p.default is p.empty for p in parameters.values())
    return [
        arguments
        for arguments in ARGUMENTS
        if required <= len(arguments) <= len(parameters) and HEADS_ARGUMENT not in list(parameters)[: len(arguments)]
    ]


def _columns(function: Callable[..., Any], rotation: Rotation) -> Columns:
    """Return which columns rotate if a head has more; "all" if the function refuses that or does something else."""
    probe = _Probe(rotation.axes[0][0], head_dim=WIDER)
    parts: tuple[Columns, ...] = ("first", "last")
    found = (columns for columns in parts if probe.agrees(function, replace(rotation, columns=columns)))
    return next(found, "all")


def _alone(function: Callable[..., Any], rotation: Rotation) -> Alone | None:
    """Return what the function returns without k, None if it needs it."""
    probe = _Probe(rotation.axes[0][0], alone=True)
    results: tuple[Alone, ...] = ("tensor", "pair")
    found = (alone for alone in results if probe.agrees(function, replace(rotation, alone=alone)))
    return next(found, None) if "k" in rotation.arguments else None


def _keeps_dtype(function: Callable[..., Any], rotation: Rotation) -> bool:
    """Return whether q in bf16 stays so with tables in fp32."""
    given = _Probe(rotation.axes[0][0], dtype=torch.bfloat16).call(function, rotation)
    q = given[0] if isinstance(given, tuple) else given
    return isinstance(q, Tensor) and q.dtype == torch.bfloat16


def _axes(function: Callable[..., Any], rotation: Rotation) -> Axes:
    """Return the axis of the heads in every form of call for which the rotation agrees."""
    forms = FORMS[rotation.axes[0][0].heads_argument is not None]
    possible = (((form, axis),) for form in forms for axis in (1, 2))
    return tuple(axes[0] for axes in possible if _Probe(axes[0][0]).agrees(function, replace(rotation, axes=axes)))


def _more_probes(rotation: Rotation) -> Iterator[_Probe]:
    """Yield calls that a recognised function must agree for, too: other dtypes, shared tables, wider heads, no k."""
    for form, _ in rotation.axes:
        yield _Probe(form, batch=1)
        yield _Probe(form, dtype=torch.bfloat16)
        yield _Probe(form, dtype=torch.bfloat16, table_dtype=torch.bfloat16)
        if rotation.columns != "all":
            yield _Probe(form, head_dim=WIDER, batch=1)
        if rotation.alone is not None:
            yield _Probe(form, alone=True)
