"""Places, losses and measures of scores against numbers by hand."""

from math import exp, log
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.forked_ranks import on_ranks
from support.models import tiny_models

import ligertune.attention.packed_documents  # noqa: F401  registers per_document
from ligertune.data.batching.collate import Batcher
from ligertune.data.examples import Example, Examples
from ligertune.errors import UserError
from ligertune.features.scores.document_scores import check_scores, last_tokens, patch_scores
from ligertune.features.scores.recipe import ClassificationSpec, RewardSpec
from ligertune.features.scores.score_tasks import ClassificationTask, RewardTask, ScoreTask
from ligertune.launcher.signals import StopRequest
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.training.evaluate import evaluate

CPU, PAD = torch.device("cpu"), 0
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


def classification(problem_type: str, num_labels: int) -> ClassificationTask:
    return ClassificationTask(None, ClassificationSpec(problem_type=problem_type, num_labels=num_labels), CPU)


def reward(**options: object) -> RewardTask:
    return RewardTask(None, RewardSpec(**options), CPU)


def means_of(task: ScoreTask) -> dict[str, float]:
    return task.measures.means(task.measures.take())


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def counted(*flags: bool) -> torch.Tensor:
    return torch.tensor(flags)


@pytest.mark.parametrize(
    ("ids", "lengths", "pad", "places"),
    [
        ([5, 6, 7, 8, 9], [3, 2], 0, [2, 4]),
        ([5, 0, 7, 8, 0], [3, 2], 0, [2, 3]),  # the padding token inside a text, and at its end
        ([5, 0, 0, 7, 0, 0], [4, 2], 0, [3, 4]),  # a text of padding tokens is read at its first
        ([0, 0, 7, 0, 0, 8, 0, 0], [4, 4], 0, [2, 5]),
        ([5, 6, 0, 7, 2, 2], [3, 2], 2, [2, 3]),  # another padding token; what follows the texts is padding
    ],
)
def test_a_text_is_scored_at_its_last_token_that_is_not_the_padding_token(ids, lengths, pad, places):
    assert last_tokens(torch.tensor([ids]), lengths, pad_token_id=pad).tolist() == places


def test_losses_and_measures_of_one_label_per_text():
    """Of five texts, the last does not count. Label 1: two right, one missed, one given wrongly."""
    scores = torch.tensor([[0.0, 2.0], [-1.0, 1.0], [3.0, 0.0], [0.0, 0.5], [9.0, 0.0]])
    task = classification(SINGLE, 2)
    loss = task.loss_of_scores(
        scores, task.target_tensor([(1,), (1,), (1,), (0,), (1,)]), counted(*[True] * 4, False), 8
    )
    wanted = sum(log(1 + exp(-gap)) for gap in (2.0, 2.0, -3.0, -0.5)) / 8
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    wanted = {"accuracy": 2 / 4, "f1": 4 / 6, "f1_macro": (4 / 6 + 0) / 2}
    assert means_of(task) == pytest.approx(wanted)


def test_the_f1_of_one_label_per_text_leaves_out_labels_that_no_text_has_or_is_given():
    """Labels 0 and 2 of four. Two batches are one confusion."""
    task = classification(SINGLE, 4)
    right, wrong = torch.eye(4)[[0, 2, 2]] * 5, torch.eye(4)[[2]] * 5
    task.loss_of_scores(right, torch.tensor([0, 2, 2]), counted(True, True, True), 4)
    task.loss_of_scores(wrong, torch.tensor([0]), counted(True), 4)
    assert means_of(task) == pytest.approx({"accuracy": 3 / 4, "f1_macro": (2 / 3 + 4 / 5) / 2})


