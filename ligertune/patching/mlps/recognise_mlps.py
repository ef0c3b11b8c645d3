"""Recognise gated MLPs that one of our kernels can compute.

There is no table of models or names. A module is recognised if its own forward, run on a few numbers with probes in
place of its projections, equals down(act(gate(x)) * up(x)) for exactly one assignment of the projections: a new model
family needs no code, and an upstream class that changes is left alone instead of being patched wrongly. `norms`
recognises norms, `rope` rotary functions, `experts` the experts of a mixture.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.patching.mlps.activations import (
    ACTIVATIONS,
    ActivationKind,
    Approximate,
    GatedKernel,
    OtherActivation,
    computes,
)
from ligertune.patching.mlps.deferred_activation import ProductSpec, recognise_product
from ligertune.patching.mlps.mlp_members import (
    Member,
    Projection,
    Projections,
    members_of,
    projections_of,
    with_members,
)
from ligertune.patching.probe import (
    Definition,
    NotNeeded,
    Refusal,
    Settings,
    answer,
    close,
    definition_of,
    numbers,
    settings_of,
    stub,
)


@dataclass(frozen=True)
class GatedSpec:
    """The kernel that multiplies act(gate) by up, its arguments, and the projections around it.

    packed: one projection computes both halves. inputs: names of the gate and the up projection, or of the packed one.
    output: name of the down projection; None if the module returns the product. output_scale: factor of its result.
    tile: tokens that a `TiledMLP` computes at a time.
    """

    kernel: GatedKernel
    approximate: Approximate
    packed: bool
    inputs: tuple[str, ...] = ()  # the names of Llama and Phi-3 where none are given
    output: str | None = "down_proj"
    options: tuple[tuple[str, Any], ...] = ()  # of the kernel: alpha, limit, scale, squared, …
    output_scale: float = 1.0
    tile: int = 0

    def __post_init__(self) -> None:
        if not self.inputs:
            object.__setattr__(self, "inputs", ("gate_up_proj",) if self.packed else ("gate_proj", "up_proj"))


NOT_GATED = NotNeeded("not gated, so there is no product for a kernel")
NOT_THE_FORM = "it computes something else than down(act(gate(x)) * up(x))"


def is_mlp(module: nn.Module) -> bool:
    """Return whether a module is a gated MLP or may be one, or a plain MLP. The report counts these.

    The sizes of the projections may not tell: all are equal, or each fits the one before, as in a projector. Then the
    module counts only if its forward is recognised.
    """
    original = getattr(type(module), "patch_original", type(module))
    if original.__module__.startswith("torch.") or _takes_more(original.forward):
        return False
    projections = projections_of(module)
    if _is_plain(projections) or (_hidden_size(projections) is not None and not _is_chain(projections)):
        return True
    may_be = len(projections) in (2, 3) and len({size[0] for _, size in projections}) == 1
    may_be |= _hidden_size(projections) is not None
    return may_be and isinstance(_spec_of(module, original, projections), GatedSpec)


def recognise_mlp(module: nn.Module) -> GatedSpec | ProductSpec | Refusal:
    """Return the gated kernel that equals this MLP between its projections, or the product in it, or why there is none.

    The whole MLP comes first.
    """
    whole = recognise_whole_mlp(module)
    if not isinstance(whole, Refusal) or isinstance(whole, NotNeeded) or "forward" in vars(module):
        return whole
    product = recognise_product(module)
    says_more = not isinstance(product, Refusal) or isinstance(product, OtherActivation)
    return product if says_more else whole


def recognise_whole_mlp(module: nn.Module) -> GatedSpec | Refusal:
    """Return the gated kernel that equals this MLP between its projections, or why there is none."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance")
    cls = type(module)
    if hasattr(cls.forward, "__wrapped__"):
        return Refusal("its forward is wrapped by a decorator")
    if _takes_more(cls.forward):
        return Refusal("its forward takes more than the hidden states")
    projections = projections_of(module)
    if _is_plain(projections):
        return NOT_GATED
    spec = _spec_of(module, cls, projections)
    return NOT_GATED if isinstance(spec, Refusal) and _is_chain(projections) else spec


def gate_of(module: nn.Module) -> nn.Module | None:
    """Return the projection of an MLP, patched or not, that computes the gate alone; None if there is none."""
    spec = getattr(module, "patch_spec", None) or (recognise_whole_mlp(module) if is_mlp(module) else None)
    return getattr(module, spec.inputs[0]) if isinstance(spec, GatedSpec) and not spec.packed else None


