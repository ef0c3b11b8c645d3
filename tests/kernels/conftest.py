"""Device of the kernel tests: the GPU if there is one, else the CPU.

On a CPU the same tests run twice: here on the references and the torch row pass, and in a separate process under
Triton's interpreter (test_under_interpreter.py), because TRITON_INTERPRET is read when the kernels are decorated.
"""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh", action="store_true", help="bring ahead_of_time.json up to date (test_ahead_of_time)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
