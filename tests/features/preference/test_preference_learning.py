"""A tiny model learns to prefer the chosen answers of the bundled pairs, on held-out pairs."""

import json

import pytest
from support.command_line import ROOT
from support.tasks.preference_runs import train_pairs

PAIRS = ROOT / "configs" / "quickstart" / "preferences.jsonl"
SETTINGS = {
    "data.val_split": 0.25,
    "data.max_length": 256,
    "data.datasets.0.max_samples": 320,
    "train.learning_rate": 1e-4,
    "train.max_steps": 12,
    "train.global_batch_size": 8,
    "train.per_device_train_batch_size": 8,
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 4,
    "eval.per_device_eval_batch_size": 40,
}


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True], ids=["as given", "swapped"])
def test_the_accuracy_on_held_out_pairs_rises_above_80_percent(swapped, tmp_path):
    """Before training both rewards are 0. Swapped answers show that it learns the labels, not what it knew before."""
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    if swapped:
        rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    _, lines = train_pairs(tmp_path, rows, **SETTINGS)
    evaluations = [line for line in lines if "eval_loss" in line]
    losses = [line["eval_loss"] for line in evaluations]
    margins = [line["eval_rewards/margins"] for line in evaluations]
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert evaluations[-1]["eval_rewards/accuracies"] > 0.8
    assert losses == sorted(losses, reverse=True) and margins == sorted(margins) and losses[-1] < 0.5
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Reward accuracy" in page and "Reward margin" in page and "preferences (sigmoid)" in page
