"""Smoothed labels as in transformers' Trainer, dynamic fine-tuning by hand: loss kernels, ranks, packing."""

import copy

import pytest
import torch
from support.command_line import losses
from support.models import tiny_models
from support.quickstart_runs import train, train_ranks
from support.same_training import assert_same
from transformers.trainer_pt_utils import LabelSmoother

from ligertune.features.output_head import open_loss
from ligertune.features.sft.token_loss import DynamicFineTuning, SmoothedLabels, TokenLossTask
from ligertune.models.shape import read_shape
from ligertune.patching.patch import patch

DFT = {"train.loss_type": "dft"}
SMOOTHED = {"train.label_smoothing_factor": 0.2}
SHORT = {"train.max_steps": 3, "train.warmup_steps": 0}


def smoothed_by_transformers(logits, labels, count):
    mean = LabelSmoother(epsilon=0.2)({"logits": logits}, labels, shift_labels=True)
    return mean * (labels[:, 1:] != -100).sum() / count


def dft_by_hand(logits, labels, count):
    total = 0.0
    for row, targets in zip(logits.log_softmax(-1), labels, strict=True):
        for place, target in enumerate(targets[1:].tolist()):
            if target != -100:
                logprob = row[place, target]
                total = total - logprob.detach().exp() * logprob
    return total / count


CASES = {"smoothed": (SmoothedLabels(0.2), smoothed_by_transformers), "dft": (DynamicFineTuning(), dft_by_hand)}


def step(model, loss):
    """Return the loss and the gradients of a model's parameters."""
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernel", ["linear_cross_entropy", "cross_entropy", "torch", "none"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_formula(name, kernel):
    own, by_hand = CASES[name]
    truth = tiny_models.make("llama").train()
    model = copy.deepcopy(truth)
    if kernel != "none":
        patch(model, loss=kernel)
    open_loss(model, "sft")
    batch = tiny_models.batch()
    batch["labels"][0, :5] = -100
    count = 50
    logits = truth(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    expected = step(truth, by_hand(logits, batch["labels"], count))
    task = TokenLossTask(read_shape(model), None, own)
    found = step(model, task.loss(model, {**batch, "num_items_in_batch": count}))
    assert_same(found, expected)
    model.eval()
    plain = truth.eval()(**batch, num_items_in_batch=count).loss
    torch.testing.assert_close(task.loss(model, {**batch, "num_items_in_batch": count}), plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("own", [SmoothedLabels(0.2), DynamicFineTuning()], ids=["smoothed", "dft"])
def test_a_batch_without_labels_has_no_loss(own):
    model = tiny_models.make("llama").train()
    patch(model)
    batch = tiny_models.batch()
    batch["labels"][:] = -100
    loss = TokenLossTask(read_shape(model), None, own).loss(model, {**batch, "num_items_in_batch": 1})
    loss.backward()
    assert loss.item() == 0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def first_loss(folder, *, rows: int, **changes) -> float:
    """Return the loss of a step on both of two examples, in so many rows."""
    data = {"data.datasets.0.max_samples": 2, "data.val_split": 0, "data.max_length": 512}
    train(folder, **{"train.max_steps": 1, "train.per_device_train_batch_size": rows}, **data, **changes)
    return losses(folder / "run")[0]


@pytest.mark.parametrize("changes", [DFT, SMOOTHED], ids=["dft", "smoothed"])
def test_rows_have_the_same_loss_however_they_are_laid_out(changes, tmp_path):
    unpacked = {"rows": 2, "data.packing": False}
    padded = {**unpacked, "data.padding_free": False, "kernels.enabled": False}
    expected = first_loss(tmp_path / "padded", **changes, **padded)
    assert first_loss(tmp_path / "padding-free", **changes, **unpacked) == pytest.approx(expected, 1e-5)
    assert first_loss(tmp_path / "packed", rows=1, **changes, **{"data.packing": True}) == pytest.approx(expected, 1e-5)
    assert abs(first_loss(tmp_path / "plain", rows=1) - expected) > 0.02


@pytest.mark.parametrize("changes", [DFT, pytest.param(SMOOTHED, marks=pytest.mark.slow)], ids=["dft", "smoothed"])
def test_two_ranks_train_as_one_process(changes, tmp_path):
    changes = {**SHORT, **changes, "train.global_batch_size": 8, "train.per_device_train_batch_size": 4}
    one = train_ranks(1, tmp_path / "one", **changes)
    two = train_ranks(2, tmp_path / "two", **changes, **{"parallel.strategy": "ddp"})
    assert two == pytest.approx(one, rel=1e-5)


def test_the_report_says_what_the_loss_is(tmp_path):
    train(tmp_path, **{"train.max_steps": 1}, **DFT)
    assert "nats times probability, per trained token" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
