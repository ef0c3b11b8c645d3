"""Scores of the documents of a batch, packed or padded: hidden states at their last tokens, then the score head.

transformers' *ForSequenceClassification applies the head to all tokens of a row and takes one of them, so a packed row
would have one score. `DocumentScores` computes the same scores for each document, and gives the head only those tokens.
The last token is the last one that is not the padding token, as transformers has it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from ligertune.any_types import AnyModule
from ligertune.data.batching.collate import collate, collate_packed
from ligertune.data.examples import Example
from ligertune.errors import UserError
from ligertune.models.score_head import score_head, score_module
from ligertune.patching.module_patch import ModulePatch, patch_module

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = "score_rows"  # keyword of a forward: (D,) int64, places of last tokens among all N tokens of the batch
_TOKENS = 9  # of the text on which `check_scores` compares
# Largest allowed difference relative to the largest score.
EXACT = 1e-3  # in float32
ROUNDED = 3e-2  # in half precision


class DocumentScores(ModulePatch):
    """Mixin of a *ForSequenceClassification model: with `score_rows` its logits are (1, D, labels)."""

    def forward(self: AnyModule, *args: Any, score_rows: Tensor | None = None, **kwargs: Any) -> Any:
        if score_rows is None:
            return super().forward(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, score_rows)
        head: AnyModule = score_module(self)
        return SequenceClassifierOutputWithPast(logits=head(chosen)[None])


def check_score_head(model: PreTrainedModel) -> None:
    """Raise UserError for an encoder, and for a model without a linear score head on a backbone. Works on the meta
    device.
    """
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise _refusal(
            model, "is an encoder: its tokens attend to later ones, and it does not read its scores at the last"
        )
    if score_head(model) is None:
        raise _refusal(model, "has no linear score head on its hidden states")


def patch_scores(model: AnyModule) -> None:
    """Let a model score the documents of packed and padded batches."""
    check_score_head(model)
    patch_module(model, DocumentScores)


@torch.no_grad()
def check_scores(model: PreTrainedModel, *, multiple_of: int, packed: bool) -> None:
    """Raise UserError unless a text's scores at its last token are those that the model itself computes.

    multiple_of, packed: of the batches.
    """
    was_training = model.training
    device = next(model.parameters()).device
    config = model.config.get_text_config()
    length = -(-_TOKENS // multiple_of) * multiple_of
    others = [token for token in range(config.vocab_size) if token != config.pad_token_id]
    ids = np.resize(others[1 : length + 1], length)
    make = collate_packed if packed else collate
    batch = make([Example(ids, ids, "")], pad_token_id=0)
    del batch["labels"]
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    model.eval()
    try:
        own = model(**batch, use_cache=False).logits
        every = torch.arange(length, device=device)
        ours = model(**batch, use_cache=False, score_rows=every).logits[0]
    finally:
        model.train(was_training)
    # Products of other sizes round differently. Scores of other tokens differ by about as much as they are large.
    allowed = (ROUNDED if ours.dtype.itemsize < 4 else EXACT) * float(ours.abs().max())
    if own.shape != ours[-1:].shape or not torch.allclose(own, ours[-1:], rtol=0, atol=allowed):
        raise _refusal(model, "does not read its scores at the last token")


def _refusal(model: PreTrainedModel, what: str) -> UserError:
    return UserError(
        f"model.model_name_or_path: this {type(model).__name__} {what}.",
        hint="Give a causal language model, such as Llama, Qwen, Mistral or Gemma.",
    )


def last_tokens(input_ids: Tensor, lengths: Sequence[int], *, pad_token_id: int) -> Tensor:
    """Return the place of the last token of each document that is not padding, (D,) int64.

    input_ids: of consecutive documents, on the CPU. A document of padding tokens alone is read at its first.
    """
    places = []
    kept = input_ids.flatten() != pad_token_id
    for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        found = torch.nonzero(kept[begin:end])
        places.append(begin + (int(found[-1]) if len(found) else 0))
    return torch.tensor(places, dtype=torch.int64)


def set_pad_token(model: nn.Module, pad_token_id: int) -> None:
    """Write the padding token into the configuration, by which transformers finds the last token of a padded row."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.get_text_config().pad_token_id = pad_token_id
