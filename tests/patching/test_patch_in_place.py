"""The gated MLP's kernel overwrites the outputs of its projections, and training stays the same.

The reference path makes new tensors, so on a machine without a GPU test_recompute.py runs this file
once more under Triton's interpreter.
"""

import copy
from unittest import mock

import peft
import pytest
import torch
from support.models import tiny_models
from support.rerun_interpreted import DEVICE
from support.same_training import assert_same_training
from torch import nn

from ligertune.models.trainable import apply_method
from ligertune.patching.lora.fused_lora import FusedLora, fuse_adapters
from ligertune.patching.mlps import kernel_mlps as patch_module
from ligertune.patching.mlps.kernel_mlps import gives_new_unseen_output
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions


def test_only_plain_layers_without_hooks_may_be_overwritten():
    linear, watched, replaced, parametrized = (nn.Linear(2, 2) for _ in range(4))
    watched.register_forward_hook(lambda *_: None)
    replaced.forward = replaced.forward  # as accelerate's hooks do
    nn.utils.parametrizations.weight_norm(parametrized)
    x = torch.ones(2)
    assert gives_new_unseen_output(linear, x)
    for other in (nn.Identity(), nn.Dropout(), nn.LayerNorm(2), watched, replaced, parametrized):
        assert not gives_new_unseen_output(other, x)
    with mock.patch.object(nn.modules.module, "_has_any_global_hook", lambda: True):
        assert not gives_new_unseen_output(linear, x)


def asked_in_place(model) -> set[bool]:
    """Return the `inplace` arguments of the gated kernels in one training step."""
    asked = set()

    def spy(op):
        def call(*args, inplace=False, **kwargs):
            asked.add(inplace)
            return op(*args, inplace=inplace, **kwargs)

        return call

    with (
        mock.patch.object(patch_module, "swiglu", spy(patch_module.swiglu)),
        mock.patch.object(patch_module, "geglu", spy(patch_module.geglu)),
    ):
        model(**tiny_models.batch(rows=2, length=6, device=DEVICE)).loss.backward()
    return asked


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_a_patched_mlp_overwrites_what_its_projections_gave(family):
    model = tiny_models.make(family).to(DEVICE)
    patch(model)
    assert asked_in_place(model) == {True}


def test_projections_with_hooks_or_adapters_keep_their_outputs():
    model = tiny_models.make("llama").to(DEVICE)
    patch(model)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["gate_proj"]))
    assert asked_in_place(adapted) == {False}
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    assert asked_in_place(model) == {False}


@pytest.mark.parametrize(
    ("changes", "asked"), [({}, {True}), ({"lora_dropout": 0.1}, {True}), ({"use_dora": True}, {False})]
)
def test_fused_adapters_let_their_outputs_be_overwritten(changes, asked):
    model = tiny_models.make("llama").to(DEVICE).train()
    patch(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj"], **changes))
    fuse_adapters(adapted)
    assert asked_in_place(adapted) == asked
    adapted.base_model.model.model.layers[0].mlp.gate_proj.lora_A["default"].register_forward_hook(lambda *_: None)
    assert asked_in_place(adapted) == asked | {False}


@pytest.mark.parametrize(
    ("family", "checkpointing"), [("llama", False), ("llama", True), ("gemma2", False), ("phi3", False)]
)
def test_training_with_overwritten_outputs_is_the_same(family, checkpointing):
    """Compare with the same kernels where hooks on the projections keep them from overwriting."""
    model = tiny_models.make(family).to(DEVICE)
    patch(model, loss="torch")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apart = copy.deepcopy(model)
    for layer in apart.modules():
        if type(layer) is nn.Linear:
            layer.register_forward_hook(lambda *_: None)
    assert_same_training(model, apart, tiny_models.batch(rows=2, length=6, device=DEVICE))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recompute", [False, "mlps"])
def test_adapters_train_the_same_with_overwritten_outputs(recompute, checkpointing):
    """Compare with the same kernels where hooks on the fused layers keep their outputs as they are."""
    model = tiny_models.make("llama").to(DEVICE)
    patch(model, loss="torch", recompute=recompute)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    options = MethodOptions(type="lora", lora_r=2, lora_target_modules="all-linear")
    adapted = apply_method(model, options, fused=True).to(DEVICE)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    apart = copy.deepcopy(adapted)
    watched = [layer for layer in apart.modules() if isinstance(layer, FusedLora)]
    for layer in watched:
        layer.register_forward_hook(lambda *_: None)
    assert len(watched) == 7 * len(model.model.layers)
    assert True in asked_in_place(adapted) and True not in asked_in_place(apart)  # to recompute overwrites nothing
    batch = tiny_models.batch(rows=2, length=6, device=DEVICE)
    assert_same_training(adapted, apart, batch, tolerance=1e-4)  # a watched layer computes alone: in another order
