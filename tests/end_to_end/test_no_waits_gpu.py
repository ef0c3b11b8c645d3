"""The host runs ahead of the GPU: a training step synchronises with nothing but the step before."""

from __future__ import annotations

import collections
import json
import warnings

import pytest
import torch
from command_line import metrics
from quickstart_runs import plan_run

from ligertune.run import run

pytestmark = pytest.mark.gpu  # a CPU has no host that runs ahead


def synchronisations(folder, *, steps: int, **settings) -> collections.Counter:
    """Count, per source line, how often a run of so many steps synchronises with its device."""
    run_folder = folder / f"of-{steps}-steps"
    shared = {
        "train.max_steps": steps,
        "checkpoint.save_strategy": "no",
        "eval.eval_strategy": "no",
        "data.val_split": 0,
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "parallel.num_processes": 1,
    }
    job = plan_run(run_folder, **shared, **settings)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(job, lambda line: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = metrics(run_folder / "run")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["seconds"] > 0 for line in lines)
    return collections.Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))


WAYS = {
    "packed": {"data.packing": True},
    "padding-free": {"data.packing": False, "data.padding_free": True},
    "padded": {"data.packing": False, "data.padding_free": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_more_steps_do_not_synchronise_more_often(way, tmp_path):
    settings = {**WAYS[way], "logging.logging_steps": 1}
    short, long = (synchronisations(tmp_path, steps=steps, **settings) for steps in (8, 16))
    grown = {place: (short[place], long[place]) for place in long if long[place] > short[place]}
    assert not grown


def test_the_seconds_of_the_lines_add_up_to_the_time_of_the_run(tmp_path):
    """The lines take their seconds from the device, the report from the host's clock."""
    synchronisations(tmp_path, steps=16, **{"logging.logging_steps": 1})
    report = json.loads((tmp_path / "of-16-steps" / "run" / "report.json").read_text())
    lines = metrics(tmp_path / "of-16-steps" / "run")[report["throughput"]["warmup_steps_excluded"] :]
    rate = sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)
    assert rate == pytest.approx(report["throughput"]["tokens_per_second"], rel=0.05)
