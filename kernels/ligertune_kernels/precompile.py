"""Compilation of kernels before their first launch: which ones a function launches, and all of them in parallel.

Triton compiles each kernel at its first launch, one after the other. Its compiler releases the interpreter's lock
in the passes of MLIR and LLVM, and ptxas runs in another process, so threads compile at the same time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ligertune_kernels.launcher import chip_of, meta_runs_as

try:
    from triton import knobs
    from triton.runtime import build, driver
except ModuleNotFoundError:  # nothing is compiled without triton
    build = knobs = driver = None


@dataclass(frozen=True)
class KernelForm:
    """A kernel as Triton specialises it for its arguments. specialization: for Triton's `JITFunction.preload`."""

    kernel: Any
    specialization: str

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def compile(self) -> None:
        """Compile for the current device and load onto it; Triton keeps the result for the launches of this process."""
        compiled = self.kernel.preload(self.specialization)
        # the property loads the kernel, and Triton before 3.7 compiles its launcher in C there
        _ = compiled.run


class _DriverWithoutLaunches:
    """The methods of a Triton driver that specialise a launch, for the target of another driver."""

    def __init__(self, other: Any) -> None:
        self.get_current_target = other.get_current_target

    def get_current_device(self) -> int:
        return -1  # Triton keeps compiled kernels by device: there is none of this one, so it asks the hook

    def get_current_stream(self, device: int) -> int:
        return 0


def launched_forms(run: Callable[[], object], device: torch.device) -> list[KernelForm]:
    """Return what `run` launches on meta tensors, specialised for the chip of `device`, without a launch.

    No other thread may launch a kernel of Triton meanwhile: its driver is the process's.
    """
    chip = chip_of(device)
    if chip is None:
        return []
    forms: dict[tuple[str, str], KernelForm] = {}

    def note(*, fn: Any, compile: dict[str, Any], **others: object) -> bool:
        form = KernelForm(fn.jit_function, compile["specialization_data"])
        forms[fn.jit_function.cache_key, form.specialization] = form
        return True  # Triton then neither compiles nor launches

    real = driver.active
    earlier = knobs.runtime.jit_cache_hook
    driver.set_active(_DriverWithoutLaunches(real))
    knobs.runtime.jit_cache_hook = note
    try:
        with meta_runs_as(chip):
            run()
    finally:
        knobs.runtime.jit_cache_hook = earlier
        driver.set_active(real)
    return list(forms.values())


@functools.cache
def load_launchers_apart() -> None:
    """Let Triton load its modules of C in one thread at a time, and keep the functions of each.

    Triton before 3.7 compiles a launcher in C for each signature, and imports them all under one name. Python imports
    a file for the second time into the module that has this name by then, so that a thread can find in its module the
    launcher that another thread imported: a kernel is then launched with the arguments of another one.
    """
    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return
    lock = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        kept = ModuleType(name)
        with lock:
            vars(kept).update(vars(load(name, path)))
        return kept

    build._load_module_from_path = load_apart


class Precompilation:
    """Kernels that threads compile for a GPU."""

    def __init__(self, forms: Sequence[KernelForm], device: torch.device, *, threads: int) -> None:
        """Start to compile."""
        self._forms = tuple(forms)
        self._futures: tuple[Future[None], ...] = ()
        if not forms:
            return
        load_launchers_apart()
        begin = None
        if device.type == "cuda":  # the current GPU is set per thread
            index = torch.cuda.current_device() if device.index is None else device.index
            begin = functools.partial(torch.cuda.set_device, index)
        pool = ThreadPoolExecutor(min(threads, len(forms)), thread_name_prefix="compile", initializer=begin)
        self._futures = tuple(pool.submit(form.compile) for form in forms)
        pool.shutdown(wait=False)  # the threads end with the last kernel

    def wait(self) -> list[str]:
        """Wait for all kernels; return the name and the error of each one that failed. It compiles when launched."""
        failed = []
        for form, future in zip(self._forms, self._futures, strict=True):
            error = None if future.cancelled() else future.exception()
            if error is not None:
                failed.append(f"{form.name}: {type(error).__name__}: {error}")
        return failed

    def cancel(self) -> None:
        """Compile no further kernel. Those that have begun end by themselves."""
        for future in self._futures:
            future.cancel()
