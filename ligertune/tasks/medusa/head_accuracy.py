"""How often each head is right, by the rank that it gives the right token: what trees and reports are made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ligertune.tasks.medusa.head_targets import IGNORE_INDEX, shifted_targets, shifts
from ligertune.tasks.medusa.medusa_model import MedusaModel

RANKS = 10  # of a head's tokens that are looked at
ROWS = 512  # whose logits are held at once


@torch.no_grad()
def rank_accuracy(model: MedusaModel, batches: Iterable[dict[str, Any]]) -> Tensor:
    """(K, RANKS) on the CPU: the share of head k's targets at which the token it ranks r-th is the one there.

    The targets are the held-out labels (B, T) of `batches`, so a head's top-1 is column 0 and its top-5 the sum of the
    first five. NaN for a head without any target.
    """
    heads, weight = model.medusa_head, model.get_output_embeddings().weight
    ahead = shifts(len(heads), with_model=False)
    n_ranks = min(RANKS, len(weight))
    right = torch.zeros(len(heads), n_ranks, dtype=torch.float64, device=weight.device)
    count = torch.zeros(len(heads), 1, dtype=torch.float64, device=weight.device)
    was_training = model.training
    model.eval()
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "labelled_rows")}
        targets = shifted_targets(batch["labels"], batch.get("position_ids"), ahead).flatten(1)  # (K, N)
        hidden = model.last_hidden_state(**inputs, use_cache=False).flatten(0, 1)  # (N, E)
        for k, projection in enumerate(heads.projections(weight)):
            for rows in (targets[k] != IGNORE_INDEX).nonzero().squeeze(1).split(ROWS):
                logits = heads[k][: heads.num_layers](hidden[rows]) @ projection.t()
                hits = logits.topk(n_ranks, dim=-1).indices == targets[k, rows, None]
                right[k] += hits.sum(0)
                count[k] += len(rows)
    model.train(was_training)
    return (right / count).cpu()
