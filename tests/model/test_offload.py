"""Checkpointed inputs that wait in host memory: the same numbers, and less on the device."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch

from ligertune.model.attention import checkpoint_layers
from ligertune.model.patch import patch


def gradients(model, device: str) -> list[torch.Tensor]:
    model(**tiny_models.batch(device=device), use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offloaded_and_kept_inputs_give_the_same_gradients(device):
    models = [tiny_models.make("llama").to(device)]
    patch(models[0])
    models.append(copy.deepcopy(models[0]))
    for model, offload in zip(models, (False, True), strict=True):
        checkpoint_layers(model, offload=offload)
    kept, offloaded = (gradients(model, device) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True))


@pytest.mark.gpu
def test_offloading_holds_less_on_the_device():
    peaks = []
    for offload in (False, True):
        model = tiny_models.make("llama", num_hidden_layers=16, max_position_embeddings=8192).to("cuda")
        checkpoint_layers(model, offload=offload)
        batch = tiny_models.batch(rows=8, length=2048, device="cuda")
        batch.pop("attention_mask")
        torch.cuda.reset_peak_memory_stats()
        model(**batch, use_cache=False).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
    inputs = 16 * 8 * 2048 * 64 * 4
    assert peaks[0] - peaks[1] > 0.8 * inputs
