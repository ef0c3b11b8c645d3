"""Scans of gated_delta_rule on Hopper, in Gluon: states_kernel and state_gradients_kernel for heads of 128 columns.

One warp copies tiles into shared memory, chunks ahead of a warpgroup that has the state, transposed, in registers. Its
products take their first factor from registers, so that only what leaves the kernel passes through shared memory.
On an H200, 32,768 tokens of 32 value heads take 0.49 and 0.55 ms (2026-11-29). The Triton kernels take 0.61 and 1.43:
they wait for loads that are not started ahead, and compute addresses and masks.

Names, shapes and mathematics: delta_kernels.py. A program has COLS of the value's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import (
    Launcher,
    TensorDescriptor,
    cached,
    copy_from_shared,
    copy_to_shared,
    gl,
    gluon,
    hopper,
)
from ligertune_kernels.ops.recurrence.tiles import WARPGROUPS

WIDTH = gl.constexpr(128)  # of keys and values
CHUNK = gl.constexpr(64)
COLS = gl.constexpr(64)
STATE_STAGES = gl.constexpr(4)
GRADIENT_STAGES = gl.constexpr(3)
FACTORS = gl.constexpr(4)  # numbers of a token: r / |k|, -m / |k|, -β m / |k|, β
FEWEST_TOKENS = 2048  # for fewer, the host may take longer to make descriptors than the GPU to compute: not measured


@gluon.jit
def _stage_barriers(STAGES: gl.constexpr):
    """Return one barrier per stage, which one arrival completes."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def _program(starts_ptr, ends_ptr, n_tokens, part_tokens, HEADS: gl.constexpr, HAS_DOCUMENTS: gl.constexpr):
    """Return the program's first column, value head and batch, and the first token and the end of its documents."""
    n_parts = gl.cdiv(n_tokens, part_tokens)
    col = gl.program_id(0) % (WIDTH // COLS) * COLS
    value_head = gl.program_id(0) // (WIDTH // COLS) % HEADS
    rest = gl.program_id(0) // (WIDTH // COLS) // HEADS
    own_first = 0
    own_end = n_tokens
    if HAS_DOCUMENTS:
        begin = (rest % n_parts).to(gl.int64) * part_tokens
        last = gl.minimum(begin + part_tokens, n_tokens) - 1
        begins_here = gl.load(starts_ptr + begin) == begin
        own_first = gl.where(begins_here, begin.to(gl.int32), gl.load(ends_ptr + begin))
        last_end = gl.load(ends_ptr + last)
        own_end = gl.where(own_first <= last, last_end, own_first)
    return col, value_head, rest // n_parts, own_first, own_end


@gluon.jit
def _identity(LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Return the first factor of a product that reads a tile of shared memory in the layout of products."""
    rows = gl.arange(0, COLS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    ones = gl.where(rows[:, None] == cols[None, :], 1.0, 0.0).to(DTYPE)
    return gl.convert_layout(ones, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _store_columns(ptr, tile, row_stride, token_stride, first, own_first, own_end, n_tokens, LAYOUT: gl.constexpr):
    """Store the tokens of a tile (COLS, CHUNK) that the program owns; those after the row's last one, too."""
    rows = gl.arange(0, COLS, gl.SliceLayout(1, LAYOUT))
    places = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
    tokens = first + places
    owned = (tokens >= own_first) & ((tokens < own_end) | (own_end == n_tokens))
    gl.store(ptr + rows[:, None] * row_stride + places[None, :] * token_stride, tile, mask=owned[None, :])


@gluon.jit
def _load_forward(descriptors, tiles, barriers, batch, value_head, col, first_chunk, end_chunk, n_tokens, n_chunks,
                  HEADS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Copy chunk after chunk, each as soon as its stage is free."""
    k_desc, v_desc, t_desc, factors_desc = descriptors
    k_tiles, v_tiles, t_tiles, factor_tiles = tiles
    full, empty = barriers
    BYTES: gl.constexpr = (CHUNK * WIDTH + CHUNK * COLS + CHUNK * CHUNK) * 2 + FACTORS * CHUNK * 4
    for i in range(end_chunk - first_chunk):
        chunk = first_chunk + i
        stage = i % STATE_STAGES
        token = batch * n_tokens + chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * HEADS + value_head
        arrived = full.index(stage)
        hopper.mbarrier.wait(empty.index(stage), (i // STATE_STAGES) & 1 ^ 1)
        hopper.mbarrier.expect(arrived, BYTES)
        copy_to_shared(k_desc, [token, value_head // GROUP * WIDTH], arrived, k_tiles.index(stage))
        copy_to_shared(v_desc, [token, value_head * WIDTH + col], arrived, v_tiles.index(stage))
        copy_to_shared(t_desc, [at_chunk * CHUNK, 0], arrived, t_tiles.index(stage))
        for j in gl.static_range(FACTORS):
            copy_to_shared(
                factors_desc, [(at_chunk * FACTORS + j) * CHUNK], arrived, factor_tiles.index(stage * FACTORS + j)
            )


@gluon.jit
def _carry(outputs, tiles, staged, barriers, batch, value_head, col, first_chunk, end_chunk, own_first, own_end,
           n_tokens, n_chunks, HEADS: gl.constexpr):  # fmt: skip
    """Carry the state from chunk to chunk."""
    corrected_ptr, kept_ptr, corrected_desc, states_desc = outputs
    k_tiles, v_tiles, t_tiles, factor_tiles = tiles
    state_tile, corrected_tile = staged
    full, empty = barriers
    dtype: gl.constexpr = states_desc.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    one = _identity(TILE, dtype)
    none = gl.zeros([COLS, CHUNK], gl.float32, TILE)
    state = gl.zeros([COLS, WIDTH], gl.float32, STATE)
    # a program without documents begins behind the last chunk
    begin = batch.to(gl.int64) * n_chunks + gl.minimum(first_chunk, n_chunks - 1)
    kept_ahead = gl.load(kept_ptr + begin * HEADS + value_head)
    for i in range(end_chunk - first_chunk):
        chunk = first_chunk + i
        first = chunk * CHUNK
        stage = i % STATE_STAGES
        at_chunk = (batch.to(gl.int64) * n_chunks + chunk) * HEADS + value_head
        row = (at_chunk * WIDTH).to(gl.int32) + col
        kept = kept_ahead
        kept_ahead = gl.load(kept_ptr + at_chunk + gl.where(chunk + 1 < n_chunks, HEADS, 0))
        rounded = state.to(dtype)
        k = k_tiles.index(stage)
        hopper.mbarrier.wait(full.index(stage), (i // STATE_STAGES) & 1)
        values = hopper.warpgroup_mma(one, v_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        left = gl.convert_layout(rounded, LEFT)
        errors = hopper.warpgroup_mma(left, k.permute((1, 0)), none, use_acc=False, is_async=True)
        if first >= own_first:  # else a document of another program flows into the chunk
            hopper.tma.store_wait(1)  # that of the state before: its tile is free
            state_tile.store(rounded)
            hopper.fence_async_shared()
            copy_from_shared(states_desc, [row, 0], state_tile)
        to_state = factor_tiles.index(stage * FACTORS).load(ROW)
        from_state = factor_tiles.index(stage * FACTORS + 1).load(ROW)
        beta = factor_tiles.index(stage * FACTORS + 3).load(ROW)
        state = state * kept
        values, errors, left = hopper.warpgroup_mma_wait(0, deps=[values, errors, left])
        errors = (errors * from_state[None, :] + values) * beta[None, :]
        left = gl.convert_layout(errors.to(dtype), LEFT)
        corrected = hopper.warpgroup_mma(left, t_tiles.index(stage).permute((1, 0)), none, use_acc=False)
        added = gl.convert_layout((corrected * to_state[None, :]).to(dtype), LEFT_OF_STATE)
        state = hopper.warpgroup_mma(added, k, state, is_async=True)
        if (first >= own_first) & ((first + CHUNK <= own_end) | (own_end == n_tokens)):
            hopper.tma.store_wait(1)
            corrected_tile.permute((1, 0)).store(corrected.to(dtype))
            hopper.fence_async_shared()
            copy_from_shared(corrected_desc, [(at_chunk * CHUNK).to(gl.int32), col], corrected_tile)
        else:
            hopper.tma.store_wait(0)
            ptr = corrected_ptr + at_chunk * CHUNK * WIDTH + col
            _store_columns(ptr, corrected.to(dtype), 1, WIDTH, first, own_first, own_end, n_tokens, TILE)
        state, added = hopper.warpgroup_mma_wait(0, deps=[state, added])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def hopper_states_kernel(
    corrected_ptr, kept_ptr, starts_ptr, ends_ptr, k_desc, v_desc, t_desc, factors_desc, corrected_desc, states_desc,
    n_tokens, n_chunks, part_tokens, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Write the state before each chunk, and v̂."""
    col, value_head, batch, own_first, own_end = _program(
        starts_ptr, ends_ptr, n_tokens, part_tokens, HEADS, HAS_DOCUMENTS
    )
    first_chunk = gl.minimum(gl.maximum(own_first // CHUNK, 0), n_chunks)
    end_chunk = gl.minimum(gl.maximum(gl.cdiv(own_end, CHUNK), first_chunk), n_chunks)
    dtype: gl.constexpr = states_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STATE_STAGES, CHUNK, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STATE_STAGES, CHUNK, COLS], v_desc.layout)
    t_tiles = gl.allocate_shared_memory(dtype, [STATE_STAGES, CHUNK, CHUNK], t_desc.layout)
    factor_tiles = gl.allocate_shared_memory(gl.float32, [STATE_STAGES * FACTORS, CHUNK], factors_desc.layout)
    state_tile = gl.allocate_shared_memory(dtype, [COLS, WIDTH], states_desc.layout)
    corrected_tile = gl.allocate_shared_memory(dtype, [CHUNK, COLS], corrected_desc.layout)
    tiles = (k_tiles, v_tiles, t_tiles, factor_tiles)
    barriers = (_stage_barriers(STATE_STAGES), _stage_barriers(STATE_STAGES))
    gl.warp_specialize(
        [
            (_carry, ((corrected_ptr, kept_ptr, corrected_desc, states_desc), tiles, (state_tile, corrected_tile),
                      barriers, batch, value_head, col, first_chunk, end_chunk, own_first, own_end, n_tokens, n_chunks,
                      HEADS)),
            (_load_forward, ((k_desc, v_desc, t_desc, factors_desc), tiles, barriers, batch, value_head, col,
                             first_chunk, end_chunk, n_tokens, n_chunks, HEADS, GROUP)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _load_backward(descriptors, tiles, barriers, batch, value_head, col, first_chunk, end_chunk, n_tokens, n_chunks,
                   HEADS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Copy chunk after chunk from the last one on, each as soon as its stage is free."""
    q_desc, k_desc, t_desc, y_desc, d_read_desc, factors_desc = descriptors
    q_tiles, k_tiles, t_tiles, local_tiles, d_read_tiles, factor_tiles = tiles
    full, empty = barriers
    BYTES: gl.constexpr = (2 * CHUNK * WIDTH + 2 * CHUNK * COLS + CHUNK * CHUNK) * 2 + 2 * CHUNK * 4
    for i in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - i
        stage = i % GRADIENT_STAGES
        token = batch * n_tokens + chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * HEADS + value_head
        key_col = value_head // GROUP * WIDTH
        arrived = full.index(stage)
        hopper.mbarrier.wait(empty.index(stage), (i // GRADIENT_STAGES) & 1 ^ 1)
        hopper.mbarrier.expect(arrived, BYTES)
        copy_to_shared(k_desc, [token, key_col], arrived, k_tiles.index(stage))
        copy_to_shared(y_desc, [at_chunk * WIDTH + col, 0], arrived, local_tiles.index(stage))
        copy_to_shared(q_desc, [token, key_col], arrived, q_tiles.index(stage))
        copy_to_shared(d_read_desc, [token, value_head * WIDTH + col], arrived, d_read_tiles.index(stage))
        copy_to_shared(t_desc, [at_chunk * CHUNK, 0], arrived, t_tiles.index(stage))
        for j in gl.static_range(2):
            place = (at_chunk * FACTORS + 2 * j) * CHUNK
            copy_to_shared(factors_desc, [place], arrived, factor_tiles.index(stage * 2 + j))


@gluon.jit
def _carry_back(outputs, tiles, staged, barriers, batch, value_head, col, first_chunk, end_chunk, own_first, own_end,
                n_tokens, n_chunks, HEADS: gl.constexpr):  # fmt: skip
    """Carry the gradient of the state from chunk to chunk, the last one first."""
    y_ptr, kept_ptr, y_desc, d_states_desc = outputs
    q_tiles, k_tiles, t_tiles, local_tiles, d_read_tiles, factor_tiles = tiles
    d_state_tile, y_tile = staged
    full, empty = barriers
    dtype: gl.constexpr = d_states_desc.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, TILE)
    one = _identity(TILE, dtype)
    none = gl.zeros([COLS, CHUNK], gl.float32, TILE)
    d_state = gl.zeros([COLS, WIDTH], gl.float32, STATE)
    begin = batch.to(gl.int64) * n_chunks + gl.maximum(end_chunk - 1, 0)
    kept_ahead = gl.load(kept_ptr + begin * HEADS + value_head)
    for i in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - i
        first = chunk * CHUNK
        stage = i % GRADIENT_STAGES
        at_chunk = (batch.to(gl.int64) * n_chunks + chunk) * HEADS + value_head
        row = (at_chunk * WIDTH).to(gl.int32) + col
        kept = kept_ahead
        kept_ahead = gl.load(kept_ptr + at_chunk - gl.where(chunk > 0, HEADS, 0))
        rounded = d_state.to(dtype)
        k = k_tiles.index(stage)
        hopper.mbarrier.wait(full.index(stage), (i // GRADIENT_STAGES) & 1)
        local = hopper.warpgroup_mma(one, local_tiles.index(stage), none, use_acc=False, is_async=True)
        left = gl.convert_layout(rounded, LEFT)
        d_corrected = hopper.warpgroup_mma(left, k.permute((1, 0)), none, use_acc=False, is_async=True)
        d_state = hopper.warpgroup_mma(
            d_read_tiles.index(stage).permute((1, 0)), q_tiles.index(stage), d_state * kept, is_async=True
        )
        if (first + CHUNK <= own_end) | (own_end == n_tokens):  # else the last token belongs to another program
            hopper.tma.store_wait(1)  # that of the gradient before: its tile is free
            d_state_tile.store(rounded)
            hopper.fence_async_shared()
            copy_from_shared(d_states_desc, [row, 0], d_state_tile)
        to_state = factor_tiles.index(stage * 2).load(ROW)
        from_state = factor_tiles.index(stage * 2 + 1).load(ROW)
        local, d_corrected, left = hopper.warpgroup_mma_wait(1, deps=[local, d_corrected, left])
        left = gl.convert_layout((d_corrected * to_state[None, :] + local).to(dtype), LEFT)
        y = hopper.warpgroup_mma(left, t_tiles.index(stage), none, use_acc=False, is_async=True)
        y, d_state, left = hopper.warpgroup_mma_wait(0, deps=[y, d_state, left])
        added = gl.convert_layout((y * from_state[None, :]).to(dtype), LEFT_OF_STATE)
        d_state = hopper.warpgroup_mma(added, k, d_state, is_async=True)
        if (first >= own_first) & ((first + CHUNK <= own_end) | (own_end == n_tokens)):
            hopper.tma.store_wait(1)
            y_tile.store(y.to(dtype))
            hopper.fence_async_shared()
            copy_from_shared(y_desc, [row, 0], y_tile)
        else:
            hopper.tma.store_wait(0)
            ptr = y_ptr + (at_chunk * WIDTH + col) * CHUNK
            _store_columns(ptr, y.to(dtype), CHUNK, 1, first, own_first, own_end, n_tokens, TILE)
        d_state, added = hopper.warpgroup_mma_wait(0, deps=[d_state, added])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def hopper_state_gradients_kernel(
    y_ptr, kept_ptr, starts_ptr, ends_ptr, q_desc, k_desc, t_desc, d_read_desc, factors_desc, y_desc, d_states_desc,
    n_tokens, n_chunks, part_tokens, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Write the gradient of the state after each chunk, and y."""
    col, value_head, batch, own_first, own_end = _program(
        starts_ptr, ends_ptr, n_tokens, part_tokens, HEADS, HAS_DOCUMENTS
    )
    first_chunk = gl.minimum(gl.maximum(own_first // CHUNK, 0), n_chunks)
    end_chunk = gl.minimum(gl.maximum(gl.cdiv(own_end, CHUNK), first_chunk), n_chunks)
    dtype: gl.constexpr = d_states_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GRADIENT_STAGES, CHUNK, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [GRADIENT_STAGES, CHUNK, WIDTH], k_desc.layout)
    t_tiles = gl.allocate_shared_memory(dtype, [GRADIENT_STAGES, CHUNK, CHUNK], t_desc.layout)
    local_tiles = gl.allocate_shared_memory(dtype, [GRADIENT_STAGES, COLS, CHUNK], y_desc.layout)
    d_read_tiles = gl.allocate_shared_memory(dtype, [GRADIENT_STAGES, CHUNK, COLS], d_read_desc.layout)
    factor_tiles = gl.allocate_shared_memory(gl.float32, [GRADIENT_STAGES * 2, CHUNK], factors_desc.layout)
    d_state_tile = gl.allocate_shared_memory(dtype, [COLS, WIDTH], d_states_desc.layout)
    y_tile = gl.allocate_shared_memory(dtype, [COLS, CHUNK], y_desc.layout)
    tiles = (q_tiles, k_tiles, t_tiles, local_tiles, d_read_tiles, factor_tiles)
    barriers = (_stage_barriers(GRADIENT_STAGES), _stage_barriers(GRADIENT_STAGES))
    gl.warp_specialize(
        [
            (_carry_back, ((y_ptr, kept_ptr, y_desc, d_states_desc), tiles, (d_state_tile, y_tile), barriers, batch,
                           value_head, col, first_chunk, end_chunk, own_first, own_end, n_tokens, n_chunks, HEADS)),
            (_load_backward, ((q_desc, k_desc, t_desc, y_desc, d_read_desc, factors_desc), tiles, barriers, batch,
                              value_head, col, first_chunk, end_chunk, n_tokens, n_chunks, HEADS, GROUP)),
        ],
        [1],
        [24],
    )  # fmt: skip


def runs_hopper_scans(chip: Chip, *tensors: torch.Tensor) -> bool:
    """Return whether these kernels scan q, k, v (B, T, heads, columns)."""
    batch, n_tokens = tensors[0].shape[:2]
    return (
        TensorDescriptor is not None
        and not torch.compiler.is_compiling()  # which takes no descriptors
        and WARPGROUPS.holds(chip)
        and batch * n_tokens >= FEWEST_TOKENS
        and (batch == 1 or n_tokens % CHUNK.value == 0)
        and all(_can_be_copied(t) for t in tensors)
    )


def _can_be_copied(t: torch.Tensor) -> bool:
    """Return whether tiles of a tensor can be described: heads next to each other, rows at multiples of 16 bytes."""
    batch, n_tokens, _, width = t.shape
    in_order = batch == 1 or t.stride(0) == n_tokens * t.stride(1)
    aligned = t.data_ptr() % 16 == 0 and t.stride(1) * t.itemsize % 16 == 0
    return t.itemsize == 2 and width == WIDTH.value and t.stride()[2:] == (width, 1) and in_order and aligned


def _tokens(t: torch.Tensor, cols: int) -> TensorDescriptor:
    """Describe tiles of a chunk's tokens and some columns of (B, T, heads, columns)."""
    batch, n_tokens, heads, width = t.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(t, [batch * n_tokens, heads * width], [t.stride(1), 1], [CHUNK.value, cols], layout)


def _tiles(t: torch.Tensor, rows: int, cols: int | None = None) -> TensorDescriptor:
    """Describe tiles of some rows, and some or all columns, of a contiguous tensor."""
    width = t.shape[-1]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(t, [t.numel() // width, width], [width, 1], [rows, cols or width], layout)


def _numbers(t: torch.Tensor) -> TensorDescriptor:
    """Describe one number for each token of a chunk."""
    return TensorDescriptor(t, [t.numel()], [1], [CHUNK.value], gl.NVMMASharedLayout(0, 32, 1))


@cached
def _launcher(kernel: Callable, heads: int, group: int, has_documents: bool) -> Launcher:
    return Launcher(kernel, {"HEADS": heads, "GROUP": group, "HAS_DOCUMENTS": has_documents, "num_warps": 4})


class ScannedChunks(NamedTuple):
    """What the scans read of each chunk."""

    t: torch.Tensor  # (B, N, X, C, C)
    factors: torch.Tensor  # (B, N, X, 4, C) fp32
    kept: torch.Tensor  # (B, N, X) fp32
    starts: torch.Tensor  # (T,) int32: the first token of each token's document
    ends: torch.Tensor  # (T,) int32
    part: int  # tokens of a part of a row
    has_documents: bool  # else starts and ends are not read


def scan_states(
    k: torch.Tensor,  # (B, T, H, K)
    v: torch.Tensor,  # (B, T, X, V)
    chunks: ScannedChunks,
    states: torch.Tensor,  # (B, N, X, V, K)
    corrected: torch.Tensor,  # (B, N, X, C, V)
) -> None:
    """Write the state before each chunk, and v̂."""
    batch, n_tokens, heads, _ = k.shape
    n_chunks, value_heads = states.shape[1:3]
    programs = WIDTH.value // COLS.value * value_heads * batch * -(-n_tokens // chunks.part)
    _launcher(hopper_states_kernel, value_heads, value_heads // heads, chunks.has_documents)(
        (programs, 1, 1), (corrected, chunks.kept, chunks.starts, chunks.ends), (),
        _tokens(k, WIDTH.value), _tokens(v, COLS.value), _tiles(chunks.t, CHUNK.value), _numbers(chunks.factors),
        _tiles(corrected, CHUNK.value, COLS.value), _tiles(states, COLS.value), n_tokens, n_chunks, chunks.part,
    )  # fmt: skip


def scan_gradients(
    q: torch.Tensor,  # (B, T, H, K)
    k: torch.Tensor,  # (B, T, H, K)
    d_read: torch.Tensor,  # (B, T, X, V)
    chunks: ScannedChunks,
    y: torch.Tensor,  # (B, N, X, V, C): in, the local part of dv̂
    d_states: torch.Tensor,  # (B, N, X, V, K)
) -> None:
    """Write the gradient of the state after each chunk, and y."""
    batch, n_tokens, heads, _ = k.shape
    n_chunks, value_heads = d_states.shape[1:3]
    programs = WIDTH.value // COLS.value * value_heads * batch * -(-n_tokens // chunks.part)
    _launcher(hopper_state_gradients_kernel, value_heads, value_heads // heads, chunks.has_documents)(
        (programs, 1, 1), (y, chunks.kept, chunks.starts, chunks.ends), (),
        _tokens(q, WIDTH.value), _tokens(k, WIDTH.value), _tiles(chunks.t, CHUNK.value), _tokens(d_read, COLS.value),
        _numbers(chunks.factors), _tiles(y, COLS.value), _tiles(d_states, COLS.value), n_tokens, n_chunks, chunks.part,
    )  # fmt: skip
