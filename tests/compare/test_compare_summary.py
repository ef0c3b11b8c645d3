"""Summary of trials: loss parity, means, standard errors, medians, slow steps, failures, and the files."""

import csv
import json
import math

import pytest

from ligertune.compare.compare_files import ablation_table, loss_series, write_files
from ligertune.compare.side import SIDE_OF
from ligertune.compare.summary import TOLERANCES, Comparison, parity, summarise_trials
from ligertune.compare.trial import Failure, Step, Trial

LOSSES = (4.0, 3.5, 3.0, 2.5)
OUT_OF_MEMORY = Failure("out of memory", "CUDA out of memory. Tried to allocate 4.00 GiB.")
CPU = {"vendor": "cpu", "name": "AMD EPYC", "arch": "x86_64", "torch": "2.13"}
GPU = {"vendor": "nvidia", "name": "NVIDIA H100", "arch": "sm90", "torch": "2.13"}


def steps(losses=LOSSES, seconds=(5.0, 1.0, 1.0, 1.0), norm: float | None = 2.0) -> tuple[Step, ...]:
    return tuple(Step(i + 1, loss, norm, 100, s) for i, (loss, s) in enumerate(zip(losses, seconds, strict=False)))


def trial(side: str, *, repeat=1, rate=100.0, peak=1 << 30, mfu=None, taken=None, failure=None) -> Trial:
    report = {
        "dtype": "float32",
        "fp8": side == "with-fp8",
        "padding_free": side == "with",
        "throughput": {"tokens_per_second": rate, "mfu": mfu},
        "peak_memory": {"allocated_steady": peak, "reserved_steady": 2 * peak},
        "kernels": [{"kernel": "swiglu", "applied": 5}],
        "kernels_backend": "triton",
        "batch": "8 rows of 512 tokens per step",
    }
    whole = steps() if taken is None else taken
    return Trial(side, repeat, 1, () if failure else whole, None if failure else report, failure)


def point(*trials: Trial, label: str = ""):
    names = dict.fromkeys(trial.side for trial in trials)
    return summarise_trials(trials, sides=[SIDE_OF[name] for name in names], label=label)


def comparison(*points, target=GPU, repeats=1) -> Comparison:
    return Comparison(target, "tiny, LoRA", "2026-01-01 00:00", "a.yaml", 3, repeats, 1, 1, points)


WRONG = steps((4.0, 3.5, 3.0 * 1.01, 2.5))


@pytest.mark.parametrize("dtype", [dtype for dtype in TOLERANCES if dtype != "float8"])  # differ by rounding only
def test_a_loss_that_is_one_percent_off_is_found_at_its_step(dtype):
    found = parity(WRONG, steps(), dtype)
    assert (found.same, found.failed_step, found.worst_step) == (False, 3, 3)
    assert found.worst == pytest.approx(0.01)
    assert "DIFFERENT in the loss at step 3" in found.sentence
    wrong_gradient = parity(steps(norm=2.06), steps(), dtype)
    assert (wrong_gradient.failed_step, wrong_gradient.failed_in) == (1, "the gradient norm")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rounding_is_allowed_and_the_first_loss_may_differ_by_less(dtype):
    assert parity(steps(tuple(loss * (1 + 1e-6) for loss in LOSSES), norm=2 * (1 + 1e-6)), steps(), dtype).same
    drift = 1 + TOLERANCES[dtype].loss / 2
    assert parity(steps((4.0, 3.5, 3.0, 2.5 * drift)), steps(), dtype).same
    assert parity(steps((4.0 * drift, 3.5, 3.0, 2.5)), steps(), dtype).failed_step == 1


def test_missing_gradient_norms_nan_and_missing_steps_are_differences():
    assert parity(steps(norm=None), steps(norm=None), "float32").same
    assert not parity(steps(norm=None), steps(), "float32").same
    for broken in ((*LOSSES[:3], math.nan), LOSSES[:3], ()):
        assert not parity(steps(broken), steps(), "bfloat16").same


