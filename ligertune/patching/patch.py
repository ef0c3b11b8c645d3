"""Replace the computations of a transformers model by our kernels, instance by instance, and report what was done.

Patch before FSDP or DDP wrap the model; PEFT may come before or after. `unpatch` restores the class of every module.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import transformers
from ligertune_kernels import backend
from torch import nn
from transformers import PreTrainedModel

from ligertune.any_types import AnyModule
from ligertune.patching.experts.kernel_experts import KernelExperts, register_experts
from ligertune.patching.experts.recognise_experts import is_experts, recognise_experts
from ligertune.patching.fused_loss import (
    DeferredLossModel,
    KernelLossModel,
    LossHead,
    defer_loss,
    get_output_head,
    refuse_loss,
)
from ligertune.patching.mixers.kernel_mixers import KernelMixer
from ligertune.patching.mixers.mixer_functions import OPS as MIXER_OPS
from ligertune.patching.mixers.recognise_mixers import op_of, recognise_mixer
from ligertune.patching.mlps.deferred_activation import KernelProduct, ProductSpec, RecomputedProduct
from ligertune.patching.mlps.kernel_mlps import KernelExpertGate, KernelMLP, RecomputedMLP
from ligertune.patching.mlps.recognise_mlps import GatedSpec, is_mlp, recognise_mlp
from ligertune.patching.module_patch import ModulePatch, patch_module, unpatch_module, wrapper_of
from ligertune.patching.norms.kernel_norms import (
    KernelGatedNorm,
    KernelLayerNorm,
    KernelNorm,
    RecomputedGatedNorm,
    RecomputedLayerNorm,
    RecomputedNorm,
)
from ligertune.patching.norms.recognise_gated_norms import is_gated_norm, recognise_gated_norm
from ligertune.patching.norms.recognise_norms import is_layer_norm, is_norm, recognise_layer_norm, recognise_norm
from ligertune.patching.probe import NotNeeded, Refusal
from ligertune.patching.recompute import RecomputableOutput, recompute_inputs
from ligertune.patching.rope.kernel_rope import KernelRope, is_rotary, is_rotary_table, recognise_rope
from ligertune.planning.plan import KernelLine

Loss = Literal["linear_cross_entropy", "cross_entropy", "torch"]
Recompute = Literal["norms", "mlps"] | bool

NONE_FOUND = "none found"  # note of a row without layers


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did. backend: what the kernels run on, given the device of the model."""

    rows: tuple[KernelLine, ...]
    backend: Literal["triton", "reference"]

    def __str__(self) -> str:
        """Return a line for each kernel: how many modules it replaces, and how many are left for which reason."""
        how = "Triton" if self.backend == "triton" else "the PyTorch references: no GPU that Triton supports"
        width = max((len(row.kernel) for row in self.rows), default=0)
        lines = [f"kernels run on {how}"]
        for row in self.rows:
            left = f", {row.left} left" if row.left else ""
            lines.append(f"  {row.kernel:{width}}  {row.applied} replaced{left}{row.note and f' ({row.note})'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerPart:
    """The patch of a part of a layer, and the type of spec that says so."""

    spec: type
    mixin: type[ModulePatch]
    recomputed: type[ModulePatch]  # the patch with `recompute`


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: how it is found and recognised, its patch, and the argument of `patch` that turns it off."""

    switch: Literal["rope", "norm", "mlp", "mixer"]
    kernel: str  # the report's row of those that were not recognised
    found: Callable[[nn.Module], bool]
    recognise: Callable[[nn.Module], Any]
    mixin: type[ModulePatch]
    recomputed: type[ModulePatch] | None = None  # the patch with `recompute`
    part: LayerPart | None = None  # what is patched of a layer that is not recognised as a whole

    def mixin_for(self, spec: Any, recompute: Recompute) -> type[ModulePatch]:
        """Return the patch of a layer that was recognised as `spec`: of the whole layer, or of its part."""
        wanted = recompute is True or recompute == f"{self.switch}s"
        if self.part is not None and isinstance(spec, self.part.spec):
            return self.part.recomputed if wanted else self.part.mixin
        return self.recomputed if wanted and self.recomputed is not None else self.mixin

    def has_patched(self, module: nn.Module) -> bool:
        return isinstance(module, self.mixin) or (self.part is not None and isinstance(module, self.part.mixin))


def _mixer_kind(op: str) -> LayerKind:
    return LayerKind("mixer", op, lambda module: op_of(module) == op, recognise_mixer, KernelMixer)


LAYER_KINDS = (
    LayerKind("rope", "apply_rope", is_rotary, recognise_rope, KernelRope),
    LayerKind("norm", "rms_norm", is_norm, recognise_norm, KernelNorm, RecomputedNorm),
    LayerKind("norm", "layer_norm", is_layer_norm, recognise_layer_norm, KernelLayerNorm, RecomputedLayerNorm),
    LayerKind("norm", "gated_rms_norm", is_gated_norm, recognise_gated_norm, KernelGatedNorm, RecomputedGatedNorm),
    LayerKind(
        "mlp",
        "swiglu",
        is_mlp,
        recognise_mlp,
        KernelMLP,
        RecomputedMLP,
        LayerPart(ProductSpec, KernelProduct, RecomputedProduct),
    ),
    LayerKind(
        "mlp",
        "experts",
        is_experts,
        recognise_experts,
        KernelExperts,
        part=LayerPart(GatedSpec, KernelExpertGate, KernelExpertGate),
    ),
    *map(_mixer_kind, MIXER_OPS),
)


@dataclass
class _Tally:
    """Counts of one row of the report."""

    applied: int = 0
    already: int = 0
    left: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)  # what the row says without counting it as left

    def row(self, kernel: str) -> KernelLine:
        notes = [f"{self.already} patched before"] if self.already else []
        notes += [f"{count} {why}" for why, count in (self.left + self.remarks).items()]
        if not self.applied and not notes:
            notes = [NONE_FOUND]
        return KernelLine(kernel, self.applied, self.left.total(), "; ".join(notes))


def patch(
    model: nn.Module,
    *,
    rope: bool = True,
    norm: bool = True,
    mlp: bool = True,
    mixer: bool = True,
    lora: bool = True,
    loss: Loss = "linear_cross_entropy",
    keep_logits: bool = False,
    recompute: Recompute = False,
) -> PatchReport:
    """Let every module of `model` use our kernel where one computes the same, and return a report.

    Weights, state-dict keys, hooks, pickling and `isinstance` stay as they are, and other models of the same class are
    not changed. Modules that are not recognised are left alone; the report says why. Patching twice changes nothing.
    Raises TypeError for an argument of another type. Raises ValueError if the model has no layer of a kind that
    kernels compute, or is patched with another `loss` or `recompute`.

    lora: layers with a plain LoRA adapter of PEFT add its update inside their matrix multiplications. Adapters that are
    added later are fused by another call.
    loss: with "linear_cross_entropy" a call with labels in training mode returns `logits=None`, because no logits are
    made. Whether it really ran is known after the first step: `loss_counts(model)` tells, and a warning if it did not.
    keep_logits: training returns the logits. The loss is then computed from them, by "cross_entropy".
    recompute: linear layers do not keep the outputs of these norms and MLPs, or of one kind; the backward
    computes them again (`patching.recompute`).
    """
    switches = {"rope": rope, "norm": norm, "mlp": mlp, "mixer": mixer}
    _check_arguments(model, {**switches, "lora": lora, "keep_logits": keep_logits}, loss, recompute)
    register_experts()
    if keep_logits and loss == "linear_cross_entropy":
        loss = "cross_entropy"
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    for kind in LAYER_KINDS:
        for module in filter(kind.found, model.modules()):
            _patch_layer(module, kind, tallies, recompute if switches[kind.switch] else None)
    for kernels in (
        ("apply_rope",),
        ("rms_norm", "layer_norm", "gated_rms_norm"),
        ("swiglu", "geglu", "reglu", "experts"),
    ):
        if not tallies.keys() & set(kernels):
            tallies[kernels[0]] = _Tally()  # a row that says there are none
    _explain_rotary_tables(model, tallies["apply_rope"])
    rows = [tally.row(kernel) for kernel, tally in tallies.items()]
    # the outermost transformers model: `model` may be peft's wrapper of it
    owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    if recompute:
        rows.append(_patch_readers(model, owner))
    patched = {id(module) for module in model.modules() if isinstance(module, ModulePatch)}
    # first the loss: an adapted head that computes it is not fused as other layers are
    loss_row = _patch_loss(owner, loss, _loss_head_patch(model, owner, lora))
    return PatchReport((*rows, *_patch_adapters(model, lora, patched), loss_row), backend(_device_of(model)))


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of the first weight or buffer; that of new tensors for a model without any."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.get_default_device())


def _check_model(function: str, model: object) -> None:
    """Raise TypeError, which names the function, unless `model` is a module of PyTorch."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: the model must be a torch.nn.Module, and is a {type(model).__name__}")


