"""Save a checkpoint of an 8B-shaped model while training goes on (checkpoint.async_save): scripts/bench async_save.

    scripts/bench async_save --corpus FOLDER --out DISK [--gpus 4] [--layers 16] [--rows 4] [--length 2048] [--small]

DISK is a folder of the disk to measure. It needs room for two checkpoints, and the host memory for one: 6 bytes per
parameter. Full fine-tuning of Llama-3-8B's sizes in bfloat16, random weights; on several GPUs under FSDP2.

The run saves once. These are measured: the time of steps before the save and while it writes; how long the save stops
training (for its copy in host memory); its bytes per second, from the end of the step to the complete checkpoint; and
those of a plain sequential write of as many bytes with fsync afterwards, in as many files as there are ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB

MODEL = "Meta-Llama-3-8B"
WARMUP, BEFORE = 3, 8  # steps before those that are timed; steps before the save
CHUNK = 64 << 20  # bytes that the plain write gives the system at a time


def main() -> int:
    """Train, save and print the table. Returns 1 if the run failed."""
    options = parse()
    if options.line:
        measure(options)
        return 0
    rows_of(options)  # ranks would write the same file at once
    points, reason = processes.run(command_of(options), limit=options.limit)
    publish(options, points, [f"No row: {reason or 'no result was printed'}."] if reason or not points else [])
    return int(not points or bool(reason))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser, small="a small model on two CPU processes")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=40, help="steps after the save began")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of the run")
    parser.add_argument("--line", action="store_true", help=argparse.SUPPRESS)
    options = pages.parse(parser)
    if options.small:
        options.gpus = 2
        options.length = 64
    options.corpus = options.corpus.resolve()
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-save-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command of the run: this benchmark again, on as many processes as there are GPUs."""
    command = processes.again("--out", str(options.out), "--line")
    if options.gpus == 1:
        return command
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    return [command[0], *launcher, *command[1:]]


