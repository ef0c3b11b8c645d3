"""Fixtures every test shares, and the reasons for which a test may be skipped: no GPU, no corpus."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("LIGERTUNE_TEST_DATA", ROOT.parent / "shared" / "data"))

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import remember_builtins

    remember_builtins()


# Minutes each. Begun last, such a file would run alone on one core while the others have nothing left to do.
LONG = ("test_under_interpreter", "test_ahead_of_time", "test_ranks")


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
    """Modules stay. To look for garbage among them again and again is a tenth of the tests' time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data is kept here, not in the cache of whoever runs the tests; child processes see it, too."""
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
