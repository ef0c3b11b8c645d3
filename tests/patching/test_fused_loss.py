"""The loss in the output head: from logits, where the weight has its own operations, and of labelled rows only."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ligertune_kernels import labelled_rows
from support.models import tiny_models
from support.same_training import assert_same_training

from ligertune.patching.deferred_logits import loss_counts, loss_only
from ligertune.patching.fused_loss import chunk_loss
from ligertune.patching.host_copy import RowSearch
from ligertune.patching.patch import patch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class OwnWeight(torch.Tensor):
    """Replacement of a DTensor or a quantised weight: neither a Tensor nor a Parameter."""


def give_own_weight(model):
    patch(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(OwnWeight))


@pytest.mark.filterwarnings("ignore:the loss is computed from materialised logits")
@pytest.mark.parametrize("prepare", [give_own_weight, chunk_loss])
@pytest.mark.parametrize("count", [None, 40, torch.tensor(40)], ids=["mean", "given", "tensor"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])  # plain; a soft cap of 3; a scale of 1/16
def test_a_dense_loss_is_divided_by_the_tokens_of_the_global_batch(family, count, prepare, monkeypatch):
    monkeypatch.setattr("ligertune.patching.fused_loss.CHUNK_ROWS", 16)
    model, batch = tiny_models.make(family, tie_word_embeddings=False), tiny_models.batch(rows=2, length=20)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    prepare(model)
    loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
    if prepare is give_own_weight:
        assert loss_counts(model).fused == 0 and loss_counts(model).materialised.total() == 1
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:, None].clamp(min=0)).squeeze(-1)
    trained = batch["labels"][:, 1:] != -100
    assert loss.item() == pytest.approx(
        float(losses[trained].sum() / (trained.sum() if count is None else 40)), rel=1e-5
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_an_index_of_labelled_rows_changes_neither_loss_nor_gradients(family):
    model = tiny_models.make(family).train()
    patch(model)
    batch = tiny_models.batch(rows=3, length=20)
    gradients = []
    for extra in ({}, {"labelled_rows": labelled_rows(batch["labels"], shift=1)}):
        model.zero_grad()
        loss = model(**batch, **extra, num_items_in_batch=40, use_cache=False).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert loss_counts(model).fused == 2
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_only_labelled_rows_reach_the_head():
    model = tiny_models.make("llama")
    patch(model)
    batch = tiny_models.batch(rows=2, length=20)
    with torch.no_grad(), loss_only():
        whole = model(**batch, num_items_in_batch=1).loss
        none = model(**batch, num_items_in_batch=1, labelled_rows=torch.zeros(0, dtype=torch.int64)).loss
    assert whole > 1.0
    assert none == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_a_search_gives_the_rows_of_these_labels_only(device):
    labels = tiny_models.batch(rows=3, length=20)["labels"].to(device)
    for shift in (0, 1):
        search = RowSearch(labels, ignore_index=-100, shift=shift)
        found = search.rows(labels, ignore_index=-100, shift=shift)
        assert torch.equal(found.cpu(), labelled_rows(labels.cpu(), shift=shift))
    assert search.rows(labels, ignore_index=-100, shift=0) is None
    assert search.rows(labels, ignore_index=0, shift=1) is None
    assert search.rows(labels.clone(), ignore_index=-100, shift=1) is None
    assert search.rows(None, ignore_index=-100, shift=1) is None
    labels[:, 0] = 1  # a model that writes into its labels
    assert search.rows(labels, ignore_index=-100, shift=1) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["labels", "shift_labels", "nothing"])
def test_rows_that_were_found_change_neither_loss_nor_gradients(given, device, monkeypatch):
    monkeypatch.setattr("ligertune.patching.host_copy.MIN_PRODUCTS", 0)
    monkeypatch.setattr("ligertune.patching.host_copy.DEVICES", (device,))
    plain, batch = tiny_models.make("gemma2").to(device), tiny_models.batch(rows=3, length=20, device=device)
    batch["labels"][:, :14] = -100
    if given == "shift_labels":
        batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    elif given == "nothing":
        batch["labels"].fill_(-100)
    patched = copy.deepcopy(plain)
    patch(patched)
    options = {"num_items_in_batch": 31, "use_cache": False}
    if given == "nothing":
        loss = patched(**batch, **options).loss
        loss.backward()
        assert loss.item() == 0.0 and patched.lm_head.weight.grad.abs().max() == 0
    else:
        assert_same_training(patched, plain, batch, tolerance=1e-5 if device == "cpu" else 1e-4, **options)
    assert loss_counts(patched).fused == 1


def test_rows_are_looked_for_on_a_device_only_where_skipping_them_pays(monkeypatch):
    monkeypatch.setattr("ligertune.patching.host_copy.DEVICES", ("cpu",))
    taken = []
    monkeypatch.setattr(RowSearch, "rows", lambda self, labels, **options: taken.append(options) or None)
    model, batch = tiny_models.make("llama"), tiny_models.batch()
    patch(model)
    model(**batch)
    assert taken == []
    monkeypatch.setattr("ligertune.patching.host_copy.MIN_PRODUCTS", 0)
    model(**batch, labelled_rows=labelled_rows(batch["labels"], shift=1))
    assert taken == []
    model(**batch)
    assert taken == [{"ignore_index": -100, "shift": 1}]
