"""Many answers to many prompts, each the same in any batch: see `slot_engine` for how they grow.

Models whose cache cannot be replaced slot by slot are answered by transformers' `generate`, in batches of prompts of
the same length, with the same choice of tokens; a SamplingNote says so.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from ligertune.any_types import AnyModule
from ligertune.decode.answers.answer_ends import StopTexts, end_tokens_of, nan_error
from ligertune.decode.answers.answer_task import (
    Answer,
    AnswerTask,
    Prompt,
    SamplingNote,
    SamplingSettings,
    sampling_notes,
)
from ligertune.decode.answers.slot_attention import SLOTS, NoSlotsError
from ligertune.decode.answers.slot_engine import CPU_SLOTS, answers_by_slots, has_room, probe_slots
from ligertune.decode.answers.token_choice import answer_key, choose_tokens
from ligertune.errors import UserError
from ligertune.models.compile import run_eagerly
from ligertune.models.score_head import embedding_rows
from ligertune.models.shape import base_of

__all__ = [
    "Answer",
    "Prompt",
    "SamplingNote",
    "SamplingSettings",
    "check_prompt_ids",
    "sample_answers",
    "sampling_notes",
]

# `generate` applies these options after its logits processors, when our processor has already chosen the token.
_REFUSED = ("num_beams", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")


def check_prompt_ids(model: AnyModule, highest: int, *, name: str) -> None:
    """Raise UserError if the highest token id of the prompts is not the model's.

    On a GPU such an id ends the process with a failed assertion. name: of the model.
    """
    rows = embedding_rows(base_of(model))
    if highest >= rows:
        raise UserError(
            f"The tokenizer of {name} gives a prompt the token id {highest}, and the model knows {rows} tokens.",
            hint="Use the tokenizer the model was trained with.",
        )


def sample_answers(
    model: AnyModule,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    answers_each: int = 1,
    name: str,
    batch_size: int | None = None,
    on_tokens: Callable[[int, Sequence[int]], object] | None = None,
) -> Iterator[Answer]:
    """Yield each answer when it is finished, in any order.

    name: of the model, for errors. batch_size: answers that grow at a time; None: by the device. Of the model's own
    generation settings only the tokens that end an answer count.
    on_tokens: called with the place of a prompt and the next tokens of its answer, as these are made.
    Until the last answer the model is in evaluation mode, with an attention that takes masks. Warns with a SamplingNote
    if it cannot be answered slot by slot, or not as a CUDA graph. Raises UserError if it computes NaN, and
    for prompts without tokens.
    """
    if not prompts:
        return
    if settings.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {settings.max_new_tokens}: expected at least 1.")
    # a step reads the last token of its prompt, so there must be one
    empty = next((place for place, prompt in enumerate(prompts) if not prompt.ids), None)
    if empty is not None:
        raise UserError(f"Prompt {empty + 1} has no tokens, so there is nothing to answer.")
    task = AnswerTask(
        model=model,
        base=base_of(model),
        tokenizer=tokenizer,
        prompts=prompts,
        settings=settings,
        answers_each=answers_each,
        name=name,
        batch_size=batch_size,
        end_tokens=end_tokens_of(model, settings.end_tokens),
        on_tokens=on_tokens,
    )
    was_training = model.training
    model.eval()
    try:
        yield from _answers(task)
    finally:
        model.train(was_training)


def _answers(task: AnswerTask) -> Iterator[Answer]:
    masked = _attention_with_masks(task.base)
    # a model that needs eager attention may add terms to its scores that SLOTS does not have
    attentions: tuple[str, ...] = (SLOTS, masked) if masked == "sdpa" else (masked,)
    reason = ""
    options = dict(task.settings.generate_options)
    if options:
        attentions = ()
        reason = f"slots have no {' and no '.join(options)}"
    for attention in attentions:
        with _attention_of(task.base, attention):
            slots_reason = reason
            try:
                like, reason = probe_slots(task)
            except NoSlotsError as error:
                reason = str(error)
                break
            if like is not None and not has_room(task, like):
                reason = "memory has no room for the longest prompt with max_new_tokens"
                break
            if like is not None:
                if slots_reason:
                    _note(f"answers attend by transformers' {attention}, which reads empty columns too: {slots_reason}")
                yield from answers_by_slots(task, like)
                return
    _note(f"answers are made by transformers' generate, in batches of prompts of the same length: {reason}")
    with _attention_of(task.base, masked):
        yield from _answers_by_generate(task)


def _note(text: str) -> None:
    warnings.warn(text, SamplingNote, stacklevel=2)


def _attention_with_masks(base: AnyModule) -> str:
    """Return an attention of transformers that takes masks: the model's own, else one that it supports."""
    own = str(base.config._attn_implementation)
    if own in ("sdpa", "eager"):
        return own
    return "sdpa" if base._supports_sdpa else "eager"


