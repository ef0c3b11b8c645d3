"""Conversions that keys.yaml calls by name: those that compute a value, or read another file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.files.checked_files import DamagedFileError, parse_json_text, read_json_value
from ligertune.recipe.document import Place, split
from ligertune.recipe.importers import import_tables as tables
from ligertune.recipe.importers.import_state import OFF, Fate, Import, Left, is_off
from ligertune.recipe.importers.import_tables import HARMLESS, REASONS, Reason, nested, split_names

GALORE_OPTIONS = {"rank", "update_proj_gap", "scale"}
# weights of experts are parameters of one module: PEFT cannot name them as layers
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj", "up_proj", "gate_proj")
MAX_LAYERS = 4096  # as in the sizes of a configuration
WRITE_IT = "Write a recipe with method.type: freeze and method.trainable, a list of regular expressions."
PREFERENCE_RATE = 1e-6  # default learning rate of DPOConfig and KTOConfig
# the keys of this fact, in its order: the report names the first one as the reason for `task: dpo`
PREFERENCE_FILE = tables.KEYS["facts"]["a preference file"]
PREFERENCE_SIGNS = [name for row in PREFERENCE_FILE for names in row for name in names.split("|")]


def refuse_methods(work: Import) -> None:
    """Refuse keys whose presence alone means another objective or method; one that is off or 0 chooses nothing."""
    # in the order of the file, so that reasons of one line stay in their order
    for name, value in work.data.items():
        for row in tables.UNSUPPORTED["refused"]:
            if re.fullmatch(row["keys"].replace(" ", "|"), name) and not is_off(value) and value != 0:
                work.refuse(name, f" {row['sentence']}", row.get("hint", tables.KEEP_THE_TOOL))


def convert_preferences(work: Import) -> None:
    """Convert the loss of DPOConfig or KTOConfig."""
    # `rl` names the objective of an Axolotl file; an empty value names none
    if "rl" in work.source:
        return
    work.data.setdefault("learning_rate", PREFERENCE_RATE)
    sign = next(name for name in PREFERENCE_SIGNS if name in work.data)
    named = next(name for name in ("pref_loss", *PREFERENCE_SIGNS) if name in work.source)
    default = "kto" if "desirable_weight" in work.data else "sigmoid"
    given = work.take("loss_type", "preference.loss_type", default=default)
    work.put("task", "dpo", sign)
    loss, sft_weight = _loss_and_sft_weight(work, given)
    # another loss stays as it is: the check of the recipe names the ones that exist
    found = {"loss_type": loss, "length_normalization": None, "sft_weight": sft_weight}
    if loss == "sigmoid_norm":
        found |= {"loss_type": "sigmoid", "length_normalization": True}
    for key, value in found.items():
        if value is not None:
            work.put(f"preference.{key}", value, named)


def convert_dpo_losses(work: Import) -> None:
    """Convert Axolotl's list of DPO losses and their weights."""
    work.rename("dpo_loss_weights", "loss_weights")
    loss, sft_weight = _loss_and_sft_weight(work, work.data["dpo_loss_type"])
    work.put("preference.loss_type", loss, "dpo_loss_type")
    if sft_weight is not None:
        work.put("preference.sft_weight", sft_weight, "dpo_loss_type")
    work.take("dpo_loss_type", "preference.loss_type")


def _loss_and_sft_weight(work: Import, loss: Any) -> tuple[Any, Any]:
    """Return one loss. In a list of two, sft is the cross-entropy of the chosen answers: return its weight, too."""
    if isinstance(loss, list) and len(loss) == 1:
        return loss[0], None
    if isinstance(loss, list) and loss[1:] == ["sft"]:
        weights = work.take("loss_weights", "preference.sft_weight")
        weights = weights if isinstance(weights, list) else [1.0, 1.0]
        # a recipe weighs the cross-entropy alone
        if len(weights) == 2 and weights[0] == 1:
            return loss[0], weights[1]
    return loss, None


