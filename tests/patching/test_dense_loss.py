"""The loss of logits that are made after all: an output head whose weight only knows its own operations."""

from __future__ import annotations

import pytest
import tiny_models
import torch

from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch


class OwnWeight(torch.Tensor):
    """Stands for a DTensor or a quantised weight: neither a Tensor nor a Parameter."""


@pytest.mark.filterwarnings("ignore:the loss is computed from materialised logits")
@pytest.mark.parametrize("count", [None, 40, torch.tensor(40)], ids=["mean", "given", "tensor"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])  # plain; a soft cap of 3; a scale of 1/16
def test_a_dense_head_divides_by_the_tokens_of_the_global_batch(family, count):
    model, batch = tiny_models.make(family, tie_word_embeddings=False), tiny_models.batch(rows=2, length=20)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    patch(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(OwnWeight))
    loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
    assert loss_counts(model).fused == 0 and loss_counts(model).materialised.total() == 1
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:, None].clamp(min=0)).squeeze(-1)
    trained = batch["labels"][:, 1:] != -100
    assert loss.item() == pytest.approx(
        float(losses[trained].sum() / (trained.sum() if count is None else 40)), rel=1e-5
    )
