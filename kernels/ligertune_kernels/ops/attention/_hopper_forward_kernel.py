"""Triton kernel of document_attention's forward on Hopper, in Gluon: it places tiles and orders warps itself.

One program computes a tile of queries of one head. One warp copies keys and values into shared memory, blocks ahead of
the warpgroups, which attend with 64 of the tile's queries each. Heads of 128 and 256 columns have two warpgroups. While
the matrix products of one run, it computes the softmax of its next block (FlashAttention-3, Shah et al.,
arXiv:2407.08608). Heads of 64 columns have four, whose products and softmax take turns: the softmax takes as long as
the products there, and four warpgroups keep both units busy, with fewer registers each.

q, k, v and out are descriptors of (T, H D) and (T, K D). lse is (H, T rounded up to 128): the log2-sum-exp2 of rows.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import LOG2E
from ligertune_kernels.launcher import copy_from_shared, copy_to_shared, gl, gluon, hopper

LOWEST = gl.constexpr(-1.0e30)  # first maximum of a row; finite, so that -inf minus it is not NaN


@gluon.jit
def hopper_tanh(x):
    return 1.0 - 2.0 / (gl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e); cannot overflow to NaN


@gluon.jit
def capped_scores(scores, scale, cap, HAS_CAP: gl.constexpr):
    """Return scores under the cap, the factor that makes them powers of two, and the derivative of the cap."""
    bits = scale * LOG2E
    slope = 1.0
    if HAS_CAP:
        scores = hopper_tanh(scores * (scale / cap))
        slope = 1.0 - scores * scores
        bits = cap * LOG2E
    return scores, bits, slope


@gluon.jit
def key_blocks(first, starts_ptr, n_tokens, ROWS: gl.constexpr, COLS: gl.constexpr, WINDOW: gl.constexpr):
    """Return how many blocks of keys a tile of queries reads, and how many lie in every query's document and window.

    Blocks are counted and read from the tile's last token to the left.
    """
    last = gl.minimum(first + ROWS, n_tokens) - 1
    begin = gl.load(starts_ptr + first)
    free = gl.load(starts_ptr + last)
    if WINDOW > 0:
        begin = gl.maximum(begin, first - WINDOW + 1)
        free = gl.maximum(free, last - WINDOW + 1)
    top = first + ROWS
    return gl.cdiv(top - begin, COLS), (top - free) // COLS


@gluon.jit
def tile_and_head(n_tiles, TOGETHER: gl.constexpr):
    """Return the program's tile and head: TOGETHER heads run at a time, because their tensors stay in the L2 cache."""
    program = gl.program_id(0) % (n_tiles * TOGETHER)
    return program // TOGETHER, gl.program_id(0) // (n_tiles * TOGETHER) * TOGETHER + program % TOGETHER


