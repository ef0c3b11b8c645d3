"""`ligertune data`: its predictions are those of the run; its page; streams."""

from __future__ import annotations

import json

from command_line import losses, overrides

SETTINGS = {"data.datasets.0.max_samples": 60, "data.val_split": 0.1, "data.max_length": 300}


def test_steps_and_tokens_are_those_of_the_run(recipe, ligertune, tmp_path):
    epochs = {**SETTINGS, "train.num_train_epochs": 2, "checkpoint.output_dir": "run"}
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


def test_a_page_that_cannot_be_written_is_refused(recipe, ligertune):
    refused = ligertune("data", recipe, "--out", "nowhere/report.html")
    assert refused.code == 2
    assert refused.err.strip().splitlines()[-1].startswith("Error: --out: nowhere/report.html lies in a folder")


def test_the_first_examples_of_a_stream_are_shown(recipe, ligertune):
    settings = {**SETTINGS, "data.val_split": 0, "data.streaming": "true", "train.max_steps": 3}
    shown = ligertune("data", recipe, *overrides(settings), "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    assert found["streamed"] and found["outlook"]["steps"] == 3 and len(found["examples"]) == 3
