"""Put our kernels into a transformers model, instance by instance, and say what was done.

Patch before PEFT, FSDP or DDP wrap the model. `unpatch` gives every module its own class back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from ligertune_kernels import backend, geglu, layer_norm, rms_norm, swiglu
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.activations.gate_offload import KeptGate
from ligertune.patching.fused_loss import LossHead, LossInHead, OwnLoss, refuse_head, refuse_loss
from ligertune.patching.module_patch import Patch, has_own_hooks, swap, unswap
from ligertune.patching.probe import Refusal
from ligertune.patching.recognise import (
    GatedSpec,
    NormSpec,
    is_experts,
    is_gated_mlp,
    is_layer_norm,
    is_norm,
    recognise_experts,
    recognise_layer_norm,
    recognise_mlp,
    recognise_norm,
)
from ligertune.patching.recompute import Rebuilding, is_linear, made_again, rebuild_inputs
from ligertune.patching.rope_patch import ShadowedRope, is_rotary, recognise_rope

Loss = Literal["linear_cross_entropy", "cross_entropy", "torch"]
Rebuild = Literal["norms"] | bool


@dataclass(frozen=True)
class PatchRow:
    """One kernel: modules that use it now, modules it could not take over, and why."""

    kernel: str
    applied: int
    left: int
    note: str


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did; `backend` is what the kernels run on where the model is now."""

    rows: tuple[PatchRow, ...]
    backend: Literal["triton", "reference"]


class KernelNorm(Patch):
    """Mixin of a norm."""

    patch_spec: NormSpec

    def forward(self, hidden_states: Tensor) -> Tensor:
        spec = self.patch_spec
        return rms_norm(hidden_states, self.weight, getattr(self, spec.eps_name), offset=spec.offset, cast=spec.cast)


class KernelLayerNorm(Patch):
    """Mixin of torch's layer norm."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


class RebuiltNorm(Rebuilding, KernelNorm):
    """Mixin of a norm whose output is not kept by the layers that read it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        spec = self.patch_spec
        norm = partial(rms_norm, eps=getattr(self, spec.eps_name), offset=spec.offset, cast=spec.cast)
        return made_again(super().forward(hidden_states), norm, hidden_states, self.weight)


class RebuiltLayerNorm(Rebuilding, KernelLayerNorm):
    """Mixin of a layer norm whose output is not kept by the layers that read it."""

    def forward(self, input: Tensor) -> Tensor:
        sources = (t for t in (input, self.weight, self.bias) if t is not None)
        return made_again(super().forward(input), partial(layer_norm, eps=self.eps), *sources)


class KernelMLP(Patch):
    """Mixin of a gated MLP; its projections stay modules, so LoRA and hooks on them work."""

    patch_spec: GatedSpec

    def forward(self, hidden_states: Tensor) -> Tensor:
        sources = (self.gate_up_proj,) if self.patch_spec.packed else (self.gate_proj, self.up_proj)
        # Only the kernel reads their outputs, so its backward may write the gradients over them.
        inplace = all(map(gives_new_unseen_output, sources))
        return self.down_proj(self.activated(*(source(hidden_states) for source in sources), inplace=inplace))

    def activated(self, *gate_and_up: Tensor, inplace: bool) -> Tensor:
        return _gated(self.patch_spec, *gate_and_up, inplace=inplace)


class RebuiltMLP(Rebuilding, KernelMLP):
    """Mixin of a gated MLP whose second projection does not keep its input."""

    def activated(self, *gate_and_up: Tensor, inplace: bool) -> Tensor:
        product = super().activated(*gate_and_up, inplace=inplace)
        return made_again(product, partial(_gated, self.patch_spec), *gate_and_up)


class KernelExperts(Patch):
    """Mixin of a mixture's experts: only what stands between their two matrix products."""

    patch_spec: GatedSpec

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        return _gated(self.patch_spec, gate_up_out)


def gives_new_unseen_output(module: nn.Module) -> bool:
    """Return whether a layer's output is new memory that its backward does not need and no hook sees.

    That holds for a plain nn.Linear, which keeps its weight and its input. Adapters and quantised layers are other
    classes. Under torch.compile nothing would be gained. Every call asks again: adapters, hooks and wrappers may come
    after `patch`.
    """
    if torch.compiler.is_compiling() or nn.modules.module._has_any_global_hook() or has_own_hooks(module):
        return False
    plain = is_linear(module) or isinstance(module, KeptGate)
    return plain and not hasattr(module, "parametrizations")


def _gated(spec: GatedSpec, *gate_and_up: Tensor, inplace: bool = False) -> Tensor:
    """act(gate) * up of (..., F), (..., F) or of one (..., 2F)."""
    if spec.kernel == "swiglu":
        return swiglu(*gate_and_up, inplace=inplace)
    return geglu(*gate_and_up, approximate=spec.approximate, inplace=inplace)


@dataclass(frozen=True)
class Layer:
    """A kind of layer: how it is found, how its spec is recognised, what it becomes, which switch turns it off."""

    switch: Literal["rope", "norm", "mlp"]
    kernel: str  # the row of those that were not recognised
    found: Callable[[nn.Module], bool]
    recognise: Callable[[nn.Module], Any]
    mixin: type[Patch]
    rebuilt: type[Patch] | None = None  # in its place where outputs are made again

    def worn(self, *, recompute: Rebuild) -> type[Patch]:
        wanted = recompute is True or (recompute == "norms" and self.switch == "norm")
        return self.rebuilt if wanted and self.rebuilt is not None else self.mixin


