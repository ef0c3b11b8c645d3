"""Micro-batches of prepared examples, made as in training, and the loss and gradients of a model on one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ligertune.data.batching.collate import Batcher


def batch_of(prepared, reader, indices: Sequence[int], *, packed: bool = False, multiple_of: int = 1) -> dict:
    """Return a micro-batch of these examples; with `packed` they are one row."""
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
    """Return (loss, gradient of each parameter that has one)."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(found: tuple, expected: tuple, *, tolerance: float = 1e-5) -> None:
    """Compare results of `training`: gradients relative to the largest gradient of the parameter."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, truth in expected[1].items():
        scale = max(float(truth.abs().max()), 1e-4 * largest)  # the bias of a key projection has a gradient of zero
        worst = float((found[1][name] - truth).abs().max()) / scale
        assert worst <= tolerance, f"{name}: {worst:.1e} of its largest gradient"
