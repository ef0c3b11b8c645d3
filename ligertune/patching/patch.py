"""Replace the computations of a transformers model by our kernels, instance by instance, and report what was done.

Patch before PEFT, FSDP or DDP wrap the model. `unpatch` restores the class of every module.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from ligertune_kernels import backend, geglu, swiglu
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.activations.gate_offload import OffloadedGate
from ligertune.patching.experts.kernel_experts import KernelExperts, register_experts
from ligertune.patching.experts.recognise_experts import is_experts, recognise_experts
from ligertune.patching.fused_loss import DeferredLossModel, KernelLossModel, LossHead, refuse_head, refuse_loss
from ligertune.patching.module_patch import ModulePatch, has_own_hooks, patch_module, unpatch_module, wrapper_of
from ligertune.patching.norms.kernel_norms import KernelLayerNorm, KernelNorm, RecomputedLayerNorm, RecomputedNorm
from ligertune.patching.norms.recognise_norms import is_layer_norm, is_norm, recognise_layer_norm, recognise_norm
from ligertune.patching.probe import Refusal
from ligertune.patching.recognise import GatedSpec, is_gated_mlp, recognise_mlp
from ligertune.patching.recompute import RecomputableOutput, is_linear, mark_recomputable, recompute_inputs
from ligertune.patching.rope_patch import KernelRope, is_rotary, recognise_rope
from ligertune.planning.plan import KernelLine

Loss = Literal["linear_cross_entropy", "cross_entropy", "torch"]
Recompute = Literal["norms"] | bool


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did. backend: what the kernels run on, given the device of the model."""

    rows: tuple[KernelLine, ...]
    backend: Literal["triton", "reference"]


class KernelMLP(ModulePatch):
    """Mixin of a gated MLP. Its projections stay modules, so LoRA and hooks on them work."""

    patch_spec: GatedSpec

    def forward(self, hidden_states: Tensor) -> Tensor:
        sources = (self.gate_up_proj,) if self.patch_spec.packed else (self.gate_proj, self.up_proj)
        # Only the kernel reads their outputs, so its backward may write the gradients over them.
        inplace = all(map(gives_new_unseen_output, sources))
        return self.down_proj(self.activated(*(source(hidden_states) for source in sources), inplace=inplace))

    def activated(self, *gate_and_up: Tensor, inplace: bool) -> Tensor:
        """Return act(gate) * up (..., F)."""
        return _gated(self.patch_spec, *gate_and_up, inplace=inplace)


class RecomputedMLP(RecomputableOutput, KernelMLP):
    """Mixin of a gated MLP whose `down_proj` does not keep its input."""

    def activated(self, *gate_and_up: Tensor, inplace: bool) -> Tensor:
        product = super().activated(*gate_and_up, inplace=inplace)
        return mark_recomputable(product, partial(_gated, self.patch_spec), *gate_and_up)


class KernelExpertGate(ModulePatch):
    """Mixin of experts that `KernelExperts` does not compute: between their two matrix products, `_apply_gate`."""

    patch_spec: GatedSpec

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        return _gated(self.patch_spec, gate_up_out)


def gives_new_unseen_output(module: nn.Module) -> bool:
    """Return whether a layer's output is new memory that its backward does not need and no hook sees.

    That holds for a plain nn.Linear, which keeps its weight and its input. Adapters and quantised layers are other
    classes. Under torch.compile nothing would be gained. Each forward checks again, since adapters, hooks and wrappers
    may come after `patch`.
    """
    if torch.compiler.is_compiling() or nn.modules.module._has_any_global_hook() or has_own_hooks(module):
        return False
    plain = is_linear(module) or isinstance(module, OffloadedGate)
    return plain and not hasattr(module, "parametrizations")


