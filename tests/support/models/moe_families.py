"""Families of transformers with experts: what `recognise_experts` must find in each, and their tiny models."""

from __future__ import annotations

import torch
from ligertune_kernels.ops.moe.experts import ExpertLayout, GatedActivation
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ligertune.patching.experts.recognise_experts import ExpertsSpec, is_experts
from support.models.tiny_families import LARGEST, MAPPINGS, families, tiny_config, tiny_family

PLAIN = ExpertsSpec(GatedActivation("silu"), ExpertLayout())
TRANSPOSED = ExpertsSpec(GatedActivation("silu"), ExpertLayout(transposed=True))
LIMITED = ExpertsSpec(GatedActivation("silu", limit=10.0), ExpertLayout())
CLAMPED = GatedActivation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
GPT_OSS = ExpertsSpec(CLAMPED, ExpertLayout(transposed=True, interleaved=True))

PLAIN_TEXT = """
afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v32 dots1 dots3_note_text ernie4_5_moe exaone_moe
flex_olmo flint glm4_moe_lite glm_moe_dsa granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3
inkling_text jamba kimi_linear kolibri1 laguna lara_mini lfm2_moe mellum mimo_v2_flash minimax minimax_m2 phimoe
qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp qwen4_exp_text sarvam_mla sarvam_moe solar_open zaya
"""
PLAIN_IMAGE_TEXT = """
deepseek_ocr2 ernie4_5_vl_moe glm4v_moe inkling_mm_model kimi_k25 mistral4 mistral_large4 qwen3_omni_moe_thinker
qwen3_5_moe qwen3_vl_moe qwen4_exp step3p7 unlimited_ocr
"""
# (kind, model type) -> spec of its experts, pinned, so that a match lost to a new transformers is noticed
NAMED = {
    ("causal", "mixtral"): PLAIN,
    ("causal", "qwen2_moe"): PLAIN,
    ("causal", "qwen3_moe"): PLAIN,
    ("causal", "deepseek_v3"): PLAIN,
    ("causal", "glm4_moe"): PLAIN,
    ("causal", "olmoe"): PLAIN,
    ("causal", "gpt_oss"): GPT_OSS,
    ("causal", "granitemoe"): PLAIN,
}
MORE = {
    ("causal", "aria_text"): TRANSPOSED,
    ("causal", "deepseek_v4"): LIMITED,
    ("causal", "hy_v4"): LIMITED,
    ("causal", "minimax_m3_vl_text"): ExpertsSpec(CLAMPED, ExpertLayout()),
    ("image-text", "aria"): TRANSPOSED,
    ("image-text", "glm5_next"): LIMITED,
    ("image-text", "hy_v4_vl"): LIMITED,
    ("image-text", "minimax_m3_vl"): ExpertsSpec(CLAMPED, ExpertLayout()),
} | dict.fromkeys(
    [("causal", name) for name in PLAIN_TEXT.split()] + [("image-text", name) for name in PLAIN_IMAGE_TEXT.split()],
    PLAIN,
)
# (kind, model type) -> part of the reason why its experts are left alone
LEFT = {
    ("causal", "dbrx"): "not gate_up_proj and down_proj",
    ("causal", "inkling2_loop_text"): "'up'",
    ("causal", "inkling2_text"): "'up'",
    ("causal", "jetmoe"): "does not take hidden states, expert indices",
    ("causal", "llama4"): "does not take hidden states, expert indices",
    ("causal", "llama4_text"): "does not take hidden states, expert indices",
    ("causal", "longcat_flash"): "the shapes of its weights",  # some of its experts are the identity
    ("causal", "nemotron_h"): "no gate",
    ("image-text", "inkling2"): "'up'",
    ("image-text", "inkling2_loop"): "'up'",
    ("image-text", "llama4"): "does not take hidden states, expert indices",
    ("image-text", "muse_spark"): "post_expert_norm",
    ("image-text", "nemotron_h_omni"): "no gate",
}


def installed(*, kind: str, model_type: str) -> bool:
    return model_type in MAPPINGS[kind][1]


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_experts(module)]


def with_implementation(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Set `experts_implementation` in every configuration of a model, and return the model."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation_internal = name
    return model


def eager_model(kind: str, model_type: str) -> PreTrainedModel:
    """Return a tiny model in training mode whose experts run the loop of their own class."""
    return with_implementation(tiny_family(kind, model_type), "eager")


def families_with_experts() -> set[tuple[str, str]]:
    """Return the entries of the installed transformers whose tiny models have experts (on the meta device)."""
    found = set()
    for kind, model_type in families():
        try:
            with torch.device("meta"):
                model = MAPPINGS[kind][0].from_config(tiny_config(CONFIG_MAPPING[model_type]()))
        except Exception:  # whatever a family raises for our sizes
            continue
        if experts_of(model) and sum(p.numel() for p in model.parameters()) <= LARGEST:
            found.add((kind, model_type))
    return found
