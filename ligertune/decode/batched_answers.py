"""Answers to requests, each with its own settings: texts that `sample_answers` makes for evaluation."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ligertune.any_types import AnyModule
from ligertune.decode.sampling import Prompt, SamplingSettings, sample_answers
from ligertune.errors import UserError
from ligertune.files.model_files import reason_of

# Settings that slots have, with the values of `generate` if neither the request nor the model has one.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
# Settings that slots do not have and a model may bring, and the values that change nothing.
_NEUTRAL = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "top_h": (None,),
    "typical_p": (None, 1),
}
_OF_DRAWS = ("epsilon_cutoff", "eta_cutoff", "top_h", "typical_p")  # without effect on greedy answers


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt as token ids, and how its answer ends.

    sampling: further arguments of `generate`, as items. end_tokens: ids that end an answer, besides the model's own.
    """

    ids: tuple[int, ...]
    stop: tuple[str, ...]
    max_new_tokens: int
    sampling: tuple[tuple[str, Any], ...] = (("do_sample", False),)
    end_tokens: tuple[int, ...] = ()

    @property
    def is_drawn(self) -> bool:
        return bool(dict(self.sampling).get("do_sample"))


def answer_batches(
    model: AnyModule,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[AnswerRequest],
    *,
    name: str,
    batch_size: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[str]:
    """Return the answer of each request, cut before the first of its stop texts.

    name: of the model, for errors. batch_size: answers that grow at a time; None: by the device. Settings of the
    model that are not in a request count, as in `generate`. Warns and raises as `sample_answers` does.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        key = (request.stop, request.max_new_tokens, request.end_tokens, repr(request.sampling))
        groups[key].append(index)
    seeds = [0] * len(requests)
    # greedy answers, which a run makes while it trains, leave torch's random state as it is
    if any(request.is_drawn for request in requests):
        seeds = torch.randint(2**62, (len(requests),)).tolist()
    answers = [""] * len(requests)
    done = 0
    for group in groups.values():
        first = requests[group[0]]
        found = sample_answers(
            model,
            tokenizer,
            [Prompt(requests[index].ids, seeds[index]) for index in group],
            sampling_settings_of(model, first, name=name),
            name=name,
            batch_size=batch_size,
        )
        for answer in found:
            answers[group[answer.prompt]] = answer.text
            done += 1
            progress(done / len(requests))
    return answers


@contextlib.contextmanager
def refused_settings(name: str) -> Iterator[None]:
    """Turn transformers' refusal of a model's generation settings into a UserError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(
            f"The model {name} cannot generate with its generation_config.json: {reason_of(error)}."
        ) from error


def sampling_settings_of(model: AnyModule, request: AnswerRequest, *, name: str) -> SamplingSettings:
    """Return the settings of a request, completed by those of the model. Raises UserError for those it refuses."""
    own = model.generation_config
    asked = dict(request.sampling)
    asked.pop("do_sample", None)
    known = dict(_DEFAULTS)
    for key in known:
        value = asked.pop(key, getattr(own, key))
        if value is not None:
            known[key] = value
    with refused_settings(name):
        own.validate()
        if request.is_drawn:
            _check_filters(known)
    others = {key: getattr(own, key, None) for key in _NEUTRAL if request.is_drawn or key not in _OF_DRAWS} | asked
    return SamplingSettings(
        max_new_tokens=request.max_new_tokens,
        temperature=known["temperature"] if request.is_drawn else 0.0,
        top_p=known["top_p"],
        top_k=int(known["top_k"]),
        min_p=known["min_p"],
        repetition_penalty=known["repetition_penalty"],
        stop=request.stop,
        end_tokens=request.end_tokens,
        generate_options=tuple(item for item in others.items() if item[1] not in _NEUTRAL.get(item[0], ())),
    )


def _check_filters(known: Mapping[str, Any]) -> None:
    """Raise ValueError for values that transformers refuses. It also refuses a top_k of 0, which means all tokens."""
    TemperatureLogitsWarper(float(known["temperature"]))
    TopPLogitsWarper(known["top_p"])
    MinPLogitsWarper(known["min_p"])
    RepetitionPenaltyLogitsProcessor(known["repetition_penalty"])
    if known["top_k"] != 0:
        TopKLogitsWarper(known["top_k"])
