"""Keys of a run without a single counterpart: intervals, schedules, memory, processes, trackers and templates."""

from __future__ import annotations

import re
from typing import Any

from ligertune.files.checked_files import DamagedFileError, parse_json_text
from ligertune.recipe.document import Place
from ligertune.recipe.importers.import_state import LEFT, OFF, Fate, Import, Left, is_off
from ligertune.recipe.importers.objectives import nested
from ligertune.recipe.importers.peer_datasets import evaluates
from ligertune.recipe.importers.peer_templates import template_of
from ligertune.recipe.importers.peers import AXOLOTL, LLAMA_FACTORY, OFFLOADED, TRL
from ligertune.recipe.importers.reasons import HARMLESS, NOT_OURS, OWN_TEMPLATE, REASONS, TRACKERS
from ligertune.recipe.train_sections import FOLLOW_EVALUATIONS

FSDP_OPTIONS = REASONS["fsdp_config"]
STEPS_OF_TRAINER = {AXOLOTL.name: 500, LLAMA_FACTORY.name: 500, TRL.name: 10}  # default of logging_steps


def convert_run(work: Import) -> None:
    """Convert the keys of a run, in this order."""
    work.hoist("special_tokens", *((name, name) for name in list(nested(work.data.get("special_tokens")))))
    for convert in (
        _template, _stage, _labels, _packing, _memory, _model, _schedule, _saves, _evaluations, _processes, _trackers,
    ):  # fmt: skip
        convert(work)
    for name, reason in NOT_OURS.items():
        if name in work.data:
            work.leave((name,), reason.why, reason.harm)


def _template(work: Import) -> None:
    """Convert the name of a chat template: of the tokenizer, so that rows of other formats keep their own prompt."""
    data = work.data
    model = data.get("base_model", data.get("model_name_or_path", data.get("model")))
    if data.get("template") == "alpaca":  # Stanford's prompt for one exchange
        work.put("data.prompt_template", data.pop("template"), "template")
    _hoist_template(work)
    path = data.get("chat_template_jinja" if data.get("chat_template") == "jinja" else "chat_template_path")
    if isinstance(path, str) and path.endswith((".jinja", ".jinja2", ".j2")):
        for name in ("chat_template", "chat_template_jinja", "chat_template_path"):
            if name in data:
                work.put("model.tokenizer.chat_template", path, name)
                del data[name]
    for name in ("template", "chat_template"):
        if not isinstance(data.get(name), str):
            continue
        found = template_of(data[name], model)
        if found is None:
            work.leave((name,), OWN_TEMPLATE)
            continue
        written = work.take(name, "model.tokenizer.chat_template")
        if found == "tokenizer":
            if written.endswith("nothink"):
                work.put("data.chat_template_kwargs", {"enable_thinking": False}, name)
            work.notes.append(f"{name}: {written} is the template that the model's tokenizer has")
        else:
            work.put("model.tokenizer.chat_template", found, name)


def _hoist_template(work: Import) -> None:
    """Move `chat_template` of Axolotl's data sets to the file, if all of them name the same one."""
    data = work.data
    items = [item for item in nested(data.get("data")).get("datasets", []) if isinstance(item, dict)]
    named = {str(item.get("chat_template")) for item in items}
    if len(named) == 1 and named != {"None"} and data.get("chat_template") in (None, *named):
        data["chat_template"] = named.pop()
        for index, item in enumerate(items):
            del item["chat_template"]
            source = work.items.get(("data", "datasets", index))
            if source is not None:
                work.trace((*source, "chat_template"), "model.tokenizer.chat_template")


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
        work.take("completion_only_loss", "data.train_on")  # it is about rows of prompt and completion
    elif data.get("completion_only_loss"):
        work.take("assistant_only_loss", "data.train_on")
    elif work.peer is TRL and "assistant_only_loss" not in data and "completion_only_loss" not in data:
        work.notes.append(
            "TRL trains all tokens of messages and texts, but only the completion of rows with prompt and completion: "
            "write data.train_on: assistant for the latter"
        )
    if data.get("mask_history") is True:  # only the last answer trains, with or without its prompt
        for name in ("train_on_prompt", "train_on_inputs"):
            if data.get(name) is True:
                work.leave((name,), "mask_history: true trains the last answer alone")
            else:
                work.take(name, "data.train_on")


