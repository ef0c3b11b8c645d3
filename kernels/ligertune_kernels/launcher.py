"""Everything that depends on the chip: whether Triton runs here, for which device, with how many warps and programs.

Kernels import `triton` and `tl` from this file. Where triton is not installed (a CPU torch, macOS, Windows) they are
stand-ins: kernels can then be defined but not launched, and every op runs its reference.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch


def _undecorated(kernel: Callable | None = None, **options: object) -> Callable:
    """What stands in for `triton.jit`, with and without options."""
    return kernel if kernel is not None else lambda later: later


try:
    import triton
    import triton.language as tl
    from triton import knobs
except ModuleNotFoundError as missing:
    if missing.name != "triton":
        raise
    triton = SimpleNamespace(jit=_undecorated)
    tl = SimpleNamespace(constexpr=lambda value: value)
    TRITON_INSTALLED = False
else:
    TRITON_INSTALLED = True

# Triton reads the variable when a kernel is decorated, so a later change of the environment means nothing.
INTERPRETED = TRITON_INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"

MAX_THREADS = 1024  # of one program, on every GPU so far: 16 warps of 64 on CDNA, 32 of 32 on RDNA and NVIDIA


@dataclass(frozen=True, eq=False)  # one object a device: hashed at every launch, and so by its identity
class Chip:
    """What the launch rules need to know of a device."""

    vendor: Literal["nvidia", "amd", "interpreter"]
    arch: str  # sm90, gfx942
    warp_size: int
    processors: int  # streaming multiprocessors, compute units
    l2_bytes: int
    shared_bytes: int = 64 << 10  # that one program may have: least on CDNA and RDNA


# Four processors, so that a few rows already spread over several programs and their partial sums.
INTERPRETER = Chip("interpreter", "cpu", warp_size=32, processors=4, l2_bytes=1 << 20)

_meta_chip: Chip | None = None


@contextlib.contextmanager
def meta_stands_for(chip: Chip) -> Iterator[None]:
    """While it is open, meta tensors take the Triton path as if they lay on this chip (to compile without the chip)."""
    global _meta_chip
    before, _meta_chip = _meta_chip, chip
    _forget()
    try:
        yield
    finally:
        _meta_chip = before
        _forget()


_caches: list[Callable] = []


def _forget() -> None:
    for cached in _caches:
        cached.cache_clear()


def remembered(function: Callable) -> Callable:
    """functools.lru_cache, except where torch.compile traces: it warns of every such cache and looks past it."""
    cached = functools.lru_cache(maxsize=1024)(function)
    _caches.append(cached)

    @functools.wraps(function)
    def call(*args: object) -> object:
        return function(*args) if torch.compiler.is_compiling() else cached(*args)

    call.cache_clear = cached.cache_clear
    return call


@remembered
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    return Chip(
        vendor="amd" if amd else "nvidia",
        arch=properties.gcnArchName.split(":")[0] if amd else f"sm{properties.major}{properties.minor}",
        warp_size=getattr(properties, "warp_size", 32),
        processors=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", 0) or 4 << 20,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or 64 << 10,
    )


def chip_of(device: torch.device) -> Chip | None:
    """The chip whose Triton kernels serve this device; None where the references do."""
    if not TRITON_INSTALLED:
        return None
    if device.type == "cuda":
        return INTERPRETER if INTERPRETED else _cuda_chip(current_index(device))
    if device.type == "cpu":
        return INTERPRETER if INTERPRETED else None
    return _meta_chip if device.type == "meta" else None


def current_index(device: torch.device) -> int:
    """The number of a CUDA or ROCm device, the current one if it bears none."""
    return torch.cuda.current_device() if device.index is None else device.index


def backend(device: torch.device | str) -> Literal["triton", "reference"]:
    """What the ops run on this device."""
    return "reference" if chip_of(torch.device(device)) is None else "triton"


def runs_triton(t: torch.Tensor) -> bool:
    """Whether an op on this tensor launches kernels. float64 is for checking: it always takes the reference."""
    return t.dtype is not torch.float64 and (TRITON_INSTALLED if t.is_cuda else chip_of(t.device) is not None)


def on_device(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's GPU the current one: Triton launches on that, whatever its arguments say."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)


def rows_of(t: torch.Tensor) -> torch.Tensor:
    """(..., C) -> (N, C) with neighbouring columns: a view where the strides allow it, else a copy."""
    rows = t if t.ndim == 2 else t.reshape(-1, t.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def laid_out(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor where the rows of t (..., C) begin, and the way from one to the next; of a contiguous one, t itself."""
    if t.is_contiguous():
        return t, t.shape[-1]
    rows = rows_of(t)
    return rows, rows.stride(0)


def like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty contiguous tensor of t's shape; of a contiguous one in a third of the time."""
    if t.dtype is dtype and t.is_contiguous():
        return torch.empty_like(t)
    return torch.empty(t.shape, dtype=dtype, device=t.device)


# Elements of a tile up to which so many warps serve it: at most 16 elements a thread. Row kernels hold two to four
# values an element, and at 32 and more a thread they spill (compiled for sm80-sm120, gfx90a-gfx1201).
WARPS = {
    32: ((1024, 4), (4096, 8), (8192, 16), (None, 32)),
    64: ((2048, 4), (8192, 8), (None, 16)),
}


