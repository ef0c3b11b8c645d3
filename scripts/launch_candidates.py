"""Launch candidates of scripts/tune_kernels for the norms and RoPE, each with the reason why it might help."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from ligertune_kernels.ops.norms import _column_sums as column_sums
from ligertune_kernels.ops.norms import _row_norm as row_norm

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
    registers: int | None = None  # of a thread, at most
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


PRESENT = Candidate("now", "what the code chooses")


def fwd(name: str, why: str, **choice: object) -> Candidate:
    return Candidate(f"forward: {name}", why, (Norm("forward", **choice),))


def bwd(name: str, why: str, *, probe: bool = False, **choice: object) -> Candidate:
    return Candidate(f"backward: {name}", why, (Norm("backward", **choice),), probe)


def turn(name: str, why: str, **choice: object) -> Candidate:
    return Candidate(name, why, (Turn(**choice),))


# Only loads that are not prefetched take the hint: copies into shared memory (cp.async) are compiled without it.
X_LOADS = "* x_row_stride + cols[None, :], mask=mask, other=0.0"
ONCE, GONE = ', eviction_policy="evict_first"', ', cache_modifier=".cs"'
Y_STORES, DX_STORES = "y.to(y_ptr.dtype.element_ty), mask=mask", "dx.to(dx_ptr.dtype.element_ty), mask=mask"
STREAMED_Y, STREAMED_DX = (Y_STORES, Y_STORES + GONE), (DX_STORES, DX_STORES + GONE)
NO_SUMS = ((row_norm, "column_sums", lambda *tensors: None),)

STREAMED = (
    fwd("stores streamed", "nothing is read again: lines that leave early make room", edits=(STREAMED_Y,)),
    bwd("stores streamed", "as forward: dx is not read here", edits=(STREAMED_DX,)),
)
WITHOUT_SUMS = bwd("without the sums", "what adding dw and db up costs, launch included", probe=True, constants=NO_SUMS)


def sums_of(columns: int, why: str) -> Candidate:
    return bwd(f"sums of {columns} columns", why, constants=((column_sums, "FEWEST_COLS", columns),))


# Registers and what fits are those of sm90, compiled by triton 3.7. What spills there is not listed: backward three
# programs of 4096, four of 4 warps, 32 warps that queue, whole rows of 16384; forward 32 warps in three stages.

# One row a program forward; two rows and three stages of one program a processor backward, of 16 warps or, with db, 8.
OF_4096 = (
    *STREAMED,
    fwd("loads and stores streamed", "x is not read again either", edits=(STREAMED_Y, (X_LOADS, X_LOADS + ONCE))),
    fwd("4 warps", "more of a row in flight for each thread, a cheaper sum over warps", warps=4),
    fwd("16 warps", "a row is over sooner: more of them begin in the shadow of others", warps=16),
    fwd("2 rows, 16 warps", "half the programs to start, one wait for two rows", rows=2, warps=16),
    fwd("2 rows, 8 warps", "likewise, with as much in flight as 4 warps have", rows=2, warps=8),
    fwd("8 programs walk, 2 stages", "no start of a program between rows", programs=8, stages=2),
    WITHOUT_SUMS,
    sums_of(16, "twice the programs for a short kernel; of a layer norm as many"),
    sums_of(64, "256 bytes of a row at once"),
    bwd("no queue", "no shared memory between, two programs hide each other's waits", stages=1),
    bwd("2 stages", "less shared memory, a shorter start", stages=2),
    bwd("4 stages", "more in flight where the memory answers late", stages=4),
    bwd("1 row, 8 warps, 2 programs", "what holds on other chips", rows=1, warps=8, programs=2, stages=3),
    bwd(
        "1 row, 16 warps alone, 4 stages",
        "half the sums to add up, half the accumulators",
        rows=1,
        warps=16,
        programs=1,
        stages=4,
    ),
    bwd(
        "1 row, 16 warps alone, 6 stages",
        "likewise, with as much in flight as two programs",
        rows=1,
        warps=16,
        programs=1,
        stages=6,
    ),
    bwd("2 rows, 16 warps alone", "one wait of all warps for two rows", rows=2, warps=16, programs=1, stages=3),
    bwd("2 rows, 8 warps alone", "likewise, a cheaper sum over warps", rows=2, warps=8, programs=1, stages=3),
    bwd("1 row, 4 warps", "a cheaper sum over warps; 199 registers", rows=1, warps=4, programs=2, stages=3),
    bwd("1 row, 4 warps, 5 stages", "likewise, more in flight", rows=1, warps=4, programs=2, stages=5),
)
# 16 warps need 64 registers without db: two programs fit, twice the warps of now. With db 24 bytes spill if queued.
OF_RMS_4096 = (
    *OF_4096,
    bwd("1 row, 16 warps, 2 programs", "twice the warps that hide each other's waits", rows=1, warps=16, programs=2),
    bwd(
        "1 row, 16 warps, 2 programs, 2 stages", "likewise, fewer rows waiting", rows=1, warps=16, programs=2, stages=2
    ),
    bwd("1 row, 16 warps, 2 programs, no queue", "likewise, none", rows=1, warps=16, programs=2, stages=1),
)
OF_LAYER_4096 = (
    *OF_4096,
    bwd(
        "1 row, 16 warps, 2 programs, no queue", "twice the warps", rows=1, warps=16, programs=2, stages=1, registers=64
    ),
)
OF_LONG_ROWS = (
    fwd("a row a program, 16 warps", "as up to 4096, where it beat programs that walk", programs=A_TILE, stages=1),
    fwd("1 program", "one on each processor, and so one wave", programs=1),
)
# Three stages; backward 16 warps, forward 8 of two programs a processor.
OF_8192 = (
    *STREAMED,
    *OF_LONG_ROWS,
    fwd("a row a program, 8 warps", "likewise, as the RMS norm's", programs=A_TILE, stages=1, warps=8),
    fwd("16 warps", "what holds on other chips; 82 registers let one in: two waves", warps=16, programs=2, stages=3),
    fwd("16 warps, 64 registers", "lets the second program in", warps=16, programs=2, stages=3, registers=64),
    fwd("1 program, 5 stages", "likewise, as much in flight as was meant", programs=1, stages=5),
    fwd("1 program, 32 warps", "the registers of one, the warps of two", programs=1, warps=32, stages=3),
    fwd("2 stages", "126 registers: two programs fit; fewer rows waiting", stages=2),
    WITHOUT_SUMS,
    sums_of(64, "256 bytes of a row at once"),
    bwd("2 stages", "less shared memory, a shorter start", stages=2),
    bwd("4 stages", "more in flight where the memory answers late", stages=4),
    bwd("6 stages", "likewise", stages=6),
    bwd("32 warps, no queue", "half the accumulators a thread, warps instead of a queue", warps=32, stages=1),
    bwd("8 warps, 4 stages", "a cheaper sum over warps; 251 registers", warps=8, stages=4),
    bwd(
        "2 parts, no queue",
        "half a row from L2; two programs fit",
        parts=2,
        warps=8,
        programs=2,
        stages=1,
        registers=128,
    ),
    bwd("2 parts, 2 stages", "likewise, fetched ahead", parts=2, warps=8, programs=2, stages=2, registers=128),
    bwd("2 parts, 16 warps", "half the accumulators a thread", parts=2, warps=16, programs=1, stages=1),
)
# 16 warps; forward three stages and two programs, of which 126 registers let in one; backward two parts, no queue.
OF_16384 = (
    *STREAMED,
    *OF_LONG_ROWS,
    fwd("a row a program, 32 warps", "likewise, every thread of a processor", programs=A_TILE, stages=1, warps=32),
    fwd("1 program, 2 stages", "likewise, a shorter start", programs=1, stages=2),
    fwd("1 program, 5 stages", "likewise, more in flight", programs=1, stages=5),
    fwd(
        "1 program, 32 warps, 2 stages",
        "half a thread's values, the next row under way",
        programs=1,
        warps=32,
        stages=2,
    ),
    *(
        fwd(
            f"swept by {block}",
            "little to hold: many rows in flight, read again from L1 and L2",
            constants=((row_norm, "WHOLE_ROW_BYTES", 0), (row_norm, "SWEEP_BLOCK", block)),
        )
        for block in (2048, 4096)
    ),
    WITHOUT_SUMS,
    sums_of(128, "512 bytes of a row at once"),
    bwd("2 stages", "rows fetched ahead, the other part's too", stages=2),
    bwd("3 stages", "likewise", stages=3),
    bwd("8 warps", "a cheaper sum over warps; 255 registers", warps=8),
    bwd("8 warps, 2 stages", "likewise, fetched ahead", warps=8, stages=2),
    bwd(
        "4 parts, 16 warps",
        "half the accumulators a thread, for twice the bytes from L2",
        parts=4,
        warps=16,
        programs=1,
    ),
)
# 4 tokens of 8 heads, 4 warps, 16 pairs a thread, 44 registers.
STREAMED_TURN = ((", lo, mask=mask", ", lo, mask=mask" + GONE), (", hi, mask=mask", ", hi, mask=mask" + GONE))
OF_ROPE = (
    turn("stores streamed", "nothing is read again; cos and sin, which are, stay", edits=STREAMED_TURN),
    turn("8 warps", "8 pairs a thread: one vector of each tensor, more warps", warps=8),
    turn("2 warps", "32 pairs a thread: more loads in flight for each warp", warps=2),
    turn("1024 pairs", "2 tokens: twice the programs of half the warps", pairs=1024, warps=2),
    turn("1024 pairs, 4 warps", "2 tokens, 8 pairs a thread", pairs=1024, warps=4),
    turn("4096 pairs", "8 tokens: half the programs to start", pairs=4096, warps=8),
    turn("4096 pairs, 4 warps", "likewise, 32 pairs a thread", pairs=4096, warps=4),
    turn("8192 pairs", "16 tokens: a quarter of the programs", pairs=8192, warps=16),
    turn("4 heads", "8 tokens: an angle serves fewer heads, k's programs are as many a token as q's", heads=4),
    turn("16 heads", "2 tokens of q: 4 kB in a row, half the angles read again", heads=16),
    turn("32 heads", "a token of q, 8 kB in a row, its angles read once", heads=32),
    turn("32 heads, 4096 pairs", "2 tokens of q", heads=32, pairs=4096, warps=8),
    turn("16 heads, 8 warps", "2 tokens of q, 8 pairs a thread", heads=16, warps=8),
)


def candidates(case: Case) -> tuple[Candidate, ...]:
    """Return the candidates of an op at one size; widths for a CPU are an eighth of the real ones."""
    if case.op == "apply_rope":
        return OF_ROPE
    width = case.sizes[-1] if case.sizes[-1] >= 4096 else 8 * case.sizes[-1]
    if width == 4096:
        return OF_RMS_4096 if case.op == "rms_norm" else OF_LAYER_4096
    return {8192: OF_8192, 16384: OF_16384}[width]


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
