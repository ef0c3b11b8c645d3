"""Train Qwen3-8B's shape with LoRA on a base in block float8: scripts/bench float8_base.

Random weights are quantised to blocks of 128 x 128 and written as a checkpoint, and once more as bfloat16. A process
trains on each, on the same rows, and the losses are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.sides.stored_base import RANK, STEPS, WARMUP, adapter_recipe, train_adapter, write_checkpoint

MODEL = "Qwen3-8B"
BASES = {"float8": "block float8", "bfloat16": "bfloat16"}
STD = 0.02
BLOCK = 128
LARGEST_DIFFERENCE = 1e-3  # relative, of a step's losses


def main() -> int:
    """Write both checkpoints, train on each and print the table. Returns 1 if a run failed or the losses differ."""
    options = parse()
    if options.line == "write":
        write_bases(options)
        return 0
    if options.line:
        processes.say({"base": BASES[options.line], **train_adapter(recipe_of(options, options.line))})
        return 0
    points, left_out = [], []
    for line in ("write", *BASES):
        started = time.perf_counter()
        command = processes.again("--out", str(options.out), "--line", line)
        found, reason = processes.run(command, limit=options.limit, show=lambda one: print(json.dumps(one), flush=True))
        points += [{**one, "seconds": time.perf_counter() - started} for one in found]
        if reason:
            left_out.append(f"Without a row: {line} ({reason}).")
            break
    for base in BASES:
        shutil.rmtree(options.out / base, ignore_errors=True)
    difference = largest_difference(points)
    publish(options, points, left_out, difference)
    return 1 if left_out or difference > LARGEST_DIFFERENCE else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=inputs.CORPUS, help="folder of the test data")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a process")
    parser.add_argument("--out", type=Path, help="folder of the checkpoints: 25 GB")
    parser.add_argument("--small", action="store_true", help="the quickstart's model on a CPU")
    parser.add_argument("--line", choices=("write", *BASES), help=argparse.SUPPRESS)
    options = pages.parse(parser)
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-float8-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def tokens_of(options: argparse.Namespace) -> int:
    return 64 if options.small else 4096


def recipe_of(options: argparse.Namespace, base: str) -> Path:
    return adapter_recipe(inputs.Inputs(options.corpus, options.out, options.small), base, tokens_of(options))


def write_bases(options: argparse.Namespace) -> None:
    """Write the checkpoint in block float8, and its weights in bfloat16."""
    import torch
    from ligertune_kernels import quantize_float8_blocks
    from transformers import AutoConfig, AutoModelForCausalLM

    source = inputs.TOKENIZER if options.small else options.corpus / "model_configs" / MODEL
    config = AutoConfig.from_pretrained(source)
    device = torch.device("cpu" if options.small else "cuda")
    block = (4, 4) if options.small else (BLOCK, BLOCK)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    stored: dict[str, dict] = {}
    dense: dict[str, dict] = {}
    for name, parameter in skeleton.named_parameters():
        in_layer = ".layers." in name
        file = f"layer-{name.split('.')[2]}" if in_layer else "rest"
        tensors = stored.setdefault(file, {})
        same = dense.setdefault(file, {})
        if parameter.ndim == 1:
            tensors[name] = same[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
            continue
        weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        weight.normal_(std=STD, generator=generator)
        if not in_layer:
            tensors[name] = same[name] = weight.cpu()
            continue
        quantised = quantize_float8_blocks(weight[None], block=block)
        tensors[name] = quantised.values[0].cpu()
        tensors[f"{name}_scale_inv"] = quantised.scales[0].cpu()
        same[name] = quantised.dequantize(weight[None].shape, torch.bfloat16)[0].cpu()
    fp8 = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    for base, files, quantization in (("float8", stored, fp8), ("bfloat16", dense, None)):
        config.save_pretrained(options.out / base)
        write_checkpoint(options.out / base, files, quantization)


def largest_difference(points: list[dict]) -> float:
    """Return the largest relative difference of a step's losses; infinite unless both bases have trained."""
    if len(points) != len(BASES):
        return float("inf")
    pairs = zip(*(point["losses"] for point in points), strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


def publish(options: argparse.Namespace, points: list[dict], left_out: list[str], difference: float) -> None:
    rows = [{**point, **{f"{key}_gib": point[key] / GIB for key in ("peak", "planned")}} for point in points]
    pages.publish(
        options,
        page="float8_base" + "_small" * options.small,
        title="Qwen3-8B's shape with LoRA on block-float8 weights" + " (with --small: a tiny model)" * options.small,
        intro="This page measures LoRA on a base in block float8 and on the same weights in bfloat16.",
        caveats=[
            f"Published sizes, random weights that were rounded to float8 in blocks of {BLOCK} x {BLOCK}. LoRA r{RANK} "
            f"on all linear layers, one row of {tokens_of(options):,} tokens a step, activation checkpointing; "
            f"{STEPS} steps, the first {WARMUP} not counted. The peak is that of the process, with loading.",
        ],
        columns=[["base", "base", ""], ["tokens_per_second", "tokens/s", ",.0f"], ["peak_gib", "peak GiB", ".2f"],
                 ["planned_gib", "predicted GiB", ".2f"], ["seconds", "seconds", ".0f"]],
        rows=rows,
        left_out=left_out,
        remarks=[f"Largest relative difference of the losses of a step: {difference:.1e}."],
    )  # fmt: skip
