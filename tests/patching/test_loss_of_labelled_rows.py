"""An index of the labelled rows changes which rows the head computes, and nothing else."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from ligertune_kernels import labelled_rows

from ligertune.patching.deferred_logits import loss_counts, loss_only
from ligertune.patching.patch import patch


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_the_loss_and_every_gradient_are_the_same(family):
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


def test_only_those_rows_reach_the_head():
    model = tiny_models.make("llama")
    patch(model)
    batch = tiny_models.batch(rows=2, length=20)
    with torch.no_grad(), loss_only():
        whole = model(**batch, num_items_in_batch=1).loss
        none = model(**batch, num_items_in_batch=1, labelled_rows=torch.zeros(0, dtype=torch.int64)).loss
    assert whole > 1.0
    assert none == 0.0
