"""Layers that run again in the backward draw the random numbers of their first run."""

import pytest
import torch
from support.models import tiny_models

from ligertune.activations.checkpointing import checkpoint_layers


def gradients(model, *, checkpointed):
    ids = torch.arange(12)[None]
    if checkpointed:
        checkpoint_layers(model)
    model.train()
    torch.manual_seed(7)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, torch.rand(3)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_those_without_checkpointing(dropout):
    expected, numbers = gradients(tiny_models.make("llama", attention_dropout=dropout), checkpointed=False)
    found, after = gradients(tiny_models.make("llama", attention_dropout=dropout), checkpointed=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(after, numbers)  # the second run leaves the random state as it was
