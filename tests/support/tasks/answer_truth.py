"""Tiny models, answers with untrained tokens, and log-probabilities of each answer alone, from transformers' logits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ligertune.attention.packed_documents  # noqa: F401  registers per_document
from ligertune.data.batching.collate import Batcher
from ligertune.data.examples import Example, Examples
from ligertune.features.task import Task
from ligertune.patching.fused_loss import let_head_losses_run
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch
from ligertune.planning.plan import Plan
from support.models.tiny_models import make
from support.quickstart_runs import plan_run
from support.tasks.preference_runs import pairs, settings

VOCAB, X = 40, -100
CPU = torch.device("cpu")


def tiny(**changes: object) -> torch.nn.Module:
    """Return a model of one layer, in evaluation mode."""
    return make("llama", vocab_size=VOCAB, num_hidden_layers=1, **changes).eval()


def computing(model: torch.nn.Module, *, packed: bool, kernels: bool = True) -> torch.nn.Module:
    """Let a model compute losses of answers; of packed ones with attention within each document."""
    if packed:
        model.config._attn_implementation = "per_document"
        install_packing_checks(model)
    if kernels:
        patch(model)
    else:
        let_head_losses_run(model, "dpo")
    return model


def answer(ids: list[int], trained: list[int], *, desirable: int = -1) -> Example:
    """Return an answer of which the tokens at the places `trained` have labels."""
    tokens = np.array(ids, dtype=np.int32)
    labels = np.full(len(ids), X, dtype=np.int32)
    labels[trained] = tokens[trained]
    return Example(tokens, labels, "a:1", desirable=desirable)


def pair(chosen: Example, rejected: Example) -> Example:
    """Return a pair as one example."""
    parts = [np.concatenate([getattr(side, name) for side in (chosen, rejected)]) for name in ("input_ids", "labels")]
    return Example(*parts, "a:1", first_length=len(chosen.input_ids))


def batcher_of(examples: Examples, *, packed: bool, task: Task | None = None) -> Batcher:
    fields = None if task is None else task.batch_fields
    return Batcher(examples, packed, 8, 0, True, CPU, more_fields=fields, rows_multiple_of=1)


@dataclass(frozen=True)
class Tokens:
    """What a model says about the tokens of one answer that have a label."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    hits: torch.Tensor
    of_all: torch.Tensor  # log-probabilities of all tokens but the first


def tokens_of(model: torch.nn.Module, example: Example) -> Tokens:
    """Return it from the logits of this answer alone. model: without our kernels."""
    ids = torch.from_numpy(example.input_ids).long()
    z = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    log_p = z.log_softmax(-1)
    every = log_p[torch.arange(len(ids) - 1), ids[1:]]
    trained = torch.from_numpy(example.labels[1:] != X)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return Tokens(every[trained], entropy[trained], (z.argmax(-1) == ids[1:])[trained], every)


def plan_of(folder: Path, **changes: Any) -> Plan:
    """Return the plan of a short preference run. packed, length, eval_batch_size: of its rows."""
    layout = {name: changes.pop(name) for name in ("packed", "length", "eval_batch_size") if name in changes}
    plan = plan_run(folder, **settings(folder, pairs(12), **changes)).plan
    rows = replace(plan.rows, kind="packed" if layout.get("packed") else "grouped", length=layout.get("length", 64))
    batching = replace(plan.batching, eval_batch_size=layout.get("eval_batch_size", 2))
    return replace(plan, rows=rows, batching=batching)
