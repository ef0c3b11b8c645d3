"""Fine-tuning methods of other tools: adapters and their targets, quantised models, and training of some layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ligertune.checked_files import read_json_value
from ligertune.errors import UserError
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.peers import LLAMA_FACTORY

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj", "up_proj", "gate_proj")
MAX_LAYERS = 4096  # as in the sizes of a configuration
_WRITE_IT = "Write a recipe with method.type: freeze and method.trainable, a list of regular expressions."


def convert_method(work: Import) -> None:
    """Convert keys that choose which weights train, and in which precision the others are."""
    data = work.data
    adapts = data.get("adapter") or data.get("use_peft") or data.get("finetuning_type", _default_type(work)) == "lora"
    four_bit = "load_in_4bit" if data.pop("load_in_4bit", None) is True else None
    four_bit = "quantization_bit" if data.get("quantization_bit") == 4 else four_bit
    if data.get("quantization_bit") == 8:
        work.put("method.load_in_8bit", True, "quantization_bit")
        del data["quantization_bit"]
    if four_bit and adapts:
        data.pop("quantization_bit", None)
        for name in ("use_peft", "finetuning_type", "adapter"):
            data.pop(name, None)
        work.put("method.type", "qlora", four_bit)
    if data.get("unfrozen_parameters"):
        _convert_unfrozen(work)
    if data.get("finetuning_type") == "freeze":
        _convert_freeze(work)
    _convert_targets(work)
    if isinstance(data.get("lr_groups"), list):
        data["lr_groups"] = [_lr_group(item) for item in data["lr_groups"]]


def _lr_group(item: Any) -> Any:
    """Convert one item of Axolotl's `lr_groups`: names of modules, and their learning rate."""
    if not isinstance(item, dict) or "modules" not in item:
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
            raise work.refusal("unfrozen_parameters", f": {pattern} trains some rows of a weight.", _WRITE_IT)
    if data.get("adapter"):
        work.leave(("unfrozen_parameters",), "an adapter trains; name whole layers in method.lora_modules_to_save")
        return
    data["adapter"] = "freeze"
    # Axolotl matches the beginning of a name
    data["unfrozen_parameters"] = [str(p) if str(p).startswith("^") else f"^(?:{p})" for p in patterns]


def _convert_freeze(work: Import) -> None:
    """Make LLaMA-Factory's `finetuning_type: freeze` a list of expressions for the layers that train."""
    data = work.data
    count = data.pop("freeze_trainable_layers", 2)
    if not isinstance(count, int):
        raise work.refusal("freeze_trainable_layers", f": {count} is not a number of layers.", _WRITE_IT)
    modules = _listed(data.pop("freeze_trainable_modules", "all"))
    extra = _listed(data.pop("freeze_extra_modules", ""))
    indices = range(-count) if count < 0 else _last_layers(work, count)
    numbers = "|".join(map(str, indices))
    inside = "" if modules == ["all"] else f"({'|'.join(modules)})"
    rows = [rf"\.(?:layers|h|blocks)\.({numbers})\.{inside}", *(rf"(?:^|\.){name}\." for name in extra)]
    work.put("method.trainable", rows, "finetuning_type")


def _last_layers(work: Import, count: int) -> range:
    """Return the indices of the last layers. Raises UserError if the model's configuration is not at hand."""
    name = str(work.data.get("model_name_or_path", ""))
    for folder in (work.folder / name, Path(name)):
        path = folder / "config.json"
        if path.is_file():
            try:
                config = read_json_value(path)
                total = config.get("text_config", config)["num_hidden_layers"]
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
                raise UserError(f"{path} does not hold the number of layers: {problem!r}.") from None
            if type(total) is not int or not 0 < total <= MAX_LAYERS:
                raise UserError(f"{path}: num_hidden_layers must be a whole number from 1 to {MAX_LAYERS}.")
            return range(max(0, total - count), total)
    raise work.refusal(
        "finetuning_type",
        f": freeze trains the last {count} layers, and {name} is no folder that says how many layers there are.",
        "Download the model and name its folder, or " + _WRITE_IT[0].lower() + _WRITE_IT[1:],
    )


def _convert_targets(work: Import) -> None:
    """Convert the layers of an adapter. One string is a regular expression, as in PEFT; experts are parameters."""
    data = work.data
    targets = data.get("lora_target_modules")
    if data.get("lora_target_linear") is True and targets and targets != "all-linear":
        work.leave(("lora_target_modules",), "lora_target_linear adapts every linear layer")
        targets = None
    layers = data.get("peft_layers_to_transform", data.get("lora_layers_to_transform"))
    if isinstance(targets, list) and len(targets) == 1 and targets[0] == "all-linear":
        data["lora_target_modules"] = targets = "all-linear"
    if not isinstance(targets, list):
        return
    experts = [name for name in targets if "experts." in str(name) and str(name).rpartition(".")[2] in EXPERT_WEIGHTS]
    if experts:
        data.setdefault("lora_target_parameters", experts)
        data["lora_target_modules"] = targets = [name for name in targets if name not in experts]
    if isinstance(layers, list) and layers:
        names, numbers = "|".join(map(str, targets)), "|".join(map(str, layers))
        data["lora_target_modules"] = rf".*\.({numbers})\.(?:.*\.)?({names})"
        for name in ("peft_layers_to_transform", "lora_layers_to_transform", "peft_layers_pattern"):
            data.pop(name, None)


def _listed(value: Any) -> list[str]:
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]
