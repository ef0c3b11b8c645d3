"""Short runs of options of loss, data, positions and adapters: with and without kernels, padded and not, on two ranks.

`python -m support.option_runs kernels` compares on one device, `... ranks` on two; scripts/gpu_check runs them on GPUs.
"""

import argparse
import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from support.command_line import RECIPE, losses
from support.data.row_files import write_rows
from support.kept_ranks import kept_ranks
from support.quickstart_runs import plan_run, train

# Rows of unequal lengths, and as many in each step on one process as on two.
BASE = {
    "data.val_split": 0, "model.dtype": "float32", "train.learning_rate": 1e-3, "train.max_steps": 4,
    "checkpoint.save_model": False,
}  # fmt: skip
LORA = {"method.type": "lora", "method.lora_r": 8, "train.learning_rate": 5e-3}
QLORA = {**LORA, "method.type": "qlora"}
DORA = {"method.use_dora": True, "method.use_rslora": True}
OPTIONS: dict[str, dict[str, object]] = {
    "label smoothing": {"train.label_smoothing_factor": 0.1},
    "dft": {"train.loss_type": "dft"},
    "roles": {
        "data.prompt_template": "chat", "data.roles_to_train": "[user, assistant]", "data.train_on_eos": "last",
    },
    "yarn": {"model.rope_parameters.rope_type": "yarn", "model.rope_parameters.factor": 4},
    "llama3 positions": {"model.rope_parameters.rope_type": "llama3", "model.rope_parameters.factor": 8},
    "interleave": {"data.interleave.probabilities": "[0.75, 0.25]"},
    "token ids": {"data.datasets.0.path": "token_ids.jsonl"},
    "some layers": {**LORA, "method.layers_to_transform": "[1]", "method.layers_pattern": "[layers]"},
    "dropout": {**LORA, "method.lora_dropout": 0.1},
    "dora": {**LORA, **DORA},
    "pissa": {**LORA, "method.init_lora_weights": "pissa", "method.use_rslora": True},
    "qlora": QLORA,
    "qlora, dropout": {**QLORA, "method.lora_dropout": 0.1},
    "qlora, dora": {**QLORA, **DORA},
    "qlora, rslora": {**QLORA, "method.use_rslora": True},
    "qlora, pissa": {**QLORA, "method.init_lora_weights": "pissa", "method.use_rslora": True},
    "loftq": {**QLORA, "method.init_lora_weights": "loftq"},
}  # fmt: skip
STRATEGIES = ("ddp", "fsdp")
# Relative differences of losses in float32: of kernels from PyTorch, and of ranks, which only add up in another order.
KERNELS, RANKS = 1e-4, 1e-5
# Other elements are dropped: by another generator, in rows of another form, on another rank.
DROPPED = 3e-2
WITHOUT = {"kernels.enabled": False, "kernels.lora": False, "kernels.recompute": False}
PADDED = {"data.padding_free": False}
# auto takes flex_attention in float32, which torch compiles for a minute
PADDING_FREE = {"data.padding_free": True, "kernels.attention": True}


