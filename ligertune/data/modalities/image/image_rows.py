"""Images of rows: find them in every known form, put marks into the text, and expand the marks to image tokens.

Known forms are the `<image>` marks of LLaVA and ShareGPT with an `image` or `images` column, parts of type image
(Hugging Face, TRL: with their own reference or filled from the column in order), and OpenAI's image_url parts. A row
with images and no marks shows them at the beginning of its first question. Afterwards the row is read like any other.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ligertune.data.bad_rows import BadRow
from ligertune.data.cache import cache_home
from ligertune.data.modalities.image.image_files import ImageFile, check_image, locate_image
from ligertune.data.modalities.image.image_settings import ImageSettings
from ligertune.data.modalities.modality import MARK, has_sign, mark_of
from ligertune.data.rows.conversation import ROLES, Conversation, Role
from ligertune.data.shapes.turn_lists import turns_in
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import IGNORE_INDEX, Encoded

# LLaVA writes a line break next to a mark; it belongs to the mark, not to the text
_WRITTEN_MARK = re.compile(r"(?:<image>|<ImageHere>)\n?|\n(?:<image>|<ImageHere>)\Z")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_COLUMNS = ("images", "image")
_TEXTS = ("conversations", "messages", "prompt", "completion", "instruction", "input", "question", "answer", "text")
_TURNS = _TEXTS[:4]
_FIRST_TEXTS = ("conversations", "messages", "prompt", "instruction", "question")


@dataclass
class _RowImages:
    """Images of one row while it is read: its column, and the references marked so far."""

    column: list[Any]
    references: list[Any] = field(default_factory=list)
    n_taken: int = 0  # images of the column that have a mark

    def mark(self, reference: Any = None) -> str:
        """Return a mark for `reference`, or for the next image of the column."""
        if reference is None:
            reference = self.column[self.n_taken] if self.n_taken < len(self.column) else None
            self.n_taken += 1
        self.references.append(reference)
        return mark_of(len(self.references) - 1)

    def mark_all(self) -> str:
        """Return marks for all images of the column."""
        return "".join(self.mark() for _ in self.column)


def extract_images(row: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return (the row as text with marks, the references that the marks number).

    Raises BadRow if there are not as many marks as images.
    """
    given: Any = next((row[key] for key in _COLUMNS if row.get(key)), [])
    if isinstance(given, str) and given.lstrip().startswith("["):  # a cell of a csv file
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    images = _RowImages(list(given) if isinstance(given, (list, tuple)) else [given])
    text_row = {key: value for key, value in row.items() if key not in _COLUMNS}
    for key in _TEXTS:
        if key in text_row:
            # a cell of a csv file may hold turns as JSON
            value = turns_in(text_row[key]) if key in _TURNS else text_row[key]
            text_row[key] = _marked(value, images)
    if images.column and not images.references:
        _mark_first_question(text_row, images)
    if images.n_taken != len(images.column):
        raise BadRow("image marks do not fit", f"{images.n_taken} marks for {len(images.column)} images")
    return text_row, images.references


def _marked(value: Any, images: _RowImages) -> Any:
    """Return a text, a turn, a part or a list of them with marks in place of images, in reading order."""
    if isinstance(value, str):
        if has_sign(value):
            raise BadRow("broken text", "U+FDD4")
        return _WRITTEN_MARK.sub(lambda match: images.mark(), value)
    if isinstance(value, list):
        return [_marked(inner, images) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in _IMAGE_PARTS:
        return {"type": "text", "text": images.mark(_reference(value))}
    n_before = len(images.references)
    marked = {key: _marked(value[key], images) for key in ("value", "content", "text") if value.get(key) is not None}
    if _role(value) == "assistant" and len(images.references) > n_before:
        raise BadRow("image in an answer", "the model writes no images")
    return {**value, **marked}


def _role(turn: dict[str, Any]) -> Role | None:
    name = turn.get("from") or turn.get("role")
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def _reference(part: dict[str, Any]) -> Any:
    """Return a part's own reference to its image, or None if the row's column has it."""
    given = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
    if isinstance(given, dict) and "url" in given:  # OpenAI: {"image_url": {"url": ...}}
        return given["url"]
    return {"bytes": given} if isinstance(given, bytes) else given


def _mark_first_question(row: dict[str, Any], images: _RowImages) -> None:
    """Put marks for all images of the column before the first question of `row`."""
    for key in _FIRST_TEXTS:
        value = row.get(key)
        if isinstance(value, str):
            row[key] = images.mark_all() + value
            return
        turns = value or []
        for number, turn in enumerate(turns):
            if isinstance(turn, dict) and _role(turn) == "user":
                name = "value" if turn.get("value") is not None else "content"
                content = turn.get(name)
                marks = images.mark_all()
                parts = [{"type": "text", "text": marks}, *content] if isinstance(content, list) else None
                turns[number] = {**turn, name: parts or f"{marks}{content or ''}"}
                return


class ImageTokens:
    """The `RowFiles` of images."""

    cut_reason = "cut through an image"

    def __init__(self, settings: ImageSettings, image_dir: str | None) -> None:
        """Look for relative paths in `image_dir`, or next to the data file if it is None."""
        self._settings = settings
        self._image_dir = None if image_dir is None else Path(image_dir)
        self._pattern = re.compile(f"{MARK.pattern}|{re.escape(settings.template_text)}")

    def extract(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return (the row as text with marks, the references that the marks number). Raises BadRow."""
        return extract_images(row)

    def find(self, conversation: Conversation, references: Sequence[Any], source: str) -> list[ImageFile]:
        """Return the images of the conversation in its order. Raises BadRow if one is missing or broken.

        An image that the data set holds as bytes is written into the cache.
        """
        texts = (text for message in conversation.messages for text in (message.content, message.input))
        marked = [int(number) for text in texts for number in MARK.findall(text)]
        folder = self._image_dir or Path(source.rpartition(":")[0] or source).parent
        # Next to the prepared data, which holds the paths of these files.
        store = cache_home().with_name("images")
        found = [check_image(locate_image(references[number], folder, store)) for number in marked]
        # Checked while the row can still be dropped with a reason: the processor would stop the run.
        for image in found:
            self._settings.tokens(image)  # raises BadRow for an image that is too narrow
        return found

    def insert(self, rendered: Rendered, images: Sequence[ImageFile]) -> Rendered:
        """Replace each mark, and each image text that the chat template wrote, by the model family's image text."""
        # A row's own text that equals the family's image text shows no image.
        literal = {start for start, _ in rendered.literal}
        found = [match for match in self._pattern.finditer(rendered.text) if match.start() not in literal]
        if len(found) != len(images):
            raise BadRow("the template leaves an image out", f"{len(found)} of {len(images)} are in the text")
        return rendered.substitute(found, self._settings.image_text)

    def expand(self, encoded: Encoded, images: Sequence[ImageFile]) -> Encoded:
        """Repeat the token of each image to its number of tokens. Neither these nor their delimiters are trained."""
        is_image = encoded.input_ids == self._settings.token_id
        if is_image.sum() != len(images):
            raise BadRow("image marks do not fit", f"{is_image.sum()} tokens for {len(images)} images")
        times = np.ones(len(is_image), dtype=np.int64)
        times[is_image] = [self._settings.tokens(image) for image in images]
        input_ids = np.repeat(encoded.input_ids, times)
        labels = np.repeat(encoded.labels, times)
        labels[np.isin(input_ids, list(self._settings.untrained))] = IGNORE_INDEX
        return Encoded(input_ids, labels, encoded.straddling)
