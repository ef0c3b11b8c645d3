"""Checks of the device: visibility to torch, driver, dtypes, kernels, attention, communication, AMD's settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.version import Version

from ligertune.doctor.software import Finding
from ligertune.errors import pip_install
from ligertune.hardware import Machine

# The tests compile every kernel ahead of time for these chips. We have run none of them on an AMD GPU.
COMPILED_FOR = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1151", "gfx1201")
AOTRITON = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
OLDEST_BITSANDBYTES = Version("0.50")  # the first with ROCm support in its wheels


class BadPair(NamedTuple):
    """Versions that users report to fail together on AMD GPUs. Prefixes; an empty one stands for all."""

    rocm: str
    triton: str
    arch: str
    advice: str
    command: str


OTHER_ROCM = "install torch for another ROCm, with its own triton    # https://pytorch.org/get-started"
BAD_PAIRS = (
    BadPair("6.3", "3.7", "", "Triton 3.7 is reported to fail with ROCm 6.3", OTHER_ROCM),
    BadPair(  # https://github.com/ROCm/legacy-rocm-build/issues/5572
        "7.0.2", "", "gfx1151", "torch.compile is reported to stop the whole machine on gfx1151 with ROCm 7.0.2",
        "write train.torch_compile: false    # or install torch for a newer ROCm",
    ),
    BadPair("10.0", "3.8", "gfx11", "Triton 3.8 of ROCm 10.0 is reported to fail on gfx11", OTHER_ROCM),
)  # fmt: skip


def hardware() -> Literal["nvidia", "amd", "amd, closed", ""]:
    """Return the GPU that the operating system shows, whether torch sees it or not; closed: without access to it."""
    kfd = Path("/dev/kfd")
    if kfd.exists():
        return "amd" if os.access(kfd, os.R_OK | os.W_OK) else "amd, closed"
    return "nvidia" if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") else ""


def device(machine: Machine, present: str) -> Finding:
    """Check that torch sees the GPU. present: as returned by `hardware`."""
    value = f"{machine.name} ({machine.arch}) x {machine.device_count}, {machine.memory_bytes / 2**30:.1f} GiB"
    if machine.vendor != "cpu" or not present:
        return Finding("device", value)
    if present == "amd, closed":
        advice = "there is an AMD GPU, but this user has no permission to open /dev/kfd"
        return Finding("device", value, advice, "sudo usermod -aG render,video $USER    # then log in again")
    vendor = "an AMD" if present == "amd" else "an NVIDIA"
    advice = f"there is {vendor} GPU, but torch {machine.torch_version} does not see it"
    command = "python -c 'import torch; torch.cuda.init()'    # prints why: a CPU build, an old driver, or none visible"
    return Finding("device", value, advice, command)


def driver(machine: Machine) -> Finding:
    """Return the driver's version, and the CUDA or ROCm version that torch was built with."""
    import torch

    if machine.vendor == "cpu":
        return Finding("driver", "none in use")
    if machine.vendor == "amd":
        module = Path("/sys/module/amdgpu/version")
        version = module.read_text(encoding="utf-8").strip() if module.is_file() else "amdgpu of the Linux kernel"
        return Finding("driver", f"{version}; torch is built for ROCm {torch.version.hip}")
    return Finding("driver", f"{_nvidia_driver() or 'unknown'}; torch is built for CUDA {torch.version.cuda}")


def _nvidia_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):  # nvidia-smi hangs with a GPU that hangs
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def dtypes(machine: Machine) -> Finding:
    """Return the dtype that `model.dtype: auto` selects."""
    half = "bfloat16" if machine.has_bfloat16 else "float16 (mixed precision, scaled loss): no bfloat16 here"
    return Finding("model.dtype: auto", "float32" if machine.vendor == "cpu" else half)


def peaks(machine: Machine) -> Finding:
    """Return the dense peak rates of the data sheet."""
    if machine.peak_flops is None or machine.peak_bandwidth is None:
        return Finding("peak rates", "unknown (reports have no MFU)")
    rates = f"{machine.peak_flops / 1e12:.0f} TFLOP/s bfloat16, {machine.peak_bandwidth / 1e12:.2f} TB/s"
    return Finding("peak rates", rates)


