"""Data sets of other tools as items of `data.datasets`.

Keys without a counterpart stay in the items, and the import reports them later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.files.checked_files import DamagedFileError, read_json_value
from ligertune.recipe.document import ITEM, KeyPath, Place, dotted, keys, leaf
from ligertune.recipe.importers.import_state import LEFT, Fate, Import, Left, leaves
from ligertune.recipe.importers.peer_templates import TEMPLATES
from ligertune.recipe.importers.peers import AXOLOTL, LLAMA_FACTORY, TRL
from ligertune.recipe.importers.reasons import HARMLESS, TRAINING

TRL_DATASETS = ("datasets", "dataset_mixture", "dataset_mixer", "dataset_name")  # the first one counts
FILE_TYPES = ("json", "parquet", "csv", "text", "arrow")  # instead of a path; `data_files` then names the files
# column names of the tool -> column names of our formats
AXOLOTL_COLUMNS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field": "text",
}
LLAMA_FACTORY_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
AXOLOTL_FORMATS = {"chat_template": "messages", "completion": "text", "pretrain": "text", "pretraining": "text"}


# key of a tool's data set -> our key, where both differ; a key that stays in a converted item has the same name here
ITEM_KEYS = {
    "type": "format",
    "data_files": "path",
    "ds_type": "path",
    "field_messages": "columns",
    "message_property_mappings": "format",
    "message_field_role": "format",
    "message_field_content": "format",
    "id": "path",
    "config": "name",
    "fraction": "weight",
    **dict.fromkeys(AXOLOTL_COLUMNS, "columns"),
}


def convert_datasets(work: Import) -> None:
    """Convert the tool's data sets to `data.datasets` and `data.eval_datasets`."""
    convert = {AXOLOTL.name: _axolotl_datasets, LLAMA_FACTORY.name: _llama_factory_datasets, TRL.name: _trl_datasets}
    convert[work.peer.name](work)


def _add_items(work: Import, which: str, source: KeyPath, given: Any, converted: list[Any]) -> None:
    """Add the data sets that one item of the file became, and record what became of the item's keys."""
    section = work.data.setdefault("data", {})
    items = section.setdefault(which, []) if isinstance(section, dict) else []
    for new in converted:
        path = ("data", which, len(items))
        place = Place("", work.line_of(source), work.document.file)
        work.document.places[path] = place
        work.items[path] = source
        items.append(new)
        if not isinstance(given, Mapping):
            work.trace(source, dotted(path))
            continue
        for at, _ in leaves(given):
            written = str(at[0])
            kept = new if isinstance(new, Mapping) else {}
            is_flattened = len(at) > 1 and ".".join(map(str, at)) in kept
            if is_flattened or (written in kept and (written in UNCONVERTED or written not in OWN_KEYS)):
                continue  # without a counterpart: the import reports it later
            name = ITEM_KEYS.get(str(at[-1]), ITEM_KEYS.get(written, written))
            if name in kept:
                work.trace((*source, *at), f"{dotted(path)}.{name}")
            elif name != written or name == "columns":  # pairs have no format, and a list of columns only selects them
                work.trace((*source, *at), dotted(path))


def _axolotl_datasets(work: Import) -> None:
    data = work.data
    # `pretraining_dataset` counts only in a file without `datasets`
    names = {"datasets": "datasets", "test_datasets": "eval_datasets", "pretraining_dataset": "datasets"}
    for tool_name, which in names.items():
        given = data.get(tool_name)
        if tool_name == "pretraining_dataset" and given and which in data.get("data", {}):
            work.leave((tool_name,), "datasets replaces it")
            continue
        data.pop(tool_name, None)
        is_list = isinstance(given, list)
        for index, item in enumerate(given if is_list else [given] if given else []):
            source = (tool_name, index) if is_list else (tool_name,)
            plain = _pairs(item, data) if data.get("task") in ("dpo", "reward") else item
            _add_items(work, which, source, item, axolotl(plain))


def _llama_factory_datasets(work: Import) -> None:
    data = work.data
    folder = str(work.take("dataset_dir", "data.datasets") or "data")
    for tool_name, which in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        given = data.get(tool_name)
        if isinstance(given, list) and any(isinstance(item, dict) for item in given):
            continue  # of the new trainer; validation reports what it does not know
        if given := data.pop(tool_name, None):
            try:
                found, unknown = llama_factory(given, work.folder, folder)
            except UserError as problem:
                work.refusals.append((work.line_of((tool_name,)), problem))
                continue
            found = [as_raw_text(item) for item in found] if data.get("stage") == "pt" else found
            work.put(f"data.{which}", found, tool_name)
            why = f"{folder}/dataset_info.json does not describe it, so it is read as a file or a hub id"
            line = work.line_of((tool_name,))
            work.more_left += [
                Left(line, tool_name, value, why, TRAINING, f"data.{which}") for value in unknown if "/" not in value
            ]
    most = data.get("max_samples")
    if isinstance(most, int) and not isinstance(most, bool):
        work.take("max_samples", "data.datasets")
        for which in ("datasets", "eval_datasets"):  # the tool cuts each data set
            for item in data.get("data", {}).get(which, []):
                item.setdefault("max_samples", most)