@functools.cache
def _takes_more(forward: Callable[..., Any]) -> bool:
    """Return whether a forward needs more than one argument, or may take many: an attention, a layer, a mixture."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return True
    others = parameters[1:]
    return len(others) > 1 or any(other.default is not None for other in others)


def _is_plain(projections: Projections) -> bool:
    """Return whether the sizes are those of down(act(up(x))): E to F, and F to E, in any order."""
    if len(projections) != 2:
        return False
    (_, first), (_, second) = projections
    return first == second[::-1]


def _is_chain(projections: Projections) -> bool:
    """Return whether the outputs of each projection are as many as the inputs of the next.

    Sizes such as 32 to 64 and 64 to 64 fit up and down, and also a packed gate: only the probe tells them apart.
    """
    return all(first[1] == second[0] for (_, first), (_, second) in itertools.pairwise(projections))


def _hidden_size(projections: Projections) -> int | None:
    """Return E if the sizes are those of a gated MLP: E to F twice, or E to 2F once, and F to any; else None."""
    for i, (_, down) in enumerate(projections):
        others = {size for _, size in projections[:i] + projections[i + 1 :]}
        halves = 3 - (len(projections) - 1)  # in the output of each input projection
        if len(projections) in (2, 3) and len(others) == 1 and down not in others:
            hidden, width = others.pop()
            if width == halves * down[0]:
                return hidden
    return None


# ---- the probe: the class's own forward, with projections that are known functions

ROWS = (0.5, 1.0, 2.0, 4.0, 8.0, 30.0, 1e3, 1e4)  # magnitudes of the tokens: a clamp below 1e4 is noticed


class _ProjectionProbe(nn.Module):
    """Replacement of a projection: each column of (..., outputs) is one input times its factor, plus its shift."""

    def __init__(self, projection: Projection, seed: int, calls: list[_Call]) -> None:
        super().__init__()
        self.name, (self.inputs, self.outputs) = projection
        self.seed = seed
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.inputs:
            raise ValueError(f"{self.name} takes {self.inputs} values, not {x.shape[-1]}")
        columns = torch.arange(self.outputs, device="cpu") % self.inputs
        factor = numbers(self.outputs, seed=self.seed)
        shift = 0.1 * numbers(self.outputs, seed=self.seed + 1)
        y = x[..., columns] * factor.to(x.dtype) + shift.to(x.dtype)
        self.calls.append(_Call(self.name, x.detach().clone(), y.clone()))
        return y


@dataclass(frozen=True)
class _Call:
    """One call of a projection: its name, its input (..., inputs) and its output (..., outputs)."""

    name: str
    x: Tensor = field(compare=False)
    y: Tensor = field(compare=False)


def _spec_of(module: nn.Module, cls: type, projections: Projections) -> GatedSpec | Refusal:
    found = _probed(cls, definition_of(cls), settings_of(module), projections, members_of(module, projections))
    if isinstance(found, Refusal):
        names = {name for name, _ in projections}
        others = [name for name, _ in module.named_parameters() if name.partition(".")[0] not in names]
        if others:  # the probe has no parameters: their names say more than the error that it met
            return Refusal(f"it also computes with {', '.join(dict.fromkeys(n.partition('.')[0] for n in others))}")
    return found


@functools.cache
def _probed(
    cls: type, definition: Definition, settings: Settings, projections: Projections, members: tuple[Member, ...]
) -> GatedSpec | Refusal:
    """Run the class's forward in both modes; the specs that both give must be one and the same."""
    found = {mode: _probed_in(cls, settings, projections, members, mode) for mode in (False, True)}
    if isinstance(found[False], Refusal) or found[True] == found[False]:
        return found[False]
    return Refusal("it computes something else in training mode, such as a dropout")


def _probed_in(
    cls: type, settings: Settings, projections: Projections, members: tuple[Member, ...], training: bool
) -> GatedSpec | Refusal:
    hidden = _hidden_size(projections) or projections[0][1][0]
    x = numbers(2, len(ROWS), hidden) * torch.tensor(ROWS, device="cpu").unsqueeze(-1)
    found: GatedSpec | Refusal = Refusal(NOT_THE_FORM)
    for dtype in (torch.bfloat16, torch.float32):  # the first shows casts; its numbers are too coarse to compare
        calls: list[_Call] = []
        # seeds lie 10 apart, because each probe uses two
        probes = {p[0]: _ProjectionProbe(p, 10 * seed, calls) for seed, p in enumerate(projections, 1)}
        hollow = with_members(stub(cls, settings, **probes), members).train(training)
        given = answer(lambda: hollow.forward(x.to(dtype)))  # noqa: B023  called at once
        if isinstance(given, Refusal):
            return given
        if not isinstance(given, Tensor) or {t.dtype for c in calls for t in (c.x, c.y)} | {given.dtype} != {dtype}:
            return Refusal("its result or the input of a projection has another dtype than the hidden states")
        if dtype == torch.float32:
            found = _spec_from(calls, given, x, [name for name, _ in projections], settings)
    return found