def test_speed_is_the_mean_with_its_standard_error_and_memory_the_highest_peak():
    found = point(
        trial("with", rate=110), trial("without", peak=2 << 30), trial("without"), trial("with", rate=130, peak=3 << 29)
    )
    ours = found.side("with")
    assert (ours.tokens_per_second.mean, ours.tokens_per_second.standard_error) == (120, pytest.approx(10))
    assert found.gain(ours) == (pytest.approx(1.2), pytest.approx(0.75))
    assert found.gain(found.side("without")) is None
    assert not comparison(found).problems
    assert ours.kernels == "swiglu x 5 (Triton); padding-free batches"
    assert found.side("without").kernels == "swiglu x 5 (Triton)"


def test_a_step_slower_than_three_medians_is_reported_with_its_run():
    slow = trial("with", repeat=2, taken=steps(seconds=(9.0, 1.0, 4.0, 1.0)))
    found = point(trial("with"), slow, trial("without")).side("with")
    assert [(s.repeat, s.step, s.times_median) for s in found.slow_steps] == [(2, 3, 4.0)]  # not the warm-up's 9 s
    assert (found.median_step_seconds, found.median_tokens_per_second) == (1.0, 100)


def test_the_reference_is_hugging_face_or_else_the_first_side_without_kernels():
    assert point(trial("with"), trial("without"), trial("compile")).reference == "without"
    assert point(trial("with"), trial("without", failure=OUT_OF_MEMORY), trial("compile")).reference == "compile"
    assert point(trial("with")).reference == "with"


def test_out_of_memory_fails_a_comparison_only_if_no_side_ran():
    found = comparison(point(trial("with"), trial("without", failure=OUT_OF_MEMORY)))
    assert not found.problems and found.points[0].side("with").parity is None
    assert found.points[0].side("without").failure == OUT_OF_MEMORY
    assert comparison(point(*(trial(name, failure=OUT_OF_MEMORY) for name in ("with", "without")))).problems
    broken = trial("without", failure=Failure("error", "no such file"))
    assert "no such file" in comparison(point(trial("with"), broken)).problems[0]


def test_different_losses_of_one_repeat_fail_our_side_and_not_another_library():
    ours = comparison(point(trial("with"), trial("with", repeat=2, taken=WRONG), trial("without")))
    assert "at step 3" in ours.problems[0] and "the loss" in ours.problems[0]
    drifted = trial("with", taken=steps((4.0, 3.5, 3.0, 2.5 * (1 + 1e-6))))  # allowed; a gradient that is wrong is not
    ours = comparison(point(drifted, trial("with", repeat=2, taken=steps(norm=2.06)), trial("without")))
    assert "the gradient norm" in ours.problems[0]
    liger = comparison(point(trial("with"), trial("without"), trial("liger", taken=WRONG)))
    assert not liger.problems and not liger.points[0].side("liger").parity.same


def test_float8_has_a_wider_tolerance_than_our_other_sides():
    first, *later = LOSSES
    drifted = steps((first, *(loss * 1.015 for loss in later)))
    found = point(trial("with"), trial("with-compile", taken=drifted), trial("with-fp8", taken=drifted))
    assert found.reference == "with"
    assert (found.side("with-compile").parity.same, found.side("with-fp8").parity.same) == (False, True)
    moved = steps((first * 1.012, *(loss * 1.008 for loss in later)))
    far = point(trial("with"), trial("with-fp8", taken=moved)).side("with-fp8").parity
    assert (far.same, far.failed_step) == (False, 1)


