"""KTO on a CPU: mismatched answers, batch sizes, ranks, references."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.forked_ranks import on_ranks
from support.tasks.preference_runs import pairs, train_pairs, write_rows

from ligertune.data.examples import Example, Examples
from ligertune.features.preference.kto_task import mismatched_examples
from ligertune.features.preference.preference_losses import kto_losses
from ligertune.features.preference.recipe import PreferenceSpec

X = -100
ROWS = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
    for i, pair in enumerate(pairs(40))
]
SETTINGS = {
    "preference.loss_type": "kto",
    "preference.undesirable_weight": 1.5,
    "data.val_split": 0.2,
    "train.learning_rate": 3e-4,
    "train.global_batch_size": 4,
}
LORA = {"method.type": "lora", "method.lora_r": 4, "train.learning_rate": 2e-3}
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "kl", "entropy")


def run(folder: Path, **changes: object) -> list[list[float]]:
    _, lines = train_pairs(folder, ROWS, **{**SETTINGS, **changes})
    names = [["loss", "grad_norm", *NAMES], ["eval_loss", *(f"eval_{name}" for name in NAMES)]]
    return [[line.get(name, 0.0) for name in names["eval_loss" in line]] for line in lines]  # a batch may lack a kind


def check_close(found: list[list[float]], expected: list[list[float]]) -> None:
    """kl is a difference of sums of about -400, whose rounding is 3e-5."""
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=3e-5)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[list[float]]:
    return run(tmp_path_factory.mktemp("alone"))


def test_prompts_get_the_answer_of_the_example_before_within_a_block():
    """Prompts are 1s, 2s ...; answers 10s, 20s ..."""
    made = [([i] * i, [10 * i] * 2) for i in (1, 2, 3, 4, 5)]
    examples = Examples(
        Example(np.array(p + a, np.int32), np.array([X] * len(p) + a, np.int32), "a:1") for p, a in made
    )
    found = list(mismatched_examples(examples, block=3, max_length=5))
    expected = [[1, 30, 30], [2, 2, 10, 10], [3, 3, 3, 20, 20], [4, 4, 4, 4, 50], [5, 5, 5, 5, 5]]
    assert [example.input_ids.tolist() for example in found] == expected
    assert [example.labels.tolist() for example in found][:2] == [[X, 30, 30], [X, X, 10, 10]]


def test_the_loss_and_its_gradient_are_those_of_the_definition():
    scores = torch.tensor([0.3, -2.0, 4.0], dtype=torch.float64, requires_grad=True)
    desirable, kl = torch.tensor([True, False, False]), torch.tensor(0.7, dtype=torch.float64)
    options = PreferenceSpec(loss_type="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=0.5)
    found = kto_losses(scores, desirable, kl, options)

    def written_out(s: torch.Tensor) -> torch.Tensor:
        gains = torch.stack([s[0] - 0.7, 0.7 - s[1], 0.7 - s[2]])
        return torch.tensor([2.0, 0.5, 0.5]) * (1 - 1 / (1 + torch.exp(-0.5 * gains)))

    torch.testing.assert_close(found, written_out(scores), rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(losses.sum(), scores)[0] for losses in (found, written_out(scores))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_the_first_loss_is_half_of_the_weights(expected):
    """Policy and reference agree: each loss is its weight / 2."""
    loss, _, chosen, rejected, margin, _, kl, _ = expected[0]
    assert [chosen, rejected, margin, kl] == pytest.approx([0, 0, 0, 0], abs=1e-5)
    assert 0.5 < loss < 0.75
    assert all(abs(line[0] - loss) > 1e-3 for line in expected[1:])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train.per_device_train_batch_size": 4}, marks=pytest.mark.slow),
        pytest.param({"data.padding_free": True, "train.per_device_train_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param({"preference.reference": "copy"}, marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_the_loss_does_not_depend_on_how_a_batch_is_computed(changes, expected, tmp_path):
    check_close(run(tmp_path, **changes), expected)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["desirable_weight", "undesirable_weight", "beta"])
def test_each_key_of_kto_changes_the_losses(key, expected, tmp_path):
    found = run(tmp_path, **{f"preference.{key}": 0.3})
    assert found[1][0] != pytest.approx(expected[1][0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_process(strategy, expected, tmp_path):
    settings = {"parallel.strategy": strategy, "eval.per_device_eval_batch_size": 5}
    write_rows(tmp_path, ROWS)
    check_close(on_ranks(2, lambda rank: run(tmp_path, **settings))[0], expected)


@pytest.mark.slow
def test_an_adapter_switched_off_gives_the_same_as_precomputed_log_probabilities(tmp_path):
    found = []
    for reference in ("adapter", "precompute"):
        (tmp_path / reference).mkdir()
        found.append(run(tmp_path / reference, **LORA, **{"preference.reference": reference}))
    check_close(*found)
