"""Where a run's numbers go beside metrics.jsonl."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from test_keys import read

from ligertune.errors import UserError
from ligertune.planning.plan import Plan
from ligertune.planning.preflight import check_packages
from ligertune.run import plan_for, run
from ligertune.train.metrics_logger import run_name

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named(tracker, quickstart, tmp_path):
    if find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    with pytest.raises(UserError, match=f"logging.report_to: {tracker} needs the package") as caught:
        check_packages(read(quickstart, tmp_path, **{"logging.report_to": f"[jsonl, {tracker}]"}))
    assert "ligertune[trackers]" in caught.value.hint


@pytest.mark.skipif(not find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard_gets_the_lines_under_the_runs_name(quickstart, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"logging.report_to": "[tensorboard]", "logging.run_name": "my-run"}
    run(plan_for(read(quickstart, tmp_path, **changes)), lambda line: None)
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "my-run"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)


def test_a_run_is_called_as_asked_or_after_its_folder(quickstart, tmp_path):
    def plan(**changes: object) -> Plan:
        return plan_for(read(quickstart, tmp_path, **changes)).plan

    assert run_name(plan()) == "run"
    assert run_name(plan(**{"logging.run_name": "mine"})) == "mine"


def test_a_trace_of_as_many_steps_as_asked_and_a_picture(quickstart, tmp_path):
    from PIL import Image

    changes = {"report.profile_steps": 1, "report.warmup_steps": 0, "report.memory_snapshot": True}
    run(plan_for(read(quickstart, tmp_path, **changes)), lambda line: None)
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"ProfilerStep#1", "aten::mm"} <= names and "ProfilerStep#2" not in names
    assert not (tmp_path / "run" / "profile" / "memory.pickle").exists()  # a CPU has no such thing
    with Image.open(tmp_path / "run" / "curves.png") as picture:
        assert picture.size == (960, 960)


@pytest.mark.gpu
def test_a_snapshot_of_the_gpus_memory(quickstart, tmp_path):
    run(plan_for(read(quickstart, tmp_path, **{"report.memory_snapshot": True})), lambda line: None)
    assert (tmp_path / "run" / "profile" / "memory.pickle").stat().st_size > 1000


def test_nothing_is_traced_unasked(quickstart, tmp_path):
    run(plan_for(read(quickstart, tmp_path)), lambda line: None)
    assert not (tmp_path / "run" / "profile").exists()
