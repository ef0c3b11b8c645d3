"""Whole training steps of mixtures cut to a few layers: scripts/bench_moe --end-to-end.

Full fine-tuning in bf16, 16 rows of 512 tokens a step, AdamW. `ligertune compare` runs ligertune, Hugging Face and
liger-kernel in new processes on the same random words.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_pages
from bench_pages import GIB
from moe_models import write_config
from moe_whole import write_text

MODELS = {"mixtral": ("mixtral-8x7b", 3), "qwen3": ("qwen3-30b-a3b", 4)}  # name -> model, layers
PEERS = ("hf", "liger")


def end_to_end(options: argparse.Namespace) -> int:
    """Compare the sides on each model and publish their page. Returns the largest exit code of `ligertune compare`."""
    folder = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-moe-"))).absolute()
    peers = [side.strip() for side in options.sides.split(";")] if options.sides else list(PEERS)
    if importlib.util.find_spec("liger_kernel") is None:
        peers = [side for side in peers if side != "liger"]
    codes, results = [], []
    for name in options.only.split(","):
        if name not in MODELS:
            continue
        recipe = write_recipe(options, folder, name)
        found = folder / name / "compare.json"
        is_new = not found.exists()  # compare refuses a folder with a comparison
        against = [word for side in peers for word in ("--peer" if side == "liger" else "--baseline", side)]
        command = [sys.executable, "-m", "ligertune", "compare", str(recipe), *against, "--repeats", "1",
                   "--steps", str(4 if options.small else options.steps), "--out", str(folder / name)]  # fmt: skip
        print(" ".join(command), flush=True)
        codes.append(subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, check=False).returncode)
        if is_new and found.exists():
            results.append(json.loads(found.read_text(encoding="utf-8")))
    publish(options, results)
    return max(codes, default=2)


def write_recipe(options: argparse.Namespace, folder: Path, name: str) -> Path:
    """Write model, text and recipe of a comparison."""
    length, batch = (64, 2) if options.small else (512, 16)
    source, layers = MODELS[name]
    model = {"model_name_or_path": str(write_config(source, folder / source, small=options.small)), "init": "random",
             "dtype": "bfloat16",
             "tokenizer": {"path": str(bench_pages.ROOT / "configs" / "quickstart" / "stories260K")}}  # fmt: skip
    if not options.small:
        model["num_hidden_layers"] = layers
    recipe = {
        "model": model,
        "data": {"datasets": [{"path": str(write_text(folder, documents=512, words=length)), "format": "text"}],
                 "max_length": length, "packing": False, "on_overlength": "truncate"},
        "train": {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 1, "optim": "adamw_torch_fused",
                  "max_steps": 30},
        "checkpoint": {"output_dir": str(folder / f"{name}-run"), "save_strategy": "no", "save_model": False},
    }  # fmt: skip
    path = folder / f"{name}.json"  # JSON is YAML
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def publish(options: argparse.Namespace, results: list[dict]) -> None:
    rows, left_out, remarks = [], [], []
    for result in results:
        model = result["model"].split(",")[0]
        sides = result["points"][0]["sides"]
        reference = next((side["tokens_per_second"] for side in sides if side["name"] == "without"), None)
        for side in sides:
            if side["failure"]:
                left_out.append(f"Without a row: {model}, {side['label']} ({side['failure']['sentence']}).")
                continue
            rows.append(row_of(side, model, reference))
            if side["parity"] is not None:
                remarks.append(f"Largest relative difference of losses from Hugging Face, {model}, {side['label']}: "
                               f"{side['parity']['worst']:.1e}.")  # fmt: skip
    if not rows:
        print("\n".join(["nothing was measured", *left_out]))
        return
    bench_pages.publish(
        options,
        page="moe_steps" + "_small" * options.small,
        title="Whole steps of mixtures of experts" + " (with --small: tiny models)" * options.small,
        intro="This page compares steps of full fine-tuning of mixtures that are cut to a few layers.",
        caveats=[
            "Published sizes, random weights and random words. mixtral-8x7b has 3 of its 32 layers, qwen3-30b-a3b 4 of "
            "48.",
            f"Full rows, in bf16, with fused AdamW: {results[0]['points'][0]['batch']}.",
            f"Each side ran once, in a new process: {results[0]['steps']} measured steps after {results[0]['warmup']} "
            "of warm-up.",
        ],
        columns=[["model", "model", ""], ["side", "side", ""], ["tokens_per_second", "tokens/s", ",.0f"],
                 ["times", "times Hugging Face", ".2f"], ["step_ms", "median step, ms", ".1f"],
                 ["peak_gib", "peak GiB", ".2f"]],
        rows=rows,
        left_out=left_out,
        remarks=remarks,
        chart={"kind": "bars", "labels": ["side", "model"], "values": {
            "tokens_per_second": "tokens/s (more is better)", "peak_gib": "peak memory, GiB (less is better)"}},
    )  # fmt: skip


def row_of(side: dict, model: str, reference: dict | None) -> dict:
    """Return the row of a side that finished. reference: Hugging Face's tokens/s."""
    peak, rate = side["peak_memory"], side["tokens_per_second"]["mean"]
    return {
        "model": model,
        "side": side["label"],
        "ours": side["name"] == "with",
        "tokens_per_second": rate,
        "times": rate / reference["mean"] if reference else None,
        "step_ms": 1e3 * side["median_step_seconds"],
        "peak_gib": peak.get("allocated_steady", peak["allocated_run"]) / GIB,
    }
