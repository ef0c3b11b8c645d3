"""What the ops add to torch.autograd.Function: gradients that refuse to be differentiated again, a short way in."""

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


_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", None)
_unwrapped = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)


def apply_of(function: type[torch.autograd.Function], n_tensors: int) -> Callable:
    """function.apply, past what torch.func alone needs of it; the first n_tensors arguments are all that are tensors.

    Function.apply is written in Python. Where no transform is at work, it unwraps what one that is over has left, and
    hands on to one in C: this does no more.
    """
    in_c = getattr(super(torch.autograd.Function, function), "apply", None)
    if None in (in_c, _transforms_are_active, _unwrapped):
        return function.apply

    def apply(*args: object) -> object:
        if torch.compiler.is_compiling() or _transforms_are_active():
            return function.apply(*args)
        return in_c(*map(_unwrapped, args[:n_tensors]), *args[n_tensors:])

    return apply
