"""Benchmarks of the norms. Lower bound: the forward reads x and writes y; the backward reads dy and x and writes dx."""

from __future__ import annotations

from collections.abc import Callable

import ligertune_kernels as kernels
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ligertune.bench.case import (
    Case,
    OpBenchmark,
    Outputs,
    Provider,
    Tensors,
    elementwise_work,
    function,
    with_compiled,
)

EPS = 1e-6
IN_PLACE = "ours, in place"  # x's gradient overwrites the incoming gradient, as in some other libraries
GROUPS = 32


def _inputs(n_rows: int, n_affine: int) -> Callable[[Case, torch.device], Tensors]:
    """Return a function that makes n_rows tensors of the case's sizes, then weight and bias over the second size."""

    def inputs(case: Case, device: torch.device) -> Tensors:
        make = {"dtype": case.dtype, "device": device}
        rows = [torch.randn(case.sizes, **make, requires_grad=True) for _ in range(n_rows)]
        affine = [torch.nn.Parameter(1.0 + 0.1 * torch.randn(case.sizes[1], **make)) for _ in range(n_affine)]
        return *rows, *affine

    return inputs


def _llama_norm(weight: torch.Tensor) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.shape[0])
    norm.weight = weight
    return norm


def _eager_rms_norm(case: Case, args: Tensors) -> Callable[[], Outputs]:
    x, weight = args
    norm = _llama_norm(weight)
    return lambda: norm(x)


def _eager_add_rms_norm(case: Case, args: Tensors) -> Callable[[], Outputs]:
    x, residual, weight = args
    norm = _llama_norm(weight)

    def run() -> Outputs:
        total = x + residual
        return norm(total), total

    return run


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    total = x + residual
    return _rms_norm(total, weight), total


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def _row_norm(
    op: str, args: tuple[str, ...], n_rows: int, moved: tuple[int, int], plain: Callable[..., Outputs], *eager: Provider
) -> OpBenchmark:
    """Return the benchmark of a norm over the last dimension; args: n_rows of (N, E), then weight and bias (E,)."""
    kernel = getattr(kernels, op)
    ours = function("ours", lambda *given: kernel(*given, EPS))
    in_place = function(IN_PLACE, lambda *given: kernel(*given, EPS, inplace=True))
    return OpBenchmark(
        op=op,
        dims=("N", "E"),
        sizes=tuple((8192, width) for width in (1024, 2048, 4096, 8192, 16384)),
        cpu_sizes=((64, 128), (64, 512)),
        args=args,
        inputs=_inputs(n_rows, len(args) - n_rows),
        row_args=args[:n_rows],
        work=elementwise_work(*moved),
        reference=lambda case, args: plain,
        # Without `eager`, transformers' models use torch's function.
        providers=(ours, in_place, *with_compiled(*eager, function("torch", plain))),
    )


NORMS = (
    _row_norm("rms_norm", ("x", "weight"), 1, (2, 3), _rms_norm, Provider("eager", _eager_rms_norm)),
    _row_norm(
        "add_rms_norm", ("x", "residual", "weight"), 2, (4, 4), _add_rms_norm, Provider("eager", _eager_add_rms_norm)
    ),
    _row_norm("layer_norm", ("x", "weight", "bias"), 1, (2, 3), _layer_norm),
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
        providers=(
            function("ours", lambda x, weight, bias: kernels.group_norm(x, GROUPS, weight, bias, EPS)),
            *with_compiled(function("torch", _group_norm)),
        ),
    ),
)
