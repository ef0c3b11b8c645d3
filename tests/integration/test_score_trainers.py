"""transformers' Trainer and TRL's RewardTrainer as clients: same losses in each step, from the same weights and rows.

All but two take real texts of the test corpus; their numbers of steps tell them apart.
"""

import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from command_line import ROOT
from datasets import Dataset
from quickstart_runs import plan_run
from tiny_models import config_of, random_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from ligertune.data.batching.order import DataOrder
from ligertune.run import run
from ligertune.training.setup import Job

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

QUICKSTART = ROOT / "configs" / "quickstart"
BATCH, RATE, LONGEST = 8, 1e-4, 160
SLOW = [pytest.mark.slow, pytest.mark.corpus]
OURS = {
    "data.val_split": 0.0,
    "data.max_length": 256,
    "model.dtype": "float32",
    "train.group_by_length": False,
    "train.per_device_train_batch_size": BATCH,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": RATE,
    "train.lr_scheduler_type": "constant",
}
THEIRS = {
    "per_device_train_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip


def scored_model(family: str, folder: Path, *, num_labels: int) -> Path:
    """Write a model with a random score head: the quickstart's Llama, or a tiny one of another family."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "stories260K")
    if family == "llama":
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_pretrained(
            QUICKSTART / "stories260K", num_labels=num_labels, dtype=torch.float32
        )
    else:
        config = config_of(family, num_labels=num_labels, vocab_size=512)
        model = random_model(AutoModelForSequenceClassification, config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def write(folder: Path, rows: list[dict]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ours(folder: Path, model: Path, rows: list[dict], steps: int, **changes: object) -> tuple[list[dict], Job, list]:
    """Train with ligertune; return its lines, its plan, and the rows in the order in which it read them."""
    keys = {"model.model_name_or_path": str(model), "data.datasets": [{"path": str(write(folder, rows))}]}
    job = plan_run(folder, **{**OURS, **keys, "train.max_steps": steps, **changes})
    plan, examples = job.plan, job.data.train
    order = DataOrder(examples.lengths, total_rows=steps * BATCH, seed=plan.build.seed, batching=plan.batching)
    read = [int(row[0]) for step in range(steps) for row in order.step(step)]
    lines: list[dict] = []
    run(job, lines.append)
    in_order = [rows[int(examples[index].source.split(":")[-1]) - 1] for index in read]
    return [line for line in lines if "loss" in line], job, in_order


def losses_of(trainer: type[Trainer]) -> type[Trainer]:
    """Return a subclass that keeps the losses of its steps: Trainer logs them rounded to four digits."""

    class WithLosses(trainer):
        def training_step(self, *arguments: object, **kwargs: object) -> torch.Tensor:
            loss = super().training_step(*arguments, **kwargs)
            self.losses = [*getattr(self, "losses", []), float(loss.detach())]
            return loss

    return WithLosses


# ---- classification


def question_rows() -> list[dict]:
    rows = (json.loads(line) for line in (QUICKSTART / "dolly_short.jsonl").read_text(encoding="utf-8").splitlines())
    return [{"text": row["instruction"], "label": int("?" in row["instruction"])} for row in rows][:200]


def corpus_rows(corpus: Path) -> list[dict]:
    """Return real turns of users and of GPT-4; the label is who wrote them, or both kinds of label."""
    lines = (corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl").read_text(encoding="utf-8").split("\n")
    rows = []
    for line in filter(None, lines):
        for turn in json.loads(line)["conversations"]:
            text = " ".join(turn["value"].split()).encode("ascii", "ignore").decode()[:LONGEST]
            if len(text) > 20:
                rows.append({"text": text, "label": int(turn["from"] == "gpt")})
    return rows[:400]


def multi(rows: list[dict]) -> list[dict]:
    """Return the rows with a list of labels: which of three words the text has."""
    words = ("the", "you", "and")
    found = [re.findall(r"\w+", row["text"].lower()) for row in rows]
    return [
        {**row, "label": [i for i, word in enumerate(words) if word in w]} for row, w in zip(rows, found, strict=True)
    ]


def numbers(rows: list[dict]) -> list[dict]:
    return [{**row, "label": len(row["text"]) / 100 + 0.001} for row in rows]


def same(rows: list[dict]) -> list[dict]:
    return rows


PROBLEMS: dict[str, tuple[Callable[[list[dict]], list[dict]], int]] = {
    "single_label_classification": (same, 2),
    "multi_label_classification": (multi, 3),
    "regression": (numbers, 1),
}


def trainer_losses(model: Path, rows: list[dict], steps: int, problem: str, num_labels: int, folder: Path) -> list:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or "<unk>"
    made = AutoModelForSequenceClassification.from_pretrained(model, problem_type=problem, dtype=torch.float32)
    made.config.pad_token_id = tokenizer.pad_token_id

    def encoded(row: dict) -> dict:
        label = row["label"]
        if problem == "multi_label_classification":
            label = [float(i in label) for i in range(num_labels)]
        return {**tokenizer(row["text"]), "label": label}

    data = Dataset.from_list([encoded(row) for row in rows])
    trainer = losses_of(Trainer)(
        made,
        TrainingArguments(str(folder / "hf"), max_steps=steps, **THEIRS),
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize(
    ("family", "problem", "packed_alike", "steps"),
    [
        pytest.param("llama", "single_label_classification", True, 3, marks=pytest.mark.slow, id="bundled"),
        *(
            pytest.param(family, problem, free, 20, marks=SLOW, id=f"{family}-{problem}-{'free' if free else 'padded'}")
            for family, problem, free in (
                ("llama", "single_label_classification", True), ("llama", "single_label_classification", False),
                ("llama", "multi_label_classification", True), ("llama", "regression", True),
                ("gemma2", "single_label_classification", True), ("gemma2", "regression", False),
            )
        ),
    ],
)  # fmt: skip
def test_classification_has_the_losses_of_transformers_trainer(family, problem, packed_alike, steps, tmp_path, request):
    change, num_labels = PROBLEMS[problem]
    rows = change(question_rows() if steps < 20 else corpus_rows(request.getfixturevalue("corpus")))
    model = scored_model(family, tmp_path, num_labels=num_labels)
    changes = {"task": "classification", "data.padding_free": packed_alike}
    found, _, in_order = ours(tmp_path, model, rows, steps, **changes)
    expected = trainer_losses(model, in_order, steps, problem, num_labels, tmp_path)
    assert [line["loss"] for line in found] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(set(expected)) == steps  # it has trained


# ---- reward models


def corpus_pairs(corpus: Path) -> list[dict]:
    """Return prompts of ShareGPT users with answers of Qwen3-235B, chosen, and GPT-4."""
    lines = (corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl").read_text(encoding="utf-8").split("\n")
    conversations = [[turn["value"] for turn in json.loads(line)["conversations"]] for line in lines if line]
    answers = {a.strip(): b for turns in conversations for a, b in pairwise(turns)}
    rows = []
    lines = (corpus / "messages" / "sharegpt_gpt4-qwen3_a22B_output.jsonl").read_text(encoding="utf-8").split("\n")
    for line in filter(None, lines):
        prompt, answer = (message["content"].strip() for message in json.loads(line)["messages"][:2])
        texts = [" ".join(text.split()).encode("ascii", "ignore").decode()[:LONGEST] for text in (prompt, answer)]
        other = " ".join(answers.get(prompt, "").split()).encode("ascii", "ignore").decode()[:LONGEST]
        if texts[1] and other and texts[1] != other:
            rows.append({"prompt": texts[0] + "\n", "chosen": texts[1], "rejected": other})
    return rows


def bundled_pairs() -> list[dict]:
    return [json.loads(line) for line in (QUICKSTART / "preferences.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("family", "center", "margin", "steps"),
    [
        pytest.param("llama", None, False, 3, marks=pytest.mark.slow, id="bundled"),
        pytest.param("llama", 0.01, True, 20, marks=SLOW, id="llama-margin-centred"),
        pytest.param("gemma2", None, True, 20, marks=SLOW, id="gemma2-margin"),
    ],
)
def test_reward_has_the_losses_and_measures_of_trls_trainer(family, center, margin, steps, tmp_path, request):
    trl = pytest.importorskip("trl")
    rows = bundled_pairs() if steps < 20 else corpus_pairs(request.getfixturevalue("corpus"))
    if margin:
        rows = [{**row, "margin": (i % 5) / 4} for i, row in enumerate(rows)]
    model = scored_model(family, tmp_path, num_labels=1)
    center_key = {} if center is None else {"reward.center_rewards_coefficient": center}
    found, _, in_order = ours(tmp_path, model, rows, steps, task="reward", **center_key)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or "<unk>"
    config = trl.RewardConfig(
        str(tmp_path / "trl"), max_steps=steps, max_length=256, center_rewards_coefficient=center, **THEIRS
    )
    trainer = losses_of(trl.RewardTrainer)(
        model=AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(in_order),
        processing_class=tokenizer,
    )
    trainer.train()
    assert [line["loss"] for line in found] == pytest.approx(trainer.losses, rel=1e-5, abs=1e-6)
    expected = [line for line in trainer.state.log_history if "loss" in line]
    for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin"):
        values = [line[name] for line in expected]
        assert [line[name] for line in found] == pytest.approx(values, rel=1e-5, abs=1e-5), name
    assert len(set(trainer.losses)) == steps
