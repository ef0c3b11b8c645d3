"""Measure start-up: seconds of short commands, and of `ligertune train` from the command to the end of its first step.

    scripts/bench startup --corpus FOLDER [--repeats 3] [--only help,check,plan,data,train]    Llama-3.2-1B on a GPU
    scripts/bench startup --small                                                              the quickstart on a CPU

FOLDER holds model_configs/Llama-3.2-1B, tokenizers/mistral-7b-v0.1 and alpaca/alpaca_random_9k.json.gz. Weights are
random. Each command runs once before it is measured: this writes Python's bytecode and compiles the kernels. Then it
runs --repeats times in new processes, and the run with the least wall time is printed:

    wall, CPU   seconds from the start of the process to its end, or to the end of the first step; CPU of all threads
    imports     part of the wall time in which modules are imported; then the same by top-level package
    empty       the cache of prepared data is empty, so that the data set is tokenized

Other load on the machine affects wall times; CPU seconds suffer less.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import inputs, pages, processes

QUICKSTART = inputs.QUICKSTART / "stories260k.yaml"
PACKAGES = 6  # columns of the table
LLAMA = """
version: 1
model:
  model_name_or_path: {corpus}/model_configs/Llama-3.2-1B
  init: random
  dtype: bfloat16
  tokenizer: {{path: {corpus}/tokenizers/mistral-7b-v0.1}}
data:
  datasets: [{{path: {corpus}/alpaca/alpaca_random_9k.json.gz}}]
  max_length: 2048
train: {{per_device_train_batch_size: 4}}
"""


@dataclass(frozen=True)
class Case:
    """A command to measure. goal: wall seconds; None without one."""

    name: str
    arguments: tuple[str, ...]
    goal: float | None = None
    to_first_step: bool = False
    empty_cache: bool = False


@dataclass(frozen=True)
class Measured:
    """Seconds of one process. imports: by top-level package."""

    wall: float
    cpu: float
    imports: dict[str, float]
    phases: dict[str, float]


def main() -> int:
    options = parse()
    wanted = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in all_cases(options, Path(folder)) if case.name.split()[0].strip(",") in wanted]
        if not cases:
            raise SystemExit(f"--only {options.only}: no such command. Write some of help,check,plan,data,train.")
        rows = [(case, best(case, Path(folder), options.repeats)) for case in cases]
    show(rows)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--corpus", type=Path, help="folder of the test data: trains Llama-3.2-1B")
    where.add_argument("--small", action="store_true", help="train the quickstart's model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="help,check,plan,data,train")
    return pages.parse_arguments(parser)


def all_cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """Return every command. Goals: of the quickstart on two CPU cores, and of Llama-3.2-1B on an H100."""
    recipe = QUICKSTART
    if options.corpus:
        recipe = folder / "llama.yaml"
        recipe.write_text(LLAMA.format(corpus=options.corpus.resolve()), encoding="utf-8")
    settings = {
        "train.max_steps": 1,
        "data.val_split": 0,  # without an evaluation before the first step
        "parallel.num_processes": 1,
        "checkpoint.output_dir": folder / "run",
        "checkpoint.save_model": "false",
    }
    train = ("train", str(recipe), "--overwrite", "--json", *inputs.override_arguments(settings))
    return [
        Case("help", ("--help",)),
        Case("check", ("recipe", "check", str(QUICKSTART))),
        Case("plan", ("plan", str(QUICKSTART)), goal=4.0),
        Case("data", ("data", str(QUICKSTART)), goal=4.0),
        Case("data, empty", ("data", str(QUICKSTART)), empty_cache=True),
        Case("train", train, goal=8.0 if options.corpus else None, to_first_step=True),
        Case("train, empty", train, to_first_step=True, empty_cache=True),
    ]


def best(case: Case, folder: Path, repeats: int) -> Measured:
    """Run a command repeats + 1 times, and return the run with the least wall time; the first does not count."""
    runs = []
    for number in range(repeats + 1):
        cache = folder / (f"cache-{case.name}-{number}" if case.empty_cache else "cache")
        runs.append(measure(case, cache, folder / "measured.json"))
    return min(runs[1:], key=lambda run: run.wall)


def measure(case: Case, cache: Path, file: Path) -> Measured:
    """Run a command in a new process. Without PYTHONDONTWRITEBYTECODE, which would make imports take twice as long."""
    environment = processes.environment(LIGERTUNE_CACHE=str(cache))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, start = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.host.startup", str(file), *case.arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        raise SystemExit(f"ligertune {' '.join(case.arguments)} failed:\n{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    found = json.loads(file.read_text(encoding="utf-8"))
    phases: dict[str, float] = {}
    if case.to_first_step:
        wall, cpu = found["clock"] - start, found["cpu"]  # perf_counter is one clock for all processes of a host
        phases = json.loads(done.stdout)["seconds_to_first_step"]
    return Measured(wall, cpu, found["imports"], phases)


# ---- in the measured process


class ImportTimes:
    """Seconds of imports by top-level package, each without the modules that it imports in turn."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open = threading.local()
        self._load = importlib._bootstrap._find_and_load
        # Both the statement and importlib.import_module call it, for modules that are not loaded yet. `-X importtime`
        # misses the latter, by which transformers imports its models.
        importlib._bootstrap._find_and_load = self._timed

    def _timed(self, name: str, import_: Any) -> Any:
        outer, start = getattr(self._open, "inner", 0.0), time.perf_counter()
        self._open.inner = 0.0
        try:
            return self._load(name, import_)
        finally:
            passed = time.perf_counter() - start
            self.seconds[name.split(".")[0]] += passed - self._open.inner
            self._open.inner = outer + passed


