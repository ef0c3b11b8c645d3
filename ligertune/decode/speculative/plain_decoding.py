"""Decoding without speculation, prompts of examples, and times, to compare speculative decoding with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ligertune.any_types import AnyModule
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.decode.speculative.cached_text import eos_token_ids

if TYPE_CHECKING:
    import numpy as np


def prompt_token_ids(input_ids: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray) -> list[int]:
    """Return the tokens before the first trained one; the first quarter (at most 32) if the text is trained whole."""
    trained = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
    length = trained if trained > 1 else max(1, min(32, len(input_ids) // 4))
    return [int(token) for token in input_ids[:length]]


def decode_plainly(model: AnyModule, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the new tokens of `model.generate` after a prompt, greedily."""
    ids = torch.tensor([list(prompt)], device=model.device)
    pad = {"pad_token_id": eos_token_ids(model)[0]} if eos_token_ids(model) else {}
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, **pad}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def timed(device: torch.device, decode: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """Return (result, seconds), measured between synchronisations of the device."""
    _synchronize(device)
    start = time.perf_counter()
    result = decode(*args, **options)
    _synchronize(device)
    return result, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
