"""Triton kernels for training language models, on NVIDIA and AMD GPUs; plain torch where Triton does not run.

Names are loaded at their first use, so that importing the package imports neither torch nor triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ligertune_kernels.table import OPS

_OTHER_NAMES = {
    "ligertune_kernels.launcher": ("backend", "runs_triton"),
    "ligertune_kernels.ops.losses.labelled_rows": ("labelled_rows",),
    "ligertune_kernels.ops.losses.tiles": ("Schedule", "schedule_of"),
}
_HOME = {name: op.module for op in OPS for name in op.exports}
_HOME |= {name: module for module, names in _OTHER_NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
