"""Run the command line in this process, or in a new one where signals, ranks or the environment are the subject."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "quickstart" / "stories260k.yaml"


@dataclass(frozen=True)
class Done:
    """A finished command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """One thread per process: results must not depend on free cores, and ranks must not wait for each other's cores."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if "HF_ENDPOINT" in os.environ:  # the test serves its own hub
        del found["HF_HUB_OFFLINE"]
    return found


def run(command: list[str], *, cwd: Path) -> Done:
    """Run a command in a new process until it ends."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def start(command: list[str], *, cwd: Path) -> subprocess.Popen:
    """Start a command in a new process whose output is piped."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(), **pipes)


def train_command(*arguments: str, recipe: Path = RECIPE, **settings: object) -> list[str]:
    """Return the command that trains a recipe (the quickstart's by default) in a new process."""
    return [sys.executable, "-m", "ligertune", "train", str(recipe), *overrides(settings), *arguments]


def run_here(*arguments: object, cwd: Path) -> Done:
    """Run `ligertune ARGUMENTS` in this process, which saves the six seconds of importing torch."""
    from ligertune.cli.app import main
    from ligertune.cli.render import console

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["ligertune", *map(str, arguments)]
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    _build_commands_once()
    with _process_in(cwd), mock.patch.object(sys, "argv", argv), streams[0], streams[1]:
        console.people_on_stderr(False)  # the console keeps the stream that it was made for
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    console.people_on_stderr(False)
    return Done(code, out.getvalue(), err.getvalue())


@functools.cache
def _build_commands_once() -> None:
    """Keep the commands that typer makes of the app. It would make them again for each run, which takes 0.04 s."""
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)


class Background:
    """`ligertune ARGUMENTS` in a fork of this process, which has imported everything.

    It may start ranks, which are new processes. A process that uses CUDA cannot fork: on a machine with a GPU the
    command runs in a new process.
    """

    def __init__(self, *arguments: object, cwd: Path) -> None:
        import torch

        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        descriptor, self._said = tempfile.mkstemp()
        os.close(descriptor)
        self._process = context.Process(target=_write_done, args=(arguments, cwd, self._said), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def finish(self) -> Done:
        """Wait for the end. `out` holds both streams, also what ranks wrote there."""
        self._process.join()
        said = Path(self._said).read_text(encoding="utf-8")
        os.unlink(self._said)
        return Done(self._process.exitcode, said, "")


def wait_until(process: subprocess.Popen | Background, happened: Callable[[], bool]) -> None:
    """Return when `happened()` is true or the process has ended."""
    while process.poll() is None and not happened():
        time.sleep(0.005)


def _write_done(arguments: tuple[object, ...], cwd: Path, said: str) -> None:
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        signal.signal(number, handler)
    os.environ.update(environment())  # for the processes that the command starts, which also write into the file
    with open(said, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    done = run_here(*arguments, cwd=cwd)
    with open(said, "a", encoding="utf-8") as file:
        file.write(done.out + done.err)
    os._exit(done.code)  # run neither atexit functions nor the parent's pytest


@contextlib.contextmanager
def _process_in(folder: Path) -> Iterator[None]:
    """Change into a folder, on one thread as in `environment`; then restore what a command changes in its process."""
    import torch

    before, threads = Path.cwd(), torch.get_num_threads()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def overrides(settings: dict[str, object]) -> list[str]:
    """Return `--set key=value` for each setting."""
    return [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]


def metrics(output_dir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, whose steps must be in order."""
    path = output_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    return lines


def losses(output_dir: Path, key: str = "loss") -> list[float]:
    """Return the logged training losses (or `eval_loss`, ...) in order of their steps."""
    return [line[key] for line in metrics(output_dir) if key in line]


def weights(output_dir: Path) -> bytes:
    """Return the content of the trained model's weight file."""
    return (output_dir / "model" / "model.safetensors").read_bytes()
