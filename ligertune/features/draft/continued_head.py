"""`ligertune draft RECIPE --from RUN`: the recipe keys that continue a head on the fine-tuned model of a run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.features.draft.recipe import DraftSpec
from ligertune.files.storage import PROMPT_FILE
from ligertune.planning.saved_model import SavedModel, check_can_generate, find_saved_model

if TYPE_CHECKING:
    from ligertune.recipe.schema import Recipe

LAYOUTS = ("eagle3", "speculators")
NEEDS_RUN = "Name a run of `ligertune train`, or its model or adapter."


@dataclass(frozen=True)
class ContinuedHead:
    """Where model, head and output of a continued head are."""

    model: str
    head: str
    output_dir: str

    def overrides(self) -> list[str]:
        """Return recipe keys and values, as `--set` takes them."""
        values = {
            "model.model_name_or_path": os.path.abspath(self.model),  # a name is first looked for next to the recipe
            "draft.adapter_path": None,  # that of the recipe's own model
            "draft.head_path": os.path.abspath(self.head),
            "checkpoint.output_dir": self.output_dir,
        }
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def __str__(self) -> str:
        return f"--from: the target is {self.model}, the head to start from {self.head}, the output {self.output_dir}"


def continue_head(recipe: Recipe, run: Path, *, output_dir: str | None) -> ContinuedHead:
    """Return where the head of `recipe` is continued on the model of `run`.

    The head is draft.head_path, or that in the recipe's output_dir. output_dir: null for the recipe's with the name of
    the run. Raises UserError if there is no run or no head, or if the output would replace the head.
    """
    saved = _fine_tuned(run)
    base = recipe.checkpoint.output_dir
    named = recipe.section(DraftSpec).head_path
    head = named or base
    if not any(holds_layout(place) for place in (Path(head).expanduser(), Path(head).expanduser() / "draft")):
        where = f"draft.head_path, {head}," if named else f"the recipe's output_dir, {head},"
        raise UserError(
            f"--from: {where} holds no draft head to start from.",
            hint="Train the head of the base first, or name one with --head.",
        )
    name = (saved.run or Path(saved.name)).resolve().name
    found = ContinuedHead(saved.name, head, output_dir or f"{base.rstrip('/')}-{name}")
    if Path(found.output_dir).resolve() in (Path(head).resolve(), *Path(head).resolve().parents):
        raise UserError(
            f"--from: checkpoint.output_dir: {found.output_dir} holds the head to start from.",
            hint="Name another output_dir.",
        )
    return found


def holds_layout(folder: Path) -> bool:
    """Return whether a folder holds a head: its own files, or a folder of one layout."""
    return any((place / "config.json").is_file() for place in (folder, *(folder / layout for layout in LAYOUTS)))


def _fine_tuned(run: Path) -> SavedModel:
    if not run.is_dir():
        raise UserError(f"--from: {run} is no folder.", hint=NEEDS_RUN)
    saved = find_saved_model(str(run), key="--from")
    check_can_generate(saved, key="--from")
    is_written_here = saved.run is not None or (Path(saved.name) / PROMPT_FILE).is_file()
    if not is_written_here:
        raise UserError(f"--from: {run} is not a run: it has no plan.json and no {PROMPT_FILE}.", hint=NEEDS_RUN)
    return saved
