"""`ligertune recipe import`: convert another tool's YAML file to a recipe, and list the keys without a counterpart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ligertune.errors import UserError
from ligertune.recipe.aliases import apply_aliases
from ligertune.recipe.complaints import abbreviated, complain_about
from ligertune.recipe.document import ITEM, Document, Place, dotted, keys, leaf, split
from ligertune.recipe.importers.import_state import NOTHING, Import
from ligertune.recipe.importers.llama_factory_v1 import flatten_v1, is_v1
from ligertune.recipe.importers.method_keys import convert_method
from ligertune.recipe.importers.objectives import refuse_other_objectives
from ligertune.recipe.importers.peer_datasets import convert_datasets
from ligertune.recipe.importers.peers import IMPORTED, TOOLS, TWICE_THE_RANK, Peer, likely_peer
from ligertune.recipe.importers.preferences import PREFERENCE_ALIASES, REFERENCE_KEYS, convert_preferences
from ligertune.recipe.importers.reasons import REASONS, VALUES
from ligertune.recipe.importers.run_keys import convert_run
from ligertune.recipe.plain_yaml import dump
from ligertune.recipe.read import REQUIRED, read_document
from ligertune.recipe.rules.check_rules import check_rules
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import EITHER_OR

NOT_FLAT = ("chat_template",)  # in the tools it is a template's name or text, which is converted before
UNKNOWN = "ligertune has no such key"


def import_recipe(path: Path) -> Import:
    """Convert the file at `path`. Raises UserError if no known tool wrote it, or if it names no model or data."""
    path = Path(path)
    document = read_document(path)
    document.data = _without_nulls(document.data)
    work = Import(peer_of(document), document, path.absolute().parent)
    if is_v1(document.data):
        flatten_v1(work)
    refuse_other_objectives(work)
    convert_preferences(document)
    convert_datasets(work)
    convert_run(work)
    convert_method(work)
    # the importer's aliases first: they are more specific than those of recipes
    apply_aliases(document, (*IMPORTED, *PREFERENCE_ALIASES))
    apply_aliases(document)
    _flat_keys(work)
    _unknown_keys(work)
    _replaced_keys(work)
    _tool_defaults(work)
    _values(work)
    document.raise_complaints()
    work.left.sort()
    ordered = {name: document.data[name] for name in Recipe.model_fields if document.data.get(name)}
    work.text = _header(path, work) + dump(ordered)
    return work


def _without_nulls(value: Any) -> Any:
    """Return a copy without the keys and items that are null: tools write them for keys that are not set."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value


def peer_of(document: Document) -> Peer:
    """Return the tool whose characteristic keys occur most. Raises UserError if none occurs."""
    best, signs = likely_peer(document.data)
    if not signs:
        names = " or ".join(peer.name for peer in TOOLS)
        raise UserError(
            f"{document.file} has none of the keys that identify a file of {names}.",
            hint="If it is a recipe of ligertune already, validate it with `ligertune recipe check`.",
        )
    return best


def _flat_keys(work: Import) -> None:
    """Move top-level keys with the name of a recipe key into the first section that has it."""
    homes: dict[str, str] = {}
    for key in keys():
        if "." in key and ITEM not in key:
            homes.setdefault(leaf(key), key)
    document = work.document
    for name in list(document.data):
        if name in keys() and isinstance(document.data[name], dict):
            continue
        if name in homes and name not in NOT_FLAT and not document.has(split(homes[name])):
            place, value = document.place((name,)), document.data.pop(name)
            document.put(split(homes[name]), value, Place("", place.line, place.file, name))


def _unknown_keys(work: Import) -> None:
    """Remove unknown keys at the top level and in data sets, each with the reason."""
    document, reasons = work.document, REASONS | REFERENCE_KEYS
    for name in list(document.data):
        if name not in keys():
            work.leave((name,), reasons.get(name, UNKNOWN))
    for which in ("datasets", "eval_datasets"):
        items = document.get(("data", which)) if document.has(("data", which)) else []
        for index, item in enumerate(items if isinstance(items, list) else []):
            if not isinstance(item, dict):
                continue  # validation reports it
            for name in [name for name in item if f"data.{which}{ITEM}.{name}" not in keys()]:
                work.leave(("data", which, index, name), REASONS.get(name, UNKNOWN))