@gluon.jit
def _load(
    work, ROWS: gl.constexpr, COLS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copy the tile of queries, then block after block of keys and values, each as soon as its stage is free."""
    q_desc, k_desc, v_desc, tiles, barriers, first, head, key_head, n_blocks = work
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    PARTS: gl.constexpr = q_tiles.shape[0]
    PART_ROWS: gl.constexpr = q_tiles.shape[1]
    Q_BYTES: gl.constexpr = ROWS * WIDTH * 2
    hopper.mbarrier.expect(q_full, Q_BYTES)
    for i in gl.static_range(PARTS):
        copy_to_shared(q_desc, [first + i * PART_ROWS, head * WIDTH], q_full, q_tiles.index(i))
    for i in range(n_blocks):
        place = [first + ROWS - (i + 1) * COLS, key_head * WIDTH]
        stage = i % STAGES
        phase = (i // STAGES) & 1 ^ 1
        hopper.mbarrier.wait(k_empty.index(stage), phase)
        hopper.mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        copy_to_shared(k_desc, place, k_full.index(stage), k_tiles.index(stage))
        hopper.mbarrier.wait(v_empty.index(stage), phase)
        hopper.mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        copy_to_shared(v_desc, place, v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def visible_scores(
    scores, rows, starts, start, WINDOW: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Set the scores of keys that a query does not see to minus infinity."""
    cols = (start + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)))[None, :]
    visible = (cols <= rows[:, None]) & (cols >= starts[:, None])
    if WINDOW > 0:
        visible = visible & (cols > rows[:, None] - WINDOW)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _softmax(
    scores, row_max, total, rows, starts, start, scale, cap,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, COLS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Return the weights of one block, the factor of earlier sums, new sums and maxima (arXiv:1805.02867)."""
    scores, bits, _ = capped_scores(scores, scale, cap, HAS_CAP)
    if MASKED:
        scores = visible_scores(scores, rows, starts, start, WINDOW, COLS, SCORES)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * bits)
    weights = gl.exp2(scores * bits - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    return weights, rescale, total * rescale + gl.sum(weights, 1), new_max


@gluon.jit
def _attend(
    work, part: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Compute a part of the tile's queries."""
    out_desc, lse_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks, n_whole, scale, cap = work
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    PART_ROWS: gl.constexpr = q_tiles.shape[1]
    PIPELINED: gl.constexpr = q_tiles.shape[0] == 2  # one block's product with values runs with the next one's scores
    DIAGONAL: gl.constexpr = (ROWS - (part + 1) * PART_ROWS) // COLS  # the first block whose keys these queries see
    dtype: gl.constexpr = out_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows = first + part * PART_ROWS + gl.arange(0, PART_ROWS, ROW)
    starts = gl.load(starts_ptr + rows, mask=rows < n_tokens, other=0)
    row_max = gl.full([PART_ROWS], LOWEST, gl.float32, ROW)
    total = gl.zeros([PART_ROWS], gl.float32, ROW)
    out = gl.zeros([PART_ROWS, WIDTH], gl.float32, OUT)
    none = gl.zeros([PART_ROWS, COLS], gl.float32, SCORES)
    q = q_tiles.index(part)
    start = first + ROWS - (DIAGONAL + 1) * COLS
    for i in gl.static_range(DIAGONAL):
        hopper.mbarrier.arrive(k_empty.index(i), count=1)
        hopper.mbarrier.arrive(v_empty.index(i), count=1)
    hopper.mbarrier.wait(q_full, 0)
    hopper.mbarrier.wait(k_full.index(DIAGONAL), 0)
    scores = hopper.warpgroup_mma(q, k_tiles.index(DIAGONAL).permute((1, 0)), none, use_acc=False)
    hopper.mbarrier.arrive(k_empty.index(DIAGONAL), count=1)
    weights, rescale, total, row_max = _softmax(
        scores, row_max, total, rows, starts, start, scale, cap, True, WINDOW, HAS_CAP, COLS, SCORES
    )
    weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
    if not PIPELINED:
        hopper.mbarrier.wait(v_full.index(DIAGONAL), 0)
        out = hopper.warpgroup_mma(weights, v_tiles.index(DIAGONAL), out)
        hopper.mbarrier.arrive(v_empty.index(DIAGONAL), count=1)
    begin = DIAGONAL + 1
    end = gl.minimum(n_blocks, gl.maximum(n_whole, DIAGONAL + 1))
    for masked in gl.static_range(2):  # blocks that every query sees whole, then those at the start of a document
        for i in range(begin, end):
            stage = i % STAGES
            phase = (i // STAGES) & 1
            start -= COLS
            hopper.mbarrier.wait(k_full.index(stage), phase)
            scores = hopper.warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            if PIPELINED:
                before = (i - 1) % STAGES
                hopper.mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
                out = hopper.warpgroup_mma(weights, v_tiles.index(before), out, is_async=True)
                scores = hopper.warpgroup_mma_wait(1, deps=[scores])
            else:
                scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            hopper.mbarrier.arrive(k_empty.index(stage), count=1)
            new_weights, rescale, total, row_max = _softmax(
                scores, row_max, total, rows, starts, start, scale, cap, masked, WINDOW, HAS_CAP, COLS, SCORES
            )
            if PIPELINED:
                out, weights = hopper.warpgroup_mma_wait(0, deps=[out, weights])
                hopper.mbarrier.arrive(v_empty.index(before), count=1)
            out = out * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
            weights = gl.convert_layout(new_weights.to(dtype), WEIGHTS)
            if not PIPELINED:
                hopper.mbarrier.wait(v_full.index(stage), phase)
                out = hopper.warpgroup_mma(weights, v_tiles.index(stage), out)
                hopper.mbarrier.arrive(v_empty.index(stage), count=1)
        begin = end
        end = n_blocks
    if PIPELINED:
        last = n_blocks - 1
        hopper.mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        out = hopper.warpgroup_mma(weights, v_tiles.index(last % STAGES), out)
    padded = gl.cdiv(n_tokens, 128) * 128
    gl.store(lse_ptr + head.to(gl.int64) * padded + rows, row_max + gl.log2(total), mask=rows < padded)
    out = out * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))[:, None]
    q.store(out.to(dtype))
    hopper.fence_async_shared()
    copy_from_shared(out_desc, [first + part * PART_ROWS, head * WIDTH], q)
    hopper.tma.store_wait(0)


