"""Checks before torch is imported: output folder, local paths, the hub, optional packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from ligertune.errors import UserError, pip_install
from ligertune.files.hub import TOKENIZER_FILES, check_hub_dataset, check_hub_model
from ligertune.files.storage import (
    check_replaceable,
    damaged_lines,
    name_kind,
    newest_checkpoint,
    read_metrics,
    write_text,
)
from ligertune.recipe.feature import TrainedFolder, feature_parts
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.schema import Recipe
from ligertune.recipe.section import EXACT_MATCH, TASK_FILES
from ligertune.recipe.train_sections import CheckpointSpec

# Files that a run writes into output_dir. --overwrite removes these and nothing else.
RUN_FILES = (
    "plan.json", "report.json", "metrics.jsonl", "resolved_recipe.yaml", "checkpoints", "model", "best", "profile",
    "trackers", "curves.png", "report.html", "ranks", "evaluations",
    *(name for part in feature_parts() for name in part.run_files),
)  # fmt: skip

MADE_BEFORE_TRAINING = (
    "plan.json",
    "resolved_recipe.yaml",
    "metrics.jsonl",
    "checkpoints",
    "profile",
    "trackers",
    "ranks",
    *(name for part in feature_parts() for name in part.before_training),
)

WRITTEN_WHOLE = ("model", "best")  # folders that are written under another name, and renamed


def check_output_dir(section: CheckpointSpec) -> None:
    """Raise UserError if output_dir holds a run that is neither resumed nor overwritten, or none to be resumed."""
    folder = Path(section.output_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UserError(f"checkpoint.output_dir: {existing} is {name_kind(existing)}.", hint="Name a folder.")
    if not section.overwrite:
        check_run_files(folder)
    held = [name for name in RUN_FILES if (folder / name).exists()] if has_trained(folder) else []
    if held and section.resume_from_checkpoint == "never" and not section.overwrite:
        raise UserError(
            f"checkpoint.output_dir: {folder} already holds a run ({', '.join(held)}).",
            hint="Continue it with --resume, replace it with --overwrite, or name another folder.",
        )
    reported = (folder / "report.json").exists()  # a finished run may have no checkpoint; check_unfinished refuses it
    if section.resume_from_checkpoint == "newest" and not reported and newest_checkpoint(folder) is None:
        raise no_checkpoint(folder)


def check_run_files(folder: Path) -> None:
    """Raise UserError if something in output_dir is in the way of a file or folder of the run.

    Links to files, and to the folders that are written whole, are replaced when their time comes. Links to the other
    folders are refused: a run writes into these.
    """
    for name in RUN_FILES:
        path = folder / name
        if not os.path.lexists(path):
            continue
        if "." in name:
            check_replaceable(path)
        elif not path.is_dir() or (path.is_symlink() and name not in WRITTEN_WHOLE):
            raise UserError(
                f"checkpoint.output_dir: {path} is {name_kind(path)}, and the run writes a folder there.",
                hint="Remove it, or name another output_dir.",
            )


def _logs_steps(path: Path) -> bool:
    """Return whether metrics.jsonl holds more than the evaluation before the first step (eval.eval_on_start)."""
    lines = read_metrics(path)
    if not lines or damaged_lines(path):
        return path.stat().st_size > 0
    return any(line["step"] > 0 or "loss_before_training" in line for line in lines)


def has_trained(folder: Path) -> bool:
    """Return whether a folder holds at least one trained step. Without one there is nothing to lose or to continue."""
    logged = folder / "metrics.jsonl"
    if any((folder / "checkpoints").glob("step-*")) or (logged.is_file() and _logs_steps(logged)):
        return True
    return any((folder / name).exists() for name in RUN_FILES if name not in MADE_BEFORE_TRAINING)


def no_checkpoint(folder: Path) -> UserError:
    """Return the error of a run that is to be resumed without a checkpoint."""
    return UserError(
        f"--resume: {folder} holds no complete checkpoint to continue from.",
        hint="Start the run with `--resume auto`, which continues from a checkpoint if there is one.",
    )


def check_packages(recipe: Recipe) -> None:
    """Raise UserError if a setting needs a package that is not installed."""
    wanted = {"train.optim": (recipe.train.optim, OPTIMIZERS[recipe.train.optim].needs)}
    wanted |= {"method.type": ("qlora", "bitsandbytes")} if recipe.method.type == "qlora" else {}
    wanted |= {"method.load_in_8bit": ("true", "bitsandbytes")} if recipe.method.load_in_8bit else {}
    for part in feature_parts():
        wanted |= {key: ("true", name) for key, name in part.packages.items() if attrgetter(key)(recipe)}
    wanted |= {"train.fp8": ("torchao", "torchao")} if recipe.train.fp8 == "torchao" else {}
    if recipe.parallel.strategy.startswith("deepspeed"):
        wanted["parallel.strategy"] = (recipe.parallel.strategy, "deepspeed")
    for tracker in recipe.logging.report_to:
        wanted[f"logging.report_to[{tracker}]"] = (tracker, None if tracker == "jsonl" else tracker)
    if recipe.eval.tasks:
        wanted["eval.tasks"] = (", ".join(recipe.eval.tasks), "lm-eval")
    for key, (value, package) in wanted.items():
        if package is not None and find_spec(package.replace("-", "_")) is None:
            raise UserError(
                f"{key.partition('[')[0]}: {value} needs the package {package}, which is not installed.",
                hint=f"Install it: {pip_install(package)}",
            )


def check_paths(recipe: Recipe) -> None:
    """Raise UserError for local paths that do not exist. Other names may be hub ids, which the loaders check."""
    check_model_path(recipe.model.model_name_or_path, key="model.model_name_or_path")
    for key, name in _models_of_features(recipe):
        check_model_path(name, key=key)
    for folder in (folder for part in feature_parts() for folder in part.folders):
        if (path := attrgetter(folder.key)(recipe)) is not None:
            check_trained_folder(folder, path)
    _check_files_of_evaluations(recipe)
    for key, datasets in (("datasets", recipe.data.datasets), ("eval_datasets", recipe.data.eval_datasets)):
        for i, path in enumerate(dataset.path for dataset in datasets):
            if looks_local(path) and not any(c in path for c in "*?[") and not Path(path).exists():
                raise UserError(
                    f"data.{key}[{i}].path: there is no file or folder {path}.",
                    hint="Name a json, jsonl, parquet, csv, txt or md file, a folder of them, or a hub id: "
                    "tatsu-lab/alpaca.",
                )


def _check_files_of_evaluations(recipe: Recipe) -> None:
    """Raise UserError for a file of `eval.metric` or `eval.tasks` that does not exist."""
    named = [("eval.tasks", task) for task in recipe.eval.tasks if task.endswith(TASK_FILES)]
    if recipe.eval.metric not in (None, EXACT_MATCH):
        named.append(("eval.metric", str(recipe.eval.metric).rpartition(":")[0]))
    for key, file in named:
        if not Path(file).is_file():
            raise UserError(f"{key}: there is no file {file}.", hint="Give its path, relative to the recipe.")


def check_sources(recipe: Recipe) -> None:
    """Raise UserError for a model or data set that is neither a path here, nor in the cache, nor on a hub in reach."""
    check_paths(recipe)
    check_hub(recipe)


def check_hub(recipe: Recipe) -> None:
    """Raise UserError if the recipe names a model or data set of the hub that is neither in reach nor in the cache."""
    model = recipe.model
    if is_hub_id(model.model_name_or_path):
        check_hub_model(model.model_name_or_path, key="model.model_name_or_path", revision=model.revision)
    if model.tokenizer.path is not None and is_hub_id(model.tokenizer.path):
        check_hub_model(model.tokenizer.path, key="model.tokenizer.path", files=TOKENIZER_FILES)
    for key, name in _models_of_features(recipe):
        if is_hub_id(name):
            check_hub_model(name, key=key)
    data = recipe.data
    for key, datasets in (("datasets", data.datasets), ("eval_datasets", data.eval_datasets)):
        for i, dataset in enumerate(datasets):
            if is_hub_id(dataset.path) and not any(c in dataset.path for c in "*?["):
                check_hub_dataset(dataset.path, key=f"data.{key}[{i}].path", streaming=data.streaming)


def _models_of_features(recipe: Recipe) -> list[tuple[str, str]]:
    """Return (key, hub id or folder) of the other models that features of the recipe name."""
    named = [(key, attrgetter(key)(recipe)) for part in feature_parts() for key in part.models]
    return [(key, name) for key, name in named if name is not None]


def is_hub_id(name: str) -> bool:
    """Return whether a name that is no file or folder here can be one on the hub."""
    return not looks_local(name) and not Path(name).expanduser().exists()


def check_model_path(name: str, *, key: str) -> None:
    """Raise UserError if a model folder does not exist or holds no model."""
    folder = Path(name).expanduser()
    hint = "Name a folder with config.json and the weights, or a hub id such as Qwen/Qwen2.5-0.5B."
    if looks_local(name) and not folder.exists():
        raise UserError(f"{key}: there is no folder {name}.", hint=hint)
    if not folder.exists() or _holds_model(folder):
        return
    if (folder / "model" / "config.json").is_file():
        raise UserError(f"{key}: {name} is the folder of a run.", hint=f"Name its model: {Path(name) / 'model'}")
    if _holds_model(folder / "model"):
        raise UserError(
            f"{key}: {name} is the folder of a run, whose model is an adapter.",
            hint=f"Merge it, and name the merged model: ligertune export {name} --out FOLDER",
        )
    raise UserError(f"{key}: {name} holds no config.json, so it is not a model.", hint=hint)


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def check_trained_folder(wanted: TrainedFolder, name: str, *, key: str = "") -> None:
    """Raise UserError if a folder of trained parts does not exist or holds none. key: if it is not that of `wanted`."""
    key = key or wanted.key
    folder = Path(name).expanduser()
    if looks_local(name) and not folder.is_dir():
        raise UserError(f"{key}: there is no folder {name}.", hint=wanted.hint)
    if not all((folder / file).is_file() for file in wanted.files):
        missing = f"{key}: {name} holds no {wanted.holds} ({' and '.join(wanted.files)})."
        raise UserError(missing, hint=wanted.hint)


# ---- places of outputs, which are checked before the work whose result they will hold

MAX_NAME_BYTES = 255  # of a file or folder, on every common file system


def check_report_path(path: Path) -> None:
    """Raise UserError if `path` cannot be written. A link there is replaced; a pipe or a device is refused."""
    hint = "Name a file in an existing folder, such as report.html."
    _check_names(path, "--out")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UserError(f"--out: {path} {what}.", hint=hint)
    check_replaceable(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"--out: {path.parent} cannot be written to.", hint=hint)


def check_out_folder(folder: Path, option: str, *, may_hold: Collection[str] | None = ()) -> None:
    """Raise UserError unless `folder` can be made, or is empty. Nothing is written. may_hold: None for anything."""
    hint = "Name a new folder."
    if folder.name in ("", ".."):
        raise UserError(f"{option}: {str(folder)!r} is not the name of a new folder.", hint=hint)
    _check_names(folder, option)
    if os.path.lexists(folder):
        if not folder.is_dir():
            raise UserError(f"{option}: {folder} is {name_kind(folder)}, and not a folder.", hint=hint)
        if may_hold is not None and any(path.name not in may_hold for path in folder.iterdir()):
            raise UserError(f"{option}: {folder} exists and is not an empty folder.", hint=hint)
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UserError(f"{option}: {folder} cannot be made: {existing} is {name_kind(existing)}.", hint=hint)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {folder} cannot be made: {existing} cannot be written to.", hint=hint)


def make_out_folder(folder: Path, option: str) -> None:
    """Make a folder and those above it. Raises UserError, also where only the system knows why it refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be made ({error.strerror}).", hint="Name a new folder.") from error


