"""logging.report_to, run names, the profiler's trace, memory snapshots and the figure of the curves."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from command_line import losses
from quickstart_runs import plan_run, train

from ligertune.train.metrics_logger import run_name

slow = pytest.mark.slow


@slow
@pytest.mark.skipif(not find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard_gets_the_losses_under_the_run_name(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"logging.report_to": "[tensorboard]", "logging.run_name": "my-run"}
    train(tmp_path, **changes)
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "my-run"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(tmp_path / "run"))


def test_a_run_has_the_name_of_the_key_or_of_its_folder(tmp_path):
    assert run_name(plan_run(tmp_path).plan) == "run"
    assert run_name(plan_run(tmp_path, **{"logging.run_name": "mine"}).plan) == "mine"


@slow
def test_profile_steps_writes_a_trace_and_a_run_draws_its_curves(tmp_path):
    from PIL import Image

    changes = {"report.profile_steps": 1, "report.warmup_steps": 0, "report.memory_snapshot": True}
    train(tmp_path, **changes)
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"ProfilerStep#1", "aten::mm"} <= names and "ProfilerStep#2" not in names
    assert not (tmp_path / "run" / "profile" / "memory.pickle").exists()  # only GPUs have one
    with Image.open(tmp_path / "run" / "curves.png") as image:
        assert image.size == (960, 960)


@pytest.mark.gpu
def test_memory_snapshot_writes_a_snapshot(tmp_path):
    train(tmp_path, **{"report.memory_snapshot": True})
    assert (tmp_path / "run" / "profile" / "memory.pickle").stat().st_size > 1000


@slow
def test_no_trace_is_written_by_default(tmp_path):
    train(tmp_path)
    assert not (tmp_path / "run" / "profile").exists()
