"""Conversions of torchtune's and unsloth's files, whose keys stand in sections.

Rules of keys.yaml move the keys to the top level first: `optimizer.lr` is `learning_rate` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ligertune.errors import UserError
from ligertune.recipe.document import KeyPath, dotted
from ligertune.recipe.feature import trains_on_pairs
from ligertune.recipe.importers.import_state import Import, one_line
from ligertune.recipe.importers.import_tables import HARMLESS, KEYS, REASONS, Reason, nested, split_names

MLP_PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
# arguments of a data set's builder that are read here; all others are reported
BUILDER_KEYS = ("split", "data_files", "data_dir", "name", "revision")
JSON_PATHS = ("json", "csv", "parquet", "text")  # `source` is then the type of `data_files`


def convert_torchtune(work: Import) -> None:
    """Convert the components of a torchtune file that have other names here: model, schedule, logger and limits."""
    _fill_references(work)
    _convert_model(work)
    _convert_schedule(work)
    _convert_logger(work)
    _convert_limits(work)
    for name in ("checkpointer_component", "tokenizer_component"):
        if "Meta" in str(work.data.get(name)):
            work.notes.append("checkpoint_dir holds Meta's format: name a folder or hub id with Hugging Face's weights")
        work.take(name, "model.model_name_or_path")


def _fill_references(work: Import) -> None:
    """Replace ${name} by the value of the top-level key, as torchtune does."""
    for name, value in list(work.data.items()):
        if isinstance(value, str) and "${" in value:
            for other, text in list(work.data.items()):
                value = value.replace(f"${{{other}}}", str(text))
            work.data[name] = value


def _ending(value: Any) -> str:
    """Return the last part of a component's name."""
    return one_line(str(value).rpartition(".")[2])


def _converted(value: Any, table: Mapping[str, str]) -> Any:
    """Return what a table has for a name, else the value as it is."""
    return table.get(value, value) if isinstance(value, str) else value


def _convert_model(work: Import) -> None:
    """Convert the builder's name, whose beginning is the method, and the layers that an adapter changes."""
    name = _ending(work.data.get("model_component"))
    method = {"lora": "lora", "qlora": "qlora"}.get(name.partition("_")[0], "full")
    if method == "lora" and work.data.get("quantize_base") is True:
        method = "qlora"
    work.put("method.type", method, "model_component")
    work.take("model_component", "method.type")
    work.take("quantize_base", "method.type")
    targets = work.take("lora_attn_modules", "method.lora_target_modules")
    into_mlp = work.take("apply_lora_to_mlp", "method.lora_target_modules")
    into_head = work.take("apply_lora_to_output", "method.lora_target_modules")
    if method != "full" and isinstance(targets, list):
        names = [_converted(target, KEYS["torchtune_projections"]) for target in targets]
        names += MLP_PROJECTIONS if into_mlp else []
        names += ["lm_head"] if into_head else []
        work.document.put(("method", "lora_target_modules"), names, work.place_of("model"))


def _convert_schedule(work: Import) -> None:
    """Convert the learning-rate schedule and the betas of AdamW."""
    given = work.data.get("lr_scheduler_type")
    if given is not None:
        work.data["lr_scheduler_type"] = KEYS["torchtune_schedules"].get(_ending(given), _ending(given))
    if work.data.get("num_cycles") == 0.5:  # half a wave: the cosine's default
        work.take("num_cycles", "train.lr_scheduler_type")
    betas = work.data.get("adam_betas")
    if isinstance(betas, list) and len(betas) == 2:
        work.put("train.adam_beta1", betas[0], "adam_betas")
        work.put("train.adam_beta2", betas[1], "adam_betas")
        work.take("adam_betas", "train.adam_beta1")


