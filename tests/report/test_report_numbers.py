"""Numbers of the report and of its charts against numbers by hand."""

import math
import os
import re
import signal
from dataclasses import replace

import pytest
from command_line import metrics
from quickstart_runs import plan_run, saves, train

from ligertune.report.make_report import throughput
from ligertune.report.svg_chart import HEIGHT, LEFT, MAX_POINTS, RIGHT, WIDTH, Series, line_chart
from ligertune.run import run
from ligertune.training.metrics.meter import Counts

WORK = Counts(steps=4, tokens=600, padded_tokens=800, trained_tokens=300, flops=6e12)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    report = train(folder, **{"model.dtype": "float32", "eval.eval_strategy": "steps", "eval.eval_steps": 1})
    return report, metrics(folder / "run")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The plan of a run on two devices of 2 TFLOP/s."""
    found = plan_run(tmp_path_factory.mktemp("plan")).plan
    return replace(
        found,
        machine=replace(found.machine, peak_flops=2e12),
        precision=replace(found.precision, weights="bfloat16"),
        batching=replace(found.batching, world_size=2),
    )


def test_the_report_has_the_first_and_the_last_loss_and_the_sums_of_the_lines(finished):
    report, lines = finished
    trained = [line for line in lines if "loss" in line]
    assert trained[0]["loss"] != trained[-1]["loss"]
    assert (report.loss_first, report.loss_last) == (trained[0]["loss"], trained[-1]["loss"])
    for name in ("tokens", "padded_tokens", "trained_tokens"):
        assert getattr(report, name) == sum(line[name] for line in trained), name
    assert len({report.tokens, report.padded_tokens, report.trained_tokens}) == 3
    assert report.loss_before_training == next(line for line in lines if line["step"] == 0)["loss_before_training"]
    assert report.eval_loss == [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
    assert report.status == "completed" and report.stopped_by is None


def test_a_stopped_run_is_interrupted_and_says_by_what(tmp_path):
    def stop(line: dict) -> None:
        if line["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    report = run(plan_run(tmp_path, **saves(5)), stop)
    assert (report.status, report.stopped_by) == ("interrupted", "SIGTERM")
    assert report.steps < report.total_steps and report.model_path is None


def test_rates_shares_and_mfu_are_those_by_hand(plan):
    found = throughput(plan, WORK, 2.0, warmup_excluded=True)
    assert (found.tokens_per_second, found.padded_tokens_per_second, found.trained_tokens_per_second) == (300, 400, 150)
    assert found.padding_share == 0.25
    assert found.mfu == pytest.approx(6e12 / 2.0 / (2e12 * 2))
    assert (found.steps, found.warmup_steps_excluded) == (4, plan.measurement.warmup_steps)
    assert (found.images_per_second, found.image_tokens_per_second) == (None, None)
    assert throughput(plan, WORK, 2.0, warmup_excluded=False).warmup_steps_excluded == 0
    assert throughput(plan, Counts(), 2.0, warmup_excluded=False) is None


def test_mfu_is_absent_where_the_peak_or_the_work_is_not_known(plan):
    images = replace(WORK, images=8, image_tokens=100)
    with_images = throughput(plan, images, 2.0, warmup_excluded=True)
    assert (with_images.mfu, with_images.images_per_second, with_images.image_tokens_per_second) == (None, 4, 50)
    execution = replace(plan.build.execution, fp8=True)
    for other in (
        replace(plan, build=replace(plan.build, execution=execution)),
        replace(plan, machine=replace(plan.machine, peak_flops=None)),
        replace(plan, precision=replace(plan.precision, weights="float32", autocast="no")),
        replace(plan, measurement=plan.measurement.model_copy(update={"mfu": False})),
    ):
        assert throughput(other, WORK, 2.0, warmup_excluded=True).mfu is None


def places(chart: str) -> list[tuple[float, float]]:
    """Return the points of the only line of a chart."""
    (path,) = re.findall(r'(?:points|d)="M?([-0-9., L]+)"', re.sub(r"<(?!polyline|path)[^>]*>", "", chart))
    numbers = [float(text) for text in re.findall(r"-?[0-9.]+", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_the_chart_of_a_long_run_ends_at_its_last_point():
    count = 2 * MAX_POINTS + 2  # the stride of thinning does not divide it
    points = [(step, 1.0) for step in range(1, count)] + [(count, 3.0)]
    found = places(line_chart("loss", "loss", [Series("a", "red", points)]))
    assert len(found) <= MAX_POINTS + 1
    assert found[0][0] == LEFT and found[-1][0] == WIDTH - RIGHT
    assert found[-1][1] < found[-2][1] < HEIGHT  # the last value is higher, and y counts from the top


def test_values_that_are_not_finite_are_left_out_of_a_chart():
    points = [(1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)]
    chart = line_chart("loss", "loss", [Series("a", "red", points)])
    assert len(places(chart)) == 2 and "nan" not in chart and "inf" not in chart
    assert line_chart("loss", "loss", [Series("a", "red", [(1, math.nan)])]) is None
