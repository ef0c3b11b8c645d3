"""Metrics of generated answers: during a run by eval.metric, and of the trained model by `ligertune eval --metric`."""

import json
from pathlib import Path

import pytest
from support.command_line import metrics, run_here
from support.quickstart_runs import plan_run, train, train_ranks

from ligertune.errors import UserError

METRIC = "def letters(answer, reference, prompt):\n    return float(len(answer) - len(reference) * 0.5)\n"
ASKED = {
    "eval.eval_strategy": "steps", "eval.eval_steps": 1, "eval.answer_tokens": 6, "eval.answer_samples": "null",
    "train.max_steps": 1, "train.learning_rate": 1e-2, "data.val_split": 0.05, "model.dtype": "float32",
    "method.type": "lora",
}  # fmt: skip


def evaluated(folder: Path, *arguments: object) -> dict:
    done = run_here("eval", "run", *arguments, "--json", cwd=folder)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory) -> Path:
    """A run that scores answers of at most 6 tokens to its 2 held-out prompts, by a function, after its step."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "own.py").write_text(METRIC)
    train(folder, **ASKED, **{"eval.metric": f"{folder}/own.py:letters"})
    return folder


def test_a_run_scores_answers_with_each_evaluation_and_reports_the_last_one(scored_run):
    lines = [line for line in metrics(scored_run / "run") if "eval_loss" in line]
    assert lines[-1]["step"] == 1
    report = json.loads((scored_run / "run" / "report.json").read_text())
    assert report["eval_measures"]["letters"] == lines[-1]["eval_letters"]
    assert "<th>letters</th>" in (scored_run / "run" / "report.html").read_text(encoding="utf-8")


def test_the_trained_model_has_the_score_of_the_last_evaluation(scored_run):
    report = json.loads((scored_run / "run" / "report.json").read_text())
    found = evaluated(scored_run, "--metric", "own.py:letters", "--predict", "rows.jsonl")
    assert found["metrics"]["letters"]["value"] == pytest.approx(report["eval_measures"]["letters"])
    rows = [json.loads(line) for line in (scored_run / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["score"] == len(row["answer"]) - 0.5 * len(row["reference"])
        assert {"prompt", "base_answer", "base_score", "loss", "base_loss"} <= row.keys()
    means = [sum(row[name] for row in rows) / 2 for name in ("score", "base_score")]
    assert found["metrics"]["letters"]["difference"]["value"] == pytest.approx(means[0] - means[1])


def test_python_code_that_a_run_names_runs_only_if_the_command_line_names_it(scored_run):
    (scored_run / "own.py").write_text(METRIC + f"open({str(scored_run / 'ran')!r}, 'w')\n")
    found = evaluated(scored_run, "--no-base")
    assert "letters" not in found["metrics"]
    assert any("is Python code, which runs if --metric names it" in note for note in found["notes"])
    assert not (scored_run / "ran").exists()
    exact = evaluated(scored_run, "--no-base", "--metric", "exact_match", "--max-new-tokens", 1)
    assert exact["metrics"]["exact_match"]["value"] == 0.0
    assert not (scored_run / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval.metric": "bleu"}, "exact_match, or file.py:function"),
        ({"eval.metric": "exact_match", "data.val_split": 0}, "no evaluation data"),
        ({"eval.metric": "exact_match", "parallel.strategy": "fsdp"}, "needs a whole model"),
        ({"eval.tasks": "[arc_easy]", "task": "reward"}, "a model that writes text"),
        ({"eval.metric": "gone.py:score"}, r"eval\.metric: there is no file gone\.py"),
        ({"eval.tasks": "[gone.yaml]"}, r"eval\.tasks: there is no file gone\.yaml"),
    ],
)
def test_recipes_whose_answers_cannot_be_scored_are_refused(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        plan_run(tmp_path, **changes)


def test_a_run_with_tasks_needs_lm_eval_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("ligertune.planning.preflight.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"eval\.tasks: arc_easy needs the package lm-eval.*pip install 'lm-eval>="):
        plan_run(tmp_path, **{"eval.tasks": "[arc_easy]"})


def test_options_of_answers_need_a_metric(scored_run):
    for arguments, words in (
        (("--max-new-tokens", 3), "--max-new-tokens belongs to --metric"),
        (("--metric", "bleu"), "--metric: bleu is no metric"),
        (("--metric", "exact_match", "--tasks", "arc_easy"), "--metric scores answers to data"),
    ):
        done = run_here("eval", "run", *arguments, cwd=scored_run)
        assert done.code == 2
        assert words in " ".join(done.err.split())


@pytest.mark.slow
def test_two_ranks_log_the_scores_of_one(scored_run, tmp_path):
    (tmp_path / "own.py").write_text(METRIC)
    asked = {**ASKED, "eval.metric": f"{tmp_path}/own.py:letters"}
    train_ranks(2, tmp_path, **asked, **{"train.gradient_accumulation_steps": 1})
    ours, theirs = ([line for line in metrics(one / "run") if "eval_letters" in line] for one in (tmp_path, scored_run))
    assert [line["eval_letters"] for line in ours] == pytest.approx([line["eval_letters"] for line in theirs])