def _convert_logger(work: Import) -> None:
    name = _ending(work.data.get("metric_logger_component"))
    tracker = KEYS["torchtune_loggers"].get(name)
    if tracker is not None:
        work.put("logging.report_to", [tracker], "metric_logger_component")
        work.take("metric_logger_component", "logging.report_to")
    elif "metric_logger_component" in work.data:
        work.leave(("metric_logger_component",), Reason(f"{name} is not one of the trackers", HARMLESS))


def _convert_limits(work: Import) -> None:
    """Convert the number of steps of an epoch, and the length of an example, which may have no limit."""
    steps = work.data.get("max_steps_per_epoch")
    epochs = work.data.get("epochs", 1)
    if isinstance(steps, int) and isinstance(epochs, int) and steps > 0:
        work.put("train.max_steps", steps * epochs, "max_steps_per_epoch")
        work.take("max_steps_per_epoch", "train.max_steps")
        work.take("epochs", "train.max_steps")
        work.notes.append(f"max_steps_per_epoch: {steps} steps an epoch, if the data has as many")
    if work.data.get("max_seq_len") is None:  # no example is cut
        work.document.put(("data", "on_overlength"), "error", work.place_of("tokenizer"))
        longest = "write data.max_length as long as the longest"
        work.notes.append(f"without tokenizer.max_seq_len no example is cut: {longest}")


def convert_builders(work: Import) -> None:
    """Convert torchtune's data sets, each written as a builder and its arguments."""
    given = work.data.pop("dataset", None)
    items = given if isinstance(given, list) else [given]
    packed: list[bool] = []
    trained: list[str] = []
    for index, item in enumerate(items):
        source = ("dataset", index) if isinstance(given, list) else ("dataset",)
        if isinstance(item, Mapping):
            _convert_builder(work, source, dict(item), packed, trained)
    if packed:
        work.document.put(("data", "packing"), any(packed), work.place_of("dataset"))
    if len(set(trained)) > 1:
        work.notes.append(f"data sets train different parts here: {', '.join(trained)}; the first one counts")
    if trained and not trains_on_pairs(work.data.get("task")):
        work.document.put(("data", "train_on"), trained[0], work.place_of("dataset"))


def _convert_builder(
    work: Import, source: KeyPath, item: dict[str, Any], packed: list[bool], trained: list[str]
) -> None:
    """Convert one data set; `packed` and `trained` collect what a recipe says for all of them."""
    name = _ending(item.pop("_component_", None))
    known = KEYS["torchtune_datasets"].get(name)
    if known is None:
        problem = f"{work.place_of('dataset')}: {dotted(source)}._component_: {name} has no counterpart."
        hint = "Write the data sets into data.datasets of a recipe."
        work.refusals.append((work.line_of(source), UserError(problem, hint=hint)))
        work.lose(source, Reason("such rows are not known"))
        work.put("data.datasets", [{"path": "unknown"}], "dataset")
        return
    if known.get("format") == "alpaca":
        chat = "data.prompt_template: chat makes a chat of the rows without it"
        work.notes.append(f"torchtune puts the Stanford prompt of Alpaca rows into a turn of a chat; {chat}")
    at = f"data.datasets[{len(work.value_at(('data', 'datasets')) or [])}]"
    new = {ours: known[ours] for ours in ("path", "name", "format") if ours in known}
    columns = dict(known.get("columns", {}))
    columns |= _renamed_columns(item, columns)
    new |= _location(item)
    style = item.pop("conversation_style", None)
    if style is not None:
        new["format"] = _converted(style, {"openai": "messages"})
    if column := item.pop("conversation_column", None):
        columns["messages" if style == "openai" else "conversations"] = column
    columns = {expected: actual for expected, actual in columns.items() if expected != actual}
    new |= {"columns": columns} if columns else {}
    default = known.get("train_on", "assistant")
    flag = item.pop("train_on_input", None)
    trained.append(default if flag is None else ("all" if flag else "assistant"))
    packed.append(item.pop("packed", False) is True)
    if (prompt := item.pop("new_system_prompt", None)) is not None:
        work.document.put(("data", "system_prompt"), prompt, work.place_of("dataset"))
    _account(work, source, item, at)
    work.document.data.setdefault("data", {}).setdefault("datasets", []).append(new)


