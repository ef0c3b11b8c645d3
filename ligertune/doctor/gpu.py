"""The device: whether torch sees it, its driver, dtypes, kernels, attention, and what AMD's software must be told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from packaging.version import Version

from ligertune.doctor.finding import Finding
from ligertune.hardware import Machine

# Every kernel is compiled ahead of time for these by the tests; none has been run on one by us.
COMPILED_FOR = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
AOTRITON = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
OLDEST_BITSANDBYTES = Version("0.50")  # on ROCm


def hardware() -> Literal["nvidia", "amd", "amd, closed", ""]:
    """The GPU that the operating system shows, whatever torch makes of it."""
    kfd = Path("/dev/kfd")
    if kfd.exists():
        return "amd" if os.access(kfd, os.R_OK | os.W_OK) else "amd, closed"
    return "nvidia" if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") else ""


def device(machine: Machine, present: str) -> Finding:
    """What torch computes on; a warning where there is a GPU that it does not see."""
    value = f"{machine.name} ({machine.arch}) x {machine.device_count}, {machine.memory_bytes / 2**30:.1f} GiB"
    if machine.vendor != "cpu" or not present:
        return Finding("device", value)
    if present == "amd, closed":
        advice = "there is an AMD GPU, and this user may not open /dev/kfd"
        return Finding("device", value, advice, "sudo usermod -aG render,video $USER    # then log in again")
    advice = (
        f"there is {'an AMD' if present == 'amd' else 'an NVIDIA'} GPU, and torch {machine.torch_version} sees none"
    )
    command = "python -c 'import torch; torch.cuda.init()'    # says why: a CPU build, an old driver, or none visible"
    return Finding("device", value, advice, command)


def driver(machine: Machine) -> Finding:
    """The kernel module's version, and the CUDA or ROCm that torch was built with."""
    import torch

    if machine.vendor == "cpu":
        return Finding("driver", "none in use")
    if machine.vendor == "amd":
        module = Path("/sys/module/amdgpu/version")
        version = module.read_text(encoding="utf-8").strip() if module.is_file() else "the kernel's own amdgpu"
        return Finding("driver", f"{version}; torch is built for ROCm {torch.version.hip}")
    return Finding("driver", f"{_nvidia_driver() or 'unknown'}; torch is built for CUDA {torch.version.cuda}")


def _nvidia_driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:  # a GPU that hangs
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def dtypes(machine: Machine) -> Finding:
    """What `model.dtype: auto` comes to."""
    if machine.vendor == "cpu":
        return Finding("model.dtype: auto", "float32")
    if machine.has_bfloat16:
        return Finding("model.dtype: auto", "bfloat16")
    return Finding("model.dtype: auto", "float16 (mixed precision, scaled loss): no bfloat16 here")


def peaks(machine: Machine) -> Finding:
    """The data sheet's rates, dense."""
    if machine.peak_flops is None:
        return Finding("peak rates", "unknown (MFU is left out of reports)")
    rates = f"{machine.peak_flops / 1e12:.0f} TFLOP/s bfloat16, {machine.peak_bandwidth / 1e12:.2f} TB/s"
    return Finding("peak rates", rates)


def kernels(machine: Machine) -> Finding:
    """Triton, or the references."""
    from ligertune_kernels import backend

    what, found = "kernels run on", backend(machine.device)
    if found == "triton":
        return Finding(what, "Triton")
    if machine.vendor == "cpu":
        return Finding(what, "the PyTorch references")
    advice = "a GPU without triton, which torch's wheels for Linux bring along"
    command = "pip install triton" if machine.vendor == "nvidia" else "install torch's ROCm build again"
    return Finding(what, "the PyTorch references", advice, command)


def attention(machine: Machine) -> Finding:
    """Which can train here, whatever the model."""
    from ligertune.attention.choice import ATTENTIONS, missing_here

    reasons = {row.name: missing_here(row, machine) for row in ATTENTIONS}
    there = ", ".join(name for name, reason in reasons.items() if reason is None)
    absent = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    return Finding("attention", there + (f" (not {absent})" if absent else ""))


def amd(machine: Machine, variables: Mapping[str, str], *, installed_bitsandbytes: str | None) -> list[Finding]:
    """What only AMD GPUs need; nothing on others."""
    if machine.vendor != "amd":
        return []
    found = [_proved_on(machine.arch)]
    if machine.arch.startswith(("gfx10", "gfx11", "gfx12")):
        on = variables.get(AOTRITON) == "1"
        advice = "" if on else "on RDNA torch's flash attention (AOTriton) is off, and attention takes far more memory"
        found.append(Finding("AOTriton", "on" if on else "off", advice, "" if on else f"export {AOTRITON}=1"))
    if variables.get(OVERRIDE):
        advice = "kernels are then compiled for another chip than this one, and may compute wrongly"
        found.append(Finding(OVERRIDE, variables[OVERRIDE], advice, f"unset {OVERRIDE}"))
    if installed_bitsandbytes and Version(installed_bitsandbytes) < OLDEST_BITSANDBYTES:
        advice = f"ROCm needs bitsandbytes {OLDEST_BITSANDBYTES} or newer"
        command = f"pip install 'bitsandbytes>={OLDEST_BITSANDBYTES}'"
        found.append(Finding("bitsandbytes", installed_bitsandbytes, advice, command))
    return found


def _proved_on(arch: str) -> Finding:
    if arch in COMPILED_FOR:
        said = f"compiled for {arch} by the tests, never run on it by the authors"
    else:
        said = f"{arch} is not among the chips that the tests compile for ({', '.join(COMPILED_FOR)})"
    return Finding("kernels on this chip", f"{said}; `ligertune doctor --kernels` checks them here")


def communication(machine: Machine) -> Finding:
    """What several GPUs talk through. ROCm's library goes by NVIDIA's name in torch."""
    import torch
    from torch import distributed

    what = "several processes"
    if not distributed.is_available():
        return Finding(what, "this torch is built without torch.distributed: one process only")
    if machine.vendor == "cpu":
        return Finding(what, "gloo")
    library = "RCCL" if machine.vendor == "amd" else "NCCL"
    if distributed.is_nccl_available():
        return Finding(what, f"{library} {'.'.join(map(str, torch.cuda.nccl.version()))}")
    advice = f"torch {machine.torch_version} is built without {library}, through which several GPUs train together"
    several = machine.device_count > 1
    return Finding(what, f"no {library}", advice if several else "", "pip install torch" if several else "")
