"""Recipe loading: YAML file, aliases and `--set` overrides -> a frozen `Recipe`, or a UserError with all complaints.

Also the recipes in configs/, which the wheel contains.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ligertune.errors import UserError
from ligertune.recipe.aliases import apply_aliases
from ligertune.recipe.complaints import complain_about, shown
from ligertune.recipe.document import Document, KeyPath, Place, dotted, split
from ligertune.recipe.feature import part_of_task
from ligertune.recipe.plain_yaml import NotYaml, dump, parse
from ligertune.recipe.rules.check_rules import check_rules
from ligertune.recipe.schema import Origin, Recipe
from ligertune.recipe.section import SWITCHES
from ligertune.recipe.train_sections import EITHER_OR

MAX_BYTES = 2**20  # of a recipe; read whole, unlike a device or a pipe, which may never end
DATA_FILES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")  # endings that no recipe has
# Required keys, with a placeholder that lets the rules check the rest of a recipe that lacks one.
OUTPUT_DIR = ("checkpoint", "output_dir")
REQUIRED = {("model", "model_name_or_path"): "?", ("data", "datasets"): [{"path": "?"}], OUTPUT_DIR: "?"}
# Pairs of keys. A recipe may use only one of each pair.
RIVALS = (
    *((f"train.{key}", f"train.{rival}") for key, rival in EITHER_OR.items()),
    ("checkpoint.overwrite", "checkpoint.resume_from_checkpoint"),
)


def load_recipe(path: Path, overrides: Sequence[str] | None = (), *, output_key: str | None = None) -> Recipe:
    """Load the recipe at `path` with `section.key=value` overrides. Raises UserError with all complaints.

    output_key: another key whose folder stands for a checkpoint.output_dir that is not given.
    Raises TypeError for a path or overrides of another type.
    """
    overrides = _checked_overrides(overrides)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load_recipe: path must be a path of a file, and is {path!r}")
    path = Path(path)
    if path.suffix.lower() in DATA_FILES and path.is_file():
        raise UserError(
            f"{path} is a data file, and no recipe.", hint=f"Write a recipe for it: ligertune init MODEL {path}"
        )
    document = read_document(path)
    foreign = _file_of_another_tool(document)
    recipe = _recipe_of_document(document, overrides, path.absolute().parent, foreign, output_key)
    recipe._origin = Origin(path.absolute(), recipe.notices)
    return recipe


def _checked_overrides(overrides: Sequence[str] | None) -> Sequence[str]:
    """Return the overrides; none for None. Raises TypeError for anything but a series of texts."""
    if overrides is None:
        return ()
    is_series = isinstance(overrides, Iterable) and not isinstance(overrides, str | bytes | Mapping)
    found = tuple(overrides) if is_series else ()  # an iterator can be read once
    if not is_series or not all(isinstance(override, str) for override in found):
        raise TypeError(f"overrides must be a list of 'section.key=value' texts, and is {overrides!r}")
    return found


def recipe_of(
    given: Recipe | str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str] | None = (),
    *,
    output_key: str | None = None,
) -> Recipe:
    """Return a recipe from a path, from its sections as a mapping, or the recipe itself, with overrides.

    Relative paths in a mapping are looked for in the current folder. output_key: as in `load_recipe`. Raises UserError
    with all complaints, and TypeError for a value of another type.
    """
    overrides = _checked_overrides(overrides)
    if isinstance(given, Recipe) and not overrides:
        return given
    if isinstance(given, Recipe):
        given = given.model_dump(mode="json", exclude_unset=True)
    if not isinstance(given, Mapping):
        return load_recipe(given, overrides, output_key=output_key)  # type: ignore[arg-type]  # it checks the type
    try:
        document = Document("recipe", _plain(given))
    except RecursionError:
        raise UserError("recipe: a value contains itself, or is nested too deeply.") from None
    return _recipe_of_document(document, overrides, Path.cwd(), None, output_key)


def _plain(value: Any) -> Any:
    """Return a copy of nested values as YAML would hold them: paths as texts, arrays and tensors as numbers."""
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"recipe: a key must be a text, and is {odd[0]!r}")
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    libraries = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    if libraries & {"numpy", "torch"} and hasattr(value, "tolist"):  # scalars, arrays, tensors
        return _plain(value.tolist())
    if isinstance(value, int) and value.bit_length() > 1024:  # Python writes at most 4,300 digits into a message
        raise UserError("recipe: a whole number is above 1.8e308, and no key takes one.")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    raise TypeError(f"recipe: {value!r} is {type(value).__name__}, which no recipe can hold")


def _recipe_of_document(
    document: Document, overrides: Sequence[str], folder: Path, foreign: UserError | None, output_key: str | None
) -> Recipe:
    """Return the recipe of a document. foreign: the error to raise instead of complaints about its own keys."""
    # before the overrides too: an override must meet the key of an alias in the file, not a second name for it
    apply_aliases(document)
    apply_overrides(document, overrides)
    apply_aliases(document)
    _drop_overridden_rivals(document)
    if output_key is not None:
        _fill_output_dir(document, split(output_key))
    recipe = _validate(document, folder=folder)
    if foreign is not None and any(not remark.place.override for remark in document.complaints):
        raise foreign
    document.raise_complaints()
    recipe, notices = part_of_task(recipe.task).complete(recipe)
    recipe._origin = Origin(None, (*map(str, sorted(document.notices)), *notices))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as YAML with every default, which `load_recipe` reads back as an equal recipe."""
    return dump(recipe.model_dump(mode="json"))


