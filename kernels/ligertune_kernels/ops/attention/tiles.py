"""Tiles of attention and RoPE: every number that was tuned, with its reason, and the choice of kernels."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import Chip, ChipRule
from ligertune_kernels.launcher import TensorDescriptor, chip_of, runs_triton

HOPPER_TILES = ChipRule(("sm90", "sm100", "sm103"), "228 KiB of shared memory for three stages")
GLUON_KERNELS = ChipRule(("sm90",), "warpgroup products and tensor copies of Hopper")


class Tile(NamedTuple):
    """Tile and launch of one attention kernel."""

    rows: int  # queries
    cols: int  # keys
    warps: int
    stages: int


class AttentionTiles(NamedTuple):
    """Tiles of the three attention kernels for heads of a (padded) width."""

    chips: Literal["hopper", "hopper_masked", "nvidia", "cdna", "rdna", "small"]
    width: int
    forward: Tile
    dq: Tile
    dkdv: Tile


# The Hopper tiles took about the least time on an H100 among three to five per kernel that spill nothing, over rows of
# 160 documents of 100 tokens up to one document of 16,384. The other tiles are the largest found that fit and spill
# nothing (triton 3.7; with 3.6, which timed them, dkdv of widths 128 and 256 spill 8 bytes per thread).
ATTENTION_TILES = (
    AttentionTiles("hopper", 64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),  # fastest
    AttentionTiles("hopper", 128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),  # fastest
    AttentionTiles("hopper", 256, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(16, 32, 4, 2)),  # fastest
    # A soft cap's derivative or a mask of columns takes registers: smaller or wider-spread backward tiles.
    AttentionTiles("hopper_masked", 64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),  # fastest
    AttentionTiles("hopper_masked", 128, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 8, 3)),  # fastest
    AttentionTiles("hopper_masked", 256, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(16, 32, 8, 2)),  # fastest
    AttentionTiles("nvidia", 64, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2)),  # fits 100 KiB (sm120)
    AttentionTiles("nvidia", 128, Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(32, 64, 8, 3)),  # fits 100 KiB
    AttentionTiles("nvidia", 256, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 64, 8, 2)),  # fits 100 KiB
    AttentionTiles("cdna", 64, Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),  # fits 64 KiB (gfx90a)
    AttentionTiles("cdna", 128, Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),  # fits 64 KiB
    AttentionTiles("cdna", 256, Tile(32, 16, 4, 1), Tile(64, 16, 4, 2), Tile(16, 32, 4, 2)),  # fits 64 KiB
    AttentionTiles("rdna", 64, Tile(64, 32, 4, 2), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),  # wider heads always spill
    # float32, whose products take a thread's registers, and the interpreter, where small tiles cover more branches.
    AttentionTiles("small", 64, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
)


def padded_head_dim(head_dim: int) -> int:
    """Return the head's width in a tile: tl.dot takes powers of two."""
    return max(32, 1 << (head_dim - 1).bit_length())


def attention_tiles(head_dim: int, dtype_bytes: int, chip: Chip, *, has_cap: bool) -> AttentionTiles | None:
    """Return the tiles for heads of head_dim columns, None where no tile fits the chip."""
    width = padded_head_dim(head_dim)
    wave32_amd = chip.vendor == "amd" and chip.warp_size == 32
    if chip.vendor == "interpreter":
        chips = "small"
        width = 64
    elif dtype_bytes == 4:
        if wave32_amd:
            return None
        chips = "small"
    elif chip.vendor == "amd":
        chips = "rdna" if wave32_amd else "cdna"
    elif HOPPER_TILES.holds(chip):
        chips = "hopper_masked" if has_cap or head_dim < width else "hopper"
    else:
        chips = "nvidia"
    key = chips, max(64, width)
    return next((tiles for tiles in ATTENTION_TILES if tiles[:2] == key), None)


# The kernels for long documents on Hopper.
PADDED_TILE = 128  # tokens to which rows of lse, delta and the sums of dq are padded
COPIED_ROWS = 64  # rows of a copied tile of queries
WIDE_HEAD = 256  # head width whose backward has two kernels and needs no fp32 sums of dq
SUMS_AT_ONCE = 1 << 29  # bytes of the fp32 sums of dq in one launch of the backward, if a key head does not need more
# Bytes of these sums from which the backward computes a few heads at a time. The queries and output gradients are as
# large, and those of all heads would not stay in the L2 cache (50 MB on an H100). If they are smaller, all heads run at
# the same time, longest tiles first, so that the processors finish at about the same time.
GROUPED_FROM = 200 << 20
MAX_SUMS = 3 << 30  # bytes of the sums of a single key head; larger ones run the other kernels, which have none


class HopperWidth(NamedTuple):
    """Launch settings for one head width."""

    parts: int  # warpgroups of the forward, each with 64 queries
    cols: int  # keys of a block of the forward
    stages: int  # blocks of the forward in shared memory
    long: int  # tokens of the mean document from which these kernels take less time on an H100
    together: tuple[int, ...] = ()  # key heads that the backward computes at the same time, if it divides theirs


HOPPER_WIDTHS = {
    64: HopperWidth(4, 64, 4, 2048),
    128: HopperWidth(2, 128, 2, 2048, (2,)),
    256: HopperWidth(2, 64, 2, 512),
}
QUERY_STAGES = 3  # blocks of queries in shared memory in the backward of narrow heads
DELTA_ELEMENTS = 4096  # of out and dO per program of the pass over them
HEADS_TOGETHER = (8, 4)  # heads that the forward computes at the same time: the first that divides theirs


