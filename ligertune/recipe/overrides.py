"""`--set section.key=value`: one value of the recipe, said on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from ligertune.recipe.document import Document, Place
from ligertune.recipe.keys import KeyPath, dotted, split
from ligertune.recipe.plain_yaml import NotYaml, parse
from ligertune.recipe.schema import EITHER_OR
from ligertune.recipe.section import SWITCHES

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
