"""Device and versions that a comparison runs on, read in a separate process so that the comparison holds no device.

`python -m ligertune.compare.target` prints them as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys

from ligertune.errors import UserError

VENDORS = {"nvidia": "NVIDIA", "amd": "AMD", "cpu": "CPU"}


def read_target() -> dict[str, str]:
    """Return vendor, name, arch, CUDA or ROCm, and package versions. Raises UserError if the device is unusable."""
    command = [sys.executable, "-m", "ligertune.compare.target"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(
            f"This machine's device cannot be used: {message[-1]}", hint="Try ligertune doctor.", exit_code=1
        )
    return json.loads(done.stdout.splitlines()[-1])


def label(target: dict[str, str], *, processes: int = 1) -> str:
    """Return one line: "NVIDIA H100 80GB HBM3 (sm90) x 1, CUDA 13.0, torch 2.11.0, ..."."""
    versions = ", ".join(f"{name} {target[name]}" for name in target if name not in ("vendor", "name", "arch"))
    vendor = VENDORS[target["vendor"]]
    name = target["name"] if vendor.lower() in target["name"].lower() else f"{vendor} {target['name']}"
    return f"{name} ({target['arch']}) x {processes}, {versions}"


def _describe() -> dict[str, str]:
    import torch

    from ligertune.hardware import this_machine
    from ligertune.report import versions

    machine = this_machine()
    runtime = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    named = {name: version for name, version in runtime.items() if version and machine.vendor != "cpu"}
    return {"vendor": machine.vendor, "name": machine.name, "arch": machine.arch, **named, **versions()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_describe()) + "\n")