def read_document(path: Path) -> Document:
    """Read a YAML file as plain values with their lines. Raises UserError if it is not a YAML mapping."""
    document = Document(str(path))
    try:
        value = parse(_read_text(path), document)
    except NotYaml as error:
        raise UserError(f"{path}:{error.line}: {error}" if error.line else f"{path}: {error}") from None
    if value is None:
        raise UserError(
            f"{path} is empty. A recipe needs at least model.model_name_or_path, data.datasets[0].path and "
            "checkpoint.output_dir."
        )
    if not isinstance(value, dict):
        raise UserError(f"{path} is {shown(value)}; a recipe is a mapping of sections: model, data, train and others.")
    document.data = value
    return document


def _file_of_another_tool(document: Document) -> UserError | None:
    """Return the error for a file with the keys of another tool, flat or in that tool's sections."""
    is_sectioned = any(isinstance(document.data.get(section), dict) for section in Recipe.model_fields)
    if is_sectioned and not set(document.data) & {"checkpointer", "lora"}:
        return None
    # a recipe of ligertune needs no tables of other tools
    from ligertune.recipe.importers.import_tables import likely_peer

    peer, signs = likely_peer(document.data)
    has_its_sections = peer.sections and all(isinstance(document.data.get(name), dict) for name in peer.sections)
    if not signs or (is_sectioned and not has_its_sections):
        return None
    return UserError(
        f"{document.file} looks like a file of {peer.name} ({', '.join(signs[:3])}), not like a recipe of ligertune.",
        hint=f"Convert it: ligertune recipe import {shlex.quote(document.file)} --out recipe.yaml",
    )


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path} is a folder, not a recipe.")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file. Give the path of a recipe, a YAML file.")
        if status.st_size > MAX_BYTES:
            raise UserError(f"{path} has {status.st_size:,} bytes; a recipe has at most {MAX_BYTES:,}.")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}).") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Give the path of a recipe, a YAML file.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from None


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Set each `key=value` in the document; the value is YAML, a list item is `data.datasets[0].path`."""
    for text in overrides:
        key, equals, value = text.partition("=")
        place = Place(f"--set {' '.join(text.split())}", 0, document.file)  # on one line, as each complaint is
        if not (key.strip() and equals):
            document.complain_at(place, "write it as section.key=value.")
            continue
        path = split(key.strip())
        try:
            document.put(path, parse(value, document, path, place), place)
        except NotYaml as error:
            document.complain_at(place, str(error))
        except KeyError:
            document.complain_at(place, f"this recipe has no place for {dotted(path)}.")


def _drop_overridden_rivals(document: Document) -> None:
    """Remove a key from the file if an override gives its rival: `--set train.max_steps=5` replaces epochs."""
    for pair in RIVALS:
        for given, replaced in (map(split, pair), map(split, pair[::-1])):
            both = _is_used(given, document) and _is_used(replaced, document)
            if both and document.place(given).override and not document.place(replaced).override:
                document.notice(document.place(given), f"replaces {document.mention(replaced)}.")
                document.remove(replaced)


def _fill_output_dir(document: Document, other: KeyPath) -> None:
    """Let the folder that another key names stand for a checkpoint.output_dir that is not given."""
    if document.has(OUTPUT_DIR) or not _is_used(other, document):
        return
    with contextlib.suppress(KeyError):  # `checkpoint` is no section, and the validation says so
        document.put(OUTPUT_DIR, document.get(other), document.place(other))


def _is_used(path: KeyPath, document: Document) -> bool:
    """Report whether a key is given with a value that does not merely switch it off."""
    value = document.get(path) if document.has(path) else None
    value = SWITCHES.get(value, value) if isinstance(value, str) else value
    return not (value is None or value is False or value == "never")


def _validate(document: Document, folder: Path) -> Recipe:
    """Validate keys, values and rules; complaints go to `document`.

    Invalid keys are replaced by defaults, so that one call also reports the rules that the rest breaks.
    """
    for section, _ in REQUIRED:
        document.data.setdefault(section, {})  # so that pydantic names the missing keys, not the missing section
    faults: list[KeyPath] = []
    try:
        recipe = Recipe.model_validate(document.data, context=folder)
    except ValidationError as error:
        faults = complain_about(error, document)
        recipe = Recipe.model_validate(_valid_part(document.data, faults), context=folder)
    check_rules(recipe, document, faults)
    return recipe


def _valid_part(data: dict[str, Any], faults: Sequence[KeyPath]) -> dict[str, Any]:
    """Copy the data without the keys that hold a fault, with placeholders for required keys."""
    valid = Document("", copy.deepcopy(data))
    for fault in faults:
        if valid.has(fault[:2]):
            valid.remove(fault[:2])
    for path, placeholder in REQUIRED.items():
        if not valid.has(path):
            valid.put(path, placeholder, valid.place(path))
    return valid.data


def bundled_recipes() -> list[Path]:
    """Return the paths of the recipes in configs/, the quickstart first."""
    found = [path for path in sorted(_configs().rglob("*.yaml")) if "\nmodel:" in path.read_text("utf-8")]
    return sorted(found, key=lambda path: path.parent.name != "quickstart")


def bundled(name: str) -> Path:
    """Return the path of the file `name` below configs/."""
    return _configs() / name


def recipe_title(path: Path) -> str:
    """Return the first line of a recipe if it is a comment, else an empty string."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _configs() -> Path:
    # the wheel holds configs/ inside the package, a checkout has it next to the package
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):
        if (folder / "configs" / "quickstart").is_dir():
            return folder / "configs"
    raise UserError("The bundled recipes are not installed.", hint="Install the wheel, or run in a checkout.")
