"""Benchmark the training of Medusa heads with the kernels and in plain PyTorch: tokens/s and memory per context.

    scripts/bench medusa [--contexts 1024,2048,...] [--heads 5,3] [--stages 1,2] [--sides ours,plain] [--steps 4]
                         [--page docs/benchmarks]          everything: six minutes on one H100
    scripts/bench medusa --quick             stage 1 and 2 with 5 heads: under five minutes on one H100

Llama-3-8B's shape, random weights, bfloat16, AdamW, a shared output head. One row of `context` tokens holds documents
with the lengths of ShareGPT conversations (log-normal, median 979, mean 1,250 tokens), of which 77 % are trained; both
sides use the same attention for packed documents. Stage 2 trains the whole model with gradient checkpointing. The plain
side is the same model without kernels; its loss materialises the logits of every head. The first losses of both sides
are compared at the smallest context. Each side, stage and number of heads runs in a new process at growing contexts
until memory runs out. Each stage has its page.

--small runs a tiny model on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import gc
import math
import time

from benchmarks import pages, processes
from benchmarks.pages import GIB

SIDES = {"ours": "ligertune", "plain": "plain PyTorch"}
LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
TINY = {
    **LLAMA_3_8B, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def main() -> int:
    options = parse()
    if options.line:
        return line(options, *options.line)
    heads = [5] if options.quick else numbers(options.heads)
    points = []
    for stage in numbers(options.stages):
        for n_heads in heads:
            for side in options.sides.split(","):
                points += in_fresh_process(options, side, stage, n_heads)
    for stage in numbers(options.stages):
        page(options, stage, [point for point in points if point["stage"] == stage and not point.get("failed")])
    return 0 if points and all(point.get("failed") is None for point in points) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,2048,4096,8192,16384,32768,65536,131072")
    parser.add_argument("--heads", default="5,3")
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a point; one more warms up")
    parser.add_argument("--layers", type=int, help="cut the model to this depth")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of a side's process")
    parser.add_argument("--quick", action="store_true", help="5 heads only")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--line", nargs=3, metavar=("SIDE", "STAGE", "HEADS"), help=argparse.SUPPRESS)
    return pages.parse(parser)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def in_fresh_process(options: argparse.Namespace, side: str, stage: int, n_heads: int) -> list[dict]:
    """Run one side, stage and number of heads in a new process; return its points."""
    command = processes.again("--line", side, str(stage), str(n_heads))
    points, reason = processes.run(command, limit=options.limit, show=lambda point: print(words(point), flush=True))
    if reason:
        points.append({"side": side, "stage": stage, "heads": n_heads, "context": 0, "failed": reason})
        print(words(points[-1]), flush=True)
    return points


def line(options: argparse.Namespace, side: str, stage: str, n_heads: str) -> int:
    """Measure growing contexts in this process until memory runs out."""
    import torch

    device = torch.device("cpu" if options.small else "cuda")
    model = build(side, int(stage), int(n_heads), device, small=options.small, layers=options.layers)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    full = False
    for context in numbers(options.contexts):
        point = {"side": side, "stage": int(stage), "heads": int(n_heads), "context": context}
        if not full:
            try:
                point |= measure(model, optimizer, batch_of(context, device, model), options.steps, device)
            except torch.OutOfMemoryError:
                full = True
        if full:
            point["oom"] = True
            optimizer.zero_grad()
            gc.collect()
        processes.say(point)
    return 0


def build(side: str, stage: int, n_heads: int, device, *, small: bool, layers: int | None):
    """Return the model with its heads on the device, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ligertune.activations.checkpointing import checkpoint_layers
    from ligertune.attention.torch_attention import prefer_flash
    from ligertune.features.medusa.medusa_model import attach_heads
    from ligertune.features.medusa.recipe import MedusaSpec
    from ligertune.features.output_head import backbone_of
    from ligertune.patching.packing_checks import install_packing_checks
    from ligertune.patching.patch import patch

    prefer_flash()
    shape = dict(TINY if small else LLAMA_3_8B)
    if layers:
        shape["num_hidden_layers"] = layers
    attention = "per_document" if small else "varlen"
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    with device:
        config = LlamaConfig(**shape, use_cache=False)
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if side == "ours":
        patch(base, loss="torch")
    install_packing_checks(backbone_of(base))
    if stage == 2:
        checkpoint_layers(base)
    return attach_heads(base, MedusaSpec(num_heads=n_heads, stage=stage), fused=side == "ours").train()


