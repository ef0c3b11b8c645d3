"""All that the doctor looks at, in the order in which it is read."""

from __future__ import annotations

import os

from ligertune.doctor import gpu, host, software
from ligertune.doctor.finding import Finding
from ligertune.hardware import this_machine
from ligertune.report import versions


def examine() -> list[Finding]:
    """Look at versions, device, attention, memory and environment. Imports torch."""
    installed = versions()
    triton = software.triton_version(installed)
    first = [software.python(), *software.packages(installed)]
    if (broken := software.torch_that_fails()) is not None:
        return [*first, broken, *host.resources()]
    machine = this_machine()
    return [
        *first,
        software.pairing(installed.get("torch", ""), triton, software.required_by_torch()),
        software.triton_owners(software.owners_of_triton()),
        software.c_compiler(triton, needed=machine.vendor != "cpu"),
        gpu.device(machine, gpu.hardware()),
        gpu.driver(machine),
        gpu.dtypes(machine),
        gpu.peaks(machine),
        gpu.kernels(machine),
        gpu.attention(machine),
        *gpu.amd(machine, os.environ, installed_bitsandbytes=software.version_of("bitsandbytes")),
        gpu.communication(machine),
        *host.resources(),
        *host.environment(os.environ, machine.vendor),
    ]
