"""Kernel check of `ligertune doctor --kernels`: every op's outputs and gradients against float64, on this device.

Nothing is timed. It takes less than a minute, most of it for compilation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ligertune.bench import accuracy
from ligertune.bench.case import Case, OpBenchmark, Provider
from ligertune.bench.measure import BENCHMARKS, FAILURES, BoundProvider, first_line, seeded_inputs
from ligertune.hardware import Machine

# A row that fits in registers and one that is looped over, partial last blocks; float64 of the largest fits in 1 GiB.
SIZES = {
    "rms_norm": ((67, 1000), (5, 20000)),
    "add_rms_norm": ((67, 1000), (5, 20000)),
    "gated_rms_norm": ((67, 1000), (5, 20000)),
    "layer_norm": ((67, 1000), (5, 20000)),
    "group_norm": ((3, 96, 49),),
    "apply_rope": ((131,),),
    "document_attention": ((3, 67),),
    "causal_conv1d": ((2, 67),),
    "gated_delta_rule": ((2, 131),),
    "kda": ((2, 131),),
    "causal_conv1d_step": ((3,),),
    "gated_delta_rule_step": ((3,),),
    "ssd": ((2, 131),),
    "ssd_step": ((3,),),
    "kda_step": ((3,),),
    "swiglu": ((67, 1001),),
    "geglu": ((67, 1001),),
    "reglu": ((67, 1001),),
    "experts": ((67, 8, 2, 64, 96),),
    "cross_entropy": ((67, 1000), (37, 50257)),
    "linear_cross_entropy": ((67, 64, 1000), (131, 128, 8003)),
    "multi_head_linear_cross_entropy": ((67, 64, 1000),),
    "linear_log_probs": ((67, 64, 1000), (131, 128, 8003)),
    "linear_token_statistics": ((67, 64, 1000),),
    "kl_div": ((67, 1000), (37, 50257)),
    "jsd": ((67, 1000), (37, 50257)),
    "linear_jsd": ((67, 64, 96, 1000),),
    "dequantize_nf4": ((3, 96, 160),),
    "dequantize_mxfp4": ((3, 96, 160),),
    "dequantize_float8_blocks": ((3, 96, 160),),
    "quantize_float8": ((67, 1001),),
    "swiglu_float8": ((67, 1001),),
    "int2_int8_matmul": ((67, 256, 512),),
    "embedding": ((131, 1000, 500),),
    "adamw_step": ((67, 1000),),
    "seeded_dropout": ((67, 1000),),
    "merge_own_keys": ((131, 3),),
    "decode_attention": ((5, 131),),
    "sample_tokens": ((67, 1000), (5, 50257)),
}
# |found - float64| / |float64| in the Euclidean norm: a few roundings to the dtype. Integers are exact.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5, torch.int8: 0.0}


@dataclass(frozen=True)
class Check:
    """Result of one implementation in one case: the largest relative error of its outputs and gradients."""

    case: Case
    form: str
    error: float | None  # None: it failed
    worst: str  # name of the tensor with the largest error
    bound: float
    seconds: float
    failure: str | None = None

    @property
    def good(self) -> bool:
        """True if the error is within its bound, False for NaN."""
        return self.error is not None and self.error <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, where NaN is a string."""
        error = self.error if self.error is None or math.isfinite(self.error) else str(self.error)
        others = {name: getattr(self, name) for name in ("form", "worst", "bound", "seconds", "failure")}
        return self.case.as_dict() | others | {"ok": self.good, "error": error}


def dtypes_to_check(machine: Machine) -> tuple[torch.dtype, ...]:
    """Return the dtype that models are trained in on this machine, and float32."""
    return (torch.bfloat16 if machine.has_bfloat16 else torch.float16, torch.float32)


def check_ops(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Iterator[list[Check]]:
    """Yield the checks of one op after the other."""
    for op, benchmark in BENCHMARKS.items():
        yield [
            _check(benchmark, Case(op, sizes, dtype), provider, device)
            for dtype in dict.fromkeys(benchmark.dtype or dtype for dtype in dtypes)
            for sizes in SIZES[op]
            for provider in benchmark.providers
            if provider.name.startswith("ours")
        ]


def _check(benchmark: OpBenchmark, case: Case, provider: Provider, device: torch.device) -> Check:
    bound = BOUNDS[case.dtype]
    start = time.perf_counter()
    try:
        args = seeded_inputs(benchmark, case, device)
        true = accuracy.truth(benchmark, case, args)
        outputs, gradients = BoundProvider(provider, case, args).both()
        found = accuracy.results(benchmark, args, outputs, gradients)
        errors = {name: accuracy.error_of(found[name], true[name]) for name in true}
    except FAILURES as problem:
        return Check(case, provider.name, None, "", bound, time.perf_counter() - start, first_line(problem))
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return Check(case, provider.name, errors[worst], worst, bound, time.perf_counter() - start)
