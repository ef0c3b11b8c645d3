"""Compare predicted with measured peak memory, over training steps of 50 configurations.

    scripts/bench memory --corpus FOLDER [--out memory.json] [--only llama-1b]
    scripts/bench memory --moe [--only qwen3]                 mixtures of experts, with the sizes in moe_models.py
    torchrun --nproc-per-node 2 scripts/bench memory ...      FSDP2 on two GPUs

FOLDER holds model_configs/{Llama-3.2-1B,Meta-Llama-3-8B,Qwen2.5-1.5B,gemma-7b,Qwen3.5-4B}; weights are random, the 8B
model and Qwen3.5 are cut to 8 layers and Gemma to 6. Each model takes four steps of full training, of LoRA and with an
8-bit optimizer (bf16 if neither bitsandbytes nor torchao is installed), with and without checkpointing, each at another
batch and length; and of full training and LoRA with `kernels.recompute`. Without these last ten
and without Qwen3.5 it takes four minutes on one H100. The Llama models also train by QLoRA (NF4; FP4 with single
quantisation; layer inputs in host memory; CUDA graphs), and the smaller one by DPO on
real pairs and by padding-free batches of real answers, both of many lengths.

--moe trains nine mixtures of experts cut to a few layers instead: full training and LoRA on attention and experts, with
and without checkpointing, and two of them in 4 bits if bitsandbytes is installed. Five minutes on one
H100; all models come first with one method, then with the next, so that --limit 170 leaves out methods and no models.

--against FILE trains nothing: it compares today's prediction with the measurements in FILE, an earlier --out, made on
--gpus GPUs of --memory GiB. Use it after a change of a formula. It needs the package of the measured 8-bit optimizer
(bitsandbytes on one GPU, torchao on several), or --without 8-bit.

--small runs tiny models on a CPU, with the kernels in Triton's interpreter and the peak from torch's profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.tables.memory import (
    IN_4_BITS,
    METHODS,
    MIXTURE_METHODS,
    MIXTURE_SIZES,
    MIXTURES,
    MODELS,
    SIZES,
    SMALL,
    UNEQUAL_LENGTH,
    UNEQUAL_METHODS,
    WITH_DPO,
)
from benchmarks.tables.moe_models import write_config

WORLD, MAIN = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"


def main() -> int:
    options = parse()
    if options.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    rows, failed, started, left_out = [], 0, time.perf_counter(), []
    for name, model, method, checkpointing in configurations(options):
        if options.limit and time.perf_counter() - started > options.limit:
            left_out.append(name)
            continue
        row = measured(options, name, model, method, checkpointing)
        rows += [row] if row else []
        failed += row is None
    if not MAIN:
        return 0
    if options.against:
        show(rows)
    elif rows:
        page(options, rows, left_out)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or not rows else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser, small="tiny models, for a machine without a GPU")
    parser.add_argument("--only", help="run only configurations whose name contains this")
    parser.add_argument("--without", help="leave out configurations whose name contains this")
    parser.add_argument("--against", type=earlier, metavar="FILE", help="compare with an earlier --out")
    parser.add_argument("--memory", type=float, default=79.1, metavar="GIB", help="memory of a GPU of --against")
    parser.add_argument("--gpus", type=int, default=WORLD, help="GPUs of --against, under FSDP2")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no configuration after this time")
    parser.add_argument("--moe", action="store_true", help="mixtures of experts")
    options = pages.parse(parser)
    package = "bitsandbytes" if options.gpus == 1 else "torchao"
    if any("8-bit" in name and chosen(options, name) for name in options.against or ()) and not find_spec(package):
        parser.error(f"--against: 8-bit rows are planned with {package}, which is not installed: "
                     f"pip install {package}, or write --without 8-bit")  # fmt: skip
    return options


def configurations(options: argparse.Namespace) -> list[tuple[str, str, str, bool]]:
    """Return (name, model, method, checkpointing) of what runs, in its order: of mixtures all models first."""
    models, methods = (MIXTURES, MIXTURE_METHODS) if options.moe else (MODELS, METHODS)
    if options.small and not options.moe:
        models = ("small-llama", "small-tied")
    found = []
    for model in models:
        for rank, (method, checkpointing) in enumerate(product(methods, (False, True))):
            name = f"{model} {method}{' checkpointing' if checkpointing else ''}"
            if "qlora" in method and (model not in IN_4_BITS or not find_spec("bitsandbytes")):
                continue
            if ("dpo" in method or "padding-free" in method) and model not in WITH_DPO:
                continue
            if options.small and method == "qlora graphs":
                continue
            if checkpointing and method in ("qlora offload", "qlora fp4"):
                continue
            if (checkpointing and "recompute" in method) or (options.against and name not in options.against):
                continue
            if chosen(options, name):
                found.append((rank if options.moe else 0, (name, model, method, checkpointing)))
    return [configuration for _, configuration in sorted(found, key=lambda one: one[0])]


def chosen(options: argparse.Namespace, name: str) -> bool:
    return (not options.only or options.only in name) and not (options.without and options.without in name)


def earlier(path: str) -> dict[str, dict]:
    """Return name -> row of an earlier run."""
    return {row["name"]: row for row in json.loads(Path(path).read_text(encoding="utf-8"))}


def measured(options: argparse.Namespace, name: str, model: str, method: str, checkpointing: bool) -> dict | None:
    """Plan and train one configuration. Prints the traceback and returns None if it fails."""
    if WORLD > 1:  # the next run needs a new store, because a run destroys its process group
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    folder = Path(tempfile.mkdtemp(prefix="ligertune-bench-memory-"))
    from ligertune.errors import UserError

    try:
        return one(options, folder, name, settings(options, folder, model, method, checkpointing))
    except (RuntimeError, ValueError, OSError, UserError):
        traceback.print_exc()
        print(f"{name}: failed", flush=True)
        return None
    finally:
        shutil.rmtree(folder)


def one(options: argparse.Namespace, folder: Path, name: str, wanted: dict[str, object]) -> dict:
    from ligertune.recipe import load_recipe
    from ligertune.run import run
    from ligertune.training.resolve import plan_for

    recipe = inputs.write_recipe(folder / "recipe.json", wanted)
    if options.against:
        gpus = options.gpus if options.gpus > 1 else None
        job, report = plan_for(load_recipe(recipe), for_show=True, memory_gib=options.memory, gpus=gpus), None
        found = options.against[name]["measured"]
    else:
        job = plan_for(load_recipe(recipe))
        processes.release_memory()
        with host_peak() if options.small else contextlib.nullcontext([0]) as seen:
            report = run(job, lambda line: None)
        found = seen[0] or report.peak_memory["allocated_run"]
    peak = job.plan.peak
    row = {
        "name": name,
        "batch": f"{wanted['train.per_device_train_batch_size']} x {wanted['data.max_length']}",
        "tokens": job.plan.largest_batch.tokens,
        "measured": found,
        "predicted": peak.total,
        "error": peak.total / found - 1,
        "at": peak.phase.name,
        "parts": peak.parts(),
    }
    parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in row["parts"].items() if size)
    if MAIN:
        print(f"{name} {row['batch']}: measured {found / GIB:.3f} GiB, predicted {peak.total / GIB:.3f} "
              f"({100 * row['error']:+.1f} %) at {peak.phase.name}: {parts}", flush=True)  # fmt: skip
    del job, report
    processes.release_memory()
    return row


def settings(
    options: argparse.Namespace, folder: Path, model: str, method: str, checkpointing: bool
) -> dict[str, object]:
    sizes = MIXTURE_SIZES if options.moe else SIZES
    tiny = (1, 32, 1) if options.moe else (2, 96, 1 + checkpointing)  # the interpreter takes long for experts
    rows, length, accumulation = tiny if options.small else sizes[model][checkpointing]
    shared = {
        "model.init": "random",
        "model.tokenizer.path": inputs.TOKENIZER,
        "data.datasets": [
            {"path": str(text(folder, options.gpus * rows * accumulation * 4 + 4, length)), "format": "text"}
        ],
        "data.max_length": length,
        "data.on_overlength": "truncate",
        "data.cache": False,
        "data.num_proc": 1,
        "train.per_device_train_batch_size": rows,
        "train.gradient_accumulation_steps": accumulation,
        "train.max_steps": 2 if options.small else 4,
        "train.gradient_checkpointing": checkpointing,
        "report.warmup_steps": 0,
        "logging.logging_steps": 4,
        "checkpoint.output_dir": str(folder / "run"),
        "checkpoint.save_strategy": "no",
    }
    if options.moe:
        name, layers = MIXTURES[model]
        path = write_config(name, folder / "model", small=options.small)
        cut = {} if options.small else {"model.num_hidden_layers": layers}
        dtype = "float32" if options.small else "bfloat16"
        packing = name != "gpt-oss-20b"  # attention sinks
        picked = {"model.model_name_or_path": str(path), "model.dtype": dtype, "data.packing": packing, **cut}
    elif options.small:
        picked = {"model.model_name_or_path": str(small(folder, tied=model == "small-tied")), "model.dtype": "float32"}
    else:
        picked = {**MODELS[model], "model.dtype": "bfloat16"}
        name = str(picked["model.model_name_or_path"])
        picked["model.model_name_or_path"] = str(options.corpus / "model_configs" / name)
    optim = {"train.optim": eight_bits(options.gpus)} if method == "8-bit" else {}
    several = {"parallel.strategy": "fsdp"} if options.gpus > 1 else {}
    chosen_method = (MIXTURE_METHODS if options.moe else METHODS)[method]
    if not options.small and method in UNEQUAL_METHODS:
        shared["data.max_length"] = UNEQUAL_LENGTH  # hardly any answer is truncated, so lengths differ
    if chosen_method.get("task") == "dpo":
        source = inputs.Inputs(options.corpus, folder, options.small)
        shared["data.datasets"] = inputs.preference_pairs(source, length, options.gpus * rows * accumulation * 4 + 4)
        # a pair has two rows
        shared["train.per_device_train_batch_size"] = max(1, rows // 2)
    if "padding-free" in method:
        source = inputs.Inputs(options.corpus, folder, options.small)
        shared["data.datasets"] = inputs.completions(source, length, options.gpus * rows * accumulation * 4 + 4)
    return {**shared, **picked, **chosen_method, **optim, **several}


def eight_bits(gpus: int) -> str:
    if find_spec("bitsandbytes") and gpus == 1:  # it does not support sharded weights
        return "adamw_8bit"
    return "adamw_torch_8bit" if find_spec("torchao") else "adamw_bf16"


def text(folder: Path, documents: int, length: int) -> Path:
    """Write documents that each fill a row, so that every position has a label."""
    path = folder / "text.jsonl"
    words = " ".join(["once upon a time there was a little girl"] * (length // 4))
    rows = []
    for i in range(documents):
        rows.append({"text": f"{i} {words}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def small(folder: Path, *, tied: bool) -> Path:
    from transformers import LlamaConfig

    LlamaConfig(**SMALL, tie_word_embeddings=tied).save_pretrained(folder / "model")
    return folder / "model"


@contextlib.contextmanager
def host_peak():
    """Yield a list that gets the peak of torch's CPU allocations in the block, above those before it."""
    import torch

    seen, held = [0], 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield seen
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            seen[0] = max(seen[0], held)


