"""Run tests again under Triton's interpreter, in a process by itself: kernels read the switch when decorated."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from ligertune_kernels import backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_TRITON = backend(DEVICE) == "triton"


def rerun_interpreted(*arguments: str) -> None:
    """Fail if a test fails there. arguments: those of pytest, files or folders first."""
    if RUNS_TRITON or importlib.util.find_spec("triton") is None:
        pytest.skip("the kernels run here already" if RUNS_TRITON else "needs triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LIGERTUNE_EXPECT_BACKEND": "triton"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
