"""Files of LLaMA-Factory's new trainer (v1), as keys of its other files: sections become flat keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.objectives import nested
from ligertune.recipe.read import read_document

SIGNS = ("train_dataset", "peft_config", "dist_config", "quant_config", "kernel_config")
_PEFT = {"r": "lora_rank", "target_modules": "lora_target", "modules_to_save": "additional_target"}


def is_v1(data: dict[str, Any]) -> bool:
    """Report whether a file is of the new trainer."""
    return any(name in data for name in SIGNS)


def flatten_v1(work: Import) -> None:
    """Replace the sections of the new trainer by the keys of LLaMA-Factory's other files."""
    data = work.data
    peft = dict(nested(data.pop("peft_config", None)))
    data["finetuning_type"] = peft.pop("name", "full")
    data |= {_PEFT.get(name, name): value for name, value in peft.items()}
    quant = nested(data.pop("quant_config", None))
    if quant.get("quantization_bit"):
        data["quantization_bit"] = quant["quantization_bit"]
    dist = nested(data.pop("dist_config", None))
    if "fsdp" in str(dist.get("name")):
        data["fsdp"] = dist["name"]
    elif dist.get("name") == "deepspeed":
        data["deepspeed"] = dist.get("config_file", "deepspeed")
    for name in ("init_config", "kernel_config"):
        data.pop(name, None)
    for name, key in (("train_dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        if given := data.pop(name, None):
            work.put(f"data.{key}", _datasets(given, work.folder), name)


def _datasets(given: Any, folder: Path) -> list[Any]:
    """Return the data sets of a YAML file that describes them, or the one that `given` is itself."""
    path = folder / str(given)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return [{"path": given}]
    formats = {"alpaca": "alpaca", "sharegpt": "sharegpt"}
    names = {"path": "path", "hf_hub_url": "path", "split": "split", "size": "max_samples", "weight": "weight"}
    items = []
    for entry in read_document(path).data.values():
        item = {names[name]: value for name, value in nested(entry).items() if name in names and value is not None}
        kind = formats.get(str(nested(entry).get("converter")))
        items.append(item | ({"format": kind} if kind else {}))
    return items
