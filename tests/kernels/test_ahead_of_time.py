"""Ahead-of-time compilation of every op for nine GPUs, within their limits: registers, shared memory, threads, atomics.

Worker processes compile, because TRITON_INTERPRET is read when kernels are decorated, and to use all cores.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import ligertune_kernels
import pytest

pytest.importorskip("triton", reason="needs triton: nothing is compiled without it")

from ahead_of_time_cases import FIRST
from ligertune_kernels.table import OPS
from pretend_gpu import TARGETS, Compiled, compile_for

ARCHES = tuple(TARGETS)
KERNELS = Path(ligertune_kernels.__file__).parent / "ops"


def compile_op(op: str, arch: str, part: Literal["fast", "slow"], *, reads_once: bool = True) -> list[Compiled]:
    """Compile an op, in a worker. The slow part has all cases, with inference in each dtype.

    In the fast one a size of each op stands for inference, which keeps less than training, on those of FIRST.
    """
    from ahead_of_time_cases import CASES

    def run() -> None:
        inferred = set()
        for case in CASES[op]():
            if part == "slow" or case.is_early(arch):
                kind = op if part == "fast" else case.dtype
                case.run(inference=kind not in inferred and (part == "slow" or arch in FIRST))
                inferred.add(kind)

    return compile_for(TARGETS[arch], run, reads_once=reads_once)


def compile_alone(op: str, arch: str, after: str | None = None) -> list[Compiled]:
    """Compile an op, in a worker, with empty caches, or with those filled by compiling for the GPU `after`."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        if after is not None:
            compile_op(op, after, "fast")
        return compile_op(op, arch, "fast", reads_once=after is not None)


def compile_planted(fault: str, arch: str) -> list[Compiled]:
    """Compile a kernel with a planted fault, in a worker."""
    import planted_faults

    return compile_for(TARGETS[arch], getattr(planted_faults, fault))


def disable_garbage_collection() -> None:
    """Initialise a worker: garbage collection takes a seventh of its time, and saves a quarter of its memory."""
    gc.disable()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TRITON_INTERPRET", raising=False)
        environment.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        environment.setenv("OMP_NUM_THREADS", "1")
        # Recording source lines takes 7 % of the time and does not change the instructions.
        environment.setenv("TRITON_DISABLE_LINE_INFO", "1")
        spawn = multiprocessing.get_context("spawn")
        processes = min(len(TARGETS), os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=disable_garbage_collection) as pool:
            yield pool


class Compilation:
    """Compilations by op, GPU and part, started in the workers as soon as a collected test needs them."""

    def __init__(self, workers: Executor) -> None:
        self._workers = workers
        self._futures: dict[tuple[str, str, str], Future] = {}

    def begin(self, op: str, arch: str, part: Literal["fast", "slow"]) -> None:
        if (op, arch, part) not in self._futures:
            self._futures[op, arch, part] = self._workers.submit(compile_op, op, arch, part)

    def of(self, op: str, arch: str, part: Literal["fast", "slow"] = "fast") -> list[Compiled]:
        self.begin(op, arch, part)
        return self._futures[op, arch, part].result()


PARTS = {"test_every_kernel_fits": "fast", "test_every_kernel_of_more_sizes_fits": "slow"}


@pytest.fixture(scope="module")
def compilation(workers: Executor, request: pytest.FixtureRequest) -> Compilation:
    under_way = Compilation(workers)
    for item in request.session.items:
        part = PARTS.get(getattr(item, "originalname", ""))
        if part:
            under_way.begin(item.callspec.params["op"], item.callspec.params["arch"], part)
    return under_way


def test_every_op_has_cases() -> None:
    from ahead_of_time_cases import CASES

    assert set(CASES) == {op.name for op in OPS}


# Ordered by GPU: the IR that one GPU makes of an op is reused by the next of the same vendor (pretend_gpu).
@pytest.mark.parametrize("op", [op.name for op in OPS])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_fits(op, arch, compilation) -> None:
    kernels = compilation.of(op, arch)
    assert kernels, "nothing was compiled: the op took its reference"
    assert [fault for kernel in kernels for fault in kernel.faults(TARGETS[arch])] == []


@pytest.mark.slow
@pytest.mark.parametrize("op", [op.name for op in OPS])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_of_more_sizes_fits(op, arch, compilation) -> None:
    kernels = compilation.of(op, arch, "slow")
    assert kernels, "nothing was compiled: the op took its reference"
    assert [fault for kernel in kernels for fault in kernel.faults(TARGETS[arch])] == []


@pytest.mark.slow
@pytest.mark.parametrize("op", [op.name for op in OPS])
@pytest.mark.parametrize("arch, after", [("sm120", "sm80"), ("gfx942", "gfx90a"), ("gfx1201", "gfx1100")])
def test_reused_ir_gives_the_same_assembly(op, arch, after, workers) -> None:
    found, read = workers.submit(compile_alone, op, arch, after), workers.submit(compile_alone, op, arch)
    assert found.result() == read.result()


def test_the_cases_reach_every_kernel(compilation) -> None:
    """Launched kernels are the functions whose names end in `kernel`."""
    written = {name for path in KERNELS.rglob("*.py") for name in re.findall(r"def (\w*kernel)\(", path.read_text())}
    assert written - {kernel.kernel for op in OPS for kernel in compilation.of(op.name, "sm90")} == set()


@pytest.mark.parametrize(
    "fault, arch, words",
    [
        ("too_many_warps", "gfx942", "2048 threads"),
        ("too_many_warps", "gfx90a", "2048 threads"),
        ("spilling", "sm90", "spilled"),
        ("spilling", "gfx1100", "spilled"),
        ("atomic", "gfx90a", "cmpswap"),
        ("atomic", "sm90", "atom"),
        ("narrow", "sm90", "32-bit offsets of x_ptr"),
        ("narrow", "gfx942", "32-bit offsets of x_ptr"),
    ],
)
def test_a_planted_fault_is_found(fault, arch, words, workers) -> None:
    (kernel,) = workers.submit(compile_planted, fault, arch).result()
    found = kernel.faults(TARGETS[arch])
    assert any(words in sentence for sentence in found), found


def test_32_warps_fit_a_chip_with_narrow_warps(workers) -> None:
    (kernel,) = workers.submit(compile_planted, "too_many_warps", "gfx1100").result()
    assert kernel.faults(TARGETS["gfx1100"]) == []