def convert_chat_template(work: Import) -> None:
    """Convert the name of a chat template: of the tokenizer, so that rows of other formats keep their own prompt."""
    data = work.data
    model = str(data.get("base_model", data.get("model_name_or_path", data.get("model")))).lower()
    for name in ("template", "chat_template"):
        written = data.get(name)
        if not isinstance(written, str) or not written:
            continue
        found = tables.TEMPLATES.get(written.replace("-", "_"))
        # Axolotl's name, or that with a fallback; default and empty of LLaMA-Factory are templates of their own.
        # Qwen's models always have the template in the tokenizer; theirs also has a place for tools
        is_own = written.startswith("tokenizer_default") or ("qwen" in written.lower() and "qwen" in model)
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
        note = f"{name}: {written} is the template that the model's tokenizer has"
        work.notes.append(f"{note}; if it has none, name one in model.tokenizer.chat_template")


def choose_evaluations(work: Import) -> None:
    """Choose when to evaluate what the file holds out without saying when."""
    held_out = next((name for name in ("val_set_size", "val_size") if work.data.get(name)), "eval_dataset")
    work.put("eval.eval_strategy", "steps" if work.data.get("eval_steps") else "epoch", held_out)


def set_interval(work: Import, written: str, ours: str) -> None:
    """Set an interval from a number per epoch: of one epoch, a share of all steps, or never before the end."""
    # transformers reads an interval below 1 as a share of all steps
    number = work.data.pop(written)
    epochs = work.data.get("num_epochs", work.data.get("num_train_epochs", 1))
    numbers = isinstance(number, int | float) and isinstance(epochs, int | float) and number * epochs > 0
    if number == 1 or not numbers:
        work.put(f"{ours}_strategy", "epoch", written)
    elif number * epochs <= 1:
        work.put(f"{ours}_strategy", "no", written)
    else:
        work.put(f"{ours}_strategy", "steps", written)
        work.put(f"{ours}_steps", 1 / (number * epochs), written)


def convert_galore_options(work: Import) -> None:
    """Convert `optim_args` of GaLore, written as a mapping or as "rank=64, scale=0.25"."""
    given = work.data.get("optim_args")
    if isinstance(given, str):
        # names in quotes make transformers' notation JSON
        given = _mapping_of("{" + re.sub(r"(\w+)\s*=", r'"\1":', given) + "}")
    options = nested(given)
    # options of other optimizers stay, and are reported
    if options and options.keys() <= GALORE_OPTIONS:
        del work.data["optim_args"]
        for name, value in options.items():
            work.put(f"train.galore.{name}", value, "optim_args")


def read_schedule_options(work: Import) -> None:
    """Read options of the schedule that are JSON, as on a command line."""
    options = _mapping_of(work.data.get("lr_scheduler_kwargs"))
    if options is not None:
        work.data["lr_scheduler_kwargs"] = {key: value for key, value in options.items() if value is not None}


def _mapping_of(text: Any) -> dict[str, Any] | None:
    """Return the mapping that a JSON text holds, else None."""
    if not isinstance(text, str):
        return None
    try:
        found = parse_json_text(text)
    except DamagedFileError:
        return None
    return found if isinstance(found, dict) else None


def account_for_fsdp_options(work: Import) -> None:
    """Account for the options of FSDP: offloading and resharding have keys in a recipe."""
    for name, value in work.data.pop("fsdp_config").items():
        path = (*work.path_of("fsdp_config"), name)
        ours = tables.KEYS["fsdp_options"].get(name)
        reshards = ours == "parallel.reshard_after_forward"
        if reshards and not isinstance(value, bool):  # a sharding strategy of FSDP1
            ours = None
        if ours:
            work.trace(path, ours)
        elif is_off(value):
            work.fates[path] = Fate(OFF)
        else:
            work.lose(path, REASONS["fsdp_config"])
        if ours and (reshards or (ours == "parallel.cpu_offload" and value is True)):
            work.document.put(split(ours), value, Place("", work.line_of(path), work.document.file))


