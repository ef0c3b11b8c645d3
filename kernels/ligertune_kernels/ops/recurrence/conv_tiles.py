"""Tiles of causal_conv1d: every number that was tuned, with its reason."""

from __future__ import annotations

from ligertune_kernels.chips import Chip, launch_options

FORWARD_ROWS = 32  # tokens of a tile: the three before it, which it reads again, cost a tenth more of the L2 cache
FORWARD_COLS = 128  # channels: 256 bytes of a token
RUN = 128  # tokens of a program of the backward: the three after it, read again, cost 2 %
BACKWARD_COLS = 256  # channels: 8 for each thread of a warp, 16 bytes
UPDATE_CHANNELS = 256  # of a program that takes one token
STEP_COLS = 32  # columns of the state in a program of the recurrent step: 128 keys of them are 32 registers of a thread
UNROLLED = 4  # tokens whose loads a program of the backward has under way


def forward_constants(chip: Chip) -> dict[str, int | bool]:
    """Return the constants of the forward kernel."""
    sizes = {"ROWS": FORWARD_ROWS, "COLS": FORWARD_COLS}
    return sizes | launch_options(FORWARD_ROWS * FORWARD_COLS, chip)


def backward_constants(chip: Chip) -> dict[str, int | bool]:
    """Return the constants of the backward kernel."""
    sizes = {"UNROLLED": UNROLLED, "COLS": BACKWARD_COLS}
    return sizes | {"num_warps": BACKWARD_COLS // 8 // chip.warp_size or 1, "num_stages": 1, "enable_fp_fusion": True}
