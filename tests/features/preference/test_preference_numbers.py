"""Losses and measures of preferences against formulas by hand, on small numbers and on a tiny model."""

from math import exp, log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.forked_ranks import on_ranks
from support.models.tiny_models import make

from ligertune.data.batching.collate import Batcher
from ligertune.data.examples import Example, Examples
from ligertune.features.preference.answers import AnswerLogProbs, AnswerSums
from ligertune.features.preference.kto_task import KtoHeadLoss, KtoTask
from ligertune.features.preference.preference_losses import PairLogProbs, pair_losses
from ligertune.features.preference.preference_task import PreferenceTask
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.launcher.signals import StopRequest
from ligertune.patching.fused_loss import let_head_losses_run
from ligertune.patching.patch import patch
from ligertune.training.evaluate import evaluate

X, CPU = -100, torch.device("cpu")
# Two pairs (chosen, rejected). Log-ratios of the first: 1 and -0.5; of the second: -1 and 0.75.
POLICY, REFERENCE = [[-4.0, -6.0], [-9.0, -7.5]], [[-5.0, -5.5], [-8.0, -8.25]]
TOKENS = [[2, 4], [3, 6]]
SUMS, BY_TOKEN = [(1.0, -0.5), (-1.0, 0.75)], [(0.5, -0.125), (-1 / 3, 0.125)]
POLICY_BY_TOKEN = [(-2.0, -1.5), (-3.0, -1.25)]


def log_sigmoid(x: float) -> float:
    return -log(1 + exp(-x))


