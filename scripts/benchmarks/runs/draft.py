"""Benchmark the training of an EAGLE-3 draft head for Llama-3.1-8B with the kernels and in plain PyTorch.

    scripts/bench draft [--page docs/benchmarks]               everything: five minutes on one H200
    scripts/bench draft --sides "ours 8192" --profile          the kernels of a step, with their shares

Llama-3.1-8B's shape, random weights, bfloat16, AdamW, a draft vocabulary of 32,000 tokens, K = 7 steps of training-time
test. One packed row of T tokens holds documents with the lengths of ShareGPT conversations (log-normal, median 979,
mean 1,250 tokens), of which 77 % are trained. The plain side has the model without kernels, materialises the scores of
all pairs of rows, and the logits of all rows; both sides use the same attention in the target. Each side runs in one
process at growing T until its memory, limited to --card GiB, runs out. `ours_recomputed` keeps no activations of the
head. The first losses of both sides are compared at the shortest row.

`recipe 40` and `recipe_4bit 24` run `ligertune draft` on packed rows of 8,192 tokens of real text, with the memory of a
card of 40 and of 24 GiB; the last has its target in 4 bits and needs bitsandbytes.

FOLDER holds model_configs/Llama-3.1-8B, the tokenizer tokenizers/mistral-7b-v0.1, and alpaca. --small runs a tiny model
on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.runs.sampling import profiled, synchronise

if TYPE_CHECKING:
    import torch

    from ligertune.features.draft.training.draft_model import DraftModel

MODEL = "Llama-3.1-8B"
SIDES = (
    "plain 2048 4096 5120 5632 6144 6656 7168; ours 2048 4096 5120 5632 6144 8192 16384 20480 24576; "
    "ours_recomputed 8192 16384 32768 49152; recipe 40; recipe_4bit 24"
)
SMALL_SIDES = "plain 40 80; ours 40 80; ours_recomputed 40; recipe 40"
NAMES = {"plain": "plain PyTorch", "ours": "ligertune", "ours_recomputed": "ligertune, recomputed"}
NAMES |= {"recipe": "ligertune draft", "recipe_4bit": "ligertune draft, 4-bit target"}
STEPS = 7
DRAFT_VOCABULARY = 32000
RECIPE_TOKENS = 8192


def main() -> int:
    """Measure all sides and print their table. Returns 1 if a side failed."""
    options = parse()
    if options.line:
        side, *sizes = options.line.split()
        measure = run_recipe if side.startswith("recipe") else measure_rows
        measure(options, side, [int(size) for size in sizes])
        return 0
    points, left_out = [], []
    for side in options.sides.split(";"):
        command = processes.again("--line", side.strip(), "--out", str(options.out))
        found, reason = processes.run(command, limit=options.limit, show=lambda point: print(words(point), flush=True))
        points += found
        if reason:
            left_out.append(f"Without all rows: {side.strip()} ({reason}).")
            print(left_out[-1], flush=True)
    if not options.profile:
        publish(options, points, left_out)
    return 1 if left_out else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser)
    parser.add_argument("--sides", help=f"sides, each with its lengths or its card (default: {SIDES})")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a point; one more warms up")
    parser.add_argument("--card", type=float, default=80, metavar="GIB", help="memory of the sides without a recipe")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a side")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step, and write no page")
    parser.add_argument("--line", metavar="SIDE", help=argparse.SUPPRESS)
    options = pages.parse(parser)
    options.sides = options.sides or (SMALL_SIDES if options.small else SIDES)
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-draft-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def limit_memory(gib: float) -> None:
    """Limit this process to a card with so much memory."""
    import torch

    from ligertune.planning.memory.activation_bytes import CUDA_CONTEXT

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (gib * GIB - CUDA_CONTEXT) / total))


# ---- steps without a recipe


def measure_rows(options: argparse.Namespace, side: str, lengths: list[int]) -> None:
    """Print a point for each length, until memory runs out."""
    import torch

    from benchmarks.sides.plain_draft import plain_draft_loss
    from ligertune.features.draft.training.draft_task import DraftTask

    limit_memory(options.card)
    device = torch.device("cpu" if options.small else "cuda")
    model = build(options, side, device)
    flops = DraftTask(model).shape.flops
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    for length in lengths:
        point: dict[str, Any] = {"side": side, "length": length}
        try:
            batch, documents = batch_of(length, device, model)

            def step(batch: dict = batch) -> torch.Tensor:
                loss = plain_draft_loss(model, batch) if side == "plain" else model(**batch, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            if options.profile:
                step()
                processes.say(point | {"kernels": profiled(step)})
                continue
            point |= timed(step, options.steps)
            squares = sum(one**2 for one in documents)
            point |= of_floor(flops(tokens=length, squared_lengths=squares), point["seconds"])
        except torch.OutOfMemoryError:
            processes.say(point | {"oom": True})
            return
        processes.say(point)
        gc.collect()


def build(options: argparse.Namespace, side: str, device: torch.device) -> DraftModel:
    """Return the target with a new head on the device, with random weights: the same ones on each side."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ligertune.attention.torch_attention import prefer_flash
    from ligertune.features.draft.recipe import DraftSpec
    from ligertune.features.draft.training.draft_model import DraftModel
    from ligertune.features.draft.training.draft_run import new_head
    from ligertune.features.output_head import LogitTransform, backbone_of
    from ligertune.models.score_head import lm_head_of
    from ligertune.patching.packing_checks import install_packing_checks
    from ligertune.patching.patch import patch

    prefer_flash()
    config = AutoConfig.from_pretrained(inputs.TOKENIZER if options.small else options.corpus / "model_configs" / MODEL)
    dtype = torch.float32 if options.small else torch.bfloat16
    torch.manual_seed(0)
    with device:
        attention = "per_document" if options.small else "varlen"
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    vocabulary = min(DRAFT_VOCABULARY, config.vocab_size // 2)
    spec = DraftSpec(draft_vocab_size=vocabulary, steps=STEPS)
    weight = lm_head_of(base).weight
    with torch.no_grad():  # a random model's likeliest token differs by rounding: each row's is in the draft vocabulary
        weight[:vocabulary] *= 2
    head = new_head(spec, base, weight, seed=0).to(device, dtype)
    if side != "plain":
        patch(base, loss="torch")
    install_packing_checks(backbone_of(base))
    recompute = side == "ours_recomputed"
    return DraftModel(base, head, spec, transform=LogitTransform(), recompute=recompute).train()


def batch_of(length: int, device: torch.device, model: DraftModel) -> tuple[dict[str, Any], list[int]]:
    """Return one packed row, the same on all sides, and the lengths of its documents. 23 % of each are not trained."""
    import math

    import numpy as np
    import torch
    from ligertune_kernels import labelled_rows

    from ligertune.data.batching.collate import collate_packed
    from ligertune.data.examples import Example

    rng = np.random.default_rng(length)
    examples: list[Example] = []
    left = length
    while left:
        size = min(left, max(16, round(rng.lognormal(math.log(979), 0.7))))
        size = left if left - size < 16 else size
        input_ids = rng.integers(3, model.config.vocab_size, size=size)
        labels = input_ids.copy()
        labels[: max(1, round(0.23 * size))] = -100
        examples.append(Example(input_ids, labels, ""))
        left -= size
    batch = collate_packed(examples, pad_token_id=0)
    batch["labelled_rows"] = labelled_rows(batch["labels"], shift=1, multiple_of=128)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    if "document_places" in batch:
        on_device["document_places"] = tuple(place.to(device) for place in batch["document_places"])
    return on_device, [len(example.input_ids) for example in examples]


def timed(step: Any, steps: int) -> dict[str, Any]:
    """Return seconds per step (forward, backward, optimizer), peak memory and the first loss."""
    import torch

    first = float(step())
    synchronise()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"seconds": (time.perf_counter() - start) / steps, "peak": peak, "loss": first}


