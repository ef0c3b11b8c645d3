"""Mixins of norms that our kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ligertune_kernels import gated_rms_norm, layer_norm, rms_norm
from ligertune_kernels.autograd import autocast_dtype
from torch import Tensor, nn

from ligertune.patching.module_patch import ModulePatch
from ligertune.patching.norms.recognise_gated_norms import GatedNormSpec
from ligertune.patching.norms.recognise_norms import Cast, LayerNormSpec, NormSpec
from ligertune.patching.recompute import RecomputableOutput, mark_recomputable


def _eps_of(module: nn.Module, eps_name: str | float) -> float:
    return getattr(module, eps_name) if isinstance(eps_name, str) else eps_name


def _has_other_dtype(weight: Tensor | None, hidden_states: Tensor) -> bool:
    return weight is not None and weight.dtype != hidden_states.dtype


class KernelNorm(ModulePatch):
    """Mixin of an RMS norm."""

    patch_spec: NormSpec
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self._is_equal(hidden_states):
            return super().forward(hidden_states)
        return self._norm()(*self._sources(hidden_states))

    def _is_equal(self, hidden_states: Tensor) -> bool:
        """Return whether the kernel gives what the module's own forward gives, which runs otherwise."""
        return self.patch_spec.mixed or not _has_other_dtype(getattr(self, "weight", None), hidden_states)

    def _sources(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (hidden_states,) if self.patch_spec.cast in ("none", "deepseek") else (hidden_states, self.weight)

    def _norm(self) -> Callable[..., Tensor]:
        spec = self.patch_spec
        norm = _norm_of_rounded_weight if spec.rounded_offset else rms_norm
        return partial(norm, eps=_eps_of(self, spec.eps_name), offset=spec.offset, cast=spec.cast)


def _norm_of_rounded_weight(hidden_states: Tensor, weight: Tensor, *, eps: float, offset: float, cast: Cast) -> Tensor:
    return rms_norm(hidden_states, weight + offset, eps=eps, cast=cast)


class KernelLayerNorm(ModulePatch):
    """Mixin of a layer norm."""

    patch_spec: LayerNormSpec

    def forward(self, input: Tensor) -> Tensor:
        if not self._is_equal(input):
            return super().forward(input)
        if self.patch_spec.channels_first:  # input (B, C, H, W)
            return self._norm()(*self._sources(input.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self._norm()(*self._sources(input))

    def _is_equal(self, input: Tensor) -> bool:
        """Return whether the kernel gives what the module's own forward gives, which runs otherwise."""
        spec = self.patch_spec
        if spec.channels_first and input.ndim != 4:
            return False
        if spec.offset and autocast_dtype(input.device) is not None:
            return False  # Nemotron's norm rounds all its arguments to autocast's dtype
        return spec.mixed or not _has_other_dtype(getattr(self, "weight", None), input)

    def _sources(self, input: Tensor) -> tuple[Tensor, ...]:
        parameters = (getattr(self, name, None) for name in ("weight", "bias"))
        return input, *(t for t in parameters if t is not None)

    def _norm(self) -> Callable[..., Tensor]:
        spec = self.patch_spec
        norm = partial(layer_norm, eps=_eps_of(self, spec.eps_name), offset=spec.offset)
        # without a weight the second of the sources is the bias
        return norm if getattr(self, "weight", None) is not None else partial(_biased, norm)


def _biased(norm: Callable[..., Tensor], input: Tensor, bias: Tensor | None = None) -> Tensor:
    return norm(input, None, bias)


class KernelGatedNorm(ModulePatch):
    """Mixin of an RMS norm with a gate."""

    patch_spec: GatedNormSpec
    weight: Tensor

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if not self._is_equal(hidden_states, gate):
            return super().forward(hidden_states, gate)
        return self._norm()(hidden_states, gate, self.weight)

    def _is_equal(self, hidden_states: Tensor, gate: Tensor | None) -> bool:
        """Return whether the kernel gives what the module's own forward gives, which runs otherwise."""
        if gate is None or gate.shape != hidden_states.shape:
            return False
        return self.patch_spec.mixed or hidden_states.dtype == gate.dtype == self.weight.dtype

    def _norm(self) -> Callable[..., Tensor]:
        spec = self.patch_spec
        return partial(gated_rms_norm, eps=_eps_of(self, spec.eps_name), **spec.options())


class RecomputedNorm(RecomputableOutput, KernelNorm):
    """Mixin of an RMS norm whose output the layers that read it do not keep."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = super().forward(hidden_states)
        if not self._is_equal(hidden_states):  # the module's own forward ran, and our op may give other bits
            return output
        return mark_recomputable(output, self._norm(), *self._sources(hidden_states))


class RecomputedLayerNorm(RecomputableOutput, KernelLayerNorm):
    """Mixin of a layer norm whose output the layers that read it do not keep."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self._is_equal(input) or self.patch_spec.channels_first:  # convolutions read the latter
            return output
        return mark_recomputable(output, self._norm(), *self._sources(input))


class RecomputedGatedNorm(RecomputableOutput, KernelGatedNorm):
    """Mixin of an RMS norm with a gate whose output the layer that reads it does not keep."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        output = super().forward(hidden_states, gate)
        if gate is None or not self._is_equal(hidden_states, gate):
            return output
        return mark_recomputable(output, self._norm(), hidden_states, gate, self.weight)