@gluon.jit
def stage_barriers(count: gl.constexpr, STAGES: gl.constexpr):
    """Return one barrier per stage, which `count` arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit(do_not_specialize=["n_tokens"])
def hopper_attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, starts_ptr, lse_ptr, n_tokens, scale, cap,
    HEADS: gl.constexpr, TOGETHER: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
    ROWS: gl.constexpr, PARTS: gl.constexpr, COLS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write out = softmax(scores) v and lse. TOGETHER divides HEADS. PARTS, the number of warpgroups, is 2 or 4."""
    # Tiles late in a document read the longest: start with them, so that none is left running alone.
    tile, head = tile_and_head(gl.num_programs(0) // HEADS, TOGETHER)
    first = (gl.num_programs(0) // HEADS - 1 - tile) * ROWS
    n_blocks, n_whole = key_blocks(first, starts_ptr, n_tokens, ROWS, COLS, WINDOW)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [PARTS, ROWS // PARTS, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, COLS, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, COLS, WIDTH], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(q_full, count=1)
    k_full = stage_barriers(1, STAGES)
    v_full = stage_barriers(1, STAGES)
    k_empty = stage_barriers(PARTS, STAGES)
    v_empty = stage_barriers(PARTS, STAGES)
    tiles = (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    FOURTH: gl.constexpr = 3
    work = (out_desc, lse_ptr, starts_ptr, tiles, barriers, first, head, n_tokens, n_blocks, n_whole, scale, cap)
    loads = (q_desc, k_desc, v_desc, tiles, barriers, first, head, head // GROUP, n_blocks)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_attend, (work, FIRST, ROWS, COLS, WIDTH, STAGES, WINDOW, HAS_CAP)),
                (_attend, (work, SECOND, ROWS, COLS, WIDTH, STAGES, WINDOW, HAS_CAP)),
                (_load, (loads, ROWS, COLS, WIDTH, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (work, FIRST, ROWS, COLS, WIDTH, STAGES, WINDOW, HAS_CAP)),
                (_attend, (work, SECOND, ROWS, COLS, WIDTH, STAGES, WINDOW, HAS_CAP)),
                (_attend, (work, THIRD, ROWS, COLS, WIDTH, STAGES, WINDOW, HAS_CAP)),
                (_attend, (work, FOURTH, ROWS, COLS, WIDTH, STAGES, WINDOW, HAS_CAP)),
                (_load, (loads, ROWS, COLS, WIDTH, STAGES)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
