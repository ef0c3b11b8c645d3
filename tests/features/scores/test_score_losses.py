"""Losses, measures and places of scores, against plain PyTorch and scikit-learn's definitions."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from support.models import tiny_models

import ligertune.attention.packed_documents  # noqa: F401  registers per_document
from ligertune.data.batching.collate import Batcher, collate, collate_packed
from ligertune.data.examples import Example, Examples
from ligertune.errors import UserError
from ligertune.features.scores.document_scores import check_scores, last_tokens, patch_scores
from ligertune.features.scores.recipe import ClassificationSpec, RewardSpec
from ligertune.features.scores.score_tasks import ClassificationTask, RewardTask
from ligertune.patching.packing_checks import install_packing_checks

ALL = torch.ones(6, dtype=torch.bool)


def classification(problem_type: str, num_labels: int) -> ClassificationTask:
    return ClassificationTask(None, ClassificationSpec(problem_type=problem_type, num_labels=num_labels), "cpu")


def macro_f1(true: np.ndarray, predicted: np.ndarray, labels: list[int]) -> tuple[float, list[float]]:
    scores = []
    for label in labels:
        hit = int(((true == label) & (predicted == label)).sum())
        total = int((true == label).sum() + (predicted == label).sum())
        scores.append(2 * hit / total if total else 0.0)
    return float(np.mean(scores)), scores


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", 2), ("single_label_classification", 12), ("multi_label_classification", 3),
        ("regression", 1), ("regression", 2),
    ],
)  # fmt: skip
def test_losses_and_measures_do_not_depend_on_the_batches(problem, labels):
    rng = np.random.default_rng(labels)
    scores = torch.from_numpy(rng.normal(size=(6, labels))).float()
    raw = {
        "single_label_classification": [(float(rng.integers(2)),) for _ in range(6)],
        "multi_label_classification": [(0.0, 2.0), (), (1.0,), (2.0,), (0.0, 1.0, 2.0), (1.0, 2.0)],
        "regression": [tuple(rng.normal(size=labels)) for _ in range(6)],
    }[problem]
    task = classification(problem, labels)
    targets = task.target_tensor(raw)
    if problem == "single_label_classification":
        scores[torch.arange(4), targets[:4]] += 5  # four of six texts are right
        expected = F.cross_entropy(scores, targets)
    elif problem == "regression":
        expected = F.mse_loss(scores, targets)
    else:
        expected = F.binary_cross_entropy_with_logits(scores, targets)
    parts = [task.loss_of_scores(scores[part], targets[part], ALL[part], 6) for part in (slice(4), slice(4, None))]
    parts.append(task.loss_of_scores(scores[:1], targets[:1], ~ALL[:1], 6))  # a rank without rows
    assert float(sum(parts)) == pytest.approx(float(expected), rel=1e-6)
    assert float(parts[-1]) == 0.0
    means = task.measures.means(task.measures.take())
    if problem == "regression":
        assert means == {"mean_absolute_error": pytest.approx(float((scores - targets).abs().mean()), rel=1e-6)}
        return
    if problem == "multi_label_classification":
        predicted, true = (scores > 0).numpy(), targets.numpy() > 0
        columns = [macro_f1(true[:, i], predicted[:, i], [1])[0] for i in range(labels)]
        assert means["accuracy"] == pytest.approx((predicted == true).all(1).mean())
        assert means["f1_macro"] == pytest.approx(np.mean(columns))
        assert means["f1_micro"] == pytest.approx(macro_f1(true.ravel(), predicted.ravel(), [1])[0])
        return
    predicted, true = scores.argmax(1).numpy(), targets.numpy()
    f1, each = macro_f1(true, predicted, sorted({*true.tolist(), *predicted.tolist()}))
    assert (means["accuracy"], means["f1_macro"]) == (pytest.approx((predicted == true).mean()), pytest.approx(f1))
    assert means.get("f1") == (pytest.approx(each[1]) if labels == 2 else None)


@pytest.mark.parametrize(("center", "margins"), [*product((None, 0.1), ((0.0,) * 3, (0.5, 0.0, 2.0)))])
def test_the_reward_loss_is_that_of_its_definition(center, margins):
    rewards = torch.tensor([[1.0, -0.5], [0.2, 0.4], [-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    task = RewardTask(None, RewardSpec(center_rewards_coefficient=center), "cpu")
    targets = task.target_tensor([(m,) if m else () for m in margins])
    loss = task.loss_of_scores(rewards.view(-1, 1), targets, ALL[:3], 3)
    chosen, rejected = rewards.unbind(1)
    expected = torch.log1p(torch.exp(-(chosen - rejected - torch.tensor(margins)))).mean()
    expected = expected + (center or 0) * ((chosen + rejected) ** 2).mean()
    assert torch.allclose(loss, expected)
    gradients = [torch.autograd.grad(one, rewards, retain_graph=True)[0] for one in (loss, expected)]
    assert torch.allclose(*gradients)
    task.loss_of_scores(rewards[:1].view(-1, 1), targets[:1], ~ALL[:1], 3)  # a rank without rows changes nothing
    means = task.measures.means(task.measures.take())
    assert means == pytest.approx({"min_reward": -1.0, "max_reward": 1.0, "mean_reward": -0.9 / 6, "accuracy": 1 / 3,
                                   "margin": 1.3 / 3})  # fmt: skip


def test_a_rank_without_rows_counts_nothing():
    """The batcher gives it an example without labels, so that all ranks make the same calls."""
    tokens = np.arange(3, 9, dtype=np.int32)
    examples = Examples([Example(tokens, np.where(tokens == 8, 8, -100), "", targets=(1.0,))] * 2)
    task = classification("single_label_classification", 2)
    batcher = Batcher(examples, True, 1, 0, False, torch.device("cpu"), more_fields=task.batch_fields)
    task.prepare(torch.nn.Identity(), [batcher])
    for rows, counts in (([np.array([0, 1])], [True, True]), ([], [False])):
        batch = batcher(rows)
        assert batch["counts"].tolist() == counts and batch["score_rows"].tolist() == [5, 11][: len(counts)]
        assert batch["targets"].tolist() == [1] * len(counts)


def test_scores_of_packed_and_padded_texts_are_those_of_single_texts():
    """Also where a text ends in the padding token: transformers reads the token before."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 128, size=length) for length in (9, 5, 12)]
    ids[1][-2:] = 0  # the padding token
    examples = [Example(tokens, tokens, "") for tokens in ids]
    for family in ("llama", "gemma2", "qwen3", "mixtral"):
        config = tiny_models.config_of(family, num_labels=3, attn_implementation="eager")
        model = tiny_models.random_model(transformers.AutoModelForSequenceClassification, config).eval()
        with torch.no_grad():
            single = torch.cat([model(input_ids=torch.tensor(tokens)[None]).logits for tokens in ids])
            model.config._attn_implementation = "per_document"
            patch_scores(model)
            install_packing_checks(model)
            check_scores(model, multiple_of=8, packed=True)
            packed = collate_packed(examples, pad_token_id=0, pad_to_multiple_of=8)
            for batch in (packed, collate(examples, pad_token_id=0)):
                lengths = batch.get("document_lengths", [12] * 3)[:3]
                rows = last_tokens(batch["input_ids"], lengths, pad_token_id=0)
                del batch["labels"]
                if family == "gemma2" and "document_lengths" not in batch:
                    model.config._attn_implementation = "eager"
                found = model(**batch, use_cache=False, score_rows=rows).logits[0]
                assert torch.allclose(found, single, atol=1e-5), (family, batch.keys())


def test_models_that_read_their_scores_elsewhere_are_refused():
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, **size))
    with pytest.raises(UserError, match=r"this BertForSequenceClassification is an encoder"):
        patch_scores(model)
    config = tiny_models.config_of("llama", num_labels=2)
    model = tiny_models.random_model(transformers.AutoModelForSequenceClassification, config)
    model.score.register_forward_hook(lambda module, inputs, output: output.roll(1, 1))  # of the token before
    patch_scores(model)
    with pytest.raises(UserError, match=r"LlamaForSequenceClassification does not read its scores at the last token"):
        check_scores(model, multiple_of=1, packed=False)