def log_odds(log_p: float) -> float:
    return log(exp(log_p) / (1 - exp(log_p)))


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# (options, loss of the scores (chosen, rejected) of a pair, these scores, factor from log-ratios to rewards)
LOSSES = {
    "sigmoid": ({"beta": 0.3}, lambda c, r: -log_sigmoid(0.3 * (c - r)), SUMS),
    "smoothed": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda c, r: -0.9 * log_sigmoid(0.3 * (c - r)) - 0.1 * log_sigmoid(0.3 * (r - c)),
        SUMS,
    ),
    "by length": ({"beta": 0.3, "length_normalization": True}, lambda c, r: -log_sigmoid(0.3 * (c - r)), BY_TOKEN),
    "robust": (
        {"loss_type": "robust", "beta": 0.3, "label_smoothing": 0.2},
        lambda c, r: (-0.8 * log_sigmoid(0.3 * (c - r)) + 0.2 * log_sigmoid(0.3 * (r - c))) / 0.6,
        SUMS,
    ),
    "hinge": ({"loss_type": "hinge", "beta": 0.4}, lambda c, r: max(0.0, 1 - 0.4 * (c - r)), SUMS),
    "ipo": ({"loss_type": "ipo", "beta": 0.4}, lambda c, r: (c - r - 1.25) ** 2, BY_TOKEN),
    "simpo": (
        {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.7},
        lambda c, r: -log_sigmoid(2.5 * (c - r) - 0.7),
        POLICY_BY_TOKEN,
    ),
    "orpo": (
        {"loss_type": "orpo", "beta": 0.3, "orpo_alpha": 0.6},
        lambda c, r: -0.6 * log_sigmoid(log_odds(c) - log_odds(r)),
        POLICY_BY_TOKEN,
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_and_rewards_of_two_pairs_are_those_of_their_formulas(case):
    options, formula, scores = LOSSES[case]
    policy, alone = tensor(POLICY).requires_grad_(), case in ("simpo", "orpo")
    pairs = PairLogProbs(policy, None if alone else tensor(REFERENCE), tensor(TOKENS))
    losses, rewards = pair_losses(pairs, PreferenceSpec(**options))
    assert losses.tolist() == pytest.approx([formula(*pair) for pair in scores], rel=1e-12)
    # TRL logs beta times sums of log-ratios, and means over tokens for losses without a reference.
    factor = options["orpo_alpha"] if case == "orpo" else options["beta"]
    wanted = factor * tensor(POLICY_BY_TOKEN if alone else SUMS)
    torch.testing.assert_close(rewards, wanted)
    assert losses.requires_grad and not rewards.requires_grad


def test_an_answer_without_trained_tokens_has_the_log_ratio_0_per_token():
    pairs = PairLogProbs(tensor([[0.0, -3.0]]), tensor([[0.0, -5.0]]), tensor([[0, 2]]))
    losses, _ = pair_losses(pairs, PreferenceSpec(loss_type="ipo", beta=0.5))
    assert losses.tolist() == [pytest.approx((0 - 1 - 1) ** 2)]


def task_of(reference: object = None, **options: object) -> PreferenceTask:
    return PreferenceTask(None, PreferenceSpec(**options), reference, CPU)


def means_of(task: PreferenceTask | KtoTask) -> dict[str, float]:
    return task.measures.means(task.measures.take())


def test_loss_and_measures_of_pairs_from_sums():
    """Of three pairs, the rewards of the second are equal, and the third has no trained tokens: a rank without rows."""
    weighted, reference = tensor([-4, -6, -9, -7.5, 0, 0]), tensor([-5, -5.5, -8, -6.5, 0, 0])
    plain = tensor([-4.5, -6, -9, -8, 0, 0])
    sums = AnswerSums(weighted, plain, tensor([1.0, 2, 3, 5, 0, 0]), tensor([1, 0, 2, 5, 0, 0]))
    task = task_of(beta=0.5, sft_weight=0.25)
    divisors = {"num_items_in_batch": 4, "chosen_tokens": 9}
    loss = task.loss_of_pairs(sums, tensor([2, 4, 3, 6, 0, 0]), reference, divisors)
    wanted = (-log_sigmoid(0.5 * 1.5) - log_sigmoid(0)) / 4 + 0.25 * (4.5 + 9) / 9
    assert float(loss) == pytest.approx(wanted, rel=1e-12)
    assert means_of(task) == pytest.approx(
        {
            "rewards/chosen": 0.5 * (1 - 1) / 2,
            "rewards/rejected": 0.5 * (-0.5 - 1) / 2,
            "rewards/accuracies": 0.5,  # equal rewards are not right
            "rewards/margins": 0.5 * 1.5 / 2,
            "logps/chosen": -13 / 2,
            "logps/rejected": -13.5 / 2,
            "entropy": 11 / 15,  # of a token of any answer
            "mean_token_accuracy": 3 / 5,  # of a token of chosen answers
        }
    )


def pair(chosen: list[int], rejected: list[int], *, untrained: tuple[int, ...]) -> Example:
    """Return a pair whose tokens at these places of both sequences have no label."""
    labels = [[X if i in untrained else token for i, token in enumerate(side)] for side in (chosen, rejected)]
    ids = np.array(chosen + rejected, np.int32)
    return Example(ids, np.array(labels[0] + labels[1], np.int32), "a:1", (), len(chosen))


@pytest.mark.parametrize(
    ("options", "chosen_tokens"),
    [
        # Labels of the chosen sequences without the first, which nothing predicts: 3 and 2, and 4 of the other pair.
        ({"sft_weight": 0.5}, 5),
        ({"loss_type": "orpo"}, 4 + 5),  # prompts, too
        ({}, None),
    ],
)
def test_divisors_are_pairs_and_the_labels_of_chosen_answers(options, chosen_tokens):
    examples = Examples(
        [
            pair([3, 4, 5, 6, 7], [3, 4, 8, 9, 10, 11, 12], untrained=(1,)),
            pair([13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23], untrained=()),
            pair([3, 4, 5, 6, 7, 8], [3, 4, 8, 9], untrained=(0, 1, 2, 4)),
        ]
    )
    found = task_of(**options).inputs(examples, np.array([2, 0]), step=0)
    wanted = {"num_items_in_batch": 2} | ({} if chosen_tokens is None else {"chosen_tokens": chosen_tokens})
    assert found == wanted


@pytest.mark.parametrize("options", [{"sft_weight": 0.5}, {"loss_type": "orpo"}])
def test_divisors_of_one_pair_whose_answers_have_one_token_or_none(options):
    examples = Examples([pair([3, 4], [3, 5], untrained=(0,)), pair([3], [4], untrained=(0,))])
    for index in (0, 1):
        found = task_of(**options).inputs(examples, np.array([index]))
        assert found == {"num_items_in_batch": 1, "chosen_tokens": 1}


def test_logits_in_half_precision_are_summed_in_float32():
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 50).mul(9).bfloat16(), torch.tensor([3, X, 7, 9])
    loss = AnswerLogProbs({"answer_lengths": torch.tensor([4]), "answer_tokens": torch.tensor([3])})
    log_probs = logits.double().log_softmax(-1)
    wanted = float(log_probs[0, 3] + log_probs[2, 7] + log_probs[3, 9])
    assert float(loss.dense(logits, labels, None)) == pytest.approx(wanted, rel=1e-6)


