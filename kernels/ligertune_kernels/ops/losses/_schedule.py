"""How linear_cross_entropy goes through N rows of a vocabulary V: a value made of sizes, so that it can be shown.

    fast    6 NEV. `slot` rows go through the products at a time, and dW is added up (a flush) when `buffer` rows are
            there. Products of 1024 to 2048 rows run at cuBLAS's best (780 TFLOP/s on an H100, 620 at 256 rows).
            Where not all rows fit, the first columns lie in the memory of dW, which is not written yet: `groups` of
            `slab` columns, each (N, slab), at its end. When all logits are gradients, dW is made a group at a time,
            each part over groups that are done with. All rows in one buffer are 2 % faster still.
    lean    7 to 8 NEV, in hardly more memory than the gradients take. The first pass goes through the rows as above,
            with its buffer in the memory of dW, which is not written yet: it gives the losses, lse and dX. What is
            left of that memory keeps the first columns, as above: `groups` of `kept` columns, a third of all for
            8192 x 4096. The second pass makes the others again, `slab` columns of all rows at a time, and of each
            slab its part of dW in one product.

Rounding of dW. Every element is rounded once: it comes from one product, or from sums in fp32 where there is more than
one flush. (Added up in bf16, two flushes are off by 2.1e-3 where one product is by 1.7e-3, and 32 by 6e-3.)

The room of a group of S columns: group i of k begins (k - i) N S before the end of dW's memory, and its dW ends at
(i + 1) S E. The one has to stay behind the other for the first and the last i: k N S + S E <= V E, and
N S + k S E <= V E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

CHUNK_BYTES = 17 << 26  # 4352 rows of a 128k vocabulary in bf16: 8192 tokens, the other half of them in dW's memory
SLOT_ROWS = 2048
# No flush wants more. Against 1024 rows (H100) 7 % less time at 4096 x 3584 x 152064, 2 % less at
# 16384 x 2048 x 128256, 1 % more at 8192 x 4096 x 128256.
SLOT_ROWS_WITHOUT_DW = 1152
WITHOUT_DW_BYTES = 3 << 27
LEAST_ROWS = 1024  # between two flushes: below, adding up dW is so slow that making the logits twice is faster
ROW_MULTIPLE = 128  # of the height of cuBLAS's tiles
# Of their width: whole tiles of cuBLAS's.
COLUMN_MULTIPLE = 256
SLAB_BYTES = 32 << 20  # the logits of a slab are then in the L2 cache when they are turned into gradients
SLAB_COLUMNS = 2048  # at least
GROUP_COLUMNS = 8192  # at least: with narrower groups dX's sums are read and written so often that it shows
MOST_KEPT = 4  # groups, by the lean plan. 4096 x 3584 x 152064 (H200): 25.1 ms with 1, 24.3 with 2, 23.5 with 4
REST_COLUMNS = 32768  # at least: what the row pass holds of a row in registers
REST_MULTIPLE = 64  # so that rows start at a vector's address
PLENTY = 2  # chunk_bytes that may be taken where a product cannot be added to wider sums
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
    return Chunks(_even_part(buffer, slot_rows), buffer, -(-n_rows // buffer))


def _rows_in(chunk_bytes: int, row_bytes: int) -> int:
    fitting = max(1, chunk_bytes // row_bytes)
    return fitting - fitting % ROW_MULTIPLE if fitting > ROW_MULTIPLE else fitting


def _even_part(n_rows: int, most: int) -> int:
    """Rows in parts of about the same number, of which none has more than `most`, but for the rounding up."""
    parts = -(-n_rows // most)
    return min(n_rows, _rounded_up(-(-n_rows // parts)))


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
    groups: int = 0
    extra_bytes: int = 0
    kept: int = 0

    def __str__(self) -> str:
        held = f"{self.extra_bytes / 2**30:.2f} GiB beside the gradients"
        if self.plan == "lean":
            kept = f" but for {self.groups} x {self.kept} columns in dW's memory" if self.groups else ""
            return f"lean: logits made twice, by {self.slot} rows and by {self.slab} columns{kept}; {held}"
        taken = f"fast: {self.slot} rows at a time"
        if self.groups:
            return f"{taken}, {self.groups} x {self.slab} columns of logits in dW's memory; {held}"
        if not self.flushes:
            return f"{taken}, no dW; {held}"
        sums = "dW in one product" if self.flushes == 1 else f"dW in {self.flushes} flushes, summed in fp32"
        return f"{taken}, {sums}; {held}"

    def sums_wide(self, dtype: torch.dtype) -> bool:
        """Whether dW is fp32 until it is whole. float16's sums are divided only then, and could overflow before."""
        return dtype is torch.float16 or (dtype is torch.bfloat16 and self.flushes > 1)


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
    wide_products: bool = True,
) -> Schedule:
    """The fastest that chunk_bytes and free_bytes (None: plenty) have room for; else what needs least.

    wide_products says whether the device adds a product of bf16 to sums in fp32 (cuBLAS does).
    """
    row_bytes = vocab_size * dtype.itemsize
    if not needs_dw:
        rows = SLOT_ROWS_WITHOUT_DW if slot_rows is None else slot_rows
        chunks = chunks_of(n_rows, row_bytes, min(chunk_bytes, WITHOUT_DW_BYTES), rows, needs_dw=False)
        return Schedule("fast", chunks.slot, chunks.buffer, 0, extra_bytes=chunks.buffer * row_bytes)
    slot_rows = slot_rows or SLOT_ROWS
    sizes = n_rows, hidden_size, vocab_size, dtype
    lean = _lean(*sizes, slot_rows, in_groups=wide_products)
    summed = _summed(*sizes, chunk_bytes, slot_rows)
    one_flush, plans = _one_flush(*sizes, slot_rows), []
    adds_wide = wide_products or dtype is not torch.bfloat16
    if n_rows * row_bytes <= chunk_bytes * (1 if adds_wide else PLENTY):
        plans.append(one_flush)
    if adds_wide:
        plans += _in_groups(*sizes, chunk_bytes, slot_rows)
        if _rows_in(chunk_bytes, row_bytes) >= min(n_rows, LEAST_ROWS):
            plans.append(summed)
    gradients = (vocab_size + n_rows * needs_dx) * hidden_size * dtype.itemsize
    for plan in plans:
        if free_bytes is None or gradients + plan.extra_bytes <= FREE_SHARE * free_bytes:
            return plan
    return min((summed, lean) if adds_wide else (lean,), key=lambda plan: plan.extra_bytes)


