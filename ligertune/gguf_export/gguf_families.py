"""Families that are written as GGUF: the architecture in llama.cpp and its hyperparameters.

llama.cpp computes each architecture by fixed code. What a configuration may change there is a key of the file; what it
may not change is checked here, so that a model which llama.cpp would compute differently is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Value = bool | int | float | str | list[str] | list[int] | list[float]
Metadata = dict[str, Value]  # key of the file -> value

INSTEAD = "llama.cpp's own script knows more models: python convert_hf_to_gguf.py EXPORTED_FOLDER."
# In llama.cpp, layers i of Gemma 3 with (i + 1) % 6 == 0 attend to all tokens; of Gemma 2 every second one.
FULL_ATTENTION_EVERY = {"GEMMA2": 2, "GEMMA3": 6}
# Layers of the models whose attention is scaled by hidden_size / num_attention_heads there: Gemma 2 27B, Gemma 3 27B.
SCALED_BY_WIDTH = {"GEMMA2": 46, "GEMMA3": 62}


@dataclass(frozen=True)
class GgufFamily:
    """How llama.cpp computes a class of transformers.

    architecture: a name of gguf.MODEL_ARCH. activation: of the MLP. permutes_heads: rotary pairs are neighbours there,
    and halves in transformers, so that the rows of q and k change places. rotates_parts: heads may be rotated in part.
    has_biases: linear layers may have them. norm_offset: is added to norm weights. window: what happens to
    sliding-window attention. "context": the context is cut to the window; "alternates": some layers have it; "none": it
    is refused.
    """

    architecture: str
    activation: str = "silu"
    permutes_heads: bool = False
    rotates_parts: bool = False
    has_biases: bool = False
    norm_offset: float = 0.0
    window: Literal["context", "alternates", "none"] = "none"


FAMILIES = {
    "LlamaForCausalLM": GgufFamily("LLAMA", permutes_heads=True, has_biases=True),
    "MistralForCausalLM": GgufFamily("LLAMA", permutes_heads=True, window="context"),
    "MixtralForCausalLM": GgufFamily("LLAMA", permutes_heads=True, window="context"),
    "Qwen2ForCausalLM": GgufFamily("QWEN2", has_biases=True),
    "Qwen3ForCausalLM": GgufFamily("QWEN3"),
    "Qwen3MoeForCausalLM": GgufFamily("QWEN3MOE"),
    "Phi3ForCausalLM": GgufFamily("PHI3", rotates_parts=True, window="context"),
    "GraniteForCausalLM": GgufFamily("GRANITE", permutes_heads=True),
    "Olmo2ForCausalLM": GgufFamily("OLMO2"),
    "GemmaForCausalLM": GgufFamily("GEMMA", activation="gelu_pytorch_tanh", norm_offset=1.0),
    "Gemma2ForCausalLM": GgufFamily("GEMMA2", activation="gelu_pytorch_tanh", norm_offset=1.0, window="alternates"),
    "Gemma3ForCausalLM": GgufFamily("GEMMA3", activation="gelu_pytorch_tanh", norm_offset=1.0, window="alternates"),
}


def gguf_family(config: PreTrainedConfig) -> GgufFamily:
    """Return the family of a configuration. Raises UserError for others, and for what llama.cpp would not compute."""
    name = (config.architectures or [""])[0]
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(one.removesuffix("ForCausalLM") for one in FAMILIES)
        raise UserError(f"--gguf: {name or 'this model'} is not written as GGUF; known are {known}.", hint=INSTEAD)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            "--gguf: the weights of this model are quantised.",
            hint="Dequantise them with --dtype bfloat16, in the same command.",
        )
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation != family.activation:
        raise _differs(f"the activation {activation}", f"{family.activation}")
    _check_window(config, family)
    _check_scale(config, family)
    if family.architecture == "QWEN3MOE" and not config.norm_topk_prob:
        raise _differs("weights of experts whose sum is not 1 (norm_topk_prob: false)", "their sum as 1")
    if family.architecture == "QWEN3MOE" and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        raise _differs("layers without experts", "experts in each layer")
    return family


def _differs(found: str, expected: str) -> UserError:
    return UserError(
        f"--gguf: this model has {found}, and llama.cpp computes {expected}.",
        hint="Serve the exported folder with vLLM or transformers.",
    )


def _check_window(config: PreTrainedConfig, family: GgufFamily) -> None:
    kinds = list(getattr(config, "layer_types", None) or [])
    if family.window == "alternates":
        every = FULL_ATTENTION_EVERY[family.architecture]
        names = ("sliding_attention", "full_attention")
        expected = [names[(number + 1) % every == 0] for number in range(config.num_hidden_layers)]
        if kinds != expected:
            raise _differs("an own order of sliding windows", f"full attention in every {every}th layer")
    elif family.window == "none" and "sliding_attention" in kinds:
        raise _differs("layers with sliding windows", "full attention")


def _check_scale(config: PreTrainedConfig, family: GgufFamily) -> None:
    """Raise UserError if llama.cpp scales attention by another number, or does not compute a soft cap."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None:
        by_width = config.num_hidden_layers == SCALED_BY_WIDTH.get(family.architecture)
        expected = config.hidden_size // config.num_attention_heads if by_width else config.head_dim
        if scalar != expected:
            raise _differs(f"query_pre_attn_scalar {scalar}", f"{expected}")
    caps = (getattr(config, "attn_logit_softcapping", None), getattr(config, "final_logit_softcapping", None))
    if family.architecture != "GEMMA2" and any(caps):
        raise _differs("a soft cap of logits", "none for this architecture")
    if family.architecture == "GEMMA2" and not all(caps):
        raise _differs("no soft cap of logits", "one for this architecture")


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def n_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts of a layer; 0 without any."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def hyperparameters(config: PreTrainedConfig, family: GgufFamily) -> Metadata:
    """Return the keys of a model's configuration. Raises UserError for rotary embeddings that llama.cpp lacks."""
    import gguf

    keys = gguf.Keys
    found: Metadata = {
        keys.LLM.VOCAB_SIZE: config.vocab_size,
        keys.LLM.CONTEXT_LENGTH: context_length(config, family),
        keys.LLM.EMBEDDING_LENGTH: config.hidden_size,
        keys.LLM.BLOCK_COUNT: config.num_hidden_layers,
        keys.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
        keys.Attention.HEAD_COUNT: config.num_attention_heads,
        keys.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
        keys.Attention.KEY_LENGTH: head_dim_of(config),
        keys.Attention.VALUE_LENGTH: head_dim_of(config),
        keys.Attention.LAYERNORM_RMS_EPS: float(config.rms_norm_eps),
        keys.Rope.DIMENSION_COUNT: int(head_dim_of(config) * _rotated_part(config, family)),
    }
    if family.window == "alternates":
        found[keys.Attention.SLIDING_WINDOW] = config.sliding_window
    if family.architecture == "GEMMA2":
        found[keys.LLM.ATTN_LOGIT_SOFTCAPPING] = float(config.attn_logit_softcapping)
        found[keys.LLM.FINAL_LOGIT_SOFTCAPPING] = float(config.final_logit_softcapping)
    if family.architecture == "GRANITE":
        found[keys.Attention.SCALE] = float(config.attention_multiplier)
        found[keys.LLM.EMBEDDING_SCALE] = float(config.embedding_multiplier)
        found[keys.LLM.RESIDUAL_SCALE] = float(config.residual_multiplier)
        found[keys.LLM.LOGIT_SCALE] = float(config.logits_scaling)
    if n_experts(config):
        found[keys.LLM.EXPERT_COUNT] = n_experts(config)
        found[keys.LLM.EXPERT_USED_COUNT] = config.num_experts_per_tok
    if family.architecture == "QWEN3MOE":
        found[keys.LLM.EXPERT_FEED_FORWARD_LENGTH] = config.moe_intermediate_size
    found |= _rotary(config, family)
    name = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.architecture]]
    return {key.format(arch=name): value for key, value in found.items()}


