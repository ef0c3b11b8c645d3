"""What hardware is here: vendor, architecture, memory, dtypes, peak rates. An unknown peak is absent, never guessed."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from dataclasses import dataclass
from typing import Literal

from ligertune.errors import UserError
from ligertune.host_memory import total_memory
from ligertune.imports import importing

Vendor = Literal["nvidia", "amd", "cpu"]


@dataclass(frozen=True)
class Peak:
    """Data-sheet rates of one torch device, dense (no sparsity).

    `name_part` is matched against the device's name, lower case. bandwidth: bytes/s; bf16: FLOP/s.
    """

    name_part: str
    bandwidth: float
    bf16: float
    source: str


# The first row whose name_part stands in the device's name as words of its own: longer names stand before their parts.
PEAKS = (
    Peak("h100 nvl", 3.9e12, 835e12, "NVIDIA H100 data sheet"),
    Peak("h100 pcie", 2.0e12, 756e12, "NVIDIA H100 data sheet"),
    Peak("h100", 3.35e12, 989e12, "NVIDIA H100 data sheet"),
    Peak("h200", 4.8e12, 989e12, "NVIDIA H200 data sheet"),
    Peak("gb200", 8.0e12, 2500e12, "NVIDIA GB200 data sheet"),
    Peak("b200", 8.0e12, 2250e12, "NVIDIA B200 data sheet"),
    Peak("b300", 8.0e12, 2250e12, "NVIDIA B300 data sheet"),
    Peak("a100-sxm4-40gb", 1.555e12, 312e12, "NVIDIA A100 data sheet"),
    Peak("a100-pcie-40gb", 1.555e12, 312e12, "NVIDIA A100 data sheet"),
    Peak("a100 80gb pcie", 1.935e12, 312e12, "NVIDIA A100 data sheet"),
    Peak("a100", 2.039e12, 312e12, "NVIDIA A100 data sheet"),
    Peak("l40s", 0.864e12, 362e12, "NVIDIA L40S data sheet"),
    Peak("nvidia l4", 0.300e12, 121e12, "NVIDIA L4 data sheet"),
    Peak("rtx 4090", 1.008e12, 165.2e12, "NVIDIA Ada white paper (fp32 accumulate)"),
    Peak("rtx 5090", 1.792e12, 209.5e12, "NVIDIA Blackwell white paper (fp32 accumulate)"),
    Peak("mi355x", 8.0e12, 2516.6e12, "AMD Instinct MI355X data sheet"),
    Peak("mi350x", 8.0e12, 2306.9e12, "AMD Instinct MI350X data sheet"),
    Peak("mi325x", 6.0e12, 1307.4e12, "AMD Instinct MI325X data sheet"),
    Peak("mi300x", 5.3e12, 1307.4e12, "ROCm documentation, MI300"),
    Peak("mi250x", 1.6e12, 191.5e12, "AMD Instinct MI250X data sheet, one of two dies"),
    Peak("mi250", 1.6e12, 181e12, "ROCm documentation, MI250, one of two dies"),
    Peak("mi210", 1.6e12, 181e12, "AMD Instinct MI210 data sheet"),
    Peak("rx 7900 xtx", 0.960e12, 122.8e12, "AMD Radeon RX 7900 XTX data sheet"),
)
# Words by which a device of the same name is a smaller one: RTX 4090 Laptop, RTX 5090 D, a slice of an A100.
LESSER = {"laptop", "d", "max-q", "mig"}


@dataclass(frozen=True)
class Machine:
    """One rank's device and the world it belongs to."""

    vendor: Vendor
    device: str  # torch's name: "cpu", "cuda"
    name: str
    arch: str  # "sm90", "gfx942", "x86_64"
    device_count: int
    memory_bytes: int
    has_bfloat16: bool
    peak_flops: float | None  # bf16/fp16, dense, FLOP/s
    peak_bandwidth: float | None  # bytes/s
    world_size: int
    torch_version: str


def world_size() -> int:
    """How many processes a launcher (accelerate launch, torchrun) started; 1 without a launcher."""
    return _of_the_launcher("WORLD_SIZE", 1)


