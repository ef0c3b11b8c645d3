"""Checks of the host: free disk, memory, shared memory, and environment variables that change a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from ligertune.doctor.software import Finding
from ligertune.hardware import available_memory

GIB = 2**30
LEAST_DISK = 10 * GIB  # a 1B model, its checkpoint and its data
LEAST_MEMORY = 4 * GIB
LEAST_SHARED = GIB  # Docker gives a container 64 MiB by default


class Variable(NamedTuple):
    """An environment variable to warn about if it has one of `values`; empty: any value."""

    name: str
    advice: str
    values: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ("nvidia", "amd", "cpu")


GPUS = ("nvidia", "amd")
VARIABLES = (
    Variable("TRITON_INTERPRET", "kernels are interpreted on the CPU, a thousand times slower", ("1",), GPUS),
    Variable("CUBLAS_WORKSPACE_CONFIG",
             "torch reads it in every matrix product, which delays kernel launches; runs are deterministic without it",
             vendors=("nvidia",)),
    Variable("CUDA_LAUNCH_BLOCKING", "the CPU waits for every kernel", ("1",), GPUS),
    Variable("AMD_SERIALIZE_KERNEL", "the CPU waits for every kernel", ("1", "2", "3"), ("amd",)),
    Variable("HF_HUB_OFFLINE", "models and data sets of the hub are read from the cache only", ("1",)),
    Variable("WORLD_SIZE", "this shell looks like a worker of a launcher: a run would wait for the others"),
)  # fmt: skip


def resources() -> list[Finding]:
    """Check disk, memory and shared memory; a value that this system does not report is left out."""
    found = [free_disk("free disk here", Path.cwd()), cache(Path(HF_HUB_CACHE))]
    if (free := available_memory()) is not None:
        advice = "models are loaded through host memory"
        command = "ps aux --sort=-rss | head    # what uses it"
        found.append(_at_least(LEAST_MEMORY, free, "free host memory", advice, command))
    if (shared := Path("/dev/shm")).is_dir():
        advice = "the processes of a run share tensors through it"
        command = "docker run --ipc=host ...    # in a container"
        found.append(_at_least(LEAST_SHARED, shutil.disk_usage(shared).total, "shared memory", advice, command))
    return found


def _at_least(least: int, n_bytes: int, what: str, advice: str, command: str) -> Finding:
    return Finding.unless(n_bytes >= least, what, f"{n_bytes / GIB:.1f} GiB", advice, command)


def free_disk(what: str, folder: Path) -> Finding:
    """Check the free space of the file system of `folder`."""
    advice = f"less than {LEAST_DISK // GIB} GiB is free for checkpoints"
    command = "du -xh --max-depth=1 . | sort -h    # what uses it"
    return _at_least(LEAST_DISK, shutil.disk_usage(folder).free, what, advice, command)


def cache(folder: Path) -> Finding:
    """Check the cache of hub models and data sets: its free space, and whether this user can write to it."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    what = "Hugging Face cache"
    value = f"{folder}, {free / GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        advice = f"this user has no permission to write to {existing}"
        return Finding(what, value, advice, "export HF_HOME=$HOME/.cache/huggingface")
    advice = f"less than {LEAST_DISK // GIB} GiB is free for models"
    return Finding.unless(free >= LEAST_DISK, what, value, advice, "hf cache prune    # or: export HF_HOME=...")


def environment(variables: Mapping[str, str], vendor: str) -> list[Finding]:
    """Return a warning for each variable that changes a run and is easily forgotten."""
    return [
        Finding(row.name, value, row.advice, f"unset {row.name}")
        for row in VARIABLES
        if (value := variables.get(row.name)) and vendor in row.vendors and value in (row.values or (value,))
    ]
