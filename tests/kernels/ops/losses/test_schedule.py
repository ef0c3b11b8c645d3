"""Which schedule linear_cross_entropy takes for which sizes, and what it holds: pure numbers, no tensors."""

from __future__ import annotations

import pytest
import torch
from ligertune_kernels import schedule_of
from ligertune_kernels.ops.losses._schedule import Chunks, chunks_of, rest_stride

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
        (LLAMA, "fast: 2048 rows at a time, 7 x 8448 columns of logits in dW's memory; 1.05 GiB extra memory"),
        (QWEN, "fast: 4096 rows at a time, 1 x 70912 columns of logits in dW's memory; 0.62 GiB extra memory"),
        (SMALL_LLAMA, "fast: 2048 rows at a time, dW in 8 flushes, summed in fp32; 0.98 GiB extra memory"),
        (GEMMA, "fast: 4096 rows at a time, 2 x 69632 columns of logits in dW's memory; 0.89 GiB extra memory"),
        ((512, 4096, 128256), "fast: 512 rows at a time, dW in one product; 0.12 GiB extra memory"),
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
    full = schedule_of(*sizes, torch.bfloat16, free_bytes=int(1.2 * GIB))
    assert few == full and few.plan == "lean" and not few.sums_wide(torch.bfloat16)
    assert few.extra_bytes <= held * GIB and few.slot >= 2048


@pytest.mark.parametrize(
    "sizes, groups, columns",
    [
        pytest.param(LLAMA, 1, 42496, id="a third: a slot of 2048 rows wants half of dW's memory"),
        pytest.param(QWEN, 4, 27136, id="seven tenths"),
        pytest.param(SMALL_LLAMA, 0, 0, id="dW's memory is full with a slot"),
        pytest.param(GEMMA, 2, 63744, id="half"),
    ],
)
def test_lean_keeps_the_columns_that_dws_memory_has_room_for(sizes, groups, columns) -> None:
    n_rows, hidden_size, vocab_size = sizes
    lean = schedule_of(*sizes, torch.bfloat16, chunk_bytes=GIB >> 4)
    assert (lean.groups, lean.kept) == (groups, columns)
    slot = lean.slot * rest_stride(vocab_size - groups * columns)
    assert slot + groups * n_rows * columns <= vocab_size * hidden_size
    apart = schedule_of(*sizes, torch.bfloat16, chunk_bytes=GIB >> 4, wide_products=False)
    assert apart.plan == "lean" and apart.groups == 0, "no groups where dX cannot be summed over them"


def test_memory_that_suffices_changes_nothing() -> None:
    assert schedule_of(*LLAMA, torch.bfloat16, free_bytes=3 * GIB) == schedule_of(*LLAMA, torch.bfloat16)


@pytest.mark.parametrize("sizes", [LLAMA, QWEN, SMALL_LLAMA, GEMMA])
def test_a_frozen_weight_needs_a_slot_of_half_a_gigabyte_at_most(sizes) -> None:
    n_rows, hidden_size, _ = sizes
    schedule = schedule_of(*sizes, torch.bfloat16, needs_dw=False)
    assert schedule.flushes == 0 and schedule.slot >= 640
    assert schedule.extra_bytes + n_rows * hidden_size * 2 <= 0.5 * GIB


@pytest.mark.parametrize("n_rows", [1, 300, 1000, 4097, 5000, 8192, 12000])
@pytest.mark.parametrize("hidden_size", [896, 2048, 4096, 8192])
@pytest.mark.parametrize("vocab_size", [32000, 50257, 128256, 256000])
@pytest.mark.parametrize("chunk_bytes", [GIB >> 3, GIB])
def test_groups_leave_dw_room_to_be_written(n_rows, hidden_size, vocab_size, chunk_bytes) -> None:
    """When dW of a group is written, the groups after it are not gradients yet that were used."""
    schedule = schedule_of(n_rows, hidden_size, vocab_size, torch.bfloat16, chunk_bytes=chunk_bytes)
    sums_of_dx, wider_dw = 4 * min(n_rows, 2048) * hidden_size, 2 * vocab_size * hidden_size
    assert schedule.extra_bytes <= max(chunk_bytes + max(sums_of_dx, wider_dw), 2 * wider_dw)
    width = schedule.kept if schedule.plan == "lean" else schedule.slab
    for i in range(schedule.groups):
        begins = vocab_size * hidden_size - (schedule.groups - i) * n_rows * width
        assert (i + 1) * width * hidden_size <= begins
    if schedule.groups:
        rest = vocab_size - schedule.groups * width
        assert schedule.flushes == 1 and rest >= 32768
        if schedule.plan == "lean":  # a slot of the others lies before the groups
            assert schedule.slot * rest_stride(rest) <= vocab_size * hidden_size - schedule.groups * n_rows * width


@pytest.mark.parametrize("sizes", [LLAMA, QWEN, SMALL_LLAMA, GEMMA])
@pytest.mark.parametrize("wide_products", [True, False], ids=["cuBLAS", "no product adds to wider sums"])
def test_no_element_of_dw_is_rounded_twice(sizes, wide_products) -> None:
    schedule = schedule_of(*sizes, torch.bfloat16, wide_products=wide_products)
    assert schedule.flushes == 1 or (wide_products and schedule.sums_wide(torch.bfloat16))


@pytest.mark.parametrize(
    "dtype, sums_wide",
    [
        pytest.param(torch.float16, True, id="float16: undivided sums could overflow"),
        pytest.param(torch.bfloat16, True, id="bfloat16: two flushes would be rounded twice"),
        pytest.param(torch.float32, False, id="float32 is wide"),
    ],
)
def test_several_flushes_are_summed_in_fp32(dtype, sums_wide) -> None:
    schedule = schedule_of(65536, 512, 128256, dtype, chunk_bytes=4096 * 128256 * dtype.itemsize)
    assert schedule.flushes > 1 and schedule.sums_wide(dtype) is sums_wide


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_chunk_bytes_that_hold_next_to_nothing_are_kept_to(chunk_bytes) -> None:
    """Slabs of all rows would hold more than one row a time does."""
    assert schedule_of(300, 64, 1000, torch.float32, chunk_bytes=chunk_bytes).extra_bytes <= max(4000, chunk_bytes)
