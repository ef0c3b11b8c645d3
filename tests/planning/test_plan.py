"""Precision and cadence of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.optimization import Cadence
from ligertune.planning.precision import choose_precision

GPU = Machine("nvidia", "cuda", "NVIDIA H100 80GB HBM3", "sm90", 1, 80 << 30, True, 989e12, 3.35e12, 1, "2.11")
OLD_GPU = replace(GPU, name="Tesla V100", arch="sm70", has_bfloat16=False, peak_flops=None)
CPU = replace(GPU, vendor="cpu", device="cpu", name="CPU", arch="x86_64", peak_flops=None)


@pytest.mark.parametrize(
    ("dtype", "machine", "weights", "autocast"),
    [
        ("auto", GPU, "bfloat16", "no"),
        ("auto", OLD_GPU, "float32", "fp16"),
        ("auto", CPU, "float32", "no"),
        ("bfloat16", CPU, "bfloat16", "no"),
        ("float16", GPU, "float32", "fp16"),
        ("float32", GPU, "float32", "no"),
    ],
)
def test_dtype_on_a_machine(dtype, machine, weights, autocast):
    precision = choose_precision(dtype, machine)
    assert (precision.weights, precision.autocast) == (weights, autocast)


@pytest.mark.parametrize(("dtype", "machine"), [("bfloat16", OLD_GPU), ("float16", CPU)])
def test_an_unsupported_dtype_is_refused_with_a_hint(dtype, machine):
    with pytest.raises(UserError, match=f"model.dtype: {dtype}") as caught:
        choose_precision(dtype, machine)
    assert "Write model.dtype" in caught.value.hint


def test_an_epoch_cadence_is_due_after_the_step_in_which_an_epoch_ends():
    cadence = Cadence("epoch", every=0)
    due = [s for s in range(1, 7) if cadence.due(s, rows_per_epoch=21, global_batch_size=8)]
    assert due == [3, 6]  # 24 >= 21, 48 >= 42
