"""The attention that `auto` takes and what is refused, for each machine and model."""

from dataclasses import replace

import pytest
import transformers
from support.models import tiny_models

from ligertune.attention.choice import AttentionDemands, check_shared_rows, choose_attention, installed
from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.precision import Precision

H100 = Machine("nvidia", "cuda", "NVIDIA H100", "sm90", 1, 80 << 30, True, 989e12, 3.35e12, 1, "2.11")
B200 = replace(H100, name="NVIDIA B200", arch="sm100")
T4 = replace(H100, name="Tesla T4", arch="sm75")
MI300 = replace(H100, vendor="amd", name="AMD Instinct MI300X", arch="gfx942")
CPU = replace(H100, vendor="cpu", device="cpu", name="CPU", arch="x86_64")
BF16 = Precision("bfloat16", "no")
FP32 = Precision("float32", "no")
FP16 = Precision("float32", "fp16")


def choose(wanted="auto", family="llama", machine=H100, precision=BF16, packing=True, **settings):
    own = {
        name: settings.pop(name)
        for name in ("own_kernel", "cp_size", "deterministic", "few_shapes")
        if name in settings
    }
    config = tiny_models.config_of(family, **settings)
    return choose_attention(AttentionDemands(wanted, packing=packing, **own), config, machine, precision)


@pytest.mark.parametrize(
    ("settings", "chosen", "why"),
    [
        ({}, "varlen", "documents isolated"),
        ({"family": "mistral"}, "varlen", "documents isolated"),
        ({"precision": FP16}, "varlen", "documents isolated"),
        ({"family": "gemma2"}, "flex_attention", "no soft cap"),
        ({"precision": FP32}, "flex_attention", "bfloat16 or float16 only"),
        ({"machine": T4, "precision": FP16}, "flex_attention", "older than sm80"),
        ({"head_dim": 512}, "flex_attention", "at most 256 wide"),
        ({"precision": FP32, "head_dim": 8}, "per_document", "at least 16 wide"),
        ({"attention_dropout": 0.1}, "per_document", "no dropout"),
        ({"machine": MI300}, "per_document", "flash-attn is not installed"),
        ({"machine": CPU}, "per_document", "documents isolated"),
        ({"machine": CPU, "family": "gemma2"}, "per_document", "documents isolated"),
        ({"cp_size": 2}, "varlen", "documents isolated"),  # attention without a mask
        ({"machine": CPU, "precision": FP32, "cp_size": 2}, "per_document", "documents isolated"),
    ],
)
@pytest.mark.skipif(installed("flash-attn"), reason="flash-attn is installed, and auto takes it")
def test_auto_takes_the_first_exact_one_with_the_reason(settings, chosen, why):
    choice = choose(**settings)
    assert choice.implementation == chosen
    assert why in choice.why


def test_flash_attention_2_is_chosen_where_installed_and_varlen_does_not_fit(tmp_path, monkeypatch):
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert choose(family="gemma2").implementation == "flash_attention_2"
    assert choose().implementation == "varlen"
    assert choose(machine=MI300).implementation == "flash_attention_2"


@pytest.mark.parametrize(("wanted", "precision"), [("auto", FP32), ("sdpa", BF16), ("flex_attention", BF16)])
def test_context_parallel_is_refused_for_attention_of_whole_rows(wanted, precision):
    with pytest.raises(UserError, match=r"parallel\.cp_size"):
        choose(wanted, precision=precision, cp_size=2)


def test_context_parallel_refuses_length_dependent_rope_and_images():
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    check_shared_rows(tiny_models.config_of("phi3"))
    check_shared_rows(transformers.Gemma3TextConfig())
    with pytest.raises(UserError, match="longrope"):
        check_shared_rows(tiny_models.config_of("phi3", rope_parameters=rope))
    with pytest.raises(UserError, match="vision-language"):
        check_shared_rows(transformers.LlavaConfig())
    with pytest.raises(UserError, match=r"parallel\.cp_size: recurrences of qwen3_5_text carry their state"):
        check_shared_rows(transformers.Qwen3_5TextConfig())


def test_flex_attention_is_chosen_for_vision_language_models_that_support_it():
    qwen, llava = (
        choose_attention(AttentionDemands("auto", packing=True), config(), H100, FP32)
        for config in (transformers.Qwen2VLConfig, transformers.LlavaConfig)
    )
    assert qwen.implementation == "per_document"
    assert "flex_attention: transformers does not offer it for Qwen2VLForConditionalGeneration" in qwen.why
    assert llava.implementation == "flex_attention"


@pytest.mark.parametrize(
    "settings", [{}, {"family": "gemma2"}, {"precision": FP32}, {"machine": MI300}, {"machine": CPU}], ids=str
)
def test_document_attention_can_be_chosen_by_its_key(settings):
    assert choose(own_kernel=True, **settings).implementation == "document_attention"


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        *[(s, "document_attention") for s in ({}, {"family": "gemma2"}, {"precision": FP16}, {"head_dim": 256})],
        ({"machine": B200}, "varlen"),
        ({"machine": CPU}, "per_document"),
        ({"precision": FP32}, "flex_attention"),
        ({"attention_dropout": 0.1}, "per_document"),
        ({"head_dim": 512}, "flex_attention"),
        ({"cp_size": 2}, "varlen"),
        ({"wanted": "varlen"}, "varlen"),
        ({"wanted": "flex_attention"}, "flex_attention"),
        ({"wanted": "sdpa"}, "per_document"),
    ],
    ids=str,
)
def test_auto_takes_document_attention_only_where_it_was_measured_faster(settings, chosen):
    choice = choose(own_kernel="auto", **settings)
    assert choice.implementation == chosen
    assert choice.one_launch or chosen != "document_attention"


@pytest.mark.parametrize(
    ("wanted", "settings", "reason"),
    [
        ("varlen", {"family": "gemma2"}, "soft cap"),
        ("varlen", {"machine": CPU, "precision": FP32}, "NVIDIA"),
        ("varlen", {"machine": MI300}, "NVIDIA"),
        ("varlen", {"precision": FP32}, "bfloat16"),
        ("flex_attention", {"machine": CPU, "packing": False}, "NVIDIA GPUs and AMD GPUs only"),
        ("flash_attention_2", {"machine": CPU}, "GPU"),
        ("document_attention", {"machine": T4, "precision": FP16}, "older than sm80"),
        ("document_attention", {"attention_dropout": 0.1}, "no dropout"),
        ("document_attention", {"head_dim": 512}, "at most 256 wide"),
    ],
)
def test_an_impossible_attention_is_refused_by_the_key_that_chose_it(wanted, settings, reason):
    own = wanted == "document_attention"
    key = r"kernels\.attention" if own else f"model.attn_implementation: {wanted}"
    with pytest.raises(UserError, match=f"{key} cannot be used: .*{reason}"):
        choose("auto" if own else wanted, own_kernel=own, **settings)


def test_without_packing_auto_is_left_to_transformers():
    assert choose(packing=False).implementation is None
    assert choose("sdpa", packing=False).implementation == "sdpa"
    assert choose("sdpa").implementation == "per_document"
    assert choose("eager").implementation == choose("eager", packing=False).implementation == "eager"


def test_layers_that_carry_a_state_are_refused_when_planned():
    with pytest.raises(UserError, match=r"data\.packing: llama has indexed_attention layers"):
        choose(layer_types=["indexed_attention", "full_attention"])
    assert choose(packing=False, layer_types=["indexed_attention", "full_attention"]).implementation is None