@functools.cache
def inputs(folder: Path) -> dict[str, object]:
    """Write a Llama of two layers with heads of 64 columns, and rows; return the settings of all runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = folder / "model"
    shutil.copytree(RECIPE.parent / "stories260K", model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = json.loads((RECIPE.parent / "stories260K" / "config.json").read_text("utf-8"))
    special = {key: tokens[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **special)).save_pretrained(model)
    found = {**BASE, "model.model_name_or_path": model}
    examples = plan_run(folder / "rows", **found).data.train
    rows = [{"input_ids": one.input_ids.tolist(), "labels": one.labels.tolist()} for one in examples]
    write_rows(folder / "token_ids.jsonl", rows)
    short = [{"instruction": f"Say {n}.", "input": "", "output": f"{n} " * (n + 1)} for n in range(10)]
    write_rows(folder / "short.jsonl", short)
    return found


def settings_of(option: str, folder: Path) -> dict[str, object]:
    """Return the settings of an option. folder: of the model and the rows."""
    settings = {**inputs(folder), **OPTIONS[option]}
    if option == "token ids":
        settings["data.datasets.0.path"] = folder / "token_ids.jsonl"
    if option == "interleave":
        paths = (RECIPE.parent / "dolly_short.jsonl", folder / "short.jsonl")
        settings["data.datasets"] = json.dumps([{"path": str(path)} for path in paths])
    if "method.type" in settings:
        settings["kernels.lora"] = True
    return settings


def kernels_differ(option: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the largest relative differences of losses from those without kernels in padded batches, and the allowed.

    The losses are of one process: with kernels in padded batches, and in padding-free ones.
    """
    settings = settings_of(option, folder)
    ways = {"without kernels": {**WITHOUT, **PADDED}, "padded": PADDED, "padding-free": PADDING_FREE}
    found = {}
    for way, changes in ways.items():
        run = folder / f"{option}, {way}"
        train(run, **settings | changes)
        found[way] = losses(run / "run")
    expected = found.pop("without kernels")
    allowed = DROPPED if "method.lora_dropout" in settings else KERNELS
    return {way: (largest_difference(values, expected), allowed) for way, values in found.items()}


def ranks_differ(
    option: str, strategy: str, folder: Path, train_two: Callable[[Path, dict[str, object]], object] | None = None
) -> tuple[float, float]:
    """Return the largest relative difference of two ranks' losses from those of one process, and the allowed one.

    train_two: trains on two ranks, given a folder and changes; by default on ranks that this process keeps.
    """
    settings = {**settings_of(option, folder), **PADDING_FREE}
    one = folder / f"{option}, one process"
    if not one.exists():
        train(one, **settings)
    sharded = {"method.bnb_4bit_quant_storage": "bfloat16"} if settings.get("method.type") == "qlora" else {}
    changes = {**settings, "parallel.strategy": strategy, "train.gradient_accumulation_steps": 1}
    two = folder / f"{option}, {strategy}"
    (train_two or kept_ranks(2).train)(two, {**changes, **(sharded if strategy == "fsdp" else {})})
    report = json.loads((two / "run" / "report.json").read_text("utf-8"))
    assert (report["strategy"], report["world_size"]) == (strategy, 2)
    allowed = DROPPED if "method.lora_dropout" in settings else RANKS
    return largest_difference(losses(two / "run"), losses(one / "run")), allowed


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses; infinity for lists of unequal lengths."""
    if len(found) != len(expected) or not found:
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def compared(part: str, option: str, folder: Path) -> Iterator[tuple[str, float, float]]:
    """Yield (what is compared, difference, allowed difference) of an option."""
    if part == "ranks":
        for strategy in STRATEGIES:
            yield f"{option}, two ranks, {strategy}", *ranks_differ(option, strategy, folder)
        return
    for way, values in kernels_differ(option, folder).items():
        yield f"{option}, {way}", *values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("kernels", "ranks"))
    parser.add_argument("--share", default="0/1", help="i/n: only every n-th option, from the i-th one on")
    parser.add_argument("--match", default="", help="only options whose name contains this")
    options = parser.parse_args()
    first, count = map(int, options.share.split("/"))
    names = [name for name in OPTIONS if options.match in name][first::count]
    good = True
    if options.part == "ranks":
        if torch.cuda.device_count() == 1:
            print("FAILED two ranks need two GPUs, and there is one")
            return 1
        kept_ranks(2).start()  # while this process imports and trains
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.perf_counter()
            try:
                rows = list(compared(options.part, name, Path(folder)))
            except (Exception, SystemExit) as error:
                good = False
                print(f"FAILED {name}: {type(error).__name__}: {str(error).strip()[-2000:]}", flush=True)
                continue
            for what, difference, allowed in rows:
                is_close = difference <= allowed
                good &= is_close
                verdict = "ok" if is_close else "FAILED"
                print(f"{verdict:6s} {what}: largest relative difference {difference:.1e} (allowed {allowed:.0e})")
            print(f"       {name}: {time.perf_counter() - began:.1f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
