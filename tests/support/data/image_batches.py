"""Rows with images, and batches of prepared examples as training makes them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ligertune.data.batching.collate import Batcher
from support.same_training import losses_and_gradients

training = partial(losses_and_gradients, use_cache=False)


def image_row(question: str, answer: str, *images: str | Path) -> dict:
    """Return a row in LLaVA's format."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"images": [str(image) for image in images], "conversations": turns}


def batch_of(prepared, reader, indices: Sequence[int], *, packed: bool = False, multiple_of: int = 1) -> dict:
    """Return one micro-batch of these examples; packed examples form one row."""
    batcher = Batcher(
        prepared.train, packed=packed, multiple_of=multiple_of, pad_token_id=0, index_labels=False,
        device=torch.device("cpu"), reader=reader,
    )  # fmt: skip
    return batcher([np.array(indices)] if packed else [np.array([index]) for index in indices])
