"""Check the files of an adapter that anyone may have made, before PEFT opens them.

PEFT matches names with `re`, which has no time limit, and allocates what adapter_config.json says. Here expressions are
matched with a time limit and replaced by the names that they match; numbers have bounds. Expressions of a recipe are
matched in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.any_types import AnyModule
from ligertune.errors import UserError, plural
from ligertune.files.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ModelOrigin, loading, read_json, shapes_in
from ligertune.models.adapters.name_patterns import matching_names
from ligertune.models.added_tokens import resize_for_adapter
from ligertune.models.score_head import embedding_rows

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

# PEFT allocates matrices of the rank that the file names. One above the hidden size, at most 2**18 in model_files, adds
# nothing; alpha has the same limit.
MAX_RANK = 2**20
MAX_LAYERS = 2**12  # of a model, as in model_files
# Names of a list. PEFT compares each with each layer; all layers of 128 experts in 48 layers are 18,432 names.
MAX_NAMES = 2**15
MAX_CHARACTERS = 4095  # of a text; a path has at most as many
MAX_NEW_ROWS = 4096  # of the embedding, beyond the base model's, in addition to one for each token that is named
MAX_SVD_ITERATIONS = 64  # of pissa_niter_N and LoftQ; their papers take up to 16 and 5
_PLAIN_NAME = re.compile(r"\w+(\.\w+)*")
# PEFT imports the module that megatron_core names. An adapter with invocation tokens would have no effect here: PEFT's
# own `generate` looks for these tokens.
_UNSUPPORTED = ("megatron_config", "alora_invocation_tokens")
_NAMES = ("modules_to_save", "layers_pattern")  # names that PEFT puts into a regular expression
_PATTERNS = {"rank_pattern": (1, MAX_RANK), "alpha_pattern": (0, MAX_RANK)}


def check_adapter(folder: Path, origin: ModelOrigin) -> set[str]:
    """Return the names of an adapter's tensors; none for a .bin file.

    Raises UserError for files that are missing or damaged, or that would import a Python module or fill the memory.
    """
    path = folder / ADAPTER_CONFIG
    values = read_json(path, origin)
    for key in _UNSUPPORTED:
        if values.get(key) is not None:
            raise origin.error(f"{path}: {key} is not supported.", hint="Leave the key out.")
    with loading(origin, f"{path} cannot be used"):
        _check_values(values, path, origin)
    weights = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise origin.error(f"{folder} holds no {ADAPTER_WEIGHTS[0]}.", hint="Was the download complete?")
    return set(shapes_in(weights, origin)) if weights.suffix == ".safetensors" else set()


def _check_values(values: dict[str, Any], path: Path, origin: ModelOrigin) -> None:
    """Raise UserError for a value that no adapter has."""

    def refuse(key: str, value: Any, expected: str) -> UserError:
        return origin.error(f"{path}: {key} is {json.dumps(value)[:40]}, and must be {expected}.")

    rank = values.get("r", 1)
    alpha = values.get("lora_alpha", 1)
    if type(rank) is not int or not 0 < rank < MAX_RANK:
        raise refuse("r", rank, f"a whole number from 1 to {MAX_RANK - 1:,}")
    if type(alpha) not in (int, float) or not 0 < alpha < MAX_RANK:
        raise refuse("lora_alpha", alpha, "a number above 0")
    for key, (least, most) in _PATTERNS.items():
        found = values.get(key) or {}
        numbers: Iterable[Any] = found.values() if isinstance(found, dict) else [None]
        if any(type(number) not in (int, float) or not least <= number < most for number in numbers):
            raise refuse(key, found, f"an object with numbers from {least} to {most - 1:,}")
    for key, value in values.items():
        if key.endswith("_config") and not isinstance(value, dict | None):
            raise refuse(key, value, "an object")
    for key in _switches(values.get("peft_type")) & values.keys():
        _check_switch(key, values[key], refuse)
    _check_layers(values, refuse)
    _check_initialisation(values, refuse)
    _check_amounts(values, refuse)


def _check_switch(key: str, value: Any, refuse: Callable[[str, Any, str], UserError]) -> None:
    if not isinstance(value, bool | None):  # PEFT takes "false" for true, and null for false
        raise refuse(key, value, "true or false")


def _switches(peft_type: Any) -> set[str]:
    """Return the names of the booleans in PEFT's configuration of this kind of adapter; of LoRA for an unknown kind."""
    import peft  # takes seconds

    kinds: dict[str, Any] = {kind.value: config for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    config = kinds.get(str(peft_type), peft.LoraConfig)
    return {field.name for field in dataclasses.fields(config) if field.type in ("bool", bool)}


def _check_layers(values: dict[str, Any], refuse: Callable[[str, Any, str], UserError]) -> None:
    """Raise UserError for names that are expressions, and for layers that no model has."""
    for key in _NAMES:
        found = values.get(key) or []
        for name in found if isinstance(found, list) else [found]:
            if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
                raise refuse(key, name, "a name, such as lm_head or layers")
    for layer in _flat(values.get("layers_to_transform")):
        if layer is not None and (type(layer) is not int or not 0 <= layer < MAX_LAYERS):
            raise refuse("layers_to_transform", layer, f"a whole number below {MAX_LAYERS}")
    replicated = list(_flat(values.get("layer_replication")))
    copies = [end - start for start, end in zip(replicated[::2], replicated[1::2], strict=False) if end is not None]
    if sum(copies) > MAX_LAYERS or any(number < 0 for number in (*copies, *filter(None, replicated))):
        raise refuse("layer_replication", values["layer_replication"], f"a list of at most {MAX_LAYERS} layers")


def _check_initialisation(values: dict[str, Any], refuse: Callable[[str, Any, str], UserError]) -> None:
    """Raise UserError for more iterations of a singular value decomposition than any adapter needs."""
    iterations = re.search(r"_niter_(\d+)$", str(values.get("init_lora_weights")))
    steps = _object(values.get("loftq_config")).get("loftq_iter", 1)
    # the length first: `int` raises ValueError for more than 4,300 digits
    if iterations and (len(iterations[1]) > 3 or int(iterations[1]) > MAX_SVD_ITERATIONS):
        raise refuse("init_lora_weights", values["init_lora_weights"], f"at most niter_{MAX_SVD_ITERATIONS}")
    if type(steps) is not int or not 0 < steps <= MAX_SVD_ITERATIONS:
        raise refuse("loftq_iter", steps, f"a whole number from 1 to {MAX_SVD_ITERATIONS}")


def _check_amounts(values: dict[str, Any], refuse: Callable[[str, Any, str], UserError]) -> None:
    """Raise UserError for lists, texts and numbers that are larger than those of any adapter."""
    for key, value in values.items():
        for count, one in enumerate(_flat(value), start=1):
            if count > MAX_NAMES:
                raise refuse(key, value, f"a list of at most {MAX_NAMES:,} values")
            if isinstance(one, str) and len(one) > MAX_CHARACTERS:
                raise refuse(key, one, f"at most {MAX_CHARACTERS:,} characters long")
            if isinstance(one, int | float) and not (math.isfinite(one) and abs(one) < 2**31):
                raise refuse(key, one, "a number below 2,147,483,648")


def _flat(value: Any) -> Iterator[Any]:
    """Yield the single values in nested lists and objects, and the names of an object's values."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for one in value:
        yield from _flat(one)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def fitted_config(model: PreTrainedModel, folder: Path, origin: ModelOrigin) -> PeftConfig:
    """Return the configuration of a checked adapter for `model`, with layers by name instead of by expressions.

    The model's embedding gets rows for the tokens that the adapter adds. Raises UserError.
    """
    import peft  # takes seconds

    path = folder / ADAPTER_CONFIG
    _check_tokens(model, path, origin)
    with loading(origin, f"{folder} holds no adapter of this model"):
        resize_for_adapter(model, folder)
        config = peft.PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise origin.error(f"{path}: peft_type is {kind}, which adapts the prompt.", hint="Give an adapter of layers.")
    _check_supported(config, path, origin)
    names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
    for key in ("target_modules", "exclude_modules"):
        expression = getattr(config, key, None)
        if isinstance(expression, str) and expression.lower() != "all-linear":  # PEFT's word for all linear layers
            found = _names_matching(expression, names, f"{origin.key}: {path}: {key}")
            if not found and key == "target_modules":
                raise origin.error(f"{path}: target_modules is {expression!r}, which matches no layer of the model.")
            setattr(config, key, _only(found) if found else None)
    for key in _PATTERNS:
        numbers = getattr(config, key, None) or {}
        fitted = {}
        for expression, number in numbers.items():
            if _PLAIN_NAME.fullmatch(expression):
                fitted[expression] = number
                continue
            # as PEFT matches them: the end of a name
            found = _names_matching(rf"(?:.*\.)?(?:{expression})", names, f"{origin.key}: {path}: {key}")
            if found:
                fitted[_only(found)] = number
        if numbers:
            setattr(config, key, fitted)
    return config


def _check_supported(config: AnyModule, path: Path, origin: ModelOrigin) -> None:
    """Raise UserError for an adapter whose base model cannot be told from the files, or that PEFT does not merge."""
    if getattr(config, "layer_replication", None):  # configurations with a value for each layer would differ, too
        raise origin.error(
            f"{path}: layer_replication copies layers of the base model, which is not supported.",
            hint="Save the model with the copied layers, and train an adapter of that.",
        )
    initial = str(getattr(config, "init_lora_weights", None))
    # PeftModel differs by 1 to 50 % from what was trained, and from one load to the next (tiny Llama, peft 0.21)
    if "_niter_" in initial:
        raise origin.error(
            f"{path}: init_lora_weights is {initial}, which changes the base by random values that no file holds.",
            hint="Save the adapter with path_initial_model_for_weight_conversion of PEFT's save_pretrained.",
        )


def _names_matching(expression: str, names: list[str], key: str) -> list[str]:
    """Return the names that match as a whole, in the order of the model. Raises UserError."""
    found = matching_names(expression, names, key=key, whole=True)
    return [name for name in dict.fromkeys(names) if name in found]


def _only(names: list[str]) -> str:
    """Return an expression that matches these names and is quick: PEFT compares a list with the ends of names."""
    return "|".join(map(re.escape, names))


def _check_tokens(model: PreTrainedModel, path: Path, origin: ModelOrigin) -> None:
    """Raise UserError for trained tokens far beyond the embedding, which would grow to hold them."""
    tokens = read_json(path, origin).get("trainable_token_indices") or []
    lists = list(tokens.values()) if isinstance(tokens, dict) else [tokens]
    if not all(isinstance(ids, list) for ids in lists):
        shown = json.dumps(tokens)[:40]
        raise origin.error(
            f"{path}: trainable_token_indices is {shown}: expected a list of ids, or one for each layer."
        )
    ids = [token for one in lists for token in one]
    rows = embedding_rows(model)
    most = rows + len(ids) + MAX_NEW_ROWS
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < most]
    if wrong:
        raise origin.error(
            f"{path}: trainable_token_indices names {json.dumps(wrong[0])[:40]}, and the embedding of the base model"
            f" has {plural(rows, 'row')}.",
            hint="Is it an adapter of this model?",
        )
