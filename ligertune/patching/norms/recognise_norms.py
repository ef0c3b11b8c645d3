"""Recognise norms that one of our kernels can compute.

As for MLPs, there is no table of models: the module's own forward runs on a few numbers, in every dtype that
shows where it rounds, and has to equal exactly one row of FORMS. `recognise_gated_norms` does the same for norms that
take a gate.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from ligertune_kernels.ops.norms.layer_norm import layer_norm_reference
from ligertune_kernels.ops.norms.rms_norm import rms_norm_reference
from torch import Tensor, nn
from torch.nn import functional as F

from ligertune.patching.probe import (
    Definition,
    NotNeeded,
    Refusal,
    Settings,
    answer,
    close,
    definition_of,
    numbers,
    refuse_forward,
    settings_of,
    stub,
    uses_stored_statistics,
)

Cast = Literal["llama", "gemma", "deepseek", "none"]


@dataclass(frozen=True)
class NormSpec:
    """The arguments with which `rms_norm` equals a norm.

    cast: "none" for a norm without a weight, or one that does not use it, which rounds only once. eps_name: the
    attribute that holds its eps, or the number that its forward names. rounded_offset: the offset is added to the
    weight in the weight's dtype. mixed: it equals `rms_norm` if the dtypes of weight and hidden states differ, too.
    """

    cast: Cast
    offset: float
    eps_name: str | float
    rounded_offset: bool = False
    mixed: bool = True
    kernel = "rms_norm"


@dataclass(frozen=True)
class LayerNormSpec:
    """The arguments with which `layer_norm` equals a norm: see NormSpec. channels_first: of images (B, C, H, W)."""

    offset: float = 0.0
    eps_name: str | float = "eps"
    mixed: bool = True
    channels_first: bool = False
    kernel = "layer_norm"


Formula = Callable[..., Tensor]  # of x, weight, bias and eps: the fields of a NormForm say which may be None


def _rms(x: Tensor, weight: Tensor, bias: None, eps: float, *, cast: Cast, offset: float = 0.0) -> Tensor:
    return rms_norm_reference(x, weight, eps, cast=cast, offset=offset)


def _rms_of_rounded_weight(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    return rms_norm_reference(x, weight + 1.0, eps, cast="gemma")


def _layer_norm_in_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_written_out(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.float() - x.float().mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide if weight is None else weight.float() * wide
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def _torchs_rms_norm(x: Tensor, weight: Tensor | None, bias: None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _plus_one(formula: Formula) -> Formula:
    return lambda x, weight, bias, eps: formula(x, weight + 1.0, bias, eps)


# Each computes in fp32 and rounds once, but torch's kernels sum in another order, which shows in a few last bits.
LAYER_NORMS: tuple[Formula, ...] = (_layer_norm_in_dtype, layer_norm_reference, _layer_norm_written_out)


class NormForm(NamedTuple):
    """A spec without its eps, the ways to compute it in plain torch, and the parameters that it uses."""

    spec: NormSpec | LayerNormSpec
    formulas: tuple[Formula, ...]
    needs_weight: bool
    takes_bias: bool = False


FORMS = (
    NormForm(NormSpec("llama", 0.0, ""), (partial(_rms, cast="llama"),), needs_weight=True),
    NormForm(NormSpec("gemma", 1.0, ""), (partial(_rms, cast="gemma", offset=1.0),), needs_weight=True),
    NormForm(NormSpec("gemma", 1.0, "", rounded_offset=True), (_rms_of_rounded_weight,), needs_weight=True),
    NormForm(NormSpec("gemma", 0.0, ""), (partial(_rms, cast="gemma"), _torchs_rms_norm), needs_weight=True),  # OLMo 2
    # Value norms of Gemma 3n and 4, query and key norms of Llama 4; a weight that is there may be unused.
    NormForm(
        NormSpec("none", 0.0, ""),
        (
            lambda x, w, b, eps: rms_norm_reference(x, None, eps),
            lambda x, w, b, eps: F.rms_norm(x, x.shape[-1:], None, eps),
        ),
        needs_weight=False,
    ),
    NormForm(
        NormSpec("deepseek", 0.0, ""),
        (lambda x, w, b, eps: rms_norm_reference(x, None, eps, cast="deepseek"),),
        needs_weight=False,
    ),
    NormForm(LayerNormSpec(0.0, ""), LAYER_NORMS, needs_weight=False, takes_bias=True),
    NormForm(
        LayerNormSpec(1.0, ""), tuple(map(_plus_one, LAYER_NORMS)), needs_weight=True, takes_bias=True
    ),  # Nemotron
)
BATCH_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
EPS_NAMES = ("variance_epsilon", "eps")
EPS_IN_CODE = (1e-5, 1e-6, 1e-8, 1e-12)  # of norms without such an attribute, such as OLMo's, whose code names 1e-5
WEIGHTLESS_WIDTH = 64  # any width will do where no weight has one
GROUP_NAMES = ("group_size", "n_groups", "num_groups")
OTHER_NUMBERS = "its numbers are not those of an RMS norm we have"
PROBE_EPS = 0.37  # as large as the variance, so that an eps in another place, or a missing one, is noticed
SAME_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # rounding and the result's dtype must be equal, too
MIXED_DTYPES = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))  # (weight, hidden states)


class Parameters(NamedTuple):
    """Which parameters a norm has. width: of the rows; WEIGHTLESS_WIDTH if the module does not say."""

    width: int
    weight: bool
    bias: bool

    def numbers(self, dtype: torch.dtype) -> dict[str, nn.Parameter | None]:
        """Return parameters for a stub; None for one that is missing, as torch's norms have it."""

        def parameter(seed: int) -> nn.Parameter:
            return nn.Parameter(numbers(self.width, seed=seed, dtype=dtype), requires_grad=False)

        return {"weight": parameter(1) if self.weight else None, "bias": parameter(2) if self.bias else None}


