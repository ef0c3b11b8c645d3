"""Hooks, wrappers and parametrizations of the output head: they see hidden states and logits, and change the loss."""

import copy
import warnings

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from support.models import tiny_models
from support.same_training import assert_same_training
from torch import nn
from torch.nn.utils import parametrize

from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch

IGNORED = "ignore:the loss is computed from materialised logits"


class Halved(ModelHook):
    def post_forward(self, module, output):
        return output * 0.5


class Softened(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def halve_output(head):
    return head.register_forward_hook(lambda module, args, output: output * 0.5)


def halve_input(head):
    return head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def halve_globally(head):
    hook = torch.nn.modules.module.register_module_forward_hook
    return hook(lambda module, args, output: output * 0.5 if module is head else None)


def halve_gradient(head):
    return head.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 0.5,))


class Replaced:
    """A forward set on the instance, which `remove` takes away."""

    def __init__(self, head):
        self.head, plain = head, head.forward
        head.forward = lambda hidden: plain(hidden) * 0.5

    def remove(self):
        del self.head.forward


class ReplacedByAccelerate:
    def __init__(self, head):
        self.head = add_hook_to_module(head, Halved())

    def remove(self):
        remove_hook_from_module(self.head)


OBSERVERS = (halve_output, halve_input, halve_globally, halve_gradient, Replaced, ReplacedByAccelerate)


def plain_and_patched(**changes):
    plain = tiny_models.make("llama", **changes)
    patched = copy.deepcopy(plain)
    patch(patched)
    return plain, patched


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("observe", OBSERVERS)
def test_an_observer_added_after_the_patch_sees_logits_and_can_be_removed(observe):
    plain, patched = plain_and_patched()
    batch = tiny_models.batch()
    undisturbed = plain(**batch).loss
    handles = [observe(model.lm_head) for model in (plain, patched)]
    assert_same_training(patched, plain, batch, num_items_in_batch=31)
    assert (loss_counts(patched).fused, loss_counts(patched).materialised.total()) == (0, 1)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(patched(**batch).loss, undisturbed, rtol=1e-5, atol=0)
    assert loss_counts(patched).fused == 1


@pytest.mark.filterwarnings(IGNORED)
def test_an_observer_from_before_the_patch_sees_logits():
    plain = tiny_models.make("llama")
    patched = copy.deepcopy(plain)
    seen = []
    for model in (plain, patched):
        halve_output(model.lm_head)
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append((args[0].shape, output.shape)))
    patch(patched)
    assert_same_training(patched, plain, tiny_models.batch())
    assert seen == 2 * [((2, 24, 64), (2, 24, tiny_models.VOCAB))]


def test_the_warning_names_the_hook():
    _, patched = plain_and_patched()
    halve_output(patched.lm_head)
    with pytest.warns(UserWarning, match=r"output head is observed: it has a forward hook \(halve_output"):
        patched(**tiny_models.batch())


def soften(head):
    parametrize.register_parametrization(head, "weight", Softened())


PROVIDERS = {
    "parametrization": soften,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "weight norm by a hook": nn.utils.weight_norm,
    "offloading": lambda head: add_hook_to_module(head, AlignDevicesHook(execution_device="cpu", offload=True)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("provide", PROVIDERS.values(), ids=PROVIDERS)
def test_what_only_provides_the_weight_leaves_the_loss_fused(provide):
    plain, patched = plain_and_patched()
    for model in (plain, patched):
        provide(model.lm_head)
    if provide is PROVIDERS["offloading"]:
        with torch.no_grad():
            losses = [model(**tiny_models.batch()).loss.item() for model in (patched, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    else:
        assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert (loss_counts(patched).fused, loss_counts(patched).materialised.total()) == (1, 0)


def test_a_loss_that_a_trainer_computes_itself_is_counted_and_reported_once():
    _, patched = plain_and_patched()
    batch = tiny_models.batch()
    forward = patched.forward
    patched.forward = lambda labels, **inputs: forward(**inputs).logits.logsumexp(-1).mean()
    with pytest.warns(UserWarning, match="linear_cross_entropy was patched .* but did not run"):
        patched(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(**batch)
        del patched.forward
        patched(**batch)
    counts = loss_counts(patched)
    assert (counts.elsewhere, counts.fused) == (2, 1)
