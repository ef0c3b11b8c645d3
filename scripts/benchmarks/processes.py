"""Processes of the tree's code: their environment, and sides of a comparison with a time limit that print points."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

MARK = "POINT "
ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "scripts" / "bench"


def environment(tree: Path = ROOT, *, site: Path | None = None, **more: str) -> dict[str, str]:
    """Return this process's environment with more variables, in which Python imports the tree's packages first.

    site: folder of packages that come before all others.
    """
    first = [site] if site else []
    paths = [*first, tree, tree / "kernels", tree / "scripts", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **more}


def again(*more: str) -> list[str]:
    """Return the command that runs this benchmark with the same and more options."""
    return [sys.executable, str(RUNNER), *sys.argv[1:], *more]


def say(point: dict) -> None:
    """Print a point, in the process of a side."""
    print(MARK + json.dumps(point), flush=True)


def run(
    command: list[str],
    *,
    limit: float,
    show: Callable[[dict], None] = lambda point: None,
    environment: dict[str, str] | None = None,
) -> tuple[list[dict], str | None]:
    """Return (points of a side, why it ended early or None). show: called with each point when it comes.

    limit: seconds until the process is killed. The last lines of a process that fails are printed.
    """
    points: list[dict] = []
    tail: list[str] = []
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        # a compiler or a hung driver ignores SIGTERM
        timer = threading.Timer(limit, process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith(MARK):
                points.append(json.loads(line[len(MARK) :]))
                show(points[-1])
            else:
                tail = [*tail[-14:], line.strip()]  # enough for the end of a traceback
        timer.cancel()
    if process.returncode == -signal.SIGKILL:
        return points, f"stopped after {limit:.0f} s"
    if process.returncode:
        print("\n".join(tail), flush=True)
        # torch puts the rank before the lines of a process group, of one process, too
        return points, f"failed: {tail[-1].removeprefix('[rank0]: ') if tail else process.returncode}"
    return points, None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, is torch's."""
    import torch

    # trainers and ligertune wrap torch's error in their own
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def release_memory() -> None:
    """Free what torch holds of the model before."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
