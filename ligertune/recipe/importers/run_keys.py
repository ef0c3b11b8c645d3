"""Keys of a run whose conversion needs more than a rule of keys.yaml: templates, intervals, processes and trackers."""

from __future__ import annotations

import re
from typing import Any

from ligertune.files.checked_files import DamagedFileError, parse_json_text
from ligertune.recipe.document import KeyPath, Place, split
from ligertune.recipe.importers import import_tables as tables
from ligertune.recipe.importers.import_state import OFF, Fate, Import, Left, is_off
from ligertune.recipe.importers.import_tables import HARMLESS, REASONS, Reason, nested
from ligertune.recipe.importers.key_rules import apply_rules
from ligertune.recipe.train_sections import FOLLOW_EVALUATIONS

GALORE_OPTIONS = {"rank", "update_proj_gap", "scale"}
TOKENIZERS = ("tokenizer_default", "tokenizer", "default", "empty", "")  # names of the tokenizer's own template


def convert_run(work: Import) -> None:
    """Convert the keys of a run, in this order."""
    # a template of the data sets first: the rules and names below are about the file's own
    _hoist_template(work)
    apply_rules(work, "template")
    _template(work)
    _intervals(work)
    apply_rules(work, "run")
    _optimizer_options(work)  # after the rule that chooses GaLore
    apply_rules(work, "schedule")
    _schedule_options(work)
    _processes(work)
    _trackers(work)
    # before aliases are read: they would take these keys for ours
    for name, reason in tables.REMOVED_FIRST.items():
        if name in work.data:
            work.leave((name,), reason)


def _template(work: Import) -> None:
    """Convert the name of a chat template: of the tokenizer, so that rows of other formats keep their own prompt."""
    data = work.data
    model = str(data.get("base_model", data.get("model_name_or_path", data.get("model")))).lower()
    for name in ("template", "chat_template"):
        written = data.get(name)
        if not isinstance(written, str):
            continue
        found = tables.TEMPLATES.get(written.replace("-", "_"))
        # Qwen's models always have the template in the tokenizer; theirs also has a place for tools
        is_own = written in TOKENIZERS or ("qwen" in written.lower() and "qwen" in model)
        # Axolotl's jinja without a file, or a template that has no built-in counterpart
        if not is_own and found is None:
            work.leave((name,), REASONS["chat_template"])
            continue
        work.take(name, "model.tokenizer.chat_template")
        if not is_own:
            work.put("model.tokenizer.chat_template", found, name)
            continue
        if written.endswith("nothink"):  # of LLaMA-Factory: qwen3_nothink
            work.put("data.chat_template_kwargs", {"enable_thinking": False}, name)
        work.notes.append(f"{name}: {written} is the template that the model's tokenizer has")


def _hoist_template(work: Import) -> None:
    """Move `chat_template` of Axolotl's data sets to the file, if all of them name the same one."""
    data = work.data
    items = [item for item in nested(data.get("data")).get("datasets", []) if isinstance(item, dict)]
    # a recipe has one template for all data sets; different ones are reported per data set
    named = {str(item.get("chat_template")) for item in items}
    if len(named) == 1 and named != {"None"} and data.get("chat_template") in (None, *named):
        data["chat_template"] = named.pop()
        for index, item in enumerate(items):
            del item["chat_template"]
            source = work.items.get(("data", "datasets", index))
            if source is not None:
                work.trace((*source, "chat_template"), "model.tokenizer.chat_template")


def _intervals(work: Import) -> None:
    """Convert the intervals of saves and evaluations; evaluations are on where the other tool has them."""
    data = work.data
    if number := data.pop("saves_per_epoch", None):
        _per_epoch(work, number, "saves_per_epoch", "checkpoint.save")
        work.take("save_steps", "checkpoint.save_steps")
    apply_rules(work, "intervals")
    held_out = [name for name in ("val_set_size", "val_size") if data.get(name)]
    # Axolotl and LLaMA-Factory evaluate what they hold out, also without a strategy
    if "eval_datasets" in nested(data.get("data")):
        held_out.append("eval_dataset")
    if not held_out:
        return
    if number := data.pop("evals_per_epoch", None):
        _per_epoch(work, number, "evals_per_epoch", "eval.eval")
        work.take("eval_strategy", "eval.eval_strategy")
    elif "eval_strategy" not in data and work.peer is not tables.TRL:
        work.put("eval.eval_strategy", "steps" if data.get("eval_steps") else "epoch", held_out[0])
    elif data.get("eval_strategy") == "steps":  # as TrainingArguments: eval_steps is logging_steps
        data.setdefault("eval_steps", data.get("logging_steps", work.peer.logging_steps))


def _per_epoch(work: Import, number: Any, written: str, ours: str) -> None:
    """Set an interval from a number per epoch: of one epoch, a share of all steps, or never before the end."""
    # transformers reads an interval below 1 as a share of all steps
    epochs = work.data.get("num_epochs", work.data.get("num_train_epochs", 1))
    numbers = isinstance(number, int | float) and isinstance(epochs, int | float) and number * epochs > 0
    if number == 1 or not numbers:
        work.put(f"{ours}_strategy", "epoch", written)
    elif number * epochs <= 1:
        work.put(f"{ours}_strategy", "no", written)
    else:
        work.put(f"{ours}_strategy", "steps", written)
        work.put(f"{ours}_steps", 1 / (number * epochs), written)


