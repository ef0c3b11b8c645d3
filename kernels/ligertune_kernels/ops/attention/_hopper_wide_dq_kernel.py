"""Triton kernel of dq of document_attention on Hopper, for heads of 256 columns, in Gluon.

A program has a tile of queries, as in the forward, and two warpgroups with half of them each. The products of one block
of keys start while dS K of the block before still runs, and weights are computed while dP's product runs. dS stays in
registers.

Queries and dO take 128 KB of shared memory, so two blocks of 64 keys fit and one of values. Keys need two, because they
are read until dS K has run, while the next block's scores are computed.
"""

from __future__ import annotations

from ligertune_kernels.launcher import copy_from_shared, copy_to_shared, gl, gluon, hopper
from ligertune_kernels.ops.attention._hopper_forward_kernel import (
    capped_scores,
    key_blocks,
    stage_barriers,
    visible_scores,
)

ROWS = gl.constexpr(128)  # queries of a tile
HALF = gl.constexpr(64)
COLS = gl.constexpr(64)  # keys of a block
WIDTH = gl.constexpr(256)
STAGES = gl.constexpr(2)  # of keys


@gluon.jit
def _load(descriptors, tiles, barriers, first, head, key_head, n_blocks):
    """Copy queries and dO, and block after block of keys and values, in the order in which they are read."""
    q_desc, k_desc, v_desc, d_out_desc = descriptors
    q_tiles, k_tiles, v_tile, d_out_tiles = tiles
    q_full, d_out_full, k_full, k_empty, v_full, v_empty = barriers
    TILE_BYTES: gl.constexpr = ROWS * WIDTH * 2
    hopper.mbarrier.expect(q_full, TILE_BYTES)
    for part in gl.static_range(2):
        place = [first + part * HALF, head * WIDTH]
        copy_to_shared(q_desc, place, q_full, q_tiles.index(part))
    for i in range(n_blocks):
        place = [first + ROWS - (i + 1) * COLS, key_head * WIDTH]
        stage = i % STAGES
        hopper.mbarrier.wait(k_empty.index(stage), (i // STAGES) & 1 ^ 1)
        hopper.mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        copy_to_shared(k_desc, place, k_full.index(stage), k_tiles.index(stage))
        if i == 0:
            hopper.mbarrier.expect(d_out_full, TILE_BYTES)
            for part in gl.static_range(2):
                half = [first + part * HALF, head * WIDTH]
                copy_to_shared(d_out_desc, half, d_out_full, d_out_tiles.index(part))
        hopper.mbarrier.wait(v_empty, i & 1 ^ 1)
        hopper.mbarrier.expect(v_full, v_desc.block_type.nbytes)
        copy_to_shared(v_desc, place, v_full, v_tile)


@gluon.jit
def _weights(
    scores, lse, rows, starts, start, scale, cap,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the softmax's weights (queries, keys), times the cap's derivative."""
    scores, bits, slope = capped_scores(scores, scale, cap, HAS_CAP)
    if MASKED:
        scores = visible_scores(scores, rows, starts, start, WINDOW, COLS, LAYOUT)
    return gl.exp2(scores * bits - lse[:, None]) * slope


@gluon.jit
def _differentiate(
    dq_desc, lse_ptr, delta_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks, n_free, scale, cap,
    part: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Compute dq of half of the tile: while dS K of one block runs, the products of the next one wait in line."""
    q_tiles, k_tiles, v_tile, d_out_tiles = tiles
    q_full, d_out_full, k_full, k_empty, v_full, v_empty = barriers
    N_DIAGONAL: gl.constexpr = ROWS // COLS
    dtype: gl.constexpr = dq_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    rows = first + part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    starts = gl.load(starts_ptr + rows, mask=rows < n_tokens, other=0)
    places = head.to(gl.int64) * (gl.cdiv(n_tokens, 128) * 128) + rows
    lse = gl.load(lse_ptr + places)
    delta = gl.load(delta_ptr + places)
    dq = gl.zeros([HALF, WIDTH], gl.float32, DQ)
    none = gl.zeros([HALF, COLS], gl.float32, SCORES)
    q = q_tiles.index(part)
    d_out = d_out_tiles.index(part)
    v = v_tile.permute((1, 0))
    start = first + ROWS - COLS
    hopper.mbarrier.wait(q_full, 0)
    hopper.mbarrier.wait(k_full.index(0), 0)
    scores = hopper.warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), none, use_acc=False)
    weights = _weights(scores, lse, rows, starts, start, scale, cap, True, WINDOW, HAS_CAP, SCORES)
    hopper.mbarrier.wait(d_out_full, 0)
    hopper.mbarrier.wait(v_full, 0)
    d_weights = hopper.warpgroup_mma(d_out, v, none, use_acc=False)
    hopper.mbarrier.arrive(v_empty, count=1)
    left = gl.convert_layout((weights * (d_weights - delta[:, None])).to(dtype), LEFT)
    # Blocks at the diagonal, blocks that every query sees whole, blocks at the start of a document or window.
    begin = 1
    for kind in gl.static_range(3):
        end = n_blocks
        if kind < 2:
            end = gl.minimum(end, N_DIAGONAL + (n_free if kind == 1 else 0))
        for i in range(begin, end):
            stage = i % STAGES
            before = (i - 1) % STAGES
            start -= COLS
            dq = hopper.warpgroup_mma(left, k_tiles.index(before), dq, is_async=True)
            hopper.mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
            scores = hopper.warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            dq, left = hopper.warpgroup_mma_wait(1, deps=[dq, left])
            hopper.mbarrier.arrive(k_empty.index(before), count=1)
            hopper.mbarrier.wait(v_full, i & 1)
            d_weights = hopper.warpgroup_mma(d_out, v, none, use_acc=False, is_async=True)
            scores = hopper.warpgroup_mma_wait(1, deps=[scores])
            weights = _weights(scores, lse, rows, starts, start, scale, cap, kind != 1, WINDOW, HAS_CAP, SCORES)
            d_weights = hopper.warpgroup_mma_wait(0, deps=[d_weights])
            hopper.mbarrier.arrive(v_empty, count=1)
            left = gl.convert_layout((weights * (d_weights - delta[:, None])).to(dtype), LEFT)
        begin = gl.maximum(begin, end)
    dq = hopper.warpgroup_mma(left, k_tiles.index((n_blocks - 1) % STAGES), dq)
    q.store((dq * scale).to(dtype))
    hopper.fence_async_shared()
    copy_from_shared(dq_desc, [first + part * HALF, head * WIDTH], q)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tokens"])
def hopper_attention_wide_dq_kernel(
    q_desc, k_desc, v_desc, d_out_desc, dq_desc, lse_ptr, delta_ptr, starts_ptr, n_tokens, scale, cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Write dq."""
    # Tiles late in a document read the longest: start with them, so that none is left running alone.
    n_tiles = gl.num_programs(0) // HEADS
    first = (n_tiles - 1 - gl.program_id(0) // HEADS) * ROWS
    head = gl.program_id(0) % HEADS
    n_blocks, n_whole = key_blocks(first, starts_ptr, n_tokens, ROWS, COLS, WINDOW)
    n_free = gl.maximum(n_whole - ROWS // COLS, 0)
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], q_desc.layout)
    d_out_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], d_out_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, COLS, WIDTH], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [COLS, WIDTH], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    d_out_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(q_full, count=1)
    hopper.mbarrier.init(d_out_full, count=1)
    hopper.mbarrier.init(v_full, count=1)
    hopper.mbarrier.init(v_empty, count=2)
    k_full = stage_barriers(1, STAGES)
    k_empty = stage_barriers(2, STAGES)
    descriptors = (q_desc, k_desc, v_desc, d_out_desc)
    tiles = (q_tiles, k_tiles, v_tile, d_out_tiles)
    barriers = (q_full, d_out_full, k_full, k_empty, v_full, v_empty)
    LOWER: gl.constexpr = 0
    UPPER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_differentiate, (dq_desc, lse_ptr, delta_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks,
                              n_free, scale, cap, LOWER, WINDOW, HAS_CAP)),
            (_differentiate, (dq_desc, lse_ptr, delta_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks,
                              n_free, scale, cap, UPPER, WINDOW, HAS_CAP)),
            (_load, (descriptors, tiles, barriers, first, head, head // GROUP, n_blocks)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
