"""Embedding: rows of a table by index, indices (...), weight (V, E) -> (..., E), with a deterministic gradient.

Backward: dweight[v] = sum of the dy whose index is v, in fp32, rounded once. The indices are sorted, so that equal
indices form a segment. A program sums a chunk of the sorted order and writes the rows whose segment lies within the
chunk. Where a segment crosses into other chunks, each program writes its partial sum, and a second kernel adds them up
at the chunk where the segment begins. Every order of summation is fixed: there are no atomics, and the result is the
same in every run. The host never waits for the device.

A row whose index is outside the table is NaN, and its gradient is dropped; torch aborts the device instead.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.extra.tiles import COPY_TILE, GRADIENT_BLOCK, SORTED_CHUNK


def embedding_reference(indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Call torch.nn.functional.embedding."""
    return F.embedding(indices, weight, padding_idx)


@triton.jit(do_not_specialize=["n_rows", "vocab_size"])
def _forward_kernel(
    indices_ptr,  # (N,)
    w_ptr,  # (V, E)
    y_ptr,  # (N, E)
    w_row_stride, n_cols, n_rows, vocab_size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + rows, mask=rows < n_rows, other=0).to(tl.int64)
    inside = (index >= 0) & (index < vocab_size)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    w_offs = index[:, None] * w_row_stride + cols[None, :]
    y = tl.load(w_ptr + w_offs, mask=mask & inside[:, None], other=float("nan"))
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "vocab_size", "padding_idx"])
def _chunk_kernel(
    dy_ptr,  # (N, E)
    sorted_ptr, order_ptr,  # (N,): sorted indices, and their rows in dy
    pieces_ptr,  # (chunks, 2, E) float32: of the segment that enters the chunk, and of the one that leaves it
    dw_ptr,  # (V, E)
    dy_row_stride, n_cols, n_rows, vocab_size, padding_idx,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write segments within the chunk to dw, and partial sums of those that cross its borders to pieces."""
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * CHUNK
    last = tl.minimum((chunk + 1) * CHUNK, n_rows)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    pieces_ptr += chunk * 2 * n_cols + cols
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    enters = (first > 0) & (before == tl.load(sorted_ptr + first))
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for position in range(first, last):
        index = tl.load(sorted_ptr + position).to(tl.int64)
        row = tl.load(order_ptr + position)
        total += tl.load(dy_ptr + row * dy_row_stride + cols, mask=col_mask, other=0.0).to(tl.float32)
        following = tl.load(sorted_ptr + position + 1, mask=position + 1 < n_rows, other=-1).to(tl.int64)
        ends = (position + 1 == n_rows) | (following != index)
        kept = (index >= 0) & (index < vocab_size) & (index != padding_idx)
        dw_mask = col_mask & (ends & kept & (enters == 0))
        tl.store(dw_ptr + index * n_cols + cols, total.to(dw_ptr.dtype.element_ty), mask=dw_mask)
        tl.store(pieces_ptr, total, mask=col_mask & (ends & enters))
        total = tl.where(ends, 0.0, total)
        enters = enters & (ends == 0)
    tl.store(pieces_ptr + n_cols, total, mask=col_mask)


@triton.jit(do_not_specialize=["n_rows", "vocab_size", "padding_idx"])
def _crossing_kernel(
    sorted_ptr,  # (N,)
    pieces_ptr,  # (chunks, 2, E)
    dw_ptr,  # (V, E)
    n_cols, n_rows, vocab_size, padding_idx,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the pieces of the segment that begins in this chunk and leaves it, if there is one; the last piece first."""
    chunk = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    end = (chunk + 1) * CHUNK  # the first position after the chunk; the last chunk is not launched
    index = tl.load(sorted_ptr + end - 1).to(tl.int64)
    before = tl.load(sorted_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1).to(tl.int64)
    through = (chunk > 0) & (before == index)  # the segment began in an earlier chunk
    kept = (index >= 0) & (index < vocab_size) & (index != padding_idx)
    leaves = (tl.load(sorted_ptr + end).to(tl.int64) == index) & (through == 0) & kept
    if leaves:
        # The loop carries scalars only: Triton 3.7 fails to compile a while loop that carries a tensor.
        final = chunk
        while leaves:
            final += 1
            end += CHUNK
            leaves = tl.load(sorted_ptr + end - 1, mask=end <= n_rows, other=-1).to(tl.int64) == index
            leaves = leaves & (tl.load(sorted_ptr + end, mask=end < n_rows, other=-1).to(tl.int64) == index)
        total = tl.load(pieces_ptr + final * 2 * n_cols + cols, mask=col_mask, other=0.0)
        for through_chunk in range(chunk, final):
            total += tl.load(pieces_ptr + (through_chunk * 2 + 1) * n_cols + cols, mask=col_mask, other=0.0)
        tl.store(dw_ptr + index * n_cols + cols, total.to(dw_ptr.dtype.element_ty), mask=col_mask)


@cached
def _plan_forward(n_cols: int, chip: Chip) -> tuple[Launcher, int, int]:
    """Return the launcher, the rows per program, and the programs per row."""
    block = min(COPY_TILE, triton.next_power_of_2(n_cols))
    rows = COPY_TILE // block
    return (
        Launcher(_forward_kernel, {"ROWS": rows, "BLOCK": block, **launch_options(COPY_TILE, chip)}),
        rows,
        -(-n_cols // block),
    )


@cached
def _plan_backward(n_cols: int, chip: Chip) -> tuple[Launcher, Launcher, int]:
    """Return both launchers, and the programs per row."""
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(n_cols))
    constants = {"CHUNK": SORTED_CHUNK, "BLOCK": block, **launch_options(block, chip)}
    return Launcher(_chunk_kernel, constants), Launcher(_crossing_kernel, constants), -(-n_cols // block)


def _forward(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    flat = indices.reshape(-1)
    n_cols = weight.shape[1]
    table = weight if weight.stride(1) == 1 else weight.contiguous()
    y = torch.empty((*indices.shape, n_cols), dtype=weight.dtype, device=weight.device)
    launch, rows, blocks = _plan_forward(n_cols, chip_of(weight.device))
    integers = table.stride(0), n_cols
    launch((-(-flat.numel() // rows), blocks, 1), (flat, table, y), integers, flat.numel(), weight.shape[0])
    return y


def _backward(
    dy: torch.Tensor,  # (..., E)
    indices: torch.Tensor,  # (...)
    vocab_size: int,
    dtype: torch.dtype,
    padding_idx: int,
) -> torch.Tensor:  # (V, E)
    n_cols = dy.shape[-1]
    rows = dy.reshape(-1, n_cols).contiguous()
    n_rows = rows.shape[0]
    ordered, order = torch.sort(indices.reshape(-1), stable=True)
    dw = torch.zeros((vocab_size, n_cols), dtype=dtype, device=dy.device)
    chunks = -(-n_rows // SORTED_CHUNK)
    pieces = torch.empty((chunks, 2, n_cols), dtype=torch.float32, device=dy.device)
    sum_chunks, add_pieces, blocks = _plan_backward(n_cols, chip_of(dy.device))
    others = n_rows, vocab_size, padding_idx
    sum_chunks((chunks, blocks, 1), (rows, ordered, order, pieces, dw), (n_cols, n_cols), *others)
    if chunks > 1:
        add_pieces((chunks - 1, blocks, 1), (ordered, pieces, dw), (n_cols,), *others)
    return dw


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indices, weight, padding_idx):
        ctx.save_for_backward(indices)
        ctx.vocab_size = weight.shape[0]
        ctx.dtype = weight.dtype
        ctx.padding_idx = padding_idx
        return _forward(indices, weight)

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        (indices,) = ctx.saved_tensors
        return None, _backward(dy, indices, ctx.vocab_size, ctx.dtype, ctx.padding_idx), None


def embedding(
    indices: torch.Tensor,  # (...) int32 or int64
    weight: torch.Tensor,  # (V, E)
    padding_idx: int | None = None,
) -> torch.Tensor:  # (..., E)
    """Compute torch.nn.functional.embedding with a deterministic gradient; the row padding_idx gets none.

    Raises ValueError on a wrong dtype or shape, and on a padding_idx outside the table.
    """
    if weight.dim() != 2 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"embedding: weight is {tuple(weight.shape)}, indices {indices.dtype}; expected (V, E), and int32 or int64"
        )
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise ValueError(f"embedding: padding_idx is {padding_idx}, but weight has {weight.shape[0]} rows")
    if indices.numel() == 0 or weight.numel() == 0 or not runs_triton(weight):
        return embedding_reference(indices, weight, padding_idx)
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Embedding.apply(indices, weight, -1 if padding_idx is None else padding_idx % weight.shape[0])
    return _forward(indices, weight)


class Embedding(nn.Embedding):
    """`embedding` as a module, initialised as torch.nn.Embedding: normal, with zeros at padding_idx."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # torch's other options (max_norm, sparse, ...) are not offered, because the kernels ignore them.
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return embedding(input_ids, self.weight, self.padding_idx)
