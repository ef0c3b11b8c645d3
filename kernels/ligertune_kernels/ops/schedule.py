"""How linear_cross_entropy goes through N rows of a vocabulary V: a value made of sizes, so that it can be shown.

    fast    6 NEV. `slot` rows go through the products at a time, and dW is added up (a flush) when `buffer` rows are
            there. Products of 1024 to 2048 rows run at cuBLAS's best (780 TFLOP/s on an H100, 620 at 256 rows).
    lean    8 NEV, in hardly more memory than the gradients take. The first pass goes through the rows as above, with
            its buffer in the memory of dW, which is not written yet: it gives the losses, lse and dX. The second makes
            the logits again, `slab` columns of all rows at a time, and of each slab its part of dW in one product.

Rounding of dW. Two flushes in bf16 are as good as one product (error 2.1e-3 against 1.95e-3; 32 flushes 6.2e-3). More
than two are summed in fp32 and rounded once; the buffer is then one slot, as dW in fp32 takes the room of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

CHUNK_BYTES = 1 << 30  # 4096 rows of a 128k vocabulary in bf16: 8192 tokens in two flushes
SLOT_ROWS = 2048
SLOT_ROWS_WITHOUT_DW = 1024  # no flush wants more, and half the buffer is enough
WITHOUT_DW_BYTES = 3 << 27
LEAST_ROWS = 1024  # between two flushes: below, adding up dW is so slow that making the logits twice is faster
ROW_MULTIPLE = 128  # of the height of cuBLAS's tiles
SLAB_BYTES = 32 << 20  # the logits of a slab are then in the L2 cache when they are turned into gradients
SLAB_COLUMNS = 2048  # at least
FREE_SHARE = 0.9  # of the free memory that a schedule may count on: the rest is in pieces


@dataclass(frozen=True)
class Chunks:
    """How N rows are taken: `slot` rows through the products at a time, `buffer` rows between two flushes of dW."""

    slot: int
    buffer: int
    flushes: int


def chunks_of(n_rows: int, row_bytes: int, chunk_bytes: int, slot_rows: int, *, needs_dw: bool) -> Chunks:
    """Even parts that fit in chunk_bytes; one row is always taken, however long."""
    fitting = _rows_in(chunk_bytes, row_bytes)
    if not needs_dw:
        slot = min(n_rows, fitting, slot_rows)
        return Chunks(slot, slot, 0)
    flushes = -(-n_rows // fitting)
    buffer = min(fitting, n_rows, _rounded_up(-(-n_rows // flushes)))
    slots = -(-buffer // slot_rows)
    return Chunks(min(buffer, _rounded_up(-(-buffer // slots))), buffer, -(-n_rows // buffer))


def _rows_in(chunk_bytes: int, row_bytes: int) -> int:
    fitting = max(1, chunk_bytes // row_bytes)
    return fitting - fitting % ROW_MULTIPLE if fitting > ROW_MULTIPLE else fitting


def _rounded_up(n: int) -> int:
    return -(-n // ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True)
class Schedule:
    """What was chosen. extra_bytes is the most that is held beside the inputs and the gradients."""

    plan: Literal["fast", "lean"]
    slot: int
    buffer: int
    flushes: int
    slab: int = 0
    sums_wide: bool = False
    extra_bytes: int = 0

    def __str__(self) -> str:
        held = f"{self.extra_bytes / 2**30:.2f} GiB beside the gradients"
        if self.plan == "lean":
            return f"lean: logits made twice, by {self.slot} rows and by {self.slab} columns; {held}"
        if not self.flushes:
            return f"fast: {self.slot} rows at a time, no dW; {held}"
        sums = "dW in one product" if self.flushes == 1 else f"dW in {self.flushes} flushes"
        return f"fast: {self.slot} rows at a time, {sums}{', summed in fp32' if self.sums_wide else ''}; {held}"


def schedule_of(
    n_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    needs_dx: bool = True,
    needs_dw: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    free_bytes: int | None = None,
    slot_rows: int | None = None,
) -> Schedule:
    """Fast, if chunk_bytes hold enough rows for it and free_bytes (None: plenty) all it needs; else lean."""
    row_bytes = vocab_size * dtype.itemsize
    if not needs_dw:
        rows = SLOT_ROWS_WITHOUT_DW if slot_rows is None else slot_rows
        chunks = chunks_of(n_rows, row_bytes, min(chunk_bytes, WITHOUT_DW_BYTES), rows, needs_dw=False)
        return Schedule("fast", chunks.slot, chunks.buffer, 0, extra_bytes=chunks.buffer * row_bytes)
    fast = _fast(n_rows, hidden_size, vocab_size, dtype, chunk_bytes, slot_rows or SLOT_ROWS)
    if _rows_in(chunk_bytes, row_bytes) >= min(n_rows, LEAST_ROWS):
        gradients = (vocab_size + n_rows * needs_dx) * hidden_size * dtype.itemsize
        if free_bytes is None or gradients + fast.extra_bytes <= FREE_SHARE * free_bytes:
            return fast
    lean = _lean(n_rows, hidden_size, vocab_size, dtype, slot_rows or SLOT_ROWS)
    return min(fast, lean, key=lambda schedule: schedule.extra_bytes)


def _fast(
    n_rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int, slot_rows: int
) -> Schedule:
    row_bytes = vocab_size * dtype.itemsize
    chunks = chunks_of(n_rows, row_bytes, chunk_bytes, slot_rows, needs_dw=True)
    # float16's sums are divided at the end only, and could overflow before
    sums_wide = dtype is torch.float16 or (dtype is torch.bfloat16 and chunks.flushes > 2)
    if sums_wide and chunks.flushes > 2:
        chunks = chunks_of(n_rows, row_bytes, min(chunk_bytes, slot_rows * row_bytes), slot_rows, needs_dw=True)
    held = chunks.buffer * row_bytes
    if sums_wide:
        weight_elements = vocab_size * hidden_size
        held = max(held + weight_elements * (4 - dtype.itemsize), 4 * weight_elements)  # then it is cast
    return Schedule(
        "fast", chunks.slot, chunks.buffer, chunks.flushes, sums_wide=sums_wide, extra_bytes=held
    )  # fmt: skip


def _lean(n_rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, slot_rows: int) -> Schedule:
    sums_wide = dtype is torch.float16
    slot = min(n_rows, slot_rows, hidden_size)  # dW holds E rows of V logits
    columns = max(SLAB_COLUMNS, SLAB_BYTES // (n_rows * dtype.itemsize))
    slabs = -(-vocab_size // columns)
    slab = min(vocab_size, _rounded_up(-(-vocab_size // slabs)))
    held = n_rows * slab * dtype.itemsize + 4 * n_rows
    if sums_wide:
        held += 4 * vocab_size * hidden_size
    return Schedule("lean", slot, slot, 1, slab, sums_wide, held)


def free_bytes(device: torch.device) -> int | None:
    """What the driver and torch's own pool have left on a GPU; None where it cannot be asked."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    pool = torch.cuda.memory_stats_as_nested_dict(device)
    unused = pool["reserved_bytes"]["all"]["current"] - pool["allocated_bytes"]["all"]["current"]
    return torch.cuda.mem_get_info(device)[0] + unused
