"""Published sizes of mixtures of experts, for scripts/bench experts and scripts/bench memory_moe."""

from __future__ import annotations

from pathlib import Path

# name -> (configuration class of transformers, its sizes). Everything else has transformers' defaults.
MODELS: dict[str, tuple[str, dict]] = {
    "mixtral-8x7b": ("MixtralConfig", {"vocab_size": 32000, "num_hidden_layers": 32}),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False,
        "max_position_embeddings": 40960}),
    "olmoe-1b-7b": ("OlmoeConfig", {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}),
    "qwen1.5-moe-a2.7b": ("Qwen2MoeConfig", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "max_position_embeddings": 8192}),
    "gpt-oss-20b": ("GptOssConfig", {"vocab_size": 201088, "num_hidden_layers": 24, "num_local_experts": 32}),
    # DeepSeek-V3 with half of the width and a quarter of the experts, so that some layers fit on one GPU
    "deepseek-v3-small": ("DeepseekV3Config", {
        "vocab_size": 129280, "hidden_size": 3584, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_hidden_layers": 61, "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 64,
        "num_local_experts": 64, "q_lora_rank": 768, "first_k_dense_replace": 1}),
    "glm-4.5-air": ("Glm4MoeConfig", {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}),
    "granite-3.1-3b-a800m": ("GraniteMoeConfig", {
        "vocab_size": 49155, "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8,
        "tie_word_embeddings": True, "max_position_embeddings": 8192}),
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def config_of(name: str, **changes: object):
    """Return transformers' configuration of a model."""
    import transformers

    cls, sizes = MODELS[name]
    return getattr(transformers, cls)(**{**sizes, **changes})


def tiny_config_of(name: str):
    """Return a configuration of the same family with small sizes."""
    import transformers

    cls, sizes = MODELS[name]
    known = vars(getattr(transformers, cls)())
    return getattr(transformers, cls)(**{key: value for key, value in TINY.items() if key in known or key in sizes})


def write_config(name: str, folder: Path, *, small: bool = False) -> Path:
    """Write the configuration of a model to a folder, and return the folder."""
    config = tiny_config_of(name) if small else config_of(name)
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    config.save_pretrained(folder)
    return folder
