"""The FLOPs that reports count of Medusa training, against those that torch counts while it happens."""

from __future__ import annotations

import pytest
import torch
from tiny_models import batch, make
from torch.utils.flop_counter import FlopCounterMode

from ligertune.planning.options import MedusaOptions
from ligertune.tasks.medusa.medusa_model import attach_heads
from ligertune.tasks.medusa.medusa_shape import MedusaShape

LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)  # attention is counted by its causal half here, and whole by torch


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("stage", [1, 2])
def test_flops_of_the_linear_layers(stage, lm_head):
    spec = MedusaOptions(num_heads=3, num_layers=2, stage=stage, lm_head=lm_head)
    model = attach_heads(make("llama"), spec, fused=False)
    made = batch()
    with FlopCounterMode(display=False) as counter:
        model(made["input_ids"], made["labels"], use_cache=False).loss.backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if op in LINEAR)
    expected = MedusaShape.of_heads(model).flops(tokens=made["input_ids"].numel(), squared_lengths=0)
    assert counted == pytest.approx(expected, rel=1e-6)