def rows_of(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the data set, which the steps repeat; write its rows if they are missing."""
    source = inputs.Inputs(options.corpus, options.out, options.small)
    return inputs.full_rows(source, options.length, 4 * options.rows * options.gpus)


def recipe_of(options: argparse.Namespace) -> Path:
    """Write the recipe of the run."""
    source = inputs.Inputs(options.corpus, options.out, options.small)
    settings = {
        **inputs.model_settings(source, MODEL, layers=options.layers),
        "data.datasets": rows_of(options),
        "data.packing": False,
        "data.train_on": "all",
        "data.max_length": options.length,
        "data.on_overlength": "truncate",
        "data.val_split": 0.0,
        "data.cache": False,
        "data.num_proc": 1,
        "train.per_device_train_batch_size": options.rows,
        "train.gradient_accumulation_steps": 1,
        "train.gradient_checkpointing": False,
        "train.max_steps": WARMUP + BEFORE + options.steps,
        "train.learning_rate": 1e-5,
        "report.warmup_steps": WARMUP,
        "parallel.strategy": "fsdp" if options.gpus > 1 else "single",
        "checkpoint.output_dir": options.out / "run",
        "checkpoint.save_strategy": "no",  # the clock asks for one save
        "checkpoint.async_save": True,
        "checkpoint.save_model": False,
        "checkpoint.overwrite": True,
    }
    return inputs.write_recipe(options.out / f"recipe-{os.environ.get('RANK', '0')}.json", settings)


class SaveClock:
    """Callback: note the time of each step's end, ask for a save after some steps, and note when it is complete.

    Each step ends with the device: the save would otherwise also wait for launched work.
    """

    def __init__(self, save_after: int, checkpoints: Path) -> None:
        self.save_after = save_after
        self.folder = checkpoints / f"step-{save_after}"
        self.ends: list[float] = []
        self.began = self.returned = self.complete = 0.0

    def on_step_end(self, args: object, state: object, control: object, **values: object) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.save_after:
            self.began = self.ends[-1]
            control.should_save = True
            threading.Thread(target=self._watch, daemon=True).start()

    def on_save(self, args: object, state: object, control: object, **values: object) -> None:
        self.returned = time.perf_counter()

    def _watch(self) -> None:
        while not self.folder.exists():
            time.sleep(0.005)
        self.complete = time.perf_counter()

    def steps(self) -> tuple[list[float], list[float]]:
        """Return the seconds of the timed steps before the save, and of those that end while it writes."""
        before = [end - start for start, end in pairwise(self.ends[WARMUP - 1 : self.save_after])]
        later = [self.returned, *self.ends[self.save_after :]]
        during = [end - start for start, end in pairwise(later) if end <= self.complete]
        return before, during


def measure(options: argparse.Namespace) -> None:
    """Train in this process, which may be one of several ranks; the first one prints the point."""
    from ligertune.recipe import load_recipe
    from ligertune.run import run
    from ligertune.training.callbacks import Callbacks
    from ligertune.training.resolve import plan_for
    from ligertune.training.setup import Custom

    shutil.rmtree(options.out / "run", ignore_errors=True)
    job = plan_for(load_recipe(recipe_of(options)))
    clock = SaveClock(WARMUP + BEFORE, job.plan.output_dir / "checkpoints")
    run(job, lambda line: None, custom=Custom(callbacks=Callbacks([clock])))
    if os.environ.get("RANK", "0") != "0":
        return
    before, during = clock.steps()
    size = sum(path.stat().st_size for path in clock.folder.rglob("*") if path.is_file())
    shutil.rmtree(options.out / "run" / "checkpoints")  # makes room for the plain write
    disk = plain_write(options.out, size, files=options.gpus)
    seconds = clock.complete - clock.began
    processes.say({
        "gpus": options.gpus,
        "size": size,
        "disk": disk,
        "saved": size / seconds,
        "share": size / seconds / disk,
        "save_seconds": seconds,
        "stopped": clock.returned - clock.began,
        "step": statistics.median(before),
        "steps_during": len(during),
        "during": statistics.mean(during) if during else None,
        "slower": statistics.mean(during) / statistics.median(before) if during else None,
    })  # fmt: skip


def plain_write(folder: Path, size: int, *, files: int) -> float:
    """Return the bytes per second of writing so many bytes to so many files at once, with fsync."""
    content = os.urandom(min(CHUNK, -(-size // files)))

    def write(place: int) -> int:
        written = 0
        with (folder / f".plain-{place}").open("wb", buffering=0) as file:
            while written < size // files:
                written += file.write(content)
            os.fsync(file.fileno())
        return written

    started = time.perf_counter()
    with ThreadPoolExecutor(files) as pool:
        written = sum(pool.map(write, range(files)))
    seconds = time.perf_counter() - started
    for place in range(files):
        (folder / f".plain-{place}").unlink()
    return written / seconds


def publish(options: argparse.Namespace, points: list[dict], left_out: list[str]) -> None:
    rows = [{**point, "gib": point["size"] / GIB, "disk_gb": point["disk"] / 1e9, "saved_gb": point["saved"] / 1e9}
            for point in points]  # fmt: skip
    layers = f"{options.layers} of its 32 layers" if options.layers else "all layers"
    pages.publish(
        options,
        count=options.gpus,
        page="async_save" + "_small" * options.small,
        title="Checkpoints while training goes on" + " (with --small: a small model)" * options.small,
        intro="This page shows what a save with `checkpoint.async_save` reaches of the disk's bandwidth, and what it "
        "costs the steps that run meanwhile.",
        caveats=[
            f"Random weights, {layers} of Llama-3-8B, full fine-tuning in bfloat16, {options.rows} rows of "
            f"{options.length:,} tokens per GPU; FSDP2 on several GPUs.",
            f"One run and one save. Steps: the median of {BEFORE} before the save, and the mean of those during it.",
            "The save's time goes from the end of a step to the complete checkpoint: the copy in host memory, for "
            "which training stops, the files, their checksums and fsync. The plain write follows the run.",
        ],
        columns=[["gpus", "GPUs", ""], ["gib", "checkpoint, GiB", ".2f"], ["disk_gb", "plain write, GB/s", ".2f"],
                 ["saved_gb", "save, GB/s", ".2f"], ["share", "share of the disk", ".0%"],
                 ["save_seconds", "save, s", ".1f"], ["stopped", "training stops, s", ".2f"],
                 ["step", "step, s", ".3f"], ["steps_during", "steps during the save", ""],
                 ["slower", "their time over others", ".2f"]],
        rows=rows,
        left_out=left_out,
    )  # fmt: skip
