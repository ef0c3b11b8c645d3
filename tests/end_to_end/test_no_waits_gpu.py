"""The host runs ahead of the GPU: a step makes it wait for nothing but the step before."""

from __future__ import annotations

import collections
import itertools
import json
import warnings

import pytest
import torch
from test_keys import read

from ligertune.run import plan_for, run

pytestmark = pytest.mark.gpu  # a CPU never runs behind its host


def waits(quickstart, folder, *, steps: int, **settings) -> collections.Counter:
    """The places where a run of so many steps waits for its device, and how often."""
    run_folder = folder / f"of-{steps}-steps"
    run_folder.mkdir()
    shared = {
        "train.max_steps": steps,
        "checkpoint.save_strategy": "no",
        "eval.eval_strategy": "no",
        "data.val_split": 0,
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "parallel.num_processes": 1,
    }
    job = plan_for(read(quickstart, run_folder, **shared, **settings))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(job, lambda line: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [json.loads(text) for text in (run_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["seconds"] > 0 for line in lines)
    return collections.Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))


WAYS = {
    "packed": {"data.packing": True},
    "padding-free": {"data.packing": False, "data.padding_free": True},
    "padded": {"data.packing": False, "data.padding_free": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_more_steps_wait_no_more_often(way, quickstart, tmp_path):
    settings = {**WAYS[way], "logging.logging_steps": 1}
    short, long = (waits(quickstart, tmp_path, steps=steps, **settings) for steps in (8, 16))
    grown = {place: (short[place], long[place]) for place in long if long[place] > short[place]}
    assert not grown


def test_a_lap_is_the_time_of_its_steps(quickstart, tmp_path):
    """The lines' seconds, taken from the device, add up to the time between the lines as a clock sees it."""
    waits(quickstart, tmp_path, steps=16, **{"logging.logging_steps": 1})
    report = json.loads((tmp_path / "of-16-steps" / "run" / "report.json").read_text())
    lines = (tmp_path / "of-16-steps" / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    steady = sum(itertools.islice(seconds, report["throughput"]["warmup_steps_excluded"], None))
    tokens = sum(json.loads(line)["tokens"] for line in lines[report["throughput"]["warmup_steps_excluded"] :])
    assert tokens / steady == pytest.approx(report["throughput"]["tokens_per_second"], rel=0.05)
