"""NEFTune (Jain et al. 2023): uniform noise on the input embeddings in training, none in evaluation.

    e + alpha / sqrt(T E) u,   u ~ U(-1, 1)        T tokens, E hidden size

T is the length of the row, as in transformers' Trainer. In packed and padding-free rows it is the length of the
token's own document, so that packing does not change the noise. The noise is drawn from torch's random state, like
dropout: each rank has its own, and a checkpoint holds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """Adds noise to the outputs of `embedding` inside of `of_batch`. alpha: as above."""

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self._alpha = alpha
        self._is_on = False
        self._places = None
        embedding.register_forward_hook(self._add_noise)

    @contextlib.contextmanager
    def of_batch(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Add noise in the forward of a collator's batch. `document_places` (2, T) gives its documents, if any."""
        self._is_on = True
        self._places = batch.get("document_places")
        try:
            yield
        finally:
            self._is_on = False
            self._places = None

    def _add_noise(self, module: nn.Module, inputs: tuple, embedded: Tensor) -> Tensor | None:
        if not (self._is_on and module.training):
            return None
        if self._places is None:
            bound = self._alpha / (embedded.shape[1] * embedded.shape[2]) ** 0.5
            return embedded + torch.empty_like(embedded).uniform_(-bound, bound)
        begin, end = self._places
        bounds = self._alpha / ((end - begin) * embedded.shape[2]).float().sqrt()  # (T,)
        return embedded + torch.empty_like(embedded).uniform_(-1.0, 1.0) * bounds.to(embedded.dtype)[None, :, None]
