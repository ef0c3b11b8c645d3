"""Batches of the trainers' sides, made of ligertune's examples, and the losses of their steps."""

from __future__ import annotations

import numpy as np
import torch

from ligertune.data.examples import Example
from ligertune.data.templates.label_masking import IGNORE_INDEX


def step_losses(losses: list[torch.Tensor], accumulation: int) -> list[float]:
    """Return the loss of each step. A trainer has divided the losses of accumulated micro-batches by their number."""
    values = [float(loss) for loss in losses]
    return [sum(values[i : i + accumulation]) for i in range(0, len(values), accumulation)]


def joined_rows(rows: list[list[Example]]) -> dict[str, torch.Tensor]:
    """Return rows of one length as (B, T), or packed ones as (1, sum T) with the lengths of their documents."""
    documents = [example for row in rows for example in row]
    ids = [torch.tensor(np.array(document.input_ids)).long() for document in documents]
    labels = [torch.tensor(np.array(document.labels)).long() for document in documents]
    if len(documents) == len(rows) and len({len(row) for row in ids}) == 1:
        return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}
    for row in labels:
        row[0] = IGNORE_INDEX  # the token before belongs to another document
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in ids])[None],
        "packed_seq_lengths": torch.tensor([len(row) for row in ids], dtype=torch.int32),
    }


def padded(examples: list[Example], pad: int) -> dict[str, torch.Tensor]:
    """Return a padded batch. GKDTrainer wants to know the prompts, and trains on labels behind their first token."""
    length = max(len(example.input_ids) for example in examples)
    batch = {"input_ids": (pad, "input_ids"), "labels": (-100, "labels"), "attention_mask": (0, None)}
    made = {}
    for name, (fill, field) in batch.items():
        rows = [getattr(example, field) if field else np.ones(len(example.input_ids)) for example in examples]
        whole = [np.pad(row, (0, length - len(row)), constant_values=fill) for row in rows]
        made[name] = torch.tensor(np.stack(whole)).long()
    prompts = {"prompts": made["input_ids"][:, :1], "prompt_attention_mask": made["attention_mask"][:, :1]}
    return {**made, **prompts}
