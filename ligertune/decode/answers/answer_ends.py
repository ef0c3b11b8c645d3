"""Where answers end: end tokens, stop texts, and logits that are not numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from ligertune.any_types import AnyModule
from ligertune.errors import UserError

_LOOK_BACK = 4  # tokens more than a stop text has: it may begin and end within one


def end_tokens_of(model: AnyModule, more: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end an answer: those of the model's generation settings, and `more`."""
    own = model.generation_config.eos_token_id
    known = [] if own is None else [own] if isinstance(own, int) else list(own)
    return tuple(dict.fromkeys([*known, *more]))


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the stop texts."""
    for one in stop:
        if one:
            text = text.partition(one)[0]
    return text


class StopTexts(StoppingCriteria):
    """Ends each row whose new text holds one of the stop texts. The other rows go on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], *, prompt_length: int = 0) -> None:
        self.texts = [text for text in stop if text]
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        lengths = (len(tokenizer.encode(text, add_special_tokens=False)) for text in self.texts)
        self.look_back = max(lengths, default=0) + _LOOK_BACK

    def length(self, ids: Sequence[int], n_new: int) -> int | None:
        """Return the number of tokens with which an answer first holds a stop text; None without one.

        n_new: the last tokens, which have not been looked at before.
        """
        if not self.texts or not self._holds(ids[-n_new - self.look_back :]):
            return None
        earlier = range(len(ids) - n_new + 1, len(ids))
        return next((n for n in earlier if self._holds(ids[:n][-self.look_back :])), len(ids))

    def _holds(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(ids))
        return any(stop in text for stop in self.texts)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        new = input_ids[:, self._prompt_length :][:, -self.look_back :]
        return torch.tensor([self._holds(row) for row in new.tolist()], device=input_ids.device)


def nan_error(name: str) -> UserError:
    """Return the error of a model whose logits are not numbers."""
    return UserError(
        f"The model {name} computes NaN: its weights are damaged, or too large for their dtype.", exit_code=1
    )


class FiniteLogits(LogitsProcessor):
    """Refuse logits that are not numbers: greedy decoding would answer with token 0, and sampling would crash."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool(scores.isnan().any()):
            raise nan_error(self._name)
        return scores
