"""Planned memory and FLOPs of draft heads, against what tensors take and what torch counts."""

import pytest
import torch
from ligertune_kernels import labelled_rows
from support.storages import MadeStorages
from support.tasks.draft_runs import plan_draft
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.training import draft_loss, draft_memory
from ligertune.features.draft.training.draft_model import DraftModel
from ligertune.features.draft.training.draft_task import DraftShape
from ligertune.features.output_head import LogitTransform
from ligertune.planning.memory.activation_bytes import ActivationPolicy, MicroBatch, StepBytes
from ligertune.planning.memory.estimate import MemoryEstimate

ROWS, LENGTH = 16, 16  # short documents, whose scores are small
HIDDEN, HEADS, STEPS = 32, 8, 4  # narrow: what references of other ops keep is small beside logits


def model_of(vocab: int, drafted: int, *, loss: str = "eagle", hidden: int = HIDDEN) -> DraftModel:
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4,
                         num_attention_heads=HEADS, num_key_value_heads=2)  # fmt: skip
    ids = torch.arange(drafted) if drafted < vocab else None
    head = DraftHead(draft_config_of(config, draft_vocab_size=drafted), ids)
    spec = DraftSpec(steps=STEPS, loss=loss, num_speculative_tokens=STEPS)
    return DraftModel(LlamaForCausalLM(config), head, spec, transform=LogitTransform()).train()


@pytest.mark.parametrize(
    "vocab, drafted, loss, chunk, labelled",
    [
        (4096, 1024, "eagle", 1 << 28, ROWS),
        (4096, 1024, "eagle", 1 << 20, ROWS),
        (4096, 1024, "acceptance", 1 << 28, ROWS),
        (4096, 1024, "kl", 1 << 28, ROWS),
        (2048, 2048, "eagle", 1 << 28, ROWS),
        (2048, 2048, "eagle", 1 << 28, ROWS // 4),
    ],
)
def test_memory_of_the_loss_is_what_the_plan_says(vocab, drafted, loss, chunk, labelled, monkeypatch) -> None:
    monkeypatch.setattr(draft_loss, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(draft_memory, "CHUNK_BYTES", chunk)
    model = model_of(vocab, drafted, loss=loss)
    ids = torch.randint(0, vocab, (ROWS, LENGTH))
    labels = ids.clone()
    labels[labelled:] = -100
    rows = labelled_rows(labels, shift=(1,), multiple_of=1)
    with MadeStorages(model) as found:
        model(ids, labels, labelled_rows=rows, use_cache=False).loss.backward()
    shape = DraftShape.of_model(model)
    estimate = MemoryEstimate(
        None, shape.layer, shape.head, ActivationPolicy(fused_mlp=False),
        layers=4, itemsize=4, labelled=1.0, heads=shape.heads,
    )  # fmt: skip
    batch = MicroBatch(ROWS * LENGTH, len(rows), LENGTH, accumulates=False)
    phases = estimate.frozen_model_phases(shape.heads, batch, StepBytes(4, 0, 0, 0))
    largest = max(phases, key=lambda phase: phase.total)
    assert largest.name == "loss"
    # On a CPU references of norms and RoPE keep as much again as the hidden states of a layer, and those of attention
    # scores and weights (H, L, L) of each document.
    references = 4 * STEPS * batch.tokens * (7 * HIDDEN + 2 * HEADS * LENGTH)
    assert found.peak == pytest.approx(largest.total + references, rel=0.06)


LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)  # torch counts the whole square of attention, the plan its half


@pytest.mark.parametrize("drafted", [256, 96])
def test_flops_of_the_linear_layers(drafted) -> None:
    model = model_of(256, drafted)
    ids = torch.randint(0, 256, (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(ids, ids, use_cache=False).loss.backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if op in LINEAR)
    assert counted == pytest.approx(DraftShape.of_model(model).flops(tokens=ids.numel(), squared_lengths=0), rel=1e-6)


def test_a_plan_predicts_memory_and_shows_the_head(tmp_path) -> None:
    plan = plan_draft(tmp_path / "run", **{"data.datasets.0.max_samples": 40, "data.max_length": 128}).plan
    assert plan.peak is not None and plan.peak.phase.name == "loss"
