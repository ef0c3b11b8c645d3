"""What of a model trains, by method; and that our kernels under it compute what the plain model computes."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import tiny_models
import torch
from same_training import assert_same_training

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.errors import UserError
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions

HEAD_TOO = ["q_proj", "v_proj", "lm_head"]


def pair(spec: MethodOptions, family: str = "llama", *, checkpointing: bool | str = False, device: str = "cpu"):
    """(patched, plain) under the same method, adapters away from zero."""
    plain = tiny_models.make(family).to(device)
    patched = copy.deepcopy(plain)
    patch(patched)
    made = []
    for model in (patched, plain):
        if checkpointing:
            checkpoint_layers(model, checkpointing)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            made.append(apply_method(model, spec).train())
    generator = torch.Generator().manual_seed(3)
    for ours, theirs in zip(*(model.parameters() for model in made), strict=True):
        if theirs.requires_grad and spec.type == "lora":
            theirs.data = (0.1 * torch.randn(theirs.shape, generator=generator)).to(device)
            ours.data = theirs.data.clone()
    return made


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral", "llama_tied"])
@pytest.mark.parametrize(
    "method",
    [
        {},
        {"type": "lora", "lora_r": 4},
        {"type": "lora", "lora_r": 4, "use_dora": True, "lora_target_modules": ["o_proj"]},
        {"type": "lora", "lora_r": 4, "use_rslora": True, "lora_target_modules": ["o_proj"]},
        {"type": "freeze", "trainable": [r"layers\.1\."]},
    ],
    ids=["full", "lora", "dora", "rslora", "freeze"],
)
def test_patched_and_plain_train_alike(method, family, checkpointing):
    patched, plain = pair(MethodOptions(**method), family, checkpointing=checkpointing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert loss_counts(patched).fused == 1


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_an_adapter_on_the_head_is_a_term_of_the_fused_loss(checkpointing):
    spec = MethodOptions(type="lora", lora_r=4, lora_target_modules=HEAD_TOO)
    patched, plain = pair(spec, checkpointing=checkpointing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert (loss_counts(patched).fused, loss_counts(patched).materialised.total()) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True, "offload", "offload_gate"], ids=str)
@pytest.mark.parametrize(
    "method",
    [
        {},
        {"type": "lora", "lora_r": 4},
        {"type": "lora", "lora_r": 4, "lora_target_modules": HEAD_TOO},
        {"type": "freeze", "trainable": [r"layers\.1\."]},
    ],
    ids=["full", "lora", "lora with the head", "freeze"],
)
def test_kernels_that_write_over_their_inputs_train_alike(method, checkpointing):
    """On a GPU rotary and gated kernels write over what they alone read: nothing that a method or a rerun reads."""
    patched, plain = pair(MethodOptions(**method), checkpointing=checkpointing, device="cuda")
    batch = tiny_models.batch(rows=3, length=37, device="cuda")
    assert_same_training(patched, plain, batch, tolerance=3e-5, num_items_in_batch=31)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_dropout": 0.5}], ids=["DoRA", "dropout"])
def test_an_adapter_that_does_more_on_the_head_makes_logits_and_says_so(changes):
    spec = MethodOptions(type="lora", lora_r=4, lora_target_modules=HEAD_TOO, **changes)
    patched, plain = pair(spec)
    with pytest.warns(UserWarning, match="materialised logits"):
        torch.manual_seed(5)
        ours = patched(**tiny_models.batch()).loss
    torch.manual_seed(5)
    torch.testing.assert_close(ours, plain(**tiny_models.batch()).loss)
    assert loss_counts(patched).fused == 0


def test_evaluation_and_logits_of_an_adapted_head_stay_as_they_are():
    patched, plain = (
        model.eval() for model in pair(MethodOptions(type="lora", lora_r=4, lora_target_modules=HEAD_TOO))
    )
    batch = tiny_models.batch()
    with torch.no_grad():
        torch.testing.assert_close(patched(**batch).logits, plain(**batch).logits)
        ids = batch["input_ids"][:1, :5]
        torch.testing.assert_close(patched(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_what_trains_by_method():
    frozen = MethodOptions(type="freeze", trainable=["lm_head", r"model\.norm\.weight$"])
    model = apply_method(tiny_models.make("llama"), frozen)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"lm_head.weight", "model.norm.weight"}
    with_head = MethodOptions(type="lora", lora_r=3, lora_modules_to_save=["lm_head"])
    adapted = apply_method(tiny_models.make("llama"), with_head)
    names = {name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad}
    assert len([name for name in names if ".lora_" in name]) == 2 * 7 * 2  # A and B of seven layers in two blocks
    assert {name for name in names if ".lora_" not in name} == {"lm_head.modules_to_save.default.weight"}
    assert adapted.peft_config["default"].r == 3


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [({}, 2.0), ({"lora_alpha": 8.0}, 0.5), ({"lora_r": 64}, 0.5), ({"use_rslora": True}, 8.0)],
    ids=["default", "alpha", "r", "rslora"],
)
def test_the_scale_of_an_adapter(changes, scaling):
    adapted = apply_method(tiny_models.make("llama"), MethodOptions(type="lora", **changes))
    assert adapted.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] == scaling


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"type": "lora", "lora_target_modules": ["q_porj"]}, ["lora_target_modules", "q_porj", "q_proj?", "gate_"]),
        ({"type": "lora", "lora_modules_to_save": ["lm_heat"]}, ["lora_modules_to_save", "lm_heat", "lm_head?"]),
        ({"type": "freeze", "trainable": ["layers.7"]}, ["method.trainable", "layers.7", "model.embed_tokens.weight"]),
    ],
    ids=["target", "whole", "pattern"],
)
def test_a_name_that_the_model_does_not_have(spec, words):
    with pytest.raises(UserError) as caught:
        apply_method(tiny_models.make("llama"), MethodOptions(**spec))
    assert all(word in str(caught.value) for word in words)


def test_an_adapter_on_a_tied_head_is_refused():
    for key in ("lora_target_modules", "lora_modules_to_save"):
        with pytest.raises(UserError, match="shares its weight"):
            apply_method(tiny_models.make("llama_tied"), MethodOptions(type="lora", **{key: ["lm_head"]}))


def test_adapters_are_float32_beside_bfloat16_weights_and_compute_in_bfloat16():
    model = tiny_models.make("llama").to(torch.bfloat16)
    patch(model)
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=4))
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}
    seen = []
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_A["default"].register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = adapted(**tiny_models.batch(), use_cache=False).loss
    loss.backward()
    ((given, output),) = seen
    assert (given.dtype, output.dtype) == (torch.bfloat16, torch.bfloat16)
    assert all(p.grad.dtype is torch.float32 for p in adapted.parameters() if p.requires_grad)


def test_merging_adds_the_adapter_to_the_weights():
    patched, _ = pair(MethodOptions(type="lora", lora_r=4, lora_target_modules=HEAD_TOO))
    ids = tiny_models.batch()["input_ids"]
    with torch.no_grad():
        before = patched.eval()(ids).logits
        merged = patched.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, before, rtol=1e-4, atol=1e-4)
    assert not isinstance(merged, peft.PeftModel)
