"""Clipping inside the optimizer's step gives what clipping before it gives."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.train.optim.gradients import clip_gradients

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
# below every gradient's norm here, between them, above them all: each step, some steps and no step is clipped
MAX_NORMS = (0.05, 2.0, 1e6)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)


def adamw(model: torch.nn.Module, *, fused: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=fused)  # an eps that the scale can be seen by


def backward(model: torch.nn.Module, seed: int) -> None:
    ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_it_trains_as_clipping_before_the_step_does(max_norm, accelerator):
    ours, theirs = model(torch.float32), model(torch.float32)
    one, other = accelerator.prepare(adamw(ours)), adamw(theirs)
    for step in range(4):
        backward(ours, step)
        backward(theirs, step)
        found = clip_gradients(accelerator, one, ours.parameters(), max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        torch.testing.assert_close(found, expected)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_norm_of_bfloat16_gradients_keeps_its_digits(accelerator):
    trained = model(torch.bfloat16)
    backward(trained, 1)
    truth = torch.stack([p.grad.double().square().sum() for p in trained.parameters()]).sum().sqrt()
    found = clip_gradients(accelerator, adamw(trained), trained.parameters(), 1.0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)


@pytest.mark.parametrize("other", ["not fused", "an optimizer that does not divide"])
def test_another_optimizer_gets_scaled_gradients(other, accelerator):
    trained = model(torch.float32)
    optimizer = adamw(trained, fused=False) if other == "not fused" else torch.optim.SGD(trained.parameters(), lr=1.0)
    backward(trained, 1)
    before = copy.deepcopy([p.grad for p in trained.parameters()])
    norm = clip_gradients(accelerator, optimizer, trained.parameters(), 0.5)
    for p, grad in zip(trained.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, grad * (0.5 / (norm + 1e-6)))
