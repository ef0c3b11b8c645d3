"""Data sets of other tools as items of `data.datasets`.

Keys without a counterpart stay in the items, and the import reports them later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.files.checked_files import DamagedFileError, read_json_value
from ligertune.recipe.document import ITEM, KeyPath, Place, dotted, keys, leaf
from ligertune.recipe.feature import trains_on_pairs
from ligertune.recipe.importers.import_state import Import, Left, leaves
from ligertune.recipe.importers.import_tables import HARMLESS, KEYS, TEMPLATES, Reason, nested, split_names
from ligertune.recipe.read import read_document

FILE_TYPES = ("json", "parquet", "csv", "text", "arrow")  # instead of a path; `data_files` then names the files
# names of a message's fields that the formats messages and sharegpt have
FIELD_KEYS = ("message_property_mappings", "message_field_role", "message_field_content")
KNOWN_FIELDS = [(role, content) for role in ("role", None) for content in ("content", None)]
KNOWN_FIELDS += [("from", content) for content in ("value", None)]
# keys of Axolotl's custom formats that do not change a prompt which is the instruction alone
PLAIN_FORMAT = {"format", "no_input_format", "field_instruction", "field_output", "system_prompt", "system_format"}
ROLE_NAMES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
CHAT_FORMATS = ("messages", "sharegpt")
OWN_KEYS = {leaf(key) for key in keys() if key.startswith(f"data.datasets{ITEM}.")}


def convert_described_datasets(work: Import) -> None:
    """Convert the data sets of LLaMA-Factory's new trainer."""
    for name, key in (("train_dataset", "data.datasets"), ("eval_dataset", "data.eval_datasets")):
        if given := work.take(name, key):
            work.put(key, _described(given, work.folder), name)


def _described(given: Any, folder: Path) -> list[Any]:
    """Return the data sets of a YAML file that describes them, or the one that `given` is itself."""
    path = folder / str(given)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return [{"path": given}]
    items = []
    for entry in map(nested, read_document(path).data.values()):
        item = _renamed(entry, KEYS["described_item"])
        # pairs have another converter, and are recognised by their columns here
        if entry.get("converter") in ("alpaca", "sharegpt"):
            item["format"] = entry["converter"]
        items.append(item)
    return items


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a data set has under these names of a tool, under ours."""
    return {ours: given[name] for name, ours in names.items() if given.get(name)}


def _add_items(work: Import, which: str, source: KeyPath, given: Any, converted: list[Any]) -> None:
    """Add the data sets that one item of the file became, and record what became of the item's keys."""
    items = work.data.setdefault("data", {}).setdefault(which, [])
    for new in converted:
        # complaints name the line of the tool's item
        path = ("data", which, len(items))
        work.document.places[path] = Place("", work.line_of(source), work.document.file)
        work.origins[path] = source
        for name in nested(new):  # "type.format" stood in the section `type`
            work.origins[(*path, name)] = (*source, *name.split("."))
        items.append(new)
        if not isinstance(given, Mapping) or not given:  # a path, a weight of a mixer, or only empty keys
            work.trace(source, dotted(path))
            continue
        for at, _ in leaves(given):
            into = _key_of(at, nested(new))
            if into is not None:
                work.trace((*source, *at), f"{dotted(path)}.{into}".rstrip("."))


def _key_of(at: KeyPath, item: Mapping[str, Any]) -> str | None:
    """Return the key of a converted item that a key of the tool's item became; "" for the item as a whole.

    None for a key that stays in the item: the import reports it later.
    """
    written = str(at[0])
    # fields of a custom format stay as "type.format"
    is_flattened = len(at) > 1 and ".".join(map(str, at)) in item
    if is_flattened or (written in item and written not in OWN_KEYS):
        return None
    if written == "data_files" and written in item:
        return written
    ours = KEYS["item_keys"]
    name = ours.get(str(at[-1]), ours.get(written, written))
    if name in item:
        return name
    # pairs have no format, and a list of columns only selects them
    return "" if name != written or name == "columns" else None


def convert_axolotl_datasets(work: Import) -> None:
    """Convert Axolotl's lists of data sets, and `pretraining_dataset`, which may be one."""
    names = {"datasets": "datasets", "test_datasets": "eval_datasets", "pretraining_dataset": "datasets"}
    for tool_name, which in names.items():
        given = work.data.pop(tool_name, None)
        if not given:
            continue
        rows: dict[KeyPath, Any] = {(tool_name,): given}
        if isinstance(given, list):
            rows = {(tool_name, index): item for index, item in enumerate(given)}
        for source, item in rows.items():
            converted = _axolotl_items(item, work.data)
            _add_items(work, which, source, item, converted)
            kind = item.get("type") if isinstance(item, Mapping) else None
            if isinstance(kind, Mapping) and not kind.get("format") and converted[0].get("format") == "alpaca":
                why = "the tool's prompt is then the bare instruction; write a Jinja file in data.prompt_template"
                key = f"{dotted(source)}.type.format"
                work.more_left.append(Left(work.line_of(source), key, "not written", why, ours=f"data.{which}"))


