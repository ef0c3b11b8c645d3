"""Triton kernel of document_attention's backward on Hopper, for heads of 256 columns, in Gluon.

Registers hold dk and dv of 64 keys, half of the columns in each of two warpgroups. Per block of queries a warpgroup
computes P and dS of half of the queries, transposed, and both warpgroups read them from shared memory for their halves
of dv, dk and dq. The rest is as in _hopper_backward_kernel.py; dq is transposed.
"""

from __future__ import annotations

from ligertune_kernels.launcher import gl, gluon, hopper
from ligertune_kernels.ops.attention._hopper_backward_kernel import dq_places, store_gradient, weights_and_slope
from ligertune_kernels.ops.attention._hopper_backward_loads import (
    await_turns,
    block_and_head,
    blocks_of_half,
    count_turns,
    load_blocks,
    query_blocks,
)
from ligertune_kernels.ops.attention._hopper_forward_kernel import stage_barriers

KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # queries of a block
WIDTH = gl.constexpr(256)


@gluon.jit
def _products(weight_tiles, d_score_tiles, buffer, q, d_out, k, dk, dv, part: gl.constexpr, DQ: gl.constexpr):
    """Start dS K for all queries, transposed, then P^T dO and dS^T Q, each for half of the columns.

    Return the halves of dq (columns, 32 queries) of the first and the last queries, dk and dv.
    """
    HALF: gl.constexpr = WIDTH // 2
    k = k.slice(part * HALF, HALF, dim=1).permute((1, 0))
    none = gl.zeros([HALF, 32], gl.float32, DQ)
    dq_0 = hopper.warpgroup_mma(k, d_score_tiles.index(buffer * 2), none, use_acc=False, is_async=True)
    dq_1 = hopper.warpgroup_mma(k, d_score_tiles.index(buffer * 2 + 1), none, use_acc=False, is_async=True)
    for j in gl.static_range(2):
        right = d_out.slice(j * 32, 32, dim=0).slice(part * HALF, HALF, dim=1)
        dv = hopper.warpgroup_mma(weight_tiles.index(buffer * 2 + j), right, dv, is_async=True)
    for j in gl.static_range(2):
        right = q.slice(j * 32, 32, dim=0).slice(part * HALF, HALF, dim=1)
        dk = hopper.warpgroup_mma(d_score_tiles.index(buffer * 2 + j), right, dk, is_async=True)
    return dq_0, dq_1, dk, dv


