"""Compare the loss and the gradients of a patched and an unpatched model."""

from __future__ import annotations

import torch

FP32 = 1e-5  # relative to the largest gradient of a parameter: the two models sum in another order


def losses_and_gradients(model, batch, **options):
    """Return (loss, {name: gradient}) of one training step."""
    model.zero_grad()
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(patched, plain, batch, *, tolerance=FP32, **options):
    loss, gradients = losses_and_gradients(patched, batch, **options)
    expected, truth = losses_and_gradients(plain, batch, **options)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    assert gradients.keys() == truth.keys()
    for name, gradient in gradients.items():
        worst = (gradient - truth[name]).abs().max() / truth[name].abs().max().clamp(min=1e-12)
        assert worst <= tolerance, f"{name}: {worst:.1e} of its largest gradient"


def relative_error(gradients, truth):
    """Return the L2 distance of all gradients from the true ones, relative to the norm of these."""
    distance = sum((gradients[name].float() - truth[name]).square().sum() for name in truth)
    return (distance / sum(gradient.square().sum() for gradient in truth.values())).sqrt()