def _renamed_columns(item: dict[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of `column_map` and `column`, under the names of our formats."""
    ours = {"input": "prompt", "output": "completion"} if "completion" in known else {}
    found = {ours.get(name, name): actual for name, actual in nested(item.pop("column_map", None)).items()}
    if column := item.pop("column", None):
        found["text"] = column
    return found


def _location(item: dict[str, Any]) -> dict[str, Any]:
    """Return where the rows are: a hub id, or files of the type that `source` names."""
    source = item.pop("source", None)
    subset = item.pop("subset", None)
    found = {name: item.pop(name) for name in BUILDER_KEYS if name in item}
    if subset is not None:
        found["name"] = subset
    files = found.get("data_files")
    if source in JSON_PATHS and isinstance(files, str):
        found["path"] = files
        del found["data_files"]
    elif source is not None:
        found["path"] = source
    if isinstance(found.get("data_files"), str):
        found["data_files"] = [found["data_files"]]
    return found


def _account(work: Import, source: KeyPath, rest: Mapping[str, Any], at: str) -> None:
    """Record that the arguments of a data set became the item at `at`, but those in `rest`."""
    elsewhere = {"train_on_input": "data.train_on", "packed": "data.packing", "new_system_prompt": "data.system_prompt"}
    given: Any = work.source
    for part in source:
        given = given[part]
    for name in given:
        if name in rest:
            work.lose((*source, name), REASONS.get(name, Reason("rows are read as they are")))
        else:
            work.trace((*source, name), elsewhere.get(name, at))


def convert_unsloth(work: Import) -> None:
    """Refuse a file without a model or data: the studio's export holds neither."""
    missing = []
    if not work.value_at(("model", "model_name_or_path")) and "model" not in work.data:
        missing.append("`model: NAME`")
        work.document.put(("model", "model_name_or_path"), "missing", work.place_of("training"))
    if "dataset" not in work.data and "local_dataset" not in work.data:
        missing.append("`data: {dataset: NAME}`")
        work.document.put(("data", "datasets"), [{"path": "missing"}], work.place_of("training"))
    if missing:
        problem = f"{work.document.file} names no {'model and no data' if len(missing) > 1 else 'model or data'}."
        hint = f"Add {' and '.join(missing)}: the studio exports neither."
        work.refusals.append((0, UserError(problem, hint=hint)))


def convert_unsloth_datasets(work: Import) -> None:
    """Convert one hub data set, or the files of `local_dataset`, with their format."""
    kind = work.take("format_type", "data.datasets")
    known = KEYS["unsloth_formats"]
    is_known = isinstance(kind, str) and kind in known
    shape = {"format": known[kind]} if is_known else {}
    for name in ("dataset", "local_dataset"):
        given = work.data.pop(name, None)
        if given:
            paths = given if isinstance(given, list) else split_names(given)
            work.put("data.datasets", [{"path": path, **shape} for path in paths], name)
    if not is_known and kind not in (None, "auto"):
        work.lose(work.path_of("format_type"), Reason("formats are recognised by the columns"))


def convert_total_batch(work: Import) -> None:
    """Convert Axolotl's rows per optimizer step and device, which are whole micro-batches."""
    rows = work.data["batch_size"]
    micro = work.data.get("micro_batch_size", 1)
    if isinstance(micro, int) and micro > 0 and rows >= micro:
        work.put("train.gradient_accumulation_steps", rows // micro, "batch_size")
        work.take("batch_size", "train.gradient_accumulation_steps")


# functions that rules of keys.yaml call by their names
SECTION_CONVERSIONS: dict[str, Callable[[Import], None]] = {
    function.__name__: function
    for function in (
        convert_builders,
        convert_torchtune,
        convert_total_batch,
        convert_unsloth,
        convert_unsloth_datasets,
    )
}
