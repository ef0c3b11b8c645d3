"""Windows and macOS have no triton, and Windows none of Unix's modules: all is imported all the same."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

from command_line import run  # noqa: E402

UNIX_ONLY = {"fcntl", "grp", "posix", "pwd", "pty", "resource", "termios"}
EVERYTHING = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import ligertune, ligertune_kernels
for package in (ligertune, ligertune_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in ("ligertune.__main__",):
            importlib.import_module(module.name)
from ligertune_kernels import backend, swiglu
import torch
assert backend("cpu") == "reference"
assert swiglu(torch.ones(2, 3), torch.ones(2, 3)).shape == (2, 3)
"""


def test_everything_is_imported_without_triton(tmp_path):
    done = run([sys.executable, "-c", EVERYTHING], cwd=tmp_path)
    assert done.code == 0, done.err


@pytest.mark.parametrize("folder", ["ligertune", "kernels"])
def test_no_module_of_unix_alone_is_asked_for_at_once(folder):
    """Inside `try` or a function it is, where something else serves on Windows."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not UNIX_ONLY & set(names), path


def test_the_doctor_says_what_runs(tmp_path):
    code = "import sys; sys.modules['triton'] = None; from ligertune.cli.app import main; main()"
    done = run([sys.executable, "-c", code, "doctor"], cwd=tmp_path)
    assert done.code == 0 and "the PyTorch references" in done.out, done.err
