"""Batches of scores against plain PyTorch: positions, divisors, measures."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from support.forked_ranks import on_ranks
from support.models import tiny_models

import ligertune.attention.packed_documents  # noqa: F401  registers per_document
from ligertune.data.batching.collate import Batcher
from ligertune.data.examples import Example, Examples
from ligertune.features.scores.document_scores import last_tokens, patch_scores
from ligertune.features.scores.recipe import ClassificationSpec, RewardSpec
from ligertune.features.scores.score_tasks import ClassificationTask, RewardTask, ScoreTask
from ligertune.patching.packing_checks import install_packing_checks

PAD, CPU = 0, torch.device("cpu")
# (tokens, place of the score): the padding token inside, at the beginning and at the end of a text
TEXTS = [([5, 0, 7, 8, 0, 9], 5), ([0, 0, 11, 12], 3), ([13, 14, 0, 0], 1), ([15, 16, 17, 18, 19, 20, 21], 6)]
NUMBERS = {"single": [(1,), (0,), (2,), (1,)], "multi": [(0, 2), (), (1,), (0, 1, 2)],
           "regression": [(0.5, -1.0, 2.0), (0.0, 0.0, 1.0), (3.0, -2.0, 0.1), (-1.0, 1.5, 0.2)]}  # fmt: skip
PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "regression": "regression"}
PARTS = [[np.array([3]), np.array([0])], [np.array([1])], [np.array([2])], []]  # micro-batches; a rank without rows


def example(ids: list[int], targets: tuple, first_length: int = 0) -> Example:
    tokens = np.array(ids, dtype=np.int32)
    return Example(tokens, tokens, "a:1", targets=targets, first_length=first_length)


def scorer(num_labels: int) -> torch.nn.Module:
    config = tiny_models.config_of("llama", num_labels=num_labels, num_hidden_layers=1, pad_token_id=None)
    model = tiny_models.random_model(transformers.AutoModelForSequenceClassification, config).eval()
    with torch.no_grad():
        model.score.weight.mul_(8.0)  # scores of about 1
    return model


def scores_by_hand(model: torch.nn.Module) -> torch.Tensor:
    """Return the scores (texts, labels) of each text alone: the head on the hidden state at the written place."""
    with torch.no_grad():
        hidden = [model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, place] for ids, place in TEXTS]
        return model.score(torch.stack(hidden)).double()


def run(task: ScoreTask, model: torch.nn.Module, examples: Examples, parts: list, *, packed: bool) -> float:
    """Return the loss of all examples in these micro-batches."""
    model = copy.deepcopy(model)
    if packed:
        model.config._attn_implementation = "per_document"
        install_packing_checks(model)
    patch_scores(model)
    batcher = Batcher(examples, packed, 8, PAD, False, CPU, more_fields=task.batch_fields)
    task.prepare(model, [batcher])
    assert model.config.pad_token_id == PAD  # by which the saved model finds the last token
    given = task.inputs(examples, np.arange(len(examples)), step=0)
    losses = [task.loss(model, {**batcher(rows), **given}) for rows in parts]
    assert all(loss.dtype is torch.float32 for loss in losses)
    return float(sum(losses).detach())


def classification(problem: str) -> ClassificationTask:
    return ClassificationTask(None, ClassificationSpec(problem_type=PROBLEMS[problem], num_labels=3), CPU)


def loss_by_hand(problem: str, z: np.ndarray) -> float:
    losses = []
    for scores, given in zip(z, NUMBERS[problem], strict=True):
        if problem == "single":
            losses.append(np.log(np.exp(scores).sum()) - scores[given[0]])
        elif problem == "regression":
            losses.append(np.mean((scores - np.array(given)) ** 2))
        else:
            true = np.isin(np.arange(3), given)
            losses.append(np.mean(np.where(true, np.log1p(np.exp(-scores)), np.log1p(np.exp(scores)))))
    return float(np.mean(losses))


def measures_by_hand(problem: str, z: np.ndarray) -> dict[str, float]:
    if problem == "regression":
        return {"mean_absolute_error": float(np.abs(z - np.array(NUMBERS[problem])).mean())}
    true = np.array([np.isin(np.arange(3), given) for given in NUMBERS[problem]])
    predicted = z > 0 if problem == "multi" else np.arange(3) == z.argmax(1)[:, None]
    hits, wrong = (true & predicted).sum(0), (true ^ predicted).sum(0)
    each = [2 * h / (2 * h + w) if h + w else None for h, w in zip(hits, wrong, strict=True)]
    found = {"accuracy": float((true == predicted).all(1).mean())}
    if problem == "single":
        return {**found, "f1_macro": float(np.mean([f for f in each if f is not None]))}
    micro = 2 * hits.sum() / (2 * hits.sum() + wrong.sum())
    return {**found, "f1_macro": float(np.mean([f or 0.0 for f in each])), "f1_micro": float(micro)}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_micro_batches_of_texts_add_up_to_the_definition(problem, packed):
    model, task = scorer(3), classification(problem)
    examples = Examples([example(ids, given) for (ids, _), given in zip(TEXTS, NUMBERS[problem], strict=True)])
    z = scores_by_hand(model).numpy()
    assert run(task, model, examples, PARTS, packed=packed) == pytest.approx(loss_by_hand(problem, z), rel=1e-5)
    assert task.measures.means(task.measures.take()) == pytest.approx(measures_by_hand(problem, z), rel=1e-5)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_micro_batches_of_pairs_add_up_to_the_definition(packed):
    """(text 0, text 1) with a margin, (text 2, text 3), and both the other way round."""
    margins, center = [(0.75,), (), (0.25,), ()], 0.05
    orders = [(0, 1), (2, 3), (1, 0), (3, 2)]
    model = scorer(1)
    examples = Examples(
        [example(TEXTS[a][0] + TEXTS[b][0], m, len(TEXTS[a][0])) for (a, b), m in zip(orders, margins, strict=True)]
    )
    r = scores_by_hand(model)[:, 0].numpy()
    losses = [
        np.log1p(np.exp(-(r[a] - r[b] - (m[0] if m else 0.0)))) + center * (r[a] + r[b]) ** 2
        for (a, b), m in zip(orders, margins, strict=True)
    ]
    task = RewardTask(None, RewardSpec(center_rewards_coefficient=center), CPU)
    parts = [[np.array([3]), np.array([0])], [np.array([1]), np.array([2])], []]
    assert run(task, model, examples, parts, packed=packed) == pytest.approx(float(np.mean(losses)), rel=1e-5)
    groups = [[r[i] for pair in (3, 0) for i in orders[pair]], [r[i] for pair in (1, 2) for i in orders[pair]]]
    assert task.measures.means(task.measures.take()) == pytest.approx(
        {
            "min_reward": np.mean([min(group) for group in groups]),
            "mean_reward": np.mean(r),
            "max_reward": np.mean([max(group) for group in groups]),
            "accuracy": 0.5,
            "margin": 0.0,
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_losses_of_bfloat16_scores_are_computed_in_float32():
    model, task = scorer(3).bfloat16(), classification("single")
    examples = Examples([example(ids, given) for (ids, _), given in zip(TEXTS, NUMBERS["single"], strict=True)])
    found = run(task, model, examples, PARTS, packed=False)
    z = scores_by_hand(model).numpy()  # rounded to bfloat16
    assert found == pytest.approx(loss_by_hand("single", z), rel=2e-3)


def test_the_place_of_a_score_is_that_of_the_last_token_which_is_no_padding():
    """Also with padding on the left, and in a document of padding alone."""
    ids = torch.tensor([[0, 0, 4, 5], [4, 0, 5, 0], [0, 4, 0, 0], [0, 0, 0, 0]])
    assert last_tokens(ids, [4] * 4, pad_token_id=0).tolist() == [3, 6, 9, 12]
    assert last_tokens(ids.flatten()[None], [6, 10], pad_token_id=0).tolist() == [4, 9]


def test_a_step_is_divided_by_examples_and_not_by_sequences():
    examples = Examples([example([4, 5, 6], (), 1)] * 5)
    for task in (classification("single"), RewardTask(None, RewardSpec(), CPU)):
        assert task.inputs(examples, np.array([0, 2, 4])) == {"num_items_in_batch": 3}


def test_labels_of_several_kinds_are_predicted_above_a_probability_of_one_half():
    """A score of 0.2 is a probability of 0.55."""
    task = classification("multi")
    scores, targets = torch.tensor([[0.2, -0.2, 3.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    task.loss_of_scores(scores, targets, torch.tensor([True]), 1)
    means = task.measures.means(task.measures.take())
    assert (means["accuracy"], means["f1_micro"]) == (1.0, 1.0)


def test_two_ranks_have_the_measures_of_all_texts():
    """Counts are summed over ranks: a mean of two F1 would be another number. Rank 1 has one text, and none."""
    model = scorer(3)
    z = scores_by_hand(model).numpy()
    examples = Examples([example(ids, given) for (ids, _), given in zip(TEXTS, NUMBERS["single"], strict=True)])
    parts = [[[np.array([3]), np.array([0])], [np.array([1])]], [[np.array([2])], []]]

    def one(rank: int) -> tuple[float, dict[str, float]]:
        dist.init_process_group("gloo")
        task = classification("single")
        loss = run(task, model, examples, parts[rank], packed=True)
        taken = task.measures.take()
        dist.all_reduce(taken)
        return loss, task.measures.means(taken)

    found = on_ranks(2, one)
    assert sum(loss for loss, _ in found) == pytest.approx(loss_by_hand("single", z), rel=1e-5)
    assert found[0][1] == found[1][1] == pytest.approx(measures_by_hand("single", z), rel=1e-5)
