"""Decoding with Medusa heads: a tree of guesses is checked in one forward pass, and the longest right path is kept.

One step: the heads guess from the last hidden state; the tree's tokens go through the model at once, each seeing the
text and its own path; every node's logits say what follows it; the path on which all guesses are accepted is kept
with its keys and values, and the token behind it is the next root. No other forward pass is needed.

Rows of a batch keep different numbers of tokens. Their caches stay one tensor: a row has holes, which its mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ligertune.decode.acceptance import Acceptance, Greedy
from ligertune.errors import UserError
from ligertune.tasks.medusa.candidate_tree import Tree
from ligertune.tasks.medusa.head_form import HeadForm, backbone_of
from ligertune.tasks.medusa.heads import MedusaHeads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Decoded:
    """New tokens of each row, an end-of-text token included, and the forward passes that each took after the prompt."""

    tokens: list[list[int]]
    passes: list[int]

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens that a pass gave; plain decoding gives one."""
        return sum(map(len, self.tokens)) / max(1, sum(self.passes))


@torch.no_grad()
def decode_with_heads(
    model: PreTrainedModel,
    heads: MedusaHeads,
    form: HeadForm,
    prompts: Sequence[Sequence[int]],
    tree: Tree,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    acceptance: Acceptance | None = None,
) -> Decoded:
    """Continue prompts, token ids each. With the greedy acceptance, the default, as plain greedy decoding would."""
    model.eval()
    guesses, rule = _Guesses(model, heads, tree), acceptance or Greedy()
    text = _Text(model, prompts)
    hidden = text.read_prompts()  # (B, E)
    root = rule.first(form.logits(guesses.model_head(hidden)))
    out: list[list[int]] = [[] for _ in prompts]
    passes = [0] * len(prompts)
    done = [False] * len(prompts)
    while not all(done):
        tokens = guesses.tokens(root, hidden)  # (B, N)
        behind = text.try_tree(tree, tokens)  # (B, N, E)
        found = rule.accept(tree, tokens, form.logits(guesses.model_head(behind)))
        kept = tokens.gather(1, found.nodes.clamp(min=0)).tolist()
        lengths = found.lengths.tolist()
        text.keep(found.nodes, found.lengths, most=max(lengths))
        last = found.nodes.gather(1, found.lengths[:, None] - 1)  # (B, 1)
        hidden = behind.gather(1, last[..., None].expand(-1, -1, behind.shape[-1])).squeeze(1)
        root = found.next_tokens
        for row, (new, length) in enumerate(zip(kept, lengths, strict=True)):
            if not done[row]:
                passes[row] += 1
                done[row] = _append(out[row], new[:length], max_new_tokens, eos_token_ids)
    return Decoded(out, passes)


