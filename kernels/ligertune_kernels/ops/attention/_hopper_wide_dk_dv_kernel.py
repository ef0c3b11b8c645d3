"""Triton kernel of dk and dv of document_attention on Hopper, for heads of 256 columns, in Gluon.

Registers hold dk and dv of 64 keys: dv in one warpgroup, dk in the other. Per block of queries the first computes the
softmax's weights P, stores them in shared memory and adds P^T dO. The second computes dP, reads the weights and adds
dS^T Q. Each computes two products; the first is one block ahead. Scores are transposed: (keys, queries).

Another kernel computes dq (_hopper_wide_dq_kernel.py). It repeats the products of scores and dP, which takes less time
than adding up parts of dq from every 64 keys.
"""

from __future__ import annotations

from ligertune_kernels.launcher import copy_from_shared, copy_to_shared, gl, gluon, hopper
from ligertune_kernels.ops.attention._hopper_backward_kernel import weights_and_slope
from ligertune_kernels.ops.attention._hopper_backward_loads import block_of_step, n_steps, query_blocks
from ligertune_kernels.ops.attention._hopper_forward_kernel import stage_barriers

KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # queries of a block
WIDTH = gl.constexpr(256)
STAGES = gl.constexpr(2)


@gluon.jit
def _load(descriptors, tiles, barriers, blocks, first, key_head, n_tokens, GROUP: gl.constexpr):
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
    keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    limits = gl.load(ends_ptr + keys, mask=keys < n_tokens, other=0)  # the last query that sees a key is before it
    if WINDOW > 0:
        limits = gl.minimum(limits, keys + WINDOW)
    dv = gl.zeros([KEYS, WIDTH], gl.float32, DV)
    none = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
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
    dk = gl.zeros([KEYS, WIDTH], gl.float32, DK)
    none = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
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
    first = gl.program_id(0) // KEY_HEADS * KEYS
    key_head = gl.program_id(0) % KEY_HEADS
    blocks = query_blocks(first, ends_ptr, n_tokens, KEYS, ROWS, WINDOW)
    dtype: gl.constexpr = q_desc.dtype
    # A warp stores and reads pairs of weights of 8 rows at a time, which lie in different banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], q_desc.layout)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], d_out_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], v_desc.layout)
    weight_tiles = gl.allocate_shared_memory(gl.float32, [2, KEYS, ROWS], WEIGHTS)
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
            (_load, (descriptors, tiles, barriers, blocks, first, key_head, n_tokens, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