def _one_flush(n_rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, slot_rows: int) -> Schedule:
    held = n_rows * vocab_size * dtype.itemsize
    if dtype is torch.float16:
        held = _with_wide_sums(held, hidden_size * vocab_size, dtype)
    return Schedule("fast", _slot(n_rows, slot_rows), n_rows, 1, extra_bytes=held)


def _in_groups(
    n_rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int, slot_rows: int
) -> list[Schedule]:
    """One flush with logits in dW's memory, if they are as wide as dW and the rest fits. Few groups are fast."""
    weight_elements = vocab_size * hidden_size
    most = min((weight_elements // GROUP_COLUMNS - hidden_size) // n_rows, (vocab_size - REST_COLUMNS) // GROUP_COLUMNS)
    for groups in range(1, most + 1 if dtype is not torch.float16 else 1):
        rows, outputs = groups * n_rows + hidden_size, groups * hidden_size + n_rows
        slab = min(weight_elements // max(rows, outputs), (vocab_size - REST_COLUMNS) // groups)
        slab -= slab % COLUMN_MULTIPLE
        held = n_rows * rest_stride(vocab_size - groups * slab) * dtype.itemsize
        if held <= chunk_bytes:
            slot = _slot(n_rows, slot_rows)
            # dX is summed in fp32 over the groups, in what is left of dW's memory
            if weight_elements - groups * n_rows * slab < 4 * slot * hidden_size // dtype.itemsize:
                held += 4 * slot * hidden_size
            return [Schedule("fast", slot, n_rows, 1, slab, groups, held)]
    return []


def _slot(n_rows: int, slot_rows: int) -> int:
    """Where all rows are there for one flush: in even parts, but whole if they are but twice a slot."""
    return _even_part(n_rows, slot_rows if n_rows > 2 * slot_rows else 2 * slot_rows)


def rest_stride(columns: int) -> int:
    """From row to row of the logits that are in no group."""
    return -(-columns // REST_MULTIPLE) * REST_MULTIPLE


def _summed(
    n_rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int, slot_rows: int
) -> Schedule:
    """Several flushes, of as many rows as fit beside the wider dW."""
    row_bytes, weight_elements = vocab_size * dtype.itemsize, vocab_size * hidden_size
    beside = max(0, chunk_bytes - weight_elements * (4 - dtype.itemsize))
    rows = min(_rows_in(chunk_bytes, row_bytes), max(slot_rows, _rows_in(beside, row_bytes)))
    chunks = chunks_of(n_rows, row_bytes, rows * row_bytes, rows, needs_dw=True)
    held = _with_wide_sums(chunks.buffer * row_bytes, weight_elements, dtype)
    return Schedule("fast", chunks.slot, chunks.buffer, chunks.flushes, extra_bytes=held)


def _with_wide_sums(held: int, weight_elements: int, dtype: torch.dtype) -> int:
    """At the end the buffer is gone, and dW is there in fp32 and in dtype (float16 is cast later: as much, then)."""
    if dtype.itemsize >= 4:
        return held
    return max(held + weight_elements * (4 - dtype.itemsize), 4 * weight_elements)


def _lean(
    n_rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, slot_rows: int, *, in_groups: bool
) -> Schedule:
    slot = min(n_rows, slot_rows, hidden_size)  # dW holds E rows of V logits
    columns = max(SLAB_COLUMNS, SLAB_BYTES // (n_rows * dtype.itemsize))
    groups, kept = (0, 0) if dtype is torch.float16 or not in_groups else _kept(n_rows, hidden_size, vocab_size, slot)
    again = vocab_size - groups * kept
    slab = min(again, _rounded_up(-(-again // -(-again // columns))))
    held = n_rows * slab * dtype.itemsize
    if groups:
        held = max(held, 4 * slot * hidden_size)  # the first pass sums dX over the groups in fp32
    if dtype is torch.float16:
        held += 4 * vocab_size * hidden_size
    return Schedule("lean", slot, slot, 1, slab, groups, held + 8 * n_rows, kept)


def _kept(n_rows: int, hidden_size: int, vocab_size: int, slot: int) -> tuple[int, int]:
    """Groups and the columns of each that dW's memory has room for beside a slot of the others: as many as may be.

    More groups are more products, which are worth it from a slab on.
    """
    weight_elements, best = vocab_size * hidden_size, (0, 0)
    for groups in range(1, MOST_KEPT + 1):
        room = (weight_elements - slot * (vocab_size + REST_MULTIPLE)) // (groups * max(1, n_rows - slot))
        rows, outputs = groups * n_rows + hidden_size, groups * hidden_size + n_rows
        kept = min(weight_elements // max(rows, outputs), (vocab_size - REST_COLUMNS) // groups)
        kept = min(kept, room) if n_rows > slot else kept
        kept -= kept % COLUMN_MULTIPLE
        if kept >= GROUP_COLUMNS and groups * kept >= best[0] * best[1] + SLAB_COLUMNS:
            best = groups, kept
    return best


def free_bytes(device: torch.device) -> int | None:
    """What the driver and torch's own pool have left on a GPU; None where it cannot be asked."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    pool = torch.cuda.memory_stats_as_nested_dict(device)
    unused = pool["reserved_bytes"]["all"]["current"] - pool["allocated_bytes"]["all"]["current"]
    return torch.cuda.mem_get_info(device)[0] + unused
