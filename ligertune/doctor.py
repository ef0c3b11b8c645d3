"""What this machine can do, and what would mend what it cannot."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from dataclasses import dataclass

from ligertune.machine import Machine, this_machine
from ligertune.report import versions


@dataclass(frozen=True)
class Finding:
    """One line; `advice` is empty where all is well."""

    what: str
    value: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at device, dtypes, versions and Triton. Imports torch."""
    machine = this_machine()
    free = shutil.disk_usage(".").free
    return [
        Finding("python", platform.python_version()),
        *(Finding(package, version) for package, version in versions().items()),
        Finding("device", f"{machine.name} ({machine.arch}) x {machine.device_count}"),
        Finding("device memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        _dtypes(machine),
        _peaks(machine),
        _kernels(machine),
        _triton_owner(),
        Finding(
            "free disk here", f"{free / 2**30:.0f} GiB", "less than 10 GiB is free here" if free < 10 * 2**30 else ""
        ),
    ]


def _dtypes(machine: Machine) -> Finding:
    if machine.vendor == "cpu":
        return Finding("model.dtype: auto", "float32", "")
    advice = "" if machine.has_bfloat16 else "no bfloat16 here: model.dtype auto means float16 with a scaled loss"
    return Finding("model.dtype: auto", "bfloat16" if machine.has_bfloat16 else "float16", advice)


def _peaks(machine: Machine) -> Finding:
    if machine.peak_flops is None:
        return Finding("peak rates", "unknown (MFU is left out of reports)")
    return Finding(
        "peak rates", f"{machine.peak_flops / 1e12:.0f} TFLOP/s bfloat16, {machine.peak_bandwidth / 1e12:.2f} TB/s"
    )


def _kernels(machine: Machine) -> Finding:
    from ligertune_kernels import backend

    found = backend(machine.device)
    advice = ""
    if machine.vendor != "cpu" and found != "triton":
        advice = "a GPU without Triton: kernels run on their PyTorch references; install ligertune[triton]"
    return Finding("kernels run on", "Triton" if found == "triton" else "the PyTorch references", advice)


def _triton_owner() -> Finding:
    """`triton` and `triton-rocm` own the same folder, and pip overwrites one with the other in silence."""
    owners = sorted(set(importlib.metadata.packages_distributions().get("triton", [])))
    advice = ""
    if len(owners) > 1:
        advice = f"the folder triton belongs to {' and '.join(owners)}: uninstall both, then reinstall torch"
    return Finding("triton comes from", ", ".join(owners) or "not installed", advice)
