"""Tokens that a recipe adds to the vocabulary, and tokens that it names: their ids, and rows for them.

A model whose embedding has spare rows (Qwen) keeps its size. Otherwise embedding and output head grow. transformers
draws the new rows around the mean of the old ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers.utils.logging import get_verbosity, set_verbosity

from ligertune.any_types import AnyModule
from ligertune.errors import UserError
from ligertune.files.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.planning.options import MethodOptions, TokenizerOptions


def add_tokens(tokenizer: PreTrainedTokenizerBase, spec: TokenizerOptions) -> None:
    """Add the recipe's tokens to a tokenizer, and note the ids of those that it did not have."""
    known = set(tokenizer.get_vocab())
    tokenizer.add_tokens(list(spec.add_tokens))
    if spec.add_special_tokens:
        tokenizer.add_special_tokens(
            {"extra_special_tokens": list(spec.add_special_tokens)}, replace_extra_special_tokens=False
        )
    new = [token for token in (*spec.add_tokens, *spec.add_special_tokens) if token not in known]
    tokenizer.new_token_ids = tuple(tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(new))


def needed_rows(tokenizer: PreTrainedTokenizerBase, spec: TokenizerOptions, config: PreTrainedConfig) -> int:
    """Return the rows that the embedding needs for the tokens that the recipe adds: as many as it has, or more."""
    rows = config.get_text_config().vocab_size
    new = getattr(tokenizer, "new_token_ids", ())
    if not new or max(new) < rows:
        return rows
    multiple = spec.pad_to_multiple_of or 1
    return -(-(max(new) + 1) // multiple) * multiple


def grow(model: PreTrainedModel, rows: int, *, seed: int, mean_resizing: bool = True) -> None:
    """Give embedding and output head `rows` rows, the new ones from `seed`. The global random state is restored."""
    embedding: AnyModule = model.get_input_embeddings()
    if rows == embedding.weight.shape[0]:
        return
    device = embedding.weight.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        verbosity = get_verbosity()
        set_verbosity(logging.ERROR)  # it explains the mean in a paragraph
        # on the meta device there are no values whose mean could be taken
        model.resize_token_embeddings(rows, mean_resizing=mean_resizing and device.type != "meta")
        set_verbosity(verbosity)


def resize_for_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the rows that the adapter in `folder` holds or trains, as a user does who loads it with PEFT."""
    stored = _stored_rows(model, folder)
    if stored:
        grow(model, max(stored), seed=0)
        return
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    tokens = config.get("trainable_token_indices") or ()
    embedding: AnyModule = model.get_input_embeddings()
    lists = tokens.values() if isinstance(tokens, dict) else [tokens]
    grow(model, max([embedding.weight.shape[0], *(int(token) + 1 for ids in lists for token in ids)]), seed=0)


def _stored_rows(model: PreTrainedModel, folder: Path) -> list[int]:
    """Return the rows of each whole embedding and output head that the adapter in `folder` holds."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in ends]
    inner = ("", "base_layer.", "token_adapter.base_layer.")  # in PEFT's layers around them
    suffixes = tuple(f".{name}.{one}weight" for name in names for one in inner)
    path = next(folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file())
    if path.suffix == ".bin":
        tensors = torch.load(path, map_location="meta", weights_only=True)
        return [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(suffixes)]
    with safe_open(path, framework="pt") as file:
        return [file.get_slice(name).get_shape()[0] for name in file.keys() if name.endswith(suffixes)]  # noqa: SIM118


def check_new_rows(model: PreTrainedModel, spec: TokenizerOptions) -> None:
    """Raise UserError if tokens are added and nothing of the embedding trains: their rows would stay random."""
    if spec.adds and not any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        raise UserError(
            "model.tokenizer: tokens are added, and the embedding does not train, so their rows would stay random.",
            hint="Add the names of embedding and output head, such as embed_tokens and lm_head, to method.trainable.",
        )


def token_ids(tokenizer: PreTrainedTokenizerBase, tokens: Collection[str | int], key: str) -> tuple[int, ...]:
    """Return the ids of tokens that a recipe's key names by text or by id. Raises UserError for unknown ones."""
    if not tokens:
        return ()
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()  # copies it: 0.1 s for 150,000 tokens
    found = set()
    highest = max(vocabulary.values())
    for token in tokens:
        index = vocabulary.get(token, -1) if isinstance(token, str) else token
        if isinstance(token, str) and index < 0:
            pieces = tokenizer.tokenize(token)
            raise UserError(
                f"{key}: the tokenizer has no token {token!r}.",
                hint=f"It splits that text into {len(pieces)} tokens: {', '.join(map(repr, pieces[:4]))}.",
            )
        if index > highest:
            raise UserError(f"{key}: {index} is no token: the tokenizer's highest id is {highest}.")
        found.add(index)
    return tuple(sorted(found))


def trained_tokens(tokenizer: PreTrainedTokenizerBase, method: MethodOptions) -> tuple[int, ...]:
    """Return the ids of `method.trainable_token_indices` and, for an adapter, of the tokens that the recipe adds."""
    named = token_ids(tokenizer, method.trainable_token_indices, "method.trainable_token_indices")
    new = getattr(tokenizer, "new_token_ids", ()) if method.type in ("lora", "qlora") else ()
    return tuple(sorted({*named, *new}))
