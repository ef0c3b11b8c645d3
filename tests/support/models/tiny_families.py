"""Tiny random models of every family of transformers: its configuration with small numbers under the known names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from support.models.tiny_models import random_model

MAPPINGS = {  # kind -> (auto class, its table of model types and class names)
    "causal": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image-text": (transformers.AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}
VOCAB, WORDS = 160, 100  # ids below WORDS are words; special tokens have ids above
ROWS, LENGTH = 2, 24  # of the inputs
IMAGE, IMAGE_TOKENS = 150, 4  # id of an image's tokens, and how many an image has
LARGEST = 30_000_000  # parameters: more means that a size has a name that we do not know


def _names(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Name of a size in a configuration -> its small value. Lists and sizes that are None stay as the family computes them.
SIZES = {
    **_names(VOCAB, "vocab_size text_vocab_size n_vocab embedding_vocab_size "
                    "vocab_size_per_layer_input unpadded_vocab_size"),
    **_names(64, "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim hidden_dim model_dim out_hidden_size "
                 "embedding_size projection_dim text_embed_dim output_dim output_hidden_size emb_dim proj_dim "
                 "projection_hidden_size text_hidden_size vision_output_dim projector_hidden_dim attention_hidden_size "
                 "embedding_dim lru_width mm_hidden_size proj_output_dim encoder_hidden_size "
                 "projector_hidden_size codebook_dim"),
    **_names(32, "base_channels"),
    **_names(96, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
                 "ffn_hidden_size mlp_dim shared_expert_intermediate_size moe_shared_expert_intermediate_size "
                 "dense_intermediate_size expert_ffn_hidden_size shared_intermediate_size mlp_hidden_size "
                 "intermediate_size_mlp feed_forward_size block_ff_dim expert_hidden_size feed_forward_proj_dim"),
    **_names(2, "encoder_layers decoder_layers num_decoder_layers num_encoder_layers depth num_nextn_predict_layers"),
    **_names(4, "num_hidden_layers n_layer num_layers n_layers"),
    **_names(4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
                "attention_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
                "mamba_num_heads mamba_n_heads num_mamba_heads linear_num_heads"),
    **_names(2, "num_key_value_heads num_kv_heads multi_query_group_num num_experts_per_tok moe_topk top_k_experts "
                "moe_top_k linear_num_key_heads num_experts_per_token moe_k"),
    **_names(16, "head_dim linear_key_head_dim linear_value_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim "
                 "kv_lora_rank q_lora_rank index_head_dim mamba_head_dim mamba_d_head attention_head_dim d_kv "
                 "rotary_dim kv_channels global_head_dim swa_head_dim hidden_size_per_layer_input "
                 "linear_head_dim"),
    **_names(1, "n_groups mamba_n_groups mamba_ngroups "
                "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace"),
    **_names(256, "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions"),
    **_names(56, "image_size"),
    **_names(14, "patch_size"),
    **_names(0, "pad_token_id"),
    **_names(1, "bos_token_id decoder_start_token_id"),
    **_names(2, "eos_token_id"),
}  # fmt: skip


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_HALF_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"] * 2}
# Without these, windows and the position bias reach over whole rows, and no scaling sets in.
_INKLING2 = {
    "layer_types": ["hybrid", "hybrid_sliding"] * 2,
    "sliding_window_size": 8,
    "rel_extent": 6,
    "log_scaling_n_floor": 4,
}
_VOCABULARY = {"vocabulary_map": {"<image>": WORDS + 40, "IMGIMGA": WORDS + 41}}
# What some families need beside the sizes, by the model type of a configuration or of a part of one.
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "blip-2": {"num_query_tokens": IMAGE_TOKENS, "image_token_index": IMAGE},
    "chameleon": _VOCABULARY,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {}, "head_dim": 32,
                        "shared_experts_intermediate_size": 96},
    "emu3": _VOCABULARY,
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "glm4v_text": _HALF_MROPE,
    "glm4v_moe_text": _HALF_MROPE,
    "glm_ocr_text": _HALF_MROPE,
    "granite4_vision": {"downsample_rate": "2/4", "deepstack_layer_map": [], "spatial_target_layers": [0, 1, 2, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_vl_text": _MROPE,
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": {**_INKLING2, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1,
                           "loop_layer_index_end": 3, "loop_num_passes": 2},
    "instructblip": {"num_query_tokens": IMAGE_TOKENS, "image_token_index": IMAGE},
    "instructblipvideo": {"num_query_tokens": IMAGE_TOKENS, "video_token_index": IMAGE},
    "kosmos-2": {"latent_query_num": IMAGE_TOKENS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _TWO_KINDS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral4": {"qk_rope_head_dim": 16, "head_dim": 32, "qk_nope_head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "muse_spark_audio": {"hidden_sizes": (32, 32, 32, 32), "depths": (1, 1, 1, 1)},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": WORDS + 42},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": WORDS + 42},
    "step3p5": {"sliding_window": 8},
    "qwen2_vl_text": _MROPE,
    "radio": {"video_temporal_patch_size": 2},
    "qwen2_5_vl_text": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_lowrank": 8, "ngram_vocab_size_base": 100,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"] * 2,
                 "local_attn_chunk_length": 8},
    "udop": {"decoder_start_token_id": 0},
    "xlstm": {"num_heads": 2, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 16, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
               "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same class with small sizes, those inside it too."""
    kept = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            kept[name] = tiny_config(value)
        elif name == "head_dim" and value is None:
            kept[name] = SIZES[name]
        elif name == "rope_parameters":
            kept |= {name: _tiny_rope(value)} if "mrope_section" in str(value) else {}
        elif name in SIZES and value and not isinstance(value, bool | str | dict):
            kept[name] = [SIZES[name]] * len(value) if isinstance(value, list | tuple) else SIZES[name]
        elif "drop" in name and isinstance(value, float):
            kept[name] = 0.0
        elif "token" in name and type(value) is int and value >= WORDS and "tokens" not in name:
            kept[name] = WORDS + len(kept)
    values = vars(config)
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in kept:
        kept["num_key_value_heads"] = kept["num_attention_heads"]
    return type(config)(**kept | CHANGES.get(config.model_type, {}))


