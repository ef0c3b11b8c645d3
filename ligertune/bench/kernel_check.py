"""Every op's outputs and gradients against float64 on the device that is here: what `ligertune doctor --kernels` runs.

No times are taken, so that it is done in under a minute, most of which is compilation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ligertune.bench import accuracy
from ligertune.bench.case import Case, Provider, Subject
from ligertune.bench.cases.case_table import SUBJECTS
from ligertune.bench.measure import FAILURES, SEED, Bound, sentence
from ligertune.hardware import Machine

# A row in registers and one that is swept, odd ends of blocks; float64 of the largest fits in 1 GiB.
SIZES = {
    "rms_norm": ((67, 1000), (5, 20000)),
    "add_rms_norm": ((67, 1000), (5, 20000)),
    "layer_norm": ((67, 1000), (5, 20000)),
    "group_norm": ((3, 96, 49),),
    "apply_rope": ((131,),),
    "document_attention": ((3, 67),),
    "swiglu": ((67, 1001),),
    "geglu": ((67, 1001),),
    "cross_entropy": ((67, 1000), (37, 50257)),
    "linear_cross_entropy": ((67, 64, 1000), (131, 128, 8003)),
    "multi_head_linear_cross_entropy": ((67, 64, 1000),),
    "linear_token_statistics": ((67, 64, 1000),),
    "kl_div": ((67, 1000), (37, 50257)),
    "jsd": ((67, 1000), (37, 50257)),
    "linear_jsd": ((67, 64, 96, 1000),),
    "int2_int8_matmul": ((67, 256, 512),),
    "embedding": ((131, 1000, 500),),
    "adamw_step": ((67, 1000),),
}
# |ours - float64| / |float64|, Euclidean: some roundings to the dtype, and no more. Integers are exact.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5, torch.int8: 0.0}


@dataclass(frozen=True)
class Check:
    """One form of an op in one case. `error` is the worst of its outputs and gradients, relative; None if it failed."""

    case: Case
    form: str
    error: float | None
    worst: str
    bound: float
    seconds: float
    failure: str | None = None

    @property
    def good(self) -> bool:
        """False for NaN, too."""
        return self.error is not None and self.error <= self.bound

    def as_dict(self) -> dict:
        """For JSON, which has no NaN."""
        error = self.error if self.error is None or math.isfinite(self.error) else str(self.error)
        return {
            "op": self.case.op,
            "form": self.form,
            "sizes": self.case.sizes,
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "ok": self.good,
            "error": error,
            "worst": self.worst,
            "bound": self.bound,
            "seconds": self.seconds,
            "failure": self.failure,
        }


def dtypes_to_check(machine: Machine) -> tuple[torch.dtype, ...]:
    """What models are trained in here, and float32."""
    return (torch.bfloat16 if machine.has_bfloat16 else torch.float16, torch.float32)


def check_ops(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Iterator[list[Check]]:
    """The checks of each op as it is done."""
    for subject in SUBJECTS:
        of_op = dict.fromkeys(subject.dtype or dtype for dtype in dtypes)
        yield [
            _check(subject, Case(subject.op, sizes, dtype), provider, device)
            for dtype in of_op
            for sizes in SIZES[subject.op]
            for provider in subject.providers
            if provider.name.startswith("ours")
        ]


def _check(subject: Subject, case: Case, provider: Provider, device: torch.device) -> Check:
    bound, start = BOUNDS[case.dtype], time.perf_counter()
    try:
        torch.manual_seed(SEED)
        args = subject.inputs(case, device)
        true = accuracy.truth(subject, case, args)
        outputs, gradients = Bound(provider, case, args).first()
        found = accuracy.results(subject, args, outputs, gradients)
        errors = {name: accuracy.error_of(found[name], true[name]) for name in true}
    except FAILURES as problem:
        return Check(case, provider.name, None, "", bound, time.perf_counter() - start, sentence(problem))
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return Check(case, provider.name, errors[worst], worst, bound, time.perf_counter() - start)
