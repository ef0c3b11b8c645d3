"""Fine-tuning methods of other tools: adapters and their targets, quantised models, and training of some layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.files.checked_files import read_json_value
from ligertune.recipe.importers.import_state import LEFT, Fate, Import
from ligertune.recipe.importers.peers import LLAMA_FACTORY
from ligertune.recipe.importers.reasons import SPEED, TRAINING

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj", "up_proj", "gate_proj")
MAX_LAYERS = 4096  # as in the sizes of a configuration
LAYER_NUMBERS = ("peft_layers_to_transform", "lora_layers_to_transform", "layers_to_transform")
LR_GROUP = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_WRITE_IT = "Write a recipe with method.type: freeze and method.trainable, a list of regular expressions."


def convert_method(work: Import) -> None:
    """Convert keys that choose which weights train, and in which precision the others are."""
    data = work.data
    adapts = data.get("adapter") or data.get("use_peft") or data.get("finetuning_type", _default_type(work)) == "lora"
    in_four_bits = work.take("load_in_4bit", "method.type") is True
    if data.get("quantization_bit") == 8:
        work.put("method.load_in_8bit", True, "quantization_bit")
        del data["quantization_bit"]
    elif data.get("quantization_bit") == 4:
        in_four_bits = True
    if in_four_bits and not adapts:
        name = "quantization_bit" if "quantization_bit" in data else "load_in_4bit"
        work.fates[work.path_of(name)] = Fate(LEFT, (), "without an adapter all weights train, unquantised", TRAINING)
        data.pop("quantization_bit", None)
    elif in_four_bits:
        for name in ("quantization_bit", "use_peft", "finetuning_type", "adapter"):
            work.take(name, "method.type")
        work.document.put(("method", "type"), "qlora", work.document.place(("load_in_4bit",)))
    if data.get("unfrozen_parameters"):
        _convert_unfrozen(work)
    if data.get("finetuning_type") == "freeze":
        _convert_freeze(work)
    _convert_targets(work)
    _convert_pissa(work)
    _convert_rates(work, bool(adapts))


def _convert_pissa(work: Import) -> None:
    """Convert LLaMA-Factory's `pissa_init` with the iterations of its SVD; -1 is an exact one."""
    data = work.data
    if data.get("pissa_init") is not True or "pissa_iter" not in data:
        return
    names = {-1: "pissa", 4: "pissa_niter_4", 16: "pissa_niter_16"}
    number = data["pissa_iter"]
    if type(number) is not int or number not in names:
        work.leave(("pissa_iter",), "a fast SVD has 4 or 16 iterations here; 16 are taken", SPEED)
        return
    work.take("pissa_init", "method.init_lora_weights")
    work.put("method.init_lora_weights", names[number], "pissa_iter")
    del data["pissa_iter"]


def _convert_rates(work: Import, adapts: bool) -> None:
    """Convert Axolotl's learning rates of groups, and of an embedding that trains next to an adapter."""
    data = work.data
    if isinstance(data.get("lr_groups"), list):
        for index, item in enumerate(data["lr_groups"]):
            for name in item if isinstance(item, dict) else ():
                work.trace(("lr_groups", index, name), f"train.lr_groups[{index}].{LR_GROUP.get(name, 'parameters')}")
        data["lr_groups"] = [_lr_group(item) for item in data["lr_groups"]]
    saved = " ".join(_listed(data.get("lora_modules_to_save", "")))
    if not (adapts and "lr_groups" not in data and ("embed_tokens" in saved or "lm_head" in saved)):
        return
    for name in ("embedding_lr", "embedding_lr_scale"):
        rate = data.get(name)
        scale = data.get("learning_rate") if name == "embedding_lr_scale" else 1.0
        if isinstance(rate, float) and isinstance(scale, float):
            group = {"parameters": r"(?:embed_tokens|lm_head)\.", "learning_rate": rate * scale}
            work.put("train.lr_groups", [group], name)
            del data[name]


def _lr_group(item: Any) -> Any:
    """Convert one item of Axolotl's `lr_groups`: names of modules, and their learning rate."""
    if not isinstance(item, dict) or not isinstance(item.get("modules"), list):
        return item
    names = "|".join(re.escape(str(name)) for name in item["modules"])
    return {"parameters": names, "learning_rate": item.get("lr")}


def _default_type(work: Import) -> str:
    return "lora" if work.peer is LLAMA_FACTORY else "full"