def _axolotl_items(item: Any, data: dict[str, Any]) -> list[Any]:
    """Convert one item of Axolotl's `datasets` or `test_datasets`; several `data_files` are as many data sets."""
    if not isinstance(item, Mapping):
        return [{"path": item} if isinstance(item, str) else item]
    item = dict(item)
    kind = item.pop("type", None)
    if isinstance(kind, str) and trains_on_pairs(data.get("task")):
        # of pairs, such as chatml.intel: their columns say the format
        template = kind.partition(".")[0]
        if template in TEMPLATES:
            data.setdefault("chat_template", template)
        kind = None
    if trains_on_pairs(data.get("task")):
        return [_with_columns(one, _pair_columns(one, kind)) for one in _per_file(item)]
    if isinstance(kind, Mapping):  # a custom format, described field by field
        if prompt_columns := _without_a_prompt(kind):
            return [_with_columns(one, prompt_columns) for one in _per_file({**item, "format": "prompt_completion"})]
        # its fields are columns; its prompt cannot be kept, and is reported under "type.format"
        own_columns = KEYS["axolotl_columns"]
        item |= {name if name in own_columns else f"type.{name}": value for name, value in kind.items()}
        kind = "alpaca"
    if isinstance(kind, str):
        # alpaca:chat and chat_template.default are variants of a format
        plain = kind.replace(":", ".").split(".")[0]
        item["format"] = KEYS["axolotl_formats"].get(plain, plain)
    columns = _renamed(item, KEYS["axolotl_columns"])
    item = {name: value for name, value in item.items() if name not in KEYS["axolotl_columns"] or not value}
    _conversation(item, columns, item.pop("field_messages", None), _role_key(item))
    return [_with_columns(one, columns) for one in _per_file(item)]