def kernels(machine: Machine) -> Finding:
    """Check that the kernels run on Triton if there is a GPU."""
    from ligertune_kernels import backend

    if backend(machine.device) == "triton":
        return Finding("kernels run on", "Triton")
    command = pip_install("triton") if machine.vendor == "nvidia" else "install torch's ROCm build again"
    advice = "triton is missing; torch's wheels for Linux normally install it"
    return Finding.unless(machine.vendor == "cpu", "kernels run on", "the PyTorch references", advice, command)


def attention(machine: Machine) -> Finding:
    """Return the attention implementations that this machine can train with, and why not the others."""
    from ligertune.attention.choice import ATTENTIONS, missing_here

    reasons = {row.name: missing_here(row, machine) for row in ATTENTIONS}
    usable = ", ".join(name for name, reason in reasons.items() if reason is None)
    absent = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    return Finding("attention", usable + (f" (not {absent})" if absent else ""))


def amd(machine: Machine, variables: Mapping[str, str], *, installed_bitsandbytes: str | None) -> list[Finding]:
    """Check what only AMD GPUs need; return an empty list on others."""
    if machine.vendor != "amd":
        return []
    chip = machine.arch
    tested = (
        f"compiled for {chip} by the tests, never run on it by the authors"
        if chip in COMPILED_FOR
        else f"{chip} is not among the chips that the tests compile for ({', '.join(COMPILED_FOR)})"
    )
    found = [Finding("kernels on this chip", f"{tested}; `ligertune doctor --kernels` checks them here")]
    if chip.startswith(("gfx10", "gfx11", "gfx12")):
        on = variables.get(AOTRITON) == "1"
        advice = "on RDNA torch's flash attention (AOTriton) is off by default, and other attention takes more memory"
        found.append(Finding.unless(on, "AOTriton", "on" if on else "off", advice, f"export {AOTRITON}=1"))
    if variables.get(OVERRIDE):
        advice = "kernels are compiled for another chip than this one, and may give wrong results"
        found.append(Finding(OVERRIDE, variables[OVERRIDE], advice, f"unset {OVERRIDE}"))
    if installed_bitsandbytes and Version(installed_bitsandbytes) < OLDEST_BITSANDBYTES:
        advice = f"ROCm needs bitsandbytes {OLDEST_BITSANDBYTES} or newer"
        command = f"pip install 'bitsandbytes>={OLDEST_BITSANDBYTES}'"
        found.append(Finding("bitsandbytes", installed_bitsandbytes, advice, command))
    return found


def rocm_version() -> str:
    """Return the version of ROCm that torch was built for, such as 7.0.2, or 7.0 if torch says no more; "" without."""
    import torch

    if torch.version.hip is None:
        return ""
    named: str | None = getattr(torch.version, "rocm", None)
    suffix = re.search(r"\+rocm(\d+\.\d+(?:\.\d+)?)", torch.__version__)
    found = named or (suffix[1] if suffix else torch.version.hip)
    numbers = found.split(".")[:3]
    return ".".join(number for number in numbers if number.isdigit() and len(number) < 3)  # hip has a build number


def bad_pairs(machine: Machine, *, rocm: str, triton: str) -> list[Finding]:
    """Return the known bad combinations of ROCm, Triton and chip. A version of fewer numbers stands for all of them."""
    if machine.vendor != "amd" or not rocm:
        return []
    return [
        Finding("ROCm and triton", f"ROCm {rocm}, triton {triton or 'none'}, {machine.arch}", pair.advice, pair.command)
        for pair in BAD_PAIRS
        if _agree(rocm, pair.rocm) and _agree(triton, pair.triton) and machine.arch.startswith(pair.arch)
    ]


def _agree(found: str, known: str) -> bool:
    """Return whether two versions have the same numbers, as far as both go."""
    return not known or all(a == b for a, b in zip(found.split("+")[0].split("."), known.split("."), strict=False))


def communication(machine: Machine) -> Finding:
    """Check the library that several processes communicate through."""
    import torch
    from torch import distributed

    what = "several processes"
    if not distributed.is_available():
        return Finding(what, "this torch is built without torch.distributed: one process only")
    if machine.vendor == "cpu":
        return Finding(what, "gloo")
    # torch calls AMD's library by the name of NVIDIA's
    library = "RCCL" if machine.vendor == "amd" else "NCCL"
    if distributed.is_nccl_available():
        version = torch.cuda.nccl.version()
        return Finding(what, f"{library} {'.'.join(map(str, version))}")
    advice = f"torch {machine.torch_version} is built without {library}, which training on several GPUs needs"
    return Finding.unless(machine.device_count == 1, what, f"no {library}", advice, "pip install torch")
