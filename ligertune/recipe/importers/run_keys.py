"""Keys of a run without a single counterpart: intervals, schedules, memory, processes, trackers and templates."""

from __future__ import annotations

import re
from typing import Any

from ligertune.checked_files import DamagedFileError, parse_json_text
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.objectives import nested
from ligertune.recipe.importers.peer_datasets import evaluates
from ligertune.recipe.importers.peer_templates import template_of
from ligertune.recipe.importers.peers import AXOLOTL, LLAMA_FACTORY, OFFLOADED, TRL
from ligertune.recipe.importers.reasons import NOT_OURS, OWN_TEMPLATE
from ligertune.recipe.train_sections import FOLLOW_EVALUATIONS

STEPS_OF_TRAINER = {AXOLOTL.name: 500, LLAMA_FACTORY.name: 500, TRL.name: 10}  # default of logging_steps


def convert_run(work: Import) -> None:
    """Convert the keys of a run, in this order."""
    for convert in (_template, _stage, _labels, _memory, _schedule, _saves, _evaluations, _processes, _trackers):
        convert(work)
    tokens = nested(work.data.pop("special_tokens", None))
    for name, token in tokens.items():
        work.data.setdefault(name, token)
    for name, why in NOT_OURS.items():
        if name in work.data:
            work.leave((name,), why)


def _template(work: Import) -> None:
    """Convert the name of a chat template: of the tokenizer, so that rows of other formats keep their own prompt."""
    data = work.data
    model = data.get("base_model", data.get("model_name_or_path", data.get("model")))
    if data.get("template") == "alpaca":  # Stanford's prompt for one exchange
        work.put("data.prompt_template", data.pop("template"), "template")
    _hoist_template(data)
    path = data.get("chat_template_jinja" if data.get("chat_template") == "jinja" else "chat_template_path")
    if isinstance(path, str) and path.endswith((".jinja", ".jinja2", ".j2")):
        name = "chat_template" if data.pop("chat_template", None) else "chat_template_path"
        work.put("model.tokenizer.chat_template", path, name)
        for name in ("chat_template_jinja", "chat_template_path"):
            data.pop(name, None)
    for name in ("template", "chat_template"):
        if not isinstance(data.get(name), str):
            continue
        found = template_of(data[name], model)
        if found is None:
            work.leave((name,), OWN_TEMPLATE)
            continue
        written = data.pop(name)
        if found == "tokenizer":
            if written.endswith("nothink"):
                work.put("data.chat_template_kwargs", {"enable_thinking": False}, name)
            work.notes.append(f"{name}: {written} is the template that the model's tokenizer has")
        else:
            work.put("model.tokenizer.chat_template", found, name)


def _hoist_template(data: dict[str, Any]) -> None:
    """Move `chat_template` of Axolotl's data sets to the file, if all of them name the same one."""
    items = [item for item in nested(data.get("data")).get("datasets", []) if isinstance(item, dict)]
    named = {str(item.get("chat_template")) for item in items}
    if len(named) == 1 and named != {"None"} and data.get("chat_template") in (None, *named):
        data["chat_template"] = named.pop()
        for item in items:
            del item["chat_template"]


def _stage(work: Import) -> None:
    data = work.data
    if data.get("stage") == "pt":
        data["stage"] = "sft"
        data.setdefault("packing", True)  # the tool's default at this stage
        data.setdefault("prompt_template", "auto")


def _labels(work: Import) -> None:
    """Choose the tokens with labels: TRL trains all of them, unless one of two keys is true."""
    data = work.data
    if data.get("assistant_only_loss"):
        data.pop("completion_only_loss", None)  # it is about rows of prompt and completion
    elif data.get("completion_only_loss"):
        data.pop("assistant_only_loss", None)
    elif work.peer is TRL and "assistant_only_loss" not in data and "completion_only_loss" not in data:
        work.notes.append(
            "TRL trains all tokens of messages and texts, but only the completion of rows with prompt and completion: "
            "write data.train_on: assistant for the latter"
        )


def _memory(work: Import) -> None:
    data = work.data
    if "disable_gradient_checkpointing" in data:
        data["gradient_checkpointing"] = not data.pop("disable_gradient_checkpointing")
    offloads = data.pop("activation_offloading", None), data.pop("use_unsloth_gc", None)
    if any(value is True or value in OFFLOADED for value in offloads):
        data["gradient_checkpointing"] = "offload"
    if nested(data.get("fsdp_config")).get("activation_checkpointing") is True:
        data.setdefault("gradient_checkpointing", True)
    if data.pop("use_galore", False):
        data["optim"] = "galore_adamw"
        for name, key in (("galore_rank", "rank"), ("galore_update_interval", "update_proj_gap"),
                          ("galore_scale", "scale")):  # fmt: skip
            if name in data:
                work.put(f"train.galore.{key}", data.pop(name), name)


def _schedule(work: Import) -> None:
    """Convert the schedule: Axolotl's floor of a cosine, and options that transformers has no use for."""
    data = work.data
    name = "lr_scheduler" if "lr_scheduler" in data else "lr_scheduler_type"
    if data.get("cosine_min_lr_ratio") and data.get(name, "cosine") == "cosine":
        data[name] = "cosine_with_min_lr"
    if data.get(name) == "cosine_with_restart":
        data[name] = "cosine_with_restarts"
    options = data.get("lr_scheduler_kwargs")
    warmup = data.get("warmup_steps")
    if isinstance(warmup, float) and 0 < warmup < 1:  # as TrainingArguments reads it
        work.put("train.warmup_ratio", data.pop("warmup_steps"), "warmup_steps")
    if isinstance(options, str):  # as on a command line
        try:
            options = parse_json_text(options)
        except DamagedFileError:
            return
    if isinstance(options, dict):
        options = {key: value for key, value in options.items() if value is not None}
        if data.get(name) in FOLLOW_EVALUATIONS and options.get("mode") == "min":
            del options["mode"]  # a loss is lowered
        data["lr_scheduler_kwargs"] = options


