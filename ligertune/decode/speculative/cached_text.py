"""CachedText: texts in the KV cache of a model, of which each forward pass verifies a tree of candidates.

Rows of a batch accept different numbers of tokens. Their cache stays one tensor: unused slots of a row are masked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ligertune.any_types import AnyModule
from ligertune.decode.speculative.candidate_tree import CandidateTree
from ligertune.errors import UserError
from ligertune.models.score_head import embedding_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the token ids at which `model.generate` stops."""
    found = model.generation_config.eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list | tuple) else (found,)


def append_tokens(text: list[int], new: list[int], max_new_tokens: int, stop_at: Sequence[int]) -> bool:
    """Append tokens until the text ends; return whether it has ended."""
    for token in new:
        text.append(token)
        if token in stop_at or len(text) == max_new_tokens:
            return True
    return False


class CachedText:
    """The text so far in the model's KV cache of P slots; `filled` marks the slots that a row uses."""

    def __init__(
        self, model: PreTrainedModel, backbone: AnyModule, prompts: Sequence[Sequence[int]], *, option: str
    ) -> None:
        """backbone: the part of the model that computes the last hidden state. option: of generate, for errors."""
        self.model = model
        self.backbone = backbone
        self._advice = f"Decode it without {option}."
        # transformers 5.24 renamed the keyword past_key_values to cache. A patched class wraps the original's forward.
        forwards = [vars(cls)["forward"] for cls in type(self.backbone).__mro__ if "forward" in vars(cls)]
        renamed = any("cache" in inspect.signature(forward).parameters for forward in forwards)
        self.cache = DynamicCache()
        self.cache_options = {"cache" if renamed else "past_key_values": self.cache, "use_cache": True}
        self.device = embedding_of(model).weight.device
        self.prompts = prompts
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)  # (B,)
        slots = torch.arange(max(map(len, prompts)), device=self.device)
        self.filled = slots < self.lengths[:, None]  # (B, P)
        self.positions = slots.expand(len(prompts), -1)  # (B, P)
        self.make_mask = _mask_maker(model, self._advice)

    def read_prompts(self) -> Tensor:
        """Run the prompts, padded on the right; return the hidden state (B, E) of each prompt's last token."""
        rows = torch.zeros(self.filled.shape, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(self.prompts):
            rows[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        hidden = self.backbone(input_ids=rows, **self.cache_options)[0]
        self._check_cache()
        last = (self.lengths - 1)[:, None, None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, last).squeeze(1)

    def _check_cache(self) -> None:
        keys = [getattr(layer, "keys", None) for layer in self.cache.layers]
        plain = all(isinstance(one, Tensor) and one.shape[2] == self.filled.shape[1] for one in keys)
        if not plain or len(self.cache.layers) != self.model.config.get_text_config().num_hidden_layers:
            raise UserError(
                f"{type(self.model).__name__} caches more than the keys and values of each token, "
                "so rejected candidates cannot be removed from its cache.",
                hint=self._advice,
            )

    def verify(self, tree: CandidateTree, tokens: Tensor) -> Tensor:
        """Run tokens (B, N) after the text; return hidden states (B, N, E). The cache then holds all nodes."""
        batch, nodes = tokens.shape
        positions = self.lengths[:, None] + tree.depths  # (B, N)
        before = self.filled[:, None].expand(-1, nodes, -1)
        among = tree.mask.expand(batch, -1, -1)
        visible = torch.cat([before, among], -1)  # (B, N, P + N)
        distance = positions[..., None] - torch.cat([self.positions, positions], 1)[:, None]
        mask = self.make_mask(visible, distance)
        return self.backbone(input_ids=tokens, position_ids=positions, attention_mask=mask, **self.cache_options)[0]

    def keep(self, nodes: Tensor, lengths: Tensor, *, longest: int) -> None:
        """Keep the first `lengths` (B,) of `nodes` (B, D + 1) of each row in the cache; remove the rest of the tree."""
        size = self.filled.shape[1]
        nodes = nodes[:, :longest].clamp(min=0)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)  # (B, K, P + N, D)
                index = (size + nodes)[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
                held[:, :, size : size + longest] = held.gather(2, index)
                setattr(layer, name, held[:, :, : size + longest])
        steps = torch.arange(longest, device=self.device)
        self.filled = torch.cat([self.filled, steps < lengths[:, None]], 1)
        self.positions = torch.cat([self.positions, self.lengths[:, None] + steps], 1)
        self.lengths = self.lengths + lengths


def _mask_maker(model: PreTrainedModel, advice: str) -> Callable[[Tensor, Tensor], Any]:
    """Return a function that makes the attention_mask: one for all layers, or one per layer type.

    Its arguments: visible slots (B, N, P + N), and how many tokens back they lie. Raises UserError with `advice`.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = sorted(set(getattr(config, "layer_types", None) or ()))
    unknown = [name for name in types if name not in ("full_attention", "sliding_attention")]
    if unknown:
        raise UserError(
            f"{type(model).__name__} has layers of {', '.join(unknown)}, from whose state rejected candidates "
            "cannot be removed.",
            hint=advice,
        )

    def make(visible: Tensor, distance: Tensor) -> Any:
        full = _additive(visible, model.dtype)
        near = full if window is None else _additive(visible & (distance < window), model.dtype)
        by_type = {"full_attention": full, "sliding_attention": near}
        if not types:  # older configurations have a window for all layers, or none
            return near
        return by_type if len(types) > 1 else by_type[types[0]]

    return make


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, S) bool -> (B, 1, N, S): 0 for visible slots, the lowest number for others."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
