"""The tokenizer of a GGUF file, from the tokenizer.json of Hugging Face's tokenizers.

Byte-level BPE (GPT-2, Llama 3, Qwen) becomes llama.cpp's model "gpt2": tokens, merges, and the name of the regular
expression that splits a text. llama.cpp has such expressions under fixed names, so that others are refused.

BPE of SentencePiece (Llama 2, Mistral, Gemma) becomes its model "llama": it merges the neighbours whose concatenation
has the highest score. The score of a piece is minus the rank of the first merge that makes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ligertune.errors import UserError
from ligertune.gguf_export.gguf_families import INSTEAD, Metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Parts of the published expressions
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # a sign or a space in front of a word
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDING}|{_BEFORE}\p{{L}}+"
_REST = rf"{_SIGNS}[\r\n]*|{_SPACES}"
_REST_WITH_SLASH = rf"{_SIGNS}[\r\n/]*|{_SPACES}"

# The expressions
QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
QWEN35 = rf"{_ENDING}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
GPT4O_WORDS = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}?"
GPT4O = rf"{GPT4O_WORDS}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
GPT2 = "ByteLevel"  # is built into tokenizers' ByteLevel

# (splitting steps, ignore_merges) -> llama.cpp's name
SPLITTERS = {
    ((GPT2,), False): "gpt-2",
    (("digits", GPT2), False): "smollm",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
}
SPACE = "\u2581"  # SentencePiece's sign for a space


@dataclass(frozen=True)
class GgufVocabulary:
    """metadata: keys of the file. notes: in which texts llama.cpp finds other tokens."""

    metadata: Metadata
    notes: tuple[str, ...]


def vocabulary(
    tokenizer: PreTrainedTokenizerBase, rows: int, stop_ids: list[int], *, after_special: bool = False
) -> GgufVocabulary:
    """Return the tokenizer's keys. Raises UserError for tokenizers that llama.cpp does not compute.

    rows: of the embedding; ids without a token get an unused one. stop_ids: of the generation configuration.
    after_special: prompts of training begin with a special token, such as BOS in a chat template.
    """
    parts = _parts_of(tokenizer)
    if len(tokenizer) > rows:
        raise UserError(
            f"--gguf: the tokenizer has {len(tokenizer)} tokens, and the model's embedding {rows} rows.",
            hint="Use the tokenizer the model was trained with.",
        )
    is_sentencepiece = bool(parts["model"].get("byte_fallback"))
    own = _sentencepiece(parts, after_special) if is_sentencepiece else _byte_level(parts)
    tokens, types = _tokens(parts, rows, is_sentencepiece=is_sentencepiece)
    metadata = own | _special_tokens(tokenizer, stop_ids)
    import gguf

    keys = gguf.Keys.Tokenizer
    if is_sentencepiece:
        ranks = _ranks(parts["model"]["merges"])
        metadata[keys.SCORES] = [float(-ranks.get(token, 0)) for token in tokens]
    metadata[keys.LIST] = tokens
    metadata[keys.TOKEN_TYPE] = types
    return GgufVocabulary(metadata, tuple(_notes(parts, after_special)))


def _refused(what: str) -> UserError:
    return UserError(f"--gguf: {what}, which is not written as GGUF.", hint=INSTEAD)


def _parts_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the content of tokenizer.json as the tokenizer was loaded. Raises UserError unless its model is BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(f"the tokenizer is a {type(tokenizer).__name__} without a tokenizer.json")
    parts: dict[str, Any] = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE":
        raise _refused(f"the tokenizer is of type {model['type']}")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _refused("the tokenizer marks the beginnings or ends of words")
    model["merges"] = [tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    return parts


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


# ---- byte-level BPE


def _byte_level(parts: dict[str, Any]) -> Metadata:
    import gguf

    keys = gguf.Keys.Tokenizer
    for step in _steps(parts["normalizer"], "normalizers"):
        if step["type"] != "NFC":  # llama.cpp composes no characters; `_notes` says so
            raise _refused(f"the tokenizer changes texts ({step['type']})")
    splitters = []
    steps = _steps(parts["pre_tokenizer"], "pretokenizers")
    for step in steps:
        splitters += _splitter(step)
    name = SPLITTERS.get((tuple(splitters), bool(parts["model"].get("ignore_merges"))))
    if name is None or steps[-1]["type"] != "ByteLevel":
        raise _refused("the tokenizer splits texts by an expression that llama.cpp has under no known name")
    merges = [f"{left} {right}" for left, right in parts["model"]["merges"]]
    return {keys.MODEL: "gpt2", keys.PRE: name, keys.MERGES: merges}


def _splitter(step: dict[str, Any]) -> list[str]:
    """Return how a step splits: an expression, "digits", or nothing. Raises UserError for others."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return [GPT2] if step["use_regex"] else []
    if step["type"] == "Digits" and step["individual_digits"]:
        return ["digits"]
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return [str(step["pattern"].get("Regex"))]
    raise _refused(f"the tokenizer splits texts in a way that is not known here ({step['type']})")


# ---- BPE of SentencePiece


