"""Tiles of the divergences: every number that was tuned, with its reason, and the chunks of linear_jsd."""

from __future__ import annotations

import torch

from ligertune_kernels.chips import Chip
from ligertune_kernels.ops.losses.tiles import SLOT_ROWS_TORCH, Chunks, chunks_of

DIVERGENCE_BLOCK = 2048  # columns of both rows per program
# Columns of both rows per step of `jsd_row_pass`, by the bytes of an element: eight per thread. fp32 spills on more
# than 8 warps.
ROW_BLOCKS = {2: 8192, 4: 2048}

JSD_CHUNK_BYTES = 1 << 30  # of both buffers: 2048 rows of a 128k vocabulary in bf16, so 4096 tokens in two flushes
JSD_SLOT_ROWS = 1024  # cuBLAS reaches 763 TFLOP/s there on an H100 and gains 2 % with twice as many
# A dW of at most this many elements is summed in fp32 and rounded at the end: 128 tiles of 128 x 256, about one per
# processor of an H100. For few results cuBLAS may split the sums, and it adds the parts of bfloat16 in bfloat16
# (torch's allow_bf16_reduced_precision_reduction, on by default): 131 x 24 of 11 aligned rows had an error of 3.6e-3
# where one rounding has 2.0e-3.
SMALL_WEIGHT = 1 << 22


def takes_fast_log(chip: Chip) -> bool:
    """Return whether the approximate log2 of PTX is used: tl.log2 takes 18 instructions on NVIDIA."""
    return chip.vendor == "nvidia"


def jsd_chunks(n_rows: int, row_bytes: int, chunk_bytes: int, *, on_gpu: bool, needs_dw: bool) -> Chunks:
    slot_rows = JSD_SLOT_ROWS if on_gpu else SLOT_ROWS_TORCH
    return chunks_of(n_rows, row_bytes, chunk_bytes, slot_rows, needs_dw=needs_dw)


def jsd_sums_wide(dtype: torch.dtype, flushes: int, weight_elements: int) -> bool:
    """Return whether dW is accumulated in fp32."""
    return dtype is torch.float16 or (dtype is torch.bfloat16 and (flushes > 2 or weight_elements <= SMALL_WEIGHT))
