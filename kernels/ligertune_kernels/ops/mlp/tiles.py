"""Tiles of the gated activations: every number that was tuned, with its reason."""

from __future__ import annotations

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.launcher import triton

GATED_BLOCK = 2048  # columns per program: 8 per thread in the backward, 16 in the forward


def forward_tile(n_cols: int, chip: Chip) -> dict[str, int | bool]:
    """Return block and launch of the forward."""
    block = min(GATED_BLOCK, triton.next_power_of_2(n_cols))
    # Half the backward's warps: it holds fewer values per column.
    return {"BLOCK": block, **launch_options(block // 2, chip)}


def backward_tile(n_cols: int, chip: Chip, *, is_light: bool) -> dict[str, int | bool]:
    """Return block and launch of the backward. is_light: the activation is relu or its square."""
    block = min(GATED_BLOCK, triton.next_power_of_2(n_cols))
    # With eight columns per thread the compiler fits the light kernel of relu into 32 registers, and spills on sm80.
    return {"BLOCK": block, **launch_options(GATED_BLOCK if is_light else block, chip)}
