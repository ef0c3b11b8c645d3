"""Train the whole Qwen3-30B-A3B with LoRA on one GPU: scripts/bench moe_whole.

Sides: ligertune, and transformers with PEFT in a plain loop; each in bf16 and in 4 bits. Each runs in its own process.
Random weights are made on the GPU: 57 GiB in bf16, or one weight at a time before it is quantised. LoRA r16 on
attention and experts, one row of 4,096 tokens a step, activation checkpointing; rows and optimizer are the same.

ligertune stores the experts in NF4, too. bitsandbytes in transformers quantises linear layers only, so that the experts
of `hf_peft 4-bit` stay in bf16. A side that runs out of memory is a result: its row has the peak that it reached.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.sides.our_run import our_run
from benchmarks.sides.peft_loop import peak_now, theirs
from benchmarks.tables.moe_whole import ALPHA, ATTENTION, EXPERTS, MODEL, RANK, SIDES, STEPS, WARMUP


def main() -> int:
    """Run all sides and print their table. Returns 1 if a side failed for another reason than memory or time."""
    options = parse()
    if options.line:
        return measure(options, options.line)
    folder = options.out
    sides = [side.strip() for side in options.sides.split(";")] if options.sides else list(SIDES)
    points, left_out, failed = [], [], 0
    for side in sides:
        if side.endswith("4-bit") and importlib.util.find_spec("bitsandbytes") is None:
            left_out.append(f"Without a row: {side} (bitsandbytes is not installed).")
            continue
        command = processes.again("--out", str(folder), "--line", side)
        found, reason = processes.run(command, limit=options.limit, show=lambda one: print(words(one), flush=True))
        points += found
        if reason:
            left_out.append(f"Without a row: {side} ({reason}).")
            failed += reason.startswith("failed")
    publish(options, points, left_out)
    return 1 if failed or not points else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", help=f"separated by semicolons: {'; '.join(SIDES)}")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a side")
    parser.add_argument("--optim", default="adamw_8bit")
    parser.add_argument("--out", type=Path, help="folder of recipes and runs")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--line", metavar="SIDE", help=argparse.SUPPRESS)
    options = pages.parse(parser)
    if options.small:
        options.optim = "adamw_torch_fused"
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-moe-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def words(point: dict) -> str:
    reached = f"peak {point['peak'] / GIB:.2f} GiB allocated, {point['reserved'] / GIB:.2f} GiB reserved"
    if "failed" in point:
        return f"{point['side']}: {point['failed']}, {reached}"
    planned = f", predicted {point['planned'] / GIB:.2f} GiB" if point.get("planned") else ""
    return (f"{point['side']}: {point['tokens_per_second']:,.0f} tokens/s, {reached}{planned}, loaded in "
            f"{point['load_seconds']:.0f} s with a peak of {point['load_peak'] / GIB:.2f} GiB, losses "
            f"{' '.join(f'{loss:.3f}' for loss in point['losses'])}")  # fmt: skip


def publish(options: argparse.Namespace, points: list[dict], left_out: list[str]) -> None:
    rows = [{**point, **{f"{key}_gib": point[key] / GIB for key in ("peak", "reserved", "load_peak", "planned")
                         if point.get(key)}} for point in points]  # fmt: skip
    theirs = {row["bits"]: row.get("tokens_per_second") for row in rows if row["side"].startswith("hf_peft")}
    for row in rows:
        if row["side"].startswith("ligertune") and theirs.get(row["bits"]) and row.get("tokens_per_second"):
            row["times"] = row["tokens_per_second"] / theirs[row["bits"]]
    pages.publish(
        options,
        page="moe_whole" + "_small" * options.small,
        title="The whole Qwen3-30B-A3B with LoRA on one GPU" + " (with --small: a tiny model)" * options.small,
        intro="This page compares LoRA fine-tuning of the whole Qwen3-30B-A3B by ligertune and by transformers with "
        "PEFT.",
        caveats=[
            f"Published sizes, random weights. LoRA r{RANK} on attention and experts, one row of "
            f"{tokens_of(options):,} tokens a step, activation checkpointing, {options.optim}; {STEPS} steps, the "
            f"first {WARMUP} not counted.",
            "hf_peft: transformers with `experts_implementation: grouped_mm` and PEFT's `target_parameters` in a plain "
            "loop under bf16 autocast, as Trainer runs it. The rows are the same.",
            "4-bit: NF4 with double quantisation. bitsandbytes in transformers quantises linear layers only, so the "
            "experts of hf_peft 4-bit are in bf16.",
            "Peaks are those of the process, with loading, in memory that torch allocated.",
        ],
        columns=[["side", "side", ""], ["tokens_per_second", "tokens/s", ",.0f"], ["times", "times hf_peft", ".2f"],
                 ["peak_gib", "peak GiB", ".2f"], ["reserved_gib", "reserved GiB", ".2f"],
                 ["planned_gib", "predicted GiB", ".2f"], ["load_peak_gib", "peak of loading, GiB", ".2f"],
                 ["load_seconds", "seconds to load", ".0f"], ["failed", "ended", ""]],
        rows=rows,
        left_out=left_out,
    )  # fmt: skip


# ---- the recipe


def tokens_of(options: argparse.Namespace) -> int:
    return 64 if options.small else 4096


def recipe_of(options: argparse.Namespace, side: str) -> Path:
    """Write the recipe of a side. The loop of hf_peft takes its rows from it."""
    source, folder = inputs.Inputs(options.out, options.out, options.small), side.replace(" ", "-")
    settings = {
        **inputs.model_settings(source, MODEL, layers=None),
        "model.dtype": "float32" if options.small else "bfloat16",
        "method.type": "qlora" if side.endswith("4-bit") else "lora",
        "method.lora_r": RANK,
        "method.lora_alpha": ALPHA,
        "method.lora_dropout": 0.0,
        "method.lora_target_modules": ATTENTION,
        "method.lora_target_parameters": EXPERTS,
        "data.datasets": inputs.random_words(source, tokens_of(options), STEPS + 3),
        "data.packing": False,
        "data.max_length": tokens_of(options),
        "data.on_overlength": "truncate",
        "data.cache": False,
        "data.num_proc": 1,
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": STEPS,
        "train.gradient_checkpointing": True,
        "train.optim": options.optim,
        "train.learning_rate": 1e-4,
        "report.warmup_steps": WARMUP,
        "logging.logging_steps": 1,
        "checkpoint.output_dir": options.out / folder,
        "checkpoint.save_strategy": "no",
        "checkpoint.save_model": False,
        "checkpoint.overwrite": True,
    }
    return inputs.write_recipe(options.out / f"{folder}.json", settings)


# ---- one side


def measure(options: argparse.Namespace, side: str) -> int:
    """Measure a side in this process, and print its point."""
    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    known = {"side": side, "bits": "4-bit" if side.endswith("4-bit") else "bf16"}
    job = plan_for(load_recipe(recipe_of(options, side)))
    started = time.perf_counter()
    try:
        found = ours(job) if side.startswith("ligertune") else theirs(job, started, four_bits=known["bits"] == "4-bit")
    except Exception as error:
        if not processes.is_out_of_memory(error):
            raise
        found = {"failed": "out of memory", "seconds": time.perf_counter() - started}
    processes.say(known | peak_now() | found)
    return 0


def ours(job) -> dict:
    """Train with ligertune."""
    report, loaded, lines = our_run(job)
    end = report.peak_memory
    return {
        "peak": max(loaded["peak"], end["allocated_run"]),
        "reserved": max(loaded["reserved"], end.get("reserved_run", 0)),
        "planned": job.plan.peak.total,
        "load_peak": loaded["peak"],
        "load_seconds": report.seconds_to_first_step["loading the model"],
        "tokens_per_second": report.throughput.tokens_per_second,
        "losses": [line["loss"] for line in lines if "loss" in line],
    }