def _packing(work: Import) -> None:
    """Convert LLaMA-Factory's two switches: `neat_packing` keeps documents apart, as packing does here."""
    data = work.data
    if data.get("neat_packing") is True:
        work.take("packing", "data.packing")
    elif "neat_packing" in data and "packing" in data:
        work.take("neat_packing", "data.packing")
        if data["packing"] is True:
            work.notes.append("packing without neat_packing: documents of a row do not attend to each other here")


def _memory(work: Import) -> None:
    data = work.data
    key = "train.gradient_checkpointing"
    if "disable_gradient_checkpointing" in data:
        disabled = work.take("disable_gradient_checkpointing", key)
        work.take("gradient_checkpointing", key)
        data["gradient_checkpointing"] = not disabled
    for name in ("activation_offloading", "use_unsloth_gc"):
        value = work.take(name, key)
        if value is True or (isinstance(value, str) and value in OFFLOADED):
            data["gradient_checkpointing"] = "offload"
    if nested(data.get("fsdp_config")).get("activation_checkpointing") is True:
        work.hoist("fsdp_config", ("activation_checkpointing", "gradient_checkpointing"))
    if work.take("use_galore", "train.optim"):
        work.take("optim", "train.optim")
        data["optim"] = "galore_adamw"
        for name, key in (("galore_rank", "rank"), ("galore_update_interval", "update_proj_gap"),
                          ("galore_scale", "scale")):  # fmt: skip
            if name in data:
                work.put(f"train.galore.{key}", data.pop(name), name)
    _optimizer_options(work)


def _optimizer_options(work: Import) -> None:
    """Convert `optim_args` of GaLore, written as a mapping or as "rank=64, scale=0.25"."""
    given = work.data.get("optim_args")
    if not str(work.data.get("optim", work.data.get("optimizer"))).startswith("galore") or given is None:
        return
    if isinstance(given, str):
        pairs = [pair.partition("=") for pair in given.split(",")]
        try:
            options = {name.strip(): parse_json_text(value.strip()) for name, _, value in pairs}
        except DamagedFileError:
            return
    else:
        options = dict(nested(given))
    if options and all(name in ("rank", "update_proj_gap", "scale") for name in options):
        del work.data["optim_args"]
        for name, value in options.items():
            work.put(f"train.galore.{name}", value, "optim_args")


def _model(work: Import) -> None:
    """Convert sections whose keys exist here: arguments of `from_pretrained`, and Liger's kernels."""
    work.hoist(
        "model_init_kwargs", ("torch_dtype", "torch_dtype"), ("dtype", "dtype"), ("revision", "model_revision"),
        ("attn_implementation", "attn_implementation"), ("trust_remote_code", "trust_remote_code"),
    )  # fmt: skip
    work.hoist(
        "liger_kernel_config", ("rope", "liger_rope"), ("rms_norm", "liger_rms_norm"),
        ("swiglu", "liger_swiglu"), ("geglu", "liger_glu_activation"), ("cross_entropy", "liger_cross_entropy"),
        ("fused_linear_cross_entropy", "liger_fused_linear_cross_entropy"),
    )  # fmt: skip
    for name in ("bf16", "fp16"):
        if work.data.get(name) == "full":  # of Axolotl: without mixed precision, as always here
            work.data[name] = True
    if work.data.get("bf16") is True and work.data.get("fp16") is False:
        work.take("fp16", "model.dtype")
    sampling = work.data.get("train_sampling_strategy")
    if sampling == "group_by_length":
        work.put("train.group_by_length", True, "train_sampling_strategy")
        del work.data["train_sampling_strategy"]


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
        work.take("warmup_ratio", "train.warmup_ratio")
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
    strategy = "checkpoint.save_strategy"
    per_epoch = data.pop("saves_per_epoch", None)
    if per_epoch:
        _per_epoch(work, per_epoch, "saves_per_epoch", strategy, "checkpoint.save_steps")
        work.take("save_steps", "checkpoint.save_steps")
    elif "save_steps" in data and data.get("save_strategy") is None:
        work.put(strategy, "steps", "save_steps")
    if data.get("save_strategy") == "no":
        work.put(strategy, "no", "save_strategy")
        del data["save_strategy"]
    if data.get("save_total_limit") == 0:
        work.take("save_total_limit", "checkpoint.save_total_limit")


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
    if "evaluation_strategy" in data and "eval_strategy" not in data:
        work.names["eval_strategy"] = work.path_of("evaluation_strategy")
        data["eval_strategy"] = data.pop("evaluation_strategy")
    if not held_out:
        for name in ("eval_steps", "eval_strategy", "early_stopping_patience", "load_best_model_at_end",
                     "evals_per_epoch"):  # fmt: skip
            if name in data and data[name] not in ("no", False):
                work.leave((name,), "there is no evaluation data", HARMLESS)
        return
    per_epoch = data.pop("evals_per_epoch", None)
    if per_epoch:
        _per_epoch(work, per_epoch, "evals_per_epoch", "eval.eval_strategy", "eval.eval_steps")
        work.take("eval_strategy", "eval.eval_strategy")
    elif not evaluates(data) and "eval_strategy" not in data and work.peer is not TRL:
        work.put("eval.eval_strategy", "steps" if data.get("eval_steps") else "epoch", _held_out_by(data))
    elif data.get("eval_strategy") == "steps" and "eval_steps" not in data:
        data["eval_steps"] = data.get("logging_steps", STEPS_OF_TRAINER[work.peer.name])


