"""Run each bundled recipe for a few steps, with random weights and local data.

    scripts/bench recipes --corpus FOLDER [--only llama-3-8b-alpaca-lora,...] [--steps 2] [--side-by-side 2] [--small]
    scripts/bench recipes --corpus FOLDER --processes 4      the recipes for several GPUs

FOLDER holds model_configs, tokenizers, alpaca, sharegpt and images. Differences from the recipes: random weights, a
tokenizer and data of the corpus; nothing is saved or evaluated. Prints the losses, the measured peak memory and the
plan's. --side-by-side 2 runs two recipes at once on one large GPU, of which only one trains a whole model. --small: one
layer and short rows, for a machine without a GPU (23 GiB are enough for two processes of Mistral-7B, not of
Llama-3-8B). QLoRA needs real weights to quantise: run scripts/bench scaling --only qlora.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.tables.recipes import OTHERS, SEVERAL, WHOLE

TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}" \
        "{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip
TRAIN_ONLY = {
    "model.init": "random",
    "data.val_split": 0,
    "train.num_train_epochs": None,
    "logging.logging_steps": 1,
    "report.warmup_steps": 0,
    "eval.eval_strategy": "no",
    "checkpoint.save_strategy": "no",
    "checkpoint.save_model": False,
    "checkpoint.overwrite": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser, small="one layer and short rows, for a machine without a GPU")
    parser.add_argument("--only", help="comma-separated names of recipes, without folder and .yaml")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--side-by-side", type=int, choices=(1, 2), default=1)
    parser.add_argument("--processes", type=int, help="run the recipes for several GPUs on this number of processes")
    options = pages.parse_arguments(parser)
    options.corpus = options.corpus.resolve()
    groups = (SEVERAL,) if options.processes else (WHOLE, OTHERS)
    known = [name.split("/")[1] for some in groups for name in some]
    chosen = options.only.split(",") if options.only else known
    lines = [[(name, model) for name, model in some.items() if name.split("/")[1] in chosen] for some in groups]
    print(f"{'recipe':36s} {'loss':>18s} {'peak GiB':>9s} {'plan':>7s} {'s':>5s}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="ligertune-recipes-") as folder,
        ThreadPoolExecutor(options.side_by_side) as pool,
    ):
        options.folder = Path(folder)
        good = [ok for line in pool.map(lambda some: [one(options, *each) for each in some], lines) for ok in line]
    print(f"{sum(good)} of {len(good)} recipes ran")
    return 0 if all(good) and len(good) == len(chosen) else 1


def one(options: argparse.Namespace, name: str, model: str) -> bool:
    """Run one recipe and print its line. Returns whether it succeeded."""
    began, output = time.perf_counter(), options.folder / name.split("/")[1]
    pairs = {**TRAIN_ONLY, **stand_ins(options, name, model), "train.max_steps": options.steps,
             "checkpoint.output_dir": output}  # fmt: skip
    recipe = inputs.ROOT / "configs" / f"{name}.yaml"
    command = [sys.executable, "-m", "ligertune", "train", str(recipe), "--json"]
    command += inputs.override_arguments({key: json.dumps(value, default=str) for key, value in pairs.items()})
    environment = processes.environment(HF_HUB_OFFLINE="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        print(f"{name:36s} FAILED, exit {done.returncode}, {took:.0f} s: {' / '.join(said)[:600]}", flush=True)
        return False
    measured = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in measured if "loss" in line]
    peak, plan = json.loads(done.stdout)["peak_memory"], json.loads((output / "plan.json").read_text("utf-8"))
    held = peak["allocated_run"] / GIB
    planned = f"{plan['peak']['total'] / GIB:7.1f}" if plan["peak"] else f"{'':7s}"
    shown = f"{losses[0]:.4f} -> {losses[-1]:.4f}"
    print(f"{name:36s} {shown:>18s} {held:9.1f} {planned} {took:5.0f}", flush=True)
    return len(losses) == options.steps and all(loss == loss and loss > 0 for loss in losses)


def stand_ins(options: argparse.Namespace, name: str, model: str) -> dict[str, object]:
    """Return the settings that replace weights, tokenizer and data of the hub."""
    corpus, has_images = options.corpus, name.startswith("qwen2_vl/")
    source = inputs.Inputs(corpus, options.folder, small=False)
    is_chat = name.startswith("medusa/")
    words = "qwen2.5" if model.startswith("Qwen") else "mistral-7b-v0.1"
    found = {
        "model.model_name_or_path": corpus / "model_configs" / model,
        "model.tokenizer.path": corpus / "tokenizers" / words,
    }
    if has_images:
        sets = inputs.real_images(source, 0, 0)
    elif is_chat:
        sets = [{"path": str(corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl")}]
        found |= {"medusa.eval_prompts": 0, "checkpoint.save_model": not name.endswith("-stage2")}
        if name.endswith("-stage2"):
            found["medusa.heads_path"] = options.folder / name.split("/")[1].removesuffix("-stage2") / "medusa"
        if words != "qwen2.5":  # qwen2.5 has a chat template
            template = options.folder / "turns.jinja"
            template.write_text(TURNS, encoding="utf-8")
            found["model.tokenizer.chat_template"] = template
    else:
        sets = inputs.alpaca_records(source, 0, 0)
    if options.processes:
        found["parallel.num_processes"] = options.processes
    if options.small:
        found |= {"model.num_hidden_layers": 1, "train.per_device_train_batch_size": 1, "data.max_length": 512,
                  "train.gradient_accumulation_steps": 1, "model.dtype": "float32",
                  "data.on_overlength": "drop", "data.max_dropped": 1}  # fmt: skip
    return {**found, "data.datasets": sets}
