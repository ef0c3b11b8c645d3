"""Short preference runs of the quickstart's model, on pairs made from its data set."""

import json
from pathlib import Path

from ligertune.report import Report
from support.command_line import RECIPE
from support.quickstart_runs import train

ROWS = RECIPE.parent / "dolly_short.jsonl"


def pairs(count: int, *, shortest: int = 3) -> list[dict[str, str]]:
    """Return rows whose chosen answer is a human's, and whose rejected answer has its words in reverse order."""
    found = []
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        words = row["output"].split()[:16]
        if len(words) >= shortest and words != words[::-1]:
            answers = {"chosen": " ".join(words), "rejected": " ".join(reversed(words))}
            found.append({"prompt": row["instruction"][:60] + "\n", **answers})
        if len(found) == count:
            break
    return found


def write_rows(folder: Path, rows: list[dict]) -> Path:
    """Write rows to a JSON lines file in `folder`, unless it holds them: another rank may be reading it."""
    path = folder / "pairs.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def settings(folder: Path, rows: list[dict], **changes: object) -> dict[str, object]:
    """Return the settings of a run on these rows, with evaluation data split off."""
    return {
        "task": "dpo",
        "data.datasets": [{"path": str(write_rows(folder, rows))}],
        "data.max_length": 192,
        "model.dtype": "float32",
        "train.learning_rate": 1e-3,
        **changes,
    }


def train_pairs(folder: Path, rows: list[dict], **changes: object) -> tuple[Report, list[dict]]:
    """Train on these rows; return the report and the lines of metrics.jsonl of steps and evaluations."""
    report = train(folder, **settings(folder, rows, **changes))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return report, [line for line in lines if "loss" in line or "eval_loss" in line]
