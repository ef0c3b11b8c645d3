"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.command_line import RECIPE, run_here


@pytest.fixture
def ligertune(tmp_path):
    """`ligertune("train", ...)` in this process, in an empty folder."""
    return lambda *arguments: run_here(*arguments, cwd=tmp_path)


@pytest.fixture
def recipe() -> Path:
    """The quickstart's recipe."""
    return RECIPE


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Each rank computes in one thread. PiSSA's singular vectors, which are ill-conditioned, depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
