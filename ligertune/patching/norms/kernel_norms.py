"""Mixins of norms that our kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ligertune_kernels import layer_norm, rms_norm
from torch import Tensor

from ligertune.patching.module_patch import ModulePatch
from ligertune.patching.norms.recognise_norms import NormSpec
from ligertune.patching.recompute import RecomputableOutput, mark_recomputable


class KernelNorm(ModulePatch):
    """Mixin of an RMS norm."""

    patch_spec: NormSpec

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._norm()(*self._sources(hidden_states))

    def _sources(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (hidden_states,) if self.patch_spec.cast == "none" else (hidden_states, self.weight)

    def _norm(self) -> Callable[..., Tensor]:
        spec = self.patch_spec
        return partial(rms_norm, eps=getattr(self, spec.eps_name), offset=spec.offset, cast=spec.cast)


class KernelLayerNorm(ModulePatch):
    """Mixin of torch's layer norm."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


class RecomputedNorm(RecomputableOutput, KernelNorm):
    """Mixin of an RMS norm whose output the layers that read it do not keep."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return mark_recomputable(super().forward(hidden_states), self._norm(), *self._sources(hidden_states))


class RecomputedLayerNorm(RecomputableOutput, KernelLayerNorm):
    """Mixin of a layer norm whose output the layers that read it do not keep."""

    def forward(self, input: Tensor) -> Tensor:
        sources = (t for t in (input, self.weight, self.bias) if t is not None)
        return mark_recomputable(super().forward(input), partial(layer_norm, eps=self.eps), *sources)