def of_floor(flops: float, seconds: float) -> dict[str, float]:
    """Return which share of the step the GPU needs for its products at its peak rate."""
    from ligertune.hardware import this_machine

    peak = this_machine().peak_flops
    return {"of_floor": flops / peak / seconds} if peak else {}


# ---- steps of the command


def run_recipe(options: argparse.Namespace, side: str, card: list[int]) -> None:
    """Train with the recipe on a card of so many GiB, and print its point."""
    from benchmarks.sides.our_run import our_run
    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    limit_memory(card[0])
    source = inputs.Inputs(options.corpus, options.out, options.small)
    tokens = 64 if options.small else RECIPE_TOKENS
    settings = {
        **inputs.model_settings(source, MODEL, layers=None),
        "task": "draft",
        "data.datasets": inputs.full_rows(source, tokens, options.steps + 4),
        "data.packing": True,
        "data.max_length": tokens,
        "data.on_overlength": "truncate",
        "draft.draft_vocab_size": 256 if options.small else DRAFT_VOCABULARY,
        "draft.steps": STEPS,
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": options.steps + 2,
        "report.warmup_steps": 2,
        "logging.logging_steps": 1,
        "checkpoint.output_dir": options.out / side,
        "checkpoint.save_strategy": "no",
        "checkpoint.overwrite": True,
    }
    if side == "recipe_4bit":
        settings["draft.load_in_4bit"] = True
    job = plan_for(load_recipe(inputs.write_recipe(options.out / f"{side}.json", settings)), memory_gib=card[0])
    report, loaded, _ = our_run(job)
    throughput = report.throughput
    processes.say(
        {
            "side": side,
            "length": tokens,
            "card": card[0],
            "tokens_per_second": throughput.tokens_per_second,
            "of_floor": throughput.mfu,
            "peak": max(loaded["peak"], report.peak_memory["allocated_run"]),
            "planned": job.plan.peak.total,
        }
    )


