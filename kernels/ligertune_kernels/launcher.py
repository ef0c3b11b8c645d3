"""Kernel launch: whether Triton runs on a device, the chip behind it, and launchers with few host-side steps.

Kernels import `triton` and `tl` from this file. Where triton is not installed (a CPU torch, macOS, Windows) both are
stand-ins: kernels can be defined but not launched, and every op runs its reference. Facts per chip: chips.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Literal

import torch

from ligertune_kernels.chips import INTERPRETER, Chip
from ligertune_kernels.shortcuts import save_launch


def _undecorated(kernel: Callable | None = None, **options: object) -> Callable:
    """Stand in for `triton.jit`, with and without options."""
    return kernel if kernel is not None else lambda later: later


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as missing:
    if missing.name != "triton":
        raise
    triton = SimpleNamespace(jit=_undecorated)
    tl = SimpleNamespace(constexpr=lambda value: value)
    TRITON_INSTALLED = False
else:
    TRITON_INSTALLED = True

try:  # Gluon, Triton's language below tl, and its operations of Hopper GPUs
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ModuleNotFoundError:
    gluon = SimpleNamespace(jit=_undecorated)
    gl = SimpleNamespace(constexpr=lambda value: value)
    hopper = TensorDescriptor = copy_to_shared = copy_from_shared = None
else:  # triton 3.9 renamed both
    copy_to_shared = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    copy_from_shared = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global

# Triton reads the variable when a kernel is decorated, so a later change of the environment has no effect.
INTERPRETED = TRITON_INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"

_meta_chip: Chip | None = None
_caches: list[Callable] = []


@contextlib.contextmanager
def meta_runs_as(chip: Chip) -> Iterator[None]:
    """Make meta tensors take the Triton path as if they lay on this chip, to compile without the chip."""
    global _meta_chip
    before = _meta_chip
    _meta_chip = chip
    _clear_caches()
    try:
        yield
    finally:
        _meta_chip = before
        _clear_caches()


def _clear_caches() -> None:
    # Launch plans depend on the device's chip, which for meta tensors has just changed.
    for cache in _caches:
        cache.cache_clear()


def cached(function: Callable) -> Callable:
    """Decorate with functools.lru_cache, but call the function itself while torch.compile traces.

    torch.compile warns of every lru_cache and ignores it.
    """
    cache = functools.lru_cache(maxsize=1024)(function)
    _caches.append(cache)

    @functools.wraps(function)
    def call(*args: object) -> object:
        return function(*args) if torch.compiler.is_compiling() else cache(*args)

    call.cache_clear = cache.cache_clear
    return call


@cached
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
    """Return the chip whose Triton kernels run on this device, None where the references run."""
    if not TRITON_INSTALLED:
        return None
    if device.type == "cuda":
        if INTERPRETED:
            return INTERPRETER
        return _cuda_chip(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return INTERPRETER if INTERPRETED else None
    return _meta_chip if device.type == "meta" else None


def backend(device: torch.device | str) -> Literal["triton", "reference"]:
    """Return what the ops run on this device."""
    return "reference" if chip_of(torch.device(device)) is None else "triton"


def runs_triton(t: torch.Tensor) -> bool:
    """Return whether an op on this tensor launches kernels. float64 always runs the reference, to check against.

    Raises RuntimeError under a transform of torch.func or in forward-mode differentiation, which kernels do not have.
    """
    runs = t.dtype is not torch.float64 and (TRITON_INSTALLED if t.is_cuda else chip_of(t.device) is not None)
    if runs and not torch.compiler.is_compiling() and _transformed(t):
        raise RuntimeError(
            "ligertune_kernels' ops do not work under torch.func's transforms (grad, jvp, vmap) or in forward-mode "
            "differentiation: use torch.autograd, or the op's reference, such as rms_norm_reference"
        )
    return runs


def _transformed(t: torch.Tensor) -> bool:
    forward_mode = torch.autograd.forward_ad
    if forward_mode._current_level >= 0 and forward_mode.unpack_dual(t).tangent is not None:
        return True
    return torch._C._are_functorch_transforms_active()


def on_device(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which the tensor's GPU is the current one: Triton launches there."""
    if not t.is_cuda or t.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.get_device())


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """Reshape (..., C) to (N, C) with neighbouring columns: a view where the strides allow it, else a copy."""
    rows = t if t.ndim == 2 else t.reshape(-1, t.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def rows_and_stride(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor with the rows of t (..., C), and its row stride; t itself where t is contiguous."""
    if t.is_contiguous():
        return t, t.shape[-1]
    rows = as_rows(t)
    return rows, rows.stride(0)


def contiguous_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty contiguous tensor of t's shape."""
    if t.dtype is dtype and t.is_contiguous():  # a third of the host time of torch.empty
        return torch.empty_like(t)
    return torch.empty(t.shape, dtype=dtype, device=t.device)


class BoundLaunch:
    """A kernel bound to constants and integers, launched on tensors of the same dtypes on the same device.

    The kernel's parameters must stand in this order: tensors; integers that Triton specialises on; integers that it
    does not (do_not_specialize), and floats; constants.
    """

    def __init__(self, kernel: Callable, constants: dict[str, int | bool], integers: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.constants = constants
        self.integers = integers
        self._saved = None

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], *others: float) -> None:
        """Launch on the device of the tensors."""
        tracing = torch.compiler.is_compiling()
        if not tracing and self._saved is not None and self._saved.launch(grid, tensors, others):
            return
        with on_device(tensors[0]):
            compiled = self.kernel[grid](*tensors, *self.integers, *others, **self.constants)
        if not tracing and self._saved is None:
            self._saved = save_launch(compiled, self.kernel, tensors, self.integers, self.constants)


class Launcher:
    """A kernel with its constants: launches through one BoundLaunch per device, integers and dtypes."""

    def __init__(self, kernel: Callable, constants: dict[str, int | bool]) -> None:
        self.kernel = kernel
        self.constants = constants
        self._launches: dict[tuple, BoundLaunch] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...], *others: float
    ) -> None:
        """Launch on the device of the tensors; `integers` are the arguments that Triton specialises on."""
        if torch.compiler.is_compiling():
            BoundLaunch(self.kernel, self.constants, integers)(grid, tensors, *others)
            return
        key = (tensors[0].device, integers, *[t.dtype for t in tensors])
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = BoundLaunch(self.kernel, self.constants, integers)
        launch(grid, tensors, *others)
