"""Compile what the ops launch for GPUs that are absent, and read registers, spills and atomics from the output.

Triton needs only a few methods of a driver. With a stand-in for the driver the ops run on meta tensors: Triton
specialises and compiles for the target as it would on the target, and the launch itself does nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ligertune_kernels.chips import MAX_THREADS, Chip
from ligertune_kernels.launcher import meta_runs_as
from narrow_offsets import narrow_offsets
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@dataclass(frozen=True)
class Target:
    """A GPU: Triton's compilation target, the chip of the launch rules, and the shared memory (LDS) of one program."""

    compiler: GPUTarget
    chip: Chip
    shared_bytes: int


def _target(backend: str, arch: str | int, warp_size: int, shared: int, processors: int, l2_mib: int) -> Target:
    vendor, name = ("nvidia", f"sm{arch}") if backend == "cuda" else ("amd", str(arch))
    chip = Chip(vendor, name, warp_size, processors, l2_mib << 20, shared_bytes=shared)
    return Target(GPUTarget(backend, arch, warp_size), chip, shared)


TARGETS = {
    target.chip.arch: target
    for target in (
        _target("cuda", 80, 32, 166912, 108, 40),  # A100
        _target("cuda", 90, 32, 232448, 132, 50),  # H100
        _target("cuda", 100, 32, 232448, 148, 126),  # B200
        _target("cuda", 120, 32, 101376, 170, 96),  # RTX 5090
        _target("hip", "gfx90a", 64, 65536, 104, 8),  # MI250X, one of two dies
        _target("hip", "gfx942", 64, 65536, 304, 4),  # MI300X
        _target("hip", "gfx950", 64, 163840, 256, 4),  # MI355X
        _target("hip", "gfx1100", 32, 65536, 96, 6),  # RX 7900 XTX
        _target("hip", "gfx1201", 32, 65536, 64, 8),  # RX 9070 XT
    )
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: the resources it takes, and instructions that must not occur in it."""

    kernel: str
    threads: int
    registers: int  # of a thread
    assembly: str  # the start of its SHA-256
    shared_bytes: int = 0
    spills: int = 0  # registers; on NVIDIA bytes of stack, which nothing else uses
    scratch_bytes: int = 0
    atomics: tuple[str, ...] = ()
    narrow_offsets: tuple[str, ...] = ()  # pointers whose 32-bit offsets overflow beyond 2**31 elements
    truncating_dot: bool = False  # RDNA's bf16 dot product rounds towards zero

    def faults(self, target: Target) -> list[str]:
        """Return a sentence for each fault of the kernel on the target."""
        found = {
            f"{self.threads} threads": self.threads > MAX_THREADS,
            f"{self.shared_bytes} bytes of shared memory": self.shared_bytes > target.shared_bytes,
            f"{self.spills} spilled": self.spills > 0,
            f"{self.scratch_bytes} bytes of scratch": self.scratch_bytes > 0,
            f"atomics: {', '.join(self.atomics)}": bool(self.atomics),
            f"32-bit offsets of {', '.join(self.narrow_offsets)}": bool(self.narrow_offsets),
            "a bf16 dot product that truncates": self.truncating_dot,
        }
        return [f"{self.kernel}: {fault}" for fault, there in found.items() if there]


class _Launcher:
    """Stand in for the launcher, and launch nothing."""

    def __init__(self, src: object, metadata: object) -> None:
        pass

    def __call__(self, *args: object) -> None:
        pass


_device_numbers = itertools.count()


class PretendDriver:
    """The methods of a driver that Triton calls. Limits are checked in the compiler's output, so none is set here."""

    launcher_cls = _Launcher

    def __init__(self, target: Target) -> None:
        self.target = target
        self.utils = self
        self.number = next(_device_numbers)  # Triton caches compiled kernels by device: a new number finds none

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1 << 20  # module, function, registers, spills, most threads

    def unload_module(self, *args: object) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 1 << 30,
            "multiprocessor_count": self.target.chip.processors,
            "max_num_regs": 65536,
            "warpSize": self.target.compiler.warp_size,
        }

    def get_current_target(self) -> GPUTarget:
        return self.target.compiler

    def get_current_device(self) -> int:
        return self.number

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextlib.contextmanager
def _pretending(target: Target) -> Iterator[list[tuple[dict, dict[str, str]]]]:
    """Compile kernels for the target inside the context; yield Triton's metadata and files of each."""
    written: list[tuple[dict, dict[str, str]]] = []

    def listener(*, src, metadata, metadata_group, times, cache_hit) -> None:
        written.append((dict(metadata), dict(metadata_group)))

    # Triton has no public way to restore the active driver.
    active, heard = driver._active, knobs.compilation.listener
    knobs.compilation.listener = listener
    driver.set_active(PretendDriver(target))
    try:
        with meta_runs_as(target.chip):
            yield written
    finally:
        driver._active, knobs.compilation.listener = active, heard


def compile_for(target: Target, run: Callable[[], object]) -> list[Compiled]:
    """Return every kernel that `run` launches on meta tensors, compiled for the target; the same code once."""
    with _pretending(target) as written:
        run()
    read = _read_cuda if target.compiler.backend == "cuda" else _read_hip
    return list(dict.fromkeys(read(metadata, files, target) for metadata, files in written))


def _start_of_sha256(assembly: str) -> str:
    return hashlib.sha256(assembly.encode()).hexdigest()[:16]


def _text(files: dict[str, str], ending: str) -> str:
    return Path(next(path for name, path in files.items() if name.endswith(ending))).read_text(encoding="utf-8")


def _read_hip(metadata: dict, files: dict[str, str], target: Target) -> Compiled:
    assembly = _text(files, ".amdgcn")

    def figure(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        return int(found[1]) if found else 0

    return Compiled(
        kernel=metadata["name"],
        threads=metadata["num_warps"] * target.compiler.warp_size,
        shared_bytes=metadata["shared"],
        registers=figure("vgpr_count"),
        spills=figure("vgpr_spill_count") + figure("sgpr_spill_count"),
        scratch_bytes=figure("private_segment_fixed_size"),
        atomics=tuple(sorted(set(re.findall(r"\b\w*(?:atomic|cmpswap)\w*", assembly)))),
        assembly=_start_of_sha256(assembly),
        narrow_offsets=narrow_offsets(_text(files, ".ttir")),
        truncating_dot="v_dot2_bf16_bf16" in assembly,
    )


def _read_cuda(metadata: dict, files: dict[str, str], target: Target) -> Compiled:
    cubin = next(path for name, path in files.items() if name.endswith(".cubin"))
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = _text(files, ".ptx")
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said).groups())
    return Compiled(
        kernel=metadata["name"],
        threads=metadata["num_warps"] * target.compiler.warp_size,
        shared_bytes=metadata["shared"],
        registers=registers,
        spills=stack,
        scratch_bytes=local,
        atomics=tuple(sorted(set(re.findall(r"\b(?:atom|red)\.[\w.:]+", ptx)))),
        assembly=_start_of_sha256(ptx),
        narrow_offsets=narrow_offsets(_text(files, ".ttir")),
    )
