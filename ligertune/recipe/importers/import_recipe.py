"""`ligertune recipe import`: convert another tool's YAML file to a recipe, and list the keys without a counterpart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ligertune.errors import UserError
from ligertune.recipe.aliases import apply_aliases
from ligertune.recipe.complaints import abbreviated, complain_about
from ligertune.recipe.document import ITEM, Document, KeyPath, Place, dotted, keys, leaf, split
from ligertune.recipe.importers import peers
from ligertune.recipe.importers.peers import (
    AXOLOTL,
    IMPORTED,
    LLAMA_FACTORY,
    NOT_OURS,
    OBJECTIVES,
    REASONS,
    TOOLS,
    TRL,
    TWICE_THE_RANK,
    Peer,
    likely_peer,
)
from ligertune.recipe.importers.preferences import PREFERENCE_ALIASES, REFERENCE_KEYS, convert_preferences
from ligertune.recipe.plain_yaml import dump
from ligertune.recipe.read import REQUIRED, read_document
from ligertune.recipe.rules import check_rules
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import EITHER_OR

UNKNOWN = "ligertune has no such key"
NOTHING = (None, False, "", "none", "no")  # an unknown key with one of these values switches nothing on


@dataclass(frozen=True, order=True)
class Left:
    """A key that was not imported: its line, name and value, and the reason."""

    line: int
    key: str
    value: str
    why: str


@dataclass
class Import:
    """An import. text: the recipe at the end; its comments list the keys that were not imported.

    left: keys that were not imported; defaults: the other tool's, where ours differ.
    """

    peer: Peer
    document: Document
    folder: Path
    left: list[Left] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        notices = [str(notice) for notice in sorted(self.document.notices)]
        left = [asdict(item) for item in self.left]
        return {"peer": self.peer.name, "text": self.text, "left": left, "defaults": self.defaults, "notices": notices}

    def leave(self, path: KeyPath, why: str) -> None:
        """Remove a key and record the reason, unless its value switches nothing on."""
        value = self.document.get(path)
        if value not in NOTHING and value not in ([], {}):
            self.left.append(Left(self.document.place(path).line, dotted(path), abbreviated(value), why))
        self.document.remove(path)


def import_recipe(path: Path) -> Import:
    """Convert the file at `path`. Raises UserError if no known tool wrote it, or if it names no model or data."""
    path = Path(path)
    document = read_document(path)
    document.data = {name: value for name, value in document.data.items() if value is not None}
    work = Import(peer_of(document), document, path.absolute().parent)
    _refuse_other_objectives(document)
    convert_preferences(document)
    _datasets(work)
    _method(work)
    # the importer's aliases first: they are more specific than those of recipes
    apply_aliases(document, [row for row in (*IMPORTED, *PREFERENCE_ALIASES) if row.key in keys()])
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


def _refuse_other_objectives(document: Document) -> None:
    """Raise UserError for a file that trains for something else, which must not become supervised fine-tuning."""
    for name, supported in OBJECTIVES.items():
        value = document.data.get(name, False)
        if value not in (False, *supported):
            raise UserError(
                f"{document.place((name,))}: {name}: {value} is not supported: ligertune trains on texts, answers and "
                "preferences, not on rewards.",
                hint="Keep the other tool for this file.",
            )


def _datasets(work: Import) -> None:
    """Convert the tool's data sets to `data.datasets` and `data.eval_datasets`."""
    convert = {AXOLOTL.name: _axolotl_datasets, LLAMA_FACTORY.name: _llama_factory_datasets, TRL.name: _trl_datasets}
    convert[work.peer.name](work, work.document.place(("datasets",)))


def _axolotl_datasets(work: Import, place: Place) -> None:
    data = work.document.data
    # `pretraining_dataset` counts only in a file without `datasets`
    names = {"datasets": "datasets", "test_datasets": "eval_datasets", "pretraining_dataset": "datasets"}
    for tool_name, name in names.items():
        given = data.pop(tool_name, None)
        if given and (tool_name != "pretraining_dataset" or name not in data.get("data", {})):
            items = given if isinstance(given, list) else [given]
            work.document.put(("data", name), [peers.axolotl(item) for item in items], place)


