"""DraftCache: keys and values of a draft head while it decodes one text, and a step of the head with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligertune.features.draft.draft_head import DraftHead


class DraftCache:
    """Keys and values (S, K, D) of each decoder layer of a head, for the S rows of a text so far."""

    def __init__(self, head: DraftHead) -> None:
        weight = head.fc.weight
        config = head.config
        empty = weight.new_empty(0, config.num_key_value_heads, config.head_dim)
        self._keys = [empty] * config.num_layers
        self._values = [empty] * config.num_layers

    def __len__(self) -> int:
        return self._keys[0].shape[0]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values (N, K, D) of N rows to a layer; return all of it (S + N, K, D)."""
        self._keys[layer] = torch.cat([self._keys[layer], key])
        self._values[layer] = torch.cat([self._values[layer], value])
        return self._keys[layer], self._values[layer]

    def shorten(self, length: int) -> None:
        """Forget all rows after the first `length`."""
        self._keys = [one[:length] for one in self._keys]
        self._values = [one[:length] for one in self._values]


def run_head(
    head: DraftHead,
    cache: DraftCache,
    hidden: Tensor,  # (N, E)
    embedded: Tensor,  # (N, E)
    positions: Tensor,  # (N,)
    visible: Tensor | None = None,  # (N, S + N) bool: rows that each row reads
) -> Tensor:  # (N, E)
    """Return the states of N rows, and append them to the cache of S rows. By default each row reads all before it."""
    if visible is None:
        shape = (len(hidden), len(cache) + len(hidden))
        visible = torch.ones(shape, dtype=torch.bool, device=hidden.device).tril(len(cache))
    for number, layer in enumerate(head.decoder_layers()):
        projected = layer.project_qkv(hidden, embedded)
        query, key = head.rotate(projected.query, projected.key, positions)
        keys, values = cache.extend(number, key, projected.value)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=visible,
            enable_gqa=True,
        )
        hidden = layer.finish(attended[0].transpose(0, 1), projected.residual)
    return hidden
