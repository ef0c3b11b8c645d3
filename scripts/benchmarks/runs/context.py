"""Measure the longest context of Llama-3.1-8B on one GPU, and compare the peak with `ligertune plan --fit context`.

    scripts/bench context --corpus FOLDER [--only qlora-24,qlora-80] [--budget 560] [--page docs/benchmarks]
    scripts/bench context --corpus FOLDER --layers 2 --row-seconds 8        a search in two minutes
    scripts/bench context --corpus FOLDER --plan                            predictions only, without training
    scripts/bench context --from FILE --page docs/benchmarks                  one page of all runs printed in FILE

Each row is one step (--steps) on one document of as many tokens as the plan says fit; of full fine-tuning it is two,
because AdamW's states of the embedding exist only after the peak of the first. A row runs in a new process whose memory
is limited to that of a smaller card: CUDA's context and torch's memory together. Cards are taken with the memory that
torch sees on the one of that size that has the least (with ECC): 22.0 GiB of 24 GB, 39.4 of 40, 44.4 of 48, 79.1 of 80.
A row has fewer tokens where the host has too little memory for the offloaded inputs (--host-share of what is free), or
where a step would take longer than --row-seconds, by an estimate; the table says which. A row that --budget leaves no
time for is left out, and named.

--layers N cuts the model to N layers, and the limit by the weights and states that are missing: the peak apart from
these does not depend on the number of layers, because the inputs of all other layers are in host memory. This way a
row of the full length is trained in a fraction of the time; the table's host memory is that of all 32 layers.

FOLDER holds model_configs/Llama-3.1-8B (weights are random; max_position_embeddings is set to 8,388,608), the tokenizer
tokenizers/mistral-7b-v0.1, and alpaca, sharegpt and messages, whose texts are concatenated to one document. qlora needs
bitsandbytes. --small trains a tiny model on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB
from benchmarks.tables.context import CARDS, METHODS, RANK, ROWS, Row

CONTEXT = 1 << 23
GRAIN = 1024  # tokens
# FLOP/s of an H100 for the estimate of a step's seconds: attention, and products of tiles with 4-bit weights
ATTENTION_FLOPS, PRODUCT_FLOPS = 400e12, 450e12
INTRO = (
    "This page lists how many tokens of one document a step of Llama-3.1-8B trains on, in the memory of cards of "
    "several sizes, and what `ligertune plan --fit context` predicts."
)
CAVEATS = [
    f"Published sizes, random weights. LoRA r{RANK} on every linear layer; full: all weights, `adamw_8bit` and "
    "`optim_in_backward`. One row of one document of real text. Optimizer steps: two of full fine-tuning, one of "
    "others, unless the command has `--steps`.",
    "layers: of the trained model. With fewer than 32, the limit is less by the missing weights and states; the rest "
    "of the peak is that of 32 layers, whose inputs are in host memory.",
    "`gradient_checkpointing: offload` and `tiled_mlp: true`, with `expandable_segments` of torch's allocator.",
    "One GPU ran all rows. Its memory was limited to what torch sees on the card of that size that has the least "
    "(22.0, 39.4, 44.4 and 79.1 GiB), minus 0.59 GiB for CUDA's context.",
    "longest: tokens that fit by the plan, with 4 % left for fragmentation. trained: tokens of the step that was "
    "measured, which are fewer where `bound` names the host's memory or the time of a step.",
    "unsloth: its published table for QLoRA r32 at batch 1, not measured here.",
    "predicted: of the step that ran. It leaves AdamW's states out for LoRA and QLoRA, because the first step "
    "allocates them after its peak. Later steps have them, and `longest` counts them.",
    "host GiB: pinned memory for the inputs of all layers.",
]
CHART = {
    "kind": "dots",
    "values": {
        "tokens": "ligertune, trained",
        "fits": "ligertune, longest by the plan",
        "published": "unsloth, published",
    },
    "labels": ["label"],
    "axis": "tokens of one document (-24 to -80: GB of the card)",
}
COLUMNS = [
    ["row", "method, card", ""],
    ["limit", "limit GiB", ".1f"],
    ["published", "unsloth", ",d"],
    ["tokens", "trained", ",d"],
    ["layers", "layers", ""],
    ["times", "times unsloth", ".2f"],
    ["bound", "bound", ""],
    ["fits", "longest", ",d"],
    ["predicted_gib", "predicted GiB", ".2f"],
    ["measured_gib", "measured GiB", ".2f"],
    ["error", "error", "+.1%"],
    ["later_gib", "later steps, predicted GiB", ".2f"],
    ["reserved_gib", "reserved GiB", ".2f"],
    ["host_gib", "host GiB", ".1f"],
    ["seconds", "seconds", ".0f"],
    ["failed", "ended", ""],
]


def main() -> int:
    options = parse()
    if options.line:
        from ligertune.errors import UserError

        try:
            return one(options, next(row for row in ROWS if row.name == options.line))
        except UserError as error:
            print(f"Error: {error}")
            return 2
    points, left_out, failed, started = [], [], 0, time.perf_counter()
    for row in ROWS:
        if options.only and row.name not in options.only.split(",") and row.method not in options.only.split(","):
            continue
        left = options.budget - (time.perf_counter() - started)
        if left < options.startup:
            left_out.append(f"Without a row: {row.name} (the time of --budget was spent).")
            continue
        command = processes.again("--line", row.name, "--out", str(options.out),
                   "--row-seconds", str(min(options.row_seconds, left - options.startup)))  # fmt: skip
        found, reason = processes.run(command, limit=left, show=lambda point: print(words(point), flush=True))
        points += found
        if reason:
            print(f"{row.name}: {reason}", flush=True)
            left_out.append(f"Without a row: {row.name} ({reason}).")
            failed += reason.startswith("failed")
    publish(options, points, left_out)
    return 1 if failed or not points else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser, small="a tiny model on a CPU")
    parser.add_argument("--only", help=f"comma-separated rows or methods: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--layers", type=int, help="cut the model to this many layers")
    parser.add_argument("--tokens", type=int, help="tokens of every row, instead of what the plan says")
    parser.add_argument("--steps", type=int, help="of a row; by default 2 of full fine-tuning, 1 of others")
    parser.add_argument("--budget", type=float, default=560, metavar="SECONDS", help="of all rows")
    parser.add_argument("--row-seconds", type=float, default=420, metavar="SECONDS", help="of a row's steps, estimated")
    parser.add_argument("--startup", type=float, default=60, metavar="SECONDS", help="of a row before its first step")
    parser.add_argument(
        "--host-share", type=float, default=0.85, help="share of the free host memory that rows may pin"
    )
    parser.add_argument("--plan", action="store_true", help="print the predictions, and train nothing")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    options = pages.parse(parser, join_runs)
    options.corpus = options.corpus.resolve()
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-context-"))).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.small:
        options.tokens = options.tokens or 500
    return options


# ---- one row, in its own process


def one(options: argparse.Namespace, row: Row) -> int:
    """Choose the row's tokens, train, and print its point."""
    # torch reads it when it first allocates: without it the row's large tensors leave gaps that no other one fits into
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from ligertune.hardware import available_memory
    from ligertune.planning.memory.activation_bytes import CUDA_CONTEXT, TILE
    from ligertune.planning.memory.fit import longest_contexts
    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    options.steps = options.steps or (2 if row.method == "full" else 1)
    card, text = CARDS[row.card], write_text(options, 4096)
    whole = plan_for(load_recipe(recipe_of(options, row, text)), for_show=True, memory_gib=card).plan
    longest = longest_contexts(whole)[-1]
    point = {"row": row.name, "method": row.method, "limit": card, "published": row.published, "fits": longest.tokens}
    if not longest.tokens:
        processes.say(point)
        return 0
    tokens, bound = chosen_tokens(options, whole, longest.tokens, available_memory())
    memory = whole.memory.checkpointed("offload").tiled(TILE)
    planned = memory.peak(1, tokens, accumulates=False, memory=whole.machine.memory_bytes)
    layers = options.layers or memory.layers
    point |= {"tokens": tokens, "bound": bound, "predicted": planned.total, "at": planned.phase.name, "layers": layers,
              "host": memory.host_bytes(1, tokens)}  # fmt: skip
    point["steps"], point["estimate"] = options.steps, options.steps * seconds_of(whole, tokens, layers)
    if not options.plan:
        tile = 64 if options.small else True
        cut = {"data.max_length": tokens, "train.tiled_mlp": tile, "model.num_hidden_layers": layers}
        job = plan_for(load_recipe(recipe_of(options, row, write_text(options, tokens), **cut)))
        limit = round(card * GIB) - CUDA_CONTEXT - (whole.bytes.total - job.plan.bytes.total)
        peak = job.plan.peak
        point |= {"limit_bytes": limit, "predicted": peak.total, "at": peak.phase.name, "parts": peak.parts()}
        point |= train(job, limit)
    processes.say(point)
    return 0


