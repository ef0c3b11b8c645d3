"""Experts of every family: recognised as expected, and the loss and gradients of transformers' own loop.

pytest tests/patching/experts -m "slow or not slow"        all families
"""

import copy

import pytest
import torch
import transformers
from support.models.moe_families import (
    LEFT,
    MORE,
    NAMED,
    eager_model,
    experts_of,
    families_with_experts,
    installed,
    with_implementation,
)
from support.models.tiny_families import inputs_of
from support.same_training import FP32, losses_and_gradients

from ligertune.patching.experts.kernel_experts import KernelExperts, register_experts
from ligertune.patching.experts.recognise_experts import recognise_experts
from ligertune.patching.patch import patch, unpatch
from ligertune.patching.probe import Refusal

# Parameters of recurrences and hyper-connections whose gradients are small sums of large terms: transformers' own
# batched_mm differs from its eager loop by up to 5e-5 of their largest gradient.
CANCELLING, LOOSE = ("forget_gate.A_log", "hc_head."), 1e-4
LEAST = 1e-3  # share of the largest gradient of all below which a parameter's is zero but for rounding
ONLY_EXPERTS = {"rope": False, "norm": False, "loss": "torch"}


def slow(families):
    return [pytest.param(*family, marks=pytest.mark.slow) for family in families]


def skip_unless_installed(kind, model_type):
    if not installed(kind=kind, model_type=model_type):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def assert_same_gradients(found, expected):
    """Compare losses with 1e-5, and gradients with 1e-5 of each parameter's largest gradient."""
    torch.testing.assert_close(found[0], expected[0], rtol=FP32, atol=0)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, truth in expected[1].items():
        error = float((found[1][name] - truth).abs().max()) / max(float(truth.abs().max()), LEAST * largest)
        assert error <= (LOOSE if any(part in name for part in CANCELLING) else FP32), (name, error)


def trained(model, model_type):
    torch.manual_seed(0)
    return losses_and_gradients(model, inputs_of(model_type))


@pytest.mark.parametrize(("kind", "model_type"), [*NAMED, *slow(MORE)])
def test_loss_and_every_gradient_are_those_of_the_eager_experts(kind, model_type):
    """Patched, and as the implementation of transformers' registry."""
    skip_unless_installed(kind, model_type)
    plain = eager_model(kind, model_type)
    experts = experts_of(plain)
    if not any("gate_up_proj" in module._parameters for module in experts):
        pytest.skip(f"transformers {transformers.__version__} stores these experts in another form")
    assert {recognise_experts(module) for module in experts if recognised(module)} == {(NAMED | MORE)[kind, model_type]}
    expected = trained(plain, model_type)
    patched = copy.deepcopy(plain)
    row = next(row for row in patch(patched, **ONLY_EXPERTS).rows if row.kernel == "experts")
    assert row.applied == sum(map(recognised, experts))
    assert_same_gradients(trained(patched, model_type), expected)
    if row.left:  # shared experts of another form
        return
    register_experts()
    registered = with_implementation(copy.deepcopy(plain), "ligertune")
    assert_same_gradients(trained(registered, model_type), expected)
    assert not unpatch(patched)
    assert all(torch.equal(a, b) for a, b in zip(flat(trained(patched, model_type)), flat(expected), strict=True))


def recognised(module):
    return not isinstance(recognise_experts(module), Refusal)


def flat(result):
    loss, gradients = result
    return [loss, *gradients.values()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model_type"), LEFT)
def test_other_experts_are_left_alone_with_the_reason(kind, model_type):
    skip_unless_installed(kind, model_type)
    model = eager_model(kind, model_type)
    row = next(row for row in patch(model, **ONLY_EXPERTS).rows if row.kernel == "experts")
    assert not row.applied and row.left == len(experts_of(model))
    assert LEFT[kind, model_type] in row.note
    assert not any(isinstance(module, KernelExperts) for module in model.modules())


@pytest.mark.slow
def test_no_family_with_experts_is_missing_here():
    """The tables are of one version of transformers: an older one has fewer."""
    assert families_with_experts() <= {**NAMED, **MORE, **LEFT}.keys()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "ligertune"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_are_recognised_whatever_their_implementation(model_type, implementation):
    """deepgemm and sonicmoe run on GPUs only."""
    register_experts()
    model = with_implementation(eager_model("causal", model_type), implementation)
    assert {recognise_experts(module) for module in experts_of(model)} == {NAMED["causal", model_type]}
