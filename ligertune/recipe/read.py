"""A recipe's file, overrides and peers' names in; a frozen `Recipe`, or every complaint at once, out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ligertune.errors import UserError
from ligertune.recipe.aliases import use_our_names
from ligertune.recipe.complaints import complain_about, shown
from ligertune.recipe.document import Document, KeyPath, Place, dotted, split
from ligertune.recipe.plain_yaml import NotYaml, dump, parse
from ligertune.recipe.rules import check_rules
from ligertune.recipe.schema import Origin, Recipe
from ligertune.recipe.section import SWITCHES
from ligertune.recipe.train_sections import EITHER_OR

# What no recipe can do without, with a stand-in that lets the rules look at the rest of a recipe that lacks it.
REQUIRED = {
    ("model", "model_name_or_path"): "?",
    ("data", "datasets"): [{"path": "?"}],
    ("checkpoint", "output_dir"): "?",
}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with `section.key=value` overrides; a UserError holds all that is wrong with it."""
    path = Path(path)
    document = read_document(path)
    use_our_names(document)
    apply_overrides(document, overrides)
    use_our_names(document)
    give_way(document)
    recipe = _check(document, folder=path.absolute().parent)
    document.raise_complaints()
    recipe._origin = Origin(path.absolute(), tuple(map(str, sorted(document.notices))))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Canonical YAML with every default, which `load_recipe` reads back as an equal recipe."""
    return dump(recipe.model_dump(mode="json"))


def read_document(path: Path) -> Document:
    """The file as plain data with the places of its keys; a UserError where it is no mapping of YAML."""
    document = Document(str(path))
    try:
        value = parse(_text(path), document)
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


def _text(path: Path) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a recipe.")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}).") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Give the path of a recipe, a YAML file.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _check(document: Document, folder: Path) -> Recipe:
    """The recipe; complaints go to `document`, and what is wrong is stood in for, so that the rules see the rest."""
    for section, _ in REQUIRED:
        document.data.setdefault(section, {})  # then pydantic names the keys that are missing, not the section
    faults: list[KeyPath] = []
    try:
        recipe = Recipe.model_validate(document.data, context=folder)
    except ValidationError as error:
        faults = complain_about(error, document)
        recipe = Recipe.model_validate(_sound_part(document.data, faults), context=folder)
    check_rules(recipe, document, faults)
    return recipe


def _sound_part(data: dict[str, Any], faults: Sequence[KeyPath]) -> dict[str, Any]:
    """A copy without the sections or keys that hold a fault, and with stand-ins for what is then missing."""
    sound = Document("", copy.deepcopy(data))
    for fault in faults:
        if sound.has(fault[:2]):
            sound.remove(fault[:2])
    for path, stand_in in REQUIRED.items():
        if not sound.has(path):
            sound.put(path, stand_in, sound.place(path))
    return sound.data


# Two keys of which one recipe uses one.
RIVALS = (
    *((f"train.{key}", f"train.{rival}") for key, rival in EITHER_OR.items()),
    ("checkpoint.overwrite", "checkpoint.resume_from_checkpoint"),
)


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Write each `key=value` over what the file says; the value is YAML, list items are `data.datasets[0].path`."""
    for text in overrides:
        _apply(text, document)


def give_way(document: Document) -> None:
    """Of two rivals, an override puts out the one that the file gave: `--set train.max_steps=5` is a trial."""
    for pair in RIVALS:
        for said, replaced in (map(split, pair), map(split, pair[::-1])):
            both = _is_used(said, document) and _is_used(replaced, document)
            if both and document.place(said).override and not document.place(replaced).override:
                document.notice(document.place(said), f"replaces {document.mention(replaced)}.")
                document.remove(replaced)


def _is_used(path: KeyPath, document: Document) -> bool:
    """Given, and not only to say that it is off."""
    value = document.get(path) if document.has(path) else None
    value = SWITCHES.get(value, value) if isinstance(value, str) else value
    return not (value is None or value is False or value == "never")


def _apply(text: str, document: Document) -> None:
    key, equals, value = text.partition("=")
    place = Place(f"--set {' '.join(text.split())}", 0, document.file)  # a complaint is one line
    if not (key.strip() and equals):
        document.complain_at(place, "write it as section.key=value.")
        return
    path = split(key.strip())
    try:
        document.put(path, parse(value, document, path, place), place)
    except NotYaml as error:
        document.complain_at(place, str(error))
    except KeyError:
        document.complain_at(place, f"there is no place for {dotted(path)} in this recipe.")


def bundled_recipes() -> list[Path]:
    """All of them, the quickstart first."""
    found = [path for path in sorted(_configs().rglob("*.yaml")) if "\nmodel:" in path.read_text("utf-8")]
    return sorted(found, key=lambda path: path.parent.name != "quickstart")


def bundled(name: str) -> Path:
    """The recipe `name`, a path under configs/."""
    return _configs() / name


def _configs() -> Path:
    package = Path(__file__).parents[1]
    home = next((h for h in (package, package.parent) if (h / "configs" / "quickstart").is_dir()), None)
    if home is None:
        raise UserError("The bundled recipes are not installed.", hint="Install the wheel, or run in a checkout.")
    return home / "configs"


def recipe_title(path: Path) -> str:
    """Its first line, a comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
