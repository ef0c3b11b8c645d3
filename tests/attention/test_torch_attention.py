"""The deterministic mode of a backward."""

import pytest
import torch
import torch.nn.functional as F

from ligertune.attention.torch_attention import deterministic_backward, prefer_flash


@pytest.mark.parametrize("enabled", [True, False])
def test_the_mode_holds_inside_and_is_restored(enabled):
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic_backward(enabled):
        assert torch.are_deterministic_algorithms_enabled() is enabled
        with deterministic_backward(False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() is enabled
    assert torch.are_deterministic_algorithms_enabled() is before


@pytest.mark.gpu
def test_flash_attention_gives_the_same_gradients_each_time():
    """4096 tokens: several programs add to each dQ, in any order without the mode."""
    prefer_flash()
    q, k, v = (torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradients = []
    for _ in range(5):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with deterministic_backward(True):
            gradients.append(torch.autograd.grad(out.float().square().sum(), q)[0])
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients[1:])


@pytest.mark.gpu
def test_products_need_no_cublas_workspace_variable(monkeypatch):
    """torch before 2.11 refused them in this mode."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    x = torch.randn(64, 64, device="cuda")
    with deterministic_backward(True):
        assert torch.equal(F.linear(x, x, x[0]), F.linear(x, x, x[0]))
