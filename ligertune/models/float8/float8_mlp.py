"""Gated MLPs of float8 layers: SwiGLU's kernels write the float8 operands of the products around it.

    y = (silu(x G^T) · x U^T) D^T        G, U: (F, E), D: (E, F)

Separate kernels would write SwiGLU's result h and the gradients of gate and up in 16 bits, and read them again to
quantise them. `swiglu_float8` quantises what it computes before it writes: 16 bytes per element instead of 28, with the
same bits. The backward computes h again for D's gradient, so h is not saved.

In the first step the scales are not known: SwiGLU's kernels then run twice, and the first pass finds the amax.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from ligertune_kernels import swiglu_float8, swiglu_float8_backward
from ligertune_kernels.autograd import no_double_backward
from torch import Tensor, nn

from ligertune.models.float8.delayed_scales import SlotScale
from ligertune.models.float8.float8_linear import Float8Linear, dtype_of_product
from ligertune.models.float8.quantized import Quantized, float8_product
from ligertune.patching.mlps.kernel_mlps import KernelMLP
from ligertune.patching.mlps.recognise_mlps import GatedSpec
from ligertune.patching.module_patch import has_own_hooks, patch_module, unpatch_module
from ligertune.patching.patch import NONE_FOUND
from ligertune.planning.plan import KernelLine

Projections = tuple[Float8Linear, Float8Linear, Float8Linear]  # gate, up, down


class _Float8MLP(torch.autograd.Function):
    """The MLP of quantised x; the gradients of x and of the three weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., E)
        gate_weight: Tensor,  # (F, E)
        up_weight: Tensor,  # (F, E)
        down_weight: Tensor,  # (E, F)
        quantized_x: Quantized,
        layers: Projections,
        dtype: torch.dtype,
    ) -> Tensor:  # (..., E)
        q = quantized_x
        down = layers[2]
        training = layers[2].training
        weights = [layer.quantized_weight() for layer in layers]
        gate, up = (
            float8_product(q.rows.flatten(0, -2), w.rows, q.inverse, w.inverse, dtype, fast=True) for w in weights[:2]
        )

        def find(maxima: list[Tensor]) -> None:
            swiglu_float8(gate, up, torch.ones((), device=x.device), amax=maxima[0])

        (scale,) = down.float8_scales.scales_of((down.float8_slot,), find, record=training)
        h = swiglu_float8(gate, up, scale.scale, amax=scale.amax)
        y = float8_product(h, weights[2].rows, scale.inverse, weights[2].inverse, dtype, fast=True)
        trained = (q.by_columns, q.inverse) if gate_weight.requires_grad else ()
        ctx.save_for_backward(gate, up, *trained)
        # The layers keep the weights' copies until the next step, so no hook has to save them.
        ctx.weights = weights
        ctx.layers = layers
        ctx.training = training
        ctx.scale = scale
        ctx.dtypes = x.dtype, gate_weight.dtype, up_weight.dtype, down_weight.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *x = ctx.saved_tensors
        wg, wu, wd = ctx.weights
        x_dtype, *weight_dtypes = ctx.dtypes
        q = ctx.layers[2].quantize_gradient(dy, rows=True, columns=bool(x), record=ctx.training)
        dh = float8_product(q.rows.flatten(0, -2), wd.columns, q.inverse, wd.inverse, gate.dtype, fast=False)
        scale, g, u = ctx.scale, *_gradient_scales(ctx, dh, gate, up)
        maxima = None if g.amax is None else (g.amax, u.amax)
        (g_rows, g_columns), (u_rows, u_columns), h_columns = swiglu_float8_backward(
            dh, gate, up, scale.scale, g.scale, u.scale, amax=maxima, columns=bool(x)
        )
        del dh  # each operand is freed before the next product's result is allocated
        dx = dw_gate = dw_up = dw_down = None
        if ctx.needs_input_grad[0]:
            dx = float8_product(g_rows, wg.columns, g.inverse, wg.inverse, x_dtype, fast=False)
            dx += float8_product(u_rows, wu.columns, u.inverse, wu.inverse, x_dtype, fast=False)
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])
        del g_rows, u_rows
        if x:
            columns, inverse = x
            dw_down = float8_product(q.columns, h_columns, q.inverse, scale.inverse, weight_dtypes[2], fast=False)
            del q, h_columns
            dw_gate = float8_product(g_columns, columns, g.inverse, inverse, weight_dtypes[0], fast=False)
            del g_columns
            dw_up = float8_product(u_columns, columns, u.inverse, inverse, weight_dtypes[1], fast=False)
        return dx, dw_gate, dw_up, dw_down, None, None, None


