"""`ligertune recipe import`: convert another tool's YAML file to a recipe, and list the keys without a counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ligertune.errors import UserError
from ligertune.recipe.aliases import ALIASES, KEY_OF_ALIAS, Alias, apply_aliases
from ligertune.recipe.complaints import abbreviated, complain_about
from ligertune.recipe.document import Document, KeyPath, Place, dotted, keys, leaf, parent, schema_key, split
from ligertune.recipe.importers import import_tables as tables
from ligertune.recipe.importers.import_state import LEFT, Import, is_off, one_line
from ligertune.recipe.importers.import_tables import HARMLESS, HARMS, TOOLS, TRAINING, Peer, Reason, nested
from ligertune.recipe.importers.key_rules import apply_rules, conditions_hold
from ligertune.recipe.plain_yaml import dump
from ligertune.recipe.read import REQUIRED, read_document
from ligertune.recipe.rules.check_rules import broken_rules
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import EITHER_OR

UNKNOWN = "neither ligertune nor a tool that it knows has such a key"
NO_MEANING = "with this value, or next to the other keys, it means nothing that ligertune knows"
MAX_DEPTH = 4  # of sections whose keys are named one by one
TWICE_THE_RANK = "twice the rank"  # LLaMA-Factory's default of lora_alpha
# without one of these the run would train something else: the file is refused
OBJECTIVE_KEYS = ("task", "method.type", "preference.loss_type")
FLAT_SECTIONS = tables.KEYS["flat_sections"].split()
# keys that converters read, and leave where they mean nothing to them
READ_KEYS = {name for peer in TOOLS for name in peer.signs} | set(tables.KEYS["read_by_converters"].split())


def import_recipe(path: Path) -> Import:
    """Convert the file at `path`. Raises UserError if no known tool wrote it, or with all reasons to refuse it."""
    work = convert(path)
    work.raise_refusals()
    return work


def convert(path: Path) -> Import:
    """Convert the file at `path`; the reasons to refuse it are in `refusals`.

    Raises UserError if it cannot be read, or no known tool wrote it.
    """
    path = Path(path)
    document = read_document(path)
    unread = list(document.complaints)  # keys that are given twice
    work = Import(peer_of(document), document, path.absolute().parent)
    # after Import has copied the file: the report names its empty keys, too
    meanings = {name: value for name, value in work.peer.nulls.items() if document.data.get(name, 0) is None}
    document.data = _without_nulls(document.data | meanings)
    _other_sections(work)
    for rules in tables.KEYS["rules"].values():
        apply_rules(work, rules)
    # the importer's aliases first: they are more specific than those of recipes
    for rows in (tables.IMPORTED, ALIASES):
        _apply(work, rows)
    # flat keys after aliases: some rows convert values under our own name, such as gradient_checkpointing: unsloth
    _flat_keys(work)
    _unknown_keys(work)
    _replaced_keys(work)
    _tool_defaults(work)
    # aliases complain about names that the report explains; keys that are given twice stay refused
    document.complaints[:] = unread
    _values(work)
    work.refusals += [(remark.place.line, UserError(one_line(str(remark)))) for remark in document.complaints]
    _same_here(work)
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


def _other_sections(work: Import) -> None:
    """Remove keys with the name of a section here and another type, such as `eval: true`; `model: a/b` is a name."""
    for name, value in list(work.data.items()):
        is_section = "properties" in keys().get(name, {})
        if name == "model" and isinstance(value, str):
            work.document.remove((name,))  # rules write other keys of the section
            work.put("model.model_name_or_path", value, name)
        elif is_section and not isinstance(value, dict):
            _leave_unknown(work, (name,))


def peer_of(document: Document) -> Peer:
    """Return the tool whose characteristic keys occur most. Raises UserError if none occurs."""
    best, signs = tables.likely_peer(document.data)
    if not signs:
        *others, last = (peer.name for peer in TOOLS)
        names = f"{', '.join(others)} or {last}"
        hint = "If it is a recipe of ligertune already, validate it with `ligertune recipe check`."
        raise UserError(f"{document.file} has none of the keys that identify a file of {names}.", hint=hint)
    return best


def _apply(work: Import, rows: Sequence[Alias]) -> None:
    """Apply aliases; of two names of one key with different values, the first one counts."""
    document = work.document
    before = len(document.complaints)
    read = len(document.notices)
    apply_aliases(document, rows)
    # apply_aliases tells what it did in sentences only, which a recipe prints
    for notice in document.notices[read:]:
        name, _, key = notice.sentence.rstrip(".").partition(" is read as ")
        source = work.source_of(split(name))
        if key and source[0] in work.source:
            work.trace(source, key)
    for remark in document.complaints[before:]:
        name, _, other = remark.sentence.partition(" and ")
        kept = other.partition(" are two names")[0]
        work.lose(work.source_of(split(name)), Reason(f"{kept} has another value, and counts"))
    del document.complaints[before:]


def _flat_keys(work: Import) -> None:
    """Move top-level keys with the name of a recipe key into the first section that has it."""
    # reversed: of keys with one name, the first section's counts
    homes = {leaf(key): key for key in reversed(keys()) if parent(key) in FLAT_SECTIONS}
    del homes["chat_template"]  # in the tools it is a template's name or text, which is converted before
    document = work.document
    for name, value in list(document.data.items()):
        is_section = name in keys() and isinstance(value, dict)
        if name not in homes or is_section or document.has(split(homes[name])):
            continue
        del document.data[name]
        document.put(split(homes[name]), value, replace(document.place((name,)), written=name))
        # a rule may have set a key that the file does not have
        if work.path_of(name)[0] in work.source:
            work.trace(work.path_of(name), homes[name])


def _unknown_keys(work: Import) -> None:
    """Remove unknown keys at the top level and in data sets, each with the reason."""
    paths: list[KeyPath] = [(name,) for name in work.data]
    for which in ("datasets", "eval_datasets"):
        items = work.value_at(("data", which))
        # validation reports an item that is no mapping
        for index, item in enumerate(items if isinstance(items, list) else []):
            paths += [("data", which, index, name) for name in nested(item)]
    for path in paths:
        if schema_key(path) not in keys():
            _leave_unknown(work, path)


def _leave_unknown(work: Import, path: KeyPath) -> None:
    name = str(path[-1])
    value = work.document.get(path)
    reason = tables.REASONS.get(name)
    if reason is None and isinstance(value, dict) and value and len(path) < MAX_DEPTH:
        for inner in list(value):  # each key of a section may have its own reason
            _leave_unknown(work, (*path, inner))
        work.document.remove(path)
        return
    close = _similar(name) if reason is None else []
    why = f"{UNKNOWN}; did you mean {close[0]}?" if close else UNKNOWN
    if name.removeprefix("type.") in READ_KEYS or close == [name]:
        why = NO_MEANING
    work.leave(path, reason or Reason(why))


def _similar(name: str) -> list[str]:
    """Return the known key that is spelled most similarly, if one is."""
    # a comparison costs 20 us; a file of 10,000 unknown keys would take minutes without a cheap filter
    known = [*tables.REASONS, *KEY_OF_ALIAS, *map(leaf, keys())]
    candidates = [other for other in known if other[:2] == name[:2] and abs(len(other) - len(name)) <= 3]
    return get_close_matches(name, candidates, n=1, cutoff=0.85)


def _replaced_keys(work: Import) -> None:
    """Remove one of two keys that exclude each other; as in TrainingArguments, a positive number of steps wins."""
    for key, rival in EITHER_OR.items():
        steps = work.value_at(("train", rival))
        if isinstance(steps, int | float) and steps <= 0:  # -1 and 0 mean "not given"
            work.document.remove(("train", rival))
        elif steps is not None and work.document.has(("train", key)):
            work.leave(("train", key), Reason(f"train.{rival} replaces it, as in the tool", HARMLESS))


def _tool_defaults(work: Import) -> None:
    """Write the tool's defaults where ours differ, so that the run stays the same."""
    document = work.document
    here = Place("", 0, document.file)
    conditions = dict(tables.each_name(tables.KEYS["default_conditions"]))
    for key, value in work.peer.defaults.items():
        if document.has(split(key)) or not conditions_hold(work, conditions.get(key, {})):
            continue
        # the file's rank, or the tool's default of it, which stands before this one in the table
        if value == TWICE_THE_RANK:
            rank = document.get(("method", "lora_r"))
            value = 2 * rank
        document.put(split(key), value, here)
        work.defaults.append(f"{key}: {abbreviated(value)}")
    if not document.has(("checkpoint", "output_dir")):
        document.put(("checkpoint", "output_dir"), f"runs/{Path(document.file).stem}", here)