def chosen_tokens(options: argparse.Namespace, plan, fitting: int, free: int | None) -> tuple[int, str]:
    """Return the tokens of a row and what bounds them: memory of the card, of the host, or the time of a step."""
    if options.tokens:
        return options.tokens, "--tokens"
    layers = options.layers or plan.memory.layers
    stored = max(1, layers - 1) * plan.memory.layer.hidden * plan.memory.itemsize
    of_host = CONTEXT if free is None or options.plan else int(options.host_share * free / stored)
    of_time = fitting
    while of_time > GRAIN and options.steps * seconds_of(plan, of_time, layers) > options.row_seconds:
        of_time -= GRAIN
    tokens, bound = min((fitting, "memory"), (of_host, "host memory"), (CONTEXT if options.plan else of_time, "time"))
    return max(1, tokens // GRAIN) * GRAIN, bound


def seconds_of(plan, tokens: int, layers: int) -> float:
    """Return about how long a step takes: attention twice forward and once backward, and four passes of products."""
    layer = plan.memory.layer
    attention = 4.5 * 2 * layer.query * tokens**2
    weights = layer.hidden * (2 * layer.query + 2 * layer.key + 3 * layer.mlp)
    return layers * (attention / ATTENTION_FLOPS + 8 * weights * tokens / PRODUCT_FLOPS)


def train(job, limit: int) -> dict:
    """Train with at most `limit` bytes of torch's memory; return the peaks, or that it ran out."""
    import torch

    from ligertune.run import run

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))
    lines, started = [], time.perf_counter()
    try:
        report = run(job, lines.append)
    except Exception as error:
        if not processes.is_out_of_memory(error):
            raise
        reached = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"failed": "out of memory", "measured": reached[0], "reserved": reached[1]}
    peak, losses = report.peak_memory, [line["loss"] for line in lines if "loss" in line]
    return {
        "measured": peak["allocated_run"],
        "reserved": peak.get("reserved_run", 0),
        "losses": losses,
        "seconds": time.perf_counter() - started,
        "tokens_per_second": report.throughput.tokens_per_second,
    }


