"""When document_attention runs its kernels for Hopper; tests/kernels/test_at_full_size_long_documents.py runs them."""

from dataclasses import replace

import pytest
import torch
from ligertune_kernels import document_attention_memory
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import TensorDescriptor
from ligertune_kernels.ops.attention.tiles import HOPPER_WIDTHS, runs_hopper_kernels

HOPPER = Chip("nvidia", "sm90", 32, 132, 50 << 20, 232448)
BF16 = torch.bfloat16


def heads(n_tokens: int, width: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Return (T, 8, D) and twice (T, 2, D)."""
    return [torch.empty(n_tokens, n, width, dtype=dtype, device="meta") for n in (8, 2, 2)]


@pytest.mark.skipif(TensorDescriptor is None, reason="needs triton")
@pytest.mark.parametrize("width", HOPPER_WIDTHS)
def test_long_documents_run_them(width) -> None:
    long = HOPPER_WIDTHS[width].long
    assert runs_hopper_kernels(*heads(2 * long, width), HOPPER, 2)
    assert runs_hopper_kernels(*heads(2 * long, width, torch.float16), HOPPER, 2)
    assert not runs_hopper_kernels(*heads(2 * long - 1, width), HOPPER, 2)


@pytest.mark.parametrize(
    "width, dtype, documents, arch",
    [(128, BF16, None, "sm90"), (128, torch.float32, 1, "sm90"), (96, BF16, 1, "sm90"), (128, BF16, 1, "sm100")],
    ids=["unknown documents", "float32", "another width", "another chip"],
)
def test_elsewhere_the_other_kernels_run(width, dtype, documents, arch) -> None:
    assert not runs_hopper_kernels(*heads(8192, width, dtype), replace(HOPPER, arch=arch), documents)


def test_heads_that_are_apart_run_the_other_kernels() -> None:
    """Tensor copies take rows of all heads: models that store (H, T, D) have none."""
    query, _, value = heads(8192, 128)
    apart = torch.empty(2, 8192, 128, dtype=BF16, device="meta").transpose(0, 1)
    assert not runs_hopper_kernels(query, apart, value, HOPPER, 1)


def test_key_heads_whose_sums_are_large_run_the_other_kernels() -> None:
    """The fp32 sums of a key head may take 3 GiB: of 1.5 million tokens of 4 heads of 128 columns, which share it."""
    assert runs_hopper_kernels(*heads(3 << 19, 128), HOPPER, 1)
    assert not runs_hopper_kernels(*heads((3 << 19) + 1, 128), HOPPER, 1)
    assert runs_hopper_kernels(*heads((3 << 19) + 1, 256), HOPPER, 1)


def test_a_launch_has_the_sums_of_some_key_heads() -> None:
    assert document_attention_memory(4000, 32, 8, 128) == 32 * 4096 * 128 * 4
    assert document_attention_memory(1 << 17, 8, 2, 128) == 1 << 29  # of both key heads
    assert document_attention_memory(3 << 16, 8, 2, 128) == 3 << 27  # of one
    assert document_attention_memory(3 << 19, 8, 2, 128) == 3 << 30
    assert document_attention_memory(4000, 16, 4, 256) == 0
    assert document_attention_memory((3 << 19) + 1, 8, 2, 128) == document_attention_memory(4000, 32, 8, 96) == 0
