"""Where a result comes from: host, command, git commit, hash of the recipe, versions of packages."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch", "triton", "triton-rocm", "transformers", "accelerate", "peft", "datasets", "torchao", "ligertune")


@dataclass(frozen=True)
class Provenance:
    """started, ended: of this process, in UTC. A resumed run has the dates of its earlier parts in metrics.jsonl."""

    started: str
    ended: str
    host: str
    command: str
    git_commit: str | None  # of the working directory; None if it is in no git checkout
    recipe_sha256: str  # of resolved_recipe.yaml
    versions: dict[str, str]


def provenance(recipe_text: str, *, started: str, ended: str) -> Provenance:
    """Return the provenance of a run. recipe_text: the content of resolved_recipe.yaml."""
    return Provenance(
        started=started,
        ended=ended,
        host=platform.node(),
        command=command_line(),
        git_commit=git_commit(),
        recipe_sha256=hashlib.sha256(recipe_text.encode()).hexdigest(),
        versions=versions(),
    )


def command_line() -> str:
    """Return the command, quoted for a shell. Ranks are started with the arguments of the user's command."""
    name, *arguments = sys.argv
    if Path(name).parts[-1:] == ("ligertune",) or Path(name).parts[-2:] == ("ligertune", "__main__.py"):
        name = "ligertune"
    return shlex.join([name, *arguments])


def git_commit() -> str | None:
    """Return the commit of the git checkout that the working directory is in, or None."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
        return done.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """Return the installed versions of packages that affect a result."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