def show(rows: list[dict]) -> None:
    print(f"\n{'configuration':34} {'batch':>10} {'measured':>10} {'predicted':>10} {'error':>8}  at")
    for row in rows:
        print(f"{row['name']:34} {row['batch']:>10} {row['measured'] / GIB:>10.3f} {row['predicted'] / GIB:>10.3f} "
              f"{100 * row['error']:>+7.1f}%  {row['at']}")  # fmt: skip
    if rows:
        print(summary(rows))


def summary(rows: list[dict]) -> str:
    errors, ratios = [abs(row["error"]) for row in rows], [row["predicted"] / row["measured"] for row in rows]
    return (f"Of {len(rows)} configurations the median error is {statistics.median(errors):.1%}, the largest "
            f"{max(errors):.1%}. The prediction is {min(ratios):.3f} to {max(ratios):.3f} times the measurement, "
            f"{statistics.median(ratios):.3f} times in the median.")  # fmt: skip


def page(options: argparse.Namespace, rows: list[dict], left_out: list[str]) -> None:
    """Publish the page of a run that measured."""
    sizes = [{**row, "measured_gib": row["measured"] / GIB, "predicted_gib": row["predicted"] / GIB} for row in rows]
    for row in sizes:
        del row["parts"]
    kind = " of mixtures of experts" if options.moe else ""
    pages.publish(
        options,
        count=WORLD,
        page="memory" + "_moe" * options.moe + "_small" * options.small,
        title=f"The memory plan against measurements{kind}{' (with --small: tiny models)' * options.small}",
        intro="This page compares the peak memory that `ligertune plan` predicts with what training allocates.",
        caveats=[
            "The number behind a name is that of its layers; the whole models have more. Weights are random, so the "
            "router's choice is close to even: the buffers have the same sizes whatever it is.",
            "deepseek-v3-small is DeepSeek-V3 with half of its width and a quarter of its experts.",
            "full: all weights train with AdamW. lora: adapters on attention and experts. qlora: on NF4 weights.",
        ] if options.moe else [
            "The formula was corrected with measurements of these configurations, so they do not show how it does on "
            "other models.",
            "The number behind a name is that of its layers; the whole models have more. Weights are random.",
            "full: all weights train with AdamW. checkpointing: `train.gradient_checkpointing`. recompute: "
            f"`kernels.recompute`. 8-bit: all weights train with `{eight_bits(WORLD)}`.",
            "qlora: NF4 with double quantisation; qlora fp4: FP4 without it; offload: layer inputs in host memory; "
            "graphs: `train.cuda_graphs`. dpo: real pairs of many lengths, references computed before training; dpo "
            "lora: reference without the adapter. padding-free: real answers of many lengths, not packed.",
        ],
        columns=[["name", "configuration", ""], ["batch", "micro-batch, rows x tokens", ""],
                 ["measured_gib", "measured GiB", ".2f"], ["predicted_gib", "predicted GiB", ".2f"],
                 ["error", "error", "+.1%"]],
        rows=sizes,
        left_out=[f"Without rows (not begun after {options.limit:.0f} s): {', '.join(left_out)}."] if left_out else [],
        remarks=[summary(rows)],
        chart={"kind": "dots", "labels": ["name", "batch"], "axis": "peak memory per GPU, GiB",
               "values": {"measured_gib": "measured", "predicted_gib": "predicted"}},
    )  # fmt: skip
