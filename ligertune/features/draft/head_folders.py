"""Folders of draft heads, found by their config.json, and the message for one that is given as a model."""

from __future__ import annotations

from pathlib import Path

from ligertune.files.hub import MODEL_FILES
from ligertune.files.storage import read_object

LAYOUTS = ("eagle3", "speculators")


def draft_folders(folder: Path) -> list[Path]:
    """Return the folders that hold a head: this one, or the layouts in it, or in draft/ of a run without a model."""
    places = [folder, *(folder / layout for layout in LAYOUTS)]
    if not (folder / "model").is_dir():
        places += [folder / "draft" / layout for layout in LAYOUTS]
    return [place for place in places if _holds_head(place)]


def head_without_model(folder: Path) -> tuple[str, str] | None:
    """Return (what the folder holds, what to write) if it holds a draft head and no model; None for others."""
    heads = draft_folders(folder)
    # a head's own config.json is no model's, though transformers would load it as a Llama with random weights
    has_model = folder not in heads and any((folder / name).is_file() for name in MODEL_FILES)
    if not heads or has_model:
        return None
    return "a draft head", f"Give the model that it drafts for: ligertune generate MODEL --draft {folder}"


def _holds_head(folder: Path) -> bool:
    config = read_object(folder / "config.json") or {}
    is_raw = config.get("architectures") == ["LlamaForCausalLMEagle3"]
    return is_raw or config.get("speculators_model_type") == "eagle3"
