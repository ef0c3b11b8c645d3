"""Mixins of gated MLPs that our kernels compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from ligertune_kernels import geglu, reglu, swiglu
from torch import Tensor, nn

from ligertune.patching.mlps.recognise_mlps import GatedSpec
from ligertune.patching.module_patch import ModulePatch, has_own_hooks
from ligertune.patching.recompute import RecomputableOutput, mark_recomputable


class KernelMLP(ModulePatch):
    """Mixin of a gated MLP. Its projections stay modules, so LoRA and hooks on them work."""

    patch_spec: GatedSpec

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) != 1:  # an argument that is not used in training, such as Moshi's layer_idx: the model's forward
            return super().forward(*args, **kwargs)
        return self.project(given[0])

    def project(self, hidden_states: Tensor) -> Tensor:
        """Return the MLP of (..., E)."""
        spec = self.patch_spec
        sources = [getattr(self, name) for name in spec.inputs]
        # Only the kernel reads their outputs, so its backward may write the gradients over them.
        inplace = all(gives_new_unseen_output(source, hidden_states) for source in sources)
        product = self.activated(*(source(hidden_states) for source in sources), inplace=inplace)
        if spec.output is None:
            return product
        output = getattr(self, spec.output)(product)
        return output if spec.output_scale == 1.0 else output * spec.output_scale

    def activated(self, *gate_and_up: Tensor, inplace: bool) -> Tensor:
        """Return act(gate) * up (..., F)."""
        return gated_product(self.patch_spec, *gate_and_up, inplace=inplace)


class RecomputedMLP(RecomputableOutput, KernelMLP):
    """Mixin of a gated MLP whose down projection does not keep its input."""

    def activated(self, *gate_and_up: Tensor, inplace: bool) -> Tensor:
        product = super().activated(*gate_and_up, inplace=inplace)
        return mark_recomputable(product, partial(gated_product, self.patch_spec), *gate_and_up)


class KernelExpertGate(ModulePatch):
    """Mixin of experts that `KernelExperts` does not compute: between their two matrix products, `_apply_gate`."""

    patch_spec: GatedSpec

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        return gated_product(self.patch_spec, gate_up_out)


def gives_new_unseen_output(module: nn.Module, x: Tensor) -> bool:
    """Return whether a layer's output of x is new memory that its backward does not need and no hook sees.

    That holds for a plain nn.Linear, which keeps its weight and its input, for bitsandbytes' in 4 bits, and for a fused
    adapter. PEFT's adapters and float8 layers are other classes. Under torch.compile nothing would be gained. Each
    forward checks again, since adapters, hooks and wrappers may come after `patch`.
    """
    if torch.compiler.is_compiling() or nn.modules.module._has_any_global_hook() or has_own_hooks(module):
        return False
    if hasattr(module, "parametrizations"):
        return False
    if isinstance(module, ModulePatch):
        return module.gives_new_output(x)
    in_four_bits = getattr(getattr(module, "weight", None), "quant_state", None) is not None
    return type(module) is nn.Linear or in_four_bits


def gated_product(spec: GatedSpec, *gate_and_up: Tensor, inplace: bool = False) -> Tensor:
    """Return act(gate) * up (..., F) of gate and up (..., F), or of both in one tensor (..., 2F)."""
    options = dict(spec.options)
    if spec.kernel == "swiglu":
        return swiglu(*gate_and_up, inplace=inplace, **options)
    if spec.kernel == "reglu":
        return reglu(*gate_and_up, inplace=inplace, **options)
    return geglu(*gate_and_up, approximate=spec.approximate, inplace=inplace, **options)
