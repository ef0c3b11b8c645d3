"""Run the tests of ops/ in a separate process, with the Triton kernels interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

OPS = Path(__file__).parent / "ops"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run on the GPU")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(OPS)],
        env={**os.environ, "TRITON_INTERPRET": "1", "LIGERTUNE_EXPECT_BACKEND": "triton"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