# ---- the page


def words(point: dict[str, Any]) -> str:
    place = f"{NAMES[point['side']]}, {point['length']:,} tokens"
    if point.get("oom"):
        return f"{place}: out of memory"
    if "kernels" in point:
        return f"{place}\n{point['kernels']}"
    known = [
        f"{name} {point[name]:.4g}" for name in ("seconds", "tokens_per_second", "loss", "of_floor") if point.get(name)
    ]
    return ", ".join([f"{place}: peak {point['peak'] / GIB:.2f} GiB", *known])


def publish(options: argparse.Namespace, points: list[dict[str, Any]], left_out: list[str]) -> None:
    """Publish the page. Lengths beyond a side's memory have no row."""
    plain = {point["length"]: point["seconds"] for point in points if point["side"] == "plain" and "seconds" in point}
    rows = []
    for point in points:
        if point.get("oom"):
            left_out.append(f"Out of memory: {NAMES[point['side']]}, {point['length']:,} tokens.")
            continue
        row = {**point, "side": NAMES[point["side"]], "card": point.get("card", options.card)}
        row["peak_gib"] = point["peak"] / GIB
        row["planned_gib"] = point["planned"] / GIB if "planned" in point else None
        if "seconds" in point:
            row["tokens_per_second"] = point["length"] / point["seconds"]
            row["times"] = plain[point["length"]] / point["seconds"] if point["length"] in plain else None
        rows.append(row)
    pages.publish(
        options,
        page="draft_heads" + "_small" * options.small,
        title="EAGLE-3 draft heads for Llama-3.1-8B" + " (with --small: a tiny model)" * options.small,
        intro="This page compares the training of a draft head with the kernels and in plain PyTorch.",
        caveats=[
            f"Random weights, bfloat16, one packed row a step, {STEPS} steps of training-time test, a draft vocabulary "
            f"of {DRAFT_VOCABULARY:,} tokens. The head trains with AdamW, and the target is frozen.",
            "The plain side materialises the scores of all pairs of rows and the logits of all rows. With flex "
            "attention or logits in chunks it would take less memory.",
            f"Each side ran once: {options.steps} measured steps after one of warm-up, two for `ligertune draft`.",
            "share of the floor: the time of all products at the GPU's peak rate, over the time of the step.",
        ],
        columns=[["side", "side", ""], ["card", "card, GiB", ".0f"], ["length", "row, tokens", ",d"],
                 ["tokens_per_second", "tokens/s", ",.0f"], ["times", "times plain PyTorch", ".2f"],
                 ["of_floor", "share of the floor", ".2f"], ["peak_gib", "peak GiB", ".1f"],
                 ["planned_gib", "predicted GiB", ".1f"], ["loss", "first loss", ".4f"]],
        rows=rows,
        left_out=left_out,
        chart={"kind": "lines", "x": ["length", "row, tokens"], "colour": "side", "values": {
            "tokens_per_second": "tokens/s (more is better)", "peak_gib": "peak memory, GiB (less is better)"}},
    )  # fmt: skip
