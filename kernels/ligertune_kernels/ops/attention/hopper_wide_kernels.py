"""Triton kernels of the backward of document_attention on Hopper, for heads of 256 columns, in Gluon.

dk and dv. Registers hold dk and dv of 64 keys: dv in one warpgroup, dk in the other. Per block of queries the first
computes the softmax's weights P, stores them in shared memory and adds P^T dO. The second computes dP, reads the
weights and adds dS^T Q. Each computes two products; the first is one block ahead. Scores are transposed: (keys,
queries).

Another kernel computes dq. It repeats the products of scores and dP, which takes less time than adding up parts of dq
from every 64 keys.

dq. A program has a tile of queries, as in the forward, and two warpgroups with half of them each. The products of one
block of keys start while dS K of the block before still runs, and weights are computed while dP's product runs. dS
stays in registers.

Queries and dO take 128 KB of shared memory, so two blocks of 64 keys fit and one of values. Keys need two, because they
are read until dS K has run, while the next block's scores are computed.
"""

from __future__ import annotations

from ligertune_kernels.launcher import copy_from_shared, copy_to_shared, gl, gluon, hopper
from ligertune_kernels.ops.attention.hopper_kernels import (
    block_of_step,
    capped_scores,
    key_blocks,
    n_steps,
    query_blocks,
    stage_barriers,
    visible_scores,
    weights_and_slope,
)

WIDTH = gl.constexpr(256)
STAGES = gl.constexpr(2)  # of queries and dO, or of keys: what fits next to the tile
# dk and dv
WIDE_KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # queries of a block
# dq
WIDE_ROWS = gl.constexpr(128)  # queries of a tile
HALF = gl.constexpr(64)
COLS = gl.constexpr(64)  # keys of a block


