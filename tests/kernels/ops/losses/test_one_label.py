"""A batch with a single trained token: its loss and gradient are that token's, in every loss of the head."""

import pytest
import torch
import torch.nn.functional as F
from ligertune_kernels import cross_entropy, linear_cross_entropy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N, E, V = 5, 16, 23


@pytest.mark.parametrize("items", [None, 1, 3], ids=lambda n: f"num_items {n}")
@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_and_the_gradient_are_those_of_the_token(device, items):
    torch.manual_seed(0)
    hidden = torch.randn(N, E, device=device, requires_grad=True)
    weight = torch.randn(V, E, device=device, requires_grad=True)
    labels = torch.full((N,), -100, device=device)
    labels[3] = 7
    exact = hidden.detach().double().requires_grad_()
    expected = F.cross_entropy(exact[3:4] @ weight.detach().double().t(), labels[3:4]) / (items or 1)
    expected.backward()
    losses = [linear_cross_entropy(hidden, weight, labels, num_items_in_batch=items)]
    if items is None:
        losses.append(cross_entropy(hidden @ weight.t(), labels))
    for loss in losses:
        hidden.grad = None
        loss.backward(retain_graph=True)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