def _gradient_scales(ctx: Any, dh: Tensor, gate: Tensor, up: Tensor) -> list[SlotScale]:
    """Return the scales of the gradients of gate and up."""

    def find(maxima: list[Tensor]) -> None:
        one = torch.ones((), device=dh.device)
        swiglu_float8_backward(dh, gate, up, one, one, one, amax=tuple(maxima), columns=False)

    slots = tuple(layer.gradient_slot for layer in ctx.layers[:2])
    return ctx.layers[0].float8_scales.scales_of(slots, find, record=ctx.training)


class Float8MLP(KernelMLP):
    """Mixin of a gated MLP whose three projections multiply in float8."""

    def project(self, hidden_states: Tensor) -> Tensor:
        layers = self._projections()
        if layers is None:
            return super().project(hidden_states)
        gate, up, _ = layers
        q = gate.quantized_input(hidden_states)
        q = up.quantized_input(hidden_states)  # the same copies; the scales learn that both layers share them
        weights = (layer.weight for layer in layers)
        dtype = dtype_of_product(hidden_states)
        return _Float8MLP.apply(hidden_states, *weights, q, layers, dtype)

    def _projections(self) -> Projections | None:
        """Return the projections; None where one has an adapter or hooks, or where only some of the weights train."""
        layers = [layer for layer in gated_projections(self) if isinstance(layer, Float8Linear)]
        if len(layers) < 3 or any(map(has_own_hooks, layers)):
            return None
        has_global_hook = nn.modules.module._has_any_global_hook()
        if has_global_hook or len({layer.weight.requires_grad for layer in layers}) > 1:
            return None
        gate, up, down = layers
        return gate, up, down


def gated_projections(mlp: KernelMLP) -> tuple[nn.Module, ...]:
    """Return the gate, up and down projection."""
    spec = mlp.patch_spec
    assert spec.output is not None  # `float8_mlps` takes no MLP without a down projection
    return tuple(getattr(mlp, name) for name in (*spec.inputs, spec.output))


@dataclass(frozen=True)
class Float8MLPs:
    """MLPs that are computed as a `Float8MLP`, and the number of the other gated MLPs by reason."""

    taken: tuple[KernelMLP, ...]
    left: Counter[str]

    def line(self) -> KernelLine:
        """Return the line of the plan. An MLP with adapters is left: call it after they were added."""
        left = Counter(self.left)
        adapted = sum(not all(isinstance(p, nn.Linear) for p in gated_projections(mlp)) for mlp in self.taken)
        left["an adapter adds to its products"] += adapted
        why = "; ".join(f"{count} {reason}" for reason, count in (+left).items())
        why = why or ("" if self.taken else NONE_FOUND)
        return KernelLine("swiglu_float8", len(self.taken) - adapted, left.total(), why)


def float8_mlps(model: nn.Module, linears: Collection[str]) -> Float8MLPs:
    """Choose among the patched MLPs. linears: names of the linear layers that multiply in float8."""
    in_float8 = {id(model.get_submodule(name)) for name in linears}
    taken = []
    left = Counter[str]()
    for module in model.modules():
        if not isinstance(module, KernelMLP) or not isinstance(module.patch_spec, GatedSpec):
            continue
        reason = _why_left(module, in_float8)
        if reason is None:
            taken.append(module)
        else:
            left[f"{type(module).__name__}: {reason}"] += 1
    return Float8MLPs(tuple(taken), left)


def _why_left(mlp: KernelMLP, in_float8: Collection[int]) -> str | None:
    spec = mlp.patch_spec
    if spec.packed:
        return "one layer computes gate and up"
    if (spec.kernel, spec.options, spec.output_scale) != ("swiglu", (), 1.0) or spec.output is None:
        return "not down(silu(gate) * up)"
    if mlp.patch_mixin is not KernelMLP:
        return "its product is recomputed, or it runs in tiles"
    projections = gated_projections(mlp)
    if any(id(projection) not in in_float8 for projection in projections):
        return "a projection is not in float8"
    if any(projection.bias is not None for projection in projections):
        return "a projection has a bias"
    return None


def to_float8_mlps(mlps: Float8MLPs) -> None:
    """Let the MLPs compute with float8 operands, in place."""
    for mlp in mlps.taken:
        spec = mlp.patch_spec
        unpatch_module(mlp)
        patch_module(mlp, Float8MLP, spec)
