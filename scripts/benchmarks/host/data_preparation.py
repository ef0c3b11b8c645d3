"""Benchmark data preparation: records/s from a data file to packed batches, against datasets.map per record.

    scripts/bench data [--file FILE] [--tokenizer FOLDER] [--repeats 3] [--processes N]

The ways run in turn, so that other load on the machine affects all of them; the best repeat counts. Each run begins
with the file and ends with the tensors of every packed row. Both sides tokenize once and map characters to labels, with
BOS and EOS as the recipe has them. Then the stages of one process are timed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks import inputs, pages
from ligertune.data.batching.collate import collate_packed
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Example, Examples, Preparation
from ligertune.data.prepare import prepare
from ligertune.data.row_pipeline import RowPipeline, count_processes
from ligertune.data.rows.sources import RecordStream
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import alpaca_prompt
from ligertune.planning.options import DataOptions, DatasetOptions

MAX_LENGTH = 2048
RATE, TIMES = 10_000, 3.0  # goals: records/s on all cores, and the factor to datasets.map


def main() -> int:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    cores = options.processes or count_processes("auto")
    records = sum(1 for _ in RecordStream(DatasetOptions(path=str(options.file))))
    print(f"{options.file.name}: {records} records, {options.tokenizer.name}, {cores} processes", flush=True)
    ways: dict[str, Callable[[], int]] = {
        f"ligertune, {cores} processes": lambda: prepared(options.file, tokenizer, processes=cores, cache=False),
        "ligertune, 1 process": lambda: prepared(options.file, tokenizer, processes=1, cache=False),
        f"ligertune, {cores} processes, empty cache": lambda: with_empty_cache(options.file, tokenizer, cores),
        "ligertune, from the cache": lambda: prepared(options.file, tokenizer, processes=cores, cache=True),
        "datasets.map, 1 process": lambda: mapped(options.file, tokenizer, None),
        f"datasets.map, {cores} processes": lambda: mapped(options.file, tokenizer, cores),
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGERTUNE_CACHE"] = folder
        best, tokens = measured(ways, options.repeats)
    if len(set(tokens.values())) != 1:
        print(f"the ways give different numbers of tokens: {tokens}")
        return 1
    show(best, records, cores)
    stages(options.file, tokenizer)
    return 0


def parse() -> argparse.Namespace:
    alpaca = inputs.CORPUS / "alpaca" / "alpaca_random_9k.json.gz"
    qwen = inputs.CORPUS / "tokenizers" / "qwen2.5"
    quickstart = inputs.QUICKSTART
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=alpaca if alpaca.exists() else quickstart / "dolly_short.jsonl")
    parser.add_argument("--tokenizer", type=Path, default=qwen if qwen.exists() else quickstart / "stories260K")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, help="instead of one for each core")
    return pages.parse_arguments(parser)


def measured(ways: dict[str, Callable[[], int]], repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return (best seconds, tokens in the batches) of each way."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens[name] = way()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(found) for name, found in seconds.items()}, tokens


def prepared(file: Path, tokenizer: PreTrainedTokenizerBase, *, processes: int, cache: bool) -> int:
    spec = DatasetOptions(path=str(file))
    data = DataOptions(datasets=[spec], max_length=MAX_LENGTH, num_proc=processes, cache=cache)
    return batches(prepare(data, tokenizer, seed=0).train)


def with_empty_cache(file: Path, tokenizer: PreTrainedTokenizerBase, processes: int) -> int:
    before = os.environ["LIGERTUNE_CACHE"]
    with tempfile.TemporaryDirectory(dir=before) as folder:
        os.environ["LIGERTUNE_CACHE"] = folder
        found = prepared(file, tokenizer, processes=processes, cache=True)
    os.environ["LIGERTUNE_CACHE"] = before
    return found


def batches(examples: Examples) -> int:
    """Make the tensors of every packed row, and return the number of tokens."""
    packs = pack(examples.lengths, MAX_LENGTH)
    made = (collate_packed([examples[int(i)] for i in members], pad_token_id=0) for members in packs)
    return sum(batch["input_ids"].numel() for batch in made)


def mapped(file: Path, tokenizer: PreTrainedTokenizerBase, processes: int | None) -> int:
    """Prepare with datasets.map: one Python call, one tokenizer call and two lists per record."""
    begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    bos = [tokenizer.bos_token_id] if begins and tokenizer.bos_token_id is not None else []

    def labelled(row: dict) -> dict:
        if not row["output"].strip():
            return {"input_ids": [], "labels": []}
        prompt = alpaca_prompt(row["instruction"], row.get("input") or "")
        found = tokenizer(prompt + row["output"], add_special_tokens=False, return_offsets_mapping=True)
        answer = [token if start >= len(prompt) else -100
                  for token, (start, _) in zip(found.input_ids, found.offset_mapping, strict=True)]  # fmt: skip
        eos = [tokenizer.eos_token_id]
        return {"input_ids": bos + found.input_ids + eos, "labels": [-100] * len(bos) + answer + eos}

    with tempfile.TemporaryDirectory() as folder:
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=folder)
        made = rows.map(labelled, num_proc=processes, remove_columns=rows.column_names, load_from_cache_file=False)
        input_ids, labels = (made.data.column(name).combine_chunks() for name in ("input_ids", "labels"))
        ends = input_ids.offsets.to_numpy()
        flat = [column.flatten().to_numpy().astype(np.int32) for column in (input_ids, labels)]
        parts = [slice(start, end) for start, end in pairwise(ends) if 0 < end - start <= MAX_LENGTH]
        return batches(Examples(Example(flat[0][part], flat[1][part], "") for part in parts))


def show(best: dict[str, float], records: int, cores: int) -> None:
    usual = best["datasets.map, 1 process"]
    print(f"\n{'':38}{'records/s':>12}{'seconds':>10}{'x datasets.map':>16}")
    for name, seconds in best.items():
        print(f"{name:38}{records / seconds:12,.0f}{seconds:10.2f}{usual / seconds:16.1f}")
    rate, times = records / best[f"ligertune, {cores} processes"], usual / best[f"ligertune, {cores} processes"]
    alike = best[f"datasets.map, {cores} processes"] / best[f"ligertune, {cores} processes"]
    for what, found, goal in (
        ("records/s", rate, RATE),
        ("times datasets.map", times, TIMES),
        ("times datasets.map with the same number of processes", alike, TIMES),
    ):
        print(f"{what}: {found:,.1f}, goal {goal:,}: {'ok' if found >= goal else 'short'}")


def stages(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Time the stages in one process, and for comparison the tokenizer alone on all cores."""
    spec = DatasetOptions(path=str(file))
    data = DataOptions(datasets=[spec], max_length=MAX_LENGTH)
    took: dict[str, float] = {}

    def timed(name: str, work: Callable):
        start = time.perf_counter()
        found = work()
        took[name] = time.perf_counter() - start
        return found

    records = timed("read the file", lambda: list(RecordStream(spec)))
    records = [record for record in records if (record.row.get("output") or "").strip()]
    rows = RowPipeline(spec, Preparation(data, tokenizer), records[:1])
    texts = timed("convert, render", lambda: [rows.template.render(rows.format.convert(one)) for one in records])
    encoder = Encoder(tokenizer)
    encoded = timed("tokenize, label", lambda: list(encoder.encode(texts)))
    rows = [(e, record.source) for e, record in zip(encoded, records, strict=True) if len(e.input_ids) <= MAX_LENGTH]
    examples = timed("flat arrays", lambda: Examples(Example(e.input_ids, e.labels, source) for e, source in rows))
    timed("pack, make batches", lambda: batches(examples))
    whole = sum(took.values())
    print("\nOne process, stage by stage:")
    for name, seconds in took.items():
        print(f"  {name:36}{seconds:8.2f} s{seconds / whole:8.0%}")
    backend = tokenizer.backend_tokenizer
    timed("", lambda: backend.encode_batch([text.text for text in texts], add_special_tokens=False))
    largest = max((name for name in took if name), key=lambda name: took[name])
    print(f"  {'the tokenizer alone, on all cores':36}{took['']:8.2f} s")
    print(f"The slowest stage is to {largest}: {took[largest] / whole:.0%} of the time.")
