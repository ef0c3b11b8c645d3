"""Subjects: the norms. Floors of rows (N, E): x in, y out; then dy and x in, dx out."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ligertune.bench.case import Case, Outputs, Provider, Subject, Tensors, Work, compiled, function, ours
from ligertune.bench.cases import eager as huggingface

EPS = 1e-6
IN_PLACE = "ours, in place"  # x's gradient lies over the one that came in, as that of some others always does
GROUPS = 32
ROW_SIZES = tuple((8192, width) for width in (1024, 2048, 4096, 8192, 16384))
SMALL_ROW_SIZES = ((64, 128), (64, 512))


def _rows(case: Case, device: torch.device, n: int) -> list[torch.Tensor]:
    return [torch.randn(case.sizes, dtype=case.dtype, device=device, requires_grad=True) for _ in range(n)]


def _affine(case: Case, device: torch.device, n: int) -> list[torch.nn.Parameter]:
    """Weight, then bias, over the second size."""
    return [
        torch.nn.Parameter(1.0 + 0.1 * torch.randn(case.sizes[1], dtype=case.dtype, device=device)) for _ in range(n)
    ]


def _tensors_moved(forward: int, backward: int):
    """Work of an op that moves so many tensors of x's size each way."""

    def work(case: Case) -> Work:
        one = float(torch.Size(case.sizes).numel() * case.dtype.itemsize)
        return Work((forward * one, backward * one))

    return work


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _eager_rms_norm(case: Case, args: Tensors):
    norm = huggingface.rms_norm(args[-1])
    return lambda: norm(args[0])


def _eager_add_rms_norm(case: Case, args: Tensors):
    x, residual, weight = args
    norm = huggingface.rms_norm(weight)

    def run() -> Outputs:
        total = x + residual
        return norm(total), total

    return run


RMS_NORM_EAGER = Provider("eager", _eager_rms_norm)
RMS_NORM = Subject(
    op="rms_norm",
    dims=("N", "E"),
    axis="E",
    sizes=ROW_SIZES,
    small=SMALL_ROW_SIZES,
    args=("x", "weight"),
    inputs=lambda case, device: (*_rows(case, device, 1), *_affine(case, device, 1)),
    rows=("x",),
    work=_tensors_moved(2, 3),
    plain=lambda case, args: lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    providers=(
        ours("ours", lambda kernels, case, x, weight: kernels.rms_norm(x, weight, EPS)),
        ours(IN_PLACE, lambda kernels, case, x, weight: kernels.rms_norm(x, weight, EPS, inplace=True)),
        RMS_NORM_EAGER,
        function("torch", lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        compiled(RMS_NORM_EAGER),
    ),
)

ADD_RMS_NORM_EAGER = Provider("eager", _eager_add_rms_norm)
ADD_RMS_NORM = Subject(
    op="add_rms_norm",
    dims=("N", "E"),
    axis="E",
    sizes=ROW_SIZES,
    small=SMALL_ROW_SIZES,
    args=("x", "residual", "weight"),
    inputs=lambda case, device: (*_rows(case, device, 2), *_affine(case, device, 1)),
    rows=("x", "residual"),
    work=_tensors_moved(4, 4),
    plain=lambda case, args: _add_rms_norm,
    providers=(
        ours("ours", lambda kernels, case, *args: kernels.add_rms_norm(*args, EPS)),
        ours(IN_PLACE, lambda kernels, case, *args: kernels.add_rms_norm(*args, EPS, inplace=True)),
        ADD_RMS_NORM_EAGER,
        function("torch", _add_rms_norm),
        compiled(ADD_RMS_NORM_EAGER),
    ),
)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


LAYER_NORM_TORCH = function("torch", _layer_norm)  # and eager: transformers' models hold torch.nn.LayerNorm
LAYER_NORM = Subject(
    op="layer_norm",
    dims=("N", "E"),
    axis="E",
    sizes=ROW_SIZES,
    small=SMALL_ROW_SIZES,
    args=("x", "weight", "bias"),
    inputs=lambda case, device: (*_rows(case, device, 1), *_affine(case, device, 2)),
    rows=("x",),
    work=_tensors_moved(2, 3),
    plain=lambda case, args: _layer_norm,
    providers=(
        ours("ours", lambda kernels, case, *args: kernels.layer_norm(*args, EPS)),
        ours(IN_PLACE, lambda kernels, case, *args: kernels.layer_norm(*args, EPS, inplace=True)),
        LAYER_NORM_TORCH,
        compiled(LAYER_NORM_TORCH),
    ),
)


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


GROUP_NORM_TORCH = function("torch", _group_norm)
GROUP_NORM = Subject(
    op="group_norm",
    dims=("B", "C", "HW"),
    axis="C",
    sizes=tuple((16, channels, 64 * 64) for channels in (128, 256, 512)),
    small=((2, 64, 49),),
    args=("x", "weight", "bias"),
    inputs=lambda case, device: (*_rows(case, device, 1), *_affine(case, device, 2)),
    rows=("x",),
    work=_tensors_moved(2, 3),
    plain=lambda case, args: _group_norm,
    providers=(
        ours("ours", lambda kernels, case, x, weight, bias: kernels.group_norm(x, GROUPS, weight, bias, EPS)),
        GROUP_NORM_TORCH,
        compiled(GROUP_NORM_TORCH),
    ),
)
