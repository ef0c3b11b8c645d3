"""QLoRA of Llama-3-8B under FSDP2 on two GPUs, against one GPU, and against bitsandbytes, PEFT and accelerate.

    scripts/bench qlora_fsdp2 --corpus FOLDER [--layers 16] [--rows 2] [--length 2048] [--page docs/benchmarks]

FOLDER holds model_configs/Meta-Llama-3-8B; random weights are made and quantised on the GPU one by one, the same on all
sides. LoRA r16 on all linear layers, NF4 with double quantisation, activation checkpointing, full rows of real text.
--rows are those of a micro-batch; a step has one on each of two GPUs, and one GPU accumulates two.

one        ligertune on one GPU, with fused adapters: its losses are the truth of the next two sides
fused      ligertune on two GPUs, with fused adapters (kernels.lora: true)
plain      ligertune on two GPUs, with PEFT's adapters and all other kernels
hf_peft    bitsandbytes, PEFT and accelerate's FSDP2 plugin in a plain loop, with the same sharding and storage

Each side runs in a new process. The command fails if a side fails, or if the losses of two GPUs differ from those of
one by more than 1e-3. --small trains a small model on two CPU processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.sides.fsdp_loop import under_fsdp
from benchmarks.sides.our_run import our_run

MODEL = "Meta-Llama-3-8B"
RANK, ALPHA = 16, 32
WARMUP, STEPS = 3, 8  # steps before those that are timed; timed steps
COMPARED = 8  # first losses that are compared
ALLOWED = 1e-3  # relative difference of losses of two GPUs from those of one
# name -> (label, processes, kernels.lora)
SIDES = {
    "one": ("ligertune, fused adapters", 1, True),
    "fused": ("ligertune, fused adapters", 2, True),
    "plain": ("ligertune, PEFT's adapters", 2, False),
    "hf_peft": ("bitsandbytes + PEFT + accelerate", 2, False),
}
OURS = ("one", "fused", "plain")


def main() -> int:
    """Run all sides and print their table. Returns 1 if a side failed, or for other losses on two GPUs."""
    options = parse()
    if options.line:
        return measure(options, options.line)
    rows_of(options)  # ranks would write the same file at once
    points, left_out = [], []
    for side in options.sides.split(","):
        found, reason = processes.run(
            command_of(options, side), limit=options.limit, show=lambda one: print(words(one), flush=True),
            environment=environment_of(side),
        )  # fmt: skip
        points += found
        if reason or not found:
            left_out.append(f"Without a row: {side} ({reason or 'it printed no result'}).")
    differences = differences_of(points)
    publish(options, points, left_out, differences)
    return int(bool(left_out) or any(differences[side] > ALLOWED for side in differences if side in OURS))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser, small="a small model on two CPU processes")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"comma-separated: {', '.join(SIDES)}")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a side")
    parser.add_argument("--line", metavar="SIDE", help=argparse.SUPPRESS)
    options = pages.parse(parser)
    unknown = [side for side in options.sides.split(",") if side not in SIDES]
    if unknown:
        parser.error(f"--sides: there is no {', '.join(unknown)}; there are {', '.join(SIDES)}")
    if options.small:
        options.length = 64
    options.corpus = options.corpus.resolve()
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-qlora-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def command_of(options: argparse.Namespace, side: str) -> list[str]:
    """Return the command of a side: this benchmark again, on as many processes as the side has."""
    command = processes.again("--out", str(options.out), "--line", side)
    count = SIDES[side][1]
    if count == 1:
        return command
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [command[0], *launcher, *command[1:]]


def environment_of(side: str) -> dict[str, str]:
    found = processes.environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    if SIDES[side][1] == 1 and "CUDA_VISIBLE_DEVICES" not in found:
        found["CUDA_VISIBLE_DEVICES"] = "0"
    return found


def words(point: dict) -> str:
    said = f"{point['side']}: {point['label']}, {plural_gpus(point['gpus'])}: "
    if "failed" in point:
        return said + point["failed"]
    return (f"{said}{point['tokens_per_second']:,.0f} tokens/s, peak {point['peak'] / GIB:.2f} GiB allocated, "
            f"{point['reserved'] / GIB:.2f} reserved per GPU, loaded in {point['load_seconds']:.0f} s with a peak of "
            f"{point['load_peak'] / GIB:.2f} GiB, {point['seconds']:.0f} s in all, losses "
            f"{' '.join(f'{loss:.4f}' for loss in point['losses'])}")  # fmt: skip


def plural_gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def differences_of(points: list[dict]) -> dict[str, float]:
    """Return the largest relative difference of each side's first losses from those of one GPU."""
    losses = {point["side"]: point["losses"][:COMPARED] for point in points if "losses" in point}
    expected = losses.pop("one", None)
    if expected is None:
        return {}
    return {
        side: max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) for side, found in losses.items()
    }