# ---- data and recipe


def write_text(options: argparse.Namespace, tokens: int) -> Path:
    """Write the corpus as one document of `tokens` tokens, or a few less: a longer one would become two rows."""
    path = options.out / f"{tokens}.jsonl"
    if not path.is_file():
        words = ["once upon a time there was a little girl"] if options.small else corpus(options.corpus)
        text, needed = "\n\n".join(words), 6 * tokens
        text = (text * (1 + needed // len(text)))[:needed]
        encoded = Tokenizer.from_file(str(tokenizer_of(options) / "tokenizer.json")).encode(text)
        if len(encoded) < tokens:
            raise SystemExit(f"the corpus has only {len(encoded):,} tokens in {needed:,} characters")
        text = text[: encoded.offsets[tokens - 3][1]]  # room for the tokens at its ends
        path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def tokenizer_of(options: argparse.Namespace) -> Path:
    return inputs.TOKENIZER if options.small else options.corpus / "tokenizers/mistral-7b-v0.1"


def corpus(folder: Path) -> list[str]:
    """Return the texts of all JSON and JSON lines files, packed or not."""
    found = []
    for file in sorted(file for name in ("alpaca", "sharegpt", "messages") for file in (folder / name).iterdir()):
        content = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode()
        lines = content.split("\n") if ".jsonl" in file.name else [content]
        found += strings([json.loads(line) for line in lines if line.strip()])
    return found


def strings(value: object) -> Iterator[str]:
    """Yield all strings of a JSON value that are longer than a name."""
    if isinstance(value, str) and len(value) > 30:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def recipe_of(options: argparse.Namespace, row: Row, text: Path, **settings: object) -> Path:
    """Write the recipe of a row. settings: keys with dots."""
    values = {
        "model.model_name_or_path": str(config_of(options)),
        "model.init": "random",
        "model.dtype": "float32" if options.small else "bfloat16",
        "model.tokenizer.path": tokenizer_of(options),
        "data.datasets": [{"path": str(text), "format": "text"}],
        "data.packing": True,
        "data.max_length": options.tokens or 4096,
        "data.max_record_bytes": 1 << 30,
        "data.on_overlength": "truncate",
        "data.cache": False,
        "data.num_proc": 1,
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": options.steps,
        "train.gradient_checkpointing": "offload",
        "report.warmup_steps": 0,
        "logging.logging_steps": 1,
        "checkpoint.output_dir": str(options.out / row.name),
        "checkpoint.save_strategy": "no",
        "checkpoint.save_model": False,
        "checkpoint.overwrite": True,
        **METHODS[row.method],
        **settings,
    }
    if options.small and row.method == "full":
        values |= {"train.optim": "adamw_torch"}
    return inputs.write_recipe(options.out / f"{row.name}.json", values)


def config_of(options: argparse.Namespace) -> Path:
    """Write the model's config.json with a context that no row reaches; return its folder."""
    folder = options.out / "model"
    if not folder.is_dir():
        folder.mkdir()
        config = json.loads((options.corpus / "model_configs" / "Llama-3.1-8B" / "config.json").read_text("utf-8"))
        if options.small:
            config |= {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
        config["max_position_embeddings"] = CONTEXT
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# ---- page


def join_runs(found: list[dict]) -> dict:
    """Join the pages of several runs. Texts and columns are those of this script."""
    page = pages.joined(found, ("row", "layers"))
    order = [row.name for row in ROWS]
    rows = sorted(map(finished, page["rows"]), key=lambda row: (order.index(row["row"]), -(row.get("layers") or 0)))
    missing = [name for name in order if all(row["row"] != name for row in rows)]
    return page | {
        "rows": rows,
        "intro": INTRO,
        "caveats": CAVEATS,
        "chart": CHART,
        "columns": [column for column in COLUMNS if any(column[0] in row for row in rows)],
        "left_out": [f"Without a row: {', '.join(missing)} (not run)."] if missing else [],
    }


def words(point: dict) -> str:
    if not point["fits"]:
        return f"{point['row']}: nothing fits in {point['limit']:.1f} GiB"
    planned = f"predicted {point['predicted'] / GIB:.2f} GiB (at {point['at']})"
    fits = f"plan: {point['fits']:,} tokens fit; host memory {point['host'] / GIB:.1f} GiB for all layers"
    if "measured" not in point:
        planned += f", about {point['estimate']:.0f} s"
        return f"{point['row']}: {point['tokens']:,} tokens ({point['bound']}), {planned}; {fits}"
    how = f"measured {point['measured'] / GIB:.2f} GiB ({100 * finished(point)['error']:+.1f} %), reserved "
    how += f"{point['reserved'] / GIB:.2f} of {point['limit_bytes'] / GIB:.2f}"
    ended = (
        point.get("failed") or f"{point['seconds']:.0f} s ({point['estimate']:.0f} estimated), losses {point['losses']}"
    )
    return f"{point['row']}: {point['tokens']:,} tokens, {point['layers']} layers: {how}, {planned}; {ended}; {fits}"


def finished(point: dict) -> dict:
    """Return the row of a point: with GiB, and the error of the prediction.

    A first step's peak comes before AdamW allocates its states, so its prediction leaves them out. Later steps have
    them. `optim_in_backward` (full) allocates the states of each layer before the peak, those of the embedding after.
    """
    row = {**point, "label": f"{point['row']}, {point['layers']} layers" if "layers" in point else point["row"]}
    if "measured" in row:
        first = row.get("steps", 1) == 1 and row["method"] != "full" and row["at"] != "step"
        row["later"] = row["predicted"]
        row["of_the_run"] = row["predicted"] - (row["parts"]["optimizer"] if first else 0)
        row["error"] = row["of_the_run"] / row["measured"] - 1
        if row.get("published") and "failed" not in row:
            row["times"] = row["tokens"] / row["published"]
    keys = {"predicted_gib": "of_the_run" if "measured" in row else "predicted", "later_gib": "later"}
    keys |= {f"{key}_gib": key for key in ("measured", "reserved", "host")}
    return row | {name: row[key] / GIB for name, key in keys.items() if key in row}


def publish(options: argparse.Namespace, points: list[dict], left_out: list[str]) -> None:
    rows = [finished(point) for point in points]
    pages.publish(
        options,
        page="context" + "_small" * options.small,
        title="The longest context of Llama-3.1-8B on one GPU" + " (with --small: a tiny model)" * options.small,
        intro=INTRO,
        caveats=CAVEATS,
        columns=COLUMNS,
        rows=rows,
        left_out=left_out,
        chart=CHART,
    )
