"""Greedy or sampled answers to many prompts, in batches of similar length that are padded on the left."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from ligertune.any_types import AnyModule
from ligertune.decode.answers.answer_ends import FiniteLogits, StopTexts, cut_at, end_tokens_of
from ligertune.models.compile import run_eagerly
from ligertune.models.read_config import config_value
from ligertune.models.shape import attention_widths, base_of, depth_of

# prompts of a batch: on a GPU as many as have room for their keys and values
MOST_PROMPTS = 512
CPU_PROMPTS = 16
_SHARE_OF_FREE = 0.5  # of a GPU's free memory, for keys and values: a longer cache is a copy of the shorter one


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


def answer_batches(
    model: AnyModule,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[AnswerRequest],
    *,
    name: str,
    batch_size: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[str]:
    """Return the answer of each request, cut before the first of its stop texts. name: of the model, for errors."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        settings = (request.stop, request.max_new_tokens, request.end_tokens, repr(request.sampling))
        groups[settings].append(index)
    answers = [""] * len(requests)
    done = 0
    was_training = model.training
    model.eval()
    with torch.no_grad(), attention_of(model, attention_with_masks(model)), run_eagerly():
        for group in groups.values():
            group.sort(key=lambda index: -len(requests[index].ids))
            while group:
                longest = requests[group[0]]
                size = batch_size or _prompts_of_batch(model, len(longest.ids) + longest.max_new_tokens)
                chosen = group[:size]
                group = group[size:]
                found = _answer_batch(model, tokenizer, [requests[index] for index in chosen], name)
                for index, answer in zip(chosen, found, strict=True):
                    answers[index] = answer
                done += len(chosen)
                progress(done / len(requests))
    model.train(was_training)
    return answers


def _prompts_of_batch(model: AnyModule, tokens: int) -> int:
    """Return how many prompts are answered at a time. tokens: of the longest prompt with its answer."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return CPU_PROMPTS
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = int(_SHARE_OF_FREE * free)
    return max(min(room // (tokens * cached_bytes_per_token(model)), MOST_PROMPTS), 1)


def cached_bytes_per_token(model: AnyModule) -> int:
    """Return the bytes of one token's keys and values, at least 1, as if each layer attended to all tokens."""
    config = model.config.get_text_config()
    if not config_value(config, "num_attention_heads"):
        return 1
    return 2 * depth_of(config) * attention_widths(config)[1] * model.dtype.itemsize


def _answer_batch(
    model: AnyModule, tokenizer: PreTrainedTokenizerBase, requests: Sequence[AnswerRequest], name: str
) -> list[str]:
    first = requests[0]
    longest = max(len(request.ids) for request in requests)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.full((len(requests), longest), pad or 0)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.ids) :] = torch.tensor(request.ids)
        mask[row, longest - len(request.ids) :] = 1
    device = next(model.parameters()).device
    stopping = [StopTexts(tokenizer, first.stop, prompt_length=longest)] if first.stop else []
    made = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=first.max_new_tokens,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList(stopping),
        logits_processor=LogitsProcessorList([FiniteLogits(name)]),
        eos_token_id=list(end_tokens_of(model, first.end_tokens)) or None,
        **_settings(first.sampling),
    )
    texts = tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
    return [cut_at(text, first.stop) for text in texts]


def _settings(sampling: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    """Return keywords of `generate`. Greedy decoding has no temperature, with which transformers warns."""
    found = dict(sampling)
    if not found.get("do_sample"):
        found = {key: value for key, value in found.items() if key not in ("temperature", "top_p", "top_k")}
    return {"do_sample": False, **found}


def attention_with_masks(model: AnyModule) -> str:
    """Return an attention of transformers that takes masks: the model's own, else one that it supports."""
    inner: AnyModule = base_of(model)
    own = str(inner.config._attn_implementation)
    if own in ("sdpa", "eager"):
        return own
    return "sdpa" if inner._supports_sdpa else "eager"


@contextlib.contextmanager
def attention_of(model: AnyModule, name: str) -> Iterator[None]:
    """Let a model attend by another implementation. Attention of packed documents, for one, takes no masks."""
    inner: AnyModule = base_of(model)
    before = inner.config._attn_implementation
    if before == name:
        yield
        return
    inner.set_attn_implementation(name)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)
