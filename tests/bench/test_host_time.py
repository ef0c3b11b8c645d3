"""The table of host time: what it reads from a trace and from a report."""

import json
import os

import pytest
from support.script_modules import script_module

from ligertune.compare.trial import Step

host_time = script_module("benchmarks.host_time")


def event(category, name, correlation, begin=0.0, duration=1.0):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": duration,
        "args": {"correlation": correlation},
    }


EVENTS = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 0, "dur": 100, "args": {}},
    event("cuda_runtime", "cudaLaunchKernel", 1),
    event("cuda_driver", "cuLaunchKernelEx", 2),
    event("cuda_runtime", "cudaGraphLaunch", 3),
    event("cuda_runtime", "cudaMemcpyAsync", 4),
    event("cuda_runtime", "cudaStreamSynchronize", 5),
    event("kernel", "a", 1, 100.0, 50.0),
    event("kernel", "overlaps a", 2, 120.0, 80.0),
    event("kernel", "of the graph", 3, 300.0, 10.0),
    event("kernel", "inside it", 3, 302.0, 3.0),
    event("gpu_memcpy", "copy", 4, 310.0, 30.0),
    event("kernel", "of the step before", 99, 0.0, 90.0),
]


def written(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def test_overlapping_kernels_count_once_and_those_of_an_earlier_step_do_not(tmp_path):
    traced = host_time.read_trace(written(tmp_path, EVENTS), steps=2)
    assert traced.busy_seconds == pytest.approx((100 + 40) / 2 * 1e-6)
    assert traced.launches == 3 / 2


def test_a_trace_without_a_gpu_has_no_busy_time(tmp_path):
    assert host_time.read_trace(written(tmp_path, EVENTS[:2]), steps=2) is None


def test_rates_and_busy_time_are_of_the_measured_steps():
    steps = [Step(step, 1.0, None, 1000, seconds) for step, seconds in ((4, 0.1), (5, 0.2), (6, 0.3))]
    report = {
        "throughput": {"tokens_per_second": 2500.0, "mfu": 0.2},
        "seconds_to_first_step": {"loading the model": 3.0, "preparing to train": 1.0, "first step": 4.0},
        "notes": ["CUDA graphs: 2 recorded, 12 micro batches by them, 2 without"],
    }
    found = host_time.host_values(report, steps, host_time.TracedSteps(busy_seconds=0.19, launches=70.0))
    assert found["tokens_per_second"] == pytest.approx(5000.0)
    assert found["mfu"] == pytest.approx(0.4)
    assert found["gpu_busy"] == pytest.approx(0.95)
    assert (found["cold_first_step"], found["cold_start"], found["graphs"]) == (4.0, 8.0, "yes")


def test_graphs_that_were_recorded_and_never_replayed_are_no_graphs():
    assert not host_time.replayed(["CUDA graphs: 0 recorded, 0 micro batches by them, 14 without; none after that: x"])
    assert not host_time.replayed([])


def test_a_run_starts_with_an_empty_kernel_cache_and_the_environment_is_restored(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    with host_time.empty_kernel_cache():
        assert os.listdir(os.environ["TRITON_CACHE_DIR"]) == []
    assert os.environ["TRITON_CACHE_DIR"] == "before"