def _values(work: Import) -> None:
    """Remove values that the recipe's keys do not accept, each with the complaint, until the rest is valid."""
    document = work.document
    for section, _ in REQUIRED:
        document.data.setdefault(section, {})  # so that missing keys are named, not the missing section
    unread = len(document.complaints)
    # removing one value can make another valid or invalid, so validate again after each round
    while True:
        try:
            recipe = Recipe.model_validate(document.data, context=work.folder)
            refused = _contradictions(recipe, document)
        except ValidationError as error:
            refused = _invalid_values(error, document)
        removable = {path: why for path, why in refused.items() if document.has(path)}
        if not removable:
            return  # valid, or a required key is missing: the complaints say which
        for path, why in removable.items():
            if document.has(path):  # not so if the section around it went before
                _drop(work, path, why)
        del document.complaints[unread:]


def _contradictions(recipe: Recipe, document: Document) -> dict[KeyPath, str]:
    """Return one key of each broken rule, the least important one that is given, with the reason."""
    found: dict[KeyPath, str] = {}
    for broken in broken_rules(recipe, document, ()):
        given = [path for path in broken.paths if document.has(path)]
        if not given:
            document.complain(broken.lead, broken.sentence)
        elif not any(path in found for path in given):
            # the rest of the complaint recommends what the import does
            found[min(given, key=_importance)] = broken.sentence.partition(". ")[0].rstrip(".")
    return found