def _llama_factory_datasets(work: Import, place: Place) -> None:
    data = work.document.data
    folder = str(data.pop("dataset_dir", None) or "data")
    for tool_name, name in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        if given := data.pop(tool_name, None):
            found, unknown = peers.llama_factory(given, work.folder, folder)
            found = [peers.as_raw_text(item) for item in found] if data.get("stage") == "pt" else found
            work.document.put(("data", name), found, place)
            why = f"{folder}/dataset_info.json does not describe it: write a file or a hub id under data.{name}"
            work.left += [Left(0, tool_name, value, why) for value in unknown]
    if isinstance(most := data.pop("max_samples", None), int):
        for item in data.get("data", {}).get("datasets", []):
            item.setdefault("max_samples", most)


def _trl_datasets(work: Import, place: Place) -> None:
    if "dataset_name" not in work.document.data:
        return
    train, evaluated = peers.trl(work.document.data)
    work.document.put(("data", "datasets"), train, place)
    if evaluated:
        work.document.put(("data", "eval_datasets"), evaluated, place)


def _method(work: Import) -> None:
    """Convert keys without a single counterpart: 4-bit adapters are qlora, special tokens belong to the tokenizer."""
    data = work.document.data
    four_bit = data.pop("load_in_4bit", None) is True or data.get("quantization_bit") == 4
    if four_bit and (data.get("adapter") or data.get("use_peft") or data.get("finetuning_type", "") == "lora"):
        data.pop("quantization_bit", None)
        for name in ("use_peft", "finetuning_type"):
            data.pop(name, None)
        data["adapter"] = "qlora"
    if data.get("template") == "alpaca":
        data["prompt_template"] = data.pop("template")
    if data.get("stage") == "pt":
        data["stage"] = "sft"
        data.setdefault("packing", True)  # the tool's default at this stage
        data.setdefault("prompt_template", "auto")
    if data.get("unfrozen_parameters"):
        data.setdefault("adapter", "freeze")
    if data.get("assistant_only_loss"):
        data.pop("completion_only_loss", None)  # it is about rows of prompt and completion
    if "disable_gradient_checkpointing" in data:
        data["gradient_checkpointing"] = not data.pop("disable_gradient_checkpointing")
    tokens = data.pop("special_tokens", None)
    for name, token in (tokens if isinstance(tokens, dict) else {}).items():
        data.setdefault(name, token)
    for name, why in NOT_OURS.items():
        if name in data:
            work.leave((name,), why)


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
        if name in homes and name not in REASONS and not document.has(split(homes[name])):
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
        for index, item in enumerate(items):
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
        if key.startswith("method.lora_"):
            if not _trains_adapter(work.document):
                continue
            if value == TWICE_THE_RANK:
                value = 2 * work.document.get(("method", "lora_r"))
        # the file's max_steps replaces the tool's default of num_train_epochs
        if rival and work.document.has((*split(key)[:-1], rival)):
            continue
        work.document.put(split(key), value, Place("", 0, work.document.file))
        work.defaults.append(f"{key}: {abbreviated(value)}")
    if not work.document.has(("checkpoint", "output_dir")):
        stem = Path(work.document.file).stem
        work.document.put(("checkpoint", "output_dir"), f"runs/{stem}", Place("", 0, work.document.file))


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
        messages = {remark.sentence for remark in document.complaints}
        removable = [path for path in refused if document.has(path)]
        if not removable:
            return  # valid, or a required key is missing: the complaints say which
        for path in removable:
            why = next((message for message in messages if dotted(path) in message), UNKNOWN)
            is_objective = path in (("task",), ("method", "type"), ("preference", "loss_type"))
            if is_objective and document.get(path) not in NOTHING:  # without it the run would train something else
                raise UserError(f"{document.place(path)}: {why}", hint="Keep the other tool for this file.")
            work.leave(path, why)
        document.complaints.clear()


def _header(path: Path, work: Import) -> str:
    lines = [f"Imported from {path.name}, a {work.peer.name} file."]
    if work.defaults:
        lines += [f"Defaults of {work.peer.name}: {', '.join(work.defaults)}."]
    if work.left:
        lines += ["Not imported:", *(f"  {item.key}: {item.value}  ({item.why})" for item in work.left)]
    return "".join(f"# {line}\n" for line in lines)
