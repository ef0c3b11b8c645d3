"""Patched before PEFT wraps the model: loss and gradients equal those of the unpatched model under the same adapter."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import tiny_models
import torch
from same_training import assert_same_training

from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch

ATTENTION = ["q_proj", "v_proj"]


def adapted_pair(family="llama", **config):
    """(patched, plain) under the same LoRA, both its matrices away from zero."""
    plain = tiny_models.make(family)
    patched = copy.deepcopy(plain)
    patch(patched)
    pair = [peft.get_peft_model(m, peft.LoraConfig(r=4, lora_alpha=8, **config)).train() for m in (patched, plain)]
    generator = torch.Generator().manual_seed(3)
    for found, expected in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        if expected.requires_grad:
            expected.data = 0.1 * torch.randn(expected.shape, generator=generator)
            found.data = expected.data.clone()
    return pair


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral"])
def test_lora_on_every_linear_layer(family):
    patched, plain = adapted_pair(family, target_modules="all-linear")
    assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert loss_counts(patched).fused == 1


def test_a_fully_trained_head_keeps_the_fused_loss():
    patched, plain = adapted_pair(target_modules=ATTENTION, modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(patched, plain, tiny_models.batch())
    assert loss_counts(patched).fused == 1


def test_lora_on_the_head_computes_logits_and_warns():
    patched, plain = adapted_pair(target_modules=[*ATTENTION, "lm_head"])
    with pytest.warns(UserWarning, match="materialised logits"):
        assert_same_training(patched, plain, tiny_models.batch())
    assert loss_counts(patched).fused == 0
    assert loss_counts(patched).materialised.total() == 1


def test_patching_after_peft_reaches_the_model_inside():
    plain = peft.get_peft_model(tiny_models.make("llama"), peft.LoraConfig(r=4, target_modules=ATTENTION)).train()
    patched = copy.deepcopy(plain)
    assert [row.applied for row in patch(patched).rows] == [2, 5, 2, 1]
    assert_same_training(patched, plain, tiny_models.batch())


def test_merging_gives_the_same_weights():
    patched, plain = adapted_pair(target_modules="all-linear")
    found, expected = (model.merge_and_unload().state_dict() for model in (patched, plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
