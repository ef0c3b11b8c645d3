"""Launch candidates of scripts/bench tune_kernels for the norms and RoPE, each with the reason why it might help."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from ligertune_kernels.ops.norms import kernels as norm_kernels
from ligertune_kernels.ops.norms import tiles as norm_tiles

from ligertune.bench.case import Case

Direction = Literal["forward", "backward"]
Patch = tuple[ModuleType, str, object]
A_TILE = 1 << 20  # programs per processor: as many as there are tiles


@dataclass(frozen=True)
class Norm:
    """Launch choices of a norm in one direction; None keeps the present choice."""

    direction: Direction
    warps: int | None = None
    stages: int | None = None
    programs: int | None = None  # on each processor
    rows: int | None = None  # per step of a program
    parts: int | None = None  # of a row, each of separate programs
    registers: int | None = None  # of per thread, at most
    edits: tuple[tuple[str, str], ...] = ()  # edits of the kernels' source: hints without a launch option
    constants: tuple[Patch, ...] = ()


@dataclass(frozen=True)
class Turn:
    """Launch choices of RoPE, the same for both directions."""

    pairs: int | None = None  # per program
    heads: int = 8  # per program, at most
    warps: int | None = None
    edits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One candidate. A probe computes wrong results on purpose, to measure what a part of the work costs."""

    name: str
    why: str
    choices: tuple[Norm | Turn, ...] = ()
    probe: bool = False

    @property
    def directions(self) -> set[Direction]:
        by_choice = (("forward", "backward") if isinstance(c, Turn) else (c.direction,) for c in self.choices)
        return {direction for directions in by_choice for direction in directions}


PRESENT = Candidate("now", "the choice of the code")


def fwd(name: str, why: str, **choice: object) -> Candidate:
    return Candidate(f"forward: {name}", why, (Norm("forward", **choice),))


def bwd(name: str, why: str, *, probe: bool = False, **choice: object) -> Candidate:
    return Candidate(f"backward: {name}", why, (Norm("backward", **choice),), probe)


def turn(name: str, why: str, **choice: object) -> Candidate:
    return Candidate(name, why, (Turn(**choice),))


# Only loads without prefetching take the hint: copies into shared memory (cp.async) are compiled without it.
X_LOADS = "* x_row_stride + cols[None, :], mask=mask, other=0.0"
ONCE, GONE = ', eviction_policy="evict_first"', ', cache_modifier=".cs"'
Y_STORES, DX_STORES = "y.to(y_ptr.dtype.element_ty), mask=mask", "dx.to(dx_ptr.dtype.element_ty), mask=mask"
STREAMED_Y, STREAMED_DX = (Y_STORES, Y_STORES + GONE), (DX_STORES, DX_STORES + GONE)
NO_SUMS = ((norm_kernels, "column_sums", lambda *tensors: None),)

STREAMED = (
    fwd("stores streamed", "y is not read again: evicting it early leaves room in the cache", edits=(STREAMED_Y,)),
    bwd("stores streamed", "dx is not read again", edits=(STREAMED_DX,)),
)
WITHOUT_SUMS = bwd("without the sums", "cost of column_sums, including its launch", probe=True, constants=NO_SUMS)


def sums_of(columns: int, why: str) -> Candidate:
    return bwd(f"sums of {columns} columns", why, constants=((norm_tiles, "SUMS_MIN_COLS", columns),))


# Registers are those of sm90 with triton 3.7. Not listed because they spill: backward with three programs of 4096
# columns, four of 4 warps, 32 warps with prefetching, whole rows of 16384; forward with 32 warps in three stages.

