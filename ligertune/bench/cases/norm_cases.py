"""Benchmarks of the norms. Lower bound: the forward reads x and writes y; the backward reads dy and x and writes dx.

A gate is read in both directions, and its gradient is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ligertune_kernels as kernels
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ligertune.bench.case import Case, OpBenchmark, Outputs, Provider, Tensors, elementwise_work, providers_of

EPS = 1e-6  # the default of LlamaRMSNorm, with which the eager side is made
GROUPS = 32


def _inputs(n_rows: int, n_affine: int) -> Callable[[Case, torch.device], Tensors]:
    """Return a function that makes n_rows tensors of the case's sizes, then weight and bias over the second size."""

    def inputs(case: Case, device: torch.device) -> Tensors:
        def randn(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, dtype=case.dtype, device=device)

        rows = [randn(*case.sizes).requires_grad_() for _ in range(n_rows)]
        affine = [torch.nn.Parameter(1.0 + 0.1 * randn(case.sizes[1])) for _ in range(n_affine)]
        return *rows, *affine

    return inputs


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    total = x + residual
    return _rms_norm(total, weight), total


def _llama_norm(case: Case, args: Tensors) -> Callable[[], Outputs]:
    """Return transformers' norm of x, or of x + residual together with the sum."""
    *rows, weight = args
    assert isinstance(weight, torch.nn.Parameter)  # as `_inputs` makes it
    norm = LlamaRMSNorm(weight.shape[0])
    norm.weight = weight

    def run() -> Outputs:
        if len(rows) == 1:
            return norm(*rows)
        total = rows[0] + rows[1]
        return norm(total), total

    return run


EAGER = Provider("eager", _llama_norm)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def _row_norm(
    op: str, args: tuple[str, ...], moved: tuple[int, int], plain: Callable[..., Outputs], **eager: Provider
) -> OpBenchmark:
    """Return the benchmark of a norm over the last dimension; args: rows (N, E), then weight and bias (E,).

    eager: what transformers' models use, if it is not torch's function.
    """
    kernel = getattr(kernels, op)
    rows = args[: args.index("weight")]
    return OpBenchmark(
        op=op,
        dims=("N", "E"),
        sizes=tuple((8192, width) for width in (1024, 2048, 4096, 8192, 16384)),
        cpu_sizes=((64, 128), (64, 512)),
        args=args,
        inputs=_inputs(len(rows), len(args) - len(rows)),
        row_args=rows,
        work=elementwise_work(*moved),
        reference=lambda case, args: plain,
        # In place: x's gradient overwrites the incoming gradient, as in some other libraries.
        providers=providers_of(
            partial(kernel, eps=EPS), in_place=partial(kernel, eps=EPS, inplace=True), **eager, torch=plain
        ),
    )


# Qwen3-Next's form; its model computes the same operations.
GATED = OpBenchmark(
    op="gated_rms_norm",
    dims=("N", "E"),
    sizes=((262144, 128), (8192, 2048), (8192, 4096), (8192, 8192)),  # the first as Qwen3-Next's heads
    cpu_sizes=((64, 128), (64, 512)),
    args=("x", "gate", "weight"),
    inputs=_inputs(2, 1),
    row_args=("x", "gate"),
    work=elementwise_work(3, 5),
    reference=lambda case, args: partial(kernels.gated_rms_norm_reference, eps=EPS),
    providers=providers_of(
        partial(kernels.gated_rms_norm, eps=EPS), eager=partial(kernels.gated_rms_norm_reference, eps=EPS)
    ),
)

NORMS = (
    _row_norm("rms_norm", ("x", "weight"), (2, 3), _rms_norm, eager=EAGER),
    _row_norm("add_rms_norm", ("x", "residual", "weight"), (4, 4), _add_rms_norm, eager=EAGER),
    GATED,
    _row_norm("layer_norm", ("x", "weight", "bias"), (2, 3), _layer_norm),
    OpBenchmark(
        op="group_norm",
        dims=("B", "C", "HW"),
        sizes=tuple((16, channels, 64 * 64) for channels in (128, 256, 512)),
        cpu_sizes=((2, 64, 49),),
        args=("x", "weight", "bias"),
        inputs=_inputs(1, 2),
        row_args=("x",),
        work=elementwise_work(2, 3),
        reference=lambda case, args: _group_norm,
        providers=providers_of(
            lambda x, weight, bias: kernels.group_norm(x, GROUPS, weight, bias, EPS), torch=_group_norm
        ),
    ),
)
