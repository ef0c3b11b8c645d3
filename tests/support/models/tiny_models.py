"""Two-layer random models of each supported family, and a batch with padding and untrained tokens."""

import math

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB = 128
SLOW_DECAY = 0.05  # A of a recurrence: its states outlast the batch
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02}
GEMMA2 = {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}
GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}

# family -> (configuration class, changes of BASE)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, **GEMMA2}),
    "phi3": ("Phi3Config", {}),
    "phi3_partial": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "mixtral": ("MixtralConfig", MIXTURE),
    "granite": ("GraniteConfig", GRANITE),
    "olmo2": ("Olmo2Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.0625}),
}


def config_of(family: str, **changes: object) -> transformers.PreTrainedConfig:
    name, differences = FAMILIES[family]
    return getattr(transformers, name)(**{**BASE, **differences, **changes})


def make(family: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    return random_model(transformers.AutoModelForCausalLM, config_of(family, **changes), seed=seed)


def random_model(auto_class: type, config: transformers.PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return an fp32 model in training mode.

    Weights of zero or one are changed, because they would hide errors, and so would decays that forget each state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:  # a tanh gate: at 0 an image has no effect
                parameter.data.fill_(0.5)
            elif name.endswith("A_log"):
                parameter.data.fill_(math.log(SLOW_DECAY))
            elif "norm" in name or "ln_" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
            elif parameter.ndim > 1 or not parameter.abs().sum():
                parameter.data = 0.08 * torch.randn_like(parameter)
    model.tie_weights()
    return model.train()


def batch(*, rows: int = 2, length: int = 24, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Return input_ids, attention_mask, labels (B, T). The prompt is not trained; the last row is right-padded."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[-1, -5:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :3] = -100
    made = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: value.to(device) for name, value in made.items()}


def trained_tokens(labels: Tensor) -> int:
    """Count the labels (B, T) that are predicted: all but -100 and the first of each row."""
    return int((labels[:, 1:] != -100).sum())
