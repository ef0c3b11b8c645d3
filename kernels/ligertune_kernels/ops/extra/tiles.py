"""Tiles of the experimental ops: every number that was tuned, with its reason."""

from __future__ import annotations

from typing import NamedTuple

from ligertune_kernels.chips import Chip

# adamw_step
STEP_BLOCK = 2048  # elements per program: 8 per thread, of four tensors

# seeded_dropout
DROPOUT_BLOCK = 2048  # elements per program: 512 counters of Philox, which give four numbers each

# sample_tokens
# Logits that a program holds: 32 a thread. The hash and two logarithms of each need registers too.
SAMPLE_BLOCK = 4096

# embedding
COPY_TILE = 4096  # elements that a forward program copies
SORTED_CHUNK = 16  # sorted indices per backward program, processed one by one
GRADIENT_BLOCK = 1024  # columns per backward program

# int2_int8_matmul
# Bytes of a packed row per program; an H200 takes 10.4 us for 4096 x 4096, 15.2 with 2048, 24 with 4096.
UNPACK_BLOCK = 1024
UNPACK_WARPS = 4
SCALED_BLOCK = 2048  # columns of the product per program


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