def _pair_columns(item: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the columns of pairs, which the item or its custom format names; prompts of a format are reported."""
    names = KEYS["axolotl_pairs"]
    for name, value in nested(kind).items():
        # a format that is the column alone says nothing new
        if name in names or str(value).strip() not in ("{prompt}", "{chosen}", "{rejected}", "{completion}"):
            item[name if name in names else f"type.{name}"] = value
    return {names[name]: item.pop(name) for name in list(item) if name in names and item[name]}


def _without_a_prompt(kind: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the columns of a custom format whose prompt is the instruction alone, else None."""
    formats = [str(kind[name]) for name in ("format", "no_input_format") if kind.get(name)]
    # another prompt is Stanford's with other words, which a recipe writes as a Jinja file
    is_plain = formats and all(text.strip() == "{instruction}" for text in formats)
    if not is_plain or kind.keys() - PLAIN_FORMAT or kind.get("system_prompt"):
        return None
    return {"prompt": kind.get("field_instruction", "instruction"), "completion": kind.get("field_output", "output")}


def _per_file(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one data set per file of `data_files`, if the path is only the type of the files."""
    item = _listed_files(item)
    if item.get("path") not in FILE_TYPES or not item.get("data_files"):
        return [item]
    rest = {name: value for name, value in item.items() if name not in ("data_files", "ds_type")}
    return [{**rest, "path": file} for file in item["data_files"]]


def _listed_files(item: dict[str, Any]) -> dict[str, Any]:
    """Return a data set whose `data_files` are a list: one file is a list of it, and of splits its own is taken."""
    files = item.get("data_files")
    if not files:
        return item
    if isinstance(files, Mapping):
        files = files.get(item.get("split", "train"))
        item = {name: value for name, value in item.items() if name != "split"}
    return {**item, "data_files": [files] if isinstance(files, str) else files}


def _role_key(item: dict[str, Any]) -> str | None:
    """Remove the keys that describe messages, and return the field that holds a message's role."""
    mapping = dict(nested(item.get("message_property_mappings")))
    role = item.get("message_field_role") or mapping.pop("role", None)
    content = item.get("message_field_content") or mapping.pop("content", None)
    # only these pairs of names are formats here; other names stay in the item, and are reported
    if (role, content) in KNOWN_FIELDS and not mapping:
        for name in FIELD_KEYS:
            item.pop(name, None)
    return role


def _conversation(item: dict[str, Any], columns: dict[str, str], messages: str | None, role_key: str | None) -> None:
    """Set the format of conversations: sharegpt if the role field is `from`, messages if it is `role`."""
    if role_key in ("from", "role"):
        item["format"] = "sharegpt" if role_key == "from" else "messages"
    # without a format, the column of messages has transformers' name
    if messages:
        expected = "conversations" if item.get("format") == "sharegpt" else "messages"
        columns[expected] = messages


def _with_columns(item: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    # a column with the expected name needs no entry
    renamed = {expected: actual for expected, actual in columns.items() if expected != actual}
    return {**item, "columns": renamed} if renamed else item


def convert_stored_tokens(work: Import) -> None:
    """Convert LLaMA-Factory's `tokenized_path`: if the folder exists, its rows are trained in place of `dataset`."""
    path = str(work.data["tokenized_path"])
    found = next((place for place in (work.folder / path, Path(path)) if place.is_dir()), None)
    if found is None:  # the tool would write its tokens there, and the table has the reason why nothing is lost
        return
    work.put("data.datasets", [{"path": path}], "tokenized_path")
    work.put("data.prompt_template", "auto", "tokenized_path")
    if (found / "validation").is_dir():
        work.put("data.eval_datasets", [{"path": path, "split": "validation"}], "tokenized_path")
    work.take("tokenized_path", "data.datasets")
    for name in ("dataset", "eval_dataset", "val_size"):
        if work.data.get(name):
            work.leave((name,), Reason("the rows of tokenized_path replace it", HARMLESS))


def convert_registered_datasets(work: Import) -> None:
    """Convert names of LLaMA-Factory's data sets, and cut each of them to `max_samples`."""
    data = work.data
    folder = str(work.take("dataset_dir", "data.datasets") or "data")
    for tool_name, which in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        given = data.get(tool_name)
        if isinstance(given, list) and any(isinstance(item, dict) for item in given):
            continue  # of the new trainer; validation reports what it does not know
        if data.pop(tool_name, None):
            _add_registered(work, tool_name, which, folder, given)
    most = data.get("max_samples")
    if isinstance(most, int) and not isinstance(most, bool):
        work.take("max_samples", "data.datasets")
        for which in ("datasets", "eval_datasets"):  # the tool cuts each data set
            for item in data.get("data", {}).get(which, []):
                item.setdefault("max_samples", most)


def _add_registered(work: Import, tool_name: str, which: str, dataset_dir: str, given: Any) -> None:
    """Add the data sets of these names, which dataset_info.json describes."""
    names = [str(name) for name in given] if isinstance(given, list) else split_names(given)
    line = work.line_of((tool_name,))
    # LLaMA-Factory needs the file; without it a name may still be a path or a hub id here
    try:
        info = _dataset_info(work, dataset_dir)
    except UserError as problem:
        work.refusals.append((line, problem))
        return
    items = [_registered(info[name], dataset_dir) if name in info else {"path": name} for name in names]
    if work.data.get("stage") == "pt":
        items = [_as_raw_text(item) for item in items]
    work.put(f"data.{which}", items, tool_name)
    why = f"{dataset_dir}/dataset_info.json does not describe it, so it is read as a file or a hub id"
    unknown = [name for name in names if name not in info and "/" not in name]
    work.more_left += [Left(line, tool_name, name, why, ours=f"data.{which}") for name in unknown]
    for name in names:
        tags = nested(info.get(name, {})).get("tags") or {}
        other = [tag for tag, value in tags.items() if value not in KEYS["registered_roles"].get(tag, (value,))]
        why = "the usual names of roles are known; rename others in the data"
        work.more_left += [
            Left(line, f"dataset_info.json: {name}.tags.{tag}", tags[tag], why, ours=f"data.{which}") for tag in other
        ]


def _as_raw_text(item: dict[str, Any]) -> dict[str, Any]:
    """Return a data set of LLaMA-Factory's `stage: pt`, whose prompt column holds the texts."""
    column = item.get("columns", {}).get("instruction", "text")
    others = {name: value for name, value in item.items() if name != "columns"}
    return _with_columns({**others, "format": "text"}, {"text": column})


def _dataset_info(work: Import, dataset_dir: str) -> Mapping[str, Any]:
    path = work.find_file(Path(dataset_dir) / "dataset_info.json")
    if path is None:
        return {}
    try:
        return nested(read_json_value(path))
    except DamagedFileError as problem:
        raise UserError(f"{path} {problem}.") from None


def _registered(entry: Mapping[str, Any], dataset_dir: str) -> dict[str, Any]:
    """Convert one entry of dataset_info.json."""
    item: dict[str, Any] = {"path": entry.get("hf_hub_url") or str(Path(dataset_dir) / str(entry.get("file_name")))}
    item |= _renamed(entry, KEYS["registered_item"])
    given = entry.get("columns") or {}
    columns = _renamed(given, KEYS["registered_columns"])
    if entry.get("formatting", "alpaca") == "sharegpt":
        # the tool's default is ShareGPT's field
        role_key = (entry.get("tags") or {}).get("role_tag", "from")
        _conversation(item, columns, given.get("messages", "conversations"), role_key)
    else:
        item["format"] = "alpaca"
    if entry.get("ranking"):
        # LLaMA-Factory marks pairs next to the format of their prompt
        item["format"] = f"{item.get('format', 'sharegpt')}_pairs"
    # last, so that a recipe names the columns of the prompt first
    columns |= _renamed(given, KEYS["registered_pairs"])
    return _with_columns(item, columns)


def convert_one_dataset(work: Import) -> None:
    """Convert TRL's flat keys of one data set."""
    trained = "data.datasets[0]"
    tested = "data.eval_datasets[0]"
    place = work.place_of("dataset_name")
    item = {"path": work.take("dataset_name", f"{trained}.path")}
    if work.data.get("dataset_config"):
        item["name"] = work.take("dataset_config", f"{trained}.name")
    text = work.take("dataset_text_field", f"{trained}.format")
    if text and text != "text":  # a column text is found without a name
        item |= {"format": "text", "columns": {"text": text}}
    split = work.take("dataset_train_split", f"{trained}.split")
    work.document.put(("data", "datasets"), [item | ({"split": split} if split else {})], place)
    # TRL's script reads the test split only if it evaluates
    if _evaluates(work.data):
        split = work.take("dataset_test_split", f"{tested}.split", default="test")
        work.document.put(("data", "eval_datasets"), [{**item, "split": split}], place)


def _evaluates(data: Mapping[str, Any]) -> bool:
    """Report whether a file of TRL evaluates during training."""
    return data.get("eval_strategy", "no") not in ("no", False)


def convert_mixture(work: Import) -> None:
    """Convert a mixture of data sets: TRL's `datasets`, or those of alignment-handbook."""
    given = work.data.pop("datasets", None)
    source = work.path_of("datasets")
    if isinstance(given, list):
        convert_shares(work, given)
        for index, item in enumerate(given):
            _add_items(work, "datasets", (*source, index), item, _trl_items(item))
    elif given is not None:
        work.lose(source, Reason("it is not a list of data sets"))
    if not isinstance(given, list) and isinstance(work.data.get("dataset_mixer"), Mapping):
        _convert_mixer(work, work.take("dataset_mixer"))


def _convert_mixer(work: Import, mixer: Mapping[str, Any]) -> None:
    """Convert alignment-handbook's weights of data sets; it reads a test split as a whole."""
    splits = work.take("dataset_splits", "data.datasets")
    configs = work.take("dataset_configs", "data.datasets")
    splits = [str(split) for split in splits] if isinstance(splits, list) else ["train", "test"]
    # one configuration per data set, in the order of the mixer
    named = dict(zip(mixer, configs, strict=False)) if isinstance(configs, list) else {}
    for path, weight in mixer.items():
        for split in splits:
            is_test = "test" in split
            if is_test and not _evaluates(work.data):
                continue
            item = {"path": path, "split": split, "name": named.get(path), "weight": 1 if is_test else weight}
            which = "eval_datasets" if is_test else "datasets"
            _add_items(work, which, ("dataset_mixer", path), weight, [_trl_item(item)])


def _trl_items(item: Any) -> list[Any]:
    """Convert one data set of TRL's mixture, whose path may be the type of its files."""
    found = _trl_item(item)
    return _per_file(dict(found)) if isinstance(found, Mapping) else [found]


def _trl_item(item: Any) -> Any:
    """Convert one data set of a mixture. A list of columns only selects them."""
    if not isinstance(item, Mapping):
        return {"path": item} if isinstance(item, str) else item
    found = {KEYS["trl_item"].get(name, name): value for name, value in item.items() if value is not None}
    if isinstance(found.get("columns"), list):
        del found["columns"]
    return _listed_files(found)


def hoist_template(work: Import) -> None:
    """Move `chat_template` of Axolotl's data sets to the file, if all of them name the same one."""
    data = work.data
    items = [item for item in nested(data.get("data")).get("datasets", []) if isinstance(item, dict)]
    # a recipe has one template for all data sets; different ones are reported per data set
    named = {str(item.get("chat_template")) for item in items}
    if len(named) == 1 and named != {"None"} and data.get("chat_template") in (None, *named):
        data["chat_template"] = named.pop()
        for index, item in enumerate(items):
            del item["chat_template"]
            source = work.source_of(("data", "datasets", index, "chat_template"))
            work.trace(source, "model.tokenizer.chat_template")


def convert_interleaving(work: Import) -> None:
    """Convert LLaMA-Factory's `mix_strategy: interleave_...` and the probabilities of its data sets."""
    strategies = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}
    given = work.data.get("interleave_probs")
    shares = [finite_share(name) for name in split_names(given)] if given is not None else []
    if None in shares:
        return  # it stays, and is reported
    work.put("data.interleave.probabilities", shares or "round_robin", "mix_strategy")
    strategy = work.take("mix_strategy", "data.interleave.stopping_strategy", "data.interleave.probabilities")
    work.put("data.interleave.stopping_strategy", strategies[strategy], "mix_strategy")
    work.take("interleave_probs", "data.interleave.probabilities")


def finite_share(value: str) -> float | None:
    """Return a probability that is written as text, None for anything else."""
    try:
        share = float(value)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def convert_shares(work: Import, items: list[Any]) -> None:
    """Convert TRL's shares of a mixture, which add up to any number, if all data sets have one."""
    shares = [nested(item).get("fraction") for item in items]
    given = [share for share in shares if isinstance(share, int | float) and share > 0]
    if not given or len(given) != len(items):
        return
    total = sum(given)
    place = work.place_of("datasets")
    work.document.put(("data", "interleave", "probabilities"), [round(share / total, 9) for share in given], place)
    for index, item in enumerate(items):
        work.trace((*work.path_of("datasets"), index, "fraction"), "data.interleave.probabilities")
        del item["fraction"]
    work.notes.append(
        "TRL cuts each data set to its fraction of the mixture; here each example is drawn with this probability"
    )


def hoist_trained_turns(work: Import) -> None:
    """Move Axolotl's choices of trained turns from the data sets to the recipe, which has one choice for all."""
    items = [item for item in nested(work.data.get("data")).get("datasets", []) if isinstance(item, dict)]
    chats = [item for item in items if item.get("format") in CHAT_FORMATS]
    if work.data.get("train_on_inputs") is True and chats and chats == items:
        # of conversations it trains the text of each turn, and not what the template writes around it
        work.put("data.roles_to_train", ["system", "user", "assistant", "tool"], "train_on_inputs")
        work.take("train_on_inputs", "data.roles_to_train")
    for index, item in enumerate(items):
        # both kinds of tokens that end a turn are one here
        if "train_on_eot" in item and item["train_on_eot"] == item.get("train_on_eos", "turn"):
            work.trace(work.source_of(("data", "datasets", index, "train_on_eot")), "data.train_on_eos")
            del item["train_on_eot"]
    _hoist_choice(work, items, "roles_to_train", default=["assistant"])
    _hoist_choice(work, items, "train_on_eos", default="turn")


def _hoist_choice(work: Import, items: list[dict[str, Any]], name: str, *, default: Any) -> None:
    """Move a key of data sets that are conversations to the recipe, if all of them say the same."""
    for item in items:
        if isinstance(item.get(name), list):
            item[name] = [ROLE_NAMES.get(str(role), role) for role in item[name]]
    found = [item.get(name, default) for item in items if item.get("format") in CHAT_FORMATS]
    # rows without turns have no roles, and are refused next to them
    has_others = name == "roles_to_train" and len(found) < len(items)
    for index, item in enumerate(items):
        if name not in item:
            continue
        value = item.pop(name)
        source = work.source_of(("data", "datasets", index, name))
        if item.get("format") not in CHAT_FORMATS:
            work.lose(source, Reason("only conversations have turns", HARMLESS))
        elif has_others and value != default:
            work.lose(source, Reason(f"data.{name} is for all data sets, and some are no conversations"))
        elif any(other != value for other in found):
            work.lose(source, Reason(f"data.{name} is one for all data sets, and here they differ in it"))
        else:
            work.trace(source, f"data.{name}")
            if not work.document.has(("data", name)):
                work.document.put(("data", name), value, Place("", work.line_of(source), work.document.file))


# functions that rules of keys.yaml call by their names
DATASET_CONVERSIONS: dict[str, Callable[[Import], None]] = {
    function.__name__: function
    for function in (
        convert_axolotl_datasets,
        convert_described_datasets,
        convert_interleaving,
        convert_mixture,
        convert_one_dataset,
        convert_registered_datasets,
        convert_stored_tokens,
        hoist_template,
        hoist_trained_turns,
    )
}
