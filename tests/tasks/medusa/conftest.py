"""Fixtures of the tests on Medusa: the command line, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import Done, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder that the module's commands share: later ones read what earlier ones left."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ligertune(runs):
    """`ligertune("medusa", ...)` in a fresh process, in the folder `runs`."""

    def call(*arguments: object) -> Done:
        return run([sys.executable, "-m", "ligertune", *map(str, arguments)], cwd=runs)

    return call
