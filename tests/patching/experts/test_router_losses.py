"""Auxiliary loss and z-loss of routers are those of transformers under our experts, with every gradient.

No causal family of transformers adds a router z-loss itself (Switch Transformers, an encoder and decoder, does), so
that for other families it is computed here from the router logits that the model returns.
"""

import copy

import pytest
import torch
import transformers
from support.models.moe_families import eager_model
from support.models.tiny_families import inputs_of, tiny_family
from support.same_training import FP32, assert_same
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from ligertune.models.experts.expert_load import auxiliary_losses
from ligertune.patching.patch import patch

COEFFICIENT = 0.3  # large, so that the loss and the routers' gradients show an error of these terms
FAMILIES = ["mixtral", "gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"))]  # fmt: skip


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_auxiliary_loss_and_z_loss_of_the_routers_are_unchanged(family):
    plain = eager_model("causal", family)
    plain.router_aux_loss_coef = COEFFICIENT
    patched, results = copy.deepcopy(plain), []
    experts = next(row for row in patch(patched).rows if row.kernel == "experts")
    assert experts.applied > 0 and not experts.left
    for model in (patched, plain):
        output = model(**inputs_of(family), output_router_logits=True)
        z_loss = sum(router_z_loss_func(logits.unsqueeze(0)) for logits in output.router_logits)
        (output.loss + COEFFICIENT * z_loss).backward()
        results.append((output.loss.detach(), output.aux_loss.detach(), z_loss.detach(), gradients(model)))
    (loss, aux, z_loss, found), (true_loss, true_aux, true_z, expected) = results
    assert true_aux > 0 and true_z > 0
    torch.testing.assert_close(aux, true_aux, rtol=1e-6, atol=0)
    torch.testing.assert_close(z_loss, true_z, rtol=1e-6, atol=0)
    assert_same((loss, found), (true_loss, expected), tolerance=FP32, least=1e-3)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="transformers 5.17's own forward fails if it adds these losses"
)
def test_losses_that_a_family_adds_itself_are_unchanged():
    """Switch Transformers: its experts have no gate and stay as they are; norms are patched."""
    sizes = {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
             "num_heads": 4, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
             "expert_capacity": 64, "dropout_rate": 0.0, "router_jitter_noise": 0.0}  # fmt: skip
    config = transformers.SwitchTransformersConfig(**sizes, decoder_start_token_id=0, router_z_loss_coef=COEFFICIENT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = transformers.SwitchTransformersForConditionalGeneration(config).train()
        ids = torch.randint(1, 160, (2, 24))
    plain.encoder.config.decoder_sparse_step = plain.decoder.config.decoder_sparse_step = 2  # else it adds nothing
    patched, results = copy.deepcopy(plain), []
    patch(patched)
    for model in (patched, plain):
        output = model(input_ids=ids, labels=ids, output_router_logits=True)
        output.loss.backward()
        z_loss = (output.encoder_z_loss + output.decoder_z_loss).item()
        results.append((output.loss.detach(), gradients(model), z_loss))
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-6) and results[1][2] > 1
    assert_same(results[0][:2], results[1][:2], tolerance=FP32, least=1e-3)


@pytest.mark.slow
def test_the_z_loss_of_the_logits_is_unchanged():
    """Bamba adds it in its own forward; the logits are materialised for it, with a warning."""
    plain = tiny_family("causal", "bamba")
    plain.z_loss_coefficient = COEFFICIENT
    patched, results = copy.deepcopy(plain), []
    patch(patched)
    for model in (patched, plain):
        output = model(**inputs_of("bamba"))
        output.loss.backward()
        results.append((output.loss.detach(), gradients(model)))
    assert_same(*results, tolerance=FP32, least=1e-3)
    plain.z_loss_coefficient = 0.0
    assert results[1][0] > 1.1 * plain(**inputs_of("bamba")).loss


def test_coefficients_are_reported_if_the_model_adds_the_losses():
    config = transformers.MixtralConfig(router_aux_loss_coef=0.02)
    config.router_z_loss_coef = 0.001  # as models with their own code name it
    assert auxiliary_losses(config) == {}
    config.output_router_logits = True
    assert auxiliary_losses(config) == {"router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}
    config.router_z_loss_coef = 0.0
    assert auxiliary_losses(config) == {"router_aux_loss_coef": 0.02}
