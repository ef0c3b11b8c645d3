"""Targets that are folders of runs or adapters: the model, or the base and the adapter, that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ligertune.errors import UserError
from ligertune.files.hub import MODEL_FILES, TOKENIZER_FILES
from ligertune.files.storage import read_object

if TYPE_CHECKING:
    from ligertune.planning.options import ModelOptions

ADAPTER_CONFIG = "adapter_config.json"


class FoundTarget(NamedTuple):
    """The model that a name stands for. adapter: its folder, if it is one. notice: what was replaced, or empty."""

    model: ModelOptions
    adapter: str | None = None
    notice: str = ""


def resolve_target(model: ModelOptions) -> FoundTarget:
    """Return the model of a run, or the base of an adapter with the tokenizer that is saved next to it.

    Other models stay as they are. Raises UserError for an adapter that does not name its base.
    """
    name = model.model_name_or_path
    given = Path(name).expanduser()
    folder = next((place for place in (given, given / "model") if _holds_model(place)), None)
    if folder is None:
        return FoundTarget(model)
    if not (folder / "config.json").is_file():
        return _base_of(model, folder)
    if folder == given:
        return FoundTarget(model)
    changed = model.model_copy(update={"model_name_or_path": str(folder)})
    return FoundTarget(changed, notice=f"the model is that of the run {name}: {folder}")


def _base_of(model: ModelOptions, adapter: Path) -> FoundTarget:
    from ligertune.planning.saved_model import trained_base  # it reads recipes, which import this module

    values = read_object(adapter / ADAPTER_CONFIG) or {}
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise UserError(
            f"model.model_name_or_path: {adapter} does not name the model that its adapter belongs to "
            "(base_model_name_or_path)."
        )
    record = trained_base(adapter)
    changes: dict[str, Any] = {"model_name_or_path": base}
    revision = (record and record.revision) or values.get("revision")
    if isinstance(revision, str):
        changes["revision"] = revision
    if record is not None and record.rope_parameters:
        changes["rope_parameters"] = model.rope_parameters.model_copy(update=record.rope_parameters)
    has_tokenizer = any((adapter / file).is_file() for file in TOKENIZER_FILES)
    if has_tokenizer and model.tokenizer.path is None:
        changes["tokenizer"] = model.tokenizer.model_copy(update={"path": str(adapter)})
    notice = f"the model is {base} with the adapter in {adapter}"
    return FoundTarget(model.model_copy(update=changes), str(adapter), notice)


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)
