"""Configurations of the memory benchmark: models, methods, and their batches and lengths."""

MODELS = {
    "llama-1b": {"model.model_name_or_path": "Llama-3.2-1B"},
    "llama-8b/8": {"model.model_name_or_path": "Meta-Llama-3-8B", "model.num_hidden_layers": 8},
    "qwen-1.5b": {"model.model_name_or_path": "Qwen2.5-1.5B"},
    "gemma-7b/6": {"model.model_name_or_path": "gemma-7b", "model.num_hidden_layers": 6},
    "qwen3.5-4b/8": {"model.model_name_or_path": "Qwen3.5-4B", "model.num_hidden_layers": 8},
}
RECOMPUTE = {"kernels.recompute": True}
QLORA = {"method.type": "qlora"}
SINGLE_FP4 = {**QLORA, "method.bnb_4bit_quant_type": "fp4", "method.bnb_4bit_use_double_quant": False}
PADDING_FREE = {"data.packing": False, "data.padding_free": True}
DPO = {"task": "dpo", "preference.reference": "precompute", **PADDING_FREE}
METHODS = {"full": {}, "lora": {"method.type": "lora"}, "8-bit": {}, "full recompute": RECOMPUTE,
           "lora recompute": {"method.type": "lora", **RECOMPUTE}, "qlora": QLORA, "qlora fp4": SINGLE_FP4,
           "qlora offload": {**QLORA, "train.gradient_checkpointing": "offload"},
           "qlora graphs": {**QLORA, "train.cuda_graphs": True}, "dpo": DPO,
           "dpo lora": {"task": "dpo", "method.type": "lora", **PADDING_FREE},
           "padding-free": PADDING_FREE}  # fmt: skip
UNEQUAL_METHODS = ("dpo", "dpo lora", "padding-free")  # on real texts, whose lengths differ
UNEQUAL_LENGTH = 4096  # the longest of the real answers has 3,197 tokens
# model -> (rows, length, accumulation) without and with checkpointing
SIZES = {
    "llama-1b": ((8, 1024, 1), (4, 4096, 2)),
    "llama-8b/8": ((4, 1024, 2), (8, 2048, 1)),
    "qwen-1.5b": ((4, 2048, 1), (16, 1024, 2)),
    "gemma-7b/6": ((2, 2048, 2), (4, 4096, 1)),
    "qwen3.5-4b/8": ((4, 2048, 1), (4, 4096, 2)),
}
# with --moe: model -> (sizes in moe_models.py, layers)
MIXTURES = {
    "mixtral/3": ("mixtral-8x7b", 3), "qwen3-30b-a3b/4": ("qwen3-30b-a3b", 4), "qwen3-30b-a3b/8": ("qwen3-30b-a3b", 8),
    "olmoe/8": ("olmoe-1b-7b", 8), "qwen1.5-moe/6": ("qwen1.5-moe-a2.7b", 6), "gpt-oss-20b/4": ("gpt-oss-20b", 4),
    "deepseek-v3-small/5": ("deepseek-v3-small", 5), "glm-4.5-air/3": ("glm-4.5-air", 3),
    "granite-3b-a800m/16": ("granite-3.1-3b-a800m", 16),
}  # fmt: skip
IN_4_BITS = ("llama-1b", "llama-8b/8", "small-llama", "mixtral/3", "qwen3-30b-a3b/8")
WITH_DPO = ("llama-1b", "small-llama")
MIXTURE_METHODS = {"full": {}, "lora": {"method.type": "lora"}, "qlora": {"method.type": "qlora"}}
MIXTURE_SIZES = {
    "mixtral/3": ((16, 512, 1), (8, 2048, 1)),
    "qwen3-30b-a3b/4": ((16, 512, 1), (8, 2048, 2)),
    "qwen3-30b-a3b/8": ((4, 1024, 1), (4, 4096, 1)),
    "olmoe/8": ((4, 2048, 1), (8, 2048, 1)),
    "qwen1.5-moe/6": ((8, 1024, 1), (4, 4096, 1)),
    "gpt-oss-20b/4": ((4, 1024, 1), (2, 4096, 1)),
    "deepseek-v3-small/5": ((2, 2048, 1), (8, 2048, 1)),
    "glm-4.5-air/3": ((4, 1024, 1), (4, 2048, 1)),
    "granite-3b-a800m/16": ((8, 1024, 1), (16, 1024, 2)),
}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}  # fmt: skip
