"""Train gpt-oss-20b's shape with LoRA on its MXFP4 weights, and merge back: scripts/bench mxfp4.

Three processes, one after the other. Random weights are quantised to MXFP4 and written as a checkpoint.

    kernels   the dequantised weights of one layer against transformers' function; time of the kernels against a copy
    train     LoRA r16 on attention and experts, one row of 2,048 tokens a step: losses, tokens/s, peak memory
    merge     `export --format mxfp4`; KL(16-bit merge || that). For comparison, what the base has lost when it was
              quantised: KL(16-bit weights || base), without the adapter and with it
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.sides.stored_base import RANK, STEPS, WARMUP, adapter_recipe, train_adapter, write_checkpoint
from benchmarks.tables.moe_models import write_config

MODEL = "gpt-oss-20b"
PHASES = ("kernels", "train", "merge")
LIMIT_GIB = 24  # of memory that torch allocates while it loads and trains
COMPARED_TOKENS = 512
LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
STD = 0.02


def main() -> int:
    """Run all phases and print their table. Returns 1 if one failed, took more than 24 GiB or diverged."""
    options = parse()
    if options.line:
        phases = {"kernels": measure_kernels, "train": train, "merge": merge}
        processes.say({"phase": options.line, **phases[options.line](options)})
        return 0
    points, left_out = [], []
    for phase in PHASES:
        command = processes.again("--out", str(options.out), "--line", phase)
        started = time.perf_counter()
        found, reason = processes.run(command, limit=options.limit, show=lambda one: print(json.dumps(one), flush=True))
        points += [{**one, "seconds": time.perf_counter() - started} for one in found]
        if reason:
            left_out.append(f"Without a row: {phase} ({reason}).")
            break
    if not options.keep:
        shutil.rmtree(options.out / "base", ignore_errors=True)
        shutil.rmtree(options.out / "merged", ignore_errors=True)
    publish(options, points, left_out)
    wrong = [point["wrong"] for point in points if point.get("wrong")]
    print("\n".join(wrong))
    return 1 if left_out or wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a phase")
    parser.add_argument("--out", type=Path, help="folder of the checkpoints: 28 GB")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--line", metavar="PHASE", choices=PHASES, help=argparse.SUPPRESS)
    options = pages.parse(parser)
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-mxfp4-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def publish(options: argparse.Namespace, points: list[dict], left_out: list[str]) -> None:
    rows = [
        {**point, **{f"{key}_gib": point[key] / GIB for key in ("peak", "planned") if point.get(key)}}
        for point in points
    ]
    pages.publish(
        options,
        page="mxfp4" + "_small" * options.small,
        title="gpt-oss-20b's shape with LoRA on its MXFP4 weights" + " (with --small: a tiny model)" * options.small,
        intro="This page measures LoRA on a base in MXFP4, and the adapter merged back into MXFP4.",
        caveats=[
            f"Published sizes, random weights that were rounded to MXFP4. LoRA r{RANK} on attention and experts, one "
            f"row of {tokens_of(options):,} tokens a step, activation checkpointing, adamw_torch_fused; {STEPS} steps, "
            f"the first {WARMUP} not counted. The peak is that of the process, with loading.",
            f"KL per token, over {COMPARED_TOKENS} random tokens: of the 16-bit merge to the merge in MXFP4, and of "
            "the 16-bit weights to the base in MXFP4, without the adapter and with it.",
        ],
        columns=[["phase", "phase", ""], ["tokens_per_second", "tokens/s", ",.0f"], ["peak_gib", "peak GiB", ".2f"],
                 ["planned_gib", "predicted GiB", ".2f"], ["mxfp4_of_copy", "MXFP4, share of copy bandwidth", ".2f"],
                 ["float8_of_copy", "float8 blocks, share of copy bandwidth", ".2f"],
                 ["kl_merge", "KL of the merge", ".2e"], ["kl_base", "KL of the base", ".2e"],
                 ["kl_base_adapted", "KL of the base with the adapter", ".2e"],
                 ["seconds", "seconds", ".0f"]],
        rows=rows,
        left_out=left_out,
    )  # fmt: skip


def tokens_of(options: argparse.Namespace) -> int:
    return 64 if options.small else 2048


# ---- the checkpoint


def device_of(options: argparse.Namespace):
    import torch

    return torch.device("cpu" if options.small else "cuda")


def experts_of(layer: int, name: str, config, device):
    """Return the random 16-bit weight (X, rows, columns) of one layer, as the checkpoint stores it: the same each time.

    name: gate_up_proj or down_proj.
    """
    import torch

    rows = 2 * config.intermediate_size if name == "gate_up_proj" else config.hidden_size
    columns = config.hidden_size if name == "gate_up_proj" else config.intermediate_size
    generator = torch.Generator(device).manual_seed(2 * layer + (name == "down_proj"))
    shape = (config.num_local_experts, rows, columns)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return weight.normal_(std=STD, generator=generator)


def write_base(options: argparse.Namespace) -> Path:
    """Write the checkpoint, one file for each layer, and return its folder."""
    import torch
    from ligertune_kernels import quantize_mxfp4
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_config(MODEL, options.out / "base", small=options.small)
    config = AutoConfig.from_pretrained(folder)
    device = device_of(options)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(1000)
    files: dict[str, dict] = {}
    for name, parameter in skeleton.named_parameters():
        file = f"layer-{name.split('.')[2]}" if ".layers." in name else "rest"
        tensors = files.setdefault(file, {})
        if parameter.ndim == 3:
            weight = experts_of(int(name.split(".")[2]), name.rpartition(".")[2], config, device)
            stored = quantize_mxfp4(weight)
            tensors[f"{name}_blocks"] = stored.blocks.cpu()
            tensors[f"{name}_scales"] = stored.scales.cpu()
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
        else:
            value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            tensors[name] = value.normal_(std=STD, generator=generator).cpu()
    write_checkpoint(folder, files, {"quant_method": "mxfp4", "modules_to_not_convert": LEFT})
    return folder


# ---- phases


def measure_kernels(options: argparse.Namespace) -> dict:
    """Write the checkpoint, compare one layer's weights with transformers', and time both dequantisations."""
    import torch
    from ligertune_kernels import quantize_float8_blocks, quantize_mxfp4
    from transformers import AutoConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    started = time.perf_counter()
    folder = write_base(options)
    written = time.perf_counter() - started
    config = AutoConfig.from_pretrained(folder)
    weight = experts_of(0, "gate_up_proj", config, device_of(options))
    mxfp4 = quantize_mxfp4(weight)
    found = mxfp4.dequantize(mxfp4.shape, torch.bfloat16)
    is_equal = torch.equal(found, convert_moe_packed_tensors(*mxfp4.tensors).transpose(1, 2))
    float8 = quantize_float8_blocks(weight)
    seconds = {
        "mxfp4": (timed(lambda: mxfp4.write(found)), found.nbytes + sum(part.nbytes for part in mxfp4.tensors)),
        "float8": (timed(lambda: float8.write(found)), found.nbytes + sum(part.nbytes for part in float8.tensors)),
        "copy": (timed(lambda: found.copy_(weight)), 2 * found.nbytes),
    }
    rates = {name: size / taken / 1e9 for name, (taken, size) in seconds.items()}
    return {
        "equals_transformers": is_equal,
        "write_seconds": written,
        **{f"{name}_gb_per_second": rate for name, rate in rates.items()},
        "mxfp4_of_copy": rates["mxfp4"] / rates["copy"],
        "float8_of_copy": rates["float8"] / rates["copy"],
        "wrong": "" if is_equal else "The dequantised weights are not those of transformers.",
    }


def timed(call) -> float:
    """Return the seconds of a call: the median of ten, after two that are not counted."""
    import torch

    taken = []
    for _ in range(12):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return sorted(taken[2:])[5]


def train(options: argparse.Namespace) -> dict:
    """Train the adapter."""
    source = inputs.Inputs(options.out, options.out, options.small)
    found = train_adapter(adapter_recipe(source, "base", tokens_of(options)))
    wrong = ""
    if not options.small and found["peak"] > LIMIT_GIB * GIB:
        wrong = f"The peak is above {LIMIT_GIB} GiB."
    elif not options.small and found["losses"][-1] >= found["losses"][0]:  # rows of --small are too short to show it
        wrong = "The loss does not fall."
    return {**found, "wrong": wrong}


def merge(options: argparse.Namespace) -> dict:
    """Export the adapter in MXFP4, and compare the models' probabilities."""
    import torch

    from ligertune.training.checkpoint.export_format import plan_format_export

    started = time.perf_counter()
    run = str(options.out / "run-base")
    note = plan_format_export(run, options.out / "merged", wanted="mxfp4", checkpoint=None).write()
    exported = time.perf_counter() - started
    requantised = log_probs(held_model(options, "merged"), options)
    base, merged_base = with_and_without_adapter(options, original=False)
    original, merged_original = with_and_without_adapter(options, original=True)
    kl_merge = divergence(merged_base, requantised)
    kl_bound = divergence(merged_original, merged_base)
    exceeds = not options.small and kl_merge > 1.5 * kl_bound  # an adapter is a large change of a tiny model
    return {
        "note": note,
        "export_seconds": exported,
        "kl_merge": kl_merge,
        "kl_base": divergence(original, base),
        "kl_base_adapted": kl_bound,
        "kl_adapter": divergence(base, merged_base),
        "wrong": "The merge loses more than 1.5 times what the base has lost." if exceeds else "",
        "merge_peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def with_and_without_adapter(options: argparse.Namespace, *, original: bool):
    """Return the log-probabilities of the base in 16 bits, and with the adapter merged into it.

    original: its experts have the weights from which the base was quantised.
    """
    from ligertune.models.adapters.lora import load_adapter, merged_model
    from ligertune.models.block_scaled.load_stored import dequantise_held
    from ligertune.models.save import SAVED_MODEL

    model = held_model(options, "base")
    dequantise_held(model)
    if original:
        for layer, block in enumerate(model.model.layers):
            for name in ("gate_up_proj", "down_proj"):
                weight = experts_of(layer, name, model.config, device_of(options))
                getattr(block.mlp.experts, name).data.copy_(weight.transpose(1, 2))
    before = log_probs(model, options)
    merged = merged_model(load_adapter(model, str(options.out / "run-base" / "model"), SAVED_MODEL))
    after = log_probs(merged, options)
    del model, merged
    gc.collect()  # modules refer to each other
    return before, after


def held_model(options: argparse.Namespace, folder: str):
    """Return the model of a folder with its weights as they are stored."""
    import torch

    from ligertune.models.load import build_model
    from ligertune.models.read_config import read_config
    from ligertune.planning.options import ModelOptions

    spec = ModelOptions(model_name_or_path=str(options.out / folder))
    dtype = torch.float32 if options.small else torch.bfloat16
    return build_model(
        spec, read_config(spec), dtype=dtype, device=device_of(options), seed=0, stored_as="as in the files"
    ).requires_grad_(False)


def log_probs(model, options: argparse.Namespace):
    """Return the log-probabilities (T, V) of a model after each of some random tokens, in host memory."""
    import torch

    tokens = 40 if options.small else COMPARED_TOKENS
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(ids.to(device_of(options)), use_cache=False).logits[0].float().log_softmax(-1).cpu()


def divergence(of, other) -> float:
    """Return KL(of || other) per token."""
    return float((of.exp() * (of - other)).sum(-1).mean())
