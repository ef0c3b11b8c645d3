"""Keys and data sets of Axolotl, LLaMA-Factory and TRL, from their documentation.

Keys: signs of a tool's files, its defaults that differ from ours, and reasons why keys have no counterpart. Data sets
become items of `data.datasets`; keys without a counterpart stay in the items, and the import reports them later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.recipe.aliases import UNSET, Alias
from ligertune.recipe.section import convert_by


@dataclass(frozen=True)
class Peer:
    """A tool. signs: keys that identify its files; defaults: its defaults that differ from ours, by our keys."""

    name: str
    signs: str  # separated by spaces
    defaults: Mapping[str, Any]


# Defaults of transformers' TrainingArguments, which TRL and LLaMA-Factory extend.
TRAINER = {
    "train.per_device_train_batch_size": 8,
    "train.num_train_epochs": 3,
    "train.lr_scheduler_type": "linear",
    "train.warmup_ratio": 0.0,
    "data.packing": False,
    "checkpoint.save_steps": 500,
}
FSDP = "parallel.strategy: fsdp shards weights, gradients and optimizer states per layer, and has no further options"
OWN_TEMPLATE = "conversations use the tokenizer's chat template; data.prompt_template accepts a Jinja file"
PREPARED = "prepared data is cached by content in the user's cache folder"
NO_HUB = "ligertune train does not upload; the model is in output_dir/model"
FOUND_IN_THE_MODEL = "the model's configuration holds it"
PER_EPOCH = "the steps per epoch are known once the data is read; `ligertune data RECIPE` prints them"

# Keys of any of the tools.
REASONS = {
    "accelerator_config": "configure the launcher instead: accelerate launch -m ligertune train RECIPE",
    "chat_template": OWN_TEMPLATE,
    "chat_template_jinja": OWN_TEMPLATE,
    "chat_template_path": OWN_TEMPLATE,
    "dataset_prepared_path": PREPARED,
    "ddp_timeout": "parallel.timeout is the timeout within a step, in seconds; saves and evaluations have a longer one",
    "conversation": OWN_TEMPLATE,
    "deepspeed": "parallel.strategy chooses DeepSpeed; configure everything else in the launcher",
    "do_eval": "eval.eval_strategy switches evaluations on",
    "do_train": "`ligertune train` trains",
    "env": "set variables in the shell",
    "evals_per_epoch": PER_EPOCH,
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered in their dtype and cast before each product",
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    "fsdp_version": FSDP,
    "gradient_checkpointing_kwargs": "checkpointing is always non-reentrant",
    "hub_model_id": NO_HUB,
    "hub_strategy": NO_HUB,
    "model_type": FOUND_IN_THE_MODEL,
    "overwrite_cache": PREPARED,
    "pad_to_sequence_len": "rows are padded only to a multiple of a few tokens",
    "packing_strategy": "there is one packing strategy, which fills about 99 % of each row",
    "plot_loss": "metrics.jsonl has a line per logged step",
    "plugins": "ligertune's kernels run wherever a layer is recognised",
    "push_to_hub": NO_HUB,
    "saves_per_epoch": PER_EPOCH,
    "strict": "an unknown key is always an error",
    "tf32": "float32 products never use TF32",
    "tokenizer_type": FOUND_IN_THE_MODEL,
    "wandb_entity": "export WANDB_ENTITY",
    "wandb_project": "export WANDB_PROJECT",
}

# Keys that mean something else here; they are removed before aliases are read.
NOT_OURS = {
    "overwrite_output_dir": "`ligertune train --overwrite` replaces a run",
    "resume_from_checkpoint": "checkpoints of other tools cannot be read; `ligertune train --resume` continues a run",
    "template": OWN_TEMPLATE,
}


# Keys that choose what is trained for, and the values that have a counterpart. `rl` is Axolotl's.
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "stage": ("sft", "pt", "dpo", "kto"),
    "rl": ("dpo", "ipo", "orpo", "kto", "simpo"),
}
TWICE_THE_RANK = "twice the rank"  # LLaMA-Factory's default of lora_alpha


AXOLOTL = Peer(
    "Axolotl",
    "base_model sequence_len sample_packing micro_batch_size val_set_size num_epochs adapter "
    "dataset_prepared_path train_on_inputs special_tokens pad_to_sequence_len flash_attention "
    "load_in_4bit",
    {"train.per_device_train_batch_size": 1, "data.max_length": 512, "data.packing": False},
)
LLAMA_FACTORY = Peer(
    "LLaMA-Factory",
    "stage finetuning_type cutoff_len template dataset_dir do_train preprocessing_num_workers "
    "overwrite_cache lora_rank lora_target plot_loss quantization_bit neat_packing val_size",
    TRAINER
    | {
        "train.learning_rate": 5e-5,
        "train.gradient_checkpointing": True,
        "data.max_length": 2048,
        "data.on_overlength": "truncate",
        "data.prompt_template": "chat",
        "method.type": "lora",
        "method.lora_r": 8,
        "method.lora_alpha": TWICE_THE_RANK,
    },
)
TRL = Peer(
    "TRL",
    "dataset_name dataset_config dataset_train_split dataset_test_split dataset_text_field use_peft "
    "max_seq_length assistant_only_loss completion_only_loss padding_free eos_token dataset_num_proc "
    "model_revision",
    TRAINER | {"train.learning_rate": 2e-5, "data.max_length": 1024, "train.gradient_checkpointing": True},
)
TOOLS = (AXOLOTL, LLAMA_FACTORY, TRL)


def likely_peer(data: Mapping[str, Any]) -> tuple[Peer, tuple[str, ...]]:
    """Return the tool whose characteristic keys occur most, and those keys; none if no tool's occur."""
    found = {peer.name: tuple(name for name in data if name in peer.signs.split()) for peer in TOOLS}
    best = max(TOOLS, key=lambda peer: len(found[peer.name]))
    return best, found[best.name]


def _names(value: Any) -> Any:
    """Convert `all`, and names separated by commas."""
    if value in ("all", "all-linear"):
        return "all-linear"
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


# Aliases for imports only: in a recipe these names would be ambiguous.
IMPORTED = (
    Alias("method.type", ("use_peft",), lambda value: {True: "lora", False: "full"}.get(value, value)),
    Alias("data.train_on", ("completion_only_loss",), convert_by({False: "all", True: UNSET})),
    Alias("method.lora_target_modules", ("lora_target",), _names),
    Alias("method.lora_modules_to_save", ("additional_target",), _names),
    Alias("train.gradient_checkpointing", ("gradient_checkpointing",), lambda value: value == "unsloth" or value),
    Alias("model.tokenizer.pad_token", ("pad_token",)),
    Alias("model.tokenizer.eos_token", ("eos_token",)),
)

# ---- Data sets

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
                info = json.loads(path.read_text(encoding="utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as problem:
                raise UserError(f"{path} is not valid JSON: {problem}.") from None
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
