"""Installed versions: whether they are new enough, whether torch and triton pair, and who owns the folder `triton`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from ligertune.doctor.finding import Finding

# What was tested together, for the CPU builds of torch, which name no triton. Both by their first two numbers.
PAIRS = {"2.11": "3.6", "2.13": "3.7", "2.14": "3.8"}
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm")
BRINGS_ITS_COMPILER = Version("3.9")  # the first triton that needs no C compiler at run time
REINSTALL = "pip uninstall -y {packages}, then install torch again the way it was installed, which brings the right one"


def python() -> Finding:
    """Of this process."""
    return Finding("python", f"{platform.python_version()} at {sys.executable}")


def packages(installed: Mapping[str, str]) -> list[Finding]:
    """A line each, with a warning where ligertune asks for a newer one."""
    wanted = {requirement.name: requirement for requirement in _requirements_of("ligertune")}
    return [package(name, version, wanted.get(name)) for name, version in installed.items()]


def package(name: str, version: str, wanted: Requirement | None) -> Finding:
    """One package against what ligertune's own metadata asks for."""
    if wanted is None or wanted.specifier.contains(version, prereleases=True):
        return Finding(name, version)
    advice = f"ligertune needs {name}{wanted.specifier}"
    return Finding(name, version, advice, f"pip install '{name}{wanted.specifier}'")


def torch_that_fails() -> Finding | None:
    """Why torch cannot be imported; None where it can."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as problem:  # no torch; a library of CUDA's or ROCm's that is not there
        reason = str(problem).splitlines()[0]
        return Finding("torch imports", "no", reason, "pip install --force-reinstall torch")
    return None


def triton_version(installed: Mapping[str, str]) -> str:
    """Of whichever triton there is; empty without one."""
    return next((installed[name] for name in TRITON_NAMES if name in installed), "")


def required_by_torch() -> str | None:
    """The version of triton that this build of torch names; None for a CPU build."""
    for requirement in _requirements_of("torch"):
        if requirement.name in TRITON_NAMES:
            exact = [clause.version for clause in requirement.specifier if clause.operator == "=="]
            return exact[0] if exact else None
    return None


def pairing(torch: str, triton: str, required: str | None) -> Finding:
    """Whether this triton is the one that this torch was built for. Versions as pip shows them; "" is none."""
    what = "torch and triton"
    if not triton:
        return Finding(what, "no triton: the kernels run on their PyTorch references")
    number = re.match(r"\d+\.\d+", torch)
    expected = required or PAIRS.get(number.group() if number else "")
    if expected is None:
        return Finding(what, f"{torch} and {triton}: not known to pair, nor not to")
    length = len(expected.split("."))
    found = ".".join(triton.split("+")[0].split(".")[:length])
    if found == expected.split("+")[0]:
        return Finding(what, f"{torch} and {triton} pair")
    advice = f"torch {torch} goes with triton {expected}, and {triton} is installed"
    if required:
        return Finding(what, "do not pair", advice, REINSTALL.format(packages="torch " + " ".join(owners_of_triton())))
    return Finding(what, "do not pair", advice, f"pip install 'triton=={expected}.*'")


def owners_of_triton() -> list[str]:
    """The installed packages that hold a top-level `triton`."""
    return sorted(set(importlib.metadata.packages_distributions().get("triton", [])))


def triton_owners(owners: Sequence[str]) -> Finding:
    """`triton` and `triton-rocm` own the same folder, and pip overwrites one with the other in silence."""
    advice, command = "", ""
    if len(owners) > 1:
        advice = f"the folder triton belongs to {' and '.join(owners)}, of which the last installed has won"
        command = REINSTALL.format(packages=" ".join(["torch", *owners]))
    return Finding("triton comes from", ", ".join(owners) or "not installed", advice, command)


def c_compiler(triton: str, *, needed: bool) -> Finding:
    """Triton up to 3.8 builds a small launcher in C for each kernel: that takes a compiler and Python's headers."""
    what, path = "C compiler", _compiler()
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    value = f"{path or 'none'}, {'with' if headers else 'without'} Python's headers"
    if not needed or not triton or Version(triton.split("+")[0]) >= BRINGS_ITS_COMPILER or (path and headers):
        return Finding(what, value)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return Finding(
        what,
        value,
        f"triton {triton} compiles a launcher for each kernel",
        f"apt-get install -y gcc libc6-dev {python}    # or: dnf install gcc python3-devel",
    )


def _compiler() -> str | None:
    """What Triton looks for, in its order."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def version_of(package: str) -> str | None:
    """The installed version; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements_of(package: str) -> list[Requirement]:
    """What a package's metadata asks for on this machine, extras left out; nothing if it is not installed."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # metadata of another packager, which pip let through
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found
