"""Attentions whose rotary functions are exchanged, and reports of those that keep their own."""

import copy
import inspect

import pytest
import torch
from support.models import tiny_models
from support.models.tiny_families import tiny_family
from torch import nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from ligertune.patching.module_patch import patch_module
from ligertune.patching.patch import patch
from ligertune.patching.rope.kernel_rope import KernelRope, is_rotary, recognise_rope

apply_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb


class OtherAttention(LlamaAttention):
    """Calls the rotary function of this file."""

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


def key_not_rotated(q, k, cos, sin, unsqueeze_dim=1):
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)[0], k


def test_a_rotary_function_that_differs_is_refused(monkeypatch):
    class Attention(OtherAttention):  # a new class: results are cached by class
        pass

    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", key_not_rotated)
    attention = Attention(tiny_models.config_of("llama"), 0)
    assert is_rotary(attention)
    assert "key_not_rotated is no rotation" in recognise_rope(attention).reason


def test_a_replaced_helper_of_a_rotary_function_is_probed_again(monkeypatch):
    attention = LlamaAttention(tiny_models.config_of("llama"), 0)
    ((_, before),) = recognise_rope(attention).functions
    rotate_half = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -rotate_half(x))
    ((_, after),) = recognise_rope(attention).functions
    assert (before.backwards, after.backwards) == (False, True)


apply_rotary_emb = key_not_rotated


class TwoFunctions(LlamaAttention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin) if self.training else apply_rotary_emb(q, k, cos, sin)


def test_an_attention_with_one_unknown_function_of_two_keeps_both():
    assert "key_not_rotated" in recognise_rope(TwoFunctions(tiny_models.config_of("llama"), 0)).reason


@pytest.mark.parametrize("unsqueeze_dim", [0, 1, 2])
def test_the_rotary_function_accepts_the_calls_of_the_original(unsqueeze_dim):
    attention = tiny_models.make("llama").model.layers[0].self_attn
    original = modeling_llama.apply_rotary_pos_emb
    patch_module(attention, KernelRope, recognise_rope(attention))
    replacement = inspect.unwrap(type(attention).forward).__globals__["apply_rotary_pos_emb"]
    q, k = torch.randn(2, 5, 5, 16), torch.randn(2, 5, 5, 16)
    angles = torch.randn(5, 8) if unsqueeze_dim == 0 else torch.randn(1, 5, 8)
    both = torch.cat((angles, angles), dim=-1)
    expected = original(q, k, both.cos(), both.sin(), unsqueeze_dim=unsqueeze_dim)
    assert replacement is not original
    torch.testing.assert_close(replacement(q, k, both.cos(), both.sin(), unsqueeze_dim=unsqueeze_dim), expected)


def rope_row(model):
    return next(row for row in patch(model).rows if row.kernel == "apply_rope")


def test_a_rotation_in_a_method_is_left_with_the_reason():
    row = rope_row(tiny_family("causal", "roformer"))
    assert (row.kernel, row.applied, row.left) == ("apply_rope", 0, 4)
    assert "computes RoPE in its own method apply_rotary_position_embeddings" in row.note


class TinyRotaryEmbedding(nn.Module):
    def forward(self, x):
        return x.cos(), x.sin()


def test_a_rotary_embedding_that_nothing_known_applies_is_in_the_report():
    model = tiny_family("causal", "gpt2")
    assert rope_row(model).note == "none found"
    model.transformer.rotary_emb = TinyRotaryEmbedding()
    row = rope_row(model)
    assert (row.kernel, row.applied, row.left) == ("apply_rope", 0, 1)
    assert row.note.startswith("1 TinyRotaryEmbedding: no forward applies it by a function of its own")


def test_trained_angles_are_in_the_report():
    """Mistral Large 4 learns its frequencies."""
    model = tiny_models.make("llama")
    model.model.rotary_emb.alpha = nn.Parameter(torch.ones(8))
    assert rope_row(model).note == "1 LlamaRotaryEmbedding: while its angles are trained, PyTorch rotates by them"
    model.model.rotary_emb.alpha.requires_grad_(False)
    assert rope_row(model).note == "2 patched before"


def test_a_function_that_rotates_sections_of_the_columns_calls_the_kernel_for_each():
    """Gemma 4's vision tower rotates by the row and by the column of a patch."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma4VisionConfig(**sizes, attn_implementation="eager")
    plain = Gemma4VisionAttention(config, 0)
    patched = copy.deepcopy(plain)
    patch_module(patched, KernelRope, recognise_rope(patched))
    outer = inspect.unwrap(type(patched).forward).__globals__["apply_multidimensional_rope"]
    assert outer.__globals__["apply_rotary_pos_emb"].__globals__["__name__"].endswith("rope.rotation")
    position_ids = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).view(1, 12, 2)
    x, angles = torch.randn(1, 12, 32), torch.rand(1, 12, 2, 4).repeat(1, 1, 1, 2).flatten(-2)
    outputs = [one(x, (angles.cos(), angles.sin()), position_ids=position_ids)[0] for one in (plain, patched)]
    torch.testing.assert_close(*outputs)
    for y in outputs:
        y.pow(2).sum().backward()
    for one, other in zip(plain.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "gptj", "llama4_text"])
def test_a_patched_attention_calls_the_kernel(family):
    """Its own function is not called any more."""
    model = tiny_family("causal", family)
    patch(model)
    attention = next(module for module in model.modules() if isinstance(module, KernelRope))
    names = [name for name, _ in attention.patch_spec.functions]
    namespace = inspect.unwrap(type(attention).forward).__globals__
    assert all(namespace[name].__globals__["__name__"].endswith("rope.rotation") for name in names)
