"""Train with each setting that a plan may choose, and compare the chosen one with the best: scripts/bench choice.

    scripts/bench choice --corpus FOLDER [--only NAME,NAME] [--most 14] [--page docs/benchmarks] [--small]

A configuration is a model, a method, a length, a global batch and a memory limit, which torch's allocator keeps. Each
runs in a process: it trains a few steps with every split of the batch, with and without checkpointing, offloading and
recomputation, as far as the plan says that it fits. Where these are few, settings that a plan does not try join them.
The recipe names none of these keys.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import inputs, pages, processes
from benchmarks.inputs import Inputs
from benchmarks.pages import GIB
from benchmarks.tables.choice import CONFIGURATIONS, Configuration

if TYPE_CHECKING:
    from ligertune.planning.plan import TriedSettings
    from ligertune.recipe.schema import Recipe

WARMUP = 2  # steps: the second one may be recorded as a CUDA graph
STEPS = 3
SMALL = Configuration("small", "full", 64, 4)


def main() -> int:
    """Run the configurations and print the table. Returns 1 if a process failed or memory ran out."""
    options = parse()
    if options.line:
        run_configuration(options, options.line)
        return 0
    rows, left_out = [], []
    for name in options.only.split(";"):
        command = processes.again("--out", str(options.out), "--line", name)
        found, reason = processes.run(command, limit=options.limit, show=lambda one: print(json.dumps(one), flush=True))
        rows += found
        if reason:
            left_out.append(f"Not all settings of {name} ran ({reason}).")
    publish(options, rows, left_out)
    return 1 if left_out or any(row["failed"] for row in rows) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser)
    parser.add_argument("--only", help="names of configurations, separated by semicolons")
    parser.add_argument("--most", type=int, default=12, help="settings of a configuration")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a configuration")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    options = pages.parse(parser, partial(pages.joined, keys=("configuration",)))
    options.only = options.only or ("small" if options.small else ";".join(CONFIGURATIONS))
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-choice-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def run_configuration(options: argparse.Namespace, name: str) -> None:
    """Train with each setting, and say a point for each."""
    from ligertune.training.resolve import plan_for

    configuration = SMALL if options.small else CONFIGURATIONS[name]
    limit_memory(configuration)
    path = write_recipe(options, name, configuration)
    tried = plan_for(with_settings(path, {}), for_show=True).plan.settings_tried
    chosen, *others = [settings_of(one) for one in tried] or [{}]
    if len(others) < options.most - 1:
        others += islice(by_hand(path, configuration.rows, [chosen, *others]), options.most - 1 - len(others))
    measure(with_settings(path, chosen))  # the first run of a process is slower
    for place, values in enumerate((chosen, *spread(others, options.most - 1))):
        point = measure(with_settings(path, values))
        processes.say({"configuration": name, **point, "chosen": place == 0})


def settings_of(tried: TriedSettings) -> dict[str, object]:
    """Return the keys of a recipe; accumulation follows from the global batch."""
    return {key: value for key, value in tried.values.items() if key != "train.gradient_accumulation_steps"}


def with_settings(path: Path, values: Mapping[str, object]) -> Recipe:
    from ligertune.recipe import load_recipe

    return load_recipe(path, [f"{key}={value}" for key, value in values.items()])


def by_hand(path: Path, rows: int, known: list[dict]) -> Iterator[dict]:
    """Yield further settings that fit: other numbers of checkpointed layers, and gates offloaded."""
    from ligertune.errors import UserError
    from ligertune.planning.time.settings_choice import fits
    from ligertune.training.resolve import plan_for

    for micro in (size for size in range(rows, 0, -1) if rows % size == 0):
        split = {"train.per_device_train_batch_size": micro}
        layers = plan_for(with_settings(path, split), for_show=True).plan.memory.layers
        numbers = ("all", 3 * layers // 4, layers // 2, layers // 4)
        kinds = [(kind, number) for kind in (True, "offload") for number in numbers]
        for kind, number in (*kinds, ("offload_gate", "all"), ("offload_both", "all")):
            checkpointing = {"train.gradient_checkpointing": kind, "train.gradient_checkpointing_layers": number}
            values = {**split, **checkpointing, "kernels.recompute": False}
            try:
                fitting = fits(plan_for(with_settings(path, values), for_show=True).plan)
            except UserError:  # this method has no such setting
                continue
            if fitting and not any({"train.gradient_checkpointing_layers": "all", **one} == values for one in known):
                yield values


def spread(others: list[dict], most: int) -> list[dict]:
    """Return at most so many, evenly from the list."""
    if len(others) <= most:
        return others
    return [others[round(place * (len(others) - 1) / (most - 1))] for place in range(most)]


def key_of(plan) -> dict[str, object]:
    """Return the settings of a plan."""
    train = plan.settings["train"]
    layers = plan.checkpointed_layers
    return {
        "rows": plan.batching.micro_batch_size,
        "accumulated": plan.batching.accumulation,
        "checkpointing": train["gradient_checkpointing"],
        "layers": "all" if layers is None else layers,
        "recompute": plan.settings["kernels"]["recompute"],
    }


def measure(recipe: Recipe) -> dict[str, object]:
    """Train a few steps and return the point."""
    import torch

    from ligertune.run import run
    from ligertune.training.resolve import plan_for

    folder = Path(recipe.checkpoint.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    processes.release_memory()
    job = plan_for(recipe)
    plan = job.plan
    failed = seconds = None
    peak = 0
    try:
        report = run(job, lambda line: None)
        peak = report.peak_memory["allocated_run"]
        tokens = plan.batching.global_batch_size * plan.row_length  # all rows are full
        seconds = tokens / report.throughput.padded_tokens_per_second
    except Exception as error:
        if not processes.is_out_of_memory(error):
            raise
        failed = str(error).splitlines()[0]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        **key_of(plan),
        "seconds": seconds,
        "predicted": plan.time.total if plan.time is not None else None,
        "parts": vars(plan.time.parts) if plan.time is not None else None,
        "graphs": bool(plan.build.execution.cuda_graphs),
        "peak": peak,
        "planned": plan.peak.total if plan.peak is not None else None,
        "failed": failed,
    }


def limit_memory(configuration: Configuration) -> None:
    """Let torch allocate only so much. The plan reads the limit."""
    import torch

    if configuration.memory is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(configuration.memory * GIB / total)


def write_recipe(options: argparse.Namespace, name: str, configuration: Configuration) -> Path:
    source = Inputs(options.corpus, options.out, options.small)
    settings = inputs.model_settings(source, configuration.model, layers=configuration.layers)
    adapter = {} if configuration.method == "full" else {"method.type": configuration.method}
    length = configuration.length
    return inputs.write_recipe(
        options.out / f"{name.replace(' ', '-').replace(',', '')}.json",
        {
            **settings,
            **adapter,
            "data.datasets": inputs.random_words(source, length, configuration.rows + 2),
            "data.max_length": length,
            "data.on_overlength": "truncate",
            "data.cache": False,
            "data.num_proc": 1,
            "train.global_batch_size": configuration.rows,
            "train.max_steps": WARMUP + STEPS,
            "train.learning_rate": 1e-5,
            "report.warmup_steps": WARMUP,
            "logging.logging_steps": 1,
            "checkpoint.output_dir": options.out / "run",
            "checkpoint.save_strategy": "no",
            "checkpoint.save_model": False,
            "checkpoint.overwrite": True,
        },
    )


def publish(options: argparse.Namespace, rows: list[dict], left_out: list[str]) -> None:
    best: dict[str, float] = {}
    for row in rows:
        if row["seconds"]:
            best[row["configuration"]] = min(row["seconds"], best.get(row["configuration"], row["seconds"]))
    shown = [
        {
            **row,
            "chosen": "chosen" if row["chosen"] else "",
            "over_best": row["seconds"] / best[row["configuration"]] if row["seconds"] else None,
            "time_error": row["predicted"] / row["seconds"] - 1 if row["seconds"] and row["predicted"] else None,
            "peak_gib": row["peak"] / GIB,
            "planned_gib": row["planned"] / GIB if row["planned"] else None,
        }
        for row in rows
    ]
    pages.publish(
        options,
        page="choice" + "_small" * options.small,
        title="Chosen settings" + " (with --small: a tiny model)" * options.small,
        intro="This page compares the settings that a plan chooses with all that it could choose.",
        caveats=[
            f"Random weights and full rows. {WARMUP} steps of warm-up, then the mean of {STEPS}. Memory limits are "
            "kept by torch's allocator.",
        ],
        columns=[["configuration", "configuration", ""], ["rows", "rows", ""], ["accumulated", "accumulated", ""],
                 ["checkpointing", "checkpointing", ""], ["layers", "layers", ""], ["recompute", "recompute", ""],
                 ["chosen", "", ""], ["seconds", "step, s", ".3f"], ["over_best", "over the best", ".3f"],
                 ["time_error", "predicted time", "+.1%"], ["peak_gib", "peak GiB", ".2f"],
                 ["planned_gib", "predicted GiB", ".2f"]],
        rows=shown,
        left_out=left_out,
    )  # fmt: skip
