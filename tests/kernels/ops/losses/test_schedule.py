"""Schedules of linear_cross_entropy for many sizes, and their memory: plain numbers, no tensors."""

import pytest
import torch
from ligertune_kernels import schedule_of
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.ops.losses.tiles import ChunkProducts, Chunks, chunks_of, rest_stride

pytestmark = pytest.mark.skipif(INTERPRETED, reason="runs no kernel")

GIB = 1 << 30
LLAMA = (8192, 4096, 128256)
# (rows, hidden size, vocabulary), default schedule, GiB of the lean schedule, its groups and their columns
HEADS = pytest.mark.parametrize(
    "sizes, default, lean_gib, groups, columns",
    [
        # lean: 0.06 GiB less than liger-kernel's peak of 1.10. A slot of 2048 rows takes half of dW's memory.
        (LLAMA, "2048 rows at a time, 7 x 8448 columns; 1.05 GiB", 0.04, 1, 42496),
        ((4096, 3584, 152064), "4096 rows at a time, 1 x 70912 columns; 0.62 GiB", 0.04, 4, 27136),
        # lean: 0.12 GiB less than liger-kernel's peak of 0.67. One slot fills dW's memory.
        ((16384, 2048, 128256), "2048 rows at a time, dW in 8 flushes, summed in fp32; 0.98 GiB", 0.07, 0, 0),
        ((4096, 3072, 256000), "4096 rows at a time, 2 x 69632 columns; 0.89 GiB", 0.04, 2, 63744),
    ],
    ids=["Llama-3-8B", "Qwen2.5-7B", "Llama-3.2-1B", "Gemma"],
)  # fmt: skip


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
    assert chunks_of(5, 1000, 1, 2048, needs_dw=True) == Chunks(1, 1, 5), "a row that exceeds chunk_bytes"


@HEADS
def test_fast_by_default_lean_with_little_memory(sizes, default, lean_gib, groups, columns) -> None:
    n_rows, hidden_size, vocab_size = sizes
    said = str(schedule_of(*sizes, torch.bfloat16)).replace(" of logits in dW's memory", "")
    assert said == f"fast: {default} extra memory"
    few = schedule_of(*sizes, torch.bfloat16, chunk_bytes=GIB >> 4)
    full = schedule_of(*sizes, torch.bfloat16, free_bytes=int(1.2 * GIB))
    assert few == full and few.plan == "lean" and not few.sums_wide(torch.bfloat16)
    assert few.extra_bytes <= lean_gib * GIB and few.slot >= 2048 and (few.groups, few.kept) == (groups, columns)
    slot = few.slot * rest_stride(vocab_size - groups * columns)
    assert slot + groups * n_rows * columns <= vocab_size * hidden_size, "kept columns and a slot fit in dW's memory"
    apart = schedule_of(*sizes, torch.bfloat16, chunk_bytes=GIB >> 4, products=ChunkProducts(wide_products=False))
    assert apart.plan == "lean" and apart.groups == 0, "no groups where dX cannot be summed over them"


def test_enough_memory_changes_nothing_and_few_rows_take_one_product() -> None:
    assert schedule_of(*LLAMA, torch.bfloat16, free_bytes=3 * GIB) == schedule_of(*LLAMA, torch.bfloat16)
    small = schedule_of(512, 4096, 128256, torch.bfloat16)
    assert str(small) == "fast: 512 rows at a time, dW in one product; 0.12 GiB extra memory"


@HEADS
def test_frozen_weights_need_half_a_gigabyte_and_dw_is_rounded_once(sizes, default, lean_gib, groups, columns) -> None:
    frozen = schedule_of(*sizes, torch.bfloat16, needs_dw=False)
    assert frozen.flushes == 0 and frozen.slot >= 640
    assert frozen.extra_bytes + sizes[0] * sizes[1] * 2 <= 0.5 * GIB
    for wide_products in (True, False):
        schedule = schedule_of(*sizes, torch.bfloat16, products=ChunkProducts(wide_products=wide_products))
        assert schedule.flushes == 1 or (wide_products and schedule.sums_wide(torch.bfloat16))


@pytest.mark.parametrize("n_rows", [1, 300, 1000, 4097, 5000, 8192, 12000])
@pytest.mark.parametrize("hidden_size", [896, 2048, 4096, 8192])
@pytest.mark.parametrize("vocab_size", [32000, 50257, 128256, 256000])
@pytest.mark.parametrize("chunk_bytes", [GIB >> 3, GIB])
def test_groups_leave_dw_room_to_be_written(n_rows, hidden_size, vocab_size, chunk_bytes) -> None:
    """dW of a group must not overwrite groups that are still to be used."""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_several_flushes_are_summed_in_fp32(dtype) -> None:
    """Otherwise sums in float16, not divided yet, could overflow, and two flushes in bfloat16 would round twice."""
    schedule = schedule_of(65536, 512, 128256, dtype, chunk_bytes=4096 * 128256 * dtype.itemsize)
    assert schedule.flushes > 1 and schedule.sums_wide(dtype) is (dtype is not torch.float32)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_tiny_chunk_bytes_are_respected(chunk_bytes) -> None:
    """Slabs of all rows would take more than one row at a time does."""
    assert schedule_of(300, 64, 1000, torch.float32, chunk_bytes=chunk_bytes).extra_bytes <= max(4000, chunk_bytes)