def is_launched() -> bool:
    """Whether a launcher started this process; `accelerate launch --num_processes 1` leaves nothing but its own."""
    return any(name in os.environ for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"))


def rank() -> int:
    """Which of the run's processes this is."""
    return _of_the_launcher("RANK", 0)


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def is_first_on_node() -> bool:
    """Whether this process is the one that does for the others of its node what need be done once."""
    return local_rank() == 0


def local_rank() -> int:
    """Which of its node's processes this is, and so which GPU is its own."""
    return _of_the_launcher("LOCAL_RANK", 0)


def ranks_on_node() -> int:
    """How many processes of the run share this node."""
    return _of_the_launcher("LOCAL_WORLD_SIZE", 1)


def _of_the_launcher(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.strip().isdecimal():
        raise UserError(
            f"The environment variable {name} is {value!r}; a launcher sets it to a whole number.",
            hint=f"Start the run with accelerate launch or torchrun, or unset {name}.",
        )
    return int(value)


def choose_processes(wanted: int | Literal["auto"], strategy: str) -> int:
    """`parallel.num_processes`: those that a launcher started, or one for each visible GPU. Imports torch."""
    if is_launched():
        if wanted not in ("auto", world_size()):
            raise UserError(
                f"parallel.num_processes: {wanted}, but the launcher started {world_size()} processes.",
                hint=f"Write parallel.num_processes: auto, or tell the launcher to start {wanted}.",
            )
        return world_size()
    if strategy == "single":
        return 1
    with importing():
        import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return max(1, gpus)
    if 0 < gpus < wanted:
        raise UserError(
            f"parallel.num_processes: {wanted}, but {gpus} {'GPU is' if gpus == 1 else 'GPUs are'} visible, and each "
            "process needs its own.",
            hint=f"Write parallel.num_processes: {gpus} or fewer, or look at CUDA_VISIBLE_DEVICES.",
        )
    return wanted


def peak_of(name: str) -> Peak | None:
    """The data-sheet row of a device name, or None: then MFU is left out of the report."""
    lowered = name.lower()
    if LESSER & set(lowered.split()):
        return None
    return next((peak for peak in PEAKS if re.search(rf"(?<!\w){peak.name_part}(?!\w)", lowered)), None)


def this_machine() -> Machine:
    """Look at the hardware once. Imports torch."""
    with importing():
        import torch

    if not torch.cuda.is_available():
        return Machine(
            vendor="cpu",
            device="cpu",
            name=_cpu_name(),
            arch=platform.machine(),
            device_count=1,
            memory_bytes=total_memory(),
            has_bfloat16=True,
            peak_flops=None,
            peak_bandwidth=None,
            world_size=world_size(),
            torch_version=torch.__version__,
        )
    # accelerate counts the same way
    properties = torch.cuda.get_device_properties(local_rank() % torch.cuda.device_count())
    amd = torch.version.hip is not None
    # gcnArchName is like "gfx942:sramecc+:xnack-"; a capability means nothing on AMD
    arch = properties.gcnArchName.split(":")[0] if amd else f"sm{properties.major}{properties.minor}"
    peak = peak_of(properties.name)
    return Machine(
        vendor="amd" if amd else "nvidia",
        device="cuda",
        name=properties.name,
        arch=arch,
        device_count=torch.cuda.device_count(),
        memory_bytes=properties.total_memory,
        has_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        peak_flops=peak.bf16 if peak else None,
        peak_bandwidth=peak.bandwidth if peak else None,
        world_size=world_size(),
        torch_version=torch.__version__,
    )


def imagined_machine(*, memory_gib: float | None, gpus: int | None) -> Machine:
    """This machine; or what is asked for: a GPU with that much memory, or several that train together."""
    machine = this_machine()
    if memory_gib is not None:
        name = machine.name if machine.device == "cuda" else f"a GPU of {memory_gib:g} GiB"
        vendor = machine.vendor if machine.device == "cuda" else "nvidia"
        machine = dataclasses.replace(
            machine, vendor=vendor, device="cuda", name=name, memory_bytes=int(memory_gib * 2**30)
        )
    return machine if gpus is None else dataclasses.replace(machine, world_size=gpus, device_count=gpus)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "CPU"