def _optimizer_options(work: Import) -> None:
    """Convert `optim_args` of GaLore, written as a mapping or as "rank=64, scale=0.25"."""
    given = work.data.get("optim_args")
    if not str(work.data.get("optim", work.data.get("optimizer"))).startswith("galore") or given is None:
        return
    options = dict(nested(given))
    if isinstance(given, str):
        pairs = [pair.partition("=") for pair in given.split(",")]
        try:
            options = {name.strip(): parse_json_text(value.strip()) for name, _, value in pairs}
        except DamagedFileError:
            return
    # options of other optimizers stay, and are reported
    if options and options.keys() <= GALORE_OPTIONS:
        del work.data["optim_args"]
        for name, value in options.items():
            work.put(f"train.galore.{name}", value, "optim_args")


def _schedule_options(work: Import) -> None:
    """Convert options of the schedule, which may be JSON as on a command line; `mode: min` is how a loss is read."""
    data = work.data
    options = data.get("lr_scheduler_kwargs")
    if isinstance(options, str):
        try:
            options = parse_json_text(options)
        except DamagedFileError:
            return
    if isinstance(options, dict):
        options = {key: value for key, value in options.items() if value is not None}
        schedule = data.get("lr_scheduler", data.get("lr_scheduler_type"))
        # the evaluation loss is lowered, so the mode says nothing new
        if schedule in FOLLOW_EVALUATIONS and options.get("mode") == "min":
            del options["mode"]
        data["lr_scheduler_kwargs"] = options


def _processes(work: Import) -> None:
    """Convert FSDP and DeepSpeed to `parallel.strategy`, where the file says which one it is."""
    data = work.data
    if "fsdp_config" in data and not isinstance(data["fsdp_config"], dict):  # the name of a file
        work.leave(("fsdp_config",), REASONS["fsdp_config"])
    config = nested(data.get("fsdp_config"))
    fsdp = data.get("fsdp")
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")
    if config or words not in ("", "no_shard") or data.get("fsdp_version"):
        for name in [name for name in ("fsdp", "fsdp_version") if name in data] or ["fsdp_config"]:
            work.put("parallel.strategy", "fsdp", name)
        if "offload" in words:
            work.put("parallel.cpu_offload", True, "fsdp")
        for name, value in config.items():
            _fsdp_option(work, (*work.path_of("fsdp_config"), name), value)
        for name in ("fsdp", "fsdp_config", "fsdp_version"):
            data.pop(name, None)
    if data.get("deepspeed"):
        _deepspeed(work)


def _fsdp_option(work: Import, path: KeyPath, value: Any) -> None:
    """Convert an option of FSDP: only offloading has a key in a recipe."""
    ours = tables.KEYS["fsdp_options"].get(path[-1])
    if ours:
        work.trace(path, ours)
    elif path not in work.fates:  # not hoisted
        work.lose(path, REASONS["fsdp_config"])
        work.fates[path] = Fate(OFF) if is_off(value) else work.fates[path]
    if ours == "parallel.cpu_offload" and value is True:
        work.document.put(split(ours), True, Place("", work.line_of(path), work.document.file))


def _deepspeed(work: Import) -> None:
    """Convert a configuration of DeepSpeed, or the name of a file with one, if it says ZeRO-2 or ZeRO-3."""
    config = work.data["deepspeed"]
    zero = nested(nested(config).get("zero_optimization"))
    # ds_z3_config.json, zero2.json, stage-3.json
    found = re.search(r"(?:z|zero|stage)[-_]?([0-3])", str(config).rpartition("/")[2].lower())
    stage = int(found[1]) if found else None
    if zero:
        stage = zero.get("stage")
    if stage not in (2, 3):
        return
    if stage == 3 and "offload" in str(config).lower():  # DeepSpeed's own offloading has no key; FSDP's is the same
        work.put("parallel.strategy", "fsdp", "deepspeed")
        work.put("parallel.cpu_offload", True, "deepspeed")
        work.notes.append("ZeRO-3 with offloading is fsdp with parallel.cpu_offload: weights and states on the host")
    else:
        work.put("parallel.strategy", f"deepspeed_zero{stage}", "deepspeed")
    del work.data["deepspeed"]


def _trackers(work: Import) -> None:
    """Choose trackers by their names, or by the keys of Axolotl that configure them."""
    data = work.data
    signs = {tracker: keys.split() for tracker, keys in tables.KEYS["trackers"].items()}
    named = data.get("report_to")
    if isinstance(named, str | list):
        known = [name for name in tables.split_names(named) if name in (*signs, "jsonl")]
        others = [name for name in tables.split_names(named) if name not in (*known, "none")]
        why = REASONS["use_swanlab"].why
        if others:
            work.leave(("report_to",), Reason(f"{', '.join(others)}: {why}", HARMLESS))
        if known and others:  # one row more: the key itself is imported
            data["report_to"] = known
            line = work.line_of(("report_to",))
            work.more_left.append(Left(line, "report_to", ", ".join(others), why, HARMLESS))
    found = [tracker for tracker, names in signs.items() if any(data.get(name) for name in names)]
    if found and named is None:  # Axolotl has no report_to
        work.document.put(("logging", "report_to"), found, Place("", 0, work.document.file))
    apply_rules(work, "names of the run")
