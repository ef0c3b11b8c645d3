"""Compile what the ops launch for GPUs that are absent, and read registers, spills and atomics from the output.

Triton needs only a few methods of a driver. With a stand-in for the driver the ops run on meta tensors: Triton
specialises and compiles for the target as it would on the target, and the launch itself does nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ligertune_kernels.chips import MAX_THREADS, Chip
from ligertune_kernels.launcher import meta_runs_as
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# processors, bytes of L2, bytes of shared memory (LDS) of one program
TARGETS = {
    chip.arch: chip
    for chip in (
        Chip("nvidia", "sm80", 32, 108, 40 << 20, shared_bytes=166912),  # A100
        Chip("nvidia", "sm90", 32, 132, 50 << 20, shared_bytes=232448),  # H100
        Chip("nvidia", "sm100", 32, 148, 126 << 20, shared_bytes=232448),  # B200
        Chip("nvidia", "sm120", 32, 170, 96 << 20, shared_bytes=101376),  # RTX 5090
        Chip("amd", "gfx90a", 64, 104, 8 << 20, shared_bytes=65536),  # MI250X, one of two dies
        Chip("amd", "gfx942", 64, 304, 4 << 20, shared_bytes=65536),  # MI300X
        Chip("amd", "gfx950", 64, 256, 4 << 20, shared_bytes=163840),  # MI355X
        Chip("amd", "gfx1100", 32, 96, 6 << 20, shared_bytes=65536),  # RX 7900 XTX
        Chip("amd", "gfx1101", 32, 60, 4 << 20, shared_bytes=65536),  # RX 7800 XT
        Chip("amd", "gfx1102", 32, 32, 2 << 20, shared_bytes=65536),  # RX 7600
        Chip("amd", "gfx1151", 32, 40, 2 << 20, shared_bytes=65536),  # Radeon 8060S (Ryzen AI Max)
        Chip("amd", "gfx1201", 32, 64, 8 << 20, shared_bytes=65536),  # RX 9070 XT
    )
}


# The backward of document_attention on Hopper adds in a fixed order, so its atomics give the same bits in every run.
# It spills some addresses and arguments. With heads of 64 columns, a smaller tile that spills nothing took more
# time on an H100; for 128 columns no tile without spills was found. Both kernels of 256 columns spill some, too.
ORDERED_ATOMICS = {"hopper_attention_backward_kernel"}
MOST_SPILLED = {  # bytes of stack; on AMD registers
    "sm90": {
        "hopper_attention_backward_kernel": 288,
        "hopper_attention_wide_dk_dv_kernel": 24,
        "hopper_attention_wide_dq_kernel": 128,
        "correction_gradients_kernel": 328,  # on an H200 0.60 ms instead of 0.79 of the tile that spills nothing
        "key_gradients_kernel": 48,
        # outside of the loops over levels. Chunks of 32 tokens spill nothing, and double the states in memory
        "kda_products_kernel": 40,
        "kda_decay_gradients_kernel": 208,
    },
    # heads of 256 columns: chunks of 16 tokens spill nothing, and double the states in memory
    "sm100": {"key_gradients_kernel": 64},
    "sm120": {"key_gradients_kernel": 48},
    # heads of 256 columns: of six tiles none spills less
    "gfx1100": {"states_kernel": 8},
    "gfx1101": {"states_kernel": 8},
    # its processors have two thirds of the registers of the others; tiles that spill less were not looked for
    "gfx1102": {"states_kernel": 8, "outputs_kernel": 48, "local_gradients_kernel": 2},
    "gfx1151": {"states_kernel": 8},
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
    float64_arguments: tuple[str, ...] = ()  # scalars; RDNA computes float64 at 1/32 of the rate of float32

    def faults(self, target: Chip) -> list[str]:
        """Return a sentence for each fault of the kernel on the target."""
        most_spilled = MOST_SPILLED.get(target.arch, {}).get(self.kernel, 0)
        most_scratch = 4 * most_spilled + 4 if most_spilled else 0  # what AMD spills, and one number more
        found = {
            f"{self.threads} threads": self.threads > MAX_THREADS,
            f"{self.shared_bytes} bytes of shared memory": self.shared_bytes > target.shared_bytes,
            f"{self.spills} spilled": self.spills > most_spilled,
            f"{self.scratch_bytes} bytes of scratch": self.scratch_bytes > most_scratch,
            f"atomics: {', '.join(self.atomics)}": bool(self.atomics) and self.kernel not in ORDERED_ATOMICS,
            f"32-bit offsets of {', '.join(self.narrow_offsets)}": bool(self.narrow_offsets),
            "a bf16 dot product that truncates": self.truncating_dot,
            f"float64 arguments: {', '.join(self.float64_arguments)}": bool(self.float64_arguments),
        }
        return [f"{self.kernel}: {fault}" for fault, there in found.items() if there]


_device_numbers = itertools.count()


class PretendDriver:
    """The methods of a driver that Triton calls. Limits are checked in the compiler's output, so none is set here."""

    launcher_cls = staticmethod(lambda src, metadata: lambda *args: None)
    set_current_device = unload_module = staticmethod(lambda *args: None)

    def __init__(self, target: Chip) -> None:
        self.target = target
        self.utils = self
        self.number = next(_device_numbers)  # Triton caches compiled kernels by device: a new number finds none

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1 << 20  # module, function, registers, spills, most threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 1 << 30,
            "multiprocessor_count": self.target.processors,
            "max_num_regs": 65536,
            "warpSize": self.target.warp_size,
        }

    def get_current_target(self) -> GPUTarget:
        chip = self.target
        backend, arch = ("cuda", int(chip.arch[2:])) if chip.vendor == "nvidia" else ("hip", chip.arch)
        return GPUTarget(backend, arch, chip.warp_size)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_for(target: Chip, run: Callable[[], object]) -> list[Compiled]:
    """Return every kernel that `run` launches on meta tensors, compiled for the target; the same code once."""
    written: list[tuple[dict, dict[str, str]]] = []  # Triton's metadata and files of each kernel

    def listener(*, src, metadata, metadata_group, times, cache_hit) -> None:
        written.append((dict(metadata), dict(metadata_group)))

    # Triton has no public way to restore the active driver.
    active, heard = driver._active, knobs.compilation.listener
    knobs.compilation.listener = listener
    driver.set_active(PretendDriver(target))
    try:
        with meta_runs_as(target):
            run()
    finally:
        driver._active, knobs.compilation.listener = active, heard
    return list(dict.fromkeys(_compiled(metadata, files, target) for metadata, files in written))


