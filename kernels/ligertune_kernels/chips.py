"""Chips: the facts of a GPU that launches depend on, and the warps of a program by the size of its tile.

Each family of ops decides with these facts in its tiles.py, where every number is a named row with its reason. "Spills"
means that the ahead-of-time compiler (tests/kernels/test_ahead_of_time.py) moves registers to memory; "measured" names
the GPU. Tables replace run-time autotuning, which costs start-up time and determinism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_THREADS = 1024  # per program on every GPU so far: 16 warps of 64 on CDNA, 32 warps of 32 on RDNA and NVIDIA

ROW_TILE_GROUP = 8  # row tiles of a product that reuse the same columns of a weight from the L2 cache


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
    """A choice that a family's tiles.py makes on some chips only."""

    archs: tuple[str, ...]  # prefixes of Chip.arch; "cpu" is the interpreter
    reason: str

    def holds(self, chip: Chip) -> bool:
        """Return whether the choice is made on this chip."""
        return chip.arch.startswith(self.archs)