def _held_out_by(data: dict[str, Any]) -> str:
    return next((name for name in ("val_set_size", "val_size") if data.get(name)), "eval_dataset")


def _fsdp_words(fsdp: Any) -> str:
    return " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")


def _processes(work: Import) -> None:
    """Convert FSDP and DeepSpeed to `parallel.strategy`, where the file says which one it is."""
    data = work.data
    if "fsdp_config" in data and not isinstance(data["fsdp_config"], dict):  # the name of a file
        work.leave(("fsdp_config",), FSDP_OPTIONS.why, FSDP_OPTIONS.harm)
    config = nested(data.get("fsdp_config"))
    words = _fsdp_words(data.get("fsdp"))
    if config or words not in ("", "no_shard") or data.get("fsdp_version"):
        names = [name for name in ("fsdp", "fsdp_version") if name in data]
        for name in names or ["fsdp_config"]:
            work.put("parallel.strategy", "fsdp", name)
        if "offload" in words:
            work.put("parallel.cpu_offload", True, "fsdp")
        for name, value in config.items():
            _fsdp_option(work, name, value)
        for name in ("fsdp", "fsdp_config", "fsdp_version"):
            data.pop(name, None)
    if data.get("deepspeed"):
        _deepspeed(work)


def _fsdp_option(work: Import, name: str, value: Any) -> None:
    """Convert an option of FSDP: only offloading has a key in a recipe."""
    path = (*work.path_of("fsdp_config"), name)
    if name in ("offload_params", "fsdp_offload_params"):
        work.trace(path, "parallel.cpu_offload")
        if value is True:
            work.document.put(("parallel", "cpu_offload"), True, Place("", work.line_of(path), work.document.file))
    elif name in ("version", "fsdp_version"):
        work.trace(path, "parallel.strategy")
    elif path not in work.fates:
        work.fates[path] = Fate(OFF) if is_off(value) else Fate(LEFT, (), FSDP_OPTIONS.why, FSDP_OPTIONS.harm)


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
    """Choose trackers by their names, or by the keys of Axolotl that configure them."""
    data = work.data
    signs = {"wandb": ("wandb_project", "use_wandb"), "tensorboard": ("use_tensorboard",),
             "mlflow": ("mlflow_tracking_uri", "use_mlflow", "mlflow_experiment_name")}  # fmt: skip
    named = data.get("report_to")
    if isinstance(named, str | list):
        known = [name for name in _names(named) if name in (*signs, "jsonl")]
        others = [name for name in _names(named) if name not in (*known, "none")]
        if others:
            work.leave(("report_to",), f"{', '.join(others)}: {TRACKERS}", HARMLESS)
        if known and others:
            data["report_to"] = known
            work.more_left.append(
                Left(work.line_of(("report_to",)), "report_to", ", ".join(others), TRACKERS, HARMLESS)
            )
    found = [tracker for tracker, names in signs.items() if any(data.get(name) for name in names)]
    if found and named is None:
        work.document.put(("logging", "report_to"), found, Place("", 0, work.document.file))
    for name in ("use_wandb", "use_tensorboard", "use_mlflow"):
        work.take(name, "logging.report_to")
    for name in ("wandb_name", "wandb_run_id", "mlflow_run_name"):
        if data.get(name) and "run_name" not in data:
            work.put("logging.run_name", data[name], name)
        work.take(name, "logging.run_name")


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value if isinstance(value, list) else value.split(","))]
