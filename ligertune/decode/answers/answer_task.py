"""Prompts and settings that a model is given, and the answers that it returns."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ligertune.any_types import AnyModule
from ligertune.decode.answers.answer_ends import cut_at
from ligertune.decode.answers.token_choice import TokenFilters


class SamplingNote(UserWarning):
    """How answers are made where slots, or a CUDA graph, cannot make them."""


@contextlib.contextmanager
def sampling_notes() -> Iterator[list[str]]:
    """Yield a list that holds each SamplingNote once at the end; other warnings are shown then."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        # a second call in one process gives the same notes again
        warnings.simplefilter("always", SamplingNote)
        yield notes
    for one in caught:
        if not issubclass(one.category, SamplingNote):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif str(one.message) not in notes:
            notes.append(str(one.message))


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are drawn, and where they end. Filters are those of transformers, in this order."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # before the temperature, and before log-probabilities
    stop: tuple[str, ...] = ()
    end_tokens: tuple[int, ...] = ()  # ids that end an answer, besides those of the model's generation settings
    # arguments of transformers' generate that slots do not have, as items: it then makes the answers
    generate_options: tuple[tuple[str, Any], ...] = ()

    @property
    def filters(self) -> TokenFilters:
        return TokenFilters(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Prompt:
    """Token ids, at least one, and the seed of the prompt's answers. They do not depend on the other prompts."""

    ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    prompt: place of its prompt. number: among the answers of that prompt. text: up to the stop text, without special
    tokens. ids: all sampled tokens, with the end token. log_probs: log-probabilities of `ids` in the model's own
    distribution, before temperature and filters. finish: "stop" for an end token or a stop text, otherwise "length".
    """

    prompt: int
    number: int
    text: str
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str


@dataclass(frozen=True)
class AnswerTask:
    """A model with the prompts that it answers. The arguments are those of `sample_answers`.

    base: the model without PEFT's classes around it, which has the configuration.
    """

    model: AnyModule
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    settings: SamplingSettings
    answers_each: int
    name: str
    batch_size: int | None
    end_tokens: tuple[int, ...]
    on_tokens: Callable[[int, Sequence[int]], object] | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def most_tokens(self, place: int) -> int:
        """Return the most tokens of a prompt with an answer."""
        return len(self.prompts[place].ids) + self.settings.max_new_tokens

    def longest_first(self) -> list[int]:
        """Return the places of the prompts: prompts of similar length are read together, with little padding."""
        return sorted(range(len(self.prompts)), key=lambda place: -len(self.prompts[place].ids))

    def answer(
        self, place: int, number: int, ids: Sequence[int], log_probs: Sequence[float], *, has_stop_text: bool
    ) -> Answer:
        """Return a finished answer."""
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
        return Answer(
            prompt=place,
            number=number,
            text=cut_at(text, self.settings.stop),
            ids=tuple(ids),
            log_probs=tuple(log_probs),
            finish="stop" if has_stop_text or ids[-1] in self.end_tokens else "length",
        )
