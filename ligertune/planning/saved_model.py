"""Saved models: find the model that a name on the command line means, before torch is imported.

`generate`, `chat` and `export` accept the folder of a run, of a model or of an adapter; `export` also a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ligertune.errors import UserError, message_of
from ligertune.files.base_model import STORED_AS, TrainedBase
from ligertune.files.hub import MODEL_FILES, check_hub_model
from ligertune.files.storage import PROGRESS_FILE, PROMPT_FILE, newest_checkpoint, read_object
from ligertune.planning.options import RunOptions
from ligertune.planning.preflight import looks_local
from ligertune.recipe.feature import TrainedFolder, feature_parts
from ligertune.recipe.read import load_recipe
from ligertune.recipe.section import path_fault

_HINT = "Name the folder of a run, of a model or of an adapter"


@dataclass(frozen=True)
class SavedModel:
    """A model, an adapter or a checkpoint, and the run that wrote it."""

    name: str  # its folder, or a hub id
    run: Path | None = None  # output_dir of the run
    is_checkpoint: bool = False


def find_saved_model(name: str, *, key: str) -> SavedModel:
    """Return the model that `name` means; a name that is no folder here and looks like none is a hub id.

    key: the argument that messages name. Raises UserError.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and not looks_local(name):
        return SavedModel(name)
    if not folder.is_dir():
        what = f"{name} is a file" if folder.exists() else f"there is no folder {name}"
        raise UserError(f"{key}: {what}.", hint=f"{_HINT}, or a hub id such as Qwen/Qwen2.5-0.5B.")
    if (folder / PROGRESS_FILE).is_file():
        return SavedModel(str(folder), _above(folder, 2), is_checkpoint=True)
    for part in feature_parts():
        if (found := part.not_a_model(folder)) is not None:
            raise UserError(f"{key}: {name} holds {found[0]}.", hint=found[1])
    for place in (folder, folder / "model"):
        if _trained_folder(place) is not None:
            break
        if any((place / file).is_file() for file in MODEL_FILES):
            run = _above(place, 1)
            return SavedModel(str(place), run if (run / "plan.json").is_file() else None)
    raise UserError(f"{key}: {_what_is_missing(name, folder)}", hint=_what_to_do(name, folder))


def trained_base(folder: Path, run: Path | None = None) -> TrainedBase | None:
    """Return the base that a saved model, adapter or checkpoint was trained on; None if it is not known.

    run: output_dir of its run; None: `folder`, or the folder above it. Of a run of an earlier version, plan.json has
    the dtype only. Raises UserError for a damaged record.
    """
    places = [(folder / PROMPT_FILE, "base"), *((place / "plan.json", "base") for place in _runs(folder, run))]
    for path, key in places:
        found = (read_object(path) or {}).get(key)
        if found is not None:
            return _checked_base(found, path)
    for place in _runs(folder, run):
        precision = (read_object(place / "plan.json") or {}).get("precision")
        if isinstance(precision, dict) and precision.get("weights") in _DTYPES:
            return TrainedBase(name="", dtype=precision["weights"])
    return None


_DTYPES = ("float32", "bfloat16", "float16")
_ROPE = "rope_parameters"


def _runs(folder: Path, run: Path | None) -> tuple[Path, ...]:
    return (folder, folder.parent) if run is None else (run,)


def _checked_base(found: Any, path: Path) -> TrainedBase:
    is_right = (
        isinstance(found, dict)
        and found.get("dtype") in _DTYPES
        and found.get("stored_as") in (None, *STORED_AS)
        and isinstance(found.get("name"), str)
        and isinstance(found.get(_ROPE), dict | None)
        and all(isinstance(found.get(field.name), str | None) for field in fields(TrainedBase) if field.name != _ROPE)
    )
    if not is_right:
        raise UserError(
            f"{path}: base does not describe how the base model was trained (name, dtype, revision, fingerprint).",
            hint="Restore the file, or remove the key `base` from it: the base is then loaded in its own dtype.",
        )
    return TrainedBase(
        name=found["name"],
        dtype=found["dtype"],
        stored_as=found.get("stored_as"),
        quantization=found.get("quantization"),
        revision=found.get("revision"),
        fingerprint=found.get("fingerprint"),
        rope_parameters=found.get(_ROPE),
        residual_of=found.get("residual_of"),
    )


