"""Hardware: GPU vendor, architecture, memory, dtypes, peak rates, host memory, and the ranks of a launcher."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligertune.errors import UserError, plural
from ligertune.progress import importing

Vendor = Literal["nvidia", "amd", "cpu"]
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
# cgroup v2 and v1: folder, limit, usage
CGROUP_FILES = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))


@dataclass(frozen=True)
class Peak:
    """Data-sheet rates of one torch device, dense (without sparsity). `name_part` is a part of its lower-case name."""

    name_part: str
    bandwidth: float  # bytes/s
    bf16: float  # FLOP/s
    source: str


# The first row whose name_part occurs in the device's name as whole words counts, so longer names come first.
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
SIMULATED_GPU = "simulated NVIDIA H100"  # the GPU that `ligertune plan` assumes on a machine without one
# Words that mark a slower device of the same name: RTX 4090 Laptop, RTX 5090 D, a MIG slice of an A100.
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
    nodes: int = 1


def world_size() -> int:
    """Return the number of processes that accelerate launch or torchrun started; 1 without a launcher."""
    return _launcher_variable("WORLD_SIZE", 1)


def is_launched() -> bool:
    """Whether a launcher started this process. `accelerate launch --num_processes 1` sets only its own variables."""
    return any(name in os.environ for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"))


def rank() -> int:
    """Return this process's rank in the run."""
    return _launcher_variable("RANK", 0)


def is_main_process() -> bool:
    """Whether this process prints and writes."""
    return rank() == 0


def is_first_on_node() -> bool:
    """Whether this process does the work that is done once per node."""
    return local_rank() == 0


def local_rank() -> int:
    """Return this process's rank on its node, which is the index of its GPU."""
    return _launcher_variable("LOCAL_RANK", 0)


def ranks_on_node() -> int:
    """Return the number of the run's processes on this node."""
    return _launcher_variable("LOCAL_WORLD_SIZE", 1)


def nodes() -> int:
    """Return the number of the run's nodes, as the launcher's variables say; 1 if they do not."""
    return max(1, world_size() // ranks_on_node()) if "LOCAL_WORLD_SIZE" in os.environ else 1


def _launcher_variable(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.strip().isdecimal():
        raise UserError(
            f"The environment variable {name} is {value!r}; a launcher sets it to a whole number.",
            hint=f"Start the run with accelerate launch or torchrun, or unset {name}.",
        )
    return int(value)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, which a scheduler may have limited."""
    # macOS and Windows have no such call
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_processes(wanted: int | Literal["auto"], strategy: str) -> int:
    """Resolve `parallel.num_processes`: the launcher's processes, or one per visible GPU. Imports torch."""
    if is_launched():
        if wanted not in ("auto", world_size()):
            raise UserError(
                f"parallel.num_processes: {wanted}, but the launcher started "
                f"{plural(world_size(), 'process', 'processes')}.",
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
    """Return the data-sheet row of a device name, or None. Without it the report has no MFU."""
    lowered = name.lower()
    if LESSER & set(lowered.split()):
        return None
    return next((peak for peak in PEAKS if re.search(rf"(?<!\w){peak.name_part}(?!\w)", lowered)), None)


def this_machine() -> Machine:
    """Return this process's device. Imports torch."""
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
            nodes=nodes(),
        )
    # accelerate maps local ranks to devices in the same way
    index = local_rank() % torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
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
        # torch.cuda.set_per_process_memory_fraction may have limited what torch allocates
        memory_bytes=int(properties.total_memory * torch.cuda.get_per_process_memory_fraction(index)),
        # by default also true for NVIDIA GPUs before sm80, which emulate bfloat16
        has_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        peak_flops=peak.bf16 if peak else None,
        peak_bandwidth=peak.bandwidth if peak else None,
        world_size=world_size(),
        torch_version=torch.__version__,
        nodes=nodes(),
    )


def simulated_machine(*, memory_gib: float | None, gpus: int | None) -> Machine:
    """Return this machine with another GPU memory (in GiB) or another number of GPUs, for `ligertune plan`.

    A machine without a GPU gets a simulated H100: kernels, dtypes and attention depend on the GPU, not on the CPU.
    """
    machine = this_machine()
    if memory_gib is None and gpus is None:
        return machine
    if machine.device == "cpu":
        peak = peak_of(SIMULATED_GPU)
        machine = dataclasses.replace(
            machine,
            vendor="nvidia",
            device="cuda",
            name=SIMULATED_GPU,
            arch="sm90",
            memory_bytes=80 * 2**30,
            peak_flops=peak.bf16 if peak else None,
            peak_bandwidth=peak.bandwidth if peak else None,
        )
    memory = machine.memory_bytes if memory_gib is None else int(memory_gib * 2**30)
    count = gpus or machine.device_count
    return dataclasses.replace(machine, memory_bytes=memory, world_size=gpus or machine.world_size, device_count=count)


def simulation_notes(machine: Machine) -> tuple[str, ...]:
    """Return a note if the machine is a simulated one."""
    if machine.name != SIMULATED_GPU:
        return ()
    size = f"{machine.memory_bytes / 2**30:g} GiB"
    return (f"this machine has no GPU: the plan assumes an NVIDIA H100 ({machine.arch}) with {size}",)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "CPU"


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes of host memory that are free without swapping, within the container's limit; None if unknown."""
    available = _table(proc / "meminfo").get("MemAvailable:")
    if available is None:
        return None
    return min([1024 * available, *(max(0, limit - taken) for limit, taken in _limits(cgroup))])


def total_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes of host memory, or the container's limit if that is less; 0 if unknown."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits(cgroup))])


def _limits(cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes of each control group. Cached files do not count."""
    for folder, limit, taken in CGROUP_FILES:
        most, held = (_number(cgroup / folder / name) for name in (limit, taken))
        if most is not None and held is not None:
            files = _table(cgroup / folder / "memory.stat")
            yield most, held - files.get("active_file", 0) - files.get("inactive_file", 0)


def _table(path: Path) -> dict[str, int]:
    """Read lines of a word and a number."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Read a number from a file; None if the file is missing or holds a word (`max`)."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