def choose_trackers(work: Import) -> None:
    """Choose trackers by their names, or by the keys of Axolotl that configure them."""
    data = work.data
    signs = {tracker: keys.split() for tracker, keys in tables.KEYS["trackers"].items()}
    named = data.get("report_to")
    if isinstance(named, str | list):
        known = [name for name in split_names(named) if name in (*signs, "jsonl")]
        others = [name for name in split_names(named) if name not in (*known, "none")]
        why = f"the trackers are {', '.join(signs)}"
        if others:
            work.leave(("report_to",), Reason(f"{', '.join(others)}: {why}", HARMLESS))
        if known and others:  # one row more: the key itself is imported
            data["report_to"] = known
            line = work.line_of(("report_to",))
            work.more_left.append(Left(line, "report_to", ", ".join(others), why, HARMLESS))
    # trackers of Axolotl are on where their project or address is given
    found = [
        tracker
        for tracker, names in signs.items()
        if any(data.get(name) for name in names) and data.get(f"use_{tracker.removesuffix('_ml')}") is not False
    ]
    if found and named is None:  # Axolotl has no report_to
        work.document.put(("logging", "report_to"), found, Place("", 0, work.document.file))
    elif data.get("use_swanlab") is True:  # LLaMA-Factory logs to it next to report_to
        listed = [name for name in split_names(named) if name not in ("none", "swanlab")]
        data["report_to"] = [*listed, "swanlab"]


def convert_embedding_rate(work: Import) -> None:
    """Convert Axolotl's learning rate of an embedding that trains next to an adapter."""
    data = work.data
    for name in ("embedding_lr", "embedding_lr_scale"):
        rate = data.get(name)
        scale = data.get("learning_rate") if name == "embedding_lr_scale" else 1.0
        # Axolotl multiplies embedding_lr_scale by the learning rate
        if isinstance(rate, float) and isinstance(scale, float):
            group = {"parameters": r"(?:embed_tokens|lm_head)\.", "learning_rate": rate * scale}
            work.put("train.lr_groups", [group], name)
            del data[name]


def convert_lr_groups(work: Import) -> None:
    """Convert Axolotl's `lr_groups`: names of modules, and their learning rate."""
    groups = work.data["lr_groups"]
    # a name of the group, or its modules: expressions for parameters
    our_names = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    for index, item in enumerate(groups):
        for name in nested(item):
            work.trace(("lr_groups", index, name), f"train.lr_groups[{index}].{our_names.get(name, 'parameters')}")
        if isinstance(nested(item).get("modules"), list):
            names = "|".join(re.escape(str(name)) for name in item["modules"])
            groups[index] = {"parameters": names, "learning_rate": item.get("lr")}


def convert_unfrozen(work: Import) -> None:
    """Make names of Axolotl regular expressions that match the beginning of a name."""
    given = work.data["unfrozen_parameters"]
    patterns = [str(pattern) for pattern in (given if isinstance(given, list) else [given])]
    for pattern in patterns:
        if re.search(r"\[[^\[]*:[^\[]*\]\s*$", pattern):  # rows [:32000] of a weight
            work.refuse("unfrozen_parameters", f": {pattern} trains some rows of a weight.", WRITE_IT)
            # without the key no further reason follows from it
            work.take("unfrozen_parameters")
            return
    work.data["unfrozen_parameters"] = [text if text.startswith("^") else f"^(?:{text})" for text in patterns]


def convert_rope(work: Import) -> None:
    """Convert a section of rotary embeddings, or the type alone, whose factor LLaMA-Factory computes from lengths."""
    given = work.data.get("rope_scaling")
    values = nested(given) if isinstance(given, dict) else {}
    if isinstance(given, str):
        factor = _rope_factor(work)
        if factor is None:
            return  # it stays, and is reported with the reason
        if factor == 1:
            work.lose(work.path_of("rope_scaling"), Reason("texts are no longer than the model's context", HARMLESS))
            work.data.pop("rope_scaling")
            return
        values = {"rope_type": given, "factor": float(factor)}
    if values:
        work.take("rope_scaling", "model.rope_parameters")
    for name, value in values.items():
        work.put(f"model.rope_parameters.{'rope_type' if name == 'type' else name}", value, "rope_scaling")


