"""Tiles of the norms: every number that was tuned, with its reason, and the choices of tile, warps and programs."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import MAX_THREADS, Chip, ChipRule, launch_options
from ligertune_kernels.launcher import triton

STEP = 4096  # elements per step where a row has fewer
# The longest row that the forward holds in registers; longer rows are swept.
WHOLE_ROW = 16384
WHOLE_ROW_BYTES = 65536
SWEEP_BLOCK = 2048
PART = 8192  # columns of dx and dw that a backward program holds; with 16 warps 124 of the 128 registers of sm90
MAX_STAGES = 3  # tiles of a program in flight or in work
# Warps that share a processor.
FORWARD_WARPS = 32
BACKWARD_WARPS = 16
REDUCTION_BYTES = 16384  # of shared memory, for sums over warps
PROGRAM_PER_TILE = 1 << 31  # programs: as many as there are tiles

Constants = dict[str, int | bool]


# Exceptions of some chips from the rules below. "Spills" are the ahead-of-time compiler's.
HALF_PARTS = ChipRule(("sm80",), "a layer norm's parts of 8192 columns spill 8 bytes in fp16")
FORWARD_4_WARPS = ChipRule(("sm10",), "8 warps spill 16 bytes with a residual or a mean")
PREFETCHED_PARTS = ChipRule(("sm10",), "a layer norm without prefetched rows spills 8 bytes")
WHOLE_LONG_ROW = ChipRule(("sm80", "sm90", "gfx", "cpu"), "8 to 64 bytes spill elsewhere")
LAYER_NORM_HALVES = ChipRule(("sm90", "cpu"), "needs all 128 registers and room for the next row")
SMALL_GROUPS = ChipRule(("sm10", "sm12"), "tiles of 16384 elements of a group norm spill")


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


class NormCall(NamedTuple):
    """Key of a launch plan; its tensors are x, residual, weight, bias, or in the backward dy, ds, x, weight."""

    n_cols: int
    strides: tuple[int, ...]  # of the rows of x and residual or, backward, of dy, ds and x
    dtypes: tuple[torch.dtype | None, ...]  # None: there is no such tensor
    centred: bool
    round_xhat: bool
    device: torch.device
    round_rstd: bool = False

    def integers(self) -> tuple[int, ...]:
        """Return the integers that Triton specialises on."""
        return (*self.strides, self.n_cols)

    def is_aligned(self) -> bool:
        """Return whether all rows begin at a vector of 16 elements. Otherwise each column has its own address."""
        return not any(integer % 16 for integer in self.integers())


class NormTiling(NamedTuple):
    """Tile and launch of a kernel whose programs each take a run of rows."""

    constants: Constants
    rows: int  # per step
    programs: int  # at most, for each part
    parts: int = 1  # of a row's columns, each computed by separate programs


def stages_that_fit(step_bytes: int, programs: int, chip: Chip) -> int:
    """Return the steps in flight that fit into shared memory with this many programs per processor; 1 on AMD."""
    if chip.vendor != "nvidia":
        return 1
    waiting = (chip.shared_bytes // programs - REDUCTION_BYTES) // step_bytes
    return 1 + max(0, min(waiting, MAX_STAGES - 1))


def _tile_constants(rows: int, block: int, call: NormCall, chip: Chip, measured: NormTile | None) -> Constants:
    constants = {"ROWS": rows, "BLOCK": block, **launch_options(rows * block, chip)}
    if call.centred and call.n_cols == 1:
        # The gradient w dy - w dy is zero only if both products are rounded, and fusing leaves one unrounded.
        constants["enable_fp_fusion"] = False
    if measured is not None:
        constants["num_warps"] = measured.warps
    return constants


def _measured(direction: Literal["forward", "backward"], call: NormCall, block: int, chip: Chip) -> NormTile | None:
    """Return the measured launch of a norm kernel, None where the general rule holds."""
    if not call.is_aligned():
        return None
    key = (chip.arch, direction, call.centred, block)
    return next((tile for tile in NORM_TILES if tile[:4] == key), None)


def holds_whole_row(call: NormCall, column_bytes: int) -> bool:
    """Return whether a program of the forward holds a row in registers."""
    longest = WHOLE_ROW if call.is_aligned() else PART // 2
    return call.n_cols <= longest and call.n_cols * column_bytes <= WHOLE_ROW_BYTES


def _forward_warps(default: int, block: int, call: NormCall, chip: Chip) -> int:
    plain = call.dtypes[1] is None and not call.centred  # no residual and no mean: registers are left
    if block > PART:  # 32 warps have 64 registers per thread, too few for a long layer norm
        return min(default, 16)
    if block == PART and plain and chip.vendor == "nvidia":
        return 8
    if block < PART and not plain and FORWARD_4_WARPS.holds(chip):
        return 4
    return default


def forward_tiling(call: NormCall, column_bytes: int, chip: Chip) -> NormTiling:
    """Return the tiling of forward_kernel."""
    block = triton.next_power_of_2(call.n_cols)
    measured = _measured("forward", call, block, chip) if column_bytes == 2 else None
    rows = max(1, STEP // block) if measured is None else measured.rows
    constants = _tile_constants(rows, block, call, chip, measured)
    constants["num_warps"] = _forward_warps(constants["num_warps"], block, call, chip)
    # One program per tile reaches 92 to 98 % of an H100's bandwidth; programs that loop over rows, 82 to 84 %.
    if block < PART or (block == PART and not call.centred):
        return NormTiling(constants | {"STAGES": 1}, rows, PROGRAM_PER_TILE)
    programs = FORWARD_WARPS // constants["num_warps"] or 1 if measured is None else measured.programs
    stages = stages_that_fit(block * rows * column_bytes, programs, chip)
    return NormTiling(constants | {"STAGES": stages}, rows, programs * chip.processors)


def sweep_tiling(chip: Chip) -> NormTiling:
    """Return the tiling of a kernel that sweeps one row per program."""
    return NormTiling({"BLOCK": SWEEP_BLOCK, **launch_options(SWEEP_BLOCK, chip)}, 1, PROGRAM_PER_TILE)


def _backward_block(call: NormCall, chip: Chip, *, wide: bool) -> int:
    """Return the columns of a part; wide: fp32 values wait unpacked in registers, so that fewer columns fit."""
    block = triton.next_power_of_2(call.n_cols)
    if not call.is_aligned() and block > PART // 2:
        return PART // 4
    if block <= PART:
        return block
    halve = call.centred and HALF_PARTS.holds(chip)
    return PART // 2 if wide or halve or call.n_cols > 2 * PART else PART


def backward_tiling(call: NormCall, column_bytes: int, chip: Chip) -> NormTiling:
    """Return the tiling of backward_kernel."""
    has_residual = call.dtypes[1] is not None
    wide = column_bytes > 6  # more than three 16-bit tensors: dy, x and ds
    block = _backward_block(call, chip, wide=wide)
    parts = -(-call.n_cols // block)
    measured = _measured("backward", call, block, chip) if column_bytes == 4 and not has_residual else None
    rows = max(1, (STEP // 2 if wide else STEP) // block) if measured is None else measured.rows
    constants = _tile_constants(rows, block, call, chip, measured)
    programs = BACKWARD_WARPS // constants["num_warps"] or 1 if measured is None else measured.programs
    if parts > 1 and not has_residual and not (call.centred and PREFETCHED_PARTS.holds(chip)):
        stages = 1  # each part reads the whole row anyway; prefetching costs 5 to 15 % of the bandwidth
    else:
        # Shared memory also holds the weights of the other parts.
        stages = stages_that_fit(block * (rows * parts * column_bytes + 4 * (parts - 1)), programs, chip)
    constants |= {"STAGES": stages, "PARTS": parts}
    return NormTiling(constants, rows, max(1, programs * chip.processors // parts), parts)


def fits_whole_long_row(call: NormCall, chip: Chip) -> bool:
    """Return whether all threads of a program can hold two packed rows of WHOLE_ROW columns, weights and dw."""
    packed = all(dtype is None or dtype.itemsize == 2 for dtype in call.dtypes)
    # On NVIDIA the compiler unpacks fp16 weights before the first row, which takes twice the registers.
    unpacks = chip.vendor == "nvidia" and torch.float16 in call.dtypes
    fits = PART < call.n_cols <= WHOLE_ROW and not call.centred and packed and not unpacks
    return fits and call.is_aligned() and WHOLE_LONG_ROW.holds(chip)


def long_row_tiling(call: NormCall, column_bytes: int, chip: Chip) -> NormTiling:
    """Return the tiling of backward_row_kernel: one program per processor, with every thread that it has."""
    block = triton.next_power_of_2(call.n_cols)
    prefetches = chip.vendor == "nvidia" and block * column_bytes + REDUCTION_BYTES <= chip.shared_bytes
    constants = {"BLOCK": block, "STAGES": 1 + prefetches, **launch_options(block, chip)}
    constants["num_warps"] = MAX_THREADS // chip.warp_size
    return NormTiling(constants, 1, chip.processors)


def fits_halves(call: NormCall, chip: Chip) -> bool:
    """Return whether 16 warps can hold a packed row of 2 PART columns with dw and db: in all 128 registers."""
    dy, ds, x, weight = call.dtypes
    fits = call.centred and not call.round_xhat and ds is None and call.n_cols == 2 * PART and call.is_aligned()
    return fits and dy is x is weight is torch.bfloat16 and LAYER_NORM_HALVES.holds(chip)


def halves_tiling(chip: Chip) -> NormTiling:
    """Return the tiling of backward_halves_kernel."""
    # 16 warps leave each thread the 128 registers that the row takes; the second stage is the next row.
    constants = {**launch_options(PART, chip), "HALF": PART, "num_warps": 16, "STAGES": 2}
    return NormTiling(constants, 1, chip.processors)


# Column sums.
SUMS_STEP = 16384  # elements per step: all rows of most matrices, so that all their bytes are in flight together
SUMS_MIN_COLS = 32  # 128 bytes of a row
SUMS_FEW_ROWS = 64  # of a matrix from few programs. With more sizes than two, a longer batch would wait for a compile


def sums_constants(n_cols: int, chip: Chip, *, few_rows: bool) -> Constants:
    """Return the constants of column_sums_kernel for a matrix of n_cols columns."""
    # About four programs per processor: enough to hide each other's loads.
    cols = min(max(SUMS_MIN_COLS, triton.next_power_of_2(n_cols // (4 * chip.processors) + 1)), 1024)
    rows = min(SUMS_STEP // cols, SUMS_FEW_ROWS) if few_rows else SUMS_STEP // cols
    return {"ROWS": rows, "COLS": cols, **launch_options(rows * cols // 2, chip)}


# Gated norms.
WHOLE_GROUP = 8192  # longest group that the forward of a gated norm holds in registers; longer ones are swept


class GatedNormTile(NamedTuple):
    """Tile and launch of the backward of gated_rms_norm, for groups of up to `cols` columns."""

    archs: tuple[str, ...]  # prefixes of Chip.arch
    packed: bool  # dy, x and gate have 16 bits
    cols: int  # the most columns that a program holds
    elements: int  # per step: several rows where groups are shorter
    warps: int = 0  # 0: those of launch_options
    programs: int = 0  # per processor; 0: as many as share BACKWARD_WARPS


# Not measured; chosen by the registers that the compiler takes.
GATED_NORM_TILES = (
    # 8 warps take 165 to 183 registers, so that only one program fits and half of each processor would wait.
    GatedNormTile(("sm",), packed=True, cols=4096, elements=4096, warps=16, programs=1),
    GatedNormTile(("gfx", "cpu"), packed=True, cols=4096, elements=4096),  # 16 elements per thread
    GatedNormTile(("sm", "gfx", "cpu"), packed=False, cols=2048, elements=2048),  # dy, x and gate unpacked
)


def gated_forward_tiling(n_cols: int, chip: Chip, *, aligned: bool) -> NormTiling | None:
    """Return the tiling of the gated forward for groups of n_cols columns, None where a group is swept."""
    if n_cols > (WHOLE_GROUP if aligned else WHOLE_GROUP // 2):
        return None
    block = triton.next_power_of_2(n_cols)
    rows = max(1, STEP // block)
    return NormTiling({"ROWS": rows, "BLOCK": block, **launch_options(rows * block, chip)}, rows, PROGRAM_PER_TILE)


def gated_backward_tiling(n_cols: int, column_bytes: int, chip: Chip, *, aligned: bool) -> NormTiling:
    """Return the tiling of the gated backward for groups of n_cols columns; programs: on each processor."""
    packed = column_bytes <= 6  # dy, x and gate have 16 bits
    tile = next(row for row in GATED_NORM_TILES if row.packed == packed and chip.arch.startswith(row.archs))
    halved = 1 if aligned else 2  # otherwise each column has its own address in registers
    block = min(triton.next_power_of_2(n_cols), tile.cols // halved)
    rows = max(1, tile.elements // halved // block)
    parts = -(-n_cols // block)
    constants = {**launch_options(rows * block, chip), "ROWS": rows, "BLOCK": block, "PARTS": parts}
    if tile.warps and aligned:
        constants["num_warps"] = tile.warps
    programs = tile.programs or BACKWARD_WARPS // constants["num_warps"] or 1
    # With parts a step reads whole groups, which no prefetch of one part's rows helps.
    constants["STAGES"] = stages_that_fit(rows * block * column_bytes, programs, chip) if parts == 1 else 1
    return NormTiling(constants, rows, programs, parts)


# Elements of a group norm's step: 8192 by eight warps, and 16384 by all warps for groups of more than 32768 elements.
# On an H100, forward and backward of 128 and 512 channels of 64 x 64 in 32 groups, batch 16, take 39 and 181 us this
# way, 59 and 215 us with the tiles swapped, and 54 and 195 us in torch.compile.
GROUP_STEP = 8192
GROUP_WARPS = 8
LARGE_GROUP_STEP = 16384


def group_constants(n_channels: int, length: int, chip: Chip) -> Constants:
    """Return the constants of the group norm's kernels for groups of n_channels × length."""
    large = n_channels * length > 4 * GROUP_STEP and not SMALL_GROUPS.holds(chip)
    step = LARGE_GROUP_STEP if large else GROUP_STEP
    cols = min(step, triton.next_power_of_2(length))
    channels = min(step // cols, triton.next_power_of_2(n_channels))
    constants = {"CHANNELS": channels, "LENGTH": cols, **launch_options(step, chip)}
    # 64-wide warps keep the general rule, which gives them eight warps here as well.
    return constants if large or chip.warp_size == 64 else constants | {"num_warps": GROUP_WARPS}
