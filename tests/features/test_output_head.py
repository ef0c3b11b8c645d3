"""Output heads outside their model's forward: scale, soft cap, and what is refused."""

import pytest
import torch
from support.models.tiny_models import make
from torch import nn

from ligertune.errors import UserError
from ligertune.features.output_head import LogitTransform, check_plain_head, logit_transform
from ligertune.patching.deferred_logits import DeferredLogits


def test_logits_of_bfloat16_products_are_scaled_and_capped_in_float32():
    z = torch.tensor([[30.0, -3.0, 0.40625]], dtype=torch.bfloat16)
    exact = z.double() * 0.3
    found = LogitTransform(0.3, None).logits(z)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    capped = LogitTransform(0.3, 4.0).logits(z)
    torch.testing.assert_close(capped.double(), 4 * torch.tanh(exact / 4), rtol=1e-6, atol=0)
    assert LogitTransform(1.0, 3.0).logits(z.double()).dtype is torch.float64


@pytest.mark.parametrize(
    ("family", "scale", "softcap"), [("llama", 1.0, None), ("granite", 0.25, None), ("gemma2", 1.0, 3.0)]
)
def test_the_transform_is_that_of_the_configuration(family, scale, softcap):
    """Granite divides by logits_scaling: 4.0; Gemma 2 has final_logit_softcapping: 3.0."""
    assert logit_transform(make(family)) == LogitTransform(scale, softcap)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_as_it_was(training):
    model = make("llama").train(training)
    logit_transform(model)
    assert model.training == model.model.layers[0].training == training
    ids = torch.tensor([[3, 4, 5]])
    logits = model(input_ids=ids).logits
    assert not isinstance(logits, DeferredLogits)
    assert not model.lm_head._forward_hooks and not model.model._forward_hooks


def test_a_head_with_a_bias_is_refused():
    model = make("llama")
    model.lm_head = nn.Linear(64, 128)
    for check in (check_plain_head, logit_transform):
        with pytest.raises(UserError, match="the output head of this LlamaForCausalLM has a bias"):
            check(model)


def test_a_model_that_changes_its_hidden_state_before_the_head_is_refused():
    model = make("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    with pytest.raises(UserError, match="changes h before the head"):
        logit_transform(model)


@pytest.mark.filterwarnings("ignore:the loss is computed from materialised logits")
def test_a_model_that_adds_to_its_logits_is_refused():
    model = make("llama")
    forward = model.forward

    def shifted(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits + 1.0
        return outputs

    model.forward = shifted
    with pytest.raises(UserError, match="does more to its logits than scale or soft-cap them"):
        logit_transform(model)