@gluon.jit
def _load_for_dk_dv(descriptors, tiles, barriers, blocks, first, key_head, n_tokens, GROUP: gl.constexpr):
    """Copy the tile of keys and values, and block after block of queries, in the order in which they are read."""
    q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc = descriptors
    q_tiles, k_tile, v_tile, d_out_tiles, lse_tiles, delta_tiles = tiles
    k_full, v_full, q_full, q_empty, d_out_full, d_out_empty = barriers
    BLOCK_BYTES: gl.constexpr = ROWS * WIDTH * 2 + ROWS * 4
    padded = gl.cdiv(n_tokens, 128) * 128
    hopper.mbarrier.expect(k_full, k_desc.block_type.nbytes)
    copy_to_shared(k_desc, [first, key_head * WIDTH], k_full, k_tile)
    for i in range(n_steps(blocks, GROUP)):
        row, head = block_of_step(i, blocks, key_head, GROUP, ROWS)
        stage = i % STAGES
        phase = (i // STAGES) & 1 ^ 1
        full = q_full.index(stage)
        hopper.mbarrier.wait(q_empty.index(stage), phase)
        hopper.mbarrier.expect(full, BLOCK_BYTES)
        copy_to_shared(q_desc, [row, head * WIDTH], full, q_tiles.index(stage))
        copy_to_shared(lse_desc, [head * padded + row], full, lse_tiles.index(stage))
        if i == 0:
            hopper.mbarrier.expect(v_full, v_desc.block_type.nbytes)
            copy_to_shared(v_desc, [first, key_head * WIDTH], v_full, v_tile)
        full = d_out_full.index(stage)
        hopper.mbarrier.wait(d_out_empty.index(stage), phase)
        hopper.mbarrier.expect(full, BLOCK_BYTES)
        copy_to_shared(d_out_desc, [row, head * WIDTH], full, d_out_tiles.index(stage))
        copy_to_shared(delta_desc, [head * padded + row], full, delta_tiles.index(stage))


@gluon.jit
def _hand_over(
    scores, lse_tiles, exchange, i, row, keys, limits, scale, cap,
    MASKED: gl.constexpr, HAS_CAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the softmax's weights of step i, and store them, times the cap's derivative."""
    weight_tiles, stored, read = exchange
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    weights, slope = weights_and_slope(
        scores, lse_tiles.index(i % STAGES), rows, keys, limits, scale, cap, MASKED, HAS_CAP, LAYOUT
    )
    hopper.mbarrier.wait(read.index(i % 2), (i // 2) & 1 ^ 1)
    weight_tiles.index(i % 2).store(weights * slope)
    hopper.mbarrier.arrive(stored.index(i % 2), count=1)
    return weights


@gluon.jit
def _dv(
    dv_desc, ends_ptr, tiles, barriers, exchange, blocks, first, key_head, n_tokens, scale, cap,
    GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Compute weights and dv: the product of one block's weights and dO runs with the next block's softmax."""
    q_tiles, k_tile, d_out_tiles, lse_tiles = tiles
    k_full, q_full, d_out_full, d_out_empty = barriers
    dtype: gl.constexpr = k_tile.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    keys = first + gl.arange(0, WIDE_KEYS, gl.SliceLayout(1, SCORES))
    limits = gl.load(ends_ptr + keys, mask=keys < n_tokens, other=0)  # the last query that sees a key is before it
    if WINDOW > 0:
        limits = gl.minimum(limits, keys + WINDOW)
    dv = gl.zeros([WIDE_KEYS, WIDTH], gl.float32, DV)
    none = gl.zeros([WIDE_KEYS, ROWS], gl.float32, SCORES)
    n_behind = blocks[1] * GROUP
    n_unmasked = (blocks[1] + blocks[3]) * GROUP
    n = n_steps(blocks, GROUP)
    row = block_of_step(0, blocks, key_head, GROUP, ROWS)[0]
    hopper.mbarrier.wait(k_full, 0)
    hopper.mbarrier.wait(q_full.index(0), 0)
    scores = hopper.warpgroup_mma(k_tile, q_tiles.index(0).permute((1, 0)), none, use_acc=False)
    weights = _hand_over(scores, lse_tiles, exchange, 0, row, keys, limits, scale, cap, True, HAS_CAP, SCORES)
    left = gl.convert_layout(weights.to(dtype), LEFT)
    # Steps past the end of some keys' documents or windows, steps without a mask, and steps at the diagonal.
    for half in range(2):
        for masked in gl.static_range(1, -1, -1):
            if masked:
                begin = gl.where(half == 0, 1, gl.maximum(n_unmasked, 1))
                end = gl.where(half == 0, n_behind, n)
            else:
                begin = gl.maximum(n_behind, 1)
                end = gl.where(half == 0, n_unmasked, 0)
            for i in range(begin, end):
                stage = i % STAGES
                before = (i - 1) % STAGES
                row = block_of_step(i, blocks, key_head, GROUP, ROWS)[0]
                hopper.mbarrier.wait(q_full.index(stage), (i // STAGES) & 1)
                q = q_tiles.index(stage).permute((1, 0))
                scores = hopper.warpgroup_mma(k_tile, q, none, use_acc=False, is_async=True)
                hopper.mbarrier.wait(d_out_full.index(before), ((i - 1) // STAGES) & 1)
                dv = hopper.warpgroup_mma(left, d_out_tiles.index(before), dv, is_async=True)
                scores = hopper.warpgroup_mma_wait(1, deps=[scores])
                weights = _hand_over(
                    scores, lse_tiles, exchange, i, row, keys, limits, scale, cap,
                    masked, HAS_CAP, SCORES,
                )  # fmt: skip
                dv, left = hopper.warpgroup_mma_wait(0, deps=[dv, left])
                hopper.mbarrier.arrive(d_out_empty.index(before), count=1)
                left = gl.convert_layout(weights.to(dtype), LEFT)
    hopper.mbarrier.wait(d_out_full.index((n - 1) % STAGES), ((n - 1) // STAGES) & 1)
    dv = hopper.warpgroup_mma(left, d_out_tiles.index((n - 1) % STAGES), dv)
    _store(dv_desc, dv, k_tile, first, key_head)  # no other warpgroup reads the keys


@gluon.jit
def _score_gradients(d_weights, delta_tiles, exchange, d_out_empty, i, LAYOUT: gl.constexpr):
    """Return dS of step i."""
    weight_tiles, stored, read = exchange
    delta = delta_tiles.index(i % STAGES).load(gl.SliceLayout(0, LAYOUT))
    hopper.mbarrier.arrive(d_out_empty.index(i % STAGES), count=1)
    hopper.mbarrier.wait(stored.index(i % 2), (i // 2) & 1)
    weights = weight_tiles.index(i % 2).load(LAYOUT)
    hopper.mbarrier.arrive(read.index(i % 2), count=1)
    return weights * (d_weights - delta[None, :])


@gluon.jit
def _dk(dk_desc, tiles, barriers, exchange, blocks, first, key_head, scale, GROUP: gl.constexpr):
    """Compute dk: the product of one block's dS and queries runs with the next block's dP."""
    q_tiles, v_tile, d_out_tiles, delta_tiles = tiles
    v_full, q_empty, d_out_full, d_out_empty = barriers
    dtype: gl.constexpr = v_tile.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    dk = gl.zeros([WIDE_KEYS, WIDTH], gl.float32, DK)
    none = gl.zeros([WIDE_KEYS, ROWS], gl.float32, SCORES)
    n = n_steps(blocks, GROUP)
    hopper.mbarrier.wait(v_full, 0)
    hopper.mbarrier.wait(d_out_full.index(0), 0)
    d_weights = hopper.warpgroup_mma(v_tile, d_out_tiles.index(0).permute((1, 0)), none, use_acc=False)
    d_scores = _score_gradients(d_weights, delta_tiles, exchange, d_out_empty, 0, SCORES)
    left = gl.convert_layout(d_scores.to(dtype), LEFT)
    for i in range(1, n):
        stage = i % STAGES
        before = (i - 1) % STAGES
        dk = hopper.warpgroup_mma(left, q_tiles.index(before), dk, is_async=True)
        hopper.mbarrier.wait(d_out_full.index(stage), (i // STAGES) & 1)
        d_out = d_out_tiles.index(stage).permute((1, 0))
        d_weights = hopper.warpgroup_mma(v_tile, d_out, none, use_acc=False, is_async=True)
        dk, left = hopper.warpgroup_mma_wait(1, deps=[dk, left])
        hopper.mbarrier.arrive(q_empty.index(before), count=1)
        d_weights = hopper.warpgroup_mma_wait(0, deps=[d_weights])
        d_scores = _score_gradients(d_weights, delta_tiles, exchange, d_out_empty, i, SCORES)
        left = gl.convert_layout(d_scores.to(dtype), LEFT)
    dk = hopper.warpgroup_mma(left, q_tiles.index((n - 1) % STAGES), dk)
    _store(dk_desc, dk * scale, v_tile, first, key_head)  # no other warpgroup reads the values


@gluon.jit
def _store(desc, gradient, tile, first, key_head):
    """Store a gradient through a tile of shared memory that is no longer read."""
    tile.store(gradient.to(desc.dtype))
    hopper.fence_async_shared()
    copy_from_shared(desc, [first, key_head * WIDTH], tile)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tokens"])
def hopper_attention_wide_dk_dv_kernel(
    q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc, dk_desc, dv_desc, ends_ptr, n_tokens, scale, cap,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Write dk and dv."""
    first = gl.program_id(0) // KEY_HEADS * WIDE_KEYS
    key_head = gl.program_id(0) % KEY_HEADS
    blocks = query_blocks(first, ends_ptr, n_tokens, WIDE_KEYS, ROWS, WINDOW)
    dtype: gl.constexpr = q_desc.dtype
    # A warp stores and reads pairs of weights of 8 rows at a time, which lie in different banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], q_desc.layout)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], d_out_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [WIDE_KEYS, WIDTH], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [WIDE_KEYS, WIDTH], v_desc.layout)
    weight_tiles = gl.allocate_shared_memory(gl.float32, [2, WIDE_KEYS, ROWS], WEIGHTS)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(k_full, count=1)
    hopper.mbarrier.init(v_full, count=1)
    # When dS and queries have been multiplied, a tile of queries is free: their scores were needed for dS.
    q_full = stage_barriers(1, STAGES)
    q_empty = stage_barriers(1, STAGES)
    d_out_full = stage_barriers(1, STAGES)
    d_out_empty = stage_barriers(2, STAGES)
    stored = stage_barriers(1, 2)
    read = stage_barriers(1, 2)
    descriptors = (q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc)
    tiles = (q_tiles, k_tile, v_tile, d_out_tiles, lse_tiles, delta_tiles)
    barriers = (k_full, v_full, q_full, q_empty, d_out_full, d_out_empty)
    dv_tiles = (q_tiles, k_tile, d_out_tiles, lse_tiles)
    dv_barriers = (k_full, q_full, d_out_full, d_out_empty)
    dk_tiles = (q_tiles, v_tile, d_out_tiles, delta_tiles)
    dk_barriers = (v_full, q_empty, d_out_full, d_out_empty)
    exchange = (weight_tiles, stored, read)
    gl.warp_specialize(
        [
            (_dv, (dv_desc, ends_ptr, dv_tiles, dv_barriers, exchange, blocks, first, key_head, n_tokens, scale, cap,
                   GROUP, WINDOW, HAS_CAP)),
            (_dk, (dk_desc, dk_tiles, dk_barriers, exchange, blocks, first, key_head, scale, GROUP)),
            (_load_for_dk_dv, (descriptors, tiles, barriers, blocks, first, key_head, n_tokens, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _load_for_dq(descriptors, tiles, barriers, first, head, key_head, n_blocks):
    """Copy queries and dO, and block after block of keys and values, in the order in which they are read."""
    q_desc, k_desc, v_desc, d_out_desc = descriptors
    q_tiles, k_tiles, v_tile, d_out_tiles = tiles
    q_full, d_out_full, k_full, k_empty, v_full, v_empty = barriers
    TILE_BYTES: gl.constexpr = WIDE_ROWS * WIDTH * 2
    hopper.mbarrier.expect(q_full, TILE_BYTES)
    for part in gl.static_range(2):
        place = [first + part * HALF, head * WIDTH]
        copy_to_shared(q_desc, place, q_full, q_tiles.index(part))
    for i in range(n_blocks):
        place = [first + WIDE_ROWS - (i + 1) * COLS, key_head * WIDTH]
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
def _dq(
    dq_desc, lse_ptr, delta_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks, n_free, scale, cap,
    part: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Compute dq of half of the tile: while dS K of one block runs, the products of the next one wait in line."""
    q_tiles, k_tiles, v_tile, d_out_tiles = tiles
    q_full, d_out_full, k_full, k_empty, v_full, v_empty = barriers
    N_DIAGONAL: gl.constexpr = WIDE_ROWS // COLS
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
    start = first + WIDE_ROWS - COLS
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
    first = (n_tiles - 1 - gl.program_id(0) // HEADS) * WIDE_ROWS
    head = gl.program_id(0) % HEADS
    n_blocks, n_whole = key_blocks(first, starts_ptr, n_tokens, WIDE_ROWS, COLS, WINDOW)
    n_free = gl.maximum(n_whole - WIDE_ROWS // COLS, 0)
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
            (_dq, (dq_desc, lse_ptr, delta_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks,
                              n_free, scale, cap, LOWER, WINDOW, HAS_CAP)),
            (_dq, (dq_desc, lse_ptr, delta_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks,
                              n_free, scale, cap, UPPER, WINDOW, HAS_CAP)),
            (_load_for_dq, (descriptors, tiles, barriers, first, head, head // GROUP, n_blocks)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
