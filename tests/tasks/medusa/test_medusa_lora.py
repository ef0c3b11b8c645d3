"""Heads around a model with LoRA adapters: the adapters train in stage 2, and the same code finds the parts."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import batch, make

from ligertune.planning.options import MedusaOptions
from ligertune.tasks.medusa.medusa_model import attach_heads


def test_stage_2_trains_adapters_and_heads_alone():
    adapted = get_peft_model(make("llama"), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    spec = MedusaOptions(num_heads=2, stage=2)
    results = []
    for fused in (False, True):
        model = attach_heads(adapted, spec, fused=fused)
        made = batch()
        del made["attention_mask"]
        output = model(**made, use_cache=False)
        output.loss.backward()
        results.append((output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad()
    (naive, expected), (fused, found) = results
    torch.testing.assert_close(fused.loss, naive.loss, rtol=1e-6, atol=1e-6)
    assert found.keys() == expected.keys()
    assert {"lora" in name or name.startswith("medusa_head.") for name in found} == {True}
    assert any("lora_A" in name for name in found) and any(name.startswith("medusa_head.") for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)
