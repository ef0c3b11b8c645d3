"""Batches of prepared examples as training makes them, and the loss and gradients of a model on one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ligertune.data.batching.collate import Batcher


def batch_of(prepared, reader, indices: Sequence[int], *, packed: bool = False, multiple_of: int = 1) -> dict:
    """One micro batch of these examples; packed, they are one row."""
    batcher = Batcher(
        prepared.train,
        packed=packed,
        multiple_of=multiple_of,
        pad_token_id=0,
        index_labels=False,
        device=torch.device("cpu"),
        images=reader,
    )
    return batcher([np.array(indices)] if packed else [np.array([index]) for index in indices])


def training(model, batch: dict, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradient of every parameter that has one)."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(ours: tuple, theirs: tuple, *, tolerance: float = 1e-5) -> None:
    """Losses equal, and every gradient to `tolerance` of the largest of that parameter."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs[1].values())
    for name, truth in theirs[1].items():
        scale = max(float(truth.abs().max()), 1e-4 * largest)  # some are zero but for rounding (a key's bias)
        worst = float((ours[1][name] - truth).abs().max()) / scale
        assert worst <= tolerance, f"{name}: {worst:.1e} of its largest gradient"
