"""Fixtures of all tests, the order of test files, and skips without a GPU or the test corpus."""

import gc
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.logging import catching_logs

# Before test modules import transformers: pydantic looks for the file of each frame of this import in all modules.
import ligertune.recipe.schema  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("LIGERTUNE_TEST_DATA", ROOT.parent / "shared" / "data"))


if os.environ.get("TRITON_INTERPRET") == "1":
    from support.quick_interpreter import quicken

    quicken()

# These files take longest. If they started last, the other cores would wait for them.
LONG = (
    "test_under_interpreter", "test_started_ranks", "test_hub", "test_fuzz",
    "test_golden_labels", "test_compiled_kernels", "test_medusa_command", "test_trained_base", "test_examples",
    "test_keys", "test_vision_end_to_end", "test_ranks", "test_evaluations", "test_optimizers",
)  # fmt: skip

FILES = itertools.count(1)

# Tests in these files look at charts. Other runs draw none, as without matplotlib: it takes a quarter of a short run.
CHARTS = (
    "test_curves", "test_hostile_places", "test_train", "test_run_display", "test_medusa_command", "test_bench",
    "test_bench_pages", "test_compare_command", "test_compare_summary", "test_docs",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Send neither starts of tests nor passed set-ups to the process that prints: messages take 2 ms of each test."""
    worker = next((p for p in config.pluginmanager.get_plugins() if type(p).__name__ == "WorkerInteractor"), None)
    if worker is None:
        return
    send = worker.sendevent

    def send_results(name: str, **content: object) -> None:
        if name == "testreport":
            report = content["data"]
            quick_and_passed = report["outcome"] == "passed" and report["duration"] < 0.1
            if report["when"] != "call" and quick_and_passed:
                return
        if name != "logstart":
            send(name, **content)

    worker.sendevent = send_results


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
        reads_corpus = item.get_closest_marker("corpus") or "corpus" in item.fixturenames
        if reads_corpus and not CORPUS.is_dir():
            item.add_marker(pytest.mark.skip(reason="needs the test corpus: set LIGERTUNE_TEST_DATA to its folder"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let a test without `caplog` log to the root logger alone.

    pytest 9 looks for loggers that do not propagate among thousands, six times a test, which takes 2 ms. Earlier
    versions do not.
    """
    captures_all = "caplog" in item.fixturenames or not hasattr(catching_logs, "attached_loggers")
    catching_logs.__enter__ = CAPTURE_ALL if captures_all else capture_at_the_root


CAPTURE_ALL = catching_logs.__enter__


def capture_at_the_root(self: catching_logs) -> logging.Handler:
    root = logging.getLogger()
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are imported: nothing is found, which takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which takes a tenth of the time otherwise."""
    seed_no_absent_gpu()
    gc.freeze()


def seed_no_absent_gpu() -> None:
    """Let `torch.manual_seed` leave out devices that are absent. It would note each call with its stack: 1 ms."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available() and not torch.xpu.is_available():
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


def pytest_runtest_setup() -> None:
    """Exclude what earlier tests imported: each training run collects garbage, 0.3 s among all imported modules."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Collect what the tests of ten files leave, before it is excluded. After a run this takes up to a second."""
    yield
    if next(FILES) % 10 == 0:
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_charts(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in CHARTS:
            patch.setattr("ligertune.files.plots.find_spec", lambda name: None)
        yield


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
