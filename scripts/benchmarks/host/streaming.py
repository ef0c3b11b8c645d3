"""Stream synthetic records with Alpaca's lengths from files to packed rows, and print the process's memory over time.

    scripts/bench streaming [--records 1000000] [--tokenizer FOLDER] [--max-length 2048] [--out FOLDER]

The records are written to a temporary folder first. Exit code 1 if memory grew by more than 64 MiB after the first
tenth. With --out the measurements are written to bench_streaming.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks import inputs, pages
from ligertune.data.batching.order import StreamOrder
from ligertune.data.examples import Preparation
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.planning.batch_layout import Batching
from ligertune.planning.options import DataOptions, DatasetOptions

ALLOWED_GROWTH = 64  # MiB: fluctuations of the allocator
LINES = 20
SHARDS = 4
SYLLABLES = "ba co di fe gu ha jo ki lo ma ne or pa qui re sa ti un ve wo xi ya ze al en is ot um".split()  # noqa: SIM905


def main() -> int:
    arguments = parse()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        size = write_records(Path(folder), arguments.records)
        print(f"{arguments.records} records, {size / 2**20:.0f} MiB in {SHARDS} files; {arguments.tokenizer}")
        lines = stream(Path(folder), tokenizer, arguments.records, arguments.max_length)
    growth = max(line["rss_mib"] for line in lines[LINES // 10 :]) - lines[LINES // 10 - 1]["rss_mib"]
    print(f"memory after the first tenth grew by at most {growth:.1f} MiB; allowed {ALLOWED_GROWTH}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        report = {"records": arguments.records, "bytes": size, "growth_mib": growth, "lines": lines}
        (arguments.out / "bench_streaming.json").write_text(json.dumps(report, indent=2))
    return int(growth > ALLOWED_GROWTH)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", type=Path, default=inputs.TOKENIZER)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    return pages.parse_arguments(parser)


def write_records(folder: Path, count: int) -> int:
    """Write records with about as many tokens as Alpaca's (mean 104, p99 305, with the prompt); return the bytes.

    Their words are drawn from 100,000 words, the n-th most common with a probability proportional to 1 / n.
    """
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(100_000)]
    frequency = 1 / np.arange(1, len(words) + 1)
    drawn = rng.choice(len(words), 1 << 20, p=frequency / frequency.sum())
    pool = [words[number] for number in drawn]
    asked, answered = (np.exp(rng.normal(mean, 0.8, count)).astype(int) + 1 for mean in (1.8, 3.1))
    starts = rng.integers(0, len(pool) - 1000, (count, 2)).tolist()
    rows = zip(asked.clip(max=500).tolist(), answered.clip(max=500).tolist(), starts, strict=True)
    files = [(folder / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(SHARDS)]
    for number, (ask, answer, (first, second)) in enumerate(rows):
        question, reply = " ".join(pool[first : first + ask]), " ".join(pool[second : second + answer])
        row = {"instruction": question, "input": "", "output": reply}
        files[number * SHARDS // count].write(json.dumps(row) + "\n")
    for file in files:
        file.close()
    return sum(file.stat().st_size for file in folder.iterdir())


def stream(folder: Path, tokenizer: object, records: int, max_length: int) -> list[dict]:
    """Stream one epoch step by step, as training does, and return a measurement for each twentieth of it."""
    data = DataOptions(datasets=[DatasetOptions(path=str(folder))], streaming=True, max_length=max_length)
    source = ExampleStream(Preparation(data, tokenizer), seed=0)
    examples = StreamedExamples(source)
    batching = Batching(micro_batch_size=8, accumulation=1, world_size=1, eval_batch_size=1)
    order = StreamOrder(examples, seed=0, batching=batching, max_length=max_length)
    counts, lines, lengths = source.sets[0].counts, [], []
    start, step, rows = time.perf_counter(), 0, 0
    print("  records   seconds  records/s  MiB resident  fill of rows  tokens per record: mean, p99")
    while len(lines) < LINES:
        batch = order.step(step)
        step, rows = step + 1, rows + len(batch)
        lengths += [examples.lengths[row] for row in batch]
        if counts.rows_read >= records * (len(lines) + 1) // LINES:
            lines.append(measured(counts.rows_read, time.perf_counter() - start, lengths, max_length))
            lengths = []
    return lines


def measured(records: int, seconds: float, rows: list[np.ndarray], max_length: int) -> dict:
    tokens = np.concatenate(rows)
    line = {
        "records": records,
        "seconds": round(seconds, 1),
        "records_per_second": round(records / seconds),
        "rss_mib": resident_mib(),
        "fill": float(tokens.sum()) / (len(rows) * max_length),
        "tokens_mean": float(tokens.mean()),
        "tokens_p99": float(np.percentile(tokens, 99)),
    }
    print(
        f"{records:>9} {line['seconds']:>9} {line['records_per_second']:>10} {line['rss_mib']:>13.1f} "
        f"{100 * line['fill']:>13.2f} %  {line['tokens_mean']:.1f}, {line['tokens_p99']:.0f}",
        flush=True,
    )
    return line


def resident_mib() -> float:
    """Return the resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
