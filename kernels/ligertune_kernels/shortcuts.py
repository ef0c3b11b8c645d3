"""Launch shortcut: launch a kernel's compiled form again, without Triton's search for it (20 µs with eight tensors).

It uses private APIs of torch and Triton. LIGERTUNE_LAUNCH_SHORTCUTS=0 (read at import) switches it off: every op then
goes the public way with the same results, as it does where the installed torch or Triton lacks a private name. To
delete it, delete this file and its two uses in launcher.BoundLaunch.
"""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    from triton import knobs
except ModuleNotFoundError:  # nothing is launched without triton
    knobs = None

ON = os.environ.get("LIGERTUNE_LAUNCH_SHORTCUTS") != "0"

# The public functions initialise CUDA first and build a Stream object.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _has_launch_hooks() -> bool:
    """Return whether a profiler has registered a hook that Triton calls at every launch."""
    enter = knobs.runtime.launch_enter_hook
    leave = knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class SavedLaunch:
    """A compiled kernel, to be launched again on tensors of the same dtypes on the same device.

    Triton's own launch derives the compiled form from all arguments, queries the driver about every pointer and calls
    two chains of hooks. This passes addresses of tensors to the function that Triton calls in the end.
    """

    def __init__(self, compiled: Any, integers: tuple[int, ...], constants: tuple, device: int) -> None:
        """compiled: Triton's CompiledKernel; integers and constants: the kernel's arguments that never change."""
        self.integers = integers
        self.constants = constants
        self.device = device
        # The launcher takes grid, stream, function, metadata of the kernel, metadata for hooks, two hooks.
        self.call = compiled.run
        self.after = (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], others: tuple) -> bool:
        """Launch on the saved device; return False where Triton must launch: hooks, or unaligned tensors."""
        if _has_launch_hooks():
            return False
        if self.device != _current_device():
            with torch.cuda.device(self.device):
                return self.launch(grid, tensors, others)
        addresses = [t.data_ptr() for t in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits % 16:  # the saved form loads vectors of 16 bytes
            return False
        stream = _current_stream(self.device)
        self.call(*grid, stream, *self.after, *addresses, *self.integers, *others, *self.constants)
        return True


def save_launch(
    compiled: Any, kernel: Any, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...], constants: dict
) -> SavedLaunch | None:
    """Save what Triton just launched on these tensors; None where it cannot be launched again without Triton.

    compiled: what kernel[grid](...) returned, None under the interpreter.
    """
    names = ("run", "function", "packed_metadata")
    if not ON or _current_stream is None or None in (getattr(compiled, name, None) for name in names):
        return None
    if not tensors[0].is_cuda or any(t.data_ptr() % 16 for t in tensors):
        return None
    values = tuple(constants[name] for name in kernel.arg_names if name in constants)
    return SavedLaunch(compiled, integers, values, tensors[0].get_device())
