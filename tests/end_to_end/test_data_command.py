"""`ligertune data`: its predictions are those of the run, and its page; data.streaming: a stream and its resume."""

import json
import shutil

import pytest
from support.command_line import RECIPE, losses, overrides, weights
from support.quickstart_runs import ONE_ROW, RESUME, TWO_LAYERS, plan_run, saves, train

from ligertune.cli.render import console as render
from ligertune.cli.render import run_report
from ligertune.errors import UserError

SETTINGS = {"data.datasets.0.max_samples": 60, "data.val_split": 0.1, "data.max_length": 300}


PAIRS = {"task": "dpo", "data.datasets.0.path": RECIPE.parent / "preferences.jsonl"}


@pytest.mark.parametrize("task", [{}, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=["sft", "dpo"])
def test_steps_and_tokens_are_those_of_the_run(task, recipe, ligertune, tmp_path):
    epochs = {**SETTINGS, **task, "train.num_train_epochs": 2, "checkpoint.output_dir": "run", **TWO_LAYERS}
    predicted = ligertune("data", recipe, *overrides(epochs), "--json")
    assert predicted.code == 0, predicted.err
    outlook = json.loads(predicted.out)["outlook"]
    done = ligertune("train", recipe, *overrides(epochs), "--json")
    assert done.code == 0, done.err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert outlook["steps"] == json.loads(done.out)["total_steps"] == plan["schedule"]["total_steps"]
    assert (outlook["rows"], outlook["fill"]) == (plan["rows"]["count"], plan["rows"]["fill"])
    assert outlook["tokens"] == sum(losses(tmp_path / "run", "tokens"))


def test_the_page_is_written_and_the_second_run_reads_the_cache(recipe, ligertune, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    first = ligertune("data", recipe, *overrides(SETTINGS), "--out", "report.html")
    assert first.code == 0, first.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "dolly_short.jsonl" in page and "from the cache" not in page
    assert "Wrote report.html" in first.out
    again = ligertune("data", recipe, *overrides(SETTINGS), "--examples", "0")
    assert "from the cache" in again.out and "Trained:" not in again.out


def test_the_first_examples_of_a_stream_are_shown(recipe, ligertune, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = {**SETTINGS, "data.val_split": 0, "data.streaming": "true", "train.max_steps": 3}
    shown = ligertune("data", recipe, *overrides(settings), "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    assert (
        found["streamed"]
        and found["outlook"]["steps"] == len(found["examples"]) == 3
        and found["outlook"]["processes"] == 2
    )


def test_many_dropped_rows_are_a_warning_in_plan_and_report_and_more_are_refused(recipe, ligertune, tmp_path):
    """Of the first 60 rows 7 have more than 260 tokens, and 47 more than 170."""
    settings = {"data.datasets.0.max_samples": 60, "data.val_split": 0, "train.max_steps": 1, **ONE_ROW}
    few, many = ({**settings, "data.max_length": length, "checkpoint.output_dir": "run"} for length in (260, 170))
    words = "7 of 60 rows (12 %) are dropped: 7 too long, the first at line 11 (274 tokens). Raise data.max_length ("
    done = ligertune("train", recipe, *overrides(few), "--json")
    assert done.code == 0, done.err
    assert words in done.err and any(words in note for note in json.loads(done.out)["notes"])
    assert words in ligertune("data", recipe, *overrides(few), "--examples", "0").out
    for streaming in (False, True):
        for command in ("plan", "train"):
            refused = ligertune(command, recipe, *overrides({**many, "data.streaming": streaming}), "--set",
                                "checkpoint.output_dir=other")  # fmt: skip
            assert refused.code == 2 and not (tmp_path / "other").exists()
            rows = "47 of the first 60 rows" if streaming else "47 of 60 rows"
            assert f"{rows} (78 %) are dropped: 47 too long" in refused.err
            assert "data.on_overlength: truncate. To train on the rest, write data.max_dropped: 0.79." in refused.err
    shown = ligertune("data", recipe, *overrides(many), "--examples", "0")
    assert shown.code == 0 and "Training is refused: data.max_dropped allows fewer." in shown.out
    allowed = ligertune("plan", recipe, *overrides({**many, "data.max_dropped": 0.79}))
    assert allowed.code == 0 and "47 of 60 rows (78 %)" in allowed.out


STREAMED = {"data.streaming": "true", "data.val_split": 0, "data.packing": True, "train.max_steps": 6, **saves(4)}


def test_a_resumed_stream_continues_with_the_next_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("ligertune.data.batching.order.STREAM_WINDOW", 64)  # 4,096 rows take seconds to read
    settings = {**STREAMED, **TWO_LAYERS}
    report = train(tmp_path / "whole", **settings)
    assert any("rows read are used" in note for note in report.notes)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "run" / "report.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "run" / "model")
    assert train(tmp_path / "cut", **settings, **RESUME).resumed_from == 4
    assert losses(tmp_path / "cut" / "run") == losses(tmp_path / "whole" / "run")
    assert weights(tmp_path / "cut" / "run") == weights(tmp_path / "whole" / "run")


def test_the_plan_of_a_stream_has_no_number_of_examples(tmp_path, capsys):
    plan = plan_run(tmp_path, **STREAMED).plan
    assert (plan.rows.streamed, plan.rows.kind, plan.data.examples, plan.data.longest) == (True, "packed", 0, 512)
    render.people_on_stderr(False)  # the console keeps the stream of an earlier test
    run_report.show_plan(plan)
    printed = capsys.readouterr().out
    assert "streamed during training" in printed and "0 examples" not in printed


def test_a_max_length_beyond_the_context_is_refused_before_reading(tmp_path):
    with pytest.raises(UserError, match=r"data\.max_length: 1024 .* is 512"):
        plan_run(tmp_path, **STREAMED, **{"data.max_length": 1024})
