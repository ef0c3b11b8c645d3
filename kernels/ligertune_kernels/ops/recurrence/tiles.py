"""Tiles of the recurrences: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ligertune_kernels.chips import Chip, ChipRule
from ligertune_kernels.launcher import chip_of, runs_triton, triton

REFERENCE_CHUNK = 64  # tokens of a chunk of the reference, as in transformers
PART = 1024  # tokens of a packed row in which a program of a scan looks for documents of its own
MIN_WIDTH = 16  # of a factor of a product
MIN_WIDTH_HOPPER = 64  # of fewer columns of 16 bits, Triton 3.6 reads outside of shared memory, or wrong numbers
MAX_WIDTH = 256  # of a head
WARPGROUPS = ChipRule(("sm90",), "products of 64 rows from registers; on sm100 chunks of 64 tokens spill")
Chips = Literal["hopper", "nvidia", "cdna", "rdna", "interpreter"]


class DeltaTile(NamedTuple):
    """Launch of one kernel of the gated delta rule. cols: columns of v (or of k and v) that it holds at a time."""

    cols: int
    warps: int
    stages: int = 1


class DeltaTiles(NamedTuple):
    """Launches of all kernels, for heads up to a width and numbers of a size."""

    chips: tuple[Chips, ...]
    width: int
    itemsize: int
    chunk: int  # tokens
    prepare: DeltaTile
    states: DeltaTile
    outputs: DeltaTile
    local: DeltaTile
    gradients: DeltaTile
    values: DeltaTile
    queries: DeltaTile
    corrections: DeltaTile
    keys: DeltaTile
    products: DeltaTile


# Hopper's tiles up to 128 columns are the fastest of those measured on an H200 with bf16, but for the scans, which run
# where those of hopper_scans.py do not. The others are the largest that spill little or nothing. Chunks of 64 tokens
# halve the steps of the scans and the states in memory, and take twice the registers.
DELTA_TILES = (
    DeltaTiles(
        ("hopper",), width=128, itemsize=2, chunk=64,
        prepare=DeltaTile(64, 4), states=DeltaTile(32, 4, 3), outputs=DeltaTile(64, 4), local=DeltaTile(64, 4, 3),
        gradients=DeltaTile(32, 4), values=DeltaTile(128, 4), queries=DeltaTile(64, 8), keys=DeltaTile(64, 8),
        corrections=DeltaTile(64, 4, 2), products=DeltaTile(64, 4, 2),
    ),
    DeltaTiles(
        ("nvidia", "interpreter"), width=128, itemsize=2, chunk=32,
        prepare=DeltaTile(64, 4), states=DeltaTile(32, 4, 2), outputs=DeltaTile(32, 4), local=DeltaTile(64, 4),
        gradients=DeltaTile(32, 4), values=DeltaTile(64, 4), queries=DeltaTile(16, 4), corrections=DeltaTile(64, 4),
        keys=DeltaTile(64, 4), products=DeltaTile(32, 4),
    ),
    DeltaTiles(
        ("hopper", "nvidia", "interpreter"), width=256, itemsize=2, chunk=32,
        prepare=DeltaTile(64, 4), states=DeltaTile(32, 4), outputs=DeltaTile(64, 4), local=DeltaTile(64, 4),
        gradients=DeltaTile(32, 8), values=DeltaTile(64, 4), queries=DeltaTile(32, 8), corrections=DeltaTile(32, 8),
        keys=DeltaTile(32, 8), products=DeltaTile(64, 8),
    ),
    DeltaTiles(
        ("cdna",), width=256, itemsize=2, chunk=32,  # a thread of 4 warps has 512 registers
        prepare=DeltaTile(64, 4), states=DeltaTile(16, 4), outputs=DeltaTile(64, 4), local=DeltaTile(64, 4),
        gradients=DeltaTile(16, 4), values=DeltaTile(64, 4), queries=DeltaTile(32, 4), corrections=DeltaTile(32, 4),
        keys=DeltaTile(32, 4), products=DeltaTile(32, 4),
    ),
    DeltaTiles(
        ("rdna",), width=64, itemsize=2, chunk=16,
        prepare=DeltaTile(32, 4), states=DeltaTile(32, 4), outputs=DeltaTile(32, 4), local=DeltaTile(32, 4),
        gradients=DeltaTile(32, 4), values=DeltaTile(32, 4), queries=DeltaTile(32, 4), corrections=DeltaTile(32, 4),
        keys=DeltaTile(32, 4), products=DeltaTile(32, 4),
    ),
    DeltaTiles(
        ("rdna",), width=128, itemsize=2, chunk=16,
        prepare=DeltaTile(32, 8), states=DeltaTile(16, 4), outputs=DeltaTile(32, 4), local=DeltaTile(32, 4),
        gradients=DeltaTile(16, 4), values=DeltaTile(32, 4), queries=DeltaTile(32, 8), corrections=DeltaTile(32, 8),
        keys=DeltaTile(32, 8), products=DeltaTile(32, 4),
    ),
    DeltaTiles(
        ("rdna",), width=256, itemsize=2, chunk=16,
        prepare=DeltaTile(32, 8), states=DeltaTile(16, 16), outputs=DeltaTile(16, 8), local=DeltaTile(32, 8),
        gradients=DeltaTile(16, 16), values=DeltaTile(32, 8), queries=DeltaTile(16, 8), corrections=DeltaTile(16, 8),
        keys=DeltaTile(16, 8), products=DeltaTile(32, 8),
    ),
    # float32 without matrix units: both factors of a product are in registers
    DeltaTiles(
        ("hopper", "nvidia", "rdna"), width=128, itemsize=4, chunk=16,
        prepare=DeltaTile(32, 4), states=DeltaTile(16, 8), outputs=DeltaTile(16, 8), local=DeltaTile(16, 8),
        gradients=DeltaTile(16, 8), values=DeltaTile(32, 4), queries=DeltaTile(16, 8), corrections=DeltaTile(16, 8),
        keys=DeltaTile(16, 8), products=DeltaTile(32, 8),
    ),
    DeltaTiles(
        ("cdna",), width=128, itemsize=4, chunk=32,
        prepare=DeltaTile(32, 4), states=DeltaTile(16, 4), outputs=DeltaTile(16, 4), local=DeltaTile(32, 4),
        gradients=DeltaTile(16, 4), values=DeltaTile(32, 4), queries=DeltaTile(16, 4), corrections=DeltaTile(16, 4),
        keys=DeltaTile(16, 4), products=DeltaTile(16, 4),
    ),
    DeltaTiles(
        ("cdna",), width=256, itemsize=4, chunk=32,
        prepare=DeltaTile(32, 4), states=DeltaTile(16, 4), outputs=DeltaTile(16, 4), local=DeltaTile(32, 4),
        gradients=DeltaTile(16, 4), values=DeltaTile(32, 4), queries=DeltaTile(16, 8), corrections=DeltaTile(16, 4),
        keys=DeltaTile(16, 8), products=DeltaTile(16, 8),
    ),
    DeltaTiles(
        ("interpreter",), width=256, itemsize=4, chunk=64,  # the inverse of a chunk of Hopper
        prepare=DeltaTile(16, 4), states=DeltaTile(16, 4), outputs=DeltaTile(16, 4), local=DeltaTile(16, 4),
        gradients=DeltaTile(16, 4), values=DeltaTile(16, 4), queries=DeltaTile(16, 4), corrections=DeltaTile(16, 4),
        keys=DeltaTile(16, 4), products=DeltaTile(16, 4),
    ),
)  # fmt: skip


def padded(width: int, chip: Chip) -> int:
    """Return the width of a tile for heads of `width` columns."""
    least = MIN_WIDTH_HOPPER if WARPGROUPS.holds(chip) else MIN_WIDTH
    return max(least, triton.next_power_of_2(width))


def product_chips(chip: Chip) -> Chips:
    """Return the kind of chips whose tiles of products fit."""
    if chip.vendor == "amd":
        return "cdna" if chip.warp_size == 64 else "rdna"
    if WARPGROUPS.holds(chip):
        return "hopper"
    return chip.vendor


def delta_tiles(width: int, itemsize: int, chip: Chip) -> DeltaTiles | None:
    """Return the launches for heads of at most this width, None where no tile fits the chip."""
    chips = product_chips(chip)
    fitting = (t for t in DELTA_TILES if chips in t.chips and width <= t.width and itemsize == t.itemsize)
    return next(fitting, None)


def delta_options(chip: Chip) -> dict[str, int]:
    """Return options of the compiler."""
    # Matrix instructions of 32 x 32 leave a product of chunks to one of the warps, the others compute it, too; their
    # rows need a mask each, which spill scalar registers.
    return {"matrix_instr_nonkdim": 16} if product_chips(chip) == "cdna" else {}


def runs_delta_kernels(query: torch.Tensor, width: int) -> bool:
    """Return whether kernels compute the gated delta rule of heads of at most this width; else the reference does."""
    return runs_triton(query) and delta_tiles(width, query.dtype.itemsize, chip_of(query.device)) is not None


def inverse_precision(itemsize: int, chip: Chip) -> str:
    """Return the precision of the products of the inverse, which is rounded to the tensors' dtype afterwards."""
    # tf32 has the 10 bits of fp16 and more than bf16; AMD's compiler has it on few GPUs, and its fp32 products are fast
    return "tf32" if itemsize == 2 and chip.vendor == "nvidia" else "ieee"


