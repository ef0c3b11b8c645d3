"""A patched model computes what the unpatched one does: the loss and the gradient of every parameter."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from same_training import FP32, assert_same_training, losses_and_gradients, relative_error

from ligertune.patching.patch import patch

# heads, scaling, soft caps, ties, experts, packed MLPs, partial and interleaved rotation, q/k norms, unknown norms
FAMILIES = tuple(tiny_models.FAMILIES)


def pair(family, **changes):
    plain = tiny_models.make(family, **changes)
    patched = copy.deepcopy(plain)
    patch(patched)
    return patched, plain


COUNTS = (None, 31, torch.tensor(31))


@pytest.mark.parametrize(("family", "counted"), zip(FAMILIES, COUNTS * len(FAMILIES), strict=False), ids=str)
def test_loss_and_every_gradient_equal_the_unpatched_ones(family, counted):
    options = {} if counted is None else {"num_items_in_batch": counted}
    assert_same_training(*pair(family), tiny_models.batch(), **options)


@pytest.mark.parametrize("loss", ["cross_entropy", "torch"])
@pytest.mark.parametrize("counted", [None, 31])
def test_the_other_losses_equal_the_unpatched_one(loss, counted):
    plain = tiny_models.make("gemma2")
    patched = copy.deepcopy(plain)
    patch(patched, loss=loss)
    options = {} if counted is None else {"num_items_in_batch": counted}
    assert_same_training(patched, plain, tiny_models.batch(), **options)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_gradient_checkpointing_changes_nothing(family):
    patched, plain = pair(family)
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_training(patched, plain, tiny_models.batch())


def test_shift_labels_are_used_unchanged():
    patched, plain = pair("llama")
    batch = tiny_models.batch()
    shift_labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert_same_training(patched, plain, batch, shift_labels=shift_labels)
    assert_same_training(patched, plain, batch, shift_labels=torch.full_like(shift_labels, 5))


def test_a_switch_patches_one_kind_of_layer():
    for switch in ("rope", "norm", "mlp"):
        plain = tiny_models.make("llama")
        patched = copy.deepcopy(plain)
        others = {"rope": False, "norm": False, "mlp": False, switch: True}
        applied = {row.kernel for row in patch(patched, loss="torch", **others).rows if row.applied}
        assert applied == {{"rope": "apply_rope", "norm": "rms_norm", "mlp": "swiglu"}[switch]}
        assert_same_training(patched, plain, tiny_models.batch())


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_gives_the_same_loss_and_logits(family):
    patched, plain = (model.eval() for model in pair(family))
    with torch.no_grad():
        found, expected = patched(**tiny_models.batch()), plain(**tiny_models.batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=FP32, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_gives_the_same_tokens(family):
    patched, plain = (model.eval() for model in pair(family, output_router_logits=False))
    prompt = tiny_models.batch()["input_ids"][:, :6]
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(patched.generate(prompt, **settings), plain.generate(prompt, **settings))


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "granite"])
def test_bfloat16_is_as_close_to_fp32_as_without_kernels(family, autocast):
    patched, plain = pair(family)
    _, truth = losses_and_gradients(plain, tiny_models.batch())
    errors = []
    for model in (patched, plain):
        model = model if autocast else model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, gradients = losses_and_gradients(model, tiny_models.batch())
        errors.append(relative_error(gradients, truth))
    assert errors[0] <= 1.1 * errors[1] + 1e-3  # two roundings of the same numbers differ by chance
    assert errors[0] < 0.03