def context_length(config: PreTrainedConfig, family: GgufFamily) -> int:
    """Return the longest context in tokens; of a model with one window for all layers, that window."""
    longest = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    return min(longest, window) if family.window == "context" and window else longest


# ---- rotary embeddings


def _rotary(config: PreTrainedConfig, family: GgufFamily) -> Metadata:
    import gguf

    keys = gguf.Keys.Rope
    full, sliding = _rope_parameters(config)
    found: Metadata = {keys.FREQ_BASE: float(full["rope_theta"])}
    if sliding is not None:
        if sliding.get("rope_type", "default") != "default":
            raise _differs("scaled rotary embeddings in layers with a sliding window", "plain ones")
        found[keys.FREQ_BASE_SWA] = float(sliding["rope_theta"])
    kind = full.get("rope_type", "default")
    if kind == "llama3" and family.architecture != "LLAMA":
        raise _differs("llama3 scaling of rotary embeddings", "none for this architecture")
    if kind in ("default", "llama3"):  # llama3: `rotary_factors` is a tensor of the file
        return found
    if kind not in ("linear", "yarn"):
        raise UserError(f"--gguf: rotary embeddings of type {kind} are not written as GGUF.", hint=INSTEAD)
    found[keys.SCALING_TYPE] = kind
    found[keys.SCALING_FACTOR] = float(full["factor"])
    return found | (_yarn(full) if kind == "yarn" else {})


def _rotated_part(config: PreTrainedConfig, family: GgufFamily) -> float:
    """Return the part of each head that is rotated, from 0 to 1."""
    part = float(_rope_parameters(config)[0].get("partial_rotary_factor") or 1.0)
    if part != 1.0 and not family.rotates_parts:
        raise _differs("rotary embeddings on a part of each head", "them on whole heads")
    return part


def _yarn(parameters: dict[str, Any]) -> Metadata:
    import gguf

    keys = gguf.Keys.Rope
    fixed = {"mscale": None, "mscale_all_dim": None, "truncate": True, "beta_fast": 32, "beta_slow": 1}
    for key, value in fixed.items():
        if parameters.get(key) not in (None, value):
            raise _differs(f"yarn with {key} {parameters[key]}", f"{value or 'none'} for this architecture")
    found: Metadata = {keys.SCALING_ORIG_CTX_LEN: int(parameters["original_max_position_embeddings"])}
    if parameters.get("attention_factor") is not None:  # llama.cpp multiplies its own factor by this
        own = 1.0 + 0.1 * math.log(parameters["factor"])
        found[keys.SCALING_ATTN_FACTOR] = float(parameters["attention_factor"]) / own
    return found


def _rope_parameters(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the rotary parameters of layers with full attention, and of those with a sliding window if they differ."""
    found = config.rope_parameters
    if "full_attention" in found:
        return found["full_attention"], found["sliding_attention"]
    return found, None


def rotary_factors(config: PreTrainedConfig) -> torch.Tensor | None:
    """Return what llama.cpp divides each rotary frequency by, (D/2,) float32, for llama3 scaling; else None."""
    parameters = _rope_parameters(config)[0]
    if parameters.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = head_dim_of(config)
    plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return plain / scaled.float()
