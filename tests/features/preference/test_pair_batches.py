"""Batches of pairs on a tiny model against TRL's definitions, written out in float64."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.tasks.answer_truth import X, answer, batcher_of, computing, pair, tiny, tokens_of
from torch.nn.functional import logsigmoid

from ligertune.data.examples import Examples
from ligertune.features.preference.answers import AnswerLogProbs, AnswerSums, train_on_chosen_prompts
from ligertune.features.preference.preference_task import PreferenceTask
from ligertune.features.preference.recipe import PreferenceSpec

# Two turns, so an untrained token stands between trained ones; a long rejected answer; a long prompt.
PAIRS = [
    pair(answer([3, 5, 7, 9, 11, 13, 2], [2, 3, 5, 6]), answer([3, 5, 8, 6, 2], [2, 3, 4])),
    pair(answer([4, 6, 17, 2], [2, 3]), answer([4, 6, 21, 22, 23, 24, 25, 2], [2, 3, 4, 5, 6, 7])),
    pair(answer([9, 8, 7, 6, 5, 31, 2], [5, 6]), answer([9, 8, 7, 6, 5, 33, 34, 2], [5, 6, 7])),
]
REFERENCE = np.array([[-9.0, -8.0], [-7.5, -20.0], [-9.5, -11.5]], dtype=np.float32)
CASES = {
    "sigmoid": {"beta": 0.4, "label_smoothing": 0.1},
    "ld": {"beta": 0.4, "ld_alpha": 0.3, "sft_weight": 0.7},
    "normalised": {"beta": 2.0, "length_normalization": True},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "hinge": {"loss_type": "hinge", "beta": 0.3},
    "ipo": {"loss_type": "ipo", "beta": 0.5, "sft_weight": 0.2},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2},
    "orpo": {"loss_type": "orpo", "orpo_alpha": 0.6},
}
WAYS = {"packed": (True, True), "padded": (False, True), "logits": (False, False)}  # packed, kernels


class GivenReference:
    """Reference log-probabilities by hand."""

    def fields(self, examples, indices):
        return {"given": torch.from_numpy(REFERENCE[list(indices)]).flatten()}

    def log_probs(self, model, batch):
        return batch.pop("given")


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """The model without our kernels. The prompt of the last pair is what it would write, so it has hits there."""
    model = tiny()
    ids = [9]
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    for start in (0, PAIRS[2].first_length):
        PAIRS[2].input_ids[start : start + 5] = ids
    return model


def loss_of_pair(s: list[torch.Tensor], options: PreferenceSpec) -> torch.Tensor:
    """s: scores of the chosen and of the rejected answer."""
    beta, e, m = options.beta, options.label_smoothing, s[0] - s[1]
    if options.loss_type == "sigmoid":
        return -(1 - e) * logsigmoid(beta * m) - e * logsigmoid(-beta * m)
    if options.loss_type == "robust":
        return (-(1 - e) * logsigmoid(beta * m) + e * logsigmoid(-beta * m)) / (1 - 2 * e)
    if options.loss_type == "hinge":
        return torch.relu(1 - beta * m)
    if options.loss_type == "ipo":
        return (m - 1 / (2 * beta)) ** 2
    if options.loss_type == "simpo":
        return -logsigmoid(beta * m - options.simpo_gamma)
    odds = [torch.log(x.exp() / (1 - x.exp())) for x in s]
    return -options.orpo_alpha * logsigmoid(odds[0] - odds[1])


def defined(model: torch.nn.Module, options: PreferenceSpec) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss and the measures of PAIRS by definition."""
    kind, losses, nll, counted = options.loss_type, [], 0.0, 0
    found: dict[str, list[float]] = {"chosen": [], "rejected": [], "logp chosen": [], "logp rejected": []}
    entropies, hits = [], []
    for number, example in enumerate(PAIRS):
        sides = [tokens_of(model, side) for side in example.documents()]
        lengths = [len(side.log_probs) for side in sides]
        alpha = 1.0 if options.ld_alpha is None else options.ld_alpha
        sums = [(s.log_probs[: min(lengths)].sum() + alpha * s.log_probs[min(lengths) :].sum()) for s in sides]
        given = [0.0, 0.0] if kind in ("simpo", "orpo") else REFERENCE[number].tolist()
        whole = [log_p - ref for log_p, ref in zip(sums, given, strict=True)]
        each = [score / length for score, length in zip(whole, lengths, strict=True)]
        per_token = kind in ("simpo", "orpo", "ipo") or options.length_normalization
        losses.append(loss_of_pair(each if per_token else whole, options))
        rewarded = [score.detach() for score in (each if kind in ("simpo", "orpo") else whole)]
        weight = options.orpo_alpha if kind == "orpo" else options.beta
        for side, name in enumerate(("chosen", "rejected")):
            found[name].append(weight * float(rewarded[side]))
            found[f"logp {name}"].append(float(sums[side].detach()))
            entropies += sides[side].entropy.tolist()
        hits += sides[0].hits.tolist()
        chosen = sides[0].of_all if kind == "orpo" else sides[0].log_probs
        nll, counted = nll - chosen.sum(), counted + len(chosen)
    margins = np.array(found["chosen"]) - np.array(found["rejected"])
    sft = 1.0 if kind == "orpo" else options.sft_weight
    return sum(losses) / 3 + sft * nll / counted, {
        "rewards/chosen": np.mean(found["chosen"]),
        "rewards/rejected": np.mean(found["rejected"]),
        "rewards/accuracies": np.mean(margins > 0),
        "rewards/margins": np.mean(margins),
        "logps/chosen": np.mean(found["logp chosen"]),
        "logps/rejected": np.mean(found["logp rejected"]),
        "entropy": np.mean(entropies),
        "mean_token_accuracy": np.mean(hits),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_add_up_to_the_definition(case, way, plain):
    """Two pairs, one pair, and the batch of a rank without rows; loss, gradients and measures."""
    options, (packed, kernels) = PreferenceSpec(**CASES[case]), WAYS[way]
    wanted, measures = defined(plain, options)
    weights = [plain.lm_head.weight, plain.model.embed_tokens.weight]
    wanted_gradients = torch.autograd.grad(wanted, weights)
    model = computing(copy.deepcopy(plain), packed=packed, kernels=kernels)
    reference = None if options.loss_type in ("simpo", "orpo") else GivenReference()
    task = PreferenceTask(None, options, reference, torch.device("cpu"))
    examples = Examples(PAIRS)
    batcher = batcher_of(examples, packed=packed, task=task)
    given = task.inputs(examples, np.arange(3), step=0)
    parts = ([np.array([0]), np.array([2])], [np.array([1])], [])
    loss = sum(task.loss(model, {**batcher(rows), **given}) for rows in parts)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    found = torch.autograd.grad(loss, [model.lm_head.weight, model.model.embed_tokens.weight])
    for gradient, right in zip(found, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)
    assert task.measures.means(task.measures.take()) == pytest.approx(measures, rel=1e-5)


def test_equal_rewards_are_no_right_order_and_untrained_pairs_do_not_count():
    """Both answers of the first pair have the log-probability -3; the second pair has no trained token."""
    task = PreferenceTask(None, PreferenceSpec(), GivenReference(), torch.device("cpu"))
    sums = torch.tensor([-3.0, -3.0, 0.0, 0.0])
    found = AnswerSums(weighted=sums, plain=sums, entropy=torch.ones(4), correct=torch.tensor([1.0, 0, 0, 0]))
    tokens = torch.tensor([2.0, 2.0, 0.0, 0.0])
    task.loss_of_pairs(found, tokens, torch.full((4,), -4.0), {"num_items_in_batch": 1})
    means = task.measures.means(task.measures.take())
    assert means["rewards/accuracies"] == 0 and means["rewards/chosen"] == pytest.approx(0.1)
    assert means["logps/rejected"] == -3 and means["mean_token_accuracy"] == 0.5


def test_log_probabilities_from_bfloat16_logits_are_summed_in_float32():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.tensor([4, X, 2, 9, X, 0])
    fields = {"answer_lengths": torch.tensor([4, 2]), "answer_tokens": torch.tensor([3.0, 1.0])}
    loss = AnswerLogProbs(fields, statistics=True)
    loss.dense(logits, labels, None)
    log_p = logits.double().log_softmax(-1)
    each = [float(log_p[place, label]) for place, label in enumerate(labels.tolist()) if label != X]
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert loss.sums.plain.tolist() == pytest.approx([sum(each[:3]), each[3]], rel=1e-6)
    assert loss.sums.entropy.tolist() == pytest.approx([float(entropy[[0, 2, 3]].sum()), float(entropy[5])], rel=1e-5)


def test_the_divisors_of_a_global_batch_by_hand():
    """Chosen answers have 4, 2 and 2 labels. Of chosen sequences, all tokens but the first are predicted: 6, 3, 6."""
    examples = Examples(PAIRS)

    def inputs(**options: object) -> SimpleNamespace:
        task = PreferenceTask(None, PreferenceSpec(**options), None, torch.device("cpu"))
        return SimpleNamespace(**task.inputs(examples, np.array([2, 0])))

    assert vars(inputs()) == {"num_items_in_batch": 2}
    assert vars(inputs(sft_weight=0.1)) == {"num_items_in_batch": 2, "chosen_tokens": 6}
    assert vars(inputs(loss_type="orpo")) == {"num_items_in_batch": 2, "chosen_tokens": 12}


def test_orpo_computes_the_rows_of_the_chosen_prompt():
    """Of 512 tokens, 8 rows predict answers; the cross-entropy of the chosen text needs 255."""
    labels = torch.full((1, 512), -100)
    labels[0, 252:256], labels[0, 508:] = 7, 8
    batch = {"input_ids": torch.arange(512)[None], "labels": labels, "labelled_rows": torch.tensor([0])}
    fields = {"answer_lengths": torch.tensor([256, 256]), "answer_tokens": torch.tensor([4, 4])}
    found = train_on_chosen_prompts(batch, fields)
    assert {*range(255), *range(507, 511)} <= set(found["labelled_rows"].tolist())
    assert found["labels"][0, 1:256].tolist() == list(range(1, 256))
    assert found["token_weights"].nonzero().flatten().tolist() == [*range(251, 255), *range(507, 511)]