def _sentencepiece(parts: dict[str, Any], after_special: bool) -> Metadata:
    """Return the keys of the model "llama".

    Such tokenizers put a space before a text. llama.cpp does so at the start and after each special token, or nowhere.
    One whose Metaspace does so at the start only gets the choice that is right for the prompts of training.
    """
    import gguf

    keys = gguf.Keys.Tokenizer
    steps = [*_steps(parts["normalizer"], "normalizers"), *_steps(parts["pre_tokenizer"], "pretokenizers")]
    effects = set().union(*(_space_effects(step) for step in steps))
    if "replaces" not in effects:
        raise _refused("the tokenizer keeps spaces")
    if not _all_merges_are_listed(parts):
        raise _refused("the tokenizer has pieces without their merges")
    adds = "always" in effects or ("first" in effects and not after_special)
    return {keys.MODEL: "llama", keys.PRE: "default", keys.ADD_PREFIX: adds}


def _space_effects(step: dict[str, Any]) -> set[str]:
    """Return what a step does: it "replaces" spaces, and adds one "always", "first" or "never". Raises UserError."""
    kind = step["type"]
    if kind == "Prepend" and step["prepend"] == SPACE:
        return {"always"}
    if kind == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE:
        return {"replaces"}
    if kind == "Metaspace" and step["replacement"] == SPACE and not step.get("split", True):
        return {"replaces", str(step["prepend_scheme"])}
    if kind == "Split" and step["pattern"] == {"String": " "}:  # Gemma's: its normalizer leaves no space
        return set()
    raise _refused(f"the tokenizer changes or splits texts in a way that is not known here ({kind})")


def _ranks(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Return piece -> rank of the first merge that makes it."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return ranks


def _all_merges_are_listed(parts: dict[str, Any]) -> bool:
    """Return whether all pairs that make a piece are merges, as llama.cpp merges all pairs that make one."""
    pieces = parts["model"]["vocab"]
    merges = set(parts["model"]["merges"])
    added = {token["content"] for token in parts["added_tokens"]}
    for piece in pieces:
        if piece in added or _is_byte(piece):
            continue
        for place in range(1, len(piece)):
            pair = (piece[:place], piece[place:])
            can_meet = all(part in pieces or len(part) == 1 for part in pair)
            if can_meet and pair not in merges:
                return False
    return True


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


# ---- tokens and their types


def _tokens(parts: dict[str, Any], rows: int, *, is_sentencepiece: bool) -> tuple[list[str], list[int]]:
    """Return the text and the type of each id from 0 to rows - 1."""
    import gguf

    kinds = gguf.TokenType
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [int(kinds.UNUSED)] * rows
    for piece, number in parts["model"]["vocab"].items():
        tokens[number] = piece
        types[number] = int(kinds.BYTE if is_sentencepiece and _is_byte(piece) else kinds.NORMAL)
    for token in parts["added_tokens"]:
        # llama.cpp looks for these in the text before it replaces spaces
        text = token["content"].replace(SPACE, " ") if is_sentencepiece and token["normalized"] else token["content"]
        tokens[token["id"]] = text
        types[token["id"]] = int(kinds.CONTROL if token["special"] else kinds.USER_DEFINED)
    unknown = parts["model"].get("unk_token")
    if is_sentencepiece and unknown in parts["model"]["vocab"]:
        types[parts["model"]["vocab"][unknown]] = int(kinds.UNKNOWN)
    return tokens, types


def _special_tokens(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]) -> Metadata:
    import gguf

    keys = gguf.Keys.Tokenizer
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    ids = {keys.BOS_ID: bos, keys.EOS_ID: eos, keys.UNK_ID: tokenizer.unk_token_id, keys.PAD_ID: tokenizer.pad_token_id}
    others = [number for number in stop_ids if number != eos]
    if eos is None and others:
        ids[keys.EOS_ID] = others.pop(0)
    if others:
        ids[keys.EOT_ID] = others[0]
    found: Metadata = {key: number for key, number in ids.items() if number is not None}
    encoded = tokenizer("a")["input_ids"]
    found[keys.ADD_BOS] = bool(encoded) and bos is not None and encoded[0] == bos
    found[keys.ADD_EOS] = bool(encoded) and eos is not None and encoded[-1] == eos
    return found


def _notes(parts: dict[str, Any], after_special: bool) -> list[str]:
    found = []
    if any(step["type"] == "NFC" for step in _steps(parts["normalizer"], "normalizers")):
        found.append("llama.cpp does not compose characters (NFC): texts in decomposed Unicode get other tokens there.")
    strips = [token["content"] for token in parts["added_tokens"] if token["lstrip"] or token["rstrip"]]
    if strips:
        found.append(f"llama.cpp keeps spaces next to {', '.join(strips)}, which the tokenizer drops.")
    schemes = [one.get("prepend_scheme", "never") for one in _steps(parts["pre_tokenizer"], "pretokenizers")]
    if "first" in schemes and after_special:
        found.append("llama.cpp puts no space before a text that follows no special token, and the tokenizer does.")
    elif "first" in schemes:
        found.append(
            "llama.cpp puts a space before the text after each special token, the tokenizer at the start only."
        )
    if {"first", "always"} & set(schemes) and not ("first" in schemes and after_special):
        found.append("llama.cpp puts a space before a text that begins with one, and the tokenizer does not.")
    return found