def query_block(width: int, *, has_cap: bool) -> int:
    """Return the queries of a block of the backward of narrow heads."""
    # The derivative of the cap takes registers, so that a block has half of the queries.
    return 128 if width == 64 and not has_cap else COPIED_ROWS


def runs_kernels(query: torch.Tensor, *, has_cap: bool) -> bool:
    """Return whether kernels compute the attention of queries (T, H, D), else the reference."""
    if not runs_triton(query):
        return False
    return attention_tiles(query.shape[-1], query.dtype.itemsize, chip_of(query.device), has_cap=has_cap) is not None


def runs_hopper_kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chip: Chip, documents: int | None) -> bool:
    """Return whether these kernels run for (T, H, D), (T, K, D) and (T, K, D) of this many documents, None: unknown."""
    n_tokens, heads, width = q.shape
    if documents is None or TensorDescriptor is None or not GLUON_KERNELS.holds(chip):
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or width not in HOPPER_WIDTHS or torch.compiler.is_compiling():
        return False
    if n_tokens < max(HOPPER_WIDTHS[width].long * documents, 1):
        return False
    if sums_bytes(n_tokens, heads, k.shape[1], width) > MAX_SUMS:
        return False
    return all(t.stride(1) == width and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (q, k, v))


def sums_bytes(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return the bytes of the fp32 sums of dq, which the backward allocates and frees: those of one launch."""
    if width == WIDE_HEAD:
        return 0
    return heads_at_once(n_tokens, heads, key_heads, width) * _sums_of_key_head(n_tokens, heads, key_heads, width)


def _sums_of_key_head(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    return heads // key_heads * -(-n_tokens // PADDED_TILE) * PADDED_TILE * width * 4


def heads_at_once(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return how many key heads one launch of the backward computes."""
    return max(1, min(key_heads, SUMS_AT_ONCE // max(1, _sums_of_key_head(n_tokens, heads, key_heads, width))))


def heads_together(heads: int, wanted: tuple[int, ...]) -> int:
    """Return the first of the wanted numbers that divides the heads, else all heads."""
    return next((n for n in wanted if heads % n == 0), heads)


# RoPE.
# Pairs per program: 4 tokens of 8 heads of 128, 16 pairs per thread. On an H100 (32 and 8 heads, 16k tokens) it
# reaches 94 % of a copy's rate. A program for all heads of a token, first of q and then of k, reaches 84 %.
ROPE_PAIRS = 2048
ROPE_HEADS = 8  # at most


def power_of_2(least: int) -> int:
    """Return the next power of two. Comparisons settle a dynamic size for torch.compile; bit arithmetic does not."""
    power = 1
    while power < least:
        power *= 2
    return power


def rope_tile(n_heads: int, width: int) -> tuple[int, int]:
    """Return tokens and heads of a program, both powers of two; width: elements of half a head."""
    heads = min(power_of_2(n_heads), ROPE_HEADS, max(1, 2 * ROPE_PAIRS // width))
    return max(1, ROPE_PAIRS // (heads * width)), heads


# merge_own_keys.
# Elements of a tile of queries: 4 tokens of 4 heads of 128. The backward has four such tiles in registers.
OWN_KEYS_ELEMENTS = 2048


def own_keys_tokens(elements: int) -> int:
    """Return the tokens of a program; elements: of the query heads of one token that share a key head."""
    return max(1, OWN_KEYS_ELEMENTS // elements)


# decode_attention.
DECODE_COLS = (16, 128)  # least and most columns of a tile: tl.dot takes 16


class DecodeLaunch(NamedTuple):
    """Bytes of the keys that a program loads at a time, and its launch. Reading them is all that takes time."""

    chips: Literal["hopper", "nvidia", "cdna", "rdna"]
    tile_bytes: int
    warps: int
    stages: int


DECODE_LAUNCHES = (
    DecodeLaunch("hopper", 16 << 10, 4, 3),  # three programs of a processor have 64 KiB each under way
    DecodeLaunch("nvidia", 8 << 10, 4, 2),  # 16 KiB with two stages spill heads of 128
    DecodeLaunch("cdna", 8 << 10, 4, 1),  # fits 64 KiB
    DecodeLaunch("rdna", 4 << 10, 8, 1),  # more spill heads of 256, and of 128 in float32
)


class DecodeTile(NamedTuple):
    """Tile and launch of decode_attention."""

    rows: int  # query heads of a key head, padded
    cols: int  # keys
    width: int
    value_width: int
    warps: int
    stages: int


def decode_tile(group: int, head_dim: int, value_dim: int, itemsize: int, chip: Chip) -> DecodeTile:
    """Return the tile for `group` query heads per key head."""
    chips = "hopper" if HOPPER_TILES.holds(chip) else "nvidia"
    if chip.vendor == "amd":
        chips = "rdna" if chip.warp_size == 32 else "cdna"
    launch = next(row for row in DECODE_LAUNCHES if row.chips == chips)
    width = max(16, power_of_2(head_dim))
    value_width = max(16, power_of_2(value_dim))
    least, most = DECODE_COLS
    cols = min(max(launch.tile_bytes // (max(width, value_width) * itemsize), least), most)
    if chip.vendor == "interpreter":
        cols = least  # small tiles cover more branches
    return DecodeTile(max(16, power_of_2(group)), cols, width, value_width, launch.warps, launch.stages)