def _trl_datasets(work: Import) -> None:
    written = next((name for name in TRL_DATASETS if name in work.data), None)
    if written == "dataset_name":
        _one_trl_dataset(work)
    elif written is not None:
        _trl_mixture(work)


# names of a message's fields that the formats messages and sharegpt have
FIELD_KEYS = ("message_property_mappings", "message_field_role", "message_field_content")
KNOWN_FIELDS = [(role, content) for role in ("role", None) for content in ("content", None)]
KNOWN_FIELDS += [("from", content) for content in ("value", None)]
OWN_KEYS = {leaf(key) for key in keys() if key.startswith(f"data.datasets{ITEM}.")}
UNCONVERTED = (*FIELD_KEYS, "roles", "type")


def _pairs(item: Any, data: dict[str, Any]) -> Any:
    """Return a data set of pairs without its type, such as chatml.intel: its columns say the format."""
    if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
        return item
    template = item["type"].partition(".")[0]
    if template in TEMPLATES:
        data.setdefault("chat_template", template)
    return {name: value for name, value in item.items() if name != "type"}


def axolotl(item: Any) -> list[Any]:
    """Convert one item of Axolotl's `datasets` or `test_datasets`; several `data_files` are as many data sets."""
    if not isinstance(item, Mapping):
        return [{"path": item} if isinstance(item, str) else item]
    item = dict(item)
    kind = item.pop("type", None)
    if isinstance(kind, Mapping):  # a custom format, described field by field
        if plain := _without_a_prompt(kind):
            return [_with_columns(one, plain) for one in _per_file({**item, "format": "prompt_completion"})]
        item |= {name if name in AXOLOTL_COLUMNS else f"type.{name}": value for name, value in kind.items()}
        kind = "alpaca"
    if isinstance(kind, str):
        plain = kind.replace(":", ".").split(".")[0]
        item["format"] = AXOLOTL_FORMATS.get(plain, plain)
    columns = {name: item.pop(tool_name) for tool_name, name in AXOLOTL_COLUMNS.items() if item.get(tool_name)}
    _conversation(item, columns, item.pop("field_messages", None), _role_key(item))
    return [_with_columns(one, columns) for one in _per_file(item)]


