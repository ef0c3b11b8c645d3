"""Train the whole Qwen3-30B-A3B with LoRA on one GPU: scripts/bench_moe --whole.

Sides: ligertune, and transformers with PEFT in a plain loop; each in bf16 and in 4 bits. Each runs in its own process.
Random weights are made on the GPU: 57 GiB in bf16, or one weight at a time before it is quantised. LoRA r16 on
attention and experts, one row of 4,096 tokens a step, activation checkpointing; rows and optimizer are the same.

ligertune stores the experts in NF4, too. bitsandbytes in transformers quantises linear layers only, so that the experts
of `hf_peft 4-bit` stay in bf16. A side that runs out of memory is a result: its row has the peak that it reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import bench_pages
import side_process
from bench_pages import GIB
from moe_models import write_config

MODEL = "qwen3-30b-a3b"
SIDES = ("ligertune bf16", "ligertune 4-bit", "hf_peft bf16", "hf_peft 4-bit")
STEPS, WARMUP = 5, 2
RANK, ALPHA = 16, 32
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def whole(options: argparse.Namespace) -> int:
    """Run all sides and print their table. Returns 1 if a side failed for another reason than memory or time."""
    folder = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-moe-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_config(MODEL, folder / MODEL, small=options.small)
    write_text(folder, documents=STEPS + 3, words=tokens_of(options))
    sides = [side.strip() for side in options.sides.split(";")] if options.sides else list(SIDES)
    points, left_out, failed = [], [], 0
    for side in sides:
        if side.endswith("4-bit") and importlib.util.find_spec("bitsandbytes") is None:
            left_out.append(f"Without a row: {side} (bitsandbytes is not installed).")
            continue
        command = [sys.executable, str(Path(__file__).with_name("bench_moe")), *sys.argv[1:], "--out", str(folder),
                   "--line", side]  # fmt: skip
        found, reason = side_process.run(command, limit=options.limit, show=lambda one: print(words(one), flush=True))
        points += found
        if reason:
            left_out.append(f"Without a row: {side} ({reason}).")
            failed += reason.startswith("failed")
    publish(options, points, left_out)
    return 1 if failed or not points else 0


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
    bench_pages.publish(
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


def write_text(folder: Path, *, documents: int, words: int) -> Path:
    """Write documents of random words, each with more tokens than words: routers see many different tokens."""
    letters, chosen = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
    lines = []
    for _ in range(documents):
        text = " ".join("".join(chosen.choices(letters, k=chosen.randint(2, 8))) for _ in range(words))
        lines.append(json.dumps({"text": text}) + "\n")
    path = folder / "text.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def recipe_of(options: argparse.Namespace, side: str) -> Path:
    """Write the recipe of a side. The loop of hf_peft takes its rows from it."""
    four_bits = side.endswith("4-bit")
    recipe = {
        "model": {
            "model_name_or_path": str(options.out / MODEL),
            "init": "random",
            "dtype": "float32" if options.small else "bfloat16",
            "tokenizer": {"path": str(bench_pages.ROOT / "configs" / "quickstart" / "stories260K")},
        },
        "method": {"type": "qlora" if four_bits else "lora", "lora_r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
                   "lora_target_modules": ATTENTION, "lora_target_parameters": EXPERTS},
        "data": {"datasets": [{"path": str(options.out / "text.jsonl"), "format": "text"}], "packing": False,
                 "max_length": tokens_of(options), "on_overlength": "truncate", "cache": False, "num_proc": 1},
        "train": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": STEPS,
                  "gradient_checkpointing": True, "optim": options.optim, "learning_rate": 1e-4},
        "report": {"warmup_steps": WARMUP},
        "logging": {"logging_steps": 1},
        "checkpoint": {"output_dir": str(options.out / side.replace(" ", "-")), "save_strategy": "no",
                       "save_model": False, "overwrite": True},
    }  # fmt: skip
    path = options.out / f"{side.replace(' ', '-')}.json"  # JSON is YAML
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


# ---- one side


def measure(options: argparse.Namespace, side: str) -> int:
    """Measure a side in this process, and print its point."""
    from preference_sides import is_out_of_memory

    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    known = {"side": side, "bits": "4-bit" if side.endswith("4-bit") else "bf16"}
    job = plan_for(load_recipe(recipe_of(options, side)))
    started = time.perf_counter()
    try:
        found = ours(job) if side.startswith("ligertune") else theirs(job, started, four_bits=known["bits"] == "4-bit")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = {"failed": "out of memory", "seconds": time.perf_counter() - started}
    side_process.say(known | peak_now() | found)
    return 0


def peak_now() -> dict[str, int]:
    """Return the peak bytes of this process: allocated and reserved by torch on a GPU, resident on a CPU."""
    import torch

    from ligertune.training.metrics.meter import resident_peak_bytes

    if not torch.cuda.is_available():
        return {"peak": resident_peak_bytes(), "reserved": resident_peak_bytes()}
    return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def ours(job) -> dict:
    """Train with ligertune."""
    from ligertune.progress import Phases
    from ligertune.run import run

    loaded, lines = [], []
    with Phases() as phases:
        report = run(job, lines.append, change=lambda model: loaded.append(peak_now()), phases=phases)
    end = report.peak_memory
    return {
        "peak": max(loaded[0]["peak"], end["allocated_run"]),
        "reserved": max(loaded[0]["reserved"], end.get("reserved_run", 0)),
        "planned": job.plan.peak.total,
        "load_peak": loaded[0]["peak"],
        "load_seconds": report.seconds_to_first_step["loading the model"],
        "tokens_per_second": report.throughput.tokens_per_second,
        "losses": [line["loss"] for line in lines if "loss" in line],
    }


def theirs(job, started: float, *, four_bits: bool) -> dict:
    """Train with transformers and PEFT in a plain loop, on the rows of the job."""
    import torch
    from peft import LoraConfig, get_peft_model
    from preference_sides import examples_of_steps

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda:0" if cuda else "cpu"), getattr(torch, job.plan.precision.weights)
    job.config._experts_implementation = "grouped_mm"
    model = model_in_4_bits(job, device, dtype) if four_bits else model_in_16_bits(job, device, dtype)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=ATTENTION, target_parameters=EXPERTS,
                      task_type="CAUSAL_LM")  # fmt: skip
    model = get_peft_model(model, lora).train()
    optimizer = optimizer_of(job, [p for p in model.parameters() if p.requires_grad])
    loaded, losses, times = {"load_peak": peak_now()["peak"], "load_seconds": time.perf_counter() - started}, [], []
    for (example,) in examples_of_steps(job):
        ids = torch.tensor(example.input_ids, dtype=torch.int64, device=device)[None]
        begun = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        if cuda:
            torch.cuda.synchronize()
        times.append((ids.numel(), time.perf_counter() - begun))
    counted = times[WARMUP:]
    speed = sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)
    return {**loaded, **peak_now(), "tokens_per_second": speed, "losses": losses}


def model_in_16_bits(job, device, dtype):
    """Return the model with random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(job.config, dtype=dtype)


