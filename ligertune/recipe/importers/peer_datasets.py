"""Data sets of other tools as items of `data.datasets`.

Keys without a counterpart stay in the items, and the import reports them later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligertune.checked_files import DamagedFileError, read_json_value
from ligertune.errors import UserError
from ligertune.recipe.importers.import_state import Import, Left
from ligertune.recipe.importers.peer_templates import TEMPLATES
from ligertune.recipe.importers.peers import AXOLOTL, LLAMA_FACTORY, TRL

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


def convert_datasets(work: Import) -> None:
    """Convert the tool's data sets to `data.datasets` and `data.eval_datasets`."""
    convert = {AXOLOTL.name: _axolotl_datasets, LLAMA_FACTORY.name: _llama_factory_datasets, TRL.name: _trl_datasets}
    convert[work.peer.name](work)


def _axolotl_datasets(work: Import) -> None:
    data = work.data
    # `pretraining_dataset` counts only in a file without `datasets`
    names = {"datasets": "datasets", "test_datasets": "eval_datasets", "pretraining_dataset": "datasets"}
    for tool_name, name in names.items():
        given = data.pop(tool_name, None)
        if given and (tool_name != "pretraining_dataset" or name not in data.get("data", {})):
            items = given if isinstance(given, list) else [given]
            if data.get("task") in ("dpo", "reward"):
                items = [_pairs(item, data) for item in items]
            work.put(f"data.{name}", [new for item in items for new in axolotl(item)], tool_name)


def _llama_factory_datasets(work: Import) -> None:
    data = work.data
    folder = str(data.pop("dataset_dir", None) or "data")
    for tool_name, name in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        if given := data.pop(tool_name, None):
            found, unknown = llama_factory(given, work.folder, folder)
            found = [as_raw_text(item) for item in found] if data.get("stage") == "pt" else found
            work.put(f"data.{name}", found, tool_name)
            why = f"{folder}/dataset_info.json does not describe it: write a file or a hub id under data.{name}"
            work.left += [Left(0, tool_name, value, why) for value in unknown]
    if isinstance(most := data.pop("max_samples", None), int):
        for item in data.get("data", {}).get("datasets", []):
            item.setdefault("max_samples", most)


def _trl_datasets(work: Import) -> None:
    data = work.data
    written = next((name for name in TRL_DATASETS if name in data), None)
    if written is None:
        return
    train, evaluated = trl(data) if written == "dataset_name" else trl_mixture(data)
    work.put("data.datasets", train, written)
    if evaluated:
        work.put("data.eval_datasets", evaluated, written)


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
    named = item.pop("message_property_mappings", None)
    of_mapping = named.get("role") if isinstance(named, Mapping) else None
    item.pop("message_field_content", None)
    return item.pop("message_field_role", None) or of_mapping


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


def trl(data: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove TRL's flat data keys from `data`. Returns (training data sets, evaluation data sets)."""
    common = {"path": data.pop("dataset_name")}
    if data.get("dataset_config"):
        common["name"] = data.pop("dataset_config")
    text = data.pop("dataset_text_field", None)
    if text and text != "text":
        common |= {"format": "text", "columns": {"text": text}}
    train = {**common, **({"split": data.pop("dataset_train_split")} if data.get("dataset_train_split") else {})}
    test = data.pop("dataset_test_split", "test")
    return [train], [{**common, "split": test}] if evaluates(data) else []


def evaluates(data: Mapping[str, Any]) -> bool:
    """Report whether a file of TRL evaluates during training."""
    return data.get("eval_strategy", data.get("evaluation_strategy", "no")) not in ("no", False, None)


def trl_mixture(data: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Remove the keys of a mixture of data sets from `data`: TRL's `datasets`, or those of alignment-handbook.

    Returns (training data sets, evaluation data sets).
    """
    mixture = data.pop("dataset_mixture", None)
    if isinstance(mixture, Mapping):
        data |= {name: mixture[name] for name in ("datasets", "test_split_size") if name in mixture}
    share = data.pop("test_split_size", None)
    if share is not None:
        data["val_set_size"] = share
    given = data.pop("datasets", None)
    if isinstance(given, list):
        return [_trl_item(item) for item in given], []
    mixer = data.pop("dataset_mixer", None)
    if not isinstance(mixer, Mapping):
        return [], []
    splits, configs = (data.pop(name, None) for name in ("dataset_splits", "dataset_configs"))
    splits = [str(split) for split in splits] if isinstance(splits, list) else ["train", "test"]
    named = dict(zip(mixer, configs, strict=False)) if isinstance(configs, list) else {}
    items = [
        {"path": path, "split": split, **({"name": named[path]} if path in named else {}), "weight": weight}
        for path, weight in mixer.items()
        for split in splits
    ]
    trained = [_trl_item(item) for item in items if "test" not in item["split"]]
    tested = [_trl_item({**item, "weight": 1}) for item in items if "test" in item["split"]]
    return trained, tested if evaluates(data) else []


def _trl_item(item: Any) -> Any:
    """Convert one data set of a mixture. A list of columns only selects them."""
    if not isinstance(item, Mapping):
        return {"path": item} if isinstance(item, str) else item
    names = {"id": "path", "config": "name", "fraction": "weight"}
    found = {names.get(name, name): value for name, value in item.items() if value is not None}
    if isinstance(found.get("columns"), list):
        del found["columns"]
    if found.get("weight") == 1:
        del found["weight"]
    return found
