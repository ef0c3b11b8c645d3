"""Runs of task: dpo on a CPU: batch sizes, ranks, references, resuming."""

from pathlib import Path

import numpy as np
import pytest
from support.forked_ranks import on_ranks
from support.quickstart_runs import RESUME, plan_run, saves, unfinished
from support.tasks.preference_runs import pairs, settings, train_pairs, write_rows

from ligertune.data.cache import cache_home
from ligertune.errors import UserError

ROWS = pairs(40)
SETTINGS = {
    "data.val_split": 0.2,
    "data.datasets.0.max_samples": 40,
    "train.learning_rate": 3e-4,
    "train.global_batch_size": 4,
    "preference.sft_weight": 0.1,
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 2,
}
LORA = {"method.type": "lora", "method.lora_r": 4, "train.learning_rate": 2e-3}
MEASURES = ("rewards/chosen", "rewards/accuracies", "rewards/margins", "logps/rejected", "entropy",
            "mean_token_accuracy")  # fmt: skip


def numbers(lines: list[dict]) -> list[list[float]]:
    """Return the loss, the gradient norm and the measures of each line; the first accuracy is only rounding."""
    names = [["loss", "grad_norm", *MEASURES], ["eval_loss", *(f"eval_{name}" for name in MEASURES)]]
    lines[0]["rewards/accuracies"] = 0.0
    return [[line[name] for name in names["eval_loss" in line]] for line in lines]


def run_ranks(folder: Path, **changes: object) -> list[list[float]]:
    write_rows(folder, ROWS)
    return on_ranks(2, lambda rank: run(folder, **changes))[0]


def run(folder: Path, **changes: object) -> list[list[float]]:
    return numbers(train_pairs(folder, ROWS, **{**SETTINGS, **changes})[1])


def check_close(found: list[list[float]], expected: list[list[float]], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=tolerance, abs=tolerance)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[list[float]]:
    """Micro-batches of two padded pairs."""
    return run(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> list[list[float]]:
    return run(tmp_path_factory.mktemp("adapted"), **LORA)


def test_the_reference_of_the_first_step_is_the_model_itself(expected):
    (loss, _, chosen, _, margin, *_), *later = expected
    assert chosen == pytest.approx(0, abs=1e-5) and margin == pytest.approx(0, abs=1e-5)
    assert loss > np.log(2)  # sft_weight adds a part
    assert all(abs(line[-4]) > 1e-3 for line in later)  # margins move


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train.per_device_train_batch_size": 4}, marks=pytest.mark.slow),
        {"train.per_device_train_batch_size": 1, "eval.per_device_eval_batch_size": 3},
        {"data.padding_free": True},
        pytest.param({"kernels.enabled": False}, marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_the_loss_does_not_depend_on_how_a_batch_is_computed(changes, expected, tmp_path):
    check_close(run(tmp_path, **changes), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("loss_type", "hinge", {}),
        ("beta", 0.3, {}),
        ("label_smoothing", 0.2, {}),
        ("sft_weight", 0.0, {}),
        ("ld_alpha", 0.2, {}),
        ("length_normalization", True, {}),
        ("simpo_gamma", 1.5, {"preference.loss_type": "simpo"}),
        ("orpo_alpha", 0.5, {"preference.loss_type": "orpo", "preference.sft_weight": 0.0}),
    ],
)
def test_each_key_of_preference_changes_the_losses(key, value, others, expected, tmp_path):
    losses = []
    for number, changes in enumerate((others, {**others, f"preference.{key}": value})):
        (tmp_path / str(number)).mkdir()
        found = run(tmp_path / str(number), **changes) if changes else expected
        losses.append([line[0] for line in found[1:]])  # in the first step, rewards are 0
    assert all(new != pytest.approx(old, rel=1e-4) for new, old in zip(*losses, strict=True))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_train_as_one_process(strategy, expected, tmp_path):
    """Eight evaluation pairs in batches of five: the second rank has none left of a second batch."""
    changes = {"parallel.strategy": strategy, "eval.per_device_eval_batch_size": 5}
    check_close(run_ranks(tmp_path, **changes), expected)


def test_the_plan_counts_the_weights_of_a_copy(tmp_path):
    plans = [
        plan_run(tmp_path, **settings(tmp_path, ROWS, **{"preference.reference": reference})).plan
        for reference in ("precompute", "copy")
    ]
    sizes = [plan.peak.parts()["frozen_model"] for plan in plans]
    assert sizes == [0, 4 * plans[0].n_parameters]


@pytest.mark.slow
def test_a_copy_gives_the_same_as_precomputed_log_probabilities(expected, tmp_path):
    check_close(run(tmp_path, **{"preference.reference": "copy"}), expected, 1e-6)


@pytest.mark.slow
def test_precomputed_log_probabilities_are_those_without_the_adapter(adapted, tmp_path):
    check_close(run(tmp_path, **LORA, **{"preference.reference": "precompute"}), adapted, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_an_adapter_as_one_process(strategy, adapted, tmp_path):
    """The first forward of an adapter's run computes the reference, with the adapter switched off."""
    check_close(run_ranks(tmp_path, **LORA, **{"parallel.strategy": strategy}), adapted)


def test_a_run_reuses_the_log_probabilities_of_another(tmp_path, monkeypatch):
    """The stored numbers are changed in between."""
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    first = run(tmp_path)
    stored = sorted(cache_home().glob("reference-*.npy"))
    assert [np.load(path).shape for path in stored].count((32, 2)) == 1 and len(stored) == 2
    for path in stored:
        np.save(path, np.load(path) - np.array([1, 0], dtype=np.float32))
    (tmp_path / "other").mkdir()
    second = run(tmp_path / "other")
    assert second[0][2] == pytest.approx(first[0][2] + 0.1, abs=1e-5)  # beta times 1


@pytest.mark.parametrize("method", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_a_resumed_run_is_the_same_to_the_bit(method, tmp_path, monkeypatch):
    """Its initial weights are gone: it reads the run's own log-probabilities, not the data cache."""
    changes = {**method, **saves(2)}
    whole = run(tmp_path, **changes)
    unfinished(tmp_path)
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "empty"))
    assert run(tmp_path, **changes, **RESUME) == whole


def test_a_resumed_run_without_its_log_probabilities_says_what_to_do(tmp_path, monkeypatch):
    run(tmp_path, **saves(2))
    for path in (unfinished(tmp_path) / "reference").iterdir():
        path.unlink()
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"has lost its reference log-probabilities .* Train this recipe for one step"):
        run(tmp_path, **saves(2), **RESUME)