@gluon.jit
def _differentiate(
    ends_ptr, dq_ptr, dk_ptr, dv_ptr, tiles, weight_tiles, d_score_tiles, barriers, stored, turn, added,
    blocks, first, key_head, n_tokens, scale, cap, part: gl.constexpr,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Compute half of the columns of dk and dv, and of each block's dq."""
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles = tiles
    kv_full, full, empty = barriers
    HALF: gl.constexpr = WIDTH // 2
    dtype: gl.constexpr = k_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])  # (keys, half of the queries)
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])  # (half of the columns, 32 queries)
    keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    limits = gl.load(ends_ptr + keys, mask=keys < n_tokens, other=0)  # the last query that sees a key is before it
    if WINDOW > 0:
        limits = gl.minimum(limits, keys + WINDOW)
    dk, dv = gl.zeros([KEYS, HALF], gl.float32, DK), gl.zeros([KEYS, HALF], gl.float32, DK)
    none = gl.zeros([KEYS, 32], gl.float32, SCORES)
    padded = gl.cdiv(n_tokens, 128) * 128
    places = dq_places(part * 2, HALF, 32, DQ)
    k, v = k_tiles.index(0), v_tiles.index(0)
    hopper.mbarrier.wait(kv_full, 0)
    i = 0
    for half in range(2):
        for masked in gl.static_range(1, -1, -1):
            start, n_blocks = blocks_of_half(half, masked, blocks)
            for step in range(n_blocks * GROUP):
                row, head = block_and_head(step, start, n_blocks, key_head, GROUP, ROWS)
                stage, phase, buffer = i % STAGES, (i // STAGES) & 1, i % 2
                q, d_out = q_tiles.index(stage), d_out_tiles.index(stage)
                right = q.slice(part * 32, 32, dim=0).permute((1, 0))
                hopper.mbarrier.wait(full.index(stage), phase)
                scores = hopper.warpgroup_mma(k, right, none, use_acc=False, is_async=True)
                right = d_out.slice(part * 32, 32, dim=0).permute((1, 0))
                d_weights = hopper.warpgroup_mma(v, right, none, use_acc=False, is_async=True)
                scores = hopper.warpgroup_mma_wait(1, deps=[scores])
                rows = row + part * 32 + gl.arange(0, 32, gl.SliceLayout(0, SCORES))
                lse = lse_tiles.index(stage).slice(part * 32, 32, dim=0)
                weights, slope = weights_and_slope(scores, lse, rows, keys, limits, scale, cap, masked, HAS_CAP, SCORES)
                weight_tiles.index(buffer * 2 + part).store(weights.to(dtype))
                d_weights = hopper.warpgroup_mma_wait(0, deps=[d_weights])
                delta = delta_tiles.index(stage).slice(part * 32, 32, dim=0).load(gl.SliceLayout(0, SCORES))
                d_scores = weights * (d_weights - delta[None, :]) * slope
                d_score_tiles.index(buffer * 2 + part).store(d_scores.to(dtype))
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(stored.index(buffer), count=1)
                hopper.mbarrier.wait(stored.index(buffer), (i // 2) & 1)
                dq_0, dq_1, dk, dv = _products(weight_tiles, d_score_tiles, buffer, q, d_out, k, dk, dv, part, DQ)
                dq_0, dq_1 = hopper.warpgroup_mma_wait(4, deps=[dq_0, dq_1])
                ptrs = dq_ptr + (head.to(gl.int64) * padded + row) * WIDTH + places
                hopper.mbarrier.wait(turn.index(buffer), (i // 2) & 1)
                gl.atomic_add(ptrs, dq_0, sem="relaxed")
                gl.atomic_add(ptrs + HALF * 32, dq_1, sem="relaxed")
                hopper.mbarrier.arrive(added.index(buffer), count=1)
                dk, dv = hopper.warpgroup_mma_wait(0, deps=[dk, dv])
                hopper.mbarrier.arrive(empty.index(stage), count=1)
                i += 1
    store_gradient(dk_ptr, dk * scale, first, key_head, part * HALF, n_tokens, KEY_HEADS, WIDTH, DK)
    store_gradient(dv_ptr, dv, first, key_head, part * HALF, n_tokens, KEY_HEADS, WIDTH, DK)


@gluon.jit(do_not_specialize=["n_tokens"])
def hopper_attention_backward_wide_kernel(
    q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc, starts_ptr, ends_ptr, counters_ptr, dq_ptr,
    dk_ptr, dv_ptr, n_tokens, scale, cap,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, SMALL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write dk and dv; add dq without the scale to zeros (H, padded tokens, 256).

    SMALL: layout of tiles of 32 columns.
    """
    first, key_head = gl.program_id(0) // KEY_HEADS * KEYS, gl.program_id(0) % KEY_HEADS
    blocks = query_blocks(first, ends_ptr, n_tokens, KEYS, ROWS, WINDOW)
    KV_BYTES: gl.constexpr = KEYS * WIDTH * 4
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], q_desc.layout)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], d_out_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [1, KEYS, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1, KEYS, WIDTH], v_desc.layout)
    weight_tiles = gl.allocate_shared_memory(dtype, [4, KEYS, 32], SMALL)
    d_score_tiles = gl.allocate_shared_memory(dtype, [4, KEYS, 32], SMALL)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(kv_full, count=1)
    full, empty = stage_barriers(1, STAGES), stage_barriers(2, STAGES)
    stored, turn = stage_barriers(2, 2), stage_barriers(1, 2)
    added, counted = stage_barriers(2, 2), stage_barriers(1, 2)
    descriptors = (q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc)
    tiles = (q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles)
    barriers = (kv_full, full, empty)
    LEFT: gl.constexpr = 0
    RIGHT: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_differentiate, (
                ends_ptr, dq_ptr, dk_ptr, dv_ptr, tiles, weight_tiles, d_score_tiles, barriers, stored, turn, added,
                blocks, first, key_head, n_tokens, scale, cap, LEFT, KEY_HEADS, GROUP, STAGES, WINDOW, HAS_CAP,
            )),
            (_differentiate, (
                ends_ptr, dq_ptr, dk_ptr, dv_ptr, tiles, weight_tiles, d_score_tiles, barriers, stored, turn, added,
                blocks, first, key_head, n_tokens, scale, cap, RIGHT, KEY_HEADS, GROUP, STAGES, WINDOW, HAS_CAP,
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
