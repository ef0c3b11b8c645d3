"""Load a model's configuration, tokenizer and weights from the recipe's model section; errors name the recipe key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from ligertune.errors import UserError, plural
from ligertune.vision.families import family_of, has_vision

if TYPE_CHECKING:
    from ligertune.planning.options import ModelOptions

# What transformers raises for files that are missing, unreadable, not JSON, or of an unknown or wrong type.
FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, StrictDataclassError)


def hide_loading_bars() -> None:
    """Disable transformers' progress bars for loading and saving; the run shows its own progress."""
    logging.disable_progress_bar()


def read_config(spec: ModelOptions) -> PreTrainedConfig:
    """Read the model's configuration, truncated to `num_hidden_layers` if the recipe sets it. Raises UserError."""
    name = spec.model_name_or_path
    path = Path(name).expanduser()
    _check_name(name, path)
    try:
        config = AutoConfig.from_pretrained(name, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    except FILE_ERRORS as error:
        if path.is_dir():
            raise UserError(
                f"model.model_name_or_path: {name}/config.json cannot be used: {_first_line(error)}",
                hint="If the checkpoint contains its own modelling code and you trust it, set "
                "model.trust_remote_code: true.",
            ) from error
        raise UserError(
            f"model.model_name_or_path: {name} is not a folder here, and the hub could not be reached or has no such"
            f" model: {_first_line(error)}",
            hint="Check the spelling, the network, and for gated models the login (`hf auth login`).",
        ) from error
    if family_of(config) is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not spec.trust_remote_code:
        raise UserError(
            f"model.model_name_or_path: {name} is a {config.model_type} model, and transformers has no causal"
            " language model of that kind.",
            hint="Give a model that generates text.",
        )
    if spec.num_hidden_layers is not None:
        _truncate(config, spec.num_hidden_layers)
    return config


def _check_name(name: str, path: Path) -> None:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"model.model_name_or_path: the folder {name} holds no config.json.",
                hint="Give the folder that save_pretrained wrote, or a hub id.",
            )
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:  # no hub id looks like this
        found = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"model.model_name_or_path: {name} {found}.",
            hint="Give a folder with config.json and model.safetensors, or a hub id such as Qwen/Qwen2.5-0.5B.",
        )


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _truncate(config: PreTrainedConfig, depth: int) -> None:
    """Keep the first `depth` layers; lists with one entry per layer are truncated too."""
    text = config.get_text_config()
    full = text.num_hidden_layers
    if depth > full:
        raise UserError(
            f"model.num_hidden_layers: {depth}, but the model has {plural(full, 'layer')}.", hint="Write fewer."
        )
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == full:
            setattr(text, name, value[:depth])
    if hasattr(text, "cross_attention_layers"):
        text.cross_attention_layers = [layer for layer in text.cross_attention_layers if layer < depth]
    text.num_hidden_layers = depth


# ---- tokenizer

PAD_NAMES = (
    "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<|endoftext|>", "<unk>",
)  # fmt: skip


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the id that pads batches; it may differ from the tokenizer's own pad token."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    notes: tuple[str, ...]


def load_tokenizer(spec: ModelOptions) -> LoadedTokenizer:
    """Load the tokenizer, apply the recipe's changes, and choose a padding token that differs from EOS."""
    wanted = spec.tokenizer
    name = wanted.path or spec.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=None if wanted.path else spec.revision, trust_remote_code=spec.trust_remote_code
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
        path = Path(wanted.chat_template)
        if not path.is_file():
            raise UserError(
                f"model.tokenizer.chat_template: there is no file {path}.",
                hint="Write tokenizer (to use the tokenizer's template) or the path of a jinja file.",
            )
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    pad_token_id, notes = _choose_pad(tokenizer, wanted.pad_token)
    return LoadedTokenizer(tokenizer, pad_token_id, notes)


def _known(tokenizer: PreTrainedTokenizerBase, token: str, key: str) -> str:
    if token not in tokenizer.get_vocab():
        raise UserError(
            f"{key}: the tokenizer has no token {token!r}.", hint=f"It has {', '.join(tokenizer.all_special_tokens)}."
        )
    return token


def _choose_pad(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> tuple[int, tuple[str, ...]]:
    """Return (id that pads, notes about the choice).

    Padding is masked from attention and loss, so any id works. It must not be EOS, which other tools would then mask
    as padding. An ordinary token is not made special for it, because decoding would drop it from then on.
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
    """Raise UserError if the tokenizer has an id without a row in the model's embedding."""
    image_token_id = getattr(config, "image_token_id", None)  # Llama-3.2-Vision's has no row, by design
    highest = max(index for index in tokenizer.get_vocab().values() if index != image_token_id)
    vocab_size = config.get_text_config().vocab_size
    if highest >= vocab_size:
        raise UserError(
            f"model.tokenizer: its highest token id is {highest}, but the model's vocabulary has {vocab_size} entries.",
            hint="Use the tokenizer the model was trained with.",
        )


# ---- model


def auto_class(config: PreTrainedConfig) -> type:
    """Return transformers' auto class for a configuration. AutoModelForCausalLM drops or refuses the vision tower."""
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def model_class(config: PreTrainedConfig) -> type | None:
    """Return the model class of a configuration; None if its code is in the model's own repository."""
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
    """Return the model on `device`: pretrained, or random from `seed`; without weights on the meta device.

    four_bits: quantise the layers' weights to NF4 while they are loaded. Raises UserError.
    """
    device = torch.device(device)
    options = {} if spec.attn_implementation == "auto" else _attention(spec.attn_implementation, config)
    try:
        if spec.init == "random" or device.type == "meta":
            # Same seed and device: same weights. The global random state is restored.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(seed)
                return auto_class(config).from_config(
                    config, dtype=dtype, trust_remote_code=spec.trust_remote_code, **options
                )
        if device.type == "cuda" or four_bits:  # tensors go to the device one by one: no copy in host memory
            options |= {"device_map": {"": device}}
        if four_bits:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )  # fmt: skip
        model = _pretrained_model(spec, config, dtype=dtype, **options)
        return model if "device_map" in options else model.to(device)
    except (ImportError, ValueError, KeyError) as error:  # not installed; unknown to this model or to its remote code
        if spec.attn_implementation == "auto":
            raise
        raise UserError(
            f"model.attn_implementation: {spec.attn_implementation} cannot be used: {_first_line(error)}",
            hint="Write another one, or auto; if the run packs and none works, write data.packing: false.",
        ) from error


def _attention(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keyword for from_pretrained. Attention within packed documents is for the language model only."""
    text_only = name in ("document_attention", "varlen", "per_document", "flex_attention") and has_vision(config)
    by_part = {"": name, "text_config": name, "vision_config": "sdpa"}
    return {"attn_implementation": by_part if text_only else name}


def whole_model(spec: ModelOptions, config: PreTrainedConfig, *, through_four_bits: bool = False) -> PreTrainedModel:
    """Load the model unsharded in its checkpoint's dtype, for export.

    through_four_bits: quantise to NF4 and dequantise, which gives the weights that QLoRA trained on.
    """
    dtype = getattr(torch, spec.dtype) if spec.dtype in ("bfloat16", "float32") else config.dtype or torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() and through_four_bits else "cpu")
    model = build_model(spec, config, dtype=dtype, device=device, seed=0, four_bits=through_four_bits)
    return model.dequantize() if through_four_bits else model


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
            hint="Missing weights would start random. Is this the checkpoint of a complete causal language model?",
        )
    return model
