"""Tiny models of the families that are written as GGUF, saved with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from support.models.tiny_models import BASE, config_of, random_model

SENTENCEPIECE = Path(__file__).resolve().parents[3] / "configs" / "quickstart" / "stories260K"

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


def _rope(rope_type: str, **others: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **others}}


# name -> (family of tiny_models or "gemma3", changes of its configuration)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama_tied", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("llama", {"head_dim": 32}),
    "llama, rope linear": ("llama", _rope("linear", factor=4.0)),
    "llama, rope llama3": ("llama", _rope("llama3", **_LLAMA3)),
    "llama, rope yarn": ("llama", _rope("yarn", **_YARN, attention_factor=1.3)),
    "mistral": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2, rope yarn": ("qwen2", _rope("yarn", **_YARN)),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen3 moe": ("qwen3_moe", {}),
    "phi3": ("phi3", {}),
    "phi3 in part": ("phi3_partial", {"tie_word_embeddings": True}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3": ("gemma3", {}),
}


def make_case(name: str, rows: int = 512) -> PreTrainedModel:
    """Return a random float32 model of a case in evaluation mode. rows: of its embedding."""
    family, changes = CASES[name]
    if family == "qwen3_moe":
        config: transformers.PreTrainedConfig = transformers.Qwen3MoeConfig(
            **{**BASE, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
               "norm_topk_prob": True, "vocab_size": rows}
        )  # fmt: skip
    elif family == "gemma3":
        config = transformers.Gemma3TextConfig(
            **{**BASE, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8,
               "rope_parameters": _GEMMA3_ROPE, "vocab_size": rows}
        )  # fmt: skip
    else:
        config = config_of(family, vocab_size=rows, **changes)
    return random_model(transformers.AutoModelForCausalLM, config).eval()


def save(model: PreTrainedModel, folder: Path, tokenizer: Path | None = None) -> Path:
    """Save a model with a tokenizer, and return the folder. None: a byte-level one for Qwen, else SentencePiece's."""
    model.save_pretrained(folder)
    if tokenizer is None and model.config.model_type.startswith("qwen"):
        byte_level().save_pretrained(folder)
    else:
        AutoTokenizer.from_pretrained(tokenizer or SENTENCEPIECE).save_pretrained(folder)
    return folder


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(regex: str = QWEN, *, added: tuple[str, ...] = ("<|im_end|>",)) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with three merges. added: end token, and other special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel", "\u0120h"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("he", "l"), ("\u0120", "h")]))
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=added[0], extra_special_tokens=list(added[1:]))
