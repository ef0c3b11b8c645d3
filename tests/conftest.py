"""Fixtures of all tests, the order of test files, and skips without a GPU or the test corpus."""

from __future__ import annotations

import gc
import inspect
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("LIGERTUNE_TEST_DATA", ROOT.parent / "shared" / "data"))


def remember_builtins() -> None:
    """Remember which members of triton.language are builtins, for a faster interpreter.

    Before a kernel, and before each function that a kernel calls, the interpreter searches every member for builtins
    and replaces them: two fifths of the time of these tests. The list of builtins does not change.
    """
    from triton.language import core
    from triton.runtime import interpreter

    names: dict[object, list[str]] = {}

    def patch(package: object, builder: object, scope: object) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # otherwise the calling kernel has replaced it already
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


if os.environ.get("TRITON_INTERPRET") == "1":
    remember_builtins()

# These files take longest. If they started last, the other cores would wait for them.
LONG = (
    "test_under_interpreter", "test_medusa_command", "test_learns_to_see", "test_recompute",
    "test_patch_in_place", "test_ahead_of_time", "test_keys", "test_signals", "test_ranks",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    gpu = None
    for item in items:
        if item.get_closest_marker("gpu"):
            if gpu is None:
                import torch

                gpu = torch.cuda.is_available()
            if not gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA or AMD GPU"))
        if item.get_closest_marker("corpus") and not CORPUS.is_dir():
            item.add_marker(pytest.mark.skip(reason="needs the test corpus: set LIGERTUNE_TEST_DATA to its folder"))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which takes a tenth of the time otherwise."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep prepared data in a temporary folder, also in child processes, instead of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["LIGERTUNE_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real data sets, tokenizers and published configurations (marker: corpus)."""
    return CORPUS


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """configs/quickstart: the recipe, the tiny pretrained Llama and its data."""
    return ROOT / "configs" / "quickstart"
