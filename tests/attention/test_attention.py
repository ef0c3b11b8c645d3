"""A deterministic backward, and only the backward."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from ligertune.attention.sdpa import prefer_flash, same_bits


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_are_taken_without_the_variable_that_makes_each_slow(device):
    """In a fresh process: torch once refused them in this mode."""
    code = f"""
import os, torch
from ligertune.attention.sdpa import same_bits
x = torch.randn(64, 64, device="{device}")
with same_bits(True):
    first = torch.nn.functional.linear(x, x, x[0])
    assert torch.equal(first, torch.nn.functional.linear(x, x, x[0]))
assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
"""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
