"""Fixtures of all tests, the order of test files, and skips without a GPU or the test corpus."""

import functools
import gc
import inspect
import math
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("LIGERTUNE_TEST_DATA", ROOT.parent / "shared" / "data"))


def speed_up_the_interpreter() -> None:
    """Replace what the interpreter computes again for every operation, which takes two thirds of these tests' time.

    The results do not change: lists of builtins, numpy's dtypes and shapes are remembered, and integer operations are
    not repeated in 64 bits for an assertion that only Triton's debug mode makes.
    """
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch(package: object, builder: object, scope: object) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if core.is_builtin(member):  # otherwise the calling kernel has replaced it already
                interpreter._patch_attr(package, name, member, builder, scope)

    @functools.cache
    def shape_and_numel(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def make_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_numel(type.shape if type.is_block() else ())

    numpy_dtypes: dict[str, object] = {}
    numpy_dtype_of = interpreter._get_np_dtype

    def numpy_dtype(dtype: core.dtype) -> object:
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype_of(dtype)
        return numpy_dtypes[name]

    interpreter._patch_builtin, interpreter._get_np_dtype, core.tensor.__init__ = patch, numpy_dtype, make_tensor
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up_the_interpreter()

# These files take longest. If they started last, the other cores would wait for them.
LONG = (
    "test_under_interpreter", "test_medusa_command", "test_vision_training", "test_recompute",
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