def other_rounding(dtype: torch.dtype) -> str:
    """Return the reason for a norm whose numbers in fp32 are right."""
    return f"it rounds {str(dtype).removeprefix('torch.')} at other places than our kernels"


def is_norm_leaf(module: nn.Module) -> bool:
    """Return whether a module is a leaf with "norm" in its class name."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def takes_gate(module: nn.Module) -> bool:
    """Return whether a norm's forward takes the hidden states and a gate."""
    names = list(inspect.signature(type(module).forward).parameters)
    return len(names) == 3 and names[2] == "gate"


def reported_as(module: nn.Module) -> str | None:
    """Return the row of the report in which a module is counted; None if it is no norm."""
    if not is_norm_leaf(module):
        return None
    spec = getattr(type(module), "patch_spec", None)  # patched already
    if spec is None:
        if takes_gate(module):
            return "gated_rms_norm"
        spec = recognise(module)
    if isinstance(spec, Refusal):
        named = isinstance(module, nn.LayerNorm) or "layernorm" in type(module).__name__.lower()
        return "layer_norm" if named else "rms_norm"
    return spec.kernel


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is reported as a layer norm: torch's, or one that a probe recognised."""
    return reported_as(module) == "layer_norm"


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is reported as an RMS norm: all norms that are no layer norm and take no gate."""
    return reported_as(module) == "rms_norm"


def recognise_norm(module: nn.Module) -> NormSpec | Refusal:
    """Return the `rms_norm` that equals this norm bit for bit in half precision, or why there is none."""
    spec = recognise(module)
    return Refusal("it is a layer norm") if isinstance(spec, LayerNormSpec) else spec


def recognise_layer_norm(module: nn.Module) -> LayerNormSpec | Refusal:
    """Return the `layer_norm` that equals this norm, or why there is none. torch's own class needs no probe."""
    spec = recognise(module)
    return Refusal("it is an RMS norm") if isinstance(spec, NormSpec) else spec


def recognise(module: nn.Module) -> NormSpec | LayerNormSpec | Refusal:
    """Return the kernel that equals this norm, or why there is none."""
    if len(getattr(module, "normalized_shape", (0,))) != 1:
        return Refusal("it normalises over more than the last dimension")
    refusal = refuse_parameters(module) or refuse_forward(module)
    if refusal or type(module) is nn.LayerNorm:
        return refusal or LayerNormSpec()
    if uses_stored_statistics(module):
        return NotNeeded("it uses stored statistics, so there is nothing to sum")
    cls: type = type(module)
    settings = settings_of(module)
    shape = getattr(module, "normalized_shape", None)
    if shape is not None:  # torch's layer norm passes it on
        settings += (("normalized_shape", tuple(shape)),)
    return _recognise_class(cls, definition_of(cls), settings, norm_parameters(module))


def refuse_parameters(module: nn.Module) -> Refusal | None:
    """Return why no kernel takes the parameters of a norm, or None."""
    others = [name for name, _ in module.named_parameters() if name not in ("weight", "bias")]
    if others:
        return Refusal(f"it has {', '.join(others)}")
    if isinstance(module, BATCH_NORMS) or "batchnorm" in type(module).__name__.lower():
        return Refusal("it normalises over the examples of a batch or the positions of an image")
    if isinstance(module, nn.GroupNorm):
        return Refusal("it normalises over groups of channels and positions")
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if value is not None and not (isinstance(value, Tensor) and value.ndim == 1):
            return Refusal(f"its {name} is not a tensor of one dimension")
    return None


def norm_parameters(module: nn.Module) -> Parameters:
    """Return which parameters a norm has."""
    weight = getattr(module, "weight", None)
    (width,) = getattr(module, "normalized_shape", (WEIGHTLESS_WIDTH,)) if weight is None else weight.shape
    return Parameters(width, weight is not None, getattr(module, "bias", None) is not None)


@functools.cache
def _recognise_class(
    cls: type, definition: Definition, settings: Settings, parameters: Parameters
) -> NormSpec | LayerNormSpec | Refusal:
    """Try the attribute that holds eps, then numbers that the forward may name."""
    refusals = []
    for eps in eps_candidates(settings):
        found = _match(cls, settings, parameters, eps)
        if not isinstance(found, Refusal):
            return found
        refusals.append(found)
    return refusals[0]


