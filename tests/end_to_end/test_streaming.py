"""data.streaming: data are read while training, and a resumed run continues with the same rows."""

from __future__ import annotations

import shutil

import pytest
from command_line import losses, weights
from quickstart_runs import RESUME, plan_run, saves, train

from ligertune.cli.render import console as render
from ligertune.errors import UserError

STREAMED = {
    "data.streaming": "true",
    "data.val_split": 0,
    "data.packing": True,
    "train.max_steps": 6,
    **saves(4),
}


def test_a_resumed_stream_continues_with_the_next_rows(tmp_path):
    report = train(tmp_path / "whole", **STREAMED)
    assert any("rows that were read are used" in note for note in report.notes)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "run" / "report.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "run" / "model")
    assert train(tmp_path / "cut", **STREAMED, **RESUME).resumed_from == 4
    assert losses(tmp_path / "cut" / "run") == losses(tmp_path / "whole" / "run")
    assert weights(tmp_path / "cut" / "run") == weights(tmp_path / "whole" / "run")


def test_the_plan_of_a_stream_has_no_number_of_examples(tmp_path, capsys):
    plan = plan_run(tmp_path, **STREAMED).plan
    assert (plan.rows.streamed, plan.rows.kind, plan.data.examples, plan.data.longest) == (True, "packed", 0, 512)
    render.people_on_stderr(False)  # the console keeps the stream of an earlier test
    render.plan(plan)
    printed = capsys.readouterr().out
    assert "streamed while training" in printed and "0 examples" not in printed


def test_a_max_length_beyond_the_context_is_refused_before_reading(tmp_path):
    with pytest.raises(UserError, match=r"data\.max_length: 1024 .* is 512"):
        plan_run(tmp_path, **STREAMED, **{"data.max_length": 1024})
