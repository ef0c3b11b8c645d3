"""What identifies the initial weights of a run's model, for files that hold what was computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ligertune.files.model_files import ENDINGS, digest_of, hub_snapshot
from ligertune.planning.options import BuildOptions


def model_identity(build: BuildOptions) -> list[Any]:
    """Return what identifies the initial weights: samples of the files or a commit, and the seed of random weights."""
    model = build.model
    folder = Path(model.model_name_or_path).expanduser()
    seed = build.seed if model.init == "random" else None
    changed: list[Any] = [model.num_hidden_layers, seed]
    if rope := model.rope_parameters.model_dump(exclude_none=True):
        changed.append(rope)
    if not folder.is_dir():
        snapshot = hub_snapshot(model.model_name_or_path, model.revision)
        return [model.model_name_or_path, snapshot and snapshot.name, *changed]
    endings = (".json",) if seed is not None else (".json", *ENDINGS)
    return [files_identity(folder, endings), *changed]


def files_identity(folder: Path, endings: Sequence[str] = (".json", *ENDINGS)) -> list[tuple[str, Any]]:
    """Return names and samples of the files in a folder that have these endings."""
    files = sorted(file for file in folder.iterdir() if file.suffix in endings and file.is_file())
    return [(file.name, digest_of(file)) for file in files]
