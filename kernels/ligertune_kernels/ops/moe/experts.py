r"""Gated experts of a mixture: each token (E,) goes through K of X gated MLPs, whose outputs are weighted and added.

    z = (g, u) = x W1ᵀ + b1      a = p · act(g) · (u + offset)      y = sum over the token's experts of a W2ᵀ + p b2

p are the router's weights; they are multiplied into a, because the down projection is linear. W1 (X, 2F, E) holds gate
and up of every expert, W2 (X, E, F) its down projection; LoRA adds scale · (x Aᵀ) Bᵀ to a projection. The backward, for
dy given by token:

    da = dy W2     dz, dp from da, z and p (kernels.py)     dx = sum over the token's experts of dz W1
    dW2 = dyᵀ a    dW1 = dzᵀ x     db1 = sum of dz     db2 = sum of p dy

The S = N·K pairs of token and expert are sorted by expert, so that each product is one product per group of rows
(grouped_product.py). For the backward the op keeps x, z, p, the order, and with LoRA the products with Aᵀ (S, R); a
and the gathered rows of x are computed again. Sums over experts and rows are in fp32 and in a fixed order, without
atomics.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch.nn import functional

from ligertune_kernels.autograd import autocast_dtype, no_double_backward, without_autocast
from ligertune_kernels.launcher import as_rows, runs_triton
from ligertune_kernels.ops.moe.expert_passes import (
    ExpertLayout,
    ExpertLora,  # noqa: F401  a public name of this op
    ExpertOptions,
    ExpertParameters,
    ExpertProjection,
    ExpertTensors,
    Kept,
    Needs,
    Weight,
    parameters_of,
    run_backward,
    run_forward,
)
from ligertune_kernels.ops.moe.kernels import GATE_FUNCTIONS, GatedActivation, Routing
from ligertune_kernels.ops.moe.tiles import Products


def experts_reference(
    hidden: torch.Tensor,  # (N, E)
    expert_index: torch.Tensor,  # (N, K) integers; outside [0, X): no expert
    expert_weights: torch.Tensor,  # (N, K)
    gate_up: Weight | ExpertProjection,  # (X, 2F, E)
    down: Weight | ExpertProjection,  # (X, E, F)
    *,
    activation: GatedActivation = GatedActivation(),  # noqa: B008 (immutable)
    layout: ExpertLayout = ExpertLayout(),  # noqa: B008 (immutable)
) -> torch.Tensor:  # (N, E)
    """Compute `experts` in plain torch, one expert after the other."""
    gate_up = _with_made_weight(gate_up)
    down = _with_made_weight(down)
    result = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    result = result + hidden.flatten()[:0].sum()  # zeros with a gradient if no pair has an expert
    for expert in range(len(down.weight)):
        token, slot = (expert_index == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        both = _project(hidden[token], gate_up, expert, layout.transposed)
        gate, up = (both[:, 0::2], both[:, 1::2]) if layout.interleaved else both.chunk(2, dim=-1)
        product = activate(gate, up, activation)
        out = _project(product, down, expert, layout.transposed)
        result = result.index_add(0, token, (out * expert_weights[token, slot].unsqueeze(1)).to(result.dtype))
    return result.to(hidden.dtype)


def _as_projection(given: Weight | ExpertProjection) -> ExpertProjection:
    return given if isinstance(given, ExpertProjection) else ExpertProjection(given)


def _with_made_weight(given: Weight | ExpertProjection) -> ExpertProjection:
    projection = _as_projection(given)
    return projection._replace(weight=projection.weight()) if callable(projection.weight) else projection


def activate(gate: torch.Tensor, up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """Return act(gate) · (up + offset) (..., F), in plain torch."""
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.function == "silu":
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = functional.gelu(gate, approximate="tanh" if activation.function == "gelu_tanh" else "none")
    return gate * (up + activation.up_offset)


def _project(
    x: torch.Tensor,  # (M, inputs)
    projection: ExpertProjection,
    expert: int,
    transposed: bool,
) -> torch.Tensor:  # (M, outputs)
    weight, bias, lora = projection
    one = weight[expert].T if transposed else weight[expert]
    y = functional.linear(x, one.to(x.dtype), None if bias is None else bias[expert].to(x.dtype))
    if lora is not None:
        y = y + lora.scale * functional.linear(
            functional.linear(x, lora.a[expert].to(x.dtype)), lora.b[expert].to(x.dtype)
        )
    return y


def _runs_once() -> bool:
    """Return whether this backward may write over what the forward kept: it cannot run again (retain_graph=True)."""
    # A compiled graph is functional, and cannot ask.
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()


class _Experts(torch.autograd.Function):
    """The op on hidden (N, E), weights (N, K), the eight tensors of the experts, expert_index (N, K) and options."""

    @staticmethod
    def forward(ctx, hidden, weights, *others):
        *tensors, expert_index, options = others
        parameters = ExpertParameters(ExpertTensors(*tensors), options)
        out, kept, routing = run_forward(hidden, expert_index, weights, parameters)
        ctx.save_for_backward(hidden, weights, *tensors, *kept, *routing[:5])
        ctx.arguments = options, routing[5:]
        return out

    @staticmethod
    @no_double_backward
    def backward(ctx, dout):
        hidden, weights, *saved = ctx.saved_tensors
        options, sizes = ctx.arguments
        parameters = ExpertParameters(ExpertTensors(*saved[:8]), options)
        kept = Kept(*saved[8:11])
        routing = Routing(*saved[11:], *sizes)
        needs = Needs(*ctx.needs_input_grad[:10])
        with without_autocast(hidden.device):
            gradients = run_backward(
                as_rows(dout), hidden, weights, parameters, kept, routing, needs, over_z=_runs_once()
            )
        return *gradients, None, None


def _run_kernels(
    hidden: torch.Tensor,  # (N, E)
    expert_index: torch.Tensor,  # (N, K)
    weights: torch.Tensor,  # (N, K)
    parameters: ExpertParameters,
) -> torch.Tensor:  # (N, E)
    hidden = as_rows(hidden)
    weights = weights.contiguous()
    tensors = parameters.tensors
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weights, *tensors)):
        return _Experts.apply(hidden, weights, *tensors, expert_index, parameters.options)
    return run_forward(hidden, expert_index, weights, parameters)[0]


def experts(
    hidden: torch.Tensor,  # (..., E)
    expert_index: torch.Tensor,  # (..., K) integers; outside [0, X): no expert
    expert_weights: torch.Tensor,  # (..., K)
    gate_up: Weight | ExpertProjection,  # (X, 2F, E)
    down: Weight | ExpertProjection,  # (X, E, F)
    *,
    activation: GatedActivation = GatedActivation(),  # noqa: B008 (immutable)
    layout: ExpertLayout = ExpertLayout(),  # noqa: B008 (immutable)
    products: Products | None = None,
) -> torch.Tensor:  # (..., E)
    """Send each token through its experts, and add their outputs by the router's weights.

    Computes in the dtype of hidden, or in that of autocast; parameters are cast to it, and the result has the dtype of
    hidden. gate_up and down are weights, or an ExpertProjection with bias and LoRA. A weight that is a function gets no
    gradient. A pair whose index is no expert adds nothing, and its weight has a gradient of 0. products: "grouped_mm",
    "triton" or "loop", which waits for the GPU; None: `product_for` chooses. Deterministic. Raises ValueError on
    mismatched shapes or unknown options.
    """
    options = ExpertOptions(activation, layout, products)
    parameters = parameters_of(_as_projection(gate_up), _as_projection(down), options)
    _check(hidden, expert_index, expert_weights, parameters)
    dtype = autocast_dtype(hidden.device) or hidden.dtype
    n_tokens = hidden.shape[:-1].numel()
    rows, index, weights = (t.reshape(n_tokens, t.shape[-1]) for t in (hidden, expert_index, expert_weights))
    rows = rows.to(dtype)
    parameters = ExpertParameters(parameters.tensors.to(dtype), parameters.options)
    with without_autocast(hidden.device):
        if any(t is not None and t.numel() == 0 for t in (rows, index, *parameters.tensors)):
            out = _no_pairs(rows, weights, parameters)
        elif runs_triton(rows):
            out = _run_kernels(rows, index, weights, parameters)
        else:
            out = experts_reference(
                rows, index, weights, parameters.gate_up, parameters.down, activation=activation, layout=layout
            )
    return out.to(hidden.dtype).view(hidden.shape)


def _no_pairs(hidden: torch.Tensor, weights: torch.Tensor, parameters: ExpertParameters) -> torch.Tensor:
    """Return zeros (N, E) that give every tensor a gradient of zeros."""
    tensors = (t for t in (hidden, weights, *parameters.tensors) if t is not None)
    return torch.zeros_like(hidden) + sum(t.flatten()[:0].sum().to(hidden.dtype) for t in tensors)


def _check(
    hidden: torch.Tensor,  # (..., E)
    expert_index: torch.Tensor,  # (..., K)
    expert_weights: torch.Tensor,  # (..., K)
    parameters: ExpertParameters,
) -> None:
    """Raise ValueError if shapes do not fit each other, or for unknown options.

    Weights that functions make are checked when they are made.
    """
    if expert_index.shape != expert_weights.shape or expert_index.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"experts: hidden is {tuple(hidden.shape)}, expert_index {tuple(expert_index.shape)} and expert_weights "
            f"{tuple(expert_weights.shape)}: expected (..., E), (..., K) and (..., K)"
        )
    if expert_index.is_floating_point() or expert_index.is_complex():
        raise ValueError(f"experts: expert_index is {expert_index.dtype}; expected integers")
    _check_options(parameters)
    _check_shapes(hidden.shape[-1], parameters)


def _check_options(parameters: ExpertParameters) -> None:
    activation = parameters.options.activation
    products = parameters.options.products
    if activation.function not in GATE_FUNCTIONS:
        raise ValueError(f"experts: the activation is {activation.function!r}; expected one of {GATE_FUNCTIONS}")
    if activation.limit is not None and not activation.limit > 0:
        raise ValueError(f"experts: the activation's limit is {activation.limit}; expected a positive number or None")
    if activation.alpha != 1.0 and activation.function != "silu":
        raise ValueError(f"experts: alpha is {activation.alpha}, but {activation.function} has none")
    if products is not None and products not in get_args(Products):
        raise ValueError(f"experts: products is {products!r}; expected one of {get_args(Products)} or None")


def _check_shapes(n_hidden: int, parameters: ExpertParameters) -> None:
    """Compare every tensor with the number and width of the experts, which the first of them with these sizes gives."""
    tensors = parameters.tensors
    transposed = parameters.options.layout.transposed
    given = {name: tuple(t.shape) for name, t in tensors._asdict().items() if t is not None}
    expected = {
        "gate_up": ("X", n_hidden, "2F") if transposed else ("X", "2F", n_hidden),
        "down": ("X", "F", n_hidden) if transposed else ("X", n_hidden, "F"),
        "gate_up_bias": ("X", "2F"), "down_bias": ("X", n_hidden),
        "gate_up_a": ("X", "R1", n_hidden), "gate_up_b": ("X", "2F", "R1"),
        "down_a": ("X", "R2", "F"), "down_b": ("X", n_hidden, "R2"),
    }  # fmt: skip
    sizes: dict[str | int, int] = {}
    for name, shape in given.items():
        letters = expected[name]
        if len(shape) == len(letters):
            for letter, size in zip(letters, shape, strict=True):
                if letter == "2F" and size % 2 == 0:
                    sizes.setdefault("F", size // 2)
                sizes.setdefault(letter, size)
                if letter == "F":
                    sizes.setdefault("2F", 2 * size)
        wanted = tuple(letter if isinstance(letter, int) else sizes.get(letter, letter) for letter in letters)
        if shape != wanted or sizes.get("2F", 0) % 2:
            raise ValueError(
                f"experts: {name} is {shape}; expected {_written(letters)} = {_written(wanted)}, "
                f"{n_hidden} being the size of hidden{', for transposed weights' if transposed else ''}"
            )


def _written(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