def _importance(path: KeyPath) -> int:
    key = dotted(path)
    if key in OBJECTIVE_KEYS:
        return 2
    return 0 if any(key == name or key.startswith(f"{name}.") for name in tables.KEYS["speed_keys"].split()) else 1


def _invalid_values(error: ValidationError, document: Document) -> dict[KeyPath, str]:
    """Return the keys whose values are invalid, each with the complaint."""
    before = len(document.complaints)
    paths = complain_about(error, document)
    remarks = document.complaints[before:]
    found: dict[KeyPath, str] = {}
    for path in paths:
        about = [row.sentence for row in remarks if row.sentence.startswith(dotted(path))]
        about += [row.sentence for row in remarks if row.place == document.place(path)]
        # a sentence about the key itself is better than one about its line
        found[path] = next(iter(about), UNKNOWN)
    return found


def _drop(work: Import, path: KeyPath, why: str) -> None:
    """Leave a value out; if it is the objective, refuse the file: the run would train something else."""
    document = work.document
    key = dotted(path)
    value = document.get(path)
    place = document.place(path)
    why = tables.BETTER_REASONS.get((schema_key(path), str(value)), why)
    if path[:1] == ("data",) and len(path) == 3 and path[1] in ("datasets", "eval_datasets"):
        path = path[:2]  # the others would move up to the place of a data set that is removed
    placeholder = next((value for required, value in REQUIRED.items() if required == path), None)
    if placeholder is None and not (key in OBJECTIVE_KEYS and not is_off(value)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # 0 is refused, not off
        harm = tables.SPEED if _importance(path) == 0 else TRAINING
        work.leave(path, Reason(why, harm), even_off=is_number)
        return
    work.refusals.append((place.line, UserError(f"{place}: {why}", hint=tables.KEEP_THE_TOOL)))
    document.remove(path)
    if placeholder is not None:  # so that it is not reported as missing, too
        document.put(path, placeholder, place)


def _same_here(work: Import) -> None:
    """Call a key harmless whose value says what is done here, too."""
    usual_roles = tables.UNSUPPORTED["usual_roles"]
    for path, value, fate in list(work.accounts()):
        name = str(path[-1])
        roles = {str(role) for role in (value if isinstance(value, list) else [value])}
        is_usual_role = "roles" in path[:-1] and roles <= set(usual_roles.get(name, "").split())
        if fate.state == LEFT and (is_usual_role or value in tables.UNSUPPORTED["same_here"].get(name, ())):
            work.lose(path, Reason(f"{abbreviated(value)} is what is done here", HARMLESS))


def _header(path: Path, work: Import) -> str:
    lines = [f"Imported from {path.name}, a file of {work.peer.name}."]
    if work.defaults:
        lines += [f"Defaults of {work.peer.name}: {', '.join(work.defaults)}."]
    lines += [f"Note: {note}." for note in work.notes]
    for harm in HARMS:
        items = [item for item in work.left if item.harm == harm]
        if items and harm == HARMLESS:
            lines += [f"Not imported, {harm}: {', '.join(item.key for item in items)}"]
        elif items:
            lines += [f"NOT IMPORTED, {harm}:" if harm == TRAINING else f"Not imported, {harm}:"]
            lines += [f"  {item}" for item in items]
    if work.off:
        lines += [f"Empty or off: {', '.join(work.off)}"]
    return "".join(f"# {one_line(line)}\n" for line in lines)