def _rope_factor(work: Import) -> int | None:
    """Return how many of the model's contexts a text may be long; None if its configuration is not at hand."""
    path = work.find_file(Path(str(work.data.get("model_name_or_path", ""))) / "config.json")
    try:
        context = None if path is None else nested(read_json_value(path)).get("max_position_embeddings")
    except (OSError, ValueError):
        context = None
    length = work.data.get("cutoff_len", 2048)
    if type(context) is not int or context < 1 or type(length) is not int:
        return None
    return max(1, -(-length // context))


def convert_freeze(work: Import) -> None:
    """Make LLaMA-Factory's `finetuning_type: freeze` a list of expressions for the layers that train."""
    # the tool's defaults; a negative number counts from the first layer
    count = work.take("freeze_trainable_layers", "method.trainable", default=2)
    modules = _listed(work.take("freeze_trainable_modules", "method.trainable", default="all"))
    extra = _listed(work.take("freeze_extra_modules", "method.trainable", default=""))
    indices = None
    if type(count) is not int or abs(count) > MAX_LAYERS:
        work.refuse("freeze_trainable_layers", f": {count} is not a number of layers.", WRITE_IT)
    else:
        indices = range(-count) if count < 0 else _last_layers(work, count)
    if indices is None:
        work.take("finetuning_type", "method.type")
        return
    # the names of the lists of layers in transformers' models
    numbers = "|".join(map(str, indices))
    inside = "" if modules == ["all"] else f"({'|'.join(modules)})"
    rows = [rf"\.(?:layers|h|blocks)\.({numbers})\.{inside}", *(rf"(?:^|\.){name}\." for name in extra)]
    work.put("method.trainable", rows, "finetuning_type")


def _last_layers(work: Import, count: int) -> range | None:
    """Return the indices of the last layers; None, and a refusal, if the model's configuration is not at hand."""
    name = str(work.data.get("model_name_or_path", ""))
    path = work.find_file(Path(name) / "config.json")
    if path is None:
        what = f": freeze trains the last {count} layers, and {name} is no folder that says how many layers there are."
        work.refuse("finetuning_type", what, "Download the model, and name its folder in model_name_or_path.")
        return None
    try:
        config = read_json_value(path)
        # a multimodal model has the layers of its language model in a section
        total = config.get("text_config", config)["num_hidden_layers"]
        problem = f"{path}: num_hidden_layers must be a whole number from 1 to {MAX_LAYERS}."
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        total = None
        problem = f"{path} does not hold the number of layers: {error!r}."
    if type(total) is int and 0 < total <= MAX_LAYERS:
        return range(max(0, total - count), total)
    work.refusals.append((work.line_of(("model_name_or_path",)), UserError(problem)))
    return None


def convert_targets(work: Import) -> None:
    """Convert the layers of an adapter. One string is a regular expression, as in PEFT; experts are parameters."""
    data = work.data
    given = data["lora_target_modules"]
    if isinstance(given, str) and "," in given:  # of LLaMA-Factory's new trainer
        given = _listed(given)
    if given == ["all-linear"]:
        given = "all-linear"
    data["lora_target_modules"] = given
    if not isinstance(given, list):
        return
    data["lora_target_modules"] = _without_experts(work, given)


def _without_experts(work: Import, given: list[Any]) -> list[Any]:
    """Return the targets that are layers; weights of experts become parameters."""
    experts = [name for name in given if "experts." in str(name) and str(name).rpartition(".")[2] in EXPERT_WEIGHTS]
    if experts:
        work.data.setdefault("lora_target_parameters", experts)
        work.trace(work.path_of("lora_target_modules"), "method.lora_target_modules", "method.lora_target_parameters")
    return [name for name in given if name not in experts]


def _listed(value: Any) -> list[str]:
    return [name for name in split_names(value) if name]


# functions that rules of keys.yaml call by their names
CONVERSIONS: dict[str, Callable[[Import], None]] = {
    function.__name__: function
    for function in (
        account_for_fsdp_options,
        choose_evaluations,
        choose_trackers,
        convert_chat_template,
        convert_dpo_losses,
        convert_embedding_rate,
        convert_freeze,
        convert_galore_options,
        convert_lr_groups,
        convert_preferences,
        convert_rope,
        convert_targets,
        convert_unfrozen,
        read_schedule_options,
        refuse_methods,
    )
}
