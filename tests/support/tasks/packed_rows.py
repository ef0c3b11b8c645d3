"""Documents for the tests of packing: one per batch, or packed into one row by the collator of training."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ligertune.data.batching.collate import collate_packed
from ligertune.data.examples import Example
from support.models import tiny_models

LENGTHS = (19, 1, 24, 7, 12)  # one token; longer and shorter than the sliding windows of 8

WINDOW = {"sliding_window": 8}
# family -> (name in tiny_models, changes of its configuration)
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "gemma2": ("gemma2", WINDOW),
    "gemma2_uncapped": ("gemma2", {**WINDOW, "attn_logit_softcapping": None}),
    "mistral": ("mistral", WINDOW),
    "phi3": ("phi3", {}),
    "phi3_window": ("phi3", WINDOW),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
}
FAMILIES = tuple(VARIANTS)
CAPPED = "gemma2"  # it caps the attention scores
UNCAPPED = tuple(family for family in FAMILIES if family != CAPPED)


def make(family: str, **changes: object) -> PreTrainedModel:
    name, differences = VARIANTS[family]
    return tiny_models.make(name, **{**differences, **changes})


def documents(*, seed: int = 0) -> list[Example]:
    """Return examples of random tokens; the first third of each is a prompt, which is not trained."""
    rng = np.random.default_rng(seed)
    made = []
    for length in LENGTHS:
        tokens = rng.integers(3, tiny_models.VOCAB, length)
        labels = np.where(np.arange(length) < length // 3, -100, tokens)
        made.append(Example(tokens, labels, ""))
    return made


def separate(*, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Return a batch for each document."""
    return [
        {
            name: torch.from_numpy(ids)[None].to(device)
            for name, ids in zip(("input_ids", "labels"), example, strict=False)
        }
        for example in documents()
    ]


def packed(*, device: str = "cpu", multiple_of: int = 16) -> dict[str, Any]:
    """Return a batch of one row that holds all documents."""
    batch = collate_packed(documents(), pad_token_id=0, pad_to_multiple_of=multiple_of)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def history(loss: torch.Tensor) -> set[str]:
    """Return the names of the autograd nodes that a backward of `loss` visits."""
    found, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return {node.name() for node in found}
