"""Parts of a recipe that features and modalities bring: tasks, sections and rules.

A feature is a package with a module `recipe`, which defines PART. The bundled ones are the folders of
`ligertune.features` and `ligertune.data.modalities`. Another distribution adds one by an entry point of the group
`ligertune.features`, whose value is the name of the package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from ligertune.recipe.rules.rule import Rule
    from ligertune.recipe.section import Section

FEATURES = "ligertune.features"  # also the group of entry points
MODALITIES = "ligertune.data.modalities"
LAST = 1000  # order of the parts of other distributions


SectionT = TypeVar("SectionT", bound="Section")


class TaskOptions(Protocol):
    """A recipe, or the options that planning copied from it."""

    @property
    def task(self) -> str:
        """Value of `task`."""

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the section of this class."""


@dataclass(frozen=True)
class TrainedFolder:
    """A folder with trained parts of a model that a key names, and that a run writes into output_dir.

    name: of the folder in output_dir. files: the folder must hold all of them; the last holds the weights.
    holds, title: noun phrases for the parts. hint: what to name instead of another folder. use: a sentence on what
    to do with it.
    """

    key: str
    name: str
    files: tuple[str, ...]
    holds: str
    title: str
    hint: str
    use: str


@dataclass(frozen=True)
class RecipePart:
    """What a feature or modality adds to recipes, and to the checks before anything is loaded.

    tasks: values of `task`, with words for the key reference. rows: name of the kind of rows that the data must have.
    brings_rows: the feature's module `data` defines kinds of rows (`ROWS`, see data/rows/row_kind.py). labels: the
    section that says which labels texts have. pair_tasks: those on pairs of a chosen and a rejected answer.
    loss_of_labels: the loss is the cross-entropy of the labels.
    sections: name -> class with defaults for all keys.
    why_whole_rows: why its loss reads whole rows, which context parallel splits; empty: it does not.
    models: keys that name another model. folders: keys that name trained parts. packages: switch -> package it needs.
    run_files: names in output_dir; before_training: those of them that are made before the first step.
    report_keys: tasks whose measurements report.json holds.
    learning_rate, adapter_learning_rate: what `init` writes; None: the default. other_tasks: what else `init` says.
    not_a_model: of a folder that is given as a model and holds something else: (what it holds, what to write).
    complete: return the recipe with the names that a folder in it stands for, and notices of them; it raises UserError.
    order: position of the sections in the key reference.
    """

    tasks: Mapping[str, str] = field(default_factory=dict)
    rows: Callable[[TaskOptions], str] = lambda options: "conversations"
    brings_rows: bool = False
    pair_tasks: tuple[str, ...] = ()
    labels: Callable[[TaskOptions], Any] = lambda options: None
    loss_of_labels: bool = True
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    why_whole_rows: str = "Its loss reads whole rows"
    models: tuple[str, ...] = ()
    folders: tuple[TrainedFolder, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    run_files: tuple[str, ...] = ()
    before_training: tuple[str, ...] = ()
    report_keys: tuple[str, ...] = ()
    learning_rate: float | None = None
    adapter_learning_rate: float | None = None
    other_tasks: Mapping[str, str] = field(default_factory=dict)
    not_a_model: Callable[[Path], tuple[str, str] | None] = lambda folder: None
    complete: Callable[[Any], tuple[Any, tuple[str, ...]]] = lambda recipe: (recipe, ())
    order: int = LAST


def feature_names() -> list[str]:
    """Return the dotted names of the packages of all features."""
    return [*_subpackages(FEATURES), *(point.value for point in entry_points(group=FEATURES))]


@cache
def feature_packages() -> dict[str, RecipePart]:
    """Return dotted name of a feature's package -> its part of the recipe, in the order of the key reference."""
    found = {name: importlib.import_module(f"{name}.recipe").PART for name in feature_names()}
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def feature_parts() -> tuple[RecipePart, ...]:
    """Return the recipe parts of all features."""
    return tuple(feature_packages().values())


@cache
def modality_parts() -> tuple[RecipePart, ...]:
    """Return the recipe parts of all modalities."""
    return tuple(importlib.import_module(f"{name}.recipe").PART for name in _subpackages(MODALITIES))


def package_of_task(task: str) -> str:
    """Return the dotted name of the package of the feature with this task."""
    return next(name for name, part in feature_packages().items() if task in part.tasks)


def trains_on_pairs(task: str | None) -> bool:
    """Return whether a task trains on pairs of a chosen and a rejected answer."""
    return any(task in part.pair_tasks for part in feature_parts())


def part_of_task(task: str) -> RecipePart:
    """Return the recipe part of the feature with this task."""
    return feature_packages()[package_of_task(task)]


def _subpackages(package: str) -> Iterator[str]:
    """Yield the dotted names of the packages in a package."""
    # By name, because the recipe is below features and data: its modules must not import them.
    folders = importlib.import_module(package).__path__
    yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(folders) if module.ispkg)
