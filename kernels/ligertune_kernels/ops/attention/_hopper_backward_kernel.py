"""Triton kernel of document_attention's backward on Hopper, for heads of 64 and 128 columns, in Gluon.

Two warpgroups have half of the tile's keys each. Per block of queries a warpgroup computes P and dS of its keys,
transposed, in registers, adds to its dv and dk, and stores dS. Then it adds dS K of all keys to half of the columns of
dq: of the block before, whose dS the other warpgroup has stored by then, so that neither waits for the other.

dq is fp32, in the order in which threads hold it, so that a warp adds 256 neighbouring bytes: see `dq_places`.
"""

from __future__ import annotations

from ligertune_kernels.launcher import gl, gluon, hopper
from ligertune_kernels.ops.attention._hopper_backward_loads import (
    KEYS,
    await_turns,
    block_and_head,
    blocks_of_half,
    count_turns,
    load_blocks,
    query_blocks,
)
from ligertune_kernels.ops.attention._hopper_forward_kernel import capped_scores, stage_barriers, tile_and_head


@gluon.jit
def dq_places(part: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where a part (ROWS, COLS) of a block's dq lies: the 32 pairs of a warp after one another."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None, :]
    thread = r // 16 * 32 + r % 8 * 4 + c % 8 // 2
    places = ((c // 8 * 2 + r % 16 // 8) * (ROWS * 2) + thread) * 2 + c % 2
    return gl.max_contiguous(gl.multiple_of(places, (2, 2)), (1, 2)) + part * (ROWS * COLS)


@gluon.jit
def weights_and_slope(
    scores, lse_tile, rows, keys, limits, scale, cap,
    MASKED: gl.constexpr, HAS_CAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the softmax's weights (keys, queries) from the products of keys and queries, and the cap's derivative."""
    scores, bits, slope = capped_scores(scores, scale, cap, HAS_CAP)
    if MASKED:
        scores = gl.where((rows[None, :] >= keys[:, None]) & (rows[None, :] < limits[:, None]), scores, float("-inf"))
    lse = lse_tile.load(gl.SliceLayout(0, LAYOUT))
    return gl.exp2(scores * bits - lse[None, :]), slope


@gluon.jit
def _dq_product(
    d_score_tiles, k_tiles, buffer, part: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the product of dS (queries, all keys) and keys, for ROWS queries and COLS columns."""
    dq = gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
    for j in gl.static_range(2):
        d_scores = d_score_tiles.index(buffer * 2 + j)
        k = k_tiles.index(j)
        if d_scores.shape[1] > ROWS:  # each warpgroup has half of the queries, else half of the columns
            d_scores = d_scores.slice(part * ROWS, ROWS, dim=1)
        else:
            k = k.slice(part * COLS, COLS, dim=1)
        dq = hopper.warpgroup_mma(d_scores.permute((1, 0)), k, dq, use_acc=j > 0, is_async=True)
    return dq


@gluon.jit
def _differentiate(
    ends_ptr, dq_ptr, dk_ptr, dv_ptr, tiles, d_score_tiles, barriers, stored, turn, added, blocks,
    first, key_head, n_tokens, scale, cap, part: gl.constexpr,
    ALL_KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of half of the tile's keys, and a half of each block's dq."""
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles = tiles
    kv_full, full, empty = barriers
    HALF: gl.constexpr = KEYS // 2
    dtype: gl.constexpr = k_tiles.dtype
    DQ_COLS: gl.constexpr = WIDTH if ROWS == 128 else WIDTH // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # (keys, queries)
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    keys = first + part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    limits = gl.load(ends_ptr + keys, mask=keys < n_tokens, other=0)  # the last query that sees a key is before it
    if WINDOW > 0:
        limits = gl.minimum(limits, keys + WINDOW)
    dk = gl.zeros([HALF, WIDTH], gl.float32, DK)
    dv = gl.zeros([HALF, WIDTH], gl.float32, DK)
    none = gl.zeros([HALF, ROWS], gl.float32, SCORES)
    k = k_tiles.index(part)
    v = v_tiles.index(part)
    padded = gl.cdiv(n_tokens, 128) * 128
    places = dq_places(part, 64, DQ_COLS, DQ)
    # There is no block before the first one: its dS is zero, and zeros are added, which change no sum.
    d_score_tiles.index(part).store(none.to(dtype))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(stored.index(0), count=1)
    hopper.mbarrier.wait(kv_full, 0)
    row_before = key_head.to(gl.int64) * GROUP * padded + first
    i = 0
    for half in range(2):
        for masked in gl.static_range(1, -1, -1):
            start, n_blocks = blocks_of_half(half, masked, blocks)
            for step in range(n_blocks * GROUP):
                row, head = block_and_head(step, start, n_blocks, key_head, GROUP, ROWS)
                stage = i % STAGES
                phase = (i // STAGES) & 1
                q = q_tiles.index(stage)
                d_out = d_out_tiles.index(stage)
                hopper.mbarrier.wait(full.index(stage), phase)
                scores = hopper.warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
                d_weights = hopper.warpgroup_mma(v, d_out.permute((1, 0)), none, use_acc=False, is_async=True)
                scores = hopper.warpgroup_mma_wait(1, deps=[scores])
                rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
                weights, slope = weights_and_slope(
                    scores, lse_tiles.index(stage), rows, keys, limits, scale, cap, masked, HAS_CAP, SCORES
                )  # fmt: skip
                left = gl.convert_layout(weights.to(dtype), LEFT)
                dv = hopper.warpgroup_mma(left, d_out, dv, is_async=True)
                d_weights, dv, left = hopper.warpgroup_mma_wait(0, deps=[d_weights, dv, left])
                delta = delta_tiles.index(stage).load(gl.SliceLayout(0, SCORES))
                d_scores = (weights * (d_weights - delta[None, :]) * slope).to(dtype)
                buffer = (i + 1) % 2
                before = i % 2
                # Both warpgroups have read what the buffer held when both have added it: in the first step zeros.
                hopper.mbarrier.wait(added.index(before), ((i - 1) // 2) & 1, pred=i > 0)
                d_score_tiles.index(buffer * 2 + part).store(d_scores)
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(stored.index(buffer), count=1)
                hopper.mbarrier.wait(stored.index(before), (i // 2) & 1)
                dq = _dq_product(d_score_tiles, k_tiles, before, part, 64, DQ_COLS, DQ)
                left = gl.convert_layout(d_scores, LEFT)
                dk = hopper.warpgroup_mma(left, q, dk, is_async=True)
                dq = hopper.warpgroup_mma_wait(1, deps=[dq])
                hopper.mbarrier.wait(turn.index(buffer), ((i - 1) // 2) & 1, pred=i > 0)
                gl.atomic_add(dq_ptr + row_before * WIDTH + places, dq, sem="relaxed")
                hopper.mbarrier.arrive(added.index(buffer), count=1)
                dk, left = hopper.warpgroup_mma_wait(0, deps=[dk, left])
                hopper.mbarrier.arrive(empty.index(stage), count=1)
                row_before = head.to(gl.int64) * padded + row
                i += 1
    buffer = (i + 1) % 2
    before = i % 2
    hopper.mbarrier.wait(stored.index(before), (i // 2) & 1)
    dq = hopper.warpgroup_mma_wait(0, deps=[_dq_product(d_score_tiles, k_tiles, before, part, 64, DQ_COLS, DQ)])
    hopper.mbarrier.wait(turn.index(buffer), ((i - 1) // 2) & 1)
    gl.atomic_add(dq_ptr + row_before * WIDTH + places, dq, sem="relaxed")
    hopper.mbarrier.arrive(added.index(buffer), count=1)
    _store_gradient(dk_ptr, dk * scale, first + part * HALF, key_head, n_tokens, ALL_KEY_HEADS, WIDTH, DK)
    _store_gradient(dv_ptr, dv, first + part * HALF, key_head, n_tokens, ALL_KEY_HEADS, WIDTH, DK)


@gluon.jit
def _store_gradient(
    ptr, tile, first, key_head, n_tokens, ALL_KEY_HEADS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):
    """Store a tile of one head's gradient. ptr: the launch's first head in a contiguous (T, ALL_KEY_HEADS, WIDTH)."""
    tokens = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = key_head * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + tokens.to(gl.int64)[:, None] * (ALL_KEY_HEADS * WIDTH) + cols[None, :]
    gl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=(tokens < n_tokens)[:, None])


@gluon.jit(do_not_specialize=["n_tokens"])
def hopper_attention_backward_kernel(
    q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc, starts_ptr, ends_ptr, counters_ptr, dq_ptr,
    dk_ptr, dv_ptr, n_tokens, scale, cap,
    ALL_KEY_HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, TOGETHER: gl.constexpr, GROUP: gl.constexpr,
    WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write dk and dv, and add dq without the scale to zeros (H, padded tokens, WIDTH).

    A launch computes KEY_HEADS of the ALL_KEY_HEADS key heads. The pointers are to the first of them. TOGETHER divides
    KEY_HEADS.
    """
    tile, key_head = tile_and_head(gl.num_programs(0) // KEY_HEADS, TOGETHER)
    first = tile * KEYS
    blocks = query_blocks(first, ends_ptr, n_tokens, KEYS, ROWS, WINDOW)
    HALF: gl.constexpr = KEYS // 2
    KV_BYTES: gl.constexpr = KEYS * WIDTH * 4
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], q_desc.layout)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], d_out_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], v_desc.layout)
    d_score_tiles = gl.allocate_shared_memory(dtype, [4, HALF, ROWS], k_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(kv_full, count=1)
    full = stage_barriers(1, STAGES)
    empty = stage_barriers(2, STAGES)
    stored = stage_barriers(2, 2)
    turn = stage_barriers(1, 2)
    added = stage_barriers(2, 2)
    counted = stage_barriers(1, 2)
    descriptors = (q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc)
    tiles = (q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles)
    barriers = (kv_full, full, empty)
    LOWER: gl.constexpr = 0
    UPPER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_differentiate, (
                ends_ptr, dq_ptr, dk_ptr, dv_ptr, tiles, d_score_tiles, barriers, stored, turn, added, blocks, first,
                key_head, n_tokens, scale, cap, LOWER, ALL_KEY_HEADS, GROUP, ROWS, WIDTH, STAGES, WINDOW, HAS_CAP,
            )),
            (_differentiate, (
                ends_ptr, dq_ptr, dk_ptr, dv_ptr, tiles, d_score_tiles, barriers, stored, turn, added, blocks, first,
                key_head, n_tokens, scale, cap, UPPER, ALL_KEY_HEADS, GROUP, ROWS, WIDTH, STAGES, WINDOW, HAS_CAP,
            )),
            (load_blocks, (
                descriptors, tiles, barriers, blocks, first, key_head, n_tokens, GROUP, ROWS, WIDTH, KV_BYTES, STAGES,
            )),
            (await_turns, (
                counters_ptr, starts_ptr, turn, counted, blocks, first, key_head, n_tokens, GROUP, ROWS, KEYS, WINDOW,
            )),
            (count_turns, (counters_ptr, added, counted, blocks, key_head, n_tokens, GROUP, ROWS)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
