"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest
from support.command_line import RECIPE, run_here


@pytest.fixture
def ligertune(tmp_path):
    """`ligertune("train", ...)` in this process, in an empty folder."""
    return lambda *arguments: run_here(*arguments, cwd=tmp_path)


@pytest.fixture
def recipe() -> Path:
    """The quickstart's recipe."""
    return RECIPE