def publish(
    options: argparse.Namespace, points: list[dict], left_out: list[str], differences: dict[str, float]
) -> None:
    speeds = {point["side"]: point.get("tokens_per_second") for point in points}
    rows = []
    for point in points:
        gib = {f"{key}_gib": point[key] / GIB for key in ("peak", "reserved", "load_peak") if point.get(key)}
        compared = {"losses_differ": differences[point["side"]]} if point["side"] in differences else {}
        times = {}
        if point["gpus"] == 2 and speeds.get("hf_peft") and speeds[point["side"]]:
            times["times"] = speeds[point["side"]] / speeds["hf_peft"]
        rows.append({**point, **gib, **compared, **times, "where": plural_gpus(point["gpus"])})
    layers = f"{options.layers} of its 32 layers" if options.layers else "all layers"
    pages.publish(
        options,
        count=2,
        page="qlora_fsdp2" + "_small" * options.small,
        title="QLoRA of Llama-3-8B under FSDP2" + " (with --small: a small model)" * options.small,
        intro="This page compares QLoRA on two GPUs, whose 4-bit weights FSDP2 shards, with one GPU and with "
        "bitsandbytes, PEFT and accelerate.",
        caveats=[
            f"Random weights, {layers}. LoRA r{RANK} on all linear layers, NF4 with double quantisation, "
            f"`bnb_4bit_quant_storage: bfloat16`, activation checkpointing, AdamW. A step has {2 * options.rows} full "
            f"rows of {options.length:,} tokens.",
            f"Each side ran once, in new processes: {STEPS} timed steps after {WARMUP} of warm-up.",
            "The peer is a plain loop: transformers' model with bitsandbytes' layers, PEFT's adapters and accelerate's "
            "FSDP2 plugin in bf16, with the same weights and rows.",
            f"Losses: the largest relative difference of the first {COMPARED} from those of one GPU. The bf16 "
            "policy of accelerate's plugin rounds the peer's adapters in the forward, its gradients between GPUs and "
            "its loss to bfloat16.",
            "Peaks are per GPU, the largest of both; those of the steps do not include loading.",
        ],
        columns=[["label", "side", ""], ["where", "GPUs", ""], ["tokens_per_second", "tokens/s of all GPUs", ",.0f"],
                 ["times", "times the peer", ".2f"], ["peak_gib", "peak GiB", ".2f"],
                 ["reserved_gib", "reserved GiB", ".2f"], ["load_peak_gib", "peak of loading, GiB", ".2f"],
                 ["load_seconds", "seconds to load", ".0f"], ["losses_differ", "losses differ by", ".1e"],
                 ["failed", "ended", ""]],
        rows=rows,
        left_out=left_out,
    )  # fmt: skip


# ---- one side


def source_of(options: argparse.Namespace) -> inputs.Inputs:
    return inputs.Inputs(options.corpus, options.out, options.small)


def rows_of(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the data set of all steps; write its rows if they are missing."""
    rows = (WARMUP + STEPS) * 2 * options.rows
    return inputs.full_rows(source_of(options), options.length, rows)


def recipe_of(options: argparse.Namespace, side: str) -> Path:
    """Write the recipe of a side. The peer's loop takes model and rows from it."""
    source = source_of(options)
    _, count, fused = SIDES[side]
    sharded = {"parallel.strategy": "fsdp", "method.bnb_4bit_quant_storage": "bfloat16"} if count == 2 else {}
    settings = {
        **inputs.model_settings(source, MODEL, layers=options.layers),
        "method.type": "qlora",
        "method.lora_r": RANK,
        "method.lora_alpha": ALPHA,
        "method.lora_dropout": 0.0,
        "method.lora_target_modules": "all-linear",
        "kernels.lora": fused,
        "data.datasets": rows_of(options),
        "data.packing": False,
        "data.train_on": "all",
        "data.max_length": options.length,
        "data.on_overlength": "truncate",
        "data.val_split": 0.0,
        "data.cache": False,
        "data.num_proc": 1,
        "train.per_device_train_batch_size": options.rows,
        "train.gradient_accumulation_steps": 2 // count,
        "train.group_by_length": False,
        "train.max_steps": WARMUP + STEPS,
        "train.gradient_checkpointing": True,
        "train.optim": "adamw_torch_fused",
        "train.learning_rate": 1e-4,
        "train.lr_scheduler_type": "constant",
        "train.warmup_steps": 0,
        "report.warmup_steps": WARMUP,
        "logging.logging_steps": 1,
        "checkpoint.output_dir": options.out / side,
        "checkpoint.save_strategy": "no",
        "checkpoint.save_model": False,
        "checkpoint.overwrite": True,
        **sharded,
    }
    # ranks write the same text
    return inputs.write_recipe(options.out / f"{side}-{os.environ.get('RANK', '0')}.json", settings)


def measure(options: argparse.Namespace, side: str) -> int:
    """Measure a side in this process, which may be one of two ranks; the first prints the point."""
    began = time.perf_counter()
    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    label, count, _ = SIDES[side]
    job = plan_for(load_recipe(recipe_of(options, side)))
    started = time.perf_counter()
    try:
        found = ours(job) if side in OURS else under_fsdp(job, started)
    except Exception as error:
        if not processes.is_out_of_memory(error):
            raise
        found = {"failed": "out of memory"}
    if os.environ.get("RANK", "0") == "0":
        seconds = time.perf_counter() - began
        processes.say({"side": side, "label": label, "gpus": count, "seconds": seconds} | found)
    return 0


def ours(job) -> dict:
    """Train with ligertune. All ranks call it."""
    report, loaded, lines = our_run(job)
    peak = report.peak_memory
    return {
        "peak": peak.get("allocated_steady", peak["allocated_run"]),
        "reserved": peak.get("reserved_steady", peak["allocated_run"]),
        "load_peak": loaded["peak"],
        "load_seconds": report.seconds_to_first_step["loading the model"],
        "tokens_per_second": report.throughput.tokens_per_second,
        "losses": [line["loss"] for line in lines if "loss" in line],
    }