def batch_of(context: int, device, model) -> dict:
    """Return one row of documents, the same for both sides. The first 23 % of each are not trained."""
    import numpy as np
    import torch
    from ligertune_kernels import labelled_rows

    from ligertune.data.batching.collate import collate_packed
    from ligertune.data.examples import Example

    rng, examples, left = np.random.default_rng(context), [], context
    while left:
        length = min(left, max(16, round(rng.lognormal(math.log(979), 0.7))))
        length = left if left - length < 16 else length
        input_ids = rng.integers(10, model.config.vocab_size, size=length)
        labels = input_ids.copy()
        labels[: max(1, round(0.23 * length))] = -100
        examples.append(Example(input_ids, labels, ""))
        left -= length
    batch = collate_packed(examples, pad_token_id=0)
    batch["labelled_rows"] = labelled_rows(batch["labels"], shift=model.shifts, multiple_of=128)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def measure(model, optimizer, batch: dict, steps: int, device) -> dict:
    """Return seconds per step (forward, backward, optimizer), peak memory and the first loss."""
    import torch

    def step() -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = float(step())
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start, held = time.perf_counter(), torch.cuda.memory_allocated() if on_gpu else 0
    for _ in range(steps):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    tokens = batch["input_ids"].numel()
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak": peak, "held": held, "loss": first}


def words(point: dict) -> str:
    place = f"stage {point['stage']}, {point['heads']} heads, {point['context']:>6} tokens, {point['side']:<5}"
    if point.get("failed"):
        return f"{place}: failed: {point['failed']}"
    if point.get("oom"):
        return f"{place}: out of memory"
    return (
        f"{place}: {point['tokens_per_second']:>9,.0f} tokens/s, peak {point['peak'] / GIB:6.2f} GiB, "
        f"above {(point['peak'] - point['held']) / GIB:6.2f} GiB, loss {point['loss']:.4f}"
    )


def page(options: argparse.Namespace, stage: int, points: list[dict]) -> None:
    """Publish the page of a stage. Contexts beyond a side's memory have no row."""
    rates = {
        (p["heads"], p["context"]): p["tokens_per_second"] for p in points if p["side"] == "plain" and "seconds" in p
    }
    rows = []
    for point in sorted(points, key=lambda p: (-p["heads"], p["context"])):
        if "seconds" in point:
            plain = rates.get((point["heads"], point["context"]))
            row = {**point, "side": SIDES[point["side"]], "peak_gib": point["peak"] / GIB}
            row["above_gib"] = (point["peak"] - point["held"]) / GIB
            row["times"] = point["tokens_per_second"] / plain if plain else None
            rows.append(row)
    full = {}
    for point in points:
        if point.get("oom"):
            full.setdefault((SIDES[point["side"]], point["heads"]), point["context"])
    what = "the heads train" if stage == 1 else "the whole model trains, with gradient checkpointing"
    pages.publish(
        options,
        page=f"medusa_stage{stage}" + "_small" * options.small,
        title=f"Medusa heads on Llama-3-8B's shape, stage {stage}" + " (with --small: a tiny model)" * options.small,
        intro=f"This page compares the training of Medusa heads with the kernels and in plain PyTorch; {what}.",
        caveats=[
            "The plain side materialises the logits of every head. An implementation that computes the loss in chunks "
            "would take less memory.",
            "Weights are random, and all heads share one output head. One row of documents a step, with the lengths of "
            "ShareGPT conversations. Both sides use the same attention for packed documents.",
            f"Each side ran once: {options.steps} measured steps after one of warm-up. At short contexts the host's "
            "time is the limit, and gains vary from run to run.",
        ],
        columns=[["heads", "heads", ""], ["context", "context, tokens", ",d"], ["side", "side", ""],
                 ["tokens_per_second", "tokens/s", ",.0f"], ["times", "times plain PyTorch", ".2f"],
                 ["peak_gib", "peak GiB", ".1f"], ["above_gib", "GiB above weights and optimizer states", ".1f"]],
        rows=rows,
        left_out=[f"Out of memory: {side} with {heads} heads, from {context:,} tokens on."
                  for (side, heads), context in full.items()],
        chart={"kind": "lines", "x": ["context", "context, tokens"], "colour": "side", "style": "heads", "values": {
            "tokens_per_second": "tokens/s (more is better)", "peak_gib": "peak memory, GiB (less is better)"}},
    )  # fmt: skip