# Present choice: forward one row per program; backward one program per processor, two rows per step, three stages, 16
# warps (8 with db).
CANDIDATES_4096 = (
    *STREAMED,
    fwd("loads and stores streamed", "x is not read again either", edits=(STREAMED_Y, (X_LOADS, X_LOADS + ONCE))),
    fwd("4 warps", "more loads in flight per thread, cheaper sums over warps", warps=4),
    fwd("16 warps", "rows finish sooner, and more of them overlap", warps=16),
    fwd("2 rows, 16 warps", "half the programs to start, one wait per two rows", rows=2, warps=16),
    fwd("2 rows, 8 warps", "the same with the loads in flight of 4 warps", rows=2, warps=8),
    fwd("8 programs loop over rows, 2 stages", "no program starts between rows", programs=8, stages=2),
    WITHOUT_SUMS,
    sums_of(16, "twice the programs of a short kernel"),
    sums_of(64, "loads of 256 bytes per row"),
    bwd("no prefetch", "no shared memory; two programs hide each other's waits", stages=1),
    bwd("2 stages", "less shared memory, a shorter start", stages=2),
    bwd("4 stages", "more loads in flight against latency", stages=4),
    bwd("1 row, 8 warps, 2 programs", "the choice on other chips", rows=1, warps=8, programs=2, stages=3),
    bwd(
        "1 row, 16 warps alone, 4 stages",
        "half the partial sums, half the accumulators",
        rows=1,
        warps=16,
        programs=1,
        stages=4,
    ),
    bwd(
        "1 row, 16 warps alone, 6 stages",
        "the same with the loads in flight of two programs",
        rows=1,
        warps=16,
        programs=1,
        stages=6,
    ),
    bwd("2 rows, 16 warps alone", "one wait of all warps per two rows", rows=2, warps=16, programs=1, stages=3),
    bwd("2 rows, 8 warps alone", "the same with cheaper sums over warps", rows=2, warps=8, programs=1, stages=3),
    bwd("1 row, 4 warps", "cheaper sums over warps; 199 registers", rows=1, warps=4, programs=2, stages=3),
    bwd("1 row, 4 warps, 5 stages", "the same with more loads in flight", rows=1, warps=4, programs=2, stages=5),
)
# 16 warps need 64 registers without db: two programs fit, with twice the warps. With db and prefetching 24 bytes spill.
CANDIDATES_RMS_4096 = (
    *CANDIDATES_4096,
    bwd("1 row, 16 warps, 2 programs", "twice the warps to hide waits", rows=1, warps=16, programs=2),
    bwd(
        "1 row, 16 warps, 2 programs, 2 stages",
        "the same with fewer prefetched rows",
        rows=1,
        warps=16,
        programs=2,
        stages=2,
    ),
    bwd(
        "1 row, 16 warps, 2 programs, no prefetch",
        "the same without prefetched rows",
        rows=1,
        warps=16,
        programs=2,
        stages=1,
    ),
)
CANDIDATES_LAYER_4096 = (
    *CANDIDATES_4096,
    bwd(
        "1 row, 16 warps, 2 programs, no prefetch",
        "twice the warps",
        rows=1,
        warps=16,
        programs=2,
        stages=1,
        registers=64,
    ),
)
CANDIDATES_LONG_ROWS = (
    fwd(
        "a row per program, 16 warps",
        "as up to 4096 columns, where it is faster than programs that loop over rows",
        programs=A_TILE,
        stages=1,
    ),
    fwd("1 program", "one per processor: a single wave", programs=1),
)
# Present choice: three stages; backward 16 warps, forward 8 warps and two programs per processor.
CANDIDATES_8192 = (
    *STREAMED,
    *CANDIDATES_LONG_ROWS,
    fwd("a row per program, 8 warps", "the choice of the RMS norm", programs=A_TILE, stages=1, warps=8),
    fwd(
        "16 warps",
        "the choice on other chips; 82 registers: one program fits, two waves",
        warps=16,
        programs=2,
        stages=3,
    ),
    fwd("16 warps, 64 registers", "a second program fits", warps=16, programs=2, stages=3, registers=64),
    fwd("1 program, 5 stages", "the same with more loads in flight", programs=1, stages=5),
    fwd("1 program, 32 warps", "registers of one program, warps of two", programs=1, warps=32, stages=3),
    fwd("2 stages", "126 registers: two programs fit; fewer prefetched rows", stages=2),
    WITHOUT_SUMS,
    sums_of(64, "loads of 256 bytes per row"),
    bwd("2 stages", "less shared memory, a shorter start", stages=2),
    bwd("4 stages", "more loads in flight against latency", stages=4),
    bwd("6 stages", "more loads in flight", stages=6),
    bwd(
        "32 warps, no prefetch",
        "half the accumulators per thread, more warps instead of prefetching",
        warps=32,
        stages=1,
    ),
    bwd("8 warps, 4 stages", "cheaper sums over warps; 251 registers", warps=8, stages=4),
    bwd(
        "2 parts, no prefetch",
        "half of each row from L2; two programs fit",
        parts=2,
        warps=8,
        programs=2,
        stages=1,
        registers=128,
    ),
    bwd("2 parts, 2 stages", "the same with prefetching", parts=2, warps=8, programs=2, stages=2, registers=128),
    bwd("2 parts, 16 warps", "half the accumulators per thread", parts=2, warps=16, programs=1, stages=1),
)
# Present choice: 16 warps; forward three stages and two programs, of which one fits (126 registers); backward two
# parts without prefetching.
CANDIDATES_16384 = (
    *STREAMED,
    *CANDIDATES_LONG_ROWS,
    fwd("a row per program, 32 warps", "the same with all threads of a processor", programs=A_TILE, stages=1, warps=32),
    fwd("1 program, 2 stages", "the same with a shorter start", programs=1, stages=2),
    fwd("1 program, 5 stages", "the same with more loads in flight", programs=1, stages=5),
    fwd(
        "1 program, 32 warps, 2 stages",
        "half the values per thread, the next row in flight",
        programs=1,
        warps=32,
        stages=2,
    ),
    *(
        fwd(
            f"swept by {block}",
            "few registers: many rows in flight, read again from L1 and L2",
            constants=((norm_tiles, "WHOLE_ROW_BYTES", 0), (norm_tiles, "SWEEP_BLOCK", block)),
        )
        for block in (2048, 4096)
    ),
    WITHOUT_SUMS,
    sums_of(128, "loads of 512 bytes per row"),
    bwd("2 stages", "rows of both parts are prefetched", stages=2),
    bwd("3 stages", "more loads in flight", stages=3),
    bwd("8 warps", "cheaper sums over warps; 255 registers", warps=8),
    bwd("8 warps, 2 stages", "the same with prefetching", warps=8, stages=2),
    bwd(
        "4 parts, 16 warps", "half the accumulators per thread, twice the bytes from L2", parts=4, warps=16, programs=1
    ),
)
# 4 tokens of 8 heads, 4 warps, 16 pairs per thread, 44 registers.
STREAMED_TURN = ((", lo, mask=mask", ", lo, mask=mask" + GONE), (", hi, mask=mask", ", hi, mask=mask" + GONE))
CANDIDATES_ROPE = (
    turn("stores streamed", "q and k are not read again; cos and sin stay in the cache", edits=STREAMED_TURN),
    turn("8 warps", "8 pairs per thread: one vector of each tensor, more warps", warps=8),
    turn("2 warps", "32 pairs per thread: more loads in flight per warp", warps=2),
    turn("1024 pairs", "2 tokens: twice the programs of half the warps", pairs=1024, warps=2),
    turn("1024 pairs, 4 warps", "2 tokens, 8 pairs per thread", pairs=1024, warps=4),
    turn("4096 pairs", "8 tokens: half the programs to start", pairs=4096, warps=8),
    turn("4096 pairs, 4 warps", "the same with 32 pairs per thread", pairs=4096, warps=4),
    turn("8192 pairs", "16 tokens: a quarter of the programs", pairs=8192, warps=16),
    turn("4 heads", "8 tokens: fewer heads share an angle", heads=4),
    turn("16 heads", "2 tokens of q: 4 kB per row, half the angles read again", heads=16),
    turn("32 heads", "one token of q, 8 kB per row, angles read once", heads=32),
    turn("32 heads, 4096 pairs", "2 tokens of q", heads=32, pairs=4096, warps=8),
    turn("16 heads, 8 warps", "2 tokens of q, 8 pairs per thread", heads=16, warps=8),
)


def candidates(case: Case) -> tuple[Candidate, ...]:
    """Return the candidates of an op at one size; widths for a CPU are an eighth of the real ones."""
    if case.op == "apply_rope":
        return CANDIDATES_ROPE
    width = case.sizes[-1] if case.sizes[-1] >= 4096 else 8 * case.sizes[-1]
    if width == 4096:
        return CANDIDATES_RMS_4096 if case.op == "rms_norm" else CANDIDATES_LAYER_4096
    return {8192: CANDIDATES_8192, 16384: CANDIDATES_16384}[width]


def best_of_each(timed: list[tuple[Candidate, float | None, float | None]]) -> Candidate | None:
    """Combine the fastest forward and the fastest backward candidate; None if either is the present choice."""
    chosen: list[Candidate] = []
    for i, direction in enumerate(("forward", "backward")):
        fitting = [
            (times[i], candidate)
            for candidate, *times in timed
            if times[i] and not candidate.probe and candidate.directions in (set(), {direction})
        ]
        chosen.append(min(fitting, key=lambda pair: pair[0])[1] if fitting else PRESENT)
    if PRESENT in chosen:
        return None
    return Candidate(" + ".join(c.name for c in chosen), "the fastest of each", tuple(c.choices[0] for c in chosen))