class ConvTile(NamedTuple):
    """Launch of the convolution. thread_cols: neighbouring channels that a thread reads at once."""

    run: int  # tokens of a program, at most
    cols: int  # channels of a program
    thread_cols: int

    def run_of(self, n_tokens: int, n_channels: int, chip: Chip) -> int:
        """Return the tokens of a program, fewer where few programs would leave processors waiting."""
        programs = CONV_PROGRAMS * chip.processors
        run = self.run
        while run > CONV_SHORTEST and -(-n_tokens // run) * -(-n_channels // self.cols) < programs:
            run //= 2
        return run

    def constants(self, chip: Chip) -> dict[str, int | bool]:
        """Return the constants of the kernel."""
        # as many warps of 64 threads, which then read half as many channels: with all, some forms spill
        warps = max(1, self.cols // self.thread_cols // 32)
        return {"COLS": self.cols, "num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


# Short rows get shorter runs. With both numbers forward and backward of 2,048 tokens took 0.073 ms on an H200; other
# numbers were not compared in a quiet run.
CONV_PROGRAMS = 4  # of a processor, at least
CONV_SHORTEST = 32  # tokens

# The fastest of those measured with bf16, forward on an H200, backward on an H100.
CONV_FORWARD = ConvTile(run=64, cols=1024, thread_cols=4)
CONV_BACKWARD = ConvTile(run=256, cols=512, thread_cols=4)  # the three tokens after a run, read again, cost 1 %


# Steps of generation.
UPDATE_CHANNELS = 256  # of a program that takes one token
STEP_COLS = 32  # columns of the state in a program of the recurrent step: 128 keys of them are 32 registers of a thread
