"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import Done, run


@pytest.fixture
def ligertune(tmp_path):
    """`ligertune("train", ...)` in a process of its own, in an empty folder."""

    def call(*arguments: str) -> Done:
        return run([sys.executable, "-m", "ligertune", *map(str, arguments)], cwd=tmp_path)

    return call


@pytest.fixture
def recipe(quickstart) -> Path:
    """The quickstart's recipe."""
    return quickstart / "stories260k.yaml"
