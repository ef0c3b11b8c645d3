"""A folder that holds an adapter as peft saves it, and which model that belongs to."""

from __future__ import annotations

import json
from pathlib import Path

from ligertune.errors import UserError

ADAPTER = "adapter_config.json"


def base_of(folder: Path) -> str:
    """The folder or hub id of the model that the adapter was made for; a UserError where it is not said."""
    base = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base is None:
        raise UserError(f"{folder} does not name the model that its adapter belongs to (base_model_name_or_path).")
    return base
