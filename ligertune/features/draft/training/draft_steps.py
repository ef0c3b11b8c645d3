r"""Training-time test: a draft head runs K steps on its own states, as it does while a server drafts K tokens.

At step k row i reads token x_{i+1+k} and the head's state of step k - 1 at the same row; its position is p_i + k. It
attends to the keys of step 0 of its document up to row i, and to its own keys of steps 1 to k:

            keys of step 0        own keys of steps 1, 2
            r0 r1 r2 r3           r0 r1 r2 r3    r0 r1 r2 r3
        r0   x                     x              x
        r1   x  x                     x              x
        r2   x  x  x                     x              x
        r3   x  x  x  x                     x              x

A mask of this form costs (T, K T) scores. Here packed attention computes the first part with its log-sum-exp, and a
softmax over it and the scores s_m of the own keys merges both:

    w = softmax([lse, s_1 … s_k])        out = w_0 out_0 + sum_m w_m v_m

Source: Li et al. 2025, EAGLE-3, https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from ligertune_kernels import Documents, document_attention, document_attention_with_lse, merge_own_keys
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligertune.features.draft.draft_head import DraftHead, DraftLayer


@dataclass(frozen=True)
class DraftRows:
    """The N tokens of a batch in one row, whose documents attend to themselves."""

    input_ids: Tensor  # (N,)
    positions: Tensor  # (N,): 0 at the first token of a document
    documents: Documents


class StepKeys:
    """Rotated keys and values (N, K, D) of a decoder layer, one of each per step so far."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def with_step(self, key: Tensor, value: Tensor) -> StepKeys:
        """Return the keys and values with those of one more step."""
        extended = StepKeys()
        extended.keys = [*self.keys, key]
        extended.values = [*self.values, value]
        return extended


def attend_to_steps(query: Tensor, steps: StepKeys, documents: Documents) -> Tensor:
    """Return attention (N, H, D) of the last step's queries (N, H, D) to step 0 of their document and to own keys."""
    first = (query, steps.keys[0], steps.values[0], documents)
    if len(steps.keys) == 1:
        return document_attention(*first)
    out, lse = document_attention_with_lse(*first)
    return merge_own_keys(query, out, lse, steps.keys[1:], steps.values[1:])


def run_layer(
    head: DraftHead, layer: DraftLayer, steps: StepKeys, hidden: Tensor, embedded: Tensor, rows: DraftRows
) -> tuple[Tensor, StepKeys]:
    """Return a layer's states (N, E) at the next step, from states and embedded tokens (N, E); and its keys so far."""
    projected = layer.project_qkv(hidden, embedded)
    query, key = head.rotate(projected.query, projected.key, rows.positions + len(steps.keys))
    extended = steps.with_step(key, projected.value)
    return layer.finish(attend_to_steps(query, extended, rows.documents), projected.residual), extended


def draft_states(
    head: DraftHead,
    states: Tensor,  # (N, 3E): of the target
    embedding: Tensor,  # (V, E)
    rows: DraftRows,
    n_steps: int,
    *,
    recompute: bool = False,
) -> list[Tensor]:  # n_steps times (N, E)
    """Return the head's states after each step, before its norm. recompute: layers run again in the backward.

    Near the end of a document later steps read tokens of the next one: no row reads these states, and no loss may.
    """
    hidden = head.combine(states)
    layers = head.decoder_layers()
    steps = [StepKeys() for _ in layers]
    run = partial(checkpoint, run_layer, use_reentrant=False, preserve_rng_state=False) if recompute else run_layer
    found = []
    for step in range(n_steps):
        embedded = F.embedding(torch.roll(rows.input_ids, -1 - step), embedding).to(hidden.dtype)
        for place, layer in enumerate(layers):
            hidden, steps[place] = run(head, layer, steps[place], hidden, embedded, rows)
        found.append(hidden)
    return found
