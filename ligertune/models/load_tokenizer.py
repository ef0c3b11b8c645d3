"""Load a tokenizer with the recipe's changes, and choose the token that pads batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ligertune.data.modalities.modality import modality_of
from ligertune.data.templates.bounded_jinja import known_templates, template_path
from ligertune.data.templates.tokenizer_limits import check_tokenizer, check_tokenizer_file
from ligertune.errors import UserError
from ligertune.files.hub import TOKENIZER_FILES, check_hub_model
from ligertune.files.model_files import RECIPE_MODEL, RECIPE_TOKENIZER, ModelOrigin, loading, read_json, reason_of
from ligertune.models.added_tokens import add_tokens
from ligertune.planning.preflight import is_hub_id

if TYPE_CHECKING:
    from ligertune.planning.options import ModelOptions

# The first that a vocabulary has: what families pad with, or keep for nothing (the reserved tokens of Llama 3).
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
    tokenizer = read_tokenizer(spec, RECIPE_TOKENIZER if spec.tokenizer.path else RECIPE_MODEL)
    pad_token_id, notes = _choose_pad(tokenizer, spec.tokenizer.pad_token)
    return LoadedTokenizer(tokenizer, pad_token_id, notes)


def read_tokenizer(spec: ModelOptions, origin: ModelOrigin) -> PreTrainedTokenizerBase:
    """Load the tokenizer as it was saved, with the recipe's EOS token and chat template. Raises UserError."""
    wanted = spec.tokenizer
    name = wanted.path or spec.model_name_or_path
    hint = "Set model.tokenizer.path to a folder with tokenizer.json, or to a hub id."
    hint = hint if origin.key.startswith("model.") else ""
    folder = Path(name).expanduser()
    for file in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / file).is_file():
            read_json(folder / file, origin)
    check_tokenizer_file(folder / "tokenizer.json", origin)
    if is_hub_id(name):
        revision = None if wanted.path else spec.revision
        check_hub_model(name, key=origin.key, revision=revision, files=TOKENIZER_FILES)
    try:
        with loading(origin, f"no tokenizer could be loaded from {name}", hint):
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=None if wanted.path else spec.revision, trust_remote_code=spec.trust_remote_code
            )
            check_tokenizer(tokenizer, name, origin)
            tokenizer("text", verbose=False)  # settings of a wrong type are found where they are used
    except UserError:
        _check_vocabulary_file(folder / "tokenizer.json", origin)
        raise
    _check_tokens(tokenizer, name, origin, hint)
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise origin.error(f"{Path(name) / 'tokenizer_config.json'}: chat_template is not a text.")
    if wanted.adds:
        add_tokens(tokenizer, wanted)
    if wanted.eos_token is not None:
        tokenizer.eos_token = _known(tokenizer, wanted.eos_token, "model.tokenizer.eos_token")
    if wanted.chat_template != "tokenizer":
        path = template_path(wanted.chat_template)
        tokenizer.chat_template = _read_template(path)
        tokenizer.chat_template_file = str(path)  # for the errors of `template_name`
    return tokenizer


def _check_tokens(tokenizer: PreTrainedTokenizerBase, name: str, origin: ModelOrigin, hint: str) -> None:
    """Raise UserError for a vocabulary without words, or without the token for unknown ones."""
    vocabulary = tokenizer.get_vocab()
    # transformers makes one with an EOS token alone for a folder without a tokenizer's files, for some classes
    if set(vocabulary) <= set(tokenizer.all_special_tokens):
        raise origin.error(f"the tokenizer of {name} is empty.", hint)
    unknown = tokenizer.unk_token
    # transformers looks up the id of an unknown token as that of this one, for ever
    if tokenizer.is_fast and unknown is not None and unknown not in vocabulary:
        raise origin.error(f"the tokenizer of {name}: unk_token is {unknown!r}, which is not in its vocabulary.")


def _check_vocabulary_file(path: Path, origin: ModelOrigin) -> None:
    """Raise UserError if the tokenizer could not be loaded because tokenizer.json is damaged."""
    if path.is_file():
        values = read_json(path, origin)
        with loading(origin, f"{path} is not a tokenizer"):
            Tokenizer.from_str(json.dumps(values))


def _read_template(path: Path) -> str:
    try:
        if not path.is_file():  # a device never ends
            raise FileNotFoundError(path)
        with path.open("rb") as file:
            return file.read(1 << 20).decode()  # a longer one is refused when it is rendered
    except (OSError, UnicodeDecodeError) as error:
        found = f"{path} cannot be read: {reason_of(error)}" if path.is_file() else f"there is no file {path}"
        raise UserError(
            f"model.tokenizer.chat_template: {found}.",
            hint="Write tokenizer (to use the tokenizer's template), the path of a jinja file, or a built-in template. "
            + known_templates(path.name),
        ) from error


def _known(tokenizer: PreTrainedTokenizerBase, token: str, key: str) -> str:
    if token not in tokenizer.get_vocab():
        known = ", ".join(tokenizer.all_special_tokens)
        raise UserError(
            f"{key}: the tokenizer has no token {token!r}.",
            hint=f"It has {known}. To add one, write model.tokenizer.add_special_tokens.",
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
    vocabulary = tokenizer.get_vocab()
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    special = [token for token in tokenizer.all_special_tokens if token == tokenizer.unk_token]
    for token in (*(name for name in PAD_NAMES if name in vocabulary), *special):
        if token not in taken:
            tokenizer.pad_token = token
            return tokenizer.pad_token_id, (f"padding token: {token!r}, chosen here; the tokenizer {why}",)
    token, index = min(((t, i) for t, i in vocabulary.items() if t not in taken), key=lambda pair: pair[1])
    return index, (f"padding: id {index} ({token!r}) in masked places only; the tokenizer {why} and no spare token",)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise UserError if the tokenizer has an id without a row in the model's embedding; it grows for added tokens."""
    excepted = {*modality_of(config).tokens_without_embedding, *getattr(tokenizer, "new_token_ids", ())}
    highest = max(index for index in tokenizer.get_vocab().values() if index not in excepted)
    vocab_size = config.get_text_config().vocab_size
    if highest >= vocab_size:
        raise UserError(
            f"model.tokenizer: its highest token id is {highest}, but the model's vocabulary has {vocab_size} entries.",
            hint="Use the tokenizer the model was trained with.",
        )
