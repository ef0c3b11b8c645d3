"""How trials become a comparison: means, errors, medians, slow steps, what fails and what is only shown."""

from __future__ import annotations

import csv
import json

import pytest

from ligertune.compare.compare_files import write_files
from ligertune.compare.side import SIDE_OF
from ligertune.compare.summary import Comparison, summarise
from ligertune.compare.trial import Failure, Step, Trial

LOSSES = (4.0, 3.5, 3.0, 2.5)
OUT_OF_MEMORY = Failure("out of memory", "CUDA out of memory. Tried to allocate 4.00 GiB.")
TARGET = {"vendor": "cpu", "name": "a CPU", "arch": "x86_64", "torch": "2.13"}


def steps(losses=LOSSES, seconds=(5.0, 1.0, 1.0, 1.0), norm=2.0) -> tuple[Step, ...]:
    return tuple(Step(i + 1, loss, norm, 100, s) for i, (loss, s) in enumerate(zip(losses, seconds, strict=True)))


def trial(side: str, *, repeat=1, rate=100.0, peak=1 << 30, mfu=None, taken=None, failure=None) -> Trial:
    report = {
        "dtype": "float32",
        "fp8": side == "with-fp8",
        "padding_free": side == "with",
        "throughput": {"tokens_per_second": rate, "mfu": mfu},
        "peak_memory": {"allocated_steady": peak, "reserved_steady": 2 * peak},
        "kernels": [{"kernel": "swiglu", "applied": 5}],
        "kernels_backend": "triton",
    }
    whole = steps() if taken is None else taken
    return Trial(side, repeat, 1, () if failure else whole, None if failure else report, failure)


def point(*trials: Trial, label: str = ""):
    names = dict.fromkeys(trial.side for trial in trials)
    return summarise(trials, sides=[SIDE_OF[name] for name in names], label=label)


def comparison(*points) -> Comparison:
    return Comparison(TARGET, "2026-01-01 00:00", "a.yaml", 3, 1, 1, 1, points)


def test_speed_is_a_mean_with_its_standard_error_and_memory_the_highest():
    found = point(
        trial("with", rate=110), trial("without", peak=2 << 30), trial("without"), trial("with", rate=130, peak=3 << 29)
    )
    ours = found.side("with")
    assert (ours.tokens_per_second.mean, ours.tokens_per_second.standard_error) == (120, pytest.approx(10))
    assert found.gain(ours) == (pytest.approx(1.2), pytest.approx(0.75))
    assert found.gain(found.side("without")) is None
    assert comparison(found).good


def test_a_step_of_many_medians_is_named_with_its_run():
    slow = trial("with", repeat=2, taken=steps(seconds=(9.0, 1.0, 4.0, 1.0)))
    found = point(trial("with"), slow, trial("without")).side("with")
    assert [(s.repeat, s.step, s.times_median) for s in found.slow_steps] == [(2, 3, 4.0)]  # not the warm-up's 9 s
    assert found.median_step_seconds == 1.0
    assert found.median_tokens_per_second == 100


def test_a_side_without_padding_says_so():
    found = point(trial("with"), trial("without"))
    assert found.side("with").kernels == "swiglu x 5 (Triton); padding-free batches"
    assert found.side("without").kernels == "swiglu x 5 (Triton)"


def test_the_plain_baseline_is_the_reference_and_else_the_first_without_kernels():
    assert point(trial("with"), trial("without"), trial("compile")).reference == "without"
    assert point(trial("with"), trial("without", failure=OUT_OF_MEMORY), trial("compile")).reference == "compile"
    assert point(trial("with")).reference == "with"


def test_memory_that_ran_out_is_shown_and_is_no_failure():
    found = comparison(point(trial("with"), trial("without", failure=OUT_OF_MEMORY)))
    assert found.good
    assert found.points[0].side("without").failure == OUT_OF_MEMORY
    assert found.points[0].side("with").parity is None


def test_a_comparison_of_which_nothing_ran_fails():
    assert not comparison(point(*(trial(name, failure=OUT_OF_MEMORY) for name in ("with", "without")))).good


def test_any_other_failure_fails():
    broken = trial("without", failure=Failure("error", "no such file"))
    assert "no such file" in comparison(point(trial("with"), broken)).problems[0]


def test_a_wrong_loss_of_ours_fails_and_a_peers_is_shown():
    wrong = steps(losses=(4.0, 3.5, 3.03, 2.5))
    ours = comparison(point(trial("with", taken=wrong), trial("without")))
    assert "at step 3" in ours.problems[0] and "the loss" in ours.problems[0]
    theirs = comparison(point(trial("with"), trial("without"), trial("liger", taken=wrong)))
    assert theirs.good and not theirs.points[0].side("liger").parity.same


def test_one_wrong_repeat_is_enough():
    wrong = trial("with", repeat=2, taken=steps(losses=(4.0, 3.5, 3.03, 2.5)))
    assert not comparison(point(trial("with"), wrong, trial("without"))).good


def test_what_is_written_holds_every_step_and_shows_every_side(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra `plots`")
    points = (
        point(trial("with", mfu=0.5), trial("without"), label="batch 4"),
        point(trial("with"), trial("without", failure=OUT_OF_MEMORY), label="batch 8"),
    )
    written, charts = write_files(comparison(*points), tmp_path)
    assert [path.name for path in charts] == ["throughput.png", "memory.png"] and all(
        map(type(tmp_path).exists, written)
    )
    with (tmp_path / "compare.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["setting"], row["side"], row["failure"]) for row in rows][2:] == [
        ("batch 8", "with", ""), ("batch 8", "without", "out of memory")
    ]  # fmt: skip
    stored = json.loads((tmp_path / "compare.json").read_text())
    assert [step["seconds"] for step in stored["points"][0]["sides"][0]["trials"][0]["steps"]] == [5.0, 1.0, 1.0, 1.0]
    page = (tmp_path / "report.html").read_text()
    assert (
        page.count("data:image/png;base64,") == 2 and "out of memory" in page and "http" not in page.split("<body>")[1]
    )


def test_float8_is_held_to_its_own_tolerance_and_our_other_sides_to_theirs():
    moved = steps([loss * 1.012 for loss in LOSSES[:1]] + [loss * 1.008 for loss in LOSSES[1:]])
    drifted = steps([LOSSES[0], *(loss * 1.015 for loss in LOSSES[1:])])
    found = point(trial("with"), trial("with-compile", taken=drifted), trial("with-fp8", taken=drifted))
    assert found.reference == "with"
    assert (found.side("with-compile").parity.same, found.side("with-fp8").parity.same) == (False, True)
    far = point(trial("with"), trial("with-fp8", taken=moved)).side("with-fp8").parity
    assert (far.same, far.failed_step) == (False, 1)
