"""Tiles of the losses, and the schedule of linear_cross_entropy: which rows and columns of logits exist at a time.

N rows (tokens), E hidden, V vocabulary. A schedule is a value computed from sizes, so that it can be printed.

    fast    6 NEV operations. `slot` rows go through the matrix products at a time. dW is accumulated (a flush) when
            `buffer` rows are complete. Products of 1024 to 2048 rows run at cuBLAS's best rate (780 TFLOP/s on an H100,
            620 at 256 rows). Where the buffer cannot hold all rows, the first columns of the logits lie in the memory
            of dW, which is not written yet: `groups` of `slab` columns, each (N, slab), at its end. When all logits
            have become gradients, dW is computed group by group, each part over groups that are no longer needed. One
            buffer for all rows is 2 % faster still.
    lean    7 to 8 NEV, in little more memory than the gradients. The first pass over the rows gives losses, lse and dX;
            its buffer lies in the memory of dW. The rest of that memory keeps the first columns, as above: `groups` of
            `kept` columns, a third of all for 8192 x 4096. The second pass computes the other logits again, `slab`
            columns of all rows at a time, and from each slab its part of dW in one product.

Rounding of dW: every element is rounded once. It comes from one product, or from sums in fp32 where there are several
flushes. (Accumulated in bf16, two flushes have an error of 2.1e-3 and 32 of 6e-3, where one product has 1.7e-3.)

Room for groups of S columns: group i of k begins (k - i) N S elements before the end of dW's memory, and its part of dW
ends at element (i + 1) S E. The end must not pass the beginning for the first and the last i: k N S + S E <= V E, and
N S + k S E <= V E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import INTERPRETER, MAX_THREADS, Chip, launch_options
from ligertune_kernels.launcher import triton

# The row pass.
VECTOR = 8  # neighbouring columns of one lane: 16 bytes of bf16
MIN_COLS = 128  # of a tile
# Bytes of a long row per step of the sweeps. Twice as many, with half of the threads and twice the registers per
# thread, reach 89 % of the bandwidth where this reaches 80 % (8192 x 128256, H100); on CDNA they spill.
BLOCK_BYTES = 16384


class TailLimits(NamedTuple):
    """How much of a row a program holds in registers."""

    max_bytes: int
    cols_per_thread: int


PLAIN_16_BIT = TailLimits(65536, cols_per_thread=64)  # two programs then share a processor
WITH_TERMS = TailLimits(16384, cols_per_thread=8)  # fp32 or options take registers: more spills (sm80-120, gfx90a-1201)

STATISTICS_BLOCK = 2048  # columns of a row's statistics at a time; wider blocks spill on sm100 or sm120
SEARCH_BLOCK = 2048  # labels that the search for rows reads at a time; 4096 spill on AMD
FACTOR_BLOCK = 4096  # elements of a gradient that are scaled at a time
FACTOR_PROGRAMS = 16  # per processor, at most: an upstream gradient of 1 costs nothing but their start


@dataclass(frozen=True)
class RowTiling:
    """How a program reads a row: `swept` columns in blocks, twice, and the `tail`, which stays in registers."""

    swept: int
    block: int
    tail: int
    num_warps: int
    programs: int

    def constants(self, chip: Chip, *, saves_lse: bool, needs_grad: bool, grouped: bool) -> dict[str, int | bool]:
        """Return the constants of `row_kernel` that do not depend on the options of the loss."""
        return {
            **launch_options(self.block, chip),
            "num_warps": self.num_warps,
            "SAVES_LSE": saves_lse,
            "NEEDS_GRAD": needs_grad,
            "SWEEPS": self.swept > 0,
            "GROUPED": grouped,
            "TAIL_LANES": self.tail // VECTOR,
            "LANES": self.block // VECTOR,
            "VECTOR": VECTOR,
        }


def row_tiling(
    n_rows: int, n_cols: int, element_size: int, chip: Chip, *, plain: bool, rest_cols: int | None = None
) -> RowTiling:
    """Return the tiling of the row kernel.

    Rows that fit are held whole, as many at once as there are threads. Longer rows run one per processor, so that the
    second sweep still finds them in the L2 cache. plain: no cap, smoothing or class weights. rest_cols: the columns
    that do not lie in groups; no more than these are held.
    """
    max_warps = MAX_THREADS // chip.warp_size
    plain &= element_size == 2
    limits = PLAIN_16_BIT if plain else WITH_TERMS
    tail = limits.max_bytes // element_size
    if rest_cols is not None:
        tail = min(tail // 2, 1 << (rest_cols.bit_length() - 1))  # half: addresses of grouped columns take registers
    elif n_cols <= tail:
        tail = max(MIN_COLS, triton.next_power_of_2(n_cols))
        num_warps = min(max_warps, max(4, tail // (limits.cols_per_thread * chip.warp_size)))
        return RowTiling(0, MIN_COLS, tail, num_warps, min(n_rows, chip.processors * 2 * max_warps // num_warps))
    halves = chip.warp_size == 32
    block = min(tail, BLOCK_BYTES * (2 if halves and plain else 1) // element_size)
    swept = triton.cdiv(n_cols - tail, block) * block
    num_warps = max_warps // 2 if halves else max_warps
    if rest_cols is not None:  # a few columns would be held by several warps, and all of them would write
        num_warps = min(num_warps, max(1, block // (VECTOR * chip.warp_size)))
    return RowTiling(swept, block, tail, num_warps, min(n_rows, chip.processors))


# Which rows are computed.
MULTIPLE_OF = 16  # rows: suits matrix products, and fewer distinct sizes need fewer plans
# Below this product of rows, vocabulary and hidden size the loss takes less than about 1 ms on an H100.
MIN_PRODUCTS = 1 << 36

# The schedule of the chunks.
CHUNK_BYTES = 17 << 26  # 4352 rows of a 128k vocabulary in bf16: 8192 tokens, with half of their logits in dW's memory
SLOT_ROWS = 2048
# Rows without flushes, frozen weight. Against 1024 rows (H100) 7 % less time at 4096 x 3584 x 152064, 2 % less at
# 16384 x 2048 x 128256, 1 % more at 8192 x 4096 x 128256.
SLOT_ROWS_WITHOUT_DW = 1152
WITHOUT_DW_BYTES = 3 << 27
MIN_FLUSH_ROWS = 1024  # with fewer rows per flush accumulating dW is slower than computing the logits twice
ROW_MULTIPLE = 128  # height of cuBLAS's tiles
COLUMN_MULTIPLE = 256  # width of cuBLAS's tiles
SLAB_BYTES = 32 << 20  # the logits of a slab are then still in the L2 cache when they become gradients
MIN_SLAB_COLUMNS = 2048
MIN_GROUP_COLUMNS = 8192  # with narrower groups reading and writing the sums of dX takes noticeable time
MAX_KEPT_GROUPS = 4  # of the lean plan. 4096 x 3584 x 152064 (H200): 25.1 ms with 1, 24.3 with 2, 23.5 with 4
MIN_REST_COLUMNS = 32768  # the part of a row that the row pass holds in registers
REST_MULTIPLE = 64  # so that rows start at the address of a vector
EXTRA_CHUNKS = 2  # times chunk_bytes for one flush where a product cannot be added to wider sums
FREE_SHARE = 0.9  # of the free memory: the rest is fragmented
SLOT_ROWS_TORCH = 256  # the torch row pass makes several fp32 copies of a slot
MIN_QUERY_BYTES = 1 << 28  # querying free memory takes 30 µs on the host


def adds_wide_products(chip: Chip | None) -> bool:
    """Return whether a product of bf16 is added to sums in fp32 without casting the factors before."""
    # torch does so with cuBLAS. On CPUs a cast costs little.
    return chip is None or chip.vendor != "amd"


def accumulates_wide(chip: Chip | None) -> bool:
    """Return whether torch.addmm takes out_dtype: with cuBLAS alone."""
    return chip is not None and chip.vendor == "nvidia"


def may_take_groups(chip: Chip) -> bool:
    """Return whether some batches take logits in groups on this chip."""
    # AMD takes bfloat16 in one part (`adds_wide_products`), and float32 rows in groups would spill registers.
    return chip.vendor != "amd" and chip is not INTERPRETER


class Chunks(NamedTuple):
    """Division of N rows: `slot` rows per matrix product, `buffer` rows per flush of dW."""

    slot: int
    buffer: int
    flushes: int


def chunks_of(n_rows: int, row_bytes: int, chunk_bytes: int, slot_rows: int, *, needs_dw: bool) -> Chunks:
    """Return even chunks of at most chunk_bytes, or of one row where a row is larger."""
    fitting = _rows_in(chunk_bytes, row_bytes)
    if not needs_dw:
        slot = min(n_rows, fitting, slot_rows)
        return Chunks(slot, slot, 0)
    buffer = min(fitting, _even_part(n_rows, fitting))
    return Chunks(_even_part(buffer, slot_rows), buffer, -(-n_rows // buffer))


def _rows_in(chunk_bytes: int, row_bytes: int) -> int:
    fitting = max(1, chunk_bytes // row_bytes)
    return fitting - fitting % ROW_MULTIPLE if fitting > ROW_MULTIPLE else fitting


def _even_part(n_rows: int, max_rows: int) -> int:
    """Return the rows of each of the fewest even parts of about max_rows, rounded up to ROW_MULTIPLE."""
    parts = -(-n_rows // max_rows)
    return min(n_rows, _round_up(-(-n_rows // parts), ROW_MULTIPLE))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def rest_stride(columns: int) -> int:
    """Return the row stride of logits that are in no group."""
    return _round_up(columns, REST_MULTIPLE)


@dataclass(frozen=True)
class Schedule:
    """A chosen schedule. extra_bytes is the peak memory in addition to inputs and gradients."""

    plan: Literal["fast", "lean"]
    slot: int
    buffer: int
    flushes: int
    slab: int = 0
    groups: int = 0
    extra_bytes: int = 0
    kept: int = 0

    def __str__(self) -> str:
        extra = f"{self.extra_bytes / 2**30:.2f} GiB extra memory"
        if self.plan == "lean":
            kept = f" except {self.groups} x {self.kept} columns in dW's memory" if self.groups else ""
            return f"lean: logits computed twice, by {self.slot} rows and by {self.slab} columns{kept}; {extra}"
        if self.groups:
            how = f"{self.groups} x {self.slab} columns of logits in dW's memory"
        elif not self.flushes:
            how = "no dW"
        else:
            how = "dW in one product" if self.flushes == 1 else f"dW in {self.flushes} flushes, summed in fp32"
        return f"fast: {self.slot} rows at a time, {how}; {extra}"

    def sums_wide(self, dtype: torch.dtype) -> bool:
        """Return whether dW is accumulated in fp32.

        float16 always is: its sums are divided only in the backward, and could overflow before.
        """
        return dtype is torch.float16 or (dtype is torch.bfloat16 and self.flushes > 1)


class _Sizes(NamedTuple):
    """Sizes of a linear layer and its input, and the most rows of a slot."""

    n_rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    slot_rows: int

    @property
    def row_bytes(self) -> int:
        return self.vocab * self.dtype.itemsize

    @property
    def weight_elements(self) -> int:
        return self.vocab * self.hidden

    def slot_of_all(self) -> int:
        """Return the rows of a slot where one flush takes all rows: even parts, but one part up to twice slot_rows."""
        return _even_part(self.n_rows, self.slot_rows if self.n_rows > 2 * self.slot_rows else 2 * self.slot_rows)

    def group_columns(self, groups: int) -> int:
        """Return the most columns per group for which dW does not overwrite what is still needed, unrounded."""
        rows = groups * self.n_rows + self.hidden
        outputs = groups * self.hidden + self.n_rows
        return min(self.weight_elements // max(rows, outputs), (self.vocab - MIN_REST_COLUMNS) // groups)

    def with_wide_sums(self, extra: int) -> int:
        """Add dW in fp32. The buffer is freed before dW is cast; float16 casts later, in as much memory."""
        if self.dtype.itemsize >= 4:
            return extra
        return max(extra + self.weight_elements * (4 - self.dtype.itemsize), 4 * self.weight_elements)


class ChunkProducts(NamedTuple):
    """How the matrix products of the chunks run."""

    needs_dx: bool = True
    slot_rows: int | None = None  # at most, of a product
    wide_products: bool = True  # the device adds a product of bf16 to sums in fp32, as cuBLAS does


def schedule_of(
    n_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    needs_dw: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    free_bytes: int | None = None,
    products: ChunkProducts = ChunkProducts(),  # noqa: B008 (immutable)
) -> Schedule:
    """Return the fastest schedule within chunk_bytes and free_bytes (None: unlimited), else the smallest."""
    needs_dx, slot_rows, wide_products = products
    if not needs_dw:
        row_bytes = vocab_size * dtype.itemsize
        rows = SLOT_ROWS_WITHOUT_DW if slot_rows is None else slot_rows
        chunks = chunks_of(n_rows, row_bytes, min(chunk_bytes, WITHOUT_DW_BYTES), rows, needs_dw=False)
        return Schedule("fast", *chunks, extra_bytes=chunks.buffer * row_bytes)
    sizes = _Sizes(n_rows, hidden_size, vocab_size, dtype, slot_rows or SLOT_ROWS)
    lean = _lean(sizes, in_groups=wide_products)
    summed = _summed(sizes, chunk_bytes)
    adds_wide = wide_products or dtype is not torch.bfloat16
    plans = []
    logit_bytes = n_rows * sizes.row_bytes
    if logit_bytes <= chunk_bytes * (1 if adds_wide else EXTRA_CHUNKS):
        extra = sizes.with_wide_sums(logit_bytes) if dtype is torch.float16 else logit_bytes
        plans.append(Schedule("fast", sizes.slot_of_all(), n_rows, 1, extra_bytes=extra))
    if adds_wide:
        plans += _in_groups(sizes, chunk_bytes)
        if _rows_in(chunk_bytes, sizes.row_bytes) >= min(n_rows, MIN_FLUSH_ROWS):
            plans.append(summed)
    gradients = (vocab_size + n_rows * needs_dx) * hidden_size * dtype.itemsize
    for plan in plans:
        if free_bytes is None or gradients + plan.extra_bytes <= FREE_SHARE * free_bytes:
            return plan
    return min((summed, lean) if adds_wide else (lean,), key=lambda plan: plan.extra_bytes)


def may_group(vocab_size: int, dtype: torch.dtype) -> bool:
    """Return whether the logits of some number of rows are taken in groups."""
    return dtype is not torch.float16 and vocab_size >= MIN_REST_COLUMNS + MIN_GROUP_COLUMNS


def _in_groups(sizes: _Sizes, chunk_bytes: int) -> list[Schedule]:
    """Return the schedule with the fewest groups in dW's memory for which the other logits fit, if there is one."""
    if not may_group(sizes.vocab, sizes.dtype):  # in float16 dW is wider than the logits
        return []
    n_rows = sizes.n_rows
    itemsize = sizes.dtype.itemsize
    max_groups = (sizes.weight_elements // MIN_GROUP_COLUMNS - sizes.hidden) // n_rows
    for groups in range(1, min(max_groups, (sizes.vocab - MIN_REST_COLUMNS) // MIN_GROUP_COLUMNS) + 1):
        slab = sizes.group_columns(groups)
        slab -= slab % COLUMN_MULTIPLE
        extra = n_rows * rest_stride(sizes.vocab - groups * slab) * itemsize
        if extra <= chunk_bytes:
            slot = sizes.slot_of_all()
            # dX is summed in fp32 over the groups, in what is left of dW's memory
            if sizes.weight_elements - groups * n_rows * slab < 4 * slot * sizes.hidden // itemsize:
                extra += 4 * slot * sizes.hidden
            return [Schedule("fast", slot, n_rows, 1, slab, groups, extra)]
    return []


def _summed(sizes: _Sizes, chunk_bytes: int) -> Schedule:
    """Return the schedule with several flushes, of as many rows as fit next to dW in fp32."""
    row_bytes = sizes.row_bytes
    left = max(0, chunk_bytes - sizes.weight_elements * (4 - sizes.dtype.itemsize))
    rows = min(_rows_in(chunk_bytes, row_bytes), max(sizes.slot_rows, _rows_in(left, row_bytes)))
    chunks = chunks_of(sizes.n_rows, row_bytes, rows * row_bytes, rows, needs_dw=True)
    return Schedule("fast", *chunks, extra_bytes=sizes.with_wide_sums(chunks.buffer * row_bytes))


def _lean(sizes: _Sizes, *, in_groups: bool) -> Schedule:
    n_rows = sizes.n_rows
    itemsize = sizes.dtype.itemsize
    slot = min(n_rows, sizes.slot_rows, sizes.hidden)  # dW's memory holds E rows of V logits
    columns = max(MIN_SLAB_COLUMNS, SLAB_BYTES // (n_rows * itemsize))
    groups, kept = (0, 0) if sizes.dtype is torch.float16 or not in_groups else _kept(sizes, slot)
    slab = _even_part(sizes.vocab - groups * kept, columns)
    extra = n_rows * slab * itemsize
    if groups:
        extra = max(extra, 4 * slot * sizes.hidden)  # the first pass sums dX over the groups in fp32
    if sizes.dtype is torch.float16:
        extra += 4 * sizes.weight_elements
    return Schedule("lean", slot, slot, 1, slab, groups, extra + 8 * n_rows, kept)


def _kept(sizes: _Sizes, slot: int) -> tuple[int, int]:
    """Return how many groups of how many columns fit in dW's memory next to a slot of the other logits.

    The choice keeps the most columns. Another group, which is another product, must keep a slab more.
    """
    best = 0, 0
    for groups in range(1, MAX_KEPT_GROUPS + 1):
        kept = sizes.group_columns(groups)
        if sizes.n_rows > slot:
            room = sizes.weight_elements - slot * (sizes.vocab + REST_MULTIPLE)
            kept = min(kept, room // (groups * (sizes.n_rows - slot)))
        kept -= kept % COLUMN_MULTIPLE
        if kept >= MIN_GROUP_COLUMNS and groups * kept >= best[0] * best[1] + MIN_SLAB_COLUMNS:
            best = groups, kept
    return best


def free_bytes(device: torch.device) -> int | None:
    """Return what the driver and torch's own pool have left on a GPU; None where they cannot be queried."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    pool = torch.cuda.memory_stats_as_nested_dict(device)
    unused = pool["reserved_bytes"]["all"]["current"] - pool["allocated_bytes"]["all"]["current"]
    return torch.cuda.mem_get_info(device)[0] + unused
