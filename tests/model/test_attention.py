"""A deterministic backward, and only the backward."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from ligertune.model.attention import prefer_flash, same_bits


@pytest.mark.parametrize("enabled", [True, False])
def test_the_mode_holds_inside_and_is_put_back(enabled):
    before = torch.are_deterministic_algorithms_enabled()
    with same_bits(enabled):
        assert torch.are_deterministic_algorithms_enabled() is enabled
        with same_bits(False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() is enabled
    assert torch.are_deterministic_algorithms_enabled() is before


@pytest.mark.gpu
def test_flash_attention_gives_the_same_gradients_each_time():
    """4096 tokens: several programs add to each dQ, in any order unless told otherwise."""
    prefer_flash()
    q, k, v = (torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradients = []
    for _ in range(5):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with same_bits(True):
            gradients.append(torch.autograd.grad(out.float().square().sum(), q)[0])
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients[1:])


@pytest.mark.gpu
def test_products_are_deterministic_without_the_variable_that_makes_each_slow():
    """In a fresh process: torch's deterministic mode takes them, and torch reads no size anew in each."""
    code = """
import os, torch
from ligertune.model.attention import same_bits
x = torch.randn(64, 64, device="cuda")
with same_bits(True):
    first = x @ x
    assert torch.equal(first, x @ x) and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
torch.use_deterministic_algorithms(True)
torch.nn.functional.linear(x, x, x[0])
"""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
