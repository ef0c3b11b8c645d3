"""Families whose rotary functions are not Llama's: with apply_rope they train and generate as without."""

import copy

import pytest
import torch
import transformers
from support.models.family_check import OUTPUTS
from support.models.tiny_families import MAPPINGS, inputs_of, tiny_family

from ligertune.patching.patch import patch
from ligertune.patching.rope import rotation

# q or k at a time; latent attention; complex tables; a column per pair; backwards; sections of image positions;
# partial rotation. Each with the modules that rotate: attentions, indexers, compressors.
FAMILIES = {
    ("causal", "gemma3n_text"): 4,
    ("causal", "gemma4_text"): 4,
    ("causal", "gemma4_unified_text"): 4,
    ("causal", "gptj"): 4,
    ("causal", "codegen"): 4,
    ("causal", "qwen4_exp_text"): 2,
    ("causal", "deepseek_v4"): 9,
    ("causal", "deepseek_v3"): 4,
    ("causal", "deepseek_v32"): 8,
    ("causal", "glm4_moe_lite"): 4,
    ("causal", "glm_moe_dsa"): 8,
    ("image-text", "kimi_k25"): 4,
    ("image-text", "mistral4"): 4,
    ("causal", "longcat_flash"): 8,
    ("causal", "youtu"): 4,
    ("causal", "axk1"): 4,
    ("causal", "axk2"): 8,
    ("causal", "bailing_hybrid"): 2,
    ("causal", "dots3_note_text"): 6,
    ("causal", "sarvam_mla"): 4,
    ("causal", "minicpm3"): 4,
    ("causal", "llama4_text"): 4,
    ("causal", "deepseek_v2"): 4,
    ("causal", "gpt_oss"): 4,
    ("causal", "nanochat"): 4,
    ("image-text", "qwen2_vl"): 4,
    ("image-text", "qwen2_5_vl"): 4,
    ("image-text", "qwen3_vl"): 4,
    ("image-text", "glm4v"): 4,
    ("image-text", "ernie4_5_vl_moe"): 4,
    ("causal", "phi3"): 4,
    ("causal", "glm4"): 4,
    ("causal", "minimax_m2"): 4,
    ("causal", "cohere2"): 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model_type"), FAMILIES)
def test_a_family_trains_and_generates_as_before(kind, model_type, monkeypatch):
    if model_type not in MAPPINGS[kind][1]:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    plain = tiny_family(kind, model_type)
    patched = copy.deepcopy(plain)
    row = patch(patched, norm=False, mlp=False, loss="torch").rows[0]
    assert (row.kernel, row.left) == ("apply_rope", 0), row
    assert row.applied >= FAMILIES[kind, model_type]
    described = []
    call = rotation._call
    monkeypatch.setattr(rotation, "_call", lambda *args: described.append(call(*args)) or described[-1])
    expected, found = training_step(plain, model_type), training_step(patched, model_type)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        largest = max(1e-3, float(value.abs().max()))
        assert float((found[name] - value).abs().max()) <= 1e-5 * largest, name
    assert torch.equal(OUTPUTS["generation"](patched, model_type), OUTPUTS["generation"](plain, model_type))
    assert described and None not in described  # no call went to the model's own function


def training_step(model, model_type):
    """Return the loss and the gradient of every parameter that has one."""
    model.train().zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs_of(model_type)).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