def eps_candidates(settings: Settings) -> list[str | float]:
    """Return what may be the eps of a norm: an attribute, or a number of its code."""
    floats = [name for name, value in settings if isinstance(value, float) and "eps" in name.lower()]
    return [*sorted(floats, key=lambda name: name not in EPS_NAMES), *EPS_IN_CODE]


def probe_rows(width: int, eps: str | float, dtype: torch.dtype) -> Tensor:
    """Return rows, enough for every rounding to show, whose variance is about as large as eps."""
    rows = numbers(max(3, 1024 // width), width)
    scale = 1.0 if isinstance(eps, str) else (eps / PROBE_EPS) ** 0.5
    return (rows * scale).to(dtype)


def _match(
    cls: type, settings: Settings, parameters: Parameters, eps: str | float
) -> NormSpec | LayerNormSpec | Refusal:
    def given_and_matching(weight_dtype: torch.dtype, dtype: torch.dtype) -> tuple[object, list[NormForm]]:
        members = parameters.numbers(weight_dtype)
        x = probe_rows(parameters.width, eps, dtype)
        value, held = (PROBE_EPS, {eps: PROBE_EPS}) if isinstance(eps, str) else (eps, {})
        given = answer(lambda: stub(cls, settings, **held, **members).forward(x))
        equal = partial(_equals, given, (x, members.get("weight"), members.get("bias"), value))
        return given, [] if isinstance(given, Refusal) else [form for form in forms if any(map(equal, form.formulas))]

    forms = _forms_for(parameters)
    for dtype in SAME_DTYPES:
        given, forms = given_and_matching(dtype, dtype)
        if isinstance(given, Refusal):
            images = _match_images(cls, settings, parameters, eps)
            return _explain(cls, settings, parameters, given) if images is None else images
        if not forms:
            return _why_no_form(settings, dtype)
    if len(forms) != 1:
        return Refusal(OTHER_NUMBERS)
    mixed = True
    if parameters.weight:
        results = [given_and_matching(*dtypes) for dtypes in MIXED_DTYPES]
        mixed = all(found or isinstance(given, Refusal) for given, found in results)  # one that raises is never run
    return replace(forms[0].spec, eps_name=eps, mixed=mixed)


def _forms_for(parameters: Parameters) -> list[NormForm]:
    """Return the forms that a norm with these parameters can have."""
    forms = (form for form in FORMS if parameters.weight or not form.needs_weight)
    return [form for form in forms if form.takes_bias or not parameters.bias]


def _why_no_form(settings: Settings, dtype: torch.dtype) -> Refusal:
    """Return why no form gives the numbers of a norm's forward in this dtype."""
    if dtype is not torch.float32:
        return Refusal(other_rounding(dtype))
    grouped = any(name in GROUP_NAMES and value for name, value in settings)
    return Refusal("it normalises groups of columns, which needs a kernel" if grouped else OTHER_NUMBERS)


def _match_images(cls: type, settings: Settings, parameters: Parameters, eps: str | float) -> LayerNormSpec | None:
    """Return the spec of a layer norm over the channels of images (B, C, H, W), as SAM's towers have; else None."""
    value, held = (PROBE_EPS, {eps: PROBE_EPS}) if isinstance(eps, str) else (eps, {})
    for dtype in SAME_DTYPES:
        members = parameters.numbers(dtype)
        x = probe_rows(parameters.width, eps, dtype)[None, None]  # (1, 1, W, C)
        images = x.permute(0, 3, 1, 2)
        given = answer(lambda: stub(cls, settings, **held, **members).forward(images))  # noqa: B023  called at once
        if not isinstance(given, Tensor) or given.ndim != 4:
            return None
        arguments = x, members.get("weight"), members.get("bias"), value
        if not any(_equals(given.permute(0, 2, 3, 1), arguments, formula) for formula in LAYER_NORMS):
            return None
    return LayerNormSpec(eps_name=eps, mixed=False, channels_first=True)


def _explain(cls: type, settings: Settings, parameters: Parameters, refusal: Refusal) -> Refusal:
    """Return a better reason for a forward that takes no rows (N, E): it may take images or sequences."""
    for shape in ((2, parameters.width, 3, 3), (2, parameters.width, 3)):
        members = parameters.numbers(torch.float32)
        given = answer(lambda: stub(cls, settings, **members).forward(numbers(*shape)))  # noqa: B023  called at once
        if isinstance(given, Tensor):
            return Refusal("it normalises over channels, which are not the last dimension")
    return refusal


def _equals(given: object, arguments: tuple[Tensor | float | None, ...], formula: Formula) -> bool:
    """Compare exactly in half precision, and up to the order of summation in fp32."""
    ours = answer(formula, *arguments)
    if isinstance(ours, Refusal):  # torch's layer norm takes no weight of another dtype
        return False
    # The norms of transformers 5.24 need a fifth of this tolerance, and the nearest other form 1,700 times as much.
    rtol, atol = (2e-6, 1e-7) if ours.dtype == torch.float32 else (0.0, 0.0)
    return close(given, ours, rtol=rtol, atol=atol)
