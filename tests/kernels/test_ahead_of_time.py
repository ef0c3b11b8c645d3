"""Ahead-of-time compilation of every op for twelve GPUs, within their limits.

Limits: registers, shared memory, threads, atomics, and no arguments in float64.

Compiling everything takes two to three minutes on two cores. The results are therefore committed in
tests/kernels/ahead_of_time.json, for the code that they were computed from. Where this code has changed since, the test
compiles. A comment or a docstring changes nothing. To bring the file up to date:

    python -m pytest tests/kernels/test_ahead_of_time.py --refresh

Worker processes compile, to use all cores. Where the file is up to date, this process compiles the sample.
"""

import gc
import multiprocessing
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: nothing is compiled without it")

import triton
import triton.language as tl
from ligertune_kernels.launcher import INTERPRETED
from ligertune_kernels.table import OPS
from support.kernels.ahead_of_time_cases import CASES, Part, compile_op
from support.kernels.ahead_of_time_results import PACKAGE, CommittedResults, code_of, files_of, key_of
from support.kernels.pretend_gpu import TARGETS, Compiled, compile_for

ARCHES = tuple(TARGETS)
OP_NAMES = [op.name for op in OPS]
# Always compiled, whatever is committed: one op for each GPU that compiles quickly, one of them a matrix product.
SAMPLE = {
    "sm80": "kda_step",
    "sm90": "quantize_float8",
    "sm100": "adamw_step",
    "sm120": "swiglu",
    "gfx90a": "reglu",
    "gfx942": "dequantize_nf4",
    "gfx950": "causal_conv1d_step",
    "gfx1100": "adamw_step",
    "gfx1101": "seeded_dropout",
    "gfx1102": "kda_step",
    "gfx1151": "causal_conv1d_step",
    "gfx1201": "dequantize_nf4",
}


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
        if not INTERPRETED and all(map(CommittedResults().holds, OP_NAMES)):
            # A new process would import torch, which takes longer than to compile the sample.
            with ThreadPoolExecutor(1) as pool:
                yield pool
            return
        spawn = multiprocessing.get_context("spawn")
        processes = min(len(TARGETS), os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=disable_garbage_collection) as pool:
            yield pool


class Compilation:
    """Compiled kernels by op, GPU and part: the committed ones where they hold, else compiled in the workers."""

    def __init__(self, workers: Executor, committed: CommittedResults) -> None:
        self._workers, self.committed = workers, committed
        self._futures: dict[tuple[str, str, str], Future] = {}

    def begin(self, op: str, arch: str, part: Part) -> None:
        needed = part == "slow" or self.committed.get(op, arch) is None
        if needed and (op, arch, part) not in self._futures:
            self._futures[op, arch, part] = self._workers.submit(compile_op, op, arch, part)

    def of(self, op: str, arch: str, part: Part = "fast") -> list[Compiled]:
        self.begin(op, arch, part)
        future = self._futures.get((op, arch, part))
        return self.committed.get(op, arch) if future is None else future.result()

    def write(self) -> None:
        """Write the file of committed results with what was compiled here."""
        for (op, arch, part), future in self._futures.items():
            if part == "fast":
                self.committed.set(op, arch, future.result())
        self.committed.write()


@pytest.fixture(scope="module")
def compilation(workers: Executor, request: pytest.FixtureRequest) -> Iterator[Compilation]:
    """Start all compilations that the collected tests need. Out-of-date results lose nothing, but tests take longer."""
    under_way = Compilation(workers, CommittedResults())
    if stale := [op for op in OP_NAMES if not under_way.committed.holds(op)]:
        warnings.warn(f"ahead_of_time.json is out of date for {', '.join(stale)}: run with --refresh", stacklevel=1)
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_every_kernel_fits":
            under_way.begin(*(item.callspec.params[name] for name in ("op", "arch", "part")))
    yield under_way
    if request.config.getoption("--refresh", default=False):
        under_way.write()


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(OP_NAMES)


def test_only_code_changes_a_key(tmp_path) -> None:
    files = [tmp_path / name for name in ("plain.py", "explained.py", "changed.py")]
    files[0].write_text('def f(x):\n    return x + "#"\n')
    files[1].write_text('"""About."""\n\n\ndef f(x):\n    """Add."""\n    # why\n    return x + "#"  # how\n')
    files[2].write_text('def f(x):\n    return x - "#"\n')
    plain, explained, changed = map(code_of, files)
    assert plain == explained != changed
    files = {path.relative_to(PACKAGE).as_posix() for path in files_of("rms_norm")}
    assert files >= {"ops/norms/rms_norm.py", "ops/norms/kernels.py", "chips.py", "jit/device_functions.py"}
    assert "ops/attention/rope.py" not in files and key_of("rms_norm") != key_of("apply_rope")
    files = {path.relative_to(PACKAGE).as_posix() for path in files_of("document_attention")}
    assert "ops/attention/hopper_kernels.py" in files  # by a module that is imported from its package