def _tiny_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return rope parameters whose sections of time, height and width fit our head dimension."""
    if "mrope_section" not in parameters:  # by kind of layer
        return {kind: _tiny_rope(inner) if isinstance(inner, dict) else inner for kind, inner in parameters.items()}
    half = int(SIZES["head_dim"] * parameters.get("partial_rotary_factor", 1.0)) // 2
    return {**parameters, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def families() -> list[tuple[str, str]]:
    """Return (kind, model type) of every entry of the installed transformers."""
    return [(kind, name) for kind, (_, names) in MAPPINGS.items() for name in names]


def class_name(kind: str, model_type: str) -> str:
    return MAPPINGS[kind][1][model_type]


def tiny_family(kind: str, model_type: str) -> PreTrainedModel:
    """Return a tiny random model in training mode. Raises whatever the family raises for our sizes."""
    config = tiny_config(CONFIG_MAPPING[model_type]())
    auto_class, _ = MAPPINGS[kind]
    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: it has a size under a name that we do not know")
    return random_model(auto_class, config)


def save_tiny(family: str, folder: Path) -> Path:
    """Save a tiny model of the family in float32, whose vocabulary holds the quickstart's."""
    config = tiny_family("causal", family).config
    config.vocab_size = 512
    if hasattr(config, "unpadded_vocab_size"):
        config.unpadded_vocab_size = 512
    config.tie_word_embeddings = True
    config.max_position_embeddings = 512
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _image_places() -> torch.Tensor:
    """Return which tokens of a row are an image's: those after the first."""
    places = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    places[:, 1 : 1 + IMAGE_TOKENS] = 1
    return places


def _pixels(*leading: int) -> torch.Tensor:
    return torch.randn(
        *leading, 3, SIZES["image_size"], SIZES["image_size"], generator=torch.Generator().manual_seed(1)
    )


_WITH_QUERIES = {  # the words before the image, again
    "qformer_input_ids": torch.full((ROWS, 5), 7),
    "qformer_attention_mask": torch.ones((ROWS, 5), dtype=torch.long),
}
# Inputs that some families need beside the tokens.
INPUTS: dict[str, dict[str, torch.Tensor]] = {
    "blip": {"pixel_values": _pixels(ROWS)},
    "blip-2": {"pixel_values": _pixels(ROWS)},
    "git": {"pixel_values": _pixels(ROWS)},
    "idefics": {"pixel_values": _pixels(ROWS, 1), "image_attention_mask": torch.ones(ROWS, LENGTH, 1)},
    "instructblip": {"pixel_values": _pixels(ROWS), **_WITH_QUERIES},
    "instructblipvideo": {"pixel_values": _pixels(ROWS, 1), **_WITH_QUERIES},
    "kosmos-2": {"pixel_values": _pixels(ROWS), "image_embeds_position_mask": _image_places()},
    "molmo2": {"mm_token_type_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long)},
    "udop": {"bbox": torch.rand(ROWS, LENGTH, 4, generator=torch.Generator().manual_seed(1))},
}
HAVE_IMAGE_TOKENS = ("blip-2", "instructblip", "instructblipvideo")


def inputs_of(model_type: str) -> dict[str, torch.Tensor]:
    """Return two rows of words with labels, the first three of them not trained; the same in every call."""
    input_ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    if model_type in HAVE_IMAGE_TOKENS:
        input_ids[_image_places() == 1] = IMAGE
    labels = input_ids.masked_fill(input_ids == IMAGE, -100)
    labels[:, :3] = -100
    more = INPUTS.get(model_type, {})
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels, **more}