def _without_a_prompt(kind: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the columns of a custom format whose prompt is the instruction alone, else None."""
    formats = [kind.get(name) for name in ("format", "no_input_format") if kind.get(name)]
    others = kind.keys() - {
        "format",
        "no_input_format",
        "field_instruction",
        "field_output",
        "system_prompt",
        "system_format",
    }
    if not formats or any(text.strip() != "{instruction}" for text in formats) or others or kind.get("system_prompt"):
        return None
    return {"prompt": kind.get("field_instruction", "instruction"), "completion": kind.get("field_output", "output")}


def _per_file(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one data set per file of `data_files`, if the path is only the type of the files."""
    if item.get("path") not in FILE_TYPES or not item.get("data_files"):
        return [item]
    files = item["data_files"]
    rest = {name: value for name, value in item.items() if name not in ("data_files", "ds_type")}
    return [{**rest, "path": file} for file in (files if isinstance(files, list) else [files])]


def _role_key(item: dict[str, Any]) -> str | None:
    """Remove the keys that describe messages, and return the field that holds a message's role."""
    mapping = item.get("message_property_mappings")
    mapping = dict(mapping) if isinstance(mapping, Mapping) else {}
    role = item.get("message_field_role") or mapping.pop("role", None)
    content = item.get("message_field_content") or mapping.pop("content", None)
    # only these pairs of names are formats here; other names stay in the item, and are reported
    if (role, content) in KNOWN_FIELDS and not mapping:
        for name in FIELD_KEYS:
            item.pop(name, None)
    return role


def _conversation(item: dict[str, Any], columns: dict[str, str], messages: str | None, role_key: str | None) -> None:
    """Set the format of conversations: sharegpt if the role field is `from`, messages if it is `role`."""
    if role_key == "from":
        item["format"] = "sharegpt"
    elif role_key == "role":
        item["format"] = "messages"
    if messages:
        expected = "conversations" if item.get("format") == "sharegpt" else "messages"
        columns[expected] = messages


def _with_columns(item: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    renamed = {expected: actual for expected, actual in columns.items() if expected != actual}
    return {**item, "columns": renamed} if renamed else item


def llama_factory(names: Any, folder: Path, dataset_dir: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Look names up in dataset_info.json. Returns (data sets, names that the file does not hold)."""
    named = names if isinstance(names, list) else [name.strip() for name in str(names).split(",")]
    named = [str(name) for name in named]
    info = _dataset_info(folder, dataset_dir)
    found = [_registered(info[name], dataset_dir) if name in info else {"path": name} for name in named]
    return found, [name for name in named if name not in info]


def as_raw_text(item: dict[str, Any]) -> dict[str, Any]:
    """Return a data set of LLaMA-Factory's `stage: pt`, whose prompt column holds the texts."""
    column = item.get("columns", {}).get("instruction", "text")
    others = {name: value for name, value in item.items() if name != "columns"}
    return _with_columns({**others, "format": "text"}, {"text": column})


def _dataset_info(folder: Path, dataset_dir: str) -> Mapping[str, Any]:
    for place in (folder / dataset_dir, Path(dataset_dir)):
        path = place / "dataset_info.json"
        if path.is_file():
            try:
                info = read_json_value(path)
            except DamagedFileError as problem:
                raise UserError(f"{path} {problem}.") from None
            return info if isinstance(info, Mapping) else {}
    return {}


def _registered(entry: Mapping[str, Any], dataset_dir: str) -> dict[str, Any]:
    """Convert one entry of dataset_info.json."""
    item: dict[str, Any] = {"path": entry.get("hf_hub_url") or str(Path(dataset_dir) / str(entry.get("file_name")))}
    for tool_name, name in (("subset", "name"), ("split", "split"), ("num_samples", "max_samples")):
        if entry.get(tool_name):
            item[name] = entry[tool_name]
    given = entry.get("columns") or {}
    columns = {name: given[tool_name] for tool_name, name in LLAMA_FACTORY_COLUMNS.items() if given.get(tool_name)}
    if entry.get("formatting", "alpaca") == "sharegpt":
        role_key = (entry.get("tags") or {}).get("role_tag", "from")
        _conversation(item, columns, given.get("messages", "conversations"), role_key)
    else:
        item["format"] = "alpaca"
    if entry.get("ranking"):
        item["format"] = f"{item.get('format', 'sharegpt')}_pairs"
    columns |= {name: given[name] for name in ("chosen", "rejected", "kto_tag") if given.get(name)}
    return _with_columns(item, columns)


def _one_trl_dataset(work: Import) -> None:
    """Convert TRL's flat keys of one data set."""
    data = work.data
    trained = "data.datasets[0]"
    tested = "data.eval_datasets[0]"
    common = {"path": work.take("dataset_name", f"{trained}.path")}
    if data.get("dataset_config"):
        common["name"] = work.take("dataset_config", f"{trained}.name")
    text = work.take("dataset_text_field", f"{trained}.format")
    if text and text != "text":
        common |= {"format": "text", "columns": {"text": text}}
    split = work.take("dataset_train_split", f"{trained}.split")
    _put_items(work, "datasets", "dataset_name", [{**common, **({"split": split} if split else {})}])
    if evaluates(data):
        split = work.take("dataset_test_split", f"{tested}.split", default="test")
        _put_items(work, "eval_datasets", "dataset_name", [{**common, "split": split}])
    elif "dataset_test_split" in data:
        work.leave(("dataset_test_split",), "the file evaluates nothing", HARMLESS)


def _put_items(work: Import, which: str, written: str, items: list[Any]) -> None:
    place = Place("", work.line_of(work.path_of(written)), work.document.file)
    work.document.put(("data", which), items, place)


def evaluates(data: Mapping[str, Any]) -> bool:
    """Report whether a file of TRL evaluates during training."""
    return data.get("eval_strategy", data.get("evaluation_strategy", "no")) not in ("no", False, None)


def _trl_mixture(work: Import) -> None:
    """Convert a mixture of data sets: TRL's `datasets`, or those of alignment-handbook."""
    data = work.data
    work.hoist("dataset_mixture", ("datasets", "datasets"), ("test_split_size", "test_split_size"), ("seed", "seed"))
    if "test_split_size" in data:
        work.names["val_set_size"] = work.path_of("test_split_size")
        data["val_set_size"] = data.pop("test_split_size")
    given = data.pop("datasets", None)
    source = work.path_of("datasets")
    if isinstance(given, list):
        for index, item in enumerate(given):
            _add_items(work, "datasets", (*source, index), item, [_trl_item(item)])
        return
    if given is not None:
        work.fates[source] = Fate(LEFT, (), "it is not a list of data sets", TRAINING)
    mixer = data.get("dataset_mixer")
    if not isinstance(mixer, Mapping):
        return
    work.take("dataset_mixer")
    splits = work.take("dataset_splits", "data.datasets")
    configs = work.take("dataset_configs", "data.datasets")
    splits = [str(split) for split in splits] if isinstance(splits, list) else ["train", "test"]
    named = dict(zip(mixer, configs, strict=False)) if isinstance(configs, list) else {}
    for path, weight in mixer.items():
        for split in splits:
            is_test = "test" in split
            if is_test and not evaluates(data):
                continue
            name = {"name": named[path]} if path in named else {}
            item = {"path": path, "split": split, **name, "weight": 1 if is_test else weight}
            _add_items(work, "eval_datasets" if is_test else "datasets", ("dataset_mixer", path), weight,
                       [_trl_item(item)])  # fmt: skip


def _trl_item(item: Any) -> Any:
    """Convert one data set of a mixture. A list of columns only selects them."""
    if not isinstance(item, Mapping):
        return {"path": item} if isinstance(item, str) else item
    names = {"id": "path", "config": "name", "fraction": "weight"}
    found = {names.get(name, name): value for name, value in item.items() if value is not None}
    if isinstance(found.get("columns"), list):
        del found["columns"]
    return found