@pytest.mark.parametrize("arch, op", SAMPLE.items())
def test_committed_results_are_those_of_compiling(arch, op, compilation, workers) -> None:
    assert workers.submit(compile_op, op, arch, "fast").result() == compilation.of(op, arch)


@pytest.mark.parametrize("part", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_fits(op, arch, part, compilation) -> None:
    kernels = compilation.of(op, arch, part)
    assert kernels, "nothing was compiled: the op took its reference"
    assert [fault for kernel in kernels for fault in kernel.faults(TARGETS[arch])] == []


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch.startswith("gfx")])
def test_amd_launches_have_at_most_1024_threads_and_64_kib_of_shared_memory(arch, compilation) -> None:
    """Triton checks neither before the launch, which then fails. With warps of 64 lanes, 16 warps are the most."""
    launched = [kernel for op in OP_NAMES for kernel in compilation.of(op, arch)]
    most_warps = max(kernel.threads for kernel in launched) // TARGETS[arch].warp_size
    assert most_warps <= (16 if TARGETS[arch].warp_size == 64 else 32)
    assert max(kernel.shared_bytes for kernel in launched) <= 64 << 10


def test_the_cases_reach_every_kernel(compilation) -> None:
    """Launched kernels are the functions whose names end in `kernel`."""
    paths = (PACKAGE / "ops").rglob("*.py")
    written = {name for path in paths for name in re.findall(r"def (\w*kernel)\(", path.read_text())}
    assert written - {kernel.kernel for op in OP_NAMES for kernel in compilation.of(op, "sm90")} == set()


# Kernels with planted faults, and functions that launch them.


@triton.jit
def _copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _hold_much(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Need every value of a row until its sum is known: more than a thread can hold."""
    offs = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + offs).to(tl.float32)
    b = tl.load(x_ptr + BLOCK + offs).to(tl.float32)
    c = tl.load(x_ptr + 2 * BLOCK + offs).to(tl.float32)
    total = tl.sum(a * b + c, axis=0)
    tl.store(y_ptr + offs, a * total)
    tl.store(y_ptr + BLOCK + offs, b * total + tl.sum(a * c, axis=0))
    tl.store(y_ptr + 2 * BLOCK + offs, c * total + tl.sum(a * b, axis=0))


@triton.jit
def _add_atomically(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs, tl.load(x_ptr + offs), sem="relaxed")


@triton.jit
def _copy_rows(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * stride + tl.arange(0, BLOCK), tl.load(x_ptr + offs))


@triton.jit
def _scale(x_ptr, y_ptr, factor: tl.float64, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) * factor)


def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(n, device="meta"), torch.empty(n, device="meta")


def too_many_warps() -> None:
    """Launch 32 warps: 1024 threads with NVIDIA's and RDNA's warps of 32, 2048 with CDNA's of 64."""
    _copy[(1,)](*_vectors(4096), BLOCK=4096, num_warps=32)


def spilling() -> None:
    """Need 3 x 128 values per thread, which has at most 256 registers (512 on CDNA)."""
    _hold_much[(1,)](*_vectors(3 * 16384), BLOCK=16384, num_warps=4)


def atomic() -> None:
    """Add floats atomically: a compare-and-swap loop where the chip cannot add them in memory."""
    _add_atomically[(1,)](*_vectors(1024), BLOCK=1024, num_warps=4)


def narrow() -> None:
    """An offset of 32 bits, which overflows beyond 2**31 elements."""
    _copy_rows[(8,)](*_vectors(8192), 1000, BLOCK=1024, num_warps=4)


def float64() -> None:
    """Multiply by a float64, as a NumPy scalar or torch.compile can pass it."""
    _scale[(1,)](*_vectors(1024), 0.1, BLOCK=1024, num_warps=4)


PLANTED = [
    *((too_many_warps, arch, "2048 threads") for arch in ("gfx942", "gfx90a")),
    (too_many_warps, "gfx1100", None),  # 32 warps fit a chip with narrow warps
    *((spilling, arch, "spilled") for arch in ("sm90", "gfx1100")),
    *((narrow, arch, "32-bit offsets of x_ptr") for arch in ("sm90", "gfx942")),
    *((float64, arch, "float64 arguments: factor") for arch in ("sm90", "gfx1102")),
    (atomic, "gfx90a", "cmpswap"),
    pytest.param(atomic, "sm90", "atom", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault, arch, words", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(fault, arch, words, workers) -> None:
    (kernel,) = workers.submit(compile_for, TARGETS[arch], fault).result()
    found = kernel.faults(TARGETS[arch])
    assert found == [] if words is None else any(words in sentence for sentence in found), found
