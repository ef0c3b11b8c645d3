"""Fine-tuning methods of other tools: adapters and their targets, quantised models, and training of some layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.files.checked_files import read_json_value
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.import_tables import LLAMA_FACTORY, Reason, split_names

# weights of experts are parameters of one module: PEFT cannot name them as layers
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj", "up_proj", "gate_proj")
MAX_LAYERS = 4096  # as in the sizes of a configuration
# of Axolotl (twice) and of PEFT
LAYER_NUMBERS = ("peft_layers_to_transform", "lora_layers_to_transform", "layers_to_transform")
WRITE_IT = "Write a recipe with method.type: freeze and method.trainable, a list of regular expressions."


def convert_method(work: Import) -> None:
    """Convert keys that choose which weights train, and in which precision the others are."""
    data = work.data
    default_type = "lora" if work.peer is LLAMA_FACTORY else "full"
    adapts = data.get("adapter") or data.get("use_peft") or data.get("finetuning_type", default_type) == "lora"
    # first: it removes the keys that say so
    _convert_quantised(work, bool(adapts))
    if data.get("unfrozen_parameters"):
        _convert_unfrozen(work)
    if data.get("finetuning_type") == "freeze":
        _convert_freeze(work)
    _convert_targets(work)
    if isinstance(data.get("lr_groups"), list):
        data["lr_groups"] = [_lr_group(work, index, item) for index, item in enumerate(data["lr_groups"])]
    elif adapts and "lr_groups" not in data:
        _convert_embedding_rate(work)


def _convert_quantised(work: Import, adapts: bool) -> None:
    """Convert a model in 8 bits, and one in 4 bits with an adapter: `method.type: qlora`."""
    data = work.data
    in_four_bits = work.take("load_in_4bit", "method.type") is True
    if data.get("quantization_bit") == 8:
        work.put("method.load_in_8bit", True, "quantization_bit")
        del data["quantization_bit"]
    # LLaMA-Factory's name of both
    in_four_bits = in_four_bits or data.get("quantization_bit") == 4
    if in_four_bits and adapts:
        for name in ("quantization_bit", "use_peft", "finetuning_type", "adapter"):
            work.take(name, "method.type")
        work.document.put(("method", "type"), "qlora", work.document.place(("load_in_4bit",)))
    elif in_four_bits:
        # weights of 4 bits cannot be trained themselves
        name = "quantization_bit" if "quantization_bit" in data else "load_in_4bit"
        work.lose(work.path_of(name), Reason("without an adapter all weights train, unquantised"))
        data.pop("quantization_bit", None)


def _convert_embedding_rate(work: Import) -> None:
    """Convert Axolotl's learning rate of an embedding that trains next to an adapter."""
    data = work.data
    # an embedding trains next to an adapter only if it is saved whole; elsewhere the key is reported
    saved = str(data.get("lora_modules_to_save", ""))
    if "embed_tokens" not in saved and "lm_head" not in saved:
        return
    for name in ("embedding_lr", "embedding_lr_scale"):
        rate = data.get(name)
        scale = data.get("learning_rate") if name == "embedding_lr_scale" else 1.0
        # Axolotl multiplies embedding_lr_scale by the learning rate
        if isinstance(rate, float) and isinstance(scale, float):
            group = {"parameters": r"(?:embed_tokens|lm_head)\.", "learning_rate": rate * scale}
            work.put("train.lr_groups", [group], name)
            del data[name]


def _lr_group(work: Import, index: int, item: Any) -> Any:
    """Convert one item of Axolotl's `lr_groups`: names of modules, and their learning rate."""
    # a name of the group, or its modules: expressions for parameters
    our_names = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    for name in item if isinstance(item, dict) else ():
        work.trace(("lr_groups", index, name), f"train.lr_groups[{index}].{our_names.get(name, 'parameters')}")
    if not isinstance(item, dict) or not isinstance(item.get("modules"), list):
        return item
    names = "|".join(re.escape(str(name)) for name in item["modules"])
    return {"parameters": names, "learning_rate": item.get("lr")}