@dataclasses.dataclass
class RandomWeight:
    """A weight of a checkpoint that is made on the device when transformers reads it, as `tensor[...]`."""

    shape: tuple[int, ...]
    place: dict
    ones: bool  # of a norm

    def __getitem__(self, everything: object):
        import torch

        value = torch.empty(self.shape, **self.place)
        return value.fill_(1.0) if self.ones else value.normal_(0.0, 0.02)


def model_in_4_bits(job, device, dtype):
    """Return the model with random weights as transformers quantises it: linear layers, and no experts."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(job.config, dtype=dtype)
    place = {"device": device, "dtype": dtype}
    state = {name: RandomWeight(tuple(p.shape), place, p.ndim == 1) for name, p in skeleton.named_parameters()}
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                             bnb_4bit_compute_dtype=dtype)  # fmt: skip
    torch.manual_seed(0)
    return type(skeleton).from_pretrained(
        None, config=job.config, state_dict=state, device_map={"": device}, dtype=dtype, quantization_config=nf4
    )


def optimizer_of(job, parameters: list):
    """Return the optimizer of the recipe, from the package that `ligertune` takes it from."""
    import torch

    group = {"params": parameters, "lr": 1e-4}
    name = job.plan.optimizer.name
    if "8bit" in name:
        import bitsandbytes

        cls = bitsandbytes.optim.PagedAdamW8bit if name.startswith("paged") else bitsandbytes.optim.AdamW8bit
        return cls([group])
    return torch.optim.AdamW([group], fused=True)