def _convert_unfrozen(work: Import) -> None:
    """Make `unfrozen_parameters` of Axolotl `method.type: freeze`, if no adapter trains instead."""
    data = work.data
    given = data["unfrozen_parameters"]
    patterns = given if isinstance(given, list) else [given]
    for pattern in patterns:
        if str(pattern).rstrip().endswith("]") and ":" in str(pattern).rpartition("[")[2]:  # rows [:32000] of a weight
            work.refuse("unfrozen_parameters", f": {pattern} trains some rows of a weight.", _WRITE_IT)
            work.take("unfrozen_parameters", "method.trainable")
            return
    if data.get("adapter"):
        work.leave(("unfrozen_parameters",), "an adapter trains; name whole layers in method.lora_modules_to_save")
        return
    work.trace(("unfrozen_parameters",), "method.trainable")
    work.document.put(("method", "type"), "freeze", work.document.place(("unfrozen_parameters",)))
    # Axolotl matches the beginning of a name
    data["unfrozen_parameters"] = [str(p) if str(p).startswith("^") else f"^(?:{p})" for p in patterns]


def _convert_freeze(work: Import) -> None:
    """Make LLaMA-Factory's `finetuning_type: freeze` a list of expressions for the layers that train."""
    count = work.take("freeze_trainable_layers", "method.trainable", default=2)
    modules = _listed(work.take("freeze_trainable_modules", "method.trainable", default="all"))
    extra = _listed(work.take("freeze_extra_modules", "method.trainable", default=""))
    if type(count) is not int or abs(count) > MAX_LAYERS:
        work.refuse("freeze_trainable_layers", f": {count} is not a number of layers.", _WRITE_IT)
        indices = None
    else:
        indices = range(-count) if count < 0 else _last_layers(work, count)
    if indices is None:
        work.take("finetuning_type", "method.type")
        return
    numbers = "|".join(map(str, indices))
    inside = "" if modules == ["all"] else f"({'|'.join(modules)})"
    rows = [rf"\.(?:layers|h|blocks)\.({numbers})\.{inside}", *(rf"(?:^|\.){name}\." for name in extra)]
    work.put("method.trainable", rows, "finetuning_type")


def _last_layers(work: Import, count: int) -> range | None:
    """Return the indices of the last layers; None, and a refusal, if the model's configuration is not at hand."""
    name = str(work.data.get("model_name_or_path", ""))
    for folder in (work.folder / name, Path(name)):
        path = folder / "config.json"
        if path.is_file():
            try:
                config = read_json_value(path)
                total = config.get("text_config", config)["num_hidden_layers"]
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
                problem = UserError(f"{path} does not hold the number of layers: {problem!r}.")
                work.refusals.append((work.line_of(("model_name_or_path",)), problem))
                return None
            if type(total) is not int or not 0 < total <= MAX_LAYERS:
                problem = UserError(f"{path}: num_hidden_layers must be a whole number from 1 to {MAX_LAYERS}.")
                work.refusals.append((work.line_of(("model_name_or_path",)), problem))
                return None
            return range(max(0, total - count), total)
    work.refuse(
        "finetuning_type",
        f": freeze trains the last {count} layers, and {name} is no folder that says how many layers there are.",
        "Download the model, and name its folder in model_name_or_path.",
    )
    return None


def _without_experts(work: Import, targets: list[Any]) -> list[Any]:
    """Return the targets that are layers; weights of experts become parameters."""
    experts = [name for name in targets if "experts." in str(name) and str(name).rpartition(".")[2] in EXPERT_WEIGHTS]
    if not experts:
        return targets
    work.data.setdefault("lora_target_parameters", experts)
    work.trace(work.path_of("lora_target_modules"), "method.lora_target_modules", "method.lora_target_parameters")
    work.data["lora_target_modules"] = [name for name in targets if name not in experts]
    return work.data["lora_target_modules"]


def _convert_targets(work: Import) -> None:
    """Convert the layers of an adapter. One string is a regular expression, as in PEFT; experts are parameters."""
    data = work.data
    targets = data.get("lora_target_modules")
    if data.get("lora_target_linear") is True and targets and targets != "all-linear":
        work.leave(("lora_target_modules",), "lora_target_linear adapts every linear layer")
        targets = None
    if isinstance(targets, str) and "," in targets:  # of LLaMA-Factory's new trainer
        data["lora_target_modules"] = targets = _listed(targets)
    named = next((name for name in LAYER_NUMBERS if name in data), "")
    layers = data.get(named)
    layers = [layers] if type(layers) is int else layers
    if isinstance(targets, list) and len(targets) == 1 and targets[0] == "all-linear":
        data["lora_target_modules"] = targets = "all-linear"
    if not isinstance(targets, list):
        return
    targets = _without_experts(work, targets)
    if isinstance(layers, list) and layers:
        names = "|".join(re.escape(str(target)) for target in targets)
        numbers = "|".join(map(str, layers))
        data["lora_target_modules"] = rf".*\.({numbers})\.(?:.*\.)?({names})"
        for name in (named, "peft_layers_pattern", "layers_pattern"):
            work.take(name, "method.lora_target_modules")


def _listed(value: Any) -> list[str]:
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]
