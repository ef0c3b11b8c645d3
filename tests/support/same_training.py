"""Compare losses and gradients of two models, or of one model on two batches."""

import torch
from torch import Tensor

FP32 = 1e-5  # relative to the largest gradient of a parameter: the two models sum in another order


def losses_and_gradients(model, batch, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one training step, and the gradient of every parameter that has one."""
    model.zero_grad()
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple, expected: tuple, *, tolerance: float = FP32, least: float = 0.0) -> None:
    """Compare two results of `losses_and_gradients`: losses, and gradients relative to the largest of each parameter.

    least: share of the largest gradient of all below which a parameter's is zero but for rounding (a key's bias).
    """
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert found[1].keys() == expected[1].keys()
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected[1].items()}
    for name, truth in expected[1].items():
        worst = float((found[1][name] - truth).abs().max()) / max(sizes[name], least * max(sizes.values()), 1e-12)
        assert worst <= tolerance, f"{name}: {worst:.1e} of its largest gradient"


def assert_same_training(patched, plain, batch, *, tolerance: float = FP32, **options) -> None:
    assert_same(*(losses_and_gradients(model, batch, **options) for model in (patched, plain)), tolerance=tolerance)


def relative_error(gradients, truth):
    """Return the L2 distance of all gradients from the true ones, relative to the norm of these."""
    distance = sum((gradients[name].float() - truth[name]).square().sum() for name in truth)
    return (distance / sum(gradient.square().sum() for gradient in truth.values())).sqrt()