@contextlib.contextmanager
def _attention_of(base: AnyModule, name: str) -> Iterator[None]:
    """Let a model attend by another implementation. Attention of packed documents, for one, takes no masks."""
    before = base.config._attn_implementation
    if before == name:
        yield
        return
    base.set_attn_implementation(name)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


@contextlib.contextmanager
def _without_own_settings(base: AnyModule) -> Iterator[None]:
    """Take a model's generation settings away: `generate` completes those that it is given by them."""
    before = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = before


class _OwnChoice(LogitsProcessor):
    """Chooses the token of each row as slots do, and leaves `generate` no other."""

    def __init__(self, task: AnswerTask, keys: Tensor, places: Sequence[int]) -> None:
        """keys: of the answers. places: of their prompts."""
        self.task = task
        self.keys = keys
        self.log_probs: list[Tensor] = []
        self._growing = dict(enumerate(places))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = torch.full((len(scores),), len(self.log_probs), dtype=torch.int32, device=scores.device)
        chosen, log_probs = choose_tokens(scores, self.keys, places, self.task.settings.filters)
        if bool(log_probs.isnan().any()):
            raise nan_error(self.task.name)
        self.log_probs.append(log_probs)
        if self.task.on_tokens is not None:
            for row, token in enumerate(chosen.tolist()):
                if row in self._growing:
                    self.task.on_tokens(self._growing[row], [token])
                if token in self.task.end_tokens:
                    self._growing.pop(row, None)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


def _answers_by_generate(task: AnswerTask) -> Iterator[Answer]:
    """Answer in batches without padding, which some of these models do not mask."""
    size = task.batch_size or CPU_SLOTS
    for _, places in groupby(task.longest_first(), key=lambda place: len(task.prompts[place].ids)):
        asked = [(place, number) for place in places for number in range(task.answers_each)]
        for start in range(0, len(asked), size):
            with torch.no_grad(), run_eagerly():
                answers = _answer_batch(task, asked[start : start + size])
            yield from answers


def _answer_batch(task: AnswerTask, asked: Sequence[tuple[int, int]]) -> list[Answer]:
    tokenizer = task.tokenizer
    options = dict(task.settings.generate_options)
    refused = next((option for option in _REFUSED if option in options), None)
    if refused is not None:
        raise UserError(f"{refused}: answers are made without it.", hint="Leave it out.")
    ids = torch.tensor([task.prompts[place].ids for place, _ in asked], device=task.device)
    n_prompt = ids.shape[1]
    keys = [answer_key(task.prompts[place].seed, number) for place, number in asked]
    places = [place for place, _ in asked]
    choice = _OwnChoice(task, torch.tensor(keys, dtype=torch.int32, device=task.device), places)
    stops = StopTexts(tokenizer, task.settings.stop, prompt_length=n_prompt)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with _without_own_settings(task.base):
        made = task.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=task.settings.max_new_tokens,
            pad_token_id=pad or 0,
            eos_token_id=list(task.end_tokens) or None,
            do_sample=False,
            repetition_penalty=task.settings.repetition_penalty,
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([stops] if stops.texts else []),
            **options,
        )
    log_probs = torch.stack(choice.log_probs, 1).tolist()
    answers = []
    for row, (place, number) in enumerate(asked):
        new = made[row, n_prompt:].tolist()
        # generate goes on until all rows have ended, and pads those that have
        at_end = next((n for n, token in enumerate(new, 1) if token in task.end_tokens), len(new))
        at_text = stops.length(new[:at_end], at_end)
        n = at_text or at_end
        answers.append(task.answer(place, number, new[:n], log_probs[row][:n], has_stop_text=at_text is not None))
    return answers
