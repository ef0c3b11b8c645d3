"""The whole package is typed: mypy's strict rules, as `pyproject.toml` sets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow  # half a minute of a core, for what no run does: CONTRIBUTING.md names the command
def test_mypy_finds_no_fault():
    # without a cache, which takes a tenth of the time to write
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--cache-dir", os.devnull]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
