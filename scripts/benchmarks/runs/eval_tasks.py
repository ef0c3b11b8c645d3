"""Evaluate tasks of lm-evaluation-harness by `ligertune eval` and by `lm_eval --model hf`: scripts/bench eval_tasks.

A task of each kind reads Alpaca records: choosing one of four answers, the likelihood of texts, and answering. Each
command runs in a process, from its start to its end, on a model with the sizes of Llama-3.2-1B and random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.inputs import Inputs

MODEL = "Llama-3.2-1B"
BATCHES = {"generate_until": (64, 256)}  # of lm_eval; its best one is compared
DEFAULT_BATCHES = (16, 64)
DOCUMENTS = {"multiple_choice": 2000, "loglikelihood_rolling": 2000, "generate_until": 512}
SMALL_DOCUMENTS = 8
NEW_TOKENS = 128
KINDS = {
    "multiple_choice": {
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generate_until": {
        "doc_to_text": "{{question}}\n",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": NEW_TOKENS},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main() -> int:
    """Run each task by both commands and print the table. Returns 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of tasks")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a command")
    options = pages.parse(parser)
    out = (options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-eval-"))).absolute()
    source = Inputs(options.corpus, out, options.small)
    model = inputs.write_model(source, MODEL, MODEL)
    rows, left_out = [], []
    for kind in options.only.split(","):
        task = write_task(source, kind)
        sides = {"ligertune eval": ours(model, task)}
        for batch in BATCHES.get(kind, DEFAULT_BATCHES):
            sides[f"lm_eval, batch {batch}"] = theirs(source, model, task, batch)
        for side, command in sides.items():
            row, reason = timed(command, options.limit)
            if reason:
                left_out.append(f"Without a row: {kind}, {side} ({reason}).")
                continue
            rows.append({"task": kind, "side": side, **row})
            print(json.dumps(rows[-1]), flush=True)
    publish(options, rows, left_out)
    return 1 if left_out else 0


def write_task(source: Inputs, kind: str) -> Path:
    """Write the documents of a task and its YAML file."""
    count = SMALL_DOCUMENTS if source.small else DOCUMENTS[kind]
    # lm_eval reads a text that begins with a bracket as a list
    records = [record for record in inputs.read_records(source.alpaca) if not record["output"].startswith("[")]
    documents = []
    for number in range(count):
        four = [records[(4 * number + offset) % len(records)] for offset in range(4)]
        documents.append({
            "question": f"{four[0]['instruction']} {four[0].get('input', '')}".strip(),
            "choices": [record["output"] for record in four],
            "answer": 0,
            "text": four[0]["output"],
        })  # fmt: skip
    source.out.mkdir(parents=True, exist_ok=True)
    data = source.out / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")
    files = {"data_files": {"test": str(data)}, "cache_dir": str(source.out / "cache")}
    task = {"task": kind, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "output_type": kind}
    path = source.out / f"{kind}.yaml"
    path.write_text(json.dumps({**task, **KINDS[kind]}), encoding="utf-8")  # JSON is YAML
    return path


def ours(model: Path, task: Path) -> list[str]:
    return [sys.executable, "-m", "ligertune", "eval", str(model), "--tasks", str(task), "--no-base", "--json"]


def theirs(source: Inputs, model: Path, task: Path, batch: int) -> list[str]:
    device, dtype = ("cpu", "float32") if source.small else ("cuda", "bfloat16")
    return [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype={dtype}",
            "--tasks", str(task), "--batch_size", str(batch), "--device", device,
            "--output_path", str(source.out / f"lm_eval-{task.stem}-{batch}")]  # fmt: skip


def timed(command: list[str], limit: float) -> tuple[dict[str, float], str | None]:
    """Run a command. Returns its seconds with its measure, and why it failed or None."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False, env=processes.environment()
        )
    except subprocess.TimeoutExpired:
        return {}, f"stopped after {limit:.0f} s"
    seconds = time.perf_counter() - started
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        return {}, f"failed: {done.stderr.strip().splitlines()[-1]}"
    if "--json" in command:
        (measure,) = json.loads(done.stdout)["metrics"].values()
        return {"seconds": seconds, "measure": measure["value"]}, None
    return {"seconds": seconds, "measure": measure_of(command)}, None


def measure_of(command: list[str]) -> float:
    """Return the only measure that lm_eval has written to its output path."""
    folder = Path(command[command.index("--output_path") + 1])
    newest = max(folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    (values,) = json.loads(newest.read_text(encoding="utf-8"))["results"].values()
    return next(value for name, value in values.items() if name.endswith(",none") and "_stderr" not in name)


def publish(options: argparse.Namespace, rows: list[dict], left_out: list[str]) -> None:
    best = {row["task"]: row["seconds"] for row in rows if row["side"] == "ligertune eval"}
    pages.publish(
        options,
        page="eval_tasks" + "_small" * options.small,
        title="Tasks of lm-evaluation-harness" + " (with --small: a tiny model)" * options.small,
        intro="This page measures `ligertune eval --tasks` and `lm_eval --model hf` on the same tasks.",
        caveats=[
            f"The sizes of {MODEL}, random weights in bfloat16. Documents are Alpaca records: "
            + ", ".join(f"{count:,} of {kind}" for kind, count in DOCUMENTS.items())
            + f". Answers end after {NEW_TOKENS} tokens.",
            "Seconds are those of the whole command: imports, loading, and compilation where it is not cached.",
        ],
        columns=[["task", "task", ""], ["side", "command", ""], ["seconds", "seconds", ".1f"],
                 ["measure", "measure", ".5f"], ["ratio", "seconds / ligertune's", ".2f"]],
        rows=[{**row, "ratio": row["seconds"] / best.get(row["task"], float("nan"))} for row in rows],
        left_out=left_out,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
