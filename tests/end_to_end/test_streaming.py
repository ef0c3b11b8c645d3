"""data.streaming: a run on data that is read while it trains, in the same numbers after a resume."""

from __future__ import annotations

import json
import shutil

import pytest
from command_line import losses, overrides

from ligertune.cli.render import run_report
from ligertune.errors import UserError
from ligertune.planning.plan import Plan
from ligertune.recipe import load_recipe
from ligertune.run import plan_for

STREAMED = {
    "data.streaming": "true",
    "data.val_split": 0,
    "train.max_steps": 6,
    "train.per_device_train_batch_size": 2,
    "logging.logging_steps": 1,
    "checkpoint.save_steps": 4,
}


def test_a_streamed_run_goes_on_where_it_was_cut(tmp_path, ligertune, recipe):
    whole = ligertune("train", recipe, *overrides({**STREAMED, "checkpoint.output_dir": "whole"}), "--json")
    assert whole.code == 0, whole.err
    report = json.loads(whole.out)
    assert any("rows that were read are used" in note for note in report["notes"])
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "report.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "model")
    resumed = ligertune("train", recipe, *overrides({**STREAMED, "checkpoint.output_dir": "cut"}), "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["resumed_from"] == 4
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert models[0] == models[1]


@pytest.fixture
def planned(recipe, tmp_path):
    def planned(**changes) -> Plan:
        settings = {**STREAMED, "checkpoint.output_dir": tmp_path / "run", **changes}
        return plan_for(load_recipe(recipe, overrides=overrides(settings)[1::2])).plan

    return planned


def test_the_plan_of_a_stream_names_no_numbers_that_nobody_knows(planned, capsys):
    plan = planned()
    assert (plan.rows.streamed, plan.rows.kind, plan.data.examples, plan.data.longest) == (True, "packed", 0, 512)
    run_report.show_plan(plan)
    printed = capsys.readouterr().out
    assert "streamed during training" in printed and "0 examples" not in printed


def test_examples_longer_than_the_model_reaches_are_refused_before_any_is_read(planned):
    with pytest.raises(UserError, match=r"data\.max_length: 1024 .* is 512"):
        planned(**{"data.max_length": 1024})
