"""Rows of the kernels benchmark: each case of an op, with the goals of our forms of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ligertune.bench.case import IN_PLACE, Case
from ligertune.bench.measure import BENCHMARKS


@dataclass(frozen=True)
class Goal:
    """The goals of a row; None: no goal."""

    share: float | None = None  # of the floor
    above_liger: float | None = 0.0  # GiB by which the peak may exceed liger's
    most: float | None = None  # largest peak in GiB
    no_slower: bool = True  # than the fastest peer
    error: float | None = None  # times plain torch's in the same dtype
    times_liger: float | None = None  # as fast as liger, times this
    of_full: float | None = None  # share of the time of the same case without ignored labels


@dataclass(frozen=True)
class Line:
    """A case and the goal of each ligertune provider in it, which is a row of the table."""

    case: Case
    goals: dict[str, Goal]


def _log_probs(n: int, e: int, v: int, goal: Goal, *, frozen: bool) -> Line:
    return Line(Case("linear_log_probs", (n, e, v), torch.bfloat16, frozen_head=frozen), {"ours": goal})


def _linear(n: int, e: int, v: int, goal: Goal, lean: Goal | None = None, **options: object) -> Line:
    case = Case("linear_cross_entropy", (n, e, v), torch.bfloat16, **options)
    return Line(case, {"ours": goal} | ({"ours, lean": lean} if lean else {}))


def _ignored(share: float, goal: Goal, lean: Goal | None = None) -> Line:
    """Rows found by the op, which waits for their number, and by the collator; all rows, for the cost of the search."""
    line = _linear(8192, 4096, 128256, goal, lean, ignored=share)
    goals = {"ours, rows known": goal, "ours, all rows": Goal(above_liger=None, no_slower=False)}
    return dataclasses.replace(line, goals=line.goals | goals)


def _lines(op: str, sizes: list[tuple[int, ...]], shares: list[float | None], form: str = "ours", **goal) -> list[Line]:
    dtype = BENCHMARKS[op].dtype or torch.bfloat16
    pairs = zip(sizes, shares, strict=True)
    return [Line(Case(op, size, dtype), {form: Goal(share, **goal)}) for size, share in pairs]


def _both_forms(op: str, sizes: list[tuple[int, ...]], shares: list[float]) -> list[Line]:
    """Liger's kernels overwrite their arguments: the goal of its memory applies to the in-place provider."""
    lines = _lines(op, sizes, shares, above_liger=None)
    return [dataclasses.replace(line, goals=line.goals | {IN_PLACE: Goal(line.goals["ours"].share)}) for line in lines]


def _lean(times_liger: float) -> Goal:
    return Goal(above_liger=0.0, no_slower=False, error=1.0, times_liger=times_liger)


FAST = Goal(0.88, above_liger=1.0, error=1.1)
FROZEN = Goal(0.90, above_liger=None, most=0.5)
RECOMPUTED = Goal(0.60, above_liger=None, no_slower=False)  # four products, the floor has three; eager keeps all logits
SMALL_LOSS = Goal(above_liger=None)
WIDTHS = [(8192, 4096), (8192, 8192), (8192, 16384)]
LINES = [
    _ignored(0.0, FAST, _lean(1.25)),
    _linear(4096, 3584, 152064, FAST, _lean(1.25)),
    _linear(16384, 2048, 128256, FAST, _lean(1.0)),
    _linear(8192, 4096, 128256, FROZEN, frozen_head=True),
    _linear(4096, 3584, 152064, FROZEN, frozen_head=True),
    _ignored(0.5, Goal(above_liger=1.0, of_full=0.55)),
    _ignored(0.8, Goal(above_liger=1.0, of_full=0.25)),
    *_both_forms("rms_norm", WIDTHS, [0.88, 0.92, 0.92]),
    *_lines("cross_entropy", [(8192, v) for v in (32000, 128256, 152064)], [0.80] * 3, IN_PLACE, most=0.0),
    *_both_forms("add_rms_norm", WIDTHS, [0.88, 0.92, 0.92]),
    *_lines("gated_rms_norm", [(8192, 4096), (262144, 128)], [0.88, None]),
    *_both_forms("layer_norm", WIDTHS, [0.88, 0.92, 0.92]),
    *_lines("apply_rope", [(8192,), (16384,)], [0.94] * 2, above_liger=None),  # Liger rotates in place
    *_both_forms("swiglu", [(8192, 14336)], [0.98]),
    *_both_forms("geglu", [(8192, 24576), (8192, 11008)], [0.98] * 2),
    *_lines("reglu", [(8192, 6912)], [None], above_liger=None),
    *_lines("kl_div", [(8192, 32000), (4096, 128256)], [0.85] * 2),
    *_lines("jsd", [(8192, 32000), (4096, 128256)], [0.80] * 2),
    *_lines("linear_jsd", [(4096, 2048, 4096, 128256)], [0.75], above_liger=None, most=1.5),
    _log_probs(8192, 4096, 128256, dataclasses.replace(FROZEN, share=0.82), frozen=True),
    _log_probs(8192, 4096, 128256, RECOMPUTED, frozen=False),
    _linear(4096, 3072, 256000, FAST, _lean(3.0)),
    _linear(512, 4096, 128256, SMALL_LOSS),
    _linear(2048, 4096, 128256, SMALL_LOSS),
    _linear(8192, 896, 151936, SMALL_LOSS),
    *_lines("group_norm", [(16, 512, 4096)], [None]),
    *_lines("document_attention", [(160, 100), (32, 512), (4, 4096), (1, 16384)], [None] * 4, above_liger=None),
    *_lines("merge_own_keys", [(8192, 1), (8192, 6)], [None] * 2, above_liger=None),
    *_lines("embedding", [(8192, 4096, 128256)], [None]),
    *_lines("int2_int8_matmul", [(4096, 4096, 4096)], [None]),
    *_lines("dequantize_nf4", [(128, 1536, 2048), (8, 28672, 4096)], [None] * 2, above_liger=None),
    *_lines("quantize_float8", [(8192, 4096), (16384, 14336)], [None] * 2, above_liger=None),
    *_lines("swiglu_float8", [(8192, 14336)], [None], above_liger=None),
]
