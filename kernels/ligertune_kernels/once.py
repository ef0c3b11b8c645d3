"""Gradients that cannot be differentiated again, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class _Once(torch.autograd.Function):
    """Hands tensors on; nothing comes back. The anchor makes autograd record it, whatever the tensors require."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor | None) -> None:
        raise RuntimeError(
            "The gradients of ligertune_kernels' ops cannot be differentiated again (create_graph=True). "
            "Use the op's reference for this, such as rms_norm_reference, or float64, which always takes it."
        )


def differentiable_once(backward: Callable) -> Callable:
    """A Function's backward whose results refuse a backward of their own.

    torch's once_differentiable lets them through, as constants, where the gradient that came in needs none itself: a
    penalty on the gradients of a sum then trains nothing and does not say so.
    """

    @functools.wraps(backward)
    def call(ctx: object, *grads: torch.Tensor | None) -> object:
        # compiled, torch refuses it itself
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        alone = not isinstance(found, tuple)
        recorded = _Once.apply(torch.ones((), requires_grad=True), *((found,) if alone else found))
        return recorded[0] if alone else recorded

    return call