def options(elements: int, chip: Chip) -> dict[str, int | bool]:
    """Launch options of a program that works on a tile of so many elements."""
    # By the width of a warp, not by a list of chips: one that comes out tomorrow is served, too.
    table = WARPS[64 if chip.warp_size > 32 else 32]
    warps = next(warps for most, warps in table if most is None or elements <= most)
    warps = min(warps, MAX_THREADS // chip.warp_size)
    # One stage: there is no matrix product whose operands could be fetched ahead. The fusion of a*b+c is what Triton
    # does by default up to 3.9; said here, it stays so.
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def programs_within_l2(n_rows: int, row_bytes: int, chip: Chip) -> int:
    """How many rows may be in flight when each is swept twice and the second sweep is to hit the L2 cache.

    0.85 of the cache; not under half the processors (a 256k vocabulary), nor over four programs on each.
    """
    fitting = int(0.85 * chip.l2_bytes) // row_bytes
    return max(1, min(n_rows, 4 * chip.processors, max(fitting, chip.processors // 2)))


# Of the current device, where torch has them: two of its functions that do nothing but ask.
_current_index = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _is_watched() -> bool:
    """Whether somebody (a profiler) has asked triton to be called at every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Launch:
    """A kernel launched over and over on tensors of the same dtypes on the same device, with the same integers.

    From all arguments of every launch Triton derives which compiled form is meant, asks the driver about every pointer
    and calls two chains of hooks: 20 µs for eight tensors, four times what a small norm takes on the device. Here the
    form of the first launch is launched again as Triton itself does it, with addresses for tensors. The kernel's
    parameters must stand in this order: tensors; integers that are specialised; integers that are not, and floats;
    constants.
    """

    def __init__(self, kernel: Callable, constants: dict[str, int | bool], integers: tuple[int, ...]) -> None:
        self.kernel, self.constants, self.integers = kernel, constants, integers
        self._form: _Form | None = None
        self._index = -1  # of the device that the form is for

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], *others: float) -> None:
        """Launches on the device where the tensors lie."""
        if torch.compiler.is_compiling() or self._form is None or _is_watched():
            self._by_triton(grid, tensors, others)
            return
        if self._index != _current_index():
            with torch.cuda.device(self._index):
                self(grid, tensors, *others)
            return
        addresses = [t.data_ptr() for t in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits % 16:  # vectors cannot be loaded there
            self._by_triton(grid, tensors, others)
            return
        run, before, after, constants, packed = self._form
        stream = _current_stream(self._index)
        if packed:
            run(*before, *grid, stream, *after, (*addresses, *self.integers, *others, *constants))
        else:
            run(*before, *grid, stream, *after, *addresses, *self.integers, *others, *constants)

    def _by_triton(self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], others: tuple) -> None:
        """Has Triton choose the form, and keeps that of tensors where vectors can be loaded."""
        first = tensors[0]
        if torch.compiler.is_compiling() or INTERPRETED or not first.is_cuda:
            with on_device(first):
                self.kernel[grid](*tensors, *self.integers, *others, **self.constants)
            return
        index = first.get_device()
        with contextlib.nullcontext() if index == _current_index() else torch.cuda.device(index):
            compiled = self.kernel[grid](*tensors, *self.integers, *others, **self.constants)
        if self._form is None and all(t.data_ptr() % 16 == 0 for t in tensors):
            self._form, self._index = self._form_of(compiled), index

    def _form_of(self, compiled: object) -> _Form | None:
        """What a launch calls, unless this triton has it under other names."""
        parts = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
        if None in (*parts, _current_stream):
            return None
        run, *after = *parts, None, None, None  # Triton's order after the stream; nothing for hooks
        constants = tuple(self.constants[name] for name in self.kernel.arg_names if name in self.constants)
        return _handed_on(run, tuple(after), constants) or _Form(run, (), tuple(after), constants, packed=False)


class _Form(NamedTuple):
    """A compiled kernel: `run` takes `before`, the grid, the stream, `after` and the kernel's arguments, of which the
    constants are the last; packed says that these are one tuple."""

    run: Callable
    before: tuple
    after: tuple
    constants: tuple
    packed: bool


def _handed_on(run: Callable, after: tuple, constants: tuple) -> _Form | None:
    """What Triton's launcher, written in Python, calls in its turn, so that a launch can call that at once.

    The launcher is asked once, with marks for what differs between launches. None where it does more than to hand on
    (it may have to allocate), or hands on in a way that is not known here.
    """
    if not callable(getattr(run, "launch", None)):
        return None
    if getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0):
        return None
    asked, received = copy.copy(run), []
    asked.launch = lambda *arguments: received.extend(arguments)
    *place, argument = (object() for _ in range(5))  # grid and stream; an argument of the kernel
    asked(*place, *after, argument)
    first = next((i for i in range(len(received)) if received[i : i + 4] == place), None)
    packed = received[-1:] == [(argument,)]
    if first is None or not (packed or received[-1:] == [argument]):
        return None
    return _Form(run.launch, tuple(received[:first]), tuple(received[first + 4 : -1]), constants, packed)


class Launcher:
    """A kernel with its constants: finds its `Launch` by what that can depend on."""

    def __init__(self, kernel: Callable, constants: dict[str, int | bool]) -> None:
        self.kernel, self.constants = kernel, constants
        self._launches: dict[tuple, Launch] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...], *others: float
    ) -> None:
        if torch.compiler.is_compiling():
            Launch(self.kernel, self.constants, integers)(grid, tensors, *others)
            return
        key = (tensors[0].device, integers, *[t.dtype for t in tensors])
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launch(self.kernel, self.constants, integers)
        launch(grid, tensors, *others)
