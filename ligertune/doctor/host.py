"""The host: free disk where a run writes, memory, memory that processes share, and variables that change a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ligertune.doctor.finding import Finding
from ligertune.hardware import available_memory

GIB = 2**30
LEAST_DISK = 10 * GIB  # a 1B model, its checkpoint and its data
LEAST_MEMORY = 4 * GIB
LEAST_SHARED = GIB  # containers get 64 MiB unless told otherwise


@dataclass(frozen=True)
class Variable:
    """One of the environment that deserves a warning where it has one of these values (any, if none is named)."""

    name: str
    advice: str
    values: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ("nvidia", "amd", "cpu")


VARIABLES = (
    Variable(
        "TRITON_INTERPRET",
        "kernels are interpreted on the host, a thousand times slower than on the GPU",
        ("1",),
        ("nvidia", "amd"),
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        "torch reads it anew in every product, which holds up the host; runs are deterministic without it",
        vendors=("nvidia",),
    ),
    Variable("CUDA_LAUNCH_BLOCKING", "the host waits for every kernel", ("1",), ("nvidia", "amd")),
    Variable("AMD_SERIALIZE_KERNEL", "the host waits for every kernel", ("1", "2", "3"), ("amd",)),
    Variable("HF_HUB_OFFLINE", "models and data sets of the hub are taken from the cache only", ("1",)),
    Variable("WORLD_SIZE", "this shell looks like a worker of a launcher: a run would wait for others"),
)


def resources() -> list[Finding]:
    """Disk, memory, shared memory. What cannot be told on this system is left out."""
    found = [free_disk("free disk here", Path.cwd()), cache(_hub_cache())]
    if (free := available_memory()) is not None:
        advice = "" if free >= LEAST_MEMORY else "models are loaded through the host's memory"
        command = "" if free >= LEAST_MEMORY else "ps aux --sort=-rss | head    # what holds it"
        found.append(Finding("free host memory", f"{free / GIB:.1f} GiB", advice, command))
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        advice = "" if total >= LEAST_SHARED else "processes of one run share tensors through it"
        command = "" if total >= LEAST_SHARED else "docker run --ipc=host ...    # in a container"
        found.append(Finding("shared memory", f"{total / GIB:.1f} GiB", advice, command))
    return found


def free_disk(what: str, folder: Path) -> Finding:
    """Of the file system that `folder` lies on."""
    free = shutil.disk_usage(folder).free
    if free >= LEAST_DISK:
        return Finding(what, f"{free / GIB:.0f} GiB")
    advice = f"less than {LEAST_DISK // GIB} GiB is free for checkpoints"
    return Finding(what, f"{free / GIB:.1f} GiB", advice, "du -xh --max-depth=1 . | sort -h    # what takes it")


def cache(folder: Path) -> Finding:
    """Where models and data sets of the hub are kept: free disk, and whether this user may write there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    value = f"{folder}, {free / GIB:.0f} GiB free"
    if not os.access(there, os.W_OK):
        advice = f"this user may not write into {there}"
        return Finding("Hugging Face cache", value, advice, "export HF_HOME=$HOME/.cache/huggingface")
    advice = "" if free >= LEAST_DISK else f"less than {LEAST_DISK // GIB} GiB is free for models"
    return Finding("Hugging Face cache", value, advice, "hf cache prune    # or: export HF_HOME=..." if advice else "")


def environment(variables: Mapping[str, str], vendor: str) -> list[Finding]:
    """A line for each variable that changes a run in a way one may have forgotten."""
    return [
        Finding(row.name, variables[row.name], row.advice, f"unset {row.name}")
        for row in VARIABLES
        if vendor in row.vendors
        and variables.get(row.name)
        and variables[row.name] in (row.values or variables.values())
    ]


def _hub_cache() -> Path:
    """As huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