def _check_names(path: Path, option: str) -> None:
    for part in path.parts:
        if len(os.fsencode(part)) > MAX_NAME_BYTES:
            raise UserError(
                f"{option}: {part[:20]}... has more than {MAX_NAME_BYTES} bytes.", hint="Choose a shorter name."
            )


_NEW_FILE = "Name a file that does not exist yet, in a folder that does."


def check_new_file(path: Path, *, overwrite: bool = False) -> None:
    """Raise UserError if a file cannot be written at `path`, before the work whose result it will hold."""
    _check_names(path, "--out")
    if os.path.lexists(path):
        if not overwrite:
            hint = "Name another file, or replace it with --overwrite."
            raise UserError(f"--out: {path} exists already.", hint=hint)
        check_replaceable(path)
    elif not os.path.isdir(path.parent):  # unlike Path.is_dir, without an error for a path that is too long
        raise UserError(f"--out: {path} cannot be written: its folder does not exist.", hint=_NEW_FILE)


def write_new(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write a new text file, or with `overwrite` replace one: of a link, the link and not the file that it names.

    Raises UserError if the file exists and is not to be replaced, or if it cannot be written.
    """
    check_new_file(path, overwrite=overwrite)
    try:
        if overwrite:
            write_text(path, text)
        else:
            _write_exclusively(path, text)
    except OSError as problem:  # a full disk, or a folder without permission
        raise UserError(f"--out: {path} cannot be written: {problem.strerror}.", hint=_NEW_FILE) from None


def _write_exclusively(path: Path, text: str) -> None:
    """Write a file that does not exist, and leave no part of it if the disk is full."""
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def looks_local(name: str) -> bool:
    """Return whether a name can only be a path.

    Such a name is absolute, dotted, ends with / or a data suffix, is deeper than org/name, or lies in a folder that
    exists here.
    """
    endings = (".json", ".jsonl", ".parquet", ".csv", ".gz", ".txt", ".md", "/")
    return (
        name.startswith(("/", ".", "~"))
        or name.lower().endswith(endings)
        or name.count("/") > 1
        or os.sep == "\\" in name
        or ("/" in name and Path(name).parent.is_dir())
    )


def clear_run(folder: Path) -> None:
    """Remove the files of an earlier run, and nothing else: of a link, only the link."""
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
