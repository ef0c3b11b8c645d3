"""Table of benchmarks by op, and the cases that `ligertune bench` runs."""

from __future__ import annotations

import torch

from ligertune.bench.case import Case, OpBenchmark
from ligertune.bench.cases import attention_cases, expert_cases, loss_cases, norm_cases, pointwise_cases

BENCHMARKS: dict[str, OpBenchmark] = {
    benchmark.op: benchmark
    for benchmark in (
        *loss_cases.LOSSES,
        *norm_cases.NORMS,
        pointwise_cases.ROPE,
        attention_cases.ATTENTION,
        *pointwise_cases.GATED,
        expert_cases.EXPERTS,
        pointwise_cases.EMBEDDING,
        *loss_cases.DIVERGENCES,
        pointwise_cases.DEQUANTIZE_NF4,
        pointwise_cases.QUANTIZE_FLOAT8,
        pointwise_cases.SWIGLU_FLOAT8,
        pointwise_cases.INT2_MATMUL,
        pointwise_cases.ADAMW_STEP,
    )
}


def cases_of(op: str, *, dtype: torch.dtype, small: bool) -> list[Case]:
    """Return an op at all its sizes; small: those for a CPU."""
    benchmark = BENCHMARKS[op]
    return [Case(op, sizes, benchmark.dtype or dtype) for sizes in (benchmark.cpu_sizes if small else benchmark.sizes)]
