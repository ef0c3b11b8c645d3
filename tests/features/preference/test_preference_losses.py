"""Losses of preference optimisation in the output head, and their gradients, against plain torch in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ligertune_kernels import LinearLora

from ligertune.data.batching.collate import collate, collate_packed
from ligertune.data.examples import Example
from ligertune.features.preference.answers import answer_fields
from ligertune.features.preference.preference_losses import PAIR_LOSSES
from ligertune.features.preference.preference_task import PairHeadLoss, PreferenceTask
from ligertune.features.preference.recipe import PreferenceSpec
from ligertune.features.preference.reference import AdapterReference

V, E, R, X = 11, 6, 2, -100
# (length, first trained token) of each answer: pairs of unequal lengths; one token; one empty answer; an untrained pair
ANSWERS = [(7, 3), (9, 3), (4, 3), (6, 2), (5, 5), (8, 2), (3, 3), (4, 4)]
COUNTED = 3  # pairs with trained tokens
OPTIONS = [
    {"loss_type": "sigmoid"},
    {"loss_type": "sigmoid", "label_smoothing": 0.2, "length_normalization": True},
    {"loss_type": "sigmoid", "ld_alpha": 0.25, "sft_weight": 0.7},
    {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "hinge", "beta": 0.5},
    {"loss_type": "ipo", "ld_alpha": 0.0},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "sft_weight": 0.2},
]
ORPO = {"loss_type": "orpo", "orpo_alpha": 0.4}
HEADS = [{}, {"softcap": 2.0, "logit_scale": 0.7}, {"bias": True, "lora": True}]


def example(length: int, first: int, generator: np.random.Generator) -> Example:
    ids = generator.integers(0, V, length).astype(np.int32)
    return Example(ids, np.where(np.arange(length) < first, X, ids).astype(np.int32), "a:1")


def head_of(seed: int, positions: int, **kind: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"hidden": (positions, E), "weight": (V, E)}
    shapes |= {"bias": (V,)} if kind.get("bias") else {}
    shapes |= {"lora_a": (R, E), "lora_b": (V, R)} if kind.get("lora") else {}
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


def logits_of(head: dict[str, torch.Tensor], **kind: object) -> torch.Tensor:
    logits = F.linear(head["hidden"], head["weight"], head.get("bias"))
    if "lora_a" in head:
        logits = logits + 0.5 * head["hidden"] @ head["lora_a"].T @ head["lora_b"].T
    logits = logits * kind.get("logit_scale", 1.0)
    cap = kind.get("softcap")
    return logits if cap is None else cap * torch.tanh(logits / cap)


def loss_of(chosen: torch.Tensor, rejected: torch.Tensor, options: PreferenceSpec) -> torch.Tensor:
    beta, e, margin = options.beta, options.label_smoothing, chosen - rejected
    right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    return {
        "sigmoid": lambda: -(1 - e) * right - e * wrong,
        "robust": lambda: (-(1 - e) * right + e * wrong) / (1 - 2 * e),
        "hinge": lambda: (1 - beta * margin).clamp(min=0),
        "ipo": lambda: (margin - 1 / (2 * beta)).square(),
        "simpo": lambda: -F.logsigmoid(beta * (margin - options.simpo_gamma / beta)),
        "orpo": lambda: (
            -options.orpo_alpha * F.logsigmoid(margin - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp()))
        ),
    }[options.loss_type]()


def written_out(logits, labels, bounds, reference, options: PreferenceSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of all pairs, one token after another, and measures."""
    losses, nll, chosen_tokens, rewards, zero = [], 0.0, 0, [], logits.new_zeros(())
    without_reference = options.loss_type in ("simpo", "orpo")
    for pair in range(len(bounds) // 2):
        answers = []
        for begin, end in bounds[2 * pair : 2 * pair + 2]:
            places = [p for p in range(begin, end - 1) if labels[p + 1] != X]
            answers.append([logits[p].log_softmax(-1)[labels[p + 1]] for p in places])
        if not any(answers):
            continue
        shorter, sums = min(map(len, answers)), []
        alpha = 1.0 if options.ld_alpha is None else options.ld_alpha
        for side, answer in enumerate(answers):
            log_p = sum((t * (1.0 if i < shorter else alpha) for i, t in enumerate(answer)), zero)
            sums.append(log_p if without_reference else log_p - reference[2 * pair + side])
        by_token = options.length_normalization or options.loss_type in ("ipo", "simpo", "orpo")
        per_token = [s / max(len(answer), 1) for s, answer in zip(sums, answers, strict=True)]
        scores = per_token if by_token else sums
        nll, chosen_tokens = nll - sum(answers[0], zero), chosen_tokens + len(answers[0])
        losses.append(loss_of(*scores, options))
        weight = options.orpo_alpha if options.loss_type == "orpo" else options.beta
        rewards.append([weight * float(score.detach()) for score in (per_token if without_reference else sums)])
    sft = 1.0 if options.loss_type == "orpo" else options.sft_weight
    measures = {
        "rewards/chosen": np.mean([chosen for chosen, _ in rewards]),
        "rewards/accuracies": np.mean([chosen > rejected for chosen, rejected in rewards]),
    }
    return sum(losses) / len(losses) + sft * nll / chosen_tokens, measures


def check(options: dict, kind: dict, *, packed: bool, answers: list[tuple[int, int]], dense: bool = False) -> None:
    options, generator = PreferenceSpec(**options), np.random.default_rng(3)
    examples = [example(*answer, generator) for answer in answers]
    batch = (collate_packed if packed else collate)(examples, pad_token_id=0, pad_to_multiple_of=4)
    labels = batch["labels"]
    starts = np.cumsum([0, *batch["document_lengths"]]) if packed else np.arange(len(answers) + 1) * labels.shape[1]
    bounds = [(int(s), int(s) + len(e.labels)) for s, e in zip(starts, examples, strict=False)]
    head = head_of(1, labels.numel(), **kind)
    reference = torch.randn(len(answers), dtype=torch.float64) - 8.0
    expected, measures = written_out(logits_of(head, **kind), labels.flatten(), bounds, reference, options)
    wanted = torch.autograd.grad(expected, list(head.values()))

    task = PreferenceTask(None, options, AdapterReference(), torch.device("cpu"))
    fields = answer_fields(batch, len(answers), ld_alpha=options.ld_alpha)
    used = reference if PAIR_LOSSES[options.loss_type].uses_reference else None
    chosen_tokens = sum(int((e.labels[1:] != X).sum()) for e in examples[::2])
    divisors = {"num_items_in_batch": min(COUNTED, len(answers) // 2), "chosen_tokens": chosen_tokens}
    loss = PairHeadLoss(task, fields, used, divisors)
    target = F.pad(labels, (0, 1), value=X)[:, 1:].flatten()
    if dense:
        found = loss.dense(logits_of(head, **kind), target, None)
    else:
        given = {"ignore_index": X, "labelled_rows": None, "num_items_in_batch": 3, "logit_scale": 1.0, "softcap": None}
        given |= {name: kind[name] for name in ("softcap", "logit_scale") if name in kind}
        given |= {"lora": LinearLora(head["lora_a"], head["lora_b"], 0.5)} if "lora_a" in head else {}
        found = loss.fused(head["hidden"], head["weight"], head.get("bias"), target, given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for gradient, other in zip(torch.autograd.grad(found, list(head.values())), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)
    means = task.measures.means(task.measures.take())
    assert {name: means[name] for name in measures} == pytest.approx(measures, rel=1e-5)
    assert 0 < means["entropy"] < np.log(V)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", HEADS, ids=["plain", "capped", "lora"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_losses_and_gradients_are_those_of_plain_torch(options, kind, packed):
    check(options, kind, packed=packed, answers=ANSWERS)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_orpo_is_that_of_plain_torch(packed):
    """Without empty answers, whose odds are infinite."""
    check(ORPO, HEADS[1], packed=packed, answers=ANSWERS[:4])


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[5]], ids=["ld-sft", "ipo"])
def test_losses_from_logits_are_the_same(options):
    check(options, {}, packed=True, answers=ANSWERS, dense=True)


@pytest.mark.parametrize("options", [*OPTIONS, ORPO], ids=lambda options: "-".join(map(str, options.values())))
def test_an_untrained_pair_has_no_loss_and_no_gradient(options):
    """A rank without rows computes one. The odds of its empty answers are infinite."""
    task = PreferenceTask(None, PreferenceSpec(**options), AdapterReference(), torch.device("cpu"))
    batch = collate([example(4, 4, np.random.default_rng(0))] * 2, pad_token_id=0)
    fields = answer_fields(batch, 2, ld_alpha=options.get("ld_alpha"))
    used = -torch.ones(2) if PAIR_LOSSES[options["loss_type"]].uses_reference else None
    loss = PairHeadLoss(task, fields, used, {"num_items_in_batch": 4, "chosen_tokens": 5})
    logits = torch.zeros(8, V, requires_grad=True)
    found = loss.dense(logits, torch.full((8,), X), None)
    found.backward()
    assert found == 0 and not logits.grad.any()
    assert task.measures.means(task.measures.take()) == {}