def run_measured(file: Path, arguments: list[str]) -> None:
    """Run `ligertune ARGUMENTS` here, and write its imports; also clock and CPU at the end of a first step."""
    times = ImportTimes()
    from ligertune.progress import Phases

    def write(**more: float) -> None:
        file.write_text(json.dumps({"imports": dict(times.seconds), **more}), encoding="utf-8")

    end = Phases.end

    def ended(phases: Phases) -> None:
        """Note the first call, after the first step; the second is at the end of the run."""
        end(phases)
        if not to_first_step:
            to_first_step.update(clock=time.perf_counter(), cpu=sum(os.times()[:4]))
            write(**to_first_step)

    to_first_step: dict[str, float] = {}
    Phases.end = ended
    sys.argv = ["ligertune", *arguments]
    try:
        runpy.run_module("ligertune", run_name="__main__")
    finally:
        if not to_first_step:
            write()


# ---- output


def show(rows: list[tuple[Case, Measured]]) -> None:
    """Print the table, and the phases of each training run."""
    total: Counter[str] = Counter()
    for _, run in rows:
        total.update(run.imports)
    packages = [name for name, _ in total.most_common(PACKAGES)]
    print(f"{sys.version.split()[0]} with bytecode {'kept' if keeps_bytecode() else 'NOT kept'}; {machine()}")
    print(
        f"{'seconds':14}{'wall':>7}{'CPU':>7}{'imports':>9}", *(f"{name[:13]:>14}" for name in packages), "    others"
    )
    for case, run in rows:
        goal = ""
        if case.goal is not None:
            goal = f"   goal {case.goal:g}: {'met' if run.wall <= case.goal else 'MISSED'}"
        others = sum(run.imports.values()) - sum(run.imports.get(name, 0.0) for name in packages)
        columns = " ".join(f"{run.imports.get(name, 0.0):14.2f}" for name in packages)
        imports = sum(run.imports.values())
        print(f"{case.name:14}{run.wall:7.2f}{run.cpu:7.2f}{imports:9.2f} {columns} {others:10.2f}{goal}")
    for case, run in rows:
        if run.phases:
            print(f"{case.name}:", ", ".join(f"{name} {seconds:.2f}" for name, seconds in run.phases.items()))


def keeps_bytecode() -> bool:
    """Whether the bytecode of torch is on disk: the site-packages folder was writable when it was first imported."""
    found = importlib.util.find_spec("torch")
    return bool(found and found.cached and Path(found.cached).is_file())


def machine() -> str:
    """Return versions and the device, as a process that imports torch sees them."""
    code = (
        "import torch, transformers; from ligertune.hardware import this_machine; import os\n"
        "m = this_machine()\n"
        "print(f'torch {torch.__version__}, transformers {transformers.__version__}; {m.name}, {os.cpu_count()} cores')"
    )
    environment = processes.environment()
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    run_measured(Path(sys.argv[1]), sys.argv[2:])
