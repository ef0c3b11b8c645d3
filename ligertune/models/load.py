"""From the recipe's model section to a configuration, a tokenizer and a model, with one sentence for every mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ligertune.errors import UserError
from ligertune.vision.families import family_of, sees

if TYPE_CHECKING:
    from ligertune.planning.options import ModelOptions

# What transformers raises for files that are missing, unreadable, not JSON, of an unknown kind, or of a wrong type.
FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, StrictDataclassError)


def hide_loading_bars() -> None:
    """transformers draws one for every model it loads or saves; the run has its own progress line."""
    logging.disable_progress_bar()


def read_config(spec: ModelOptions) -> PreTrainedConfig:
    """The model's configuration, cut to `num_hidden_layers` if the recipe asks for that."""
    name = spec.model_name_or_path
    _check_name(name)
    try:
        config = AutoConfig.from_pretrained(name, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    except FILE_ERRORS as error:
        _refuse_config(name, error)
    if family_of(config) is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not spec.trust_remote_code:
        raise UserError(
            f"model.model_name_or_path: {name} is a {config.model_type} model, and transformers has no causal"
            " language model of that kind.",
            hint="Give a model that generates text.",
        )
    return config if spec.num_hidden_layers is None else _cut(config, spec.num_hidden_layers)


def _check_name(name: str) -> None:
    """A folder must hold a config.json; what can only be a path must exist."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"model.model_name_or_path: the folder {name} holds no config.json.",
                hint="Give the folder that save_pretrained wrote, or a hub id.",
            )
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        found = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"model.model_name_or_path: {name} {found}.",
            hint="Give a folder with config.json and model.safetensors, or a hub id such as Qwen/Qwen2.5-0.5B.",
        )


def _refuse_config(name: str, error: Exception) -> NoReturn:
    reason = _first_line(error)
    if Path(name).expanduser().is_dir():
        raise UserError(
            f"model.model_name_or_path: {name}/config.json cannot be used: {reason}",
            hint="If the checkpoint brings its own modelling code and you trust it, set model.trust_remote_code: true.",
        ) from error
    raise UserError(
        f"model.model_name_or_path: {name} is not a folder here, and the hub could not be reached or has no such"
        f" model: {reason}",
        hint="Check the spelling, the network, and for gated models the login (`hf auth login`).",
    ) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _cut(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """The same architecture with its first `depth` layers; lists with one entry a layer are cut too."""
    text = config.get_text_config()  # of a vision-language model, the language model's
    whole = text.num_hidden_layers
    if depth > whole:
        raise UserError(f"model.num_hidden_layers: {depth}, but the model has {whole} layers.", hint="Write fewer.")
    per_layer = {
        name: value[:depth]
        for name, value in vars(text).items()
        if isinstance(value, (list, tuple)) and len(value) == whole
    }
    if hasattr(text, "cross_attention_layers"):
        per_layer["cross_attention_layers"] = [layer for layer in text.cross_attention_layers if layer < depth]
    for name, value in {"num_hidden_layers": depth, **per_layer}.items():
        setattr(text, name, value)
    return config


# ---- tokenizer


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the token that fills batches up, which is not always the tokenizer's own."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    notes: tuple[str, ...]


PAD_NAMES = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_0|>",
    "<|endoftext|>",
    "<unk>",
)


def load_tokenizer(spec: ModelOptions) -> LoadedTokenizer:
    """The tokenizer with the recipe's changes, and a padding token that is never EOS by accident."""
    wanted = spec.tokenizer
    name = wanted.path or spec.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=None if wanted.path else spec.revision,
            trust_remote_code=spec.trust_remote_code,
        )
    except (*FILE_ERRORS, ImportError) as error:
        raise UserError(
            f"{'model.tokenizer.path' if wanted.path else 'model.model_name_or_path'}: no tokenizer could be loaded"
            f" from {name}: {_first_line(error)}",
            hint="Set model.tokenizer.path to a folder with tokenizer.json, or to a hub id.",
        ) from error
    if wanted.eos_token is not None:
        tokenizer.eos_token = _known(tokenizer, wanted.eos_token, "model.tokenizer.eos_token")
    if wanted.chat_template != "tokenizer":
        tokenizer.chat_template = _chat_template(wanted.chat_template)
    pad_token_id, notes = _choose_pad(tokenizer, wanted.pad_token)
    return LoadedTokenizer(tokenizer, pad_token_id, notes)


def _known(tokenizer: PreTrainedTokenizerBase, token: str, key: str) -> str:
    if token not in tokenizer.get_vocab():
        raise UserError(
            f"{key}: the tokenizer has no token {token!r}.", hint=f"It has {', '.join(tokenizer.all_special_tokens)}."
        )
    return token


def _chat_template(path: str) -> str:
    if not Path(path).is_file():
        raise UserError(
            f"model.tokenizer.chat_template: there is no file {path}.",
            hint="Write tokenizer (its own template) or the path of a jinja file.",
        )
    return Path(path).read_text(encoding="utf-8")