def test_the_files_hold_every_step_and_show_every_side(tmp_path):
    pytest.importorskip("matplotlib", reason="charts need the extra `plots`")
    points = (
        point(trial("with", mfu=0.5), trial("without"), label="batch 4"),
        point(trial("with"), trial("without", failure=OUT_OF_MEMORY), label="batch 8"),
    )
    written, charts = write_files(comparison(*points), tmp_path)
    assert [path.name for path in charts] == ["throughput.png", "memory.png", "losses.png"]
    assert all(path.exists() for path in written)
    with (tmp_path / "compare.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["setting"], row["side"], row["failure"]) for row in rows][2:] == [
        ("batch 8", "with", ""), ("batch 8", "without", "out of memory")
    ]  # fmt: skip
    named = [rows[0][name] for name in ("mfu", "speed_ratio", "loss_last", "same", "median_step_seconds")]
    assert named == ["0.5", "1.0", "2.5", "True", "1.0"]
    stored = json.loads((tmp_path / "compare.json").read_text())
    assert [step["seconds"] for step in stored["points"][0]["sides"][0]["trials"][0]["steps"]] == [5.0, 1.0, 1.0, 1.0]
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "out of memory" in page
    assert "http" not in page.split("<body>")[1] and "losses the same" in page and "50.0 %" in page
    # losses of two sides and of one, the difference of one side, and the durations
    assert page.count("<polyline") == 2 + 1 + 1 + 2 + 1 and "1 run of each side" in page and "4.0000 → 2.5000" in page
    assert "1,000.0 ms" in page and "standard error" not in page and "PyTorch references" not in page
    assert "<h1>tiny, LoRA, on NVIDIA H100 (sm90) x 1</h1>" in page and "batch 8, 8 rows of 512 tokens" in page
    assert stored["points"][0]["sides"][0]["speed_ratio"] == 1 and not stored["reference_kernels"]


def test_on_a_cpu_there_are_losses_but_no_gains(tmp_path):
    pytest.importorskip("matplotlib", reason="charts need the extra `plots`")
    found = comparison(point(trial("with", rate=57), trial("no-mlp"), trial("without")), target=CPU, repeats=3)
    written, charts = write_files(found, tmp_path)
    assert [path.name for path in charts] == ["losses.png"]
    page = (tmp_path / "report.html").read_text()
    assert "tiny, LoRA, 8 rows of 512 tokens per step, on CPU AMD EPYC (x86_64) x 1" in page
    assert "the kernels run as their PyTorch references" in page and "mean ± standard error" in page
    assert not [words for words in (" ratio<", "0.57", "What each kernel gains") if words in page]
    assert "Losses without each kernel" in page
    assert written[-1].name == "report.html"


def test_an_ablation_measures_what_the_missing_kernel_gains():
    """By hand: 120 against 100 tokens/s, standard errors 10 and 5; a peak of 1 GiB against 3 GiB."""
    found = point(
        trial("with", rate=110), trial("no-norm", rate=95, peak=3 << 30), trial("without"),
        trial("with", rate=130), trial("no-norm", rate=105, peak=2 << 30),
    )  # fmt: skip
    (norm,) = found.ablations
    assert (norm.kernel, norm.speed, norm.memory) == ("norm", pytest.approx(1.2), 2 << 30)
    assert norm.speed_error == pytest.approx(1.2 * math.sqrt((10 / 120) ** 2 + (5 / 100) ** 2))
    header, rows = ablation_table(comparison(found), found)
    assert rows[0][:3] == ["norm", "+20.0 % ± 11.7", "2.00 GiB"] and len(header) == len(rows[0])
    single = point(trial("with"), trial("no-norm", failure=OUT_OF_MEMORY), trial("no-rope", peak=1 << 29))
    assert [(one.speed, one.speed_error, one.memory) for one in single.ablations] == [
        (None, None, None), (1.0, None, -(1 << 29))
    ]  # fmt: skip
    assert ablation_table(comparison(single), single)[1][1][2] == "-512.0 MiB"


def test_loss_curves_begin_with_the_reference_and_differences_are_relative_to_it():
    found = point(trial("with", taken=WRONG), trial("without"))
    losses, differences = loss_series(found)
    assert [(one.label, bool(one.dash)) for one in losses] == [("Hugging Face", False), ("ligertune", True)]
    assert [value for _, value in losses[1].points] == [step.loss for step in WRONG]
    assert dict(differences[0].points) == pytest.approx({1: 0, 2: 0, 3: 0.01, 4: 0})
