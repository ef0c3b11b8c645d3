"""Batches of KTO on a tiny model against its definition, written out in float64."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.tasks.answer_truth import answer, batcher_of, computing, plan_of, tiny, tokens_of

from ligertune.data.examples import Example, Examples
from ligertune.features.preference.kto_task import KtoTask, mismatched_examples
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.preference.reference import PrecomputedReference

BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.4, 0.6
BLOCK = 4  # examples of a global batch
# An answer may have an untrained token inside (a tool's turn), and one at its end.
ANSWERS = [
    answer([3, 5, 7, 9, 2], [2, 3, 4], desirable=1),
    answer([4, 6, 17, 18, 19, 20, 2], [2, 3, 5], desirable=0),
    answer([8, 9, 10, 31, 32, 2], [3, 4, 5], desirable=1),
    answer([11, 12, 2], [2], desirable=0),
    answer([13, 14, 33, 34, 2], [2, 3, 4], desirable=1),
    answer([15, 35, 36, 2], [1, 3], desirable=1),
]
EXAMPLES = Examples(ANSWERS)
# The prompt of each answer with the answer of the one before it; the first of a block gets the last one's.
MISMATCHED = [
    answer([3, 5, 2], [2]),
    answer([4, 6, 7, 9, 2], [2, 3, 4]),
    answer([8, 9, 10, 17, 18, 19, 20, 2], [3, 4, 6]),
    answer([11, 12, 31, 32, 2], [2, 3, 4]),
    answer([13, 14, 35, 36, 2], [2, 4]),
    answer([15, 33, 34, 2], [1, 2, 3]),
]
CHOSEN = np.array([5, 1, 2, 0, 3])  # a global batch; two ranks with batches of two have 3 and 2 of them


def models() -> list[torch.nn.Module]:
    """Two models whose log-probabilities differ by some units."""
    first = tiny()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.06 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return [first, second]


def log_prob(model: torch.nn.Module, example: Example) -> float:
    with torch.no_grad():
        return float(tokens_of(model, example).log_probs.sum())


def raw_kl(policy: torch.nn.Module, reference: torch.nn.Module) -> float:
    return float(np.mean([log_prob(policy, MISMATCHED[i]) - log_prob(reference, MISMATCHED[i]) for i in CHOSEN]))


@pytest.fixture(params=["positive", "negative"])
def both(request) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(policy, reference) whose estimate of kl has this sign."""
    pair = models()
    is_positive = raw_kl(*pair) > 0
    assert abs(raw_kl(*pair)) > 0.1
    return tuple(pair) if is_positive == (request.param == "positive") else tuple(pair[::-1])


def kto(folder: Path, policy: torch.nn.Module, reference: torch.nn.Module) -> Callable:
    """Return a function of (rows of each micro-batch) that gives kl, the loss and the measures of the global batch."""
    plan = plan_of(folder)
    changes = {"loss_type": "kto", "reference": "precompute", "beta": BETA, "desirable_weight": DESIRABLE,
               "undesirable_weight": UNDESIRABLE}  # fmt: skip
    build = plan.build.with_section(PreferenceSpec, **changes)
    batching = replace(plan.batching, micro_batch_size=2, accumulation=2 // plan.batching.world_size)
    plan = replace(plan, build=build, batching=batching)
    assert plan.batching.global_batch_size == BLOCK
    task = KtoTask(None, plan, PrecomputedReference(plan), torch.device("cpu"))
    model = computing(copy.deepcopy(reference), packed=False).train()
    batcher = batcher_of(EXAMPLES, packed=False, task=task)
    task.prepare(model, [batcher])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), policy.parameters(), strict=True):
            parameter.copy_(value)

    def step(parts: list[list[np.ndarray]]) -> tuple[float, float, torch.Tensor]:
        given = task.inputs(EXAMPLES, CHOSEN, step=0)
        assert model.training
        loss = sum(task.loss(model, {**batcher(rows), **given}) for rows in parts)
        return float(given["kl"]), float(loss.detach()), task.measures.take()

    step.means = task.measures.means
    return step


def defined(policy: torch.nn.Module, reference: torch.nn.Module) -> tuple[float, float, dict[str, float]]:
    """Return kl, the loss and the measures by definition."""
    kl = max(0.0, raw_kl(policy, reference))
    losses, rewards, logps = [], {0: [], 1: []}, {0: [], 1: []}
    entropies = []
    for index in CHOSEN:
        example = ANSWERS[index]
        log_p = log_prob(policy, example)
        score = log_p - log_prob(reference, example)
        gain, weight = (score - kl, DESIRABLE) if example.desirable else (kl - score, UNDESIRABLE)
        losses.append(weight * (1 - 1 / (1 + np.exp(-BETA * gain))))
        rewards[example.desirable].append(BETA * score)
        logps[example.desirable].append(log_p)
        with torch.no_grad():
            entropies += tokens_of(policy, example).entropy.tolist()
    return (
        kl,
        float(np.mean(losses)),
        {
            "rewards/chosen": np.mean(rewards[1]),
            "rewards/rejected": np.mean(rewards[0]),
            "rewards/margins": np.mean(rewards[1]) - np.mean(rewards[0]),
            "logps/chosen": np.mean(logps[1]),
            "logps/rejected": np.mean(logps[0]),
            "kl": kl,
            "entropy": np.mean(entropies),
        },
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))


def test_mismatched_answers_by_hand():
    made = list(mismatched_examples(EXAMPLES, block=BLOCK, max_length=99))
    assert [example.input_ids.tolist() for example in made] == [m.input_ids.tolist() for m in MISMATCHED]
    assert [example.labels.tolist() for example in made] == [m.labels.tolist() for m in MISMATCHED]


def test_micro_batches_add_up_to_the_definition(both, tmp_path):
    step = kto(tmp_path, *both)
    kl, loss, measures = step([[np.array([5]), np.array([1])], [np.array([2]), np.array([0])], [np.array([3])], []])
    wanted_kl, wanted_loss, wanted = defined(*both)
    assert kl == pytest.approx(wanted_kl, abs=1e-5)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert step.means(measures) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_two_ranks_have_the_kl_and_the_measures_of_all(tmp_path):
    """Rank 1 has no row in its second batch, also where kl is estimated."""
    pair = models() if raw_kl(*models()) > 0 else models()[::-1]
    parts = [[[np.array([5]), np.array([1])], [np.array([3])]], [[np.array([2]), np.array([0])], []]]

    def one(rank: int) -> tuple[float, float, torch.Tensor, dict]:
        dist.init_process_group("gloo")
        step = kto(tmp_path, *pair)
        kl, loss, measures = step(parts[rank])
        dist.all_reduce(measures)
        return kl, loss, step.means(measures)

    found = on_ranks(2, one)
    wanted_kl, wanted_loss, wanted = defined(*pair)
    assert [kl for kl, *_ in found] == pytest.approx([wanted_kl] * 2, rel=1e-5)
    assert sum(loss for _, loss, _ in found) == pytest.approx(wanted_loss, rel=1e-5)
    assert found[0][2] == pytest.approx(wanted, rel=1e-4)
