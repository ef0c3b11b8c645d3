"""Per-chip tables: what the launch rules know of a GPU, and the tiles, warps and exceptions chosen for it.

Every decision that depends on the chip is a row here with its reason. "Spills" means that the ahead-of-time compiler
(tests/kernels/test_ahead_of_time.py) moves registers to memory; "measured" names the GPU. Decisions that hold on every
chip are constants in the op's file. Tables replace run-time autotuning, which costs start-up time and determinism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_THREADS = 1024  # per program on every GPU so far: 16 warps of 64 on CDNA, 32 warps of 32 on RDNA and NVIDIA


@dataclass(frozen=True, eq=False)  # compared by identity: a chip is a key of every launch cache
class Chip:
    """Properties of a device that the launch rules read."""

    vendor: Literal["nvidia", "amd", "interpreter"]
    arch: str  # sm90, gfx942
    warp_size: int
    processors: int  # streaming multiprocessors, compute units
    l2_bytes: int
    shared_bytes: int = 64 << 10  # shared memory (LDS) of one program; the default is the least, on CDNA and RDNA


# Four processors, so that a few rows already spread over several programs and their partial sums.
INTERPRETER = Chip("interpreter", "cpu", warp_size=32, processors=4, l2_bytes=1 << 20)


class Warps(NamedTuple):
    """Warps of a program whose tile has at most this many elements; None: any number."""

    max_elements: int | None
    warps: int


# At most 16 elements per thread. Row kernels hold two to four values per element, and with 32 and more elements per
# thread they spill (compiled for sm80 to sm120, gfx90a to gfx1201).
WARPS = {
    32: (Warps(1024, 4), Warps(4096, 8), Warps(8192, 16), Warps(None, 32)),
    64: (Warps(2048, 4), Warps(8192, 8), Warps(None, 16)),
}


def launch_options(elements: int, chip: Chip) -> dict[str, int | bool]:
    """Return num_warps, num_stages and enable_fp_fusion for a program with a tile of this many elements."""
    # The table is keyed by warp width and not by chip name, so that chips of tomorrow are served too.
    rows = WARPS[64 if chip.warp_size > 32 else 32]
    warps = next(row.warps for row in rows if row.max_elements is None or elements <= row.max_elements)
    warps = min(warps, MAX_THREADS // chip.warp_size)
    # One stage: there is no matrix product whose operands could be prefetched. Triton fuses a*b+c by default up to 3.9
    # and not from 3.10 on; the explicit option keeps the numbers the same.
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


class ChipRule(NamedTuple):
    """A choice that is made on some chips only."""

    name: str
    archs: tuple[str, ...]  # prefixes of Chip.arch; "cpu" is the interpreter
    reason: str


CHIP_RULES = {
    rule.name: rule
    for rule in (
        ChipRule("layer_norm_backward_half_parts", ("sm80",), "parts of 8192 columns spill 8 bytes in fp16"),
        ChipRule("norm_forward_4_warps", ("sm10",), "8 warps spill 16 bytes with a residual or a mean"),
        ChipRule("norm_backward_prefetch_parts", ("sm10",), "a layer norm without prefetched rows spills 8 bytes"),
        ChipRule("rms_norm_backward_whole_long_row", ("sm80", "sm90", "gfx", "cpu"), "8 to 64 bytes spill elsewhere"),
        ChipRule("layer_norm_backward_halves", ("sm90", "cpu"), "needs all 128 registers and room for the next row"),
        ChipRule("group_norm_8192_elements", ("sm10", "sm12"), "tiles of 16384 elements spill"),
        ChipRule("torch_grouped_mm", ("sm90", "sm100", "sm103"), "torch has a kernel of CUTLASS for bf16 on these"),
        ChipRule("float8_conversion", ("sm89", "sm90", "sm10", "sm12", "gfx950", "gfx12"), "elsewhere no OCP float8"),
        ChipRule("gluon_attention", ("sm90",), "warpgroup products and tensor copies of Hopper"),
        ChipRule("attention_hopper_tiles", ("sm90", "sm100", "sm103"), "228 KiB of shared memory for three stages"),
    )
}


def applies(name: str, chip: Chip) -> bool:
    """Return whether the chip rule of this name holds on the chip."""
    return chip.arch.startswith(CHIP_RULES[name].archs)


class NormTile(NamedTuple):
    """A measured launch of a norm over 16-bit rows, which replaces the general rule."""

    arch: str
    direction: Literal["forward", "backward"]
    centred: bool
    cols: int
    rows: int  # per step
    warps: int
    programs: int  # per processor


# Measured on an H100 with scripts/bench tune_kernels: 2 to 4 % faster than the general rule.
NORM_TILES = (
    NormTile("sm90", "backward", centred=False, cols=4096, rows=2, warps=16, programs=1),  # one wait for two rows
    NormTile("sm90", "backward", centred=True, cols=4096, rows=2, warps=8, programs=1),  # cheaper sums over warps
    NormTile("sm90", "forward", centred=True, cols=8192, rows=1, warps=8, programs=2),  # two programs fit
)


def measured_norm_tile(
    direction: Literal["forward", "backward"], *, centred: bool, cols: int, chip: Chip
) -> NormTile | None:
    """Return the measured launch of a norm kernel, None where the general rule holds."""
    return next((tile for tile in NORM_TILES if tile[:4] == (chip.arch, direction, centred, cols)), None)


class GatedNormTile(NamedTuple):
    """Tile and launch of the backward of gated_rms_norm, for groups of up to `cols` columns."""

    archs: tuple[str, ...]  # prefixes of Chip.arch
    packed: bool  # dy, x and gate have 16 bits
    cols: int  # the most columns that a program holds
    elements: int  # per step: several rows where groups are shorter
    warps: int = 0  # 0: those of launch_options
    programs: int = 0  # per processor; 0: as many as share 16 warps


# Not measured; chosen by the registers that the compiler takes.
GATED_NORM_TILES = (
    # 8 warps take 165 to 183 registers, so that only one program fits and half of each processor would wait.
    GatedNormTile(("sm",), packed=True, cols=4096, elements=4096, warps=16, programs=1),
    GatedNormTile(("gfx", "cpu"), packed=True, cols=4096, elements=4096),  # 16 elements per thread
    GatedNormTile(("sm", "gfx", "cpu"), packed=False, cols=2048, elements=2048),  # dy, x and gate unpacked
)


def gated_norm_tile(*, packed: bool, chip: Chip) -> GatedNormTile:
    """Return the first row that holds for the chip."""
    return next(row for row in GATED_NORM_TILES if row.packed == packed and chip.arch.startswith(row.archs))


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
    elif applies("attention_hopper_tiles", chip):
        chips = "hopper_masked" if has_cap or head_dim < width else "hopper"
    else:
        chips = "nvidia"
    key = chips, max(64, width)
    return next((tiles for tiles in ATTENTION_TILES if tiles[:2] == key), None)


class MatmulTile(NamedTuple):
    """Tile and launch of the fused product of int8 activations and a packed 2-bit weight."""

    rows: int
    cols: int
    packed_bytes: int  # of a weight row per step: four times as many columns of x
    warps: int
    stages: int


def int2_matmul_tile(n_rows: int, n_cols: int, n_bytes: int, chip: Chip) -> MatmulTile:
    """Return the largest tile that spills on no chip, for x (n_rows, 4 n_bytes) and n_cols output columns."""
    # Rows that do not start at multiples of 16 bytes are loaded byte by byte, each with a pointer in registers.
    aligned = n_bytes % 16 == 0
    step = 64 if aligned else 32
    if n_rows <= 16:  # the smallest tile of tl.dot: reading the weight takes the time
        return MatmulTile(16, 64, step, warps=4, stages=2)
    if aligned and -(-n_rows // 128) * -(-n_cols // 128) >= chip.processors:  # enough tiles for every processor
        return MatmulTile(128, 128, 32, warps=8, stages=2)
    return MatmulTile(64, 64, step, warps=8 if chip.warp_size == 32 else 4, stages=2)


INT2_UNPACK_FROM = 65  # rows from which reading packed bytes no longer dominates; cuBLAS' int8 product needs 17


def unpacks_int2_weight(n_rows: int, n_cols: int, n_bytes: int, chip: Chip) -> bool:
    """Return whether the whole weight is unpacked for torch's int8 product, which only NVIDIA's cuBLAS makes fast.

    cuBLAS needs n_cols in eights; the unpack kernel stores vectors where a quarter of a row is a multiple of 16 bytes.
    """
    return chip.vendor != "amd" and n_rows >= INT2_UNPACK_FROM and n_cols % 8 == 0 and n_bytes % 16 == 0


class GroupedTile(NamedTuple):
    """Tile and launch of the grouped products of `experts`."""

    rows: int  # pairs; a tile holds rows of one expert
    weight_rows: int  # of the gradient of a weight
    cols: int
    inner: int  # per step
    warps: int
    stages: int


class GroupedTiles(NamedTuple):
    """Tiles of the grouped products by kind of chip: for many rows per expert, and for few."""

    chips: Literal["sm90", "sm100", "nvidia", "cdna", "rdna", "fp32", "interpreter"]
    many: GroupedTile
    few: GroupedTile


FEW_ROWS = 48  # rows per expert up to which the smaller tile wastes less than it loses

GROUPED_TILES = (
    GroupedTiles("sm90", GroupedTile(128, 128, 256, 64, 8, 4), GroupedTile(64, 64, 128, 64, 4, 4)),  # fits 227 KiB
    GroupedTiles("sm100", GroupedTile(128, 128, 128, 64, 8, 4), GroupedTile(64, 64, 128, 64, 4, 4)),  # wider: spill
    GroupedTiles("nvidia", GroupedTile(128, 128, 128, 32, 8, 4), GroupedTile(64, 64, 64, 64, 4, 3)),  # fits 99 KiB
    GroupedTiles("cdna", GroupedTile(128, 128, 128, 32, 8, 2), GroupedTile(64, 64, 64, 32, 4, 2)),  # fits 64 KiB
    GroupedTiles("rdna", GroupedTile(64, 64, 64, 32, 4, 2), GroupedTile(32, 32, 64, 32, 4, 2)),  # wider tiles spill
    GroupedTiles("fp32", GroupedTile(32, 32, 32, 16, 4, 2), GroupedTile(16, 16, 32, 16, 4, 2)),  # products in registers
    GroupedTiles("interpreter", GroupedTile(16, 16, 32, 16, 4, 1), GroupedTile(16, 16, 16, 16, 4, 1)),  # more branches
)


def grouped_tile(rows_per_expert: int, dtype_bytes: int, chip: Chip, *, aligned: bool = True) -> GroupedTile:
    """Return the tile of the grouped products, for the mean number of rows of an expert.

    aligned: rows of all tensors start at multiples of 16 bytes. It changes no number of rows.
    """
    if chip.vendor == "interpreter":
        chips = "interpreter"
    elif dtype_bytes == 4:
        chips = "fp32"
    elif chip.vendor == "amd":
        chips = "rdna" if chip.warp_size == 32 else "cdna"
    else:
        chips = {"sm90": "sm90", "sm100": "sm100", "sm103": "sm100"}.get(chip.arch, "nvidia")
    tiles = next(tiles for tiles in GROUPED_TILES if tiles.chips == chips)
    tile = tiles.few if rows_per_expert <= FEW_ROWS else tiles.many
    # Unaligned rows are loaded element by element, each with a pointer in registers: larger tiles spill.
    return tile if aligned else tile._replace(cols=min(tile.cols, 64), inner=min(tile.inner, 32), stages=2)