def _replaced_keys(work: Import) -> None:
    """Remove one of two keys that exclude each other; as in TrainingArguments, a positive number of steps wins."""
    for key, rival in EITHER_OR.items():
        path, other = ("train", key), ("train", rival)
        if not work.document.has(other):
            continue
        steps = work.document.get(other)
        if isinstance(steps, int | float) and steps <= 0:  # -1 and 0 mean "not given"
            work.document.remove(other)
        elif work.document.has(path):
            work.leave(path, f"train.{rival} replaces it")


def _tool_defaults(work: Import) -> None:
    """Write the tool's defaults where ours differ, so that the run stays the same."""
    defaults = dict(work.peer.defaults)
    for key, value in defaults.items():
        rival = EITHER_OR.get(leaf(key))
        if key not in keys() or work.document.has(split(key)):
            continue
        if key.startswith("method.lora_") and not _trains_adapter(work.document):
            continue
        if value == TWICE_THE_RANK:
            rank = work.document.get(("method", "lora_r"))
            if not isinstance(rank, int):
                continue  # validation removes it
            value = 2 * rank
        if key in _NOT_OF_PREFERENCES and work.data.get("task") in ("dpo", "reward"):
            continue
        # the file's max_steps replaces the tool's default of num_train_epochs
        if rival and work.document.has((*split(key)[:-1], rival)):
            continue
        work.document.put(split(key), value, Place("", 0, work.document.file))
        work.defaults.append(f"{key}: {abbreviated(value)}")
    if not work.document.has(("checkpoint", "output_dir")):
        stem = Path(work.document.file).stem
        work.document.put(("checkpoint", "output_dir"), f"runs/{stem}", Place("", 0, work.document.file))


_NOT_OF_PREFERENCES = ("data.train_on", "data.prompt_template")


def _trains_adapter(document: Document) -> bool:
    path = ("method", "type")
    return document.has(path) and document.get(path) in ("lora", "qlora")


def _values(work: Import) -> None:
    """Remove values that the recipe's keys do not accept, each with the complaint, until the rest is valid."""
    document = work.document
    for section, _ in REQUIRED:
        document.data.setdefault(section, {})  # so that missing keys are named, not the missing section
    # removing one value can make another valid or invalid, so validate again after each round
    while True:
        try:
            recipe = Recipe.model_validate(document.data, context=work.folder)
            refused = check_rules(recipe, document, ())
        except ValidationError as error:
            refused = complain_about(error, document)
        messages = {remark.sentence: remark.place for remark in document.complaints}
        removable = [path for path in refused if document.has(path)]
        if not removable:
            return  # valid, or a required key is missing: the complaints say which
        for path in removable:
            about = [text for text in messages if dotted(path) in text]
            about += [text for text, place in messages.items() if place == document.place(path)]
            why = next(iter(about), UNKNOWN)
            why = VALUES.get((dotted(path), str(document.get(path))), why)
            is_objective = path in (("task",), ("method", "type"), ("preference", "loss_type"))
            if is_objective and document.get(path) not in NOTHING:  # without it the run would train something else
                raise UserError(f"{document.place(path)}: {why}", hint="Keep the other tool for this file.")
            work.leave(path, why)
        document.complaints.clear()


def _header(path: Path, work: Import) -> str:
    lines = [f"Imported from {path.name}, a file of {work.peer.name}."]
    if work.defaults:
        lines += [f"Defaults of {work.peer.name}: {', '.join(work.defaults)}."]
    lines += [f"Note: {note}." for note in work.notes]
    if work.left:
        lines += ["Not imported:", *(f"  {item.key}: {item.value}  ({item.why})" for item in work.left)]
    return "".join(f"# {line}\n" for line in lines)