def _check_switches(function: str, switches: dict[str, object]) -> None:
    """Raise TypeError, which names the function, for a switch that is neither True nor False."""
    for name, value in switches.items():
        if type(value) is not bool:
            raise TypeError(f"{function}: {name} must be True or False, and is {value!r}")


def _check_arguments(model: nn.Module, switches: dict[str, object], loss: object, recompute: object) -> None:
    """Raise TypeError or ValueError for arguments that `patch` cannot use."""
    _check_model("patch", model)
    _check_switches("patch", switches)
    if loss not in get_args(Loss):
        raise ValueError(f"patch: loss must be one of {', '.join(get_args(Loss))}, and is {loss!r}")
    if recompute not in (True, False, "norms", "mlps"):
        raise ValueError(f"patch: recompute must be True, False, 'norms' or 'mlps', and is {recompute!r}")
    modules = list(model.modules())
    if not any(isinstance(module, PreTrainedModel) or _is_layer(module) for module in modules):
        raise ValueError(
            f"patch: {type(model).__name__} is no model of transformers and has no norm, MLP, rotary embedding or LoRA"
            " layer that a kernel could compute"
        )


def _is_layer(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") or any(kind.found(module) or kind.has_patched(module) for kind in LAYER_KINDS)


def _explain_rotary_tables(model: nn.Module, tally: _Tally) -> None:
    """Count rotary embeddings as left if no layer calls a rotary function; say which have angles that are trained."""
    unused = not tally.applied and not tally.left
    for table in filter(is_rotary_table, model.modules()):
        name = type(table).__name__
        if unused:
            tally.left[f"{name}: no forward applies it by a function of its own, so PyTorch computes it"] += 1
        elif any(parameter.requires_grad for parameter in table.parameters()):
            tally.remarks[f"{name}: while its angles are trained, PyTorch rotates by them"] += 1


def _patch_layer(module: AnyModule, kind: LayerKind, tallies: dict[str, _Tally], recompute: Recompute | None) -> None:
    """Patch one layer and count it. recompute: None if this kind is switched off."""
    name = type(module).__name__
    if kind.has_patched(module):
        spec = module.patch_spec
        if recompute is not None and module.patch_mixin is not kind.mixin_for(spec, recompute):
            raise ValueError(f"{name} was patched with another `recompute`: unpatch the model first")
        tallies[spec.kernel].applied += 1
        tallies[spec.kernel].already += 1
        return
    found = Refusal("switched off") if recompute is None else kind.recognise(module)
    if recompute is None or isinstance(found, Refusal):
        tally = tallies[kind.kernel]
        reasons = tally.remarks if isinstance(found, NotNeeded) else tally.left
        reasons[f"{name}: {found.reason}"] += 1
        return
    patch_module(module, kind.mixin_for(found, recompute), found)
    tallies[found.kernel].applied += 1


def _patch_readers(model: nn.Module, owner: nn.Module) -> KernelLine:
    """Let linear layers recompute their inputs; the row counts the modules whose outputs are recomputable."""
    # not the output head: the loss reads its input
    head = get_output_head(owner)
    recompute_inputs(model, but=getattr(head, "base_layer", head))  # PEFT's layer around the head holds it
    makers = sum(isinstance(module, RecomputableOutput) for module in model.modules())
    return KernelLine("recompute", makers, 0, "" if makers else "no norm or MLP is patched")


def _loss_head_patch(model: nn.Module, owner: nn.Module, lora: bool) -> type[LossHead]:
    """Return the patch of the output head, which an adapter may have wrapped, also after an earlier `patch`."""
    if not lora or "peft" not in sys.modules:  # importing peft takes seconds
        return LossHead
    from ligertune.patching.lora.fused_lora import loss_head_patch, move_loss_heads

    move_loss_heads(model)
    return loss_head_patch(get_output_head(owner))


def _patch_adapters(model: nn.Module, lora: bool, patched: set[int]) -> tuple[KernelLine, ...]:
    """Fuse PEFT's adapters, those of experts always; return the row of LoRA layers, if there are any.

    patched: ids of the modules that an earlier `patch` has patched.
    """
    if "peft" not in sys.modules:
        return ()
    from ligertune.patching.experts.expert_lora import split_adapters
    from ligertune.patching.lora.fused_lora import adapted_layers, fuse_adapters, why_peft_computes

    split_adapters(model)
    layers = adapted_layers(model)
    if lora:
        fuse_adapters(model)
    tally = _Tally()
    for layer in layers:
        reason = why_peft_computes(layer) if lora or id(layer) in patched else "switched off"
        if reason is None:
            tally.applied += 1
            tally.already += id(layer) in patched
        else:
            tally.left[f"{type(layer).__name__}: {reason}"] += 1
    return (tally.row("lora_linear"),) if layers else ()


def _patch_loss(owner: nn.Module, loss: Loss, head_patch: type[LossHead]) -> KernelLine:
    """Let our kernel compute the loss of `owner`, in its output head by `head_patch`."""
    if isinstance(owner, KernelLossModel):
        current = "linear_cross_entropy" if isinstance(owner, DeferredLossModel) else "cross_entropy"
        if loss != current:
            raise ValueError(f"the loss of this model is {current} already: unpatch it before patching with {loss}")
        return KernelLine(current, 1, 0, "1 patched before")
    if loss == "torch":
        return KernelLine("linear_cross_entropy", 0, 1, f"1 {type(owner).__name__}: switched off")
    if loss == "linear_cross_entropy":
        refusal = defer_loss(owner, head_patch)
    else:
        refusal = refuse_loss(owner)
        if refusal is None:
            patch_module(owner, KernelLossModel)
    if refusal is not None:
        return KernelLine(loss, 0, 1, f"1 {type(owner).__name__}: {refusal.reason}")
    return KernelLine(loss, 1, 0, "")


def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Restore the class that every module of `model` had before `patch`, and return the names of those that stay.

    A module stays patched, with a warning, if something has wrapped it since: FSDP2 has subclassed its class, or its
    forward was replaced on the instance. Take the wrapper off and call `unpatch` again. Raises TypeError unless `model`
    is a module.
    """
    _check_model("unpatch", model)
    stay = {}
    for name, module in model.named_modules():
        if isinstance(module, ModulePatch):
            wrapper = wrapper_of(module)
            if wrapper is None:
                unpatch_module(module)
            else:
                stay[name or type(module).__name__] = wrapper
    if stay:
        listed = "; ".join(f"{name}: {wrapper}" for name, wrapper in stay.items())
        count = f"{len(stay)} module{'s' * (len(stay) > 1)}"
        warnings.warn(
            f"unpatch: {count} stayed patched, wrapped after `patch` ({listed}); all others are restored. "
            "Take the wrapper off and call unpatch again.",
            stacklevel=2,
        )
    return tuple(stay)


# ---- transformers' auto classes of language models, which load and patch


class _PatchedAuto:
    """Load a model of one of transformers' auto classes, and patch it. keep_logits: as in `patch`."""

    auto_class: type[Any]  # a class of transformers' auto classes, which have no public base

    @classmethod
    def from_pretrained(cls, *args: Any, keep_logits: bool = False, **kwargs: Any) -> PreTrainedModel:
        _check_switches(cls.__name__, {"keep_logits": keep_logits})
        register_experts()  # first: arguments or configuration may name experts_implementation="ligertune"
        kwargs.setdefault("trust_remote_code", False)  # transformers would ask on the terminal
        model = cls.auto_class.from_pretrained(*args, **kwargs)
        patch(model, keep_logits=keep_logits)
        return model

    @classmethod
    def from_config(cls, *args: Any, keep_logits: bool = False, **kwargs: Any) -> PreTrainedModel:
        _check_switches(cls.__name__, {"keep_logits": keep_logits})
        register_experts()
        model = cls.auto_class.from_config(*args, **kwargs)
        patch(model, keep_logits=keep_logits)
        return model


class AutoModelForCausalLM(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForCausalLM`, then patch."""

    auto_class = transformers.AutoModelForCausalLM


class AutoModelForImageTextToText(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForImageTextToText`, then patch."""

    auto_class = transformers.AutoModelForImageTextToText


class AutoModelForSequenceClassification(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForSequenceClassification`, then patch."""

    auto_class = transformers.AutoModelForSequenceClassification