# Prompts of 3 and 2 tokens. The answers of a pair have different lengths; one token inside an answer has no label.
PAIRS = [
    pair([5, 9, 17, 60, 61, 62, 2], [5, 9, 17, 80, 2], untrained=(0, 1, 2)),
    pair([7, 8, 33, 34, 2], [7, 8, 90, 91, 92, 93, 94, 95, 2], untrained=(0, 1, 3)),
]
WHOLE = {
    "ld_alpha": {"beta": 0.4, "ld_alpha": 0.25, "sft_weight": 0.5},
    "orpo": {"loss_type": "orpo", "orpo_alpha": 0.6},
    "ipo": {"loss_type": "ipo"},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "sft_weight": 0.5},
}


class GivenReference:
    """The reference log-probabilities of each example's answers, by hand."""

    def __init__(self, values: list[list[float]]) -> None:
        self.values = torch.tensor(values)

    def prepare(self, *arguments: object, **keywords: object) -> None:
        pass

    def fields(self, examples: Examples, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"reference": self.values[list(indices)].flatten()}

    def log_probs(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return batch.pop("reference")


def documents_of(example: Example) -> list[tuple[list[int], list[int]]]:
    cut = example.first_length or len(example.labels)
    parts = slice(cut), slice(cut, None)
    found = [(example.input_ids[part].tolist(), example.labels[part].tolist()) for part in parts]
    return [document for document in found if document[0]]


@torch.no_grad()
def tokens_of(model: torch.nn.Module, ids: list[int], labels: list[int]) -> dict[str, Any]:
    """Return log-probabilities, entropies and hits of a sequence's labelled tokens, and of all tokens, by hand."""
    log_probs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    places = [place for place in range(len(ids) - 1) if labels[place + 1] != X]
    return {
        "log_probs": [float(log_probs[p, ids[p + 1]]) for p in places],
        "entropy": sum(float(-(log_probs[p].exp() * log_probs[p]).sum()) for p in places),
        "correct": sum(int(log_probs[p].argmax()) == ids[p + 1] for p in places),
        "all": [float(log_probs[p, ids[p + 1]]) for p in range(len(ids) - 1)],
    }


def loss_by_hand(sides: list[dict[str, Any]], reference: list[float], options: dict[str, Any]) -> float:
    """Return the loss of a pair without the cross-entropy."""
    shorter, alpha = min(len(side["log_probs"]) for side in sides), options.get("ld_alpha", 1.0)
    counts = [len(side["log_probs"]) for side in sides]
    sums = [sum(side["log_probs"][:shorter]) + alpha * sum(side["log_probs"][shorter:]) for side in sides]
    if options.get("loss_type") in ("orpo", "simpo"):
        chosen, rejected = (s / n for s, n in zip(sums, counts, strict=True))
        if options["loss_type"] == "simpo":
            return -log_sigmoid(2.0 * (chosen - rejected) - 0.5)
        return -0.6 * log_sigmoid(log_odds(chosen) - log_odds(rejected))
    ratios = [s - r for s, r in zip(sums, reference, strict=True)]
    if options.get("loss_type") == "ipo":  # beta 0.1
        return (ratios[0] / counts[0] - ratios[1] / counts[1] - 5.0) ** 2
    return -log_sigmoid(0.4 * (ratios[0] - ratios[1]))


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """transformers' own model. A larger head gives rather different log-probabilities of tokens."""
    return with_larger_head().eval()


def with_larger_head() -> torch.nn.Module:
    made = make("llama")
    made.lm_head.weight.data *= 3
    return made


@pytest.fixture(scope="module", params=["kernels", "no kernels"])
def model(request) -> torch.nn.Module:
    """The same model as `plain`, whose head computes losses of tasks."""
    made = with_larger_head()
    if request.param == "kernels":
        patch(made)
    else:
        let_head_losses_run(made, "dpo")
    return made


@pytest.fixture(scope="module")
def pairs(plain) -> list[Example]:
    """PAIRS, where a token of each prompt and of each answer is the most probable one."""
    found = []
    for example in PAIRS:
        sides = []
        for ids, labels in documents_of(example):
            for place in (1, next(place for place, label in enumerate(labels) if label != X)):
                with torch.no_grad():
                    ids[place] = int(plain(input_ids=torch.tensor([ids[:place]])).logits[0, -1].argmax())
            sides.append(ids)
        untrained = [place for place, label in enumerate(example.labels[: len(sides[0])]) if label == X]
        found.append(pair(*sides, untrained=tuple(untrained)))
    return found


@pytest.mark.parametrize("case", WHOLE)
def test_loss_and_measures_of_a_model_are_those_of_single_sequences(case, model, plain, pairs):
    """One batch of both pairs, and micro-batches of one each, which add up to the mean over both."""
    options, reference = WHOLE[case], [[-20.0, -12.0], [-10.0, -33.0]]
    alone = options.get("loss_type") in ("orpo", "simpo")
    task = task_of(None if alone else GivenReference(reference), **options)
    examples = Examples(pairs)
    batcher = Batcher(examples, False, 4, 0, True, CPU, more_fields=task.batch_fields)
    inputs = task.inputs(examples, np.array([0, 1]), step=0)
    whole = float(task.loss(model, {**batcher([np.array([0]), np.array([1])]), **inputs}).detach())
    task.measures.take()
    found = sum(float(task.loss(model, {**batcher([np.array([i])]), **inputs}).detach()) for i in (0, 1))
    sides = [[tokens_of(plain, *document) for document in documents_of(example)] for example in pairs]
    wanted = sum(loss_by_hand(*both, options) for both in zip(sides, reference, strict=True)) / 2
    chosen = [side["all" if case == "orpo" else "log_probs"] for side, _ in sides]
    weight = 1.0 if case == "orpo" else options.get("sft_weight", 0.0)
    wanted -= weight * sum(map(sum, chosen)) / sum(map(len, chosen))
    assert (found, whole) == pytest.approx((wanted, wanted), rel=1e-5)
    every, first = [side for both in sides for side in both], [both[0] for both in sides]
    means, count = means_of(task), sum(len(side["log_probs"]) for side in every)
    assert count == 4 + 2 + 2 + 6 and sum(side["correct"] for side in first) == 2
    assert means["entropy"] == pytest.approx(sum(side["entropy"] for side in every) / count, rel=1e-5)
    assert means["mean_token_accuracy"] == pytest.approx(sum(side["correct"] for side in first) / 6)


# Of three answers: log-ratios 1, -2 and 3; the second is undesirable. The last has no trained tokens.
KTO = {"loss_type": "kto", "beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}


def kto_task(reference: object, *, global_batch: int = 4, max_length: int = 16, **changes: object) -> KtoTask:
    batching = SimpleNamespace(global_batch_size=global_batch, micro_batch_size=2, eval_batch_size=3)
    plan = SimpleNamespace(
        build=SimpleNamespace(section=lambda kind: PreferenceSpec(**{**KTO, **changes})),
        batching=batching,
        data_options=SimpleNamespace(max_length=max_length),
        rows=SimpleNamespace(packed=False, length=16),
    )
    return KtoTask(None, plan, reference, CPU)


def test_loss_and_measures_of_kto_from_sums():
    task, kl = kto_task(None), tensor(0.75)
    fields = {"answer_tokens": tensor([2, 3, 1, 0])}
    sums = AnswerSums(tensor([0.0] * 4), tensor([-4, -9, -2, 0]), tensor([1.0, 3, 2, 0]), tensor([0] * 4))
    desirable = torch.tensor([True, False, True, False])
    loss = KtoHeadLoss(task, fields, tensor([-5, -7, -5, 0]), desirable, kl, 8).loss_of(sums)

    def value(weight: float, gain: float) -> float:
        return weight * (1 - 1 / (1 + exp(-0.5 * gain)))

    wanted = value(2.0, 1 - 0.75) + value(3.0, 0.75 + 2) + value(2.0, 3 - 0.75)
    assert float(loss) == pytest.approx(wanted / 8, rel=1e-12)
    assert means_of(task) == pytest.approx(
        {
            "rewards/chosen": 0.5 * (1 + 3) / 2,
            "rewards/rejected": 0.5 * -2,
            "rewards/margins": 1.0 + 1.0,
            "logps/chosen": -3.0,
            "logps/rejected": -9.0,
            "kl": 0.75,
            "entropy": 1.0,
        }
    )


def answers() -> Examples:
    """Three answers. One token inside the second has no label."""
    rows = [([5, 9, 17], [60, 61, 62], 1), ([7, 8], [33, 34, 2], 0), ([11], [90, 91, 92, 2], 1)]
    made = []
    for prompt, answer, desirable in rows:
        labels = [X] * len(prompt) + [X if token == 34 else token for token in answer]
        ids = np.array(prompt + answer, np.int32)
        made.append(Example(ids, np.array(labels, np.int32), "a:1", desirable=desirable))
    return Examples(made)


# each prompt with the answer before it; the first with the last one's
MISMATCHED = [[5, 9, 17, 90, 91, 92, 2], [7, 8, 60, 61, 62], [11, 33, 34, 2]]
UNTRAINED = [3, 2, 1]


@torch.no_grad()
def log_probs_of_mismatched(model: torch.nn.Module) -> list[float]:
    found = []
    for ids, start in zip(MISMATCHED, UNTRAINED, strict=True):
        labels = [X if place < start or token == 34 else token for place, token in enumerate(ids)]
        found.append(sum(tokens_of(model, ids, labels)["log_probs"]))
    return found


@pytest.mark.parametrize(("above", "kl"), [(2.0, 2.0), (-2.0, 0.0)])
def test_kl_is_the_mean_log_ratio_of_mismatched_answers_at_least_0(above, kl, model, plain):
    log_probs, examples = log_probs_of_mismatched(plain), answers()
    task = kto_task(GivenReference([[value - above] for value in log_probs]))
    batcher = Batcher(examples, False, 1, 0, True, CPU, more_fields=task.batch_fields)
    task.prepare(model, [batcher])
    inputs = task.inputs(examples, np.arange(3), step=0)
    assert task.inputs(examples, np.array([1]))["num_items_in_batch"] == 1
    assert inputs["num_items_in_batch"] == 3 and float(inputs["kl"]) == pytest.approx(kl, abs=1e-4)
    batch = batcher([np.array([2]), np.array([1])])
    assert batch["desirable"].tolist() == [True, False]
    loss = float(task.loss(model, {**batch, **inputs}).detach())
    own = [sum(tokens_of(plain, *documents_of(examples[i])[0])["log_probs"]) for i in (2, 1)]
    ratios = [p - (q - above) for p, q in zip(own, (log_probs[2], log_probs[1]), strict=True)]
    gains = [ratios[0] - kl, kl - ratios[1]]
    wanted = sum(w * (1 - 1 / (1 + exp(-0.5 * g))) for w, g in zip((2.0, 3.0), gains, strict=True)) / 3
    assert loss == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("global_batch", "max_length", "rows"),
    [
        (1, 16, [[5, 9, 17, 33, 34, 2], [7, 8, 60, 61, 62], [11, 90, 91, 92, 2]]),  # blocks of at least two
        (2, 16, [[5, 9, 17, 33, 34, 2], [7, 8, 60, 61, 62], [11, 90, 91, 92, 2]]),
        (3, 5, [[5, 9, 17, 90, 91], [7, 8, 60, 61, 62], [11, 33, 34, 2]]),
    ],
)
def test_mismatched_answers_come_from_blocks_of_a_global_batch(global_batch, max_length, rows, model):
    sizes = {"global_batch": global_batch, "max_length": max_length}
    task, examples = kto_task(GivenReference([[0.0]] * 3), **sizes), answers()
    seen: list[list[int]] = []
    handle = model.register_forward_pre_hook(
        lambda module, _, given: seen.extend(given["input_ids"].tolist()), with_kwargs=True
    )
    task.prepare(model, [Batcher(examples, False, 1, 0, False, CPU, more_fields=task.batch_fields)])
    task.inputs(examples, np.arange(3), step=0)
    handle.remove()
    assert sorted([token for token in row if token] for row in seen) == sorted(rows)


def test_kl_is_estimated_with_dropout_in_training_as_trl_does_and_without_in_evaluation():
    model = make("llama")
    let_head_losses_run(model, "dpo")
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    task, examples = kto_task(GivenReference([[-40.0]] * 3)), answers()
    task.prepare(model, [Batcher(examples, False, 1, 0, False, CPU, more_fields=task.batch_fields)])
    for is_training, step, wanted in ((True, 0, True), (True, None, False), (False, None, False), (False, 0, False)):
        seen.clear()
        model.train(is_training)
        task.inputs(examples, np.arange(3), step=step)
        assert set(seen) == {wanted} and model.training is is_training


def evaluated(task: PreferenceTask | KtoTask, model: torch.nn.Module, examples: Examples, world: int) -> dict:
    batcher = Batcher(examples, False, 4, 0, False, CPU, more_fields=task.batch_fields)
    task.prepare(model, [batcher])
    batching = SimpleNamespace(cp_size=1, row_ranks=world, eval_batch_size=2)
    plan = SimpleNamespace(batching=batching, rows=SimpleNamespace(packed=False, length=64))
    found = evaluate(plan, Accelerator(cpu=True), model, batcher, task, StopRequest(enabled=False))
    return {"loss": found.loss, **found.measures}


def test_ranks_evaluate_as_one_process(plain, pairs):
    """Rank 1 has neither pairs nor, of three single answers, the third."""
    model, log_probs = with_larger_head(), log_probs_of_mismatched(plain)
    let_head_losses_run(model, "dpo")
    reference = GivenReference([[value - 2.0] for value in log_probs])

    def all_tasks(world: int) -> list[dict]:
        return [
            evaluated(task_of(GivenReference([[-20.0, -12.0], [-10.0, -33.0]]), sft_weight=0.5), model, both, world),
            evaluated(task_of(None, loss_type="orpo"), model, both, world),
            evaluated(kto_task(reference), model, answers(), world),
        ]

    both = Examples(pairs)
    AcceleratorState._reset_state(reset_partial_state=True)
    alone = all_tasks(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert alone[2]["kl"] == pytest.approx(2.0, abs=1e-4)
    assert alone[0]["mean_token_accuracy"] == pytest.approx(2 / 6)
    own = [sum(tokens_of(plain, *documents_of(example)[0])["log_probs"]) for example in answers()]
    gains = [0.5 * (p - q + 2.0) for p, q in zip(own, log_probs, strict=True)]
    assert alone[2]["rewards/margins"] == pytest.approx((gains[0] + gains[2]) / 2 - gains[1], rel=1e-4)
    for found in on_ranks(2, lambda rank: all_tasks(2)):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
