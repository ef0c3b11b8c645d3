"""Triton kernels of document_attention on Hopper, in Gluon, which places tiles and orders warps itself.

Forward. One program computes a tile of queries of one head. One warp copies keys and values into shared memory, blocks
ahead of the warpgroups, which attend with 64 of the tile's queries each. Heads of 128 and 256 columns have two
warpgroups. While the matrix products of one run, it computes the softmax of its next block (FlashAttention-3, Shah et
al., arXiv:2407.08608). Heads of 64 columns have four, whose products and softmax take turns: the softmax takes as long
as the products there, and four warpgroups keep both units busy, with fewer registers each.

q, k, v and out are descriptors of (T, H D) and (T, K D). lse is (H, T rounded up to 128): the log2-sum-exp2 of rows.

Backward of heads of 64 and 128 columns. One program has a tile of KEYS keys of one key head, and reads blocks of
queries of all query heads that share it. It owns dk and dv of its tile, while every tile of keys that a block of
queries sees adds a part of the block's dq.

Tiles add in a fixed order, so the same inputs give the same bits: a tile adds to the dq of a block after all earlier
tiles have. All tiles read blocks from the last to the first, and the GPU starts programs in the order of their tiles.
Each tile therefore runs about one block behind the tile before it, and never waits for a program that starts later.

Two warpgroups have half of the tile's keys each. Per block of queries a warpgroup computes P and dS of its keys,
transposed, in registers, adds to its dv and dk, and stores dS. Then it adds dS K of all keys to half of the columns of
dq: of the block before, whose dS the other warpgroup has stored by then, so that neither waits for the other.

dq is fp32, in the order in which threads hold it, so that a warp adds 256 neighbouring bytes: see `dq_places`.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import LOG2E
from ligertune_kernels.launcher import copy_from_shared, copy_to_shared, gl, gluon, hopper

LOWEST = gl.constexpr(-1.0e30)  # first maximum of a row; finite, so that -inf minus it is not NaN
KEYS = gl.constexpr(128)  # of a tile of the backward


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


@gluon.jit
def query_blocks(first, ends_ptr, n_tokens, TILE: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr):
    """Return first token and number of the blocks of queries that see a tile of keys, of three kinds.

    Of those in which some queries are of other documents or past the window, of those that need no mask, and of those
    at the diagonal.
    """
    last = gl.minimum(first + TILE, n_tokens) - 1
    end = gl.load(ends_ptr + last)
    free_end = gl.load(ends_ptr + first)
    if WINDOW > 0:
        end = gl.minimum(end, last + WINDOW)
        free_end = gl.minimum(free_end, first + WINDOW)
    free = first + TILE  # from here on queries are after every key
    n_free = gl.maximum(free_end - free, 0) // ROWS
    behind = free + n_free * ROWS
    n_behind = gl.maximum(gl.cdiv(end - behind, ROWS), 0)
    n_diagonal = gl.cdiv(gl.minimum(end, free) - first, ROWS)
    return behind, n_behind, free, n_free, first, n_diagonal


@gluon.jit
def blocks_of_half(half, masked: gl.constexpr, blocks):
    """Return first token and number of blocks: masked and free ones of the first half, masked ones of the second."""
    behind, n_behind, free, n_free, first, n_diagonal = blocks
    if masked:
        return gl.where(half == 0, behind, first), gl.where(half == 0, n_behind, n_diagonal)
    else:
        return free, gl.where(half == 0, n_free, 0)


@gluon.jit
def block_and_head(step, start, n_blocks, key_head, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Return the block's first token, and the query head: blocks descend, and each is read for all heads."""
    return start + (n_blocks - 1 - step // GROUP) * ROWS, key_head * GROUP + step % GROUP


@gluon.jit
def n_steps(blocks, GROUP: gl.constexpr):
    return (blocks[1] + blocks[3] + blocks[5]) * GROUP


@gluon.jit
def block_of_step(i, blocks, key_head, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Return the block's first token and the query head of step i: all blocks are neighbours."""
    return block_and_head(i, blocks[4], blocks[1] + blocks[3] + blocks[5], key_head, GROUP, ROWS)


@gluon.jit
def load_blocks(
    descriptors, tiles, barriers, blocks, first, key_head, n_tokens,
    GROUP: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, KV_BYTES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tile of keys and values, then block after block of queries, each as soon as its stage is free."""
    q_desc, k_desc, v_desc, d_out_desc, lse_desc, delta_desc = descriptors
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles = tiles
    kv_full, full, empty = barriers
    PART: gl.constexpr = k_desc.block_type.shape[0]
    BLOCK_BYTES: gl.constexpr = ROWS * WIDTH * 4 + ROWS * 8
    hopper.mbarrier.expect(kv_full, KV_BYTES)
    PARTS: gl.constexpr = k_tiles.shape[0]
    for i in gl.static_range(PARTS):
        place = [first + i * PART, key_head * WIDTH]
        copy_to_shared(k_desc, place, kv_full, k_tiles.index(i))
        copy_to_shared(v_desc, place, kv_full, v_tiles.index(i))
    padded = gl.cdiv(n_tokens, 128) * 128
    for i in range(n_steps(blocks, GROUP)):
        row, head = block_of_step(i, blocks, key_head, GROUP, ROWS)
        stage = i % STAGES
        phase = (i // STAGES) & 1 ^ 1
        hopper.mbarrier.wait(empty.index(stage), phase)
        loaded = full.index(stage)
        hopper.mbarrier.expect(loaded, BLOCK_BYTES)
        copy_to_shared(q_desc, [row, head * WIDTH], loaded, q_tiles.index(stage))
        copy_to_shared(lse_desc, [head * padded + row], loaded, lse_tiles.index(stage))
        copy_to_shared(d_out_desc, [row, head * WIDTH], loaded, d_out_tiles.index(stage))
        copy_to_shared(delta_desc, [head * padded + row], loaded, delta_tiles.index(stage))


@gluon.jit
def await_turns(
    counters_ptr, starts_ptr, turn, counted, blocks, first, key_head, n_tokens,
    GROUP: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Let the tile add to a block's dq when all tiles before it have.

    counters (H, padded tokens / 64) int32: the number of tiles that have added to the dq of 64 queries.
    """
    n_counters = gl.cdiv(n_tokens, 128) * 2
    for i in range(n_steps(blocks, GROUP)):
        row, head = block_of_step(i, blocks, key_head, GROUP, ROWS)
        leftmost = gl.load(starts_ptr + row)  # the first key that the block sees
        if WINDOW > 0:
            leftmost = gl.maximum(leftmost, row - WINDOW + 1)
        before = first // TILE - leftmost // TILE
        hopper.mbarrier.wait(counted.index(i % 2), (i // 2) & 1 ^ 1)  # at most two turns ahead
        while (
            gl.atomic_add(counters_ptr + head.to(gl.int64) * n_counters + row // 64, 0, sem="acquire", scope="gpu")
            != before
        ):
            pass
        hopper.mbarrier.arrive(turn.index(i % 2), count=1)


@gluon.jit
def count_turns(counters_ptr, added, counted, blocks, key_head, n_tokens, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Count the tile for each block to whose dq it has added."""
    n_counters = gl.cdiv(n_tokens, 128) * 2
    for i in range(n_steps(blocks, GROUP)):
        row, head = block_of_step(i, blocks, key_head, GROUP, ROWS)
        hopper.mbarrier.wait(added.index(i % 2), ((i + 1) // 2) & 1)  # the zeros of the first step come before
        hopper.mbarrier.arrive(counted.index(i % 2), count=1)
        gl.atomic_add(counters_ptr + head.to(gl.int64) * n_counters + row // 64, 1, sem="release", scope="gpu")


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
