"""Running the command line in fresh processes, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """One thread a process: bit-equality must not hang on how many cores are free, nor two ranks on each other."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {} if "HF_ENDPOINT" in os.environ else {"HF_HUB_OFFLINE": "1"}  # a test may bring a hub of its own
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **offline}


def run(command: list[str], *, cwd: Path) -> Done:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def overrides(settings: dict[str, object]) -> list[str]:
    return [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]


def losses(output_dir: Path) -> list[float]:
    """The logged training losses, in order of their steps."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    return [line["loss"] for line in lines if "loss" in line]
