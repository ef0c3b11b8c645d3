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
    peft = nested(data.get("peft_config"))
    work.hoist("peft_config", ("name", "finetuning_type"), *((name, _PEFT.get(name, name)) for name in list(peft)))
    data.setdefault("finetuning_type", "full")
    work.hoist("quant_config", ("quantization_bit", "quantization_bit"))
    dist = nested(data.get("dist_config"))
    if "fsdp" in str(dist.get("name")):
        work.hoist("dist_config", ("name", "fsdp"))
    elif dist.get("name") == "deepspeed":
        work.hoist("dist_config", ("config_file", "deepspeed"), ("name", "deepspeed"))
        work.trace(("dist_config",), "parallel.strategy")
        data.pop("dist_config", None)
    for name, key in (("train_dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        if given := work.take(name, f"data.{key}"):
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
