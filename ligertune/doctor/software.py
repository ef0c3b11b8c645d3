"""Findings of `ligertune doctor`, and checks of installed software: versions, torch and triton, a C compiler."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from ligertune.errors import message_of
from ligertune.progress import importing

# torch -> triton versions that we tested together, for the CPU builds of torch, which require no triton.
PAIRS = {"2.11": "3.6", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
# package -> oldest and newest minor version that tests ran with; CONTRIBUTING.md says which tests
TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm")
BRINGS_ITS_COMPILER = Version("3.9")  # the first triton that needs no C compiler at run time
REINSTALL = "pip uninstall -y {packages}, then install torch again the way it was installed, with its own triton"


@dataclass(frozen=True)
class Finding:
    """One line of the report. advice: what is wrong, empty if nothing is; command: fixes it, if a command can."""

    what: str
    value: str
    advice: str = ""
    command: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice

    def as_dict(self) -> dict[str, str | bool]:
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def unless(cls, fine: bool, what: str, value: str, advice: str, command: str = "") -> Finding:
        """Return a finding with advice and command, or without them if all is fine."""
        return cls(what, value) if fine else cls(what, value, advice, command)


def python() -> Finding:
    """Return the version and the path of this Python."""
    return Finding("python", f"{platform.python_version()} at {sys.executable}")


def packages(installed: Mapping[str, str]) -> list[Finding]:
    """Check each installed package against the minimum version that ligertune requires."""
    wanted = {requirement.name: requirement for requirement in _requirements_of("ligertune")}
    return [package(name, version, wanted.get(name)) for name, version in installed.items()]


def package(name: str, version: str, wanted: Requirement | None) -> Finding:
    """Check the version of one package. A version that is newer than the tested ones is said, and is no warning."""
    needs = f"{name}{wanted.specifier}" if wanted else ""
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return Finding(name, version, f"ligertune needs {needs}", f"pip install '{needs}'")
    return Finding(name, version + _outside_of_tests(name, version))


def _outside_of_tests(name: str, version: str) -> str:
    """Return " (tested: 2.11 to 2.15)" for a version outside of this range; else ""."""
    if name not in TESTED:
        return ""
    oldest, newest = TESTED[name]
    found = Version(version.split("+")[0]).release[:2]
    is_tested = Version(oldest).release <= found <= Version(newest).release
    return "" if is_tested else f" (not tested: the tests ran with {oldest} to {newest})"


def torch_that_fails() -> Finding | None:
    """Return the reason why torch cannot be imported, or None if it can."""
    try:
        with importing():
            import torch  # noqa: F401
    except (ImportError, OSError) as problem:  # OSError: a CUDA or ROCm library is missing
        reason = message_of(problem)
        return Finding("torch imports", "no", reason, "pip install --force-reinstall torch")
    return None


def bytecode(cached: str | None, *, writes: bool) -> Finding:
    """Check that Python keeps the bytecode of the packages that it imports.

    cached: path of the bytecode of an imported package's file (`torch.__spec__.cached`). writes: whether Python writes
    bytecode, as `not sys.dont_write_bytecode` says.
    """
    kept = cached is not None and Path(cached).is_file()
    folder = Path(cached).parents[2] if cached else "FOLDER"
    command = f"{sys.executable} -m compileall -q {folder}" if writes else "unset PYTHONDONTWRITEBYTECODE"
    advice = "every command compiles torch and transformers again, which doubles the time of imports"
    return Finding.unless(kept, "bytecode", "kept" if kept else "not kept", advice, command)


def triton_version(installed: Mapping[str, str]) -> str:
    """Return the version of triton, under any of its package names; "" if it is not installed."""
    return next((installed[name] for name in TRITON_NAMES if name in installed), "")


def required_by_torch() -> str | None:
    """Return the version of triton that this build of torch requires; None for a CPU build."""
    for requirement in _requirements_of("torch"):
        if requirement.name in TRITON_NAMES:
            return next((clause.version for clause in requirement.specifier if clause.operator == "=="), None)
    return None


def pairing(torch: str, triton: str, required: str | None) -> Finding:
    """Check that triton has the version that torch was built for. Versions as pip prints them; "": not installed."""
    what = "torch and triton"
    if not triton:
        return Finding(what, "no triton: the kernels run on their PyTorch references")
    number = re.match(r"\d+\.\d+", torch)
    expected = required or PAIRS.get(number.group() if number else "")
    if expected is None:
        return Finding(what, f"{torch} and {triton}: this combination is not tested")
    length = len(expected.split("."))
    found = ".".join(triton.split("+")[0].split(".")[:length])
    if found == expected.split("+")[0]:
        return Finding(what, f"{torch} and {triton} match")
    advice = f"torch {torch} needs triton {expected}, and {triton} is installed"
    again = REINSTALL.format(packages="torch " + " ".join(owners_of_triton()))
    return Finding(what, "do not match", advice, again if required else f"pip install 'triton=={expected}.*'")


def owners_of_triton() -> list[str]:
    """Return the installed packages that contain a top-level module `triton`."""
    return sorted(set(importlib.metadata.packages_distributions().get("triton", [])))


def triton_owners(owners: Sequence[str]) -> Finding:
    """Check that one package owns the folder `triton`: pip lets `triton-rocm` overwrite `triton` without a message."""
    advice = f"the folder triton belongs to {' and '.join(owners)}; the last one installed overwrote the others"
    again = REINSTALL.format(packages=" ".join(["torch", *owners]))
    return Finding.unless(len(owners) < 2, "triton comes from", ", ".join(owners) or "not installed", advice, again)


def c_compiler(triton: str, *, needed: bool) -> Finding:
    """Check for a C compiler and Python's headers: Triton up to 3.8 builds a launcher in C for each kernel."""
    path = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # Triton's order
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    needed = needed and bool(triton) and Version(triton.split("+")[0]) < BRINGS_ITS_COMPILER
    python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return Finding.unless(
        not needed or bool(path and headers),
        "C compiler",
        f"{path or 'none'}, {'with' if headers else 'without'} Python's headers",
        f"triton {triton} compiles a launcher for each kernel",
        f"apt-get install -y gcc libc6-dev {python}    # or: dnf install gcc python3-devel",
    )


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)


def _requirements_of(package: str) -> list[Requirement]:
    """Return the requirements of a package on this machine, without extras; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # other packagers write metadata that pip accepts and `packaging` does not
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found