def _choose_pad(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> tuple[int, tuple[str, ...]]:
    """The id that pads, and a note where it was chosen here.

    Padding is masked from attention and from the loss, so any id would do; what matters is that EOS stays visible to
    tools that take the padding token for padding. A token that is not special is not made special for it: decoding
    would swallow it from then on.
    """
    if wanted is not None:
        tokenizer.pad_token = _known(tokenizer, wanted, "model.tokenizer.pad_token")
        return tokenizer.pad_token_id, ()
    if tokenizer.pad_token is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return tokenizer.pad_token_id, ()
    why = "has none" if tokenizer.pad_token is None else f"has its EOS token {tokenizer.eos_token!r}"
    vocabulary, taken = tokenizer.get_vocab(), {tokenizer.eos_token, tokenizer.bos_token}
    special = [token for token in tokenizer.all_special_tokens if token == tokenizer.unk_token]
    for token in (*(name for name in PAD_NAMES if name in vocabulary), *special):
        if token not in taken:
            tokenizer.pad_token = token
            return tokenizer.pad_token_id, (f"padding token: {token!r}, chosen here; the tokenizer {why}",)
    token, index = min(((t, i) for t, i in vocabulary.items() if t not in taken), key=lambda pair: pair[1])
    return index, (f"padding: id {index} ({token!r}) in masked places only; the tokenizer {why} and no spare token",)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Every id the tokenizer can give must have a row in the model's embedding."""
    of_images = getattr(config, "image_token_id", None)  # Llama-3.2-Vision's lies behind the vocabulary, by design
    highest = max(index for index in tokenizer.get_vocab().values() if index != of_images)
    vocab_size = config.get_text_config().vocab_size
    if highest >= vocab_size:
        raise UserError(
            f"model.tokenizer: its highest token id is {highest}, but the model's vocabulary has {vocab_size} entries.",
            hint="Use the tokenizer the model was trained with.",
        )


# ---- model


def auto_class(config: PreTrainedConfig) -> type:
    """transformers' loader for a configuration: AutoModelForCausalLM drops the part that sees, or refuses it."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def model_class(config: PreTrainedConfig) -> type | None:
    """The class that `auto_class` makes of a configuration; None where the model's own repository brings it."""
    return auto_class(config)._model_mapping.get(type(config), None)


def build_model(
    spec: ModelOptions,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    four_bits: bool = False,
) -> PreTrainedModel:
    """The model on `device`: pretrained, or random from `seed`. On the meta device only its shape is made.

    four_bits: its layers' matrices are quantised while they are loaded (NF4).
    """
    device = torch.device(device)
    attention = {} if spec.attn_implementation == "auto" else _attention(spec.attn_implementation, config)
    try:
        if spec.init == "random" or device.type == "meta":
            return _random_model(spec, config, dtype=dtype, device=device, seed=seed, **attention)
        if four_bits:
            return _pretrained_model(spec, config, dtype=dtype, **attention, **in_four_bits(dtype, device))
        if device.type == "cuda":  # tensor by tensor from a mapped file: no rank has a copy in host memory
            return _pretrained_model(spec, config, dtype=dtype, **attention, device_map={"": device})
        return _pretrained_model(spec, config, dtype=dtype, **attention).to(device)
    except (ImportError, ValueError, KeyError) as error:  # not installed; not of this model; unknown to its old code
        if not attention:
            raise
        raise UserError(
            f"model.attn_implementation: {spec.attn_implementation} cannot be used: {_first_line(error)}",
            hint="Write another one, or auto; if the run packs and none does, write data.packing: false.",
        ) from error


def _attention(name: str, config: PreTrainedConfig) -> dict[str, str | dict[str, str]]:
    """The keyword for the model's class; what keeps the documents of a row apart is not for the part that sees."""
    of_text_alone = name in ("document_attention", "varlen", "per_document", "flex_attention") and sees(config)
    by_part = {"": name, "text_config": name, "vision_config": "sdpa"}
    return {"attn_implementation": by_part if of_text_alone else name}


def whole_model(spec: ModelOptions, config: PreTrainedConfig, *, through_four_bits: bool = False) -> PreTrainedModel:
    """The model in its checkpoint's dtype, to be exported. through_four_bits: rounded to what QLoRA trained on."""
    dtype = getattr(torch, spec.dtype) if spec.dtype in ("bfloat16", "float32") else config.dtype or torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() and through_four_bits else "cpu")
    model = build_model(spec, config, dtype=dtype, device=device, seed=0, four_bits=through_four_bits)
    return model.dequantize() if through_four_bits else model


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a run left beside its model, as it is."""
    return AutoTokenizer.from_pretrained(folder)


def in_four_bits(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What makes from_pretrained load linear layers in NF4 with doubly quantised scales, computing in `dtype`."""
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": quantised, "device_map": {"": device}}


def _random_model(
    spec: ModelOptions,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    **attention: str | dict[str, str],
) -> PreTrainedModel:
    """The same weights for the same seed and device; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=spec.trust_remote_code, **attention
        )


def _pretrained_model(
    spec: ModelOptions, config: PreTrainedConfig, *, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    name = spec.model_name_or_path
    try:
        model, loading = auto_class(config).from_pretrained(
            name,
            config=config,
            dtype=dtype,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model.model_name_or_path: the weights of {name} could not be loaded: {_first_line(error)}",
            hint="A folder needs model.safetensors; for random weights write model.init: random.",
        ) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"model.model_name_or_path: {name} lacks {len(missing)} of the model's weights ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}).",
            hint="They would start random; is this the checkpoint of a whole causal language model?",
        )
    return model