LAYERS = (
    Layer("rope", "apply_rope", is_rotary, recognise_rope, ShadowedRope),
    Layer("norm", "rms_norm", is_norm, recognise_norm, KernelNorm, RebuiltNorm),
    Layer("norm", "layer_norm", is_layer_norm, recognise_layer_norm, KernelLayerNorm, RebuiltLayerNorm),
    Layer("mlp", "swiglu", is_gated_mlp, recognise_mlp, KernelMLP, RebuiltMLP),
    Layer("mlp", "swiglu", is_experts, recognise_experts, KernelExperts),
)


@dataclass
class _Tally:
    """What becomes one row of the report."""

    applied: int = 0
    already: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def row(self, kernel: str) -> PatchRow:
        notes = [f"{self.already} patched before"] if self.already else []
        notes += [f"{count} {why}" for why, count in self.left.items()]
        if not self.applied and not self.left:
            notes = ["the model has none"]
        return PatchRow(kernel, self.applied, self.left.total(), "; ".join(notes))


def patch(
    model: nn.Module,
    *,
    rope: bool = True,
    norm: bool = True,
    mlp: bool = True,
    loss: Loss = "linear_cross_entropy",
    recompute: Rebuild = False,
) -> PatchReport:
    """Let every module of `model` that computes what one of our kernels computes use that kernel.

    Weights, state-dict keys, hooks, pickling and `isinstance` stay as they are, and other models of the same class
    are not touched. What is not recognised is left alone; the report says why. Patching twice changes nothing.

    recompute: linear layers keep no output of these norms and MLPs, or of the norms only; the backward makes it again
    (`model.recompute`).
    """
    switches = {"rope": rope, "norm": norm, "mlp": mlp}
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    for layer in LAYERS:
        for module in filter(layer.found, model.modules()):
            _patch_module(
                module, layer, tallies, mixin=layer.worn(recompute=recompute) if switches[layer.switch] else None
            )
    for kernels in (("apply_rope",), ("rms_norm",), ("swiglu", "geglu")):
        if not tallies.keys() & set(kernels):
            tallies[kernels[0]] = _Tally()  # a row that says there are none
    rows = [tally.row(kernel) for kernel, tally in tallies.items()]
    if recompute:
        rows.append(_patch_readers(model))
    return PatchReport((*rows, _patch_loss(model, loss)), backend(next(model.parameters()).device))


def _patch_module(module: nn.Module, layer: Layer, tallies: dict[str, _Tally], *, mixin: type[Patch] | None) -> None:
    """mixin: what the module is to wear; None where that is switched off."""
    name = type(module).__name__
    if isinstance(module, layer.mixin):
        if mixin is not None and module.patch_mixin is not mixin:
            raise ValueError(f"{name} was patched with another `recompute`: unpatch the model first")
        tallies[module.patch_spec.kernel].applied += 1
        tallies[module.patch_spec.kernel].already += 1
        return
    spec = Refusal("switched off") if mixin is None else layer.recognise(module)
    if isinstance(spec, Refusal):
        tallies[layer.kernel].left[f"{name}: {spec.reason}"] += 1
        return
    swap(module, mixin, spec)
    tallies[spec.kernel].applied += 1


def _patch_readers(model: nn.Module) -> PatchRow:
    """Let linear layers ask of their input how it is made again; the row counts the modules that say so."""
    owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    # the output head reads its input in the loss, in a way of its own
    rebuild_inputs(model, but=None if owner is None else owner.get_output_embeddings())
    makers = sum(isinstance(module, Rebuilding) for module in model.modules())
    return PatchRow("recompute", makers, 0, "" if makers else "no norm or MLP is patched")


def _patch_loss(model: nn.Module, loss: Loss) -> PatchRow:
    """Hand the loss of the outermost transformers model inside `model` to our kernel."""
    owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    if isinstance(owner, OwnLoss):
        worn = "linear_cross_entropy" if isinstance(owner, LossInHead) else "cross_entropy"
        if loss != worn:
            raise ValueError(f"the loss of this model is {worn} already: unpatch it before patching in {loss}")
        return PatchRow(worn, 1, 0, "1 patched before")
    if loss == "torch":
        return PatchRow("linear_cross_entropy", 0, 1, f"1 {type(owner).__name__}: switched off")
    refusal = refuse_loss(owner)
    if refusal is None and loss == "linear_cross_entropy":
        refusal = refuse_head(owner.get_output_embeddings())
    if refusal is not None:
        return PatchRow(loss, 0, 1, f"1 {type(owner).__name__}: {refusal.reason}")
    if loss == "linear_cross_entropy":
        swap(owner.get_output_embeddings(), LossHead, None)
        swap(owner, LossInHead, None)
    else:
        swap(owner, OwnLoss, None)
    return PatchRow(loss, 1, 0, "")


def unpatch(model: nn.Module) -> None:
    """Give every module of `model` back the class it had before `patch`."""
    for module in model.modules():
        if isinstance(module, Patch):
            unswap(module)
