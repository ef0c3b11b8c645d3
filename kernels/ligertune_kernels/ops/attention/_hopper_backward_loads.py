"""Parts of the backward of document_attention on Hopper: blocks of queries, copies to shared memory, turns to add dq.

One program has a tile of KEYS keys of one key head, and reads blocks of queries of all query heads that share it. It
owns dk and dv of its tile, while every tile of keys that a block of queries sees adds a part of the block's dq.

Tiles add in a fixed order, so the same inputs give the same bits: a tile adds to the dq of a block after all earlier
tiles have. All tiles read blocks from the last to the first, and the GPU starts programs in the order of their tiles.
Each tile therefore runs about one block behind the tile before it, and never waits for a program that starts later.
"""

from __future__ import annotations

from ligertune_kernels.launcher import copy_to_shared, gl, gluon, hopper

KEYS = gl.constexpr(128)  # of a tile


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