def _above(folder: Path, levels: int) -> Path:
    """Return the folder so many levels above, as a relative path if the given path allows it."""
    is_enough = len(folder.parents) >= levels and ".." not in folder.parts
    return (folder if is_enough else folder.resolve()).parents[levels - 1]


def check_can_generate(saved: SavedModel, *, key: str) -> None:
    """Raise UserError for a checkpoint, and for a hub id that is neither in the cache nor on a hub in reach."""
    folder = Path(saved.name).expanduser()
    if saved.is_checkpoint:
        raise UserError(
            f"{key}: {saved.name} is a checkpoint, not a model.",
            hint=f"Make a model of it: ligertune export {saved.name} --out {folder.name}",
        )
    if not folder.exists():
        _check_hub_id(saved.name, key=key)
    check_base_model(folder, key=key)


def check_base_model(folder: Path, *, key: str) -> None:
    """Raise UserError for an adapter whose base model is a hub id that is neither in the cache nor in reach."""
    try:
        values = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # no adapter, or damaged: the code that loads it says so
        return
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    is_whole = (folder / "config.json").exists()
    if not isinstance(base, str) or path_fault(base) is not None:  # the code that loads it says so, too
        return
    if base and not (is_whole or looks_local(base) or Path(base).exists()):
        check_hub_model(base, key=f"{key}: base model of {folder}")


def _trained_folder(folder: Path, *, below: bool = False) -> TrainedFolder | None:
    """Return the trained parts of a feature that a folder holds. below: or one of its folders."""
    for found in (found for part in feature_parts() for found in part.folders):
        places = (folder, folder / found.name) if below else (folder,)
        if any((place / found.files[-1]).is_file() for place in places):
            return found
    return None


def _what_is_missing(name: str, folder: Path) -> str:
    if newest_checkpoint(folder):
        return f"{name} holds checkpoints of a run, and no finished model."
    if (found := _trained_folder(folder, below=True)) is not None:
        return f"{name} holds {found.title}."
    if (folder / "plan.json").is_file():
        return f"{name} holds a run without a finished model or a complete checkpoint."
    return f"{name} holds no config.json, so it is not a model."


def _what_to_do(name: str, folder: Path) -> str:
    if newest_checkpoint(folder):
        return f"Make a model of one: ligertune export {name} --checkpoint newest --out {Path(name) / 'exported'}"
    if (found := _trained_folder(folder, below=True)) is not None:
        return found.use
    return f"{_HINT}."


def _check_hub_id(name: str, *, key: str) -> None:
    """Raise UserError for a hub id that is neither in the cache nor on a hub in reach."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    hint = f"{_HINT}, or check the spelling, the network and the login (`hf auth login`)."
    check_hub_model(name, key=key, hint=hint)
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in MODEL_FILES):
            return
        HfApi().model_info(name, timeout=10)
    except (HTTPError, OSError, HFValidationError) as problem:
        raise UserError(
            f"{key}: {name} is not a folder here, and the hub could not be reached or has no such model"
            f" ({message_of(problem).rstrip('.')}).",
            hint=hint,
        ) from problem


def saved_options(folder: Path) -> RunOptions | None:
    """Return the options of the run in `folder`, or of the run with this `model` folder; None without a recipe."""
    for place in (folder, folder.parent):
        recipe = place / "resolved_recipe.yaml"
        if recipe.is_file():
            state = recipe.stat()
            return _options_of(recipe, Path.cwd(), state.st_mtime_ns, state.st_size)
    return None


@lru_cache(maxsize=4)
def _options_of(recipe: Path, here: Path, changed: int, size: int) -> RunOptions:
    """Return the options of a recipe; the others identify its content. Parsing takes 0.05 s, an export asks 8 times."""
    return RunOptions.of(load_recipe(recipe))
