"""Data sets of Axolotl, LLaMA-Factory and TRL -> items of `data.datasets`.

Keys without a counterpart stay in the items; the import reports them later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligertune.errors import UserError

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


def axolotl(item: Any) -> Any:
    """Convert one item of Axolotl's `datasets` or `test_datasets`."""
    if not isinstance(item, Mapping):
        return {"path": item} if isinstance(item, str) else item
    item = dict(item)
    kind = item.pop("type", None)
    if isinstance(kind, Mapping):  # a custom format, described field by field
        item |= {name if name in AXOLOTL_COLUMNS else f"type.{name}": value for name, value in kind.items()}
        kind = "alpaca"
    if isinstance(kind, str):
        plain = kind.replace(":", ".").split(".")[0]
        item["format"] = AXOLOTL_FORMATS.get(plain, plain)
    if item.get("path") in FILE_TYPES and item.get("data_files"):
        files = item.pop("data_files")
        item["path"] = files if isinstance(files, str) else files[0]
        item.pop("ds_type", None)
        if isinstance(files, list) and len(files) > 1:
            item["data_files"] = files[1:]
    columns = {name: item.pop(tool_name) for tool_name, name in AXOLOTL_COLUMNS.items() if item.get(tool_name)}
    _conversation(item, columns, item.pop("field_messages", None), _role_key(item))
    return _with_columns(item, columns)


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
    named = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or ())
    info = _dataset_info(folder, dataset_dir)
    found = [_registered(info[name], dataset_dir) if name in info else {"path": name} for name in named]
    return found, [name for name in named if name not in info]


def _dataset_info(folder: Path, dataset_dir: str) -> Mapping[str, Any]:
    for place in (folder / dataset_dir, Path(dataset_dir)):
        path = place / "dataset_info.json"
        if path.is_file():
            try:
                info = json.loads(path.read_text(encoding="utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as problem:
                raise UserError(f"{path} is not valid JSON: {problem}.") from None
            return info if isinstance(info, Mapping) else {}
    return {}


def _registered(entry: Mapping[str, Any], dataset_dir: str) -> dict[str, Any]:
    """Convert one entry of dataset_info.json."""
    entry = dict(entry)
    hub, file = entry.get("hf_hub_url"), entry.get("file_name")
    item: dict[str, Any] = {"path": hub or str(Path(dataset_dir) / str(file))}
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
        item["ranking"] = True
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
    strategy = data.get("eval_strategy", data.get("evaluation_strategy", "no"))
    test = data.pop("dataset_test_split", "test")
    evaluated = [{**common, "split": test}] if strategy not in ("no", False, None) else []
    return [train], evaluated
