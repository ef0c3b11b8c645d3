"""Kimi's delta attention for generation: one token after another, as decode.py computes the gated delta rule."""

from __future__ import annotations

import torch

from ligertune_kernels.autograd import autocast
from ligertune_kernels.ops.recurrence.decode import gated_delta_rule_step_reference, run_step
from ligertune_kernels.ops.recurrence.input_checks import check_rule


def kda_step_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kda_step` in plain torch."""
    # its loop decays the state by whatever it is given for a head: one number, or one for each channel
    return gated_delta_rule_step_reference(query, key, value, decay, beta, l2_norm=l2_norm, initial_state=initial_state)


def kda_step(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V), H divides X: neighbouring value heads share a key head
    decay: torch.Tensor,  # (B, T, X, K): logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,  # (B, X, K, V)
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, T, X, V); (B, X, K, V) float32
    """Compute `kda` of few tokens, one after the other, and the state after them. No gradient.

    The reference runs for heads wider than 256. Raises ValueError on mismatched shapes, dtypes or devices, TypeError
    for what is no tensor.
    """
    check_rule("kda_step", query, key, value, decay, beta, initial_state, decays_of_channels=True)
    query, key, value = autocast(query, key, value)
    found = run_step(query, key, value, decay, beta, l2_norm, initial_state)
    if found is not None:
        return found
    return kda_step_reference(query, key, value, decay, beta, l2_norm=l2_norm, initial_state=initial_state)
