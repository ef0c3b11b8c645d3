"""Autograd and autocast: gradients that refuse to be differentiated again, and the dtype that products compute in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch


class _RaiseInBackward(torch.autograd.Function):
    """Return the gradients unchanged; backward raises. The anchor makes autograd record the node in every case."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor | None) -> None:
        raise RuntimeError(
            "The gradients of ligertune_kernels' ops cannot be differentiated again (create_graph=True). "
            "Use the op's reference instead, such as rms_norm_reference, or a model that is not patched."
        )


def no_double_backward(backward: Callable) -> Callable:
    """Decorate a Function's backward: differentiating its results raises RuntimeError.

    torch's once_differentiable returns constants where the incoming gradient needs no gradient itself: a penalty on the
    gradients of a sum then trains nothing, without an error.
    """

    @functools.wraps(backward)
    def call(ctx: object, *grads: torch.Tensor | None) -> object:
        # torch.compile itself refuses a second derivative.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        anchor = torch.ones((), requires_grad=True)
        if isinstance(found, tuple):
            return _RaiseInBackward.apply(anchor, *found)
        return _RaiseInBackward.apply(anchor, found)[0]

    return call


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in on this device, None where autocast is off."""
    # The type is compared because torch.compile does not trace torch.amp.is_autocast_available.
    if device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors in the dtype of autocast, where it is on."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None or tensors[0].dtype is torch.float64:
        return tensors
    return tuple(t.to(dtype) for t in tensors)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context without autocast on this device."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