def _gated(spec: GatedSpec, *gate_and_up: Tensor, inplace: bool = False) -> Tensor:
    """Return act(gate) * up (..., F) of gate and up (..., F), or of both in one tensor (..., 2F)."""
    if spec.kernel == "swiglu":
        return swiglu(*gate_and_up, inplace=inplace)
    return geglu(*gate_and_up, approximate=spec.approximate, inplace=inplace)


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: how it is found and recognised, its patch, and the argument of `patch` that turns it off."""

    switch: Literal["rope", "norm", "mlp"]
    kernel: str  # the report's row of those that were not recognised
    found: Callable[[nn.Module], bool]
    recognise: Callable[[nn.Module], Any]
    mixin: type[ModulePatch]
    recomputed: type[ModulePatch] | None = None  # the patch with `recompute`
    gate: type[ModulePatch] | None = None  # the patch of experts whose spec is a GatedSpec

    def mixin_for(self, recompute: Recompute) -> type[ModulePatch]:
        wanted = recompute is True or (recompute == "norms" and self.switch == "norm")
        return self.recomputed if wanted and self.recomputed is not None else self.mixin

    def has_patched(self, module: nn.Module) -> bool:
        return isinstance(module, self.mixin) or (self.gate is not None and isinstance(module, self.gate))


LAYER_KINDS = (
    LayerKind("rope", "apply_rope", is_rotary, recognise_rope, KernelRope),
    LayerKind("norm", "rms_norm", is_norm, recognise_norm, KernelNorm, RecomputedNorm),
    LayerKind("norm", "layer_norm", is_layer_norm, recognise_layer_norm, KernelLayerNorm, RecomputedLayerNorm),
    LayerKind("mlp", "swiglu", is_gated_mlp, recognise_mlp, KernelMLP, RecomputedMLP),
    LayerKind("mlp", "experts", is_experts, recognise_experts, KernelExperts, gate=KernelExpertGate),
)


@dataclass
class _Tally:
    """Counts of one row of the report."""

    applied: int = 0
    already: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def row(self, kernel: str) -> KernelLine:
        notes = [f"{self.already} patched before"] if self.already else []
        notes += [f"{count} {why}" for why, count in self.left.items()]
        if not self.applied and not self.left:
            notes = ["the model has none"]
        return KernelLine(kernel, self.applied, self.left.total(), "; ".join(notes))


def patch(
    model: nn.Module,
    *,
    rope: bool = True,
    norm: bool = True,
    mlp: bool = True,
    loss: Loss = "linear_cross_entropy",
    keep_logits: bool = False,
    recompute: Recompute = False,
) -> PatchReport:
    """Let every module of `model` use our kernel where one computes the same, and return a report.

    Weights, state-dict keys, hooks, pickling and `isinstance` stay as they are, and other models of the same class are
    not changed. Modules that are not recognised are left alone; the report says why. Patching twice changes nothing.
    Raises ValueError if the model is patched with another `loss` or `recompute`.

    loss: with "linear_cross_entropy" a call with labels in training mode returns `logits=None`, because no logits are
    made. Whether it really ran is known after the first step: `loss_counts(model)` tells, and a warning if it did not.
    keep_logits: training returns the logits. The loss is then computed from them, by "cross_entropy".
    recompute: linear layers do not keep the outputs of these norms and MLPs, or of the norms only; the backward
    computes them again (`patching.recompute`).
    """
    register_experts()
    if keep_logits and loss == "linear_cross_entropy":
        loss = "cross_entropy"
    switches = {"rope": rope, "norm": norm, "mlp": mlp}
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    for kind in LAYER_KINDS:
        mixin = kind.mixin_for(recompute) if switches[kind.switch] else None
        for module in filter(kind.found, model.modules()):
            _patch_layer(module, kind, tallies, mixin)
    for kernels in (("apply_rope",), ("rms_norm",), ("swiglu", "geglu", "experts")):
        if not tallies.keys() & set(kernels):
            tallies[kernels[0]] = _Tally()  # a row that says there are none
    if "peft" in sys.modules:  # importing peft takes seconds
        from ligertune.models.adapters.expert_lora import split_adapters

        split_adapters(model)
    rows = [tally.row(kernel) for kernel, tally in tallies.items()]
    # the outermost transformers model: `model` may be peft's wrapper of it
    owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    if recompute:
        rows.append(_patch_readers(model, owner))
    return PatchReport((*rows, _patch_loss(owner, loss)), backend(next(model.parameters()).device))


def _patch_layer(
    module: nn.Module, kind: LayerKind, tallies: dict[str, _Tally], mixin: type[ModulePatch] | None
) -> None:
    """Patch one layer and count it. mixin: None if this kind is switched off."""
    name = type(module).__name__
    if kind.has_patched(module):
        if mixin is not None and module.patch_mixin not in (mixin, kind.gate):
            raise ValueError(f"{name} was patched with another `recompute`: unpatch the model first")
        tallies[module.patch_spec.kernel].applied += 1
        tallies[module.patch_spec.kernel].already += 1
        return
    spec = Refusal("switched off") if mixin is None else kind.recognise(module)
    if isinstance(spec, Refusal):
        tallies[kind.kernel].left[f"{name}: {spec.reason}"] += 1
        return
    patch_module(module, kind.gate if kind.gate is not None and isinstance(spec, GatedSpec) else mixin, spec)
    tallies[spec.kernel].applied += 1


def _patch_readers(model: nn.Module, owner: nn.Module) -> KernelLine:
    """Let linear layers recompute their inputs; the row counts the modules whose outputs are recomputable."""
    # not the output head: the loss reads its input
    recompute_inputs(model, but=owner.get_output_embeddings() if isinstance(owner, PreTrainedModel) else None)
    makers = sum(isinstance(module, RecomputableOutput) for module in model.modules())
    return KernelLine("recompute", makers, 0, "" if makers else "no norm or MLP is patched")


def _patch_loss(owner: nn.Module, loss: Loss) -> KernelLine:
    """Let our kernel compute the loss of `owner`."""
    if isinstance(owner, KernelLossModel):
        current = "linear_cross_entropy" if isinstance(owner, DeferredLossModel) else "cross_entropy"
        if loss != current:
            raise ValueError(f"the loss of this model is {current} already: unpatch it before patching with {loss}")
        return KernelLine(current, 1, 0, "1 patched before")
    if loss == "torch":
        return KernelLine("linear_cross_entropy", 0, 1, f"1 {type(owner).__name__}: switched off")
    refusal = refuse_loss(owner)
    if refusal is None and loss == "linear_cross_entropy":
        refusal = refuse_head(owner.get_output_embeddings())
    if refusal is not None:
        return KernelLine(loss, 0, 1, f"1 {type(owner).__name__}: {refusal.reason}")
    if loss == "linear_cross_entropy":
        patch_module(owner.get_output_embeddings(), LossHead)
        patch_module(owner, DeferredLossModel)
    else:
        patch_module(owner, KernelLossModel)
    return KernelLine(loss, 1, 0, "")


def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Restore the class that every module of `model` had before `patch`, and return the names of those that stay.

    A module stays patched, with a warning, if something has wrapped it since: FSDP2 has subclassed its class, or its
    forward was replaced on the instance. Take the wrapper off and call `unpatch` again.
    """
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
