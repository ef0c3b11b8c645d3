"""Backend of this test run: kernels or references."""

from __future__ import annotations

import os

import torch
from ligertune_kernels import backend, runs_triton


def test_the_backend_is_the_expected_one(device: torch.device) -> None:
    expected = "triton" if device.type == "cuda" else os.environ.get("LIGERTUNE_EXPECT_BACKEND", "reference")
    assert backend(device) == backend(str(device)) == expected
    assert runs_triton(torch.zeros(1, device=device)) == (expected == "triton")


def test_float64_runs_the_reference_everywhere(device: torch.device) -> None:
    assert not runs_triton(torch.zeros(1, device=device, dtype=torch.float64))


def test_meta_tensors_run_the_reference() -> None:
    assert backend("meta") == "reference"
