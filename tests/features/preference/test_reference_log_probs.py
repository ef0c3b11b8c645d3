"""Reference log-probabilities are those of the model before training, however they are computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.tasks.answer_truth import answer, batcher_of, computing, pair, plan_of, tiny, tokens_of
from support.tasks.preference_runs import pairs, train_pairs

from ligertune.data.examples import Examples
from ligertune.features.preference.answers import answer_fields
from ligertune.features.preference.preference_task import PreferenceTask
from ligertune.features.preference.recipe import PreferenceSpec, reference_of
from ligertune.features.preference.reference import (
    AdapterReference,
    CopiedReference,
    PrecomputedReference,
    Reference,
    rank_batches,
)
from ligertune.models.trainable import apply_method
from ligertune.planning.options import MethodOptions

LD_ALPHA = 0.3
# pairs of unequal lengths: five, so that two ranks with batches of two have unequal shares
PAIRS = [
    pair(answer([3, n + 4, 7, 9, n + 11, 2][: 4 + n % 3], [2, 3]), answer([3, n + 4, 8, 21 + n, 2], [2, 3, 4]))
    for n in range(5)
]
EXAMPLES = Examples(PAIRS)
LORA = MethodOptions(type="lora", lora_r=2, lora_target_modules=["q_proj", "o_proj", "lm_head"])


def base() -> torch.nn.Module:
    """A model that drops half of its attention in training mode."""
    return tiny(attention_dropout=0.5)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """(5, 2): sums over the labelled tokens without dropout; those past the shorter answer count LD_ALPHA."""
    found = []
    with torch.no_grad():
        for example in PAIRS:
            sides = [tokens_of(base(), side).log_probs for side in example.documents()]
            n = min(map(len, sides))
            found.append([float(s[:n].sum() + LD_ALPHA * s[n:].sum()) for s in sides])
    return np.array(found)


def trained(*, packed: bool = False) -> torch.nn.Module:
    """The model in training mode."""
    return computing(base(), packed=packed).train()


def adapted() -> torch.nn.Module:
    """The model with an adapter that changes it."""
    model = apply_method(computing(base(), packed=False), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.train()


def prepared(reference: Reference, model: torch.nn.Module, *, packed: bool = False) -> np.ndarray:
    """Return what a task reads of a reference: of a batch of the pairs 3, 0 and 4, in this order."""
    task = PreferenceTask(None, PreferenceSpec(ld_alpha=LD_ALPHA), reference, torch.device("cpu"))
    batcher = batcher_of(EXAMPLES, packed=packed, task=task)
    task.prepare(model, [batcher])
    batch = batcher([np.array([3]), np.array([0]), np.array([4])])
    return reference.log_probs(model, batch).view(-1, 2).numpy()


def plan(folder: Path, **changes: object):
    return plan_of(folder, **{"preference.ld_alpha": LD_ALPHA, **changes})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))


def test_a_copy_is_the_model_before_training_without_dropout(expected, tmp_path):
    model = trained()
    reference = CopiedReference(plan(tmp_path), model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert prepared(reference, model) == pytest.approx(expected[[3, 0, 4]], rel=1e-5)
    assert model.training


def test_a_copy_computes_in_the_dtype_of_autocast(expected, tmp_path):
    """float16 has three digits more of the mantissa than bfloat16."""
    errors = {}
    for autocast in ("no", "fp16", "bf16"):
        run = plan(tmp_path)
        run = replace(run, precision=replace(run.precision, autocast=autocast))
        model = trained()
        errors[autocast] = np.abs(prepared(CopiedReference(run, model), model) - expected[[3, 0, 4]]).max()
    assert errors["no"] < 1e-5 < errors["fp16"] < errors["bf16"] / 3, errors


def test_an_adapter_switched_off_is_the_base_without_dropout(expected):
    model = adapted()
    assert prepared(AdapterReference(), model) == pytest.approx(expected[[3, 0, 4]], rel=1e-5)
    assert model.training


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_stored_log_probabilities_are_those_without_dropout(packed, expected, tmp_path):
    """Batches of two rows: an odd number of them."""
    model = trained(packed=packed)
    found = prepared(PrecomputedReference(plan(tmp_path, packed=packed, length=16)), model, packed=packed)
    assert found == pytest.approx(expected[[3, 0, 4]], rel=1e-5)
    assert model.training
    (stored,) = map(np.load, (tmp_path / "run" / "reference").glob("*.npy"))
    assert stored == pytest.approx(expected, rel=1e-5)


def test_stored_log_probabilities_are_those_without_the_adapter(expected, tmp_path):
    found = prepared(PrecomputedReference(plan(tmp_path)), adapted())
    assert found == pytest.approx(expected[[3, 0, 4]], rel=1e-5)


def test_two_ranks_store_what_one_process_does(expected, tmp_path):
    """Five pairs in batches of two: rank 1 has no row in the second batch."""

    def compute(rank: int) -> np.ndarray:
        dist.init_process_group("gloo")
        return prepared(PrecomputedReference(plan(tmp_path)), trained())

    for found in on_ranks(2, compute):
        assert found == pytest.approx(expected[[3, 0, 4]], rel=1e-5)
    (stored,) = map(np.load, (tmp_path / "run" / "reference").glob("*.npy"))
    assert stored == pytest.approx(expected, rel=1e-5)


def test_the_batches_of_a_rank_are_of_the_examples_asked_for(tmp_path):
    """Longest first."""
    rows = rank_batches(plan(tmp_path), np.array([5, 9, 7, 9, 2]), np.array([0, 2, 4]), size=2)
    assert [[row.tolist() for row in batch] for batch in rows] == [[[2], [0]], [[4]]]


def test_a_row_of_the_batch_keeps_its_labels():
    """The reference reads the fields that the loss reads, too."""
    batch = batcher_of(EXAMPLES, packed=False)([np.array([2])])
    fields = answer_fields(batch, 2, ld_alpha=LD_ALPHA)
    assert fields["answer_tokens"].tolist() == [2, 3]
    weights = fields["token_weights"].view(2, -1)
    assert weights[1, 1:4].tolist() == pytest.approx([1, 1, LD_ALPHA])


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ({"type": "full"}, "precompute"),
        ({"type": "lora"}, "adapter"),
        ({"type": "lora", "lora_modules_to_save": ["lm_head"]}, "precompute"),
        ({"type": "lora", "init_lora_weights": "pissa"}, "precompute"),
    ],
)
def test_the_reference_that_auto_chooses(method, wanted):
    assert reference_of(PreferenceSpec(), MethodOptions(**method)) == wanted
    assert reference_of(PreferenceSpec(loss_type="orpo"), MethodOptions(**method)) == "none"
    assert reference_of(PreferenceSpec(reference="copy"), MethodOptions(**method)) == "copy"


def test_an_adapter_made_from_the_weights_is_part_of_the_reference(tmp_path):
    """PiSSA subtracts it from the weights, so the model before training is the one with the adapter."""
    _, lines = train_pairs(
        tmp_path, pairs(12), **{"method.type": "lora", "method.init_lora_weights": "pissa", "train.max_steps": 1}
    )
    assert lines[0]["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    assert lines[0]["rewards/rejected"] == pytest.approx(0, abs=1e-4)
