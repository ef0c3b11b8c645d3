"""Kernels are compiled in the first training step; batches of another length do not wait for the compiler."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: there is nothing to compile without it")

import ligertune_kernels as kernels
from ligertune_kernels import launcher
from ligertune_kernels.ops.losses.tiles import schedule_of
from support.kernels.pretend_gpu import TARGETS, compile_for

pytestmark = pytest.mark.skipif(launcher.INTERPRETED, reason="the interpreter compiles nothing")

HIDDEN, VOCAB = 2048, 128256
# rows of a batch: all logits in one buffer, some in dW's memory, several flushes
LENGTHS = (4112, 4000, 4448, 5200, 8192, 300, 16)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def loss(n_rows: int, **options: float) -> None:
    labels = meta(n_rows, dtype=torch.int64)
    kernels.linear_cross_entropy(meta(n_rows, HIDDEN), meta(VOCAB, HIDDEN), labels, **options).backward()


def norm(n_rows: int) -> None:
    kernels.rms_norm(meta(n_rows, HIDDEN), meta(HIDDEN)).backward(meta(n_rows, HIDDEN))


def gate(n_rows: int) -> None:
    kernels.swiglu(meta(n_rows, 4 * HIDDEN), meta(n_rows, 4 * HIDDEN)).backward(meta(n_rows, 4 * HIDDEN))


def attention(n_rows: int) -> None:
    documents = kernels.Documents(*(meta(n_rows, dtype=torch.int32) for _ in range(2)))
    query, key, value = meta(n_rows, 32, 64), meta(n_rows, 8, 64), meta(n_rows, 8, 64)
    kernels.document_attention(query, key, value, documents).backward(meta(n_rows, 32, 64))


def rope(n_rows: int) -> None:
    tables = (torch.empty(1, n_rows, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    query, key = meta(1, 32, n_rows, 64), meta(1, 8, n_rows, 64)
    torch.autograd.backward(kernels.apply_rope(query, key, *tables), (torch.empty_like(query), torch.empty_like(key)))


def mixture(n_rows: int, products: str | None = None) -> None:
    """Eight of four experts: pairs are not compared with each other."""
    index = torch.empty(n_rows, 8, dtype=torch.int64, device="meta")
    weights = meta(4, 2 * 768, HIDDEN), meta(4, HIDDEN, 768)
    kernels.experts(meta(n_rows, HIDDEN), index, meta(n_rows, 8), *weights, products=products).backward(
        meta(n_rows, HIDDEN)
    )


def compiled_by(step: Callable[[int], None], lengths: tuple[int, ...]) -> list[str]:
    def run() -> None:
        for n_rows in lengths:
            step(n_rows)

    return sorted(f"{kernel.kernel} {kernel.assembly}" for kernel in compile_for(TARGETS["sm90"], run))


@pytest.mark.parametrize(
    "step",
    [loss, partial(loss, softcap=30.0, label_smoothing=0.1), gate, attention, rope],
    ids=["loss", "loss with terms", "gate", "attention", "rope"],
)
def test_other_lengths_compile_nothing_after_the_first(step):
    assert compiled_by(step, LENGTHS) == compiled_by(step, LENGTHS[:1])


def test_norms_compile_one_kernel_more_for_batches_of_few_rows():
    """Their backward adds up the results of its programs: few programs, or any larger number."""
    long = tuple(n for n in LENGTHS if n >= 300)
    assert compiled_by(norm, long) == compiled_by(norm, long[:1])
    assert len(compiled_by(norm, LENGTHS)) <= len(compiled_by(norm, long)) + 1


@pytest.mark.parametrize("products", ["grouped_mm", "triton"])
def test_experts_compile_other_products_only_for_few_rows(products):
    """One tile for more than 48 rows per expert."""
    step, many = partial(mixture, products=products), tuple(n for n in LENGTHS if 8 * n > 4 * 48)
    assert len(many) == len(LENGTHS) - 1
    assert compiled_by(step, many) == compiled_by(step, many[:1])


def test_these_lengths_take_different_schedules():
    found = [schedule_of(n, HIDDEN, VOCAB, torch.bfloat16) for n in LENGTHS]
    assert {(schedule.groups > 0, schedule.flushes > 1) for schedule in found} == {
        (False, False), (True, False), (False, True)}  # fmt: skip
    first = schedule_of(LENGTHS[0], HIDDEN, VOCAB, torch.bfloat16)
    assert not first.groups  # so that the first step launches one form only