def _compiled(metadata: dict, files: dict[str, str], target: Chip) -> Compiled:
    assembly = _text(files, ".ptx" if target.vendor == "nvidia" else ".amdgcn")
    intermediate = _text(files, ".ttgir" if metadata["name"].startswith("hopper") else ".ttir")
    return Compiled(
        kernel=metadata["name"],
        threads=metadata["num_warps"] * target.warp_size,
        shared_bytes=metadata["shared"],
        assembly=hashlib.sha256(assembly.encode()).hexdigest()[:16],
        narrow_offsets=narrow_offsets(intermediate),
        float64_arguments=float64_arguments(intermediate),
        **(_resources_cuda(assembly, files) if target.vendor == "nvidia" else _resources_hip(assembly)),
    )


def _text(files: dict[str, str], ending: str) -> str:
    return Path(next(path for name, path in files.items() if name.endswith(ending))).read_text(encoding="utf-8")


def _resources_hip(assembly: str) -> dict[str, object]:
    def figure(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        return int(found[1]) if found else 0

    return {
        "registers": figure("vgpr_count"),
        "spills": figure("vgpr_spill_count") + figure("sgpr_spill_count"),
        "scratch_bytes": figure("private_segment_fixed_size"),
        "atomics": tuple(sorted(set(re.findall(r"\b\w*(?:atomic|cmpswap)\w*", assembly)))),
        "truncating_dot": "v_dot2_bf16_bf16" in assembly,
    }


def _resources_cuda(ptx: str, files: dict[str, str]) -> dict[str, object]:
    cubin = next(path for name, path in files.items() if name.endswith(".cubin"))
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said).groups()
    atomics = tuple(sorted(set(re.findall(r"\b(?:atom|red)\.[\w.:]+", ptx))))
    return dict(zip(("registers", "spills", "scratch_bytes"), map(int, found), strict=True), atomics=atomics)


def float64_arguments(ttir: str) -> tuple[str, ...]:
    """Return the scalar arguments of a kernel that are float64, from the signature in Triton's intermediate code."""
    (signature,) = re.findall(r"tt\.func public @.*", ttir)
    return tuple(re.findall(r"%(\w+): f64\b", signature))


def narrow_offsets(ttir: str) -> tuple[str, ...]:
    """Return the pointer arguments with an offset that is a 32-bit product of a program's number and an argument.

    ttir: Triton's intermediate code. In tensors of more than 2**31 elements a row's number fits into 32 bits, but that
    number times a stride does not, so the product must be taken in 64 bits. Only a GPU with enough memory could show
    the overflow by its results; the type of the product shows it everywhere.
    """
    constants: set[str] = set()
    by_program: set[str] = set()  # values that depend on the program's number
    products: set[str] = set()  # 32-bit products of such a value and a value that is not known at compile time
    pointers = {name: name.lstrip("%") for name in re.findall(r"(%\w+): !tt\.ptr", ttir)}
    found: set[str] = set()

    def follow(results: list[str], operands: list[str]) -> None:
        for values in (by_program, products):
            if any(operand in values for operand in operands):
                values.update(results)
        if operands and operands[0] in pointers:
            pointers.update(dict.fromkeys(results, pointers[operands[0]]))

    for line in ttir.splitlines():
        written, body = re.match(r"\s*(?:((?:%[\w:]+(?:, )?)+) = )?(.*)$", line.split(" loc(")[0]).groups()
        results = [name.split(":")[0] for name in (written or "").split(", ") if name]
        operands = re.findall(r"%\w+", body)
        if body.startswith("scf.for"):
            for argument, first in re.findall(r"(%\w+) = (%\w+)", body):
                follow([argument], [first])
            index, first, last = re.match(r"scf\.for (%\w+) = (%\w+) to (%\w+)", body).groups()
            follow([index], [first, last])
        for values in (constants, by_program, products):
            values.difference_update(results)  # names are those of a region, and come again in the next one
        if body.startswith("arith.constant") or (
            re.match(r"tt\.(splat|broadcast|expand_dims)|arith\.ext", body) and operands[0] in constants
        ):
            constants.update(results)
        elif body.startswith("tt.get_program_id"):
            by_program.update(results)
        elif not re.match(r"tt\.(load|dot)|arith\.cmp", body):
            follow(results, operands)
            if re.match(r"arith\.muli .*i32>*$", body) and any(
                one in by_program and other not in constants for one, other in (operands[:2], operands[1::-1])
            ):
                products.update(results)
            if body.startswith("tt.addptr") and operands[1] in products:
                found.add(pointers.get(operands[0], operands[0]))
    return tuple(sorted(found))