def _saves(work: Import) -> None:
    """Convert the interval of saves; a number per epoch is a share of all steps, unless it is one."""
    data = work.data
    per_epoch = data.pop("saves_per_epoch", None)
    if per_epoch:
        _per_epoch(work, per_epoch, "saves_per_epoch", "checkpoint.save_strategy", "checkpoint.save_steps")
        data.pop("save_steps", None)
    elif "save_steps" in data and data.get("save_strategy") is None:
        work.put("checkpoint.save_strategy", "steps", "save_steps")
    if data.get("save_strategy") == "no":
        work.put("checkpoint.save_strategy", "no", "save_strategy")
        del data["save_strategy"]
    if data.get("save_total_limit") == 0:
        del data["save_total_limit"]


def _per_epoch(work: Import, number: Any, written: str, strategy: str, steps: str) -> None:
    """Set an interval from a number per epoch: of one epoch, a share of all steps, or never before the end."""
    epochs = work.data.get("num_epochs", work.data.get("num_train_epochs", 1))
    numbers = isinstance(number, int | float) and isinstance(epochs, int | float) and number * epochs > 0
    if number == 1 or not numbers:
        work.put(strategy, "epoch", written)
    elif number * epochs <= 1:
        work.put(strategy, "no", written)
    else:
        work.put(strategy, "steps", written)
        work.put(steps, 1 / (number * epochs), written)


def _evaluations(work: Import) -> None:
    """Switch evaluations on where the other tool has them: with data that it holds out."""
    data = work.data
    held_out = any(data.get(name) for name in ("val_set_size", "val_size")) or "eval_datasets" in nested(
        data.get("data")
    )
    if "eval_strategy" not in data and "evaluation_strategy" in data:
        data["eval_strategy"] = data.pop("evaluation_strategy")
    per_epoch = data.pop("evals_per_epoch", None)
    if not held_out:
        for name in ("eval_steps", "eval_strategy", "early_stopping_patience", "load_best_model_at_end"):
            if data.get(name) not in (None, "no", False):
                work.leave((name,), "there is no evaluation data")
        return
    if per_epoch:
        _per_epoch(work, per_epoch, "evals_per_epoch", "eval.eval_strategy", "eval.eval_steps")
        data.pop("eval_strategy", None)
    elif not evaluates(data) and "eval_strategy" not in data and work.peer is not TRL:
        work.put("eval.eval_strategy", "steps" if data.get("eval_steps") else "epoch", _held_out_by(data))
    elif data.get("eval_strategy") == "steps" and "eval_steps" not in data:
        data["eval_steps"] = data.get("logging_steps", STEPS_OF_TRAINER[work.peer.name])


def _held_out_by(data: dict[str, Any]) -> str:
    return next((name for name in ("val_set_size", "val_size") if data.get(name)), "eval_dataset")


def _processes(work: Import) -> None:
    """Convert FSDP and DeepSpeed to `parallel.strategy`, where the file says which one it is."""
    data = work.data
    fsdp, config = data.get("fsdp"), nested(data.get("fsdp_config"))
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")
    if config or (words and words != "no_shard") or data.get("fsdp_version"):
        work.put("parallel.strategy", "fsdp", "fsdp" if fsdp else "fsdp_config")
        offload = config.get("offload_params", config.get("fsdp_offload_params"))
        if offload is True or "offload" in words:
            work.put("parallel.cpu_offload", True, "fsdp")
        for name in ("fsdp", "fsdp_config", "fsdp_version"):
            data.pop(name, None)
    if data.get("deepspeed"):
        _deepspeed(work)


def _deepspeed(work: Import) -> None:
    config = work.data["deepspeed"]
    zero = nested(nested(config).get("zero_optimization"))
    found = re.search(r"(?:z|zero|stage)[-_]?([0-3])", str(config).rpartition("/")[2].lower())
    stage = zero.get("stage") if zero else int(found[1]) if found else None
    if stage not in (2, 3):
        return
    offloads = "offload" in str(config).lower()
    if offloads and stage == 3:  # DeepSpeed's own offloading has no key; FSDP's is the same
        work.put("parallel.strategy", "fsdp", "deepspeed")
        work.put("parallel.cpu_offload", True, "deepspeed")
        work.notes.append("ZeRO-3 with offloading is fsdp with parallel.cpu_offload: weights and states on the host")
    else:
        work.put("parallel.strategy", f"deepspeed_zero{stage}", "deepspeed")
    del work.data["deepspeed"]


def _trackers(work: Import) -> None:
    """Choose trackers by the keys of Axolotl that configure them."""
    data = work.data
    signs = {"wandb": ("wandb_project", "use_wandb"), "tensorboard": ("use_tensorboard",),
             "mlflow": ("mlflow_tracking_uri", "use_mlflow", "mlflow_experiment_name")}  # fmt: skip
    found = [tracker for tracker, names in signs.items() if any(data.get(name) for name in names)]
    if found and "report_to" not in data:
        work.put("logging.report_to", found, next(name for name in signs[found[0]] if data.get(name)))
    for name in ("use_wandb", "use_tensorboard", "use_mlflow"):
        data.pop(name, None)
    for name in ("wandb_name", "wandb_run_id", "mlflow_run_name"):
        if data.get(name) and "run_name" not in data:
            work.put("logging.run_name", data[name], name)
        data.pop(name, None)