def _append(text: list[int], new: list[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> bool:
    """Add tokens up to the end of the text or the most that are wanted; whether that is reached."""
    for token in new:
        text.append(token)
        if token in eos_token_ids or len(text) == max_new_tokens:
            return True
    return False


class _Guesses:
    """The tokens of the tree's nodes, from the root and the last hidden state."""

    def __init__(self, model: PreTrainedModel, heads: MedusaHeads, tree: Tree) -> None:
        self.model_head: nn.Module = model.get_output_embeddings()
        weight = self.model_head.weight
        self.tree, self.ranks = tree, min(tree.most_ranks, len(weight))
        self.heads = [(head[: heads.num_layers], w) for head, w in zip(heads, heads.projections(weight), strict=True)]
        if tree.depth > len(heads):
            raise ValueError(f"the tree is {tree.depth} deep, and there are {len(heads)} heads")

    def tokens(self, root: Tensor, hidden: Tensor) -> Tensor:
        """root (B,), hidden (B, E) -> (B, N)."""
        asked = self.heads[: self.tree.depth]
        likeliest = torch.stack([(blocks(hidden) @ w.t()).topk(self.ranks).indices for blocks, w in asked], 1)
        return torch.cat([root[:, None], likeliest[:, self.tree.heads, self.tree.ranks]], 1)


class _Text:
    """The text so far, as the model's cache holds it: P slots, of which a row uses those that are `filled`."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.backbone, self.cache = model, backbone_of(model), DynamicCache()
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.prompts = prompts
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)  # (B,)
        slots = torch.arange(max(map(len, prompts)), device=self.device)
        self.filled = slots < self.lengths[:, None]  # (B, P)
        self.positions = slots.expand(len(prompts), -1)  # (B, P)
        self.masks = _Masks.of(model)

    def read_prompts(self) -> Tensor:
        """The hidden state (B, E) of each prompt's last token. Shorter prompts are filled up behind their end."""
        rows = torch.zeros(self.filled.shape, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(self.prompts):
            rows[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        hidden = self.backbone(input_ids=rows, past_key_values=self.cache, use_cache=True)[0]
        self._check_cache()
        last = (self.lengths - 1)[:, None, None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, last).squeeze(1)

    def _check_cache(self) -> None:
        plain = all(
            isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.shape[2] == self.filled.shape[1]
            for layer in self.cache.layers
        )
        if not plain or len(self.cache.layers) != self.model.config.get_text_config().num_hidden_layers:
            raise UserError(
                f"{type(self.model).__name__} keeps more than keys and values of each token, "
                "from which rejected guesses could not be taken back.",
                hint="Decode it without --medusa.",
            )

    def try_tree(self, tree: Tree, tokens: Tensor) -> Tensor:
        """tokens (B, N) behind the text -> hidden states (B, N, E); the cache then holds them all."""
        batch, nodes = tokens.shape
        positions = self.lengths[:, None] + tree.depths  # (B, N)
        sees = torch.cat(
            [self.filled[:, None].expand(-1, nodes, -1), tree.sees.expand(batch, -1, -1)], -1
        )  # (B, N, P + N)
        distance = positions[..., None] - torch.cat([self.positions, positions], 1)[:, None]
        return self.backbone(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self.masks.make(sees, distance, self.dtype),
            past_key_values=self.cache,
            use_cache=True,
        )[0]

    def keep(self, nodes: Tensor, lengths: Tensor, *, most: int) -> None:
        """Of the tree just tried, each row's first `lengths` (B,) `nodes` (B, D + 1); the others leave the cache."""
        size = self.filled.shape[1]
        nodes = nodes[:, :most].clamp(min=0)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)  # (B, K, P + N, D)
                index = (size + nodes)[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
                held[:, :, size : size + most] = held.gather(2, index)
                setattr(layer, name, held[:, :, : size + most])
        steps = torch.arange(most, device=self.device)
        self.filled = torch.cat([self.filled, steps < lengths[:, None]], 1)
        self.positions = torch.cat([self.positions, self.lengths[:, None] + steps], 1)
        self.lengths = self.lengths + lengths


@dataclass(frozen=True)
class _Masks:
    """The masks of a model's layers: one for all, or one for each type of layer, some of which look back `window`."""

    window: int | None
    layer_types: tuple[str, ...]

    @staticmethod
    def of(model: PreTrainedModel) -> _Masks:
        config = model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        types = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
        unknown = [name for name in types if name not in ("full_attention", "sliding_attention")]
        if unknown:
            raise UserError(
                f"{type(model).__name__} has layers of {', '.join(unknown)}, whose guesses cannot be taken back.",
                hint="Decode it without --medusa.",
            )
        return _Masks(window if getattr(config, "use_sliding_window", True) else None, types)

    def make(self, sees: Tensor, distance: Tensor, dtype: torch.dtype) -> Any:
        """sees (B, N, P + N), and how far back each slot is -> what the model takes as attention_mask."""
        if not self.layer_types or set(self.layer_types) == {"full_attention"}:
            limited = self.window is not None and not self.layer_types
            return _additive(sees & (distance < self.window) if limited else sees, dtype)
        near = sees if self.window is None else sees & (distance < self.window)
        if len(self.layer_types) == 1:
            return _additive(near, dtype)
        return {"full_attention": _additive(sees, dtype), "sliding_attention": _additive(near, dtype)}


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, S) -> (B, 1, N, S): 0 where a node sees a slot, else the lowest number."""
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]