def _convert_unfrozen(work: Import) -> None:
    """Make `unfrozen_parameters` of Axolotl `method.type: freeze`, if no adapter trains instead."""
    data = work.data
    given = data["unfrozen_parameters"]
    patterns = [str(pattern) for pattern in (given if isinstance(given, list) else [given])]
    for pattern in patterns:
        if pattern.rstrip().endswith("]") and ":" in pattern.rpartition("[")[2]:  # rows [:32000] of a weight
            work.refuse("unfrozen_parameters", f": {pattern} trains some rows of a weight.", WRITE_IT)
            work.take("unfrozen_parameters", "method.trainable")
            return
    if data.get("adapter"):
        why = "an adapter trains; name whole layers in method.lora_modules_to_save"
        work.leave(("unfrozen_parameters",), Reason(why))
        return
    work.trace(("unfrozen_parameters",), "method.trainable")
    work.document.put(("method", "type"), "freeze", work.document.place(("unfrozen_parameters",)))
    # Axolotl matches the beginning of a name
    data["unfrozen_parameters"] = [text if text.startswith("^") else f"^(?:{text})" for text in patterns]


def _convert_freeze(work: Import) -> None:
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
    paths = [folder / "config.json" for folder in (work.folder / name, Path(name))]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        what = f": freeze trains the last {count} layers, and {name} is no folder that says how many layers there are."
        work.refuse("finetuning_type", what, "Download the model, and name its folder in model_name_or_path.")
        return None
    try:
        config = read_json_value(path)
        # a multimodal model has the layers of its language model in a section
        total = config.get("text_config", config)["num_hidden_layers"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        problem = UserError(f"{path} does not hold the number of layers: {error!r}.")
    else:
        if type(total) is int and 0 < total <= MAX_LAYERS:
            return range(max(0, total - count), total)
        problem = UserError(f"{path}: num_hidden_layers must be a whole number from 1 to {MAX_LAYERS}.")
    work.refusals.append((work.line_of(("model_name_or_path",)), problem))
    return None


def _without_experts(work: Import, targets: list[Any]) -> list[Any]:
    """Return the targets that are layers; weights of experts become parameters."""
    experts = [name for name in targets if "experts." in str(name) and str(name).rpartition(".")[2] in EXPERT_WEIGHTS]
    if experts:
        work.data.setdefault("lora_target_parameters", experts)
        work.trace(work.path_of("lora_target_modules"), "method.lora_target_modules", "method.lora_target_parameters")
    return [name for name in targets if name not in experts]


def _convert_targets(work: Import) -> None:
    """Convert the layers of an adapter. One string is a regular expression, as in PEFT; experts are parameters."""
    data = work.data
    targets = data.get("lora_target_modules")
    if data.get("lora_target_linear") is True and targets and targets != "all-linear":
        work.leave(("lora_target_modules",), Reason("lora_target_linear adapts every linear layer"))
        return
    if isinstance(targets, str) and "," in targets:  # of LLaMA-Factory's new trainer
        targets = _listed(targets)
    if targets == ["all-linear"]:
        targets = "all-linear"
    if not isinstance(targets, list):
        if targets is not None:
            data["lora_target_modules"] = targets
        return
    targets = data["lora_target_modules"] = _without_experts(work, targets)
    named = next((name for name in LAYER_NUMBERS if name in data), "")
    layers = data.get(named)
    layers = [layers] if type(layers) is int else layers
    # a recipe has no key for the numbers: one expression names layers and modules
    if isinstance(layers, list) and layers:
        names = "|".join(re.escape(str(target)) for target in targets)
        numbers = "|".join(map(str, layers))
        data["lora_target_modules"] = rf".*\.({numbers})\.(?:.*\.)?({names})"
        for name in (named, "peft_layers_pattern", "layers_pattern"):
            work.take(name, "method.lora_target_modules")


def _listed(value: Any) -> list[str]:
    return [name for name in split_names(value) if name]