def test_losses_and_measures_of_several_labels_per_text():
    """A label is given from a score of 0 on, which is a probability of one half."""
    scores = torch.tensor([[0.25, -1.0, 2.0], [-0.5, 0.3, -2.0], [0.1, 0.2, -0.4], [9.0, 9.0, 9.0]])
    task = classification(MULTI, 3)
    targets = task.target_tensor([(0, 2), (), (1,), ()])
    assert targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]]
    loss = task.loss_of_scores(scores, targets, counted(True, True, True, False), 6)
    each = [
        -log(sigmoid(x) if y else 1 - sigmoid(x))
        for row, true in zip(scores[:3].tolist(), targets[:3].tolist(), strict=True)
        for x, y in zip(row, true, strict=True)
    ]
    assert float(loss) == pytest.approx(sum(each) / 3 / 6, rel=1e-5)
    # (right, given wrongly, missed) of each label: (1, 1, 0), (1, 1, 0), (1, 0, 0)
    wanted = {"accuracy": 1 / 3, "f1_macro": (2 / 3 + 2 / 3 + 1) / 3, "f1_micro": 6 / 8}
    assert means_of(task) == pytest.approx(wanted)


def test_the_f1_counts_missed_labels():
    task = classification(MULTI, 2)
    scores, targets = torch.tensor([[1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    task.loss_of_scores(scores, targets, counted(True, True), 2)
    assert means_of(task) == pytest.approx({"accuracy": 0.0, "f1_macro": 1 / 3, "f1_micro": 1 / 2})


def test_losses_and_measures_of_numbers():
    task = classification(REGRESSION, 2)
    scores = torch.tensor([[1.0, 2.0], [0.0, -1.0], [50.0, 0.0]])
    targets = task.target_tensor([(0.5, 4.0), (3.0, -1.0), (0.0, 0.0)])
    loss = task.loss_of_scores(scores, targets, counted(True, True, False), 5)
    assert float(loss) == pytest.approx(((0.25 + 4) / 2 + (9 + 0) / 2) / 5)
    assert means_of(task) == pytest.approx({"mean_absolute_error": ((0.5 + 2) / 2 + 3 / 2) / 2})


def test_losses_and_measures_of_rewards():
    """Equal rewards are not right. Each micro-batch has its smallest and largest reward; one counts no pair."""
    task = reward(center_rewards_coefficient=0.1)
    targets = task.target_tensor([(0.5,), (), (2.0,)])
    assert targets.tolist() == [0.5, 0.0, 2.0]
    pairs = torch.tensor([[2.0], [-1.0], [0.25], [0.25], [4.0], [3.0]])
    loss = task.loss_of_scores(pairs, targets, counted(True, True, True), 4)
    losses = [-log(sigmoid(gap)) + 0.1 * total**2 for gap, total in ((2.5, 1.0), (0.0, 0.5), (-1.0, 7.0))]
    assert float(loss) == pytest.approx(sum(losses) / 4, rel=1e-6)
    last = task.loss_of_scores(torch.tensor([[-3.0], [1.0]]), torch.tensor([0.0]), counted(True), 4)
    assert float(last) == pytest.approx((-log(sigmoid(-4.0)) + 0.1 * 4) / 4, rel=1e-6)
    assert float(task.loss_of_scores(torch.tensor([[70.0], [-90.0]]), targets[:1], counted(False), 4)) == 0.0
    assert means_of(task) == pytest.approx(
        {
            "min_reward": (-1.0 - 3.0) / 2,
            "max_reward": (4.0 + 1.0) / 2,
            "mean_reward": (2 - 1 + 0.5 + 7 - 2) / 8,
            "accuracy": 2 / 4,
            "margin": (3 + 0 + 1 - 4) / 4,
        }
    )


def test_margins_are_optional_and_rewards_are_centred_only_if_the_recipe_says_so():
    task = reward()
    assert task.target_tensor([(), (1.5,)]).tolist() == [0.0, 1.5]
    loss = task.loss_of_scores(torch.tensor([[3.0], [2.0]]), task.target_tensor([()]), counted(True), 1)
    assert float(loss) == pytest.approx(-log(sigmoid(1.0)), rel=1e-6)


# Whole models: texts with the padding token inside and at the end.
TEXTS = [[9, 4, 0, 7], [5, 6], [8, 0, 3, 3, 0], [4, 4, 4], [11, 12, 13, 14, 15, 16]]
AT = [3, 1, 3, 2, 5]  # the place of each text's score


def texts(targets: list[tuple[float, ...]]) -> Examples:
    ids = [np.array(text, np.int32) for text in TEXTS]
    return Examples(Example(row, row, "a:1", targets=target) for row, target in zip(ids, targets, strict=True))


def pairs(targets: list[tuple[float, ...]]) -> Examples:
    """Return pairs of a text and the one after it."""
    made = []
    for target, (number, chosen) in zip(targets, enumerate(TEXTS), strict=False):
        ids = np.array(chosen + TEXTS[number + 1], np.int32)
        made.append(Example(ids, ids, "a:1", (), len(chosen), -1, target))
    return Examples(made)


TASKS = {
    SINGLE: (lambda: classification(SINGLE, 3), texts, [(0,), (2,), (1,), (2,), (0,)]),
    MULTI: (lambda: classification(MULTI, 3), texts, [(0, 1), (), (2,), (1,), (0, 1, 2)]),
    REGRESSION: (lambda: classification(REGRESSION, 3), texts, [tuple(np.arange(3) - i) for i in range(5)]),
    "reward": (lambda: reward(center_rewards_coefficient=0.2), pairs, [(0.5,), (), (1.0,)]),
}


def model_of(labels: int) -> torch.nn.Module:
    """Return a model whose scores are of the size of 1."""
    config = tiny_models.config_of("llama", num_labels=labels, attn_implementation="eager")
    model = tiny_models.random_model(transformers.AutoModelForSequenceClassification, config)
    model.score.weight.data *= 3
    return model.eval()


@torch.no_grad()
def scores_by_hand(labels: int) -> torch.Tensor:
    """Return the scores of each text: of the backbone's hidden state at its place."""
    model = model_of(labels)
    rows = [model.model(input_ids=torch.tensor([text[: at + 1]])).last_hidden_state[0, -1]
            for text, at in zip(TEXTS, AT, strict=True)]  # fmt: skip
    return torch.stack(rows) @ model.score.weight.T


def loss_by_hand(kind: str, targets: list[tuple[float, ...]]) -> float:
    """Return the mean loss of all examples."""
    scores = scores_by_hand(1 if kind == "reward" else 3).double()
    if kind == SINGLE:
        return float(-scores.log_softmax(-1)[torch.arange(5), [int(target[0]) for target in targets]].mean())
    if kind == REGRESSION:
        return float((scores - torch.tensor(np.array(targets))).square().mean())
    if kind == MULTI:
        true = torch.tensor([[float(label in target) for label in range(3)] for target in targets])
        return float(-(true * scores.sigmoid().log() + (1 - true) * (1 - scores.sigmoid()).log()).mean())
    chosen, rejected = scores[:3, 0], scores[1:4, 0]
    margins = torch.tensor([0.5, 0.0, 1.0])
    return float(((1 + torch.exp(margins - chosen + rejected)).log() + 0.2 * (chosen + rejected) ** 2).mean())


def batcher_of(task: ScoreTask, examples: Examples, *, packed: bool) -> Batcher:
    return Batcher(examples, packed, 4, PAD, False, CPU, more_fields=task.batch_fields)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", TASKS)
def test_micro_batches_of_a_model_add_up_to_the_mean_over_all_examples(kind, packed):
    make, of, targets = TASKS[kind]
    task, examples, model = make(), of(targets), model_of(1 if kind == "reward" else 3)
    patch_scores(model)
    if packed:
        model.config._attn_implementation = "per_document"
        install_packing_checks(model)
    batcher = batcher_of(task, examples, packed=packed)
    task.prepare(model, [batcher])
    assert task.inputs(examples, np.array([1])) == {"num_items_in_batch": 1}
    inputs = task.inputs(examples, np.arange(len(examples)), step=0)
    parts = [np.array([index]) for index in range(len(examples))]
    found = [task.loss(model, {**batcher(rows), **inputs}).detach() for rows in (parts[:2], parts[2:], [])]
    assert float(sum(found)) == pytest.approx(loss_by_hand(kind, targets), rel=1e-4) and float(found[-1]) == 0.0


def test_the_padding_token_of_the_batches_is_that_of_the_saved_configuration():
    task, model = classification(SINGLE, 3), model_of(3)
    examples = texts([(0,), (2,), (1,), (2,), (0,)])
    task.prepare(model, [Batcher(examples, False, 4, 3, False, CPU)])
    assert model.config.pad_token_id == model.model.config.pad_token_id == 3
    assert task.batch_fields(examples, [3], {"input_ids": torch.tensor([[4, 4, 3]]), "labels": torch.tensor([[4]])})[
        "score_rows"
    ].tolist() == [1]


def test_losses_of_scores_in_half_precision_are_computed_in_float32():
    task, examples, model = reward(), pairs([(0.5,), (), (1.0,)]), model_of(1).bfloat16()
    patch_scores(model)
    batcher = batcher_of(task, examples, packed=False)
    task.prepare(model, [batcher])
    assert task.loss(model, {**batcher([np.array([0])]), "num_items_in_batch": 3}).dtype == torch.float32


def test_the_check_of_scores_is_without_dropout_and_leaves_the_model_in_training():
    config = tiny_models.config_of("llama", num_labels=2, attn_implementation="eager", attention_dropout=0.5)
    model = tiny_models.random_model(transformers.AutoModelForSequenceClassification, config)
    patch_scores(model)
    check_scores(model, multiple_of=4, packed=False)
    assert model.training
    factors = iter((1.0, 1.02))  # less than half precision rounds
    model.score.register_forward_hook(lambda module, inputs, output: output * next(factors))
    with pytest.raises(UserError, match="does not read its scores at the last token"):
        check_scores(model, multiple_of=4, packed=False)


def evaluated(kind: str, world: int) -> tuple[float, dict[str, float]]:
    """Evaluate with one example of each forward."""
    make, of, targets = TASKS[kind]
    task, examples, model = make(), of(targets), model_of(1 if kind == "reward" else 3)
    patch_scores(model)
    batcher = batcher_of(task, examples, packed=False)
    task.prepare(model, [batcher])
    batching = SimpleNamespace(cp_size=1, row_ranks=world, eval_batch_size=1)
    plan = SimpleNamespace(batching=batching, rows=SimpleNamespace(packed=False, length=8))
    found = evaluate(plan, Accelerator(cpu=True), model, batcher, task, StopRequest(enabled=False))
    return found.loss, found.measures


def test_ranks_evaluate_as_one_process():
    """Of three pairs and of five texts, rank 1 has no last one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    alone = {kind: evaluated(kind, 1) for kind in TASKS}
    AcceleratorState._reset_state(reset_partial_state=True)
    scores = scores_by_hand(3)
    right = (scores.argmax(1) == torch.tensor([0, 2, 1, 2, 0])).float().mean()
    assert alone[SINGLE][1]["accuracy"] == pytest.approx(float(right)) and 0 < right < 1
    rewards = scores_by_hand(1)[:, 0]
    assert alone["reward"][1]["mean_reward"] == pytest.approx(float(rewards[[0, 1, 1, 2, 2, 3]].mean()), rel=1e-4)
    smallest = torch.minimum(rewards[:3], rewards[1:4]).mean()  # a forward has one pair
    assert alone["reward"][1]["min_reward"] == pytest.approx(float(smallest), rel=1e-4)
    for found in on_ranks(2, lambda rank: {kind: evaluated(kind, 2) for kind in TASKS}):
        for kind, (loss, measures) in found.items():
            assert loss == pytest.approx(alone[kind][0], rel=1e-5)
            assert measures == pytest.approx(alone[kind][1], rel=1e-5)
            assert loss == pytest.approx(loss_by_hand(kind, TASKS[kind][2]), rel=1e-4)