def _spec_from(
    calls: list[_Call], given: Tensor, x: Tensor, names: list[str], settings: Settings
) -> GatedSpec | Refusal:
    """Return the spec that explains the calls of the projections and the result (float32)."""
    if sorted(call.name for call in calls) != sorted(names):
        return Refusal("it does not call each of its projections once")
    inputs = [call for call in calls if call.x.shape == x.shape and torch.equal(call.x, x)]
    down = [call for call in calls if call not in inputs]
    if not inputs or len(inputs) > 2 or len(down) > 1:
        return Refusal(NOT_THE_FORM)
    product, scale = (down[0].x, _factor(given, down[0].y, settings)) if down else (given, 1.0)
    if scale is None:
        return Refusal("it changes the result of its last projection")
    form = _form_of([call.y for call in inputs], product, settings)
    if form is None:
        return Refusal(NOT_THE_FORM)
    (kernel, approximate), swapped, options = form
    packed = len(inputs) == 1
    if swapped and packed:
        options["up_first"] = True
    elif swapped:
        inputs.reverse()
    order = [call.name for call in inputs]
    return GatedSpec(
        kernel, approximate, packed, tuple(order), down[0].name if down else None, tuple(sorted(options.items())), scale
    )


def _factor(given: Tensor, result: Tensor, settings: Settings) -> float | None:
    """Return the number among 1 and the settings by which the result of the down projection is multiplied."""
    fitting = (factor for factor in (1.0, *_floats(settings)) if close(given, result * factor, rtol=1e-6, atol=1e-6))
    return next(fitting, None)


Options = dict[str, Any]  # keywords of a gated kernel
RELU_OPTIONS: tuple[Options, ...] = ({}, {"squared": True})
Form = tuple[ActivationKind, bool, Options]


def _form_of(inputs: list[Tensor], product: Tensor, settings: Settings) -> Form | None:
    """Return the activation, whether up comes first, and options, with which the kernels make the product.

    inputs: outputs of the two input projections (..., F), or of the packed one (..., 2F).
    """
    if len(inputs) == 1 and inputs[0].shape[-1] % 2:
        return None
    halves = inputs[0].chunk(2, dim=-1) if len(inputs) == 1 else inputs
    if halves[0].shape != product.shape or halves[1].shape != product.shape:
        return None
    first, second = halves
    plain: list[tuple[ActivationKind, Options]] = [(kind, {}) for kind in ACTIVATIONS]
    plain += [(("reglu", "none"), options) for options in RELU_OPTIONS]
    with_settings: list[tuple[ActivationKind, Options]] = [
        (("swiglu", "none"), options) for options in _swiglu_options(settings)
    ]
    for candidates in (plain, with_settings):
        fitting: list[Form] = []
        for kind, options in candidates:
            if computes(kind, first, second, product, options):
                fitting.append((kind, False, options))
            if computes(kind, second, first, product, options):
                fitting.append((kind, True, options))
        if fitting:
            return fitting[0] if len(fitting) == 1 or _all_equal(fitting) else None
    return None


def _all_equal(fitting: list[Form]) -> bool:
    return all(form == fitting[0] for form in fitting)


def _swiglu_options(settings: Settings) -> Iterator[Options]:
    """Yield options of `swiglu` with limits and factors among the settings: clamped gates, and gates times a factor."""
    values = _floats(settings)
    limits = [None, *(value for value in values if value > 0)]
    alphas = [(1.0, 1.0), *((a, s) for a in values for s in dict.fromkeys((1.0, a)))]  # silu(a g) = a · g σ(a g)
    for limit, (alpha, scale), offset in itertools.product(limits, alphas, (0.0, 1.0)):
        options = {"alpha": alpha, "scale": scale, "up_offset": offset}
        options = {name: value for name, value in options.items() if value != float(name != "up_offset")}
        if options or limit is not None:
            yield options | ({} if limit is None else {"limit": limit})


def _floats(settings: Settings) -> list[float]:
    """Return the numbers among the settings that may be limits or factors: not sizes, which are whole and large."""
    numeric = (float(value) for _, value in settings if type(value) in (int, float))
    return [value for value in dict.fromkeys(numeric) if math.isfinite(value) and 0 < abs(value) <= 100 and value != 1]
