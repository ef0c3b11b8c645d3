"""Rows with images, batches of prepared examples as training makes them, and the loss and gradients of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ligertune.data.batching.collate import Batcher


def image_row(question: str, answer: str, *images: str | Path) -> dict:
    """Return a row in LLaVA's format."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"images": [str(image) for image in images], "conversations": turns}


def batch_of(prepared, reader, indices: Sequence[int], *, packed: bool = False, multiple_of: int = 1) -> dict:
    """Return one micro-batch of these examples; packed examples form one row."""
    batcher = Batcher(
        prepared.train, packed=packed, multiple_of=multiple_of, pad_token_id=0, index_labels=False,
        device=torch.device("cpu"), images=reader,
    )  # fmt: skip
    return batcher([np.array(indices)] if packed else [np.array([index]) for index in indices])


def training(model, batch: dict, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(found: tuple, expected: tuple, *, tolerance: float = 1e-5) -> None:
    """Compare two results of `training`: losses, and gradients relative to the largest entry of each parameter."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, truth in expected[1].items():
        scale = max(float(truth.abs().max()), 1e-4 * largest)  # some are zero but for rounding (a key's bias)
        worst = float((found[1][name] - truth).abs().max()) / scale
        assert worst <= tolerance, f"{name}: {worst:.1e} of its largest gradient"
