"""Which schedule linear_cross_entropy takes for which sizes, and what it holds: pure numbers, no tensors."""

from __future__ import annotations

import pytest
import torch
from ligertune_kernels import schedule_of
from ligertune_kernels.ops.schedule import Chunks, chunks_of

GIB = 1 << 30
LLAMA, QWEN, SMALL_LLAMA, GEMMA = (
    (8192, 4096, 128256),
    (4096, 3584, 152064),
    (16384, 2048, 128256),
    (4096, 3072, 256000),
)


@pytest.mark.parametrize(
    "n_rows, needs_dw, expected",
    [
        pytest.param(8192, True, Chunks(2048, 4096, 2), id="Llama-3's head, 8192 tokens: two flushes"),
        pytest.param(4186, True, Chunks(1152, 2176, 2), id="just over what fits: two even halves"),
        pytest.param(100, True, Chunks(100, 100, 1), id="fewer than a tile"),
        pytest.param(20000, True, Chunks(2048, 4096, 5), id="many flushes"),
        pytest.param(8192, False, Chunks(1024, 1024, 0), id="frozen weight: one slot"),
    ],
)
def test_chunks_are_even_and_fit(n_rows, needs_dw, expected) -> None:
    assert chunks_of(n_rows, 128256 * 2, GIB, 2048 if needs_dw else 1024, needs_dw=needs_dw) == expected


def test_a_row_that_exceeds_chunk_bytes_is_taken_alone() -> None:
    assert chunks_of(5, 1000, 1, 2048, needs_dw=True) == Chunks(1, 1, 5)


@pytest.mark.parametrize(
    "sizes, said",
    [
        (LLAMA, "fast: 2048 rows at a time, dW in 2 flushes; 0.98 GiB beside the gradients"),
        (QWEN, "fast: 2048 rows at a time, dW in 2 flushes; 0.58 GiB beside the gradients"),
        (SMALL_LLAMA, "fast: 2048 rows at a time, dW in 8 flushes, summed in fp32; 0.98 GiB beside the gradients"),
        (GEMMA, "fast: 2048 rows at a time, dW in 2 flushes; 0.98 GiB beside the gradients"),
        ((512, 4096, 128256), "fast: 512 rows at a time, dW in one product; 0.12 GiB beside the gradients"),
    ],
)
def test_fast_by_default(sizes, said) -> None:
    assert str(schedule_of(*sizes, torch.bfloat16)) == said


@pytest.mark.parametrize(
    "sizes, held",
    [
        pytest.param(LLAMA, 0.04, id="0.06 GiB are left under liger-kernel's peak of 1.10"),
        pytest.param(QWEN, 0.04, id="0.04 under 1.08"),
        pytest.param(SMALL_LLAMA, 0.07, id="0.12 under 0.67"),
        pytest.param(GEMMA, 0.04, id="Gemma"),
    ],
)
def test_lean_where_chunk_bytes_are_few_or_memory_is(sizes, held) -> None:
    few = schedule_of(*sizes, torch.bfloat16, chunk_bytes=GIB >> 4)
    full = schedule_of(*sizes, torch.bfloat16, free_bytes=int(1.5 * GIB))
    assert few == full and few.plan == "lean" and not few.sums_wide
    assert few.extra_bytes <= held * GIB and few.slot >= 2048


def test_memory_that_suffices_changes_nothing() -> None:
    assert schedule_of(*LLAMA, torch.bfloat16, free_bytes=3 * GIB) == schedule_of(*LLAMA, torch.bfloat16)


@pytest.mark.parametrize("sizes", [LLAMA, QWEN, SMALL_LLAMA, GEMMA])
def test_a_frozen_weight_needs_a_slot_of_half_a_gigabyte_at_most(sizes) -> None:
    n_rows, hidden_size, _ = sizes
    schedule = schedule_of(*sizes, torch.bfloat16, needs_dw=False)
    assert schedule.flushes == 0 and schedule.slot >= 640
    assert schedule.extra_bytes + n_rows * hidden_size * 2 <= 0.5 * GIB


@pytest.mark.parametrize(
    "dtype, sums_wide",
    [
        pytest.param(torch.float16, True, id="float16: undivided sums could overflow"),
        pytest.param(torch.bfloat16, False, id="bfloat16: rounded twice"),
        pytest.param(torch.float32, False, id="float32 is wide"),
    ],
)
def test_dw_of_two_flushes_is_summed_wide_in_float16_only(dtype, sums_wide) -> None:
    schedule = schedule_of(8192, 4096, 128256, dtype, chunk_bytes=4096 * 128256 * dtype.itemsize)
    assert schedule.flushes == 2 and schedule.sums_wide is sums_wide


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_chunk_bytes_that_hold_next_to_nothing_are_kept_to(chunk_bytes) -> None:
    """Slabs of all rows would hold more than one row a time does."""
    assert schedule_of(300, 64, 1000, torch.float32, chunk_bytes=chunk_bytes).extra_bytes <= max(4000, chunk_bytes)
