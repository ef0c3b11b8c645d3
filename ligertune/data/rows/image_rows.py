"""Where images stand in a row, whatever the row calls them: each becomes a mark in the text, its reference a list's.

Known are LLaVA's and ShareGPT's `<image>` marks with an `image` or `images` column, parts of type image (Hugging Face,
TRL: with a reference of their own, or filled from the column in order) and OpenAI's image_url parts. A row with images
and no marks at all shows them at the beginning of its first question. From there on such a row is read as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.data.rows.conversation import BadRow, Conversation
from ligertune.data.templates.control_tokens import Rendered, Span
from ligertune.data.templates.label_masking import IGNORE_INDEX, Encoded
from ligertune.vision.image_files import ImageError, check_image, locate_image

if TYPE_CHECKING:
    from ligertune.vision.image_files import ImageFile
    from ligertune.vision.reader import ImageReader

# a noncharacter of Unicode around the number of an image in its row: no text that was written to be exchanged has it
_SIGN = "\ufdd4"
IMAGE_MARK = re.compile(f"{_SIGN}(\\d+){_SIGN}")
# a line break beside a mark is LLaVA's way to write one, and no part of the text
_WRITTEN = re.compile(r"(?:<image>|<ImageHere>)\n?|\n(?:<image>|<ImageHere>)\Z")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_COLUMNS = ("images", "image")
_TEXTS = ("conversations", "messages", "prompt", "completion", "instruction", "input", "text")


def image_mark(number: int) -> str:
    """What stands in a text for the image of this number, from 0."""
    return f"{_SIGN}{number}{_SIGN}"


@dataclass
class _Found:
    """The images of a row while it is read."""

    column: list[Any]
    references: list[Any] = field(default_factory=list)
    taken: int = 0  # of the column

    def mark(self, own: Any = None) -> str:
        """A mark for an image with a reference of its own, or for the next one of the column."""
        if own is None:
            own = self.column[self.taken] if self.taken < len(self.column) else None
            self.taken += 1
        self.references.append(own)
        return image_mark(len(self.references) - 1)


def extract_images(row: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(the row as one of text, with marks; the references that the marks number). A BadRow where the counts differ."""
    found = _Found(_column_of(row))
    plain = {key: value for key, value in row.items() if key not in _COLUMNS}
    for key in _TEXTS:
        if key in plain:
            plain[key] = _marked(plain[key], found)
    if found.column and not found.references:
        plain = _before_the_first_question(plain, found)
    if found.taken != len(found.column):
        raise BadRow("image marks do not fit", f"{found.taken} marks for {len(found.column)} images")
    return plain, found.references


def _column_of(row: dict[str, Any]) -> list[Any]:
    given = next((row[key] for key in _COLUMNS if row.get(key)), None)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _marked(value: Any, found: _Found) -> Any:
    """A text, a turn, a part or a list of them with marks in the place of images, in reading order."""
    if isinstance(value, str):
        if _SIGN in value:
            raise BadRow("broken text", "U+FDD4")
        return _WRITTEN.sub(lambda match: found.mark(), value)
    if isinstance(value, list):
        return [_marked(inner, found) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in _IMAGE_PARTS:
        return {"type": "text", "text": found.mark(_reference(value))}
    role = value.get("from") or value.get("role")
    marked = {key: _marked(value[key], found) for key in ("value", "content", "text") if value.get(key) is not None}
    if isinstance(role, str) and role.strip().lower() in ("gpt", "assistant", "bot", "model") and _has_mark(marked):
        raise BadRow("image in an answer", "the model writes no images")
    return {**value, **marked}


def _reference(part: dict[str, Any]) -> Any:
    """What a part itself says of its image; None leaves it to the row's column."""
    given = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
    if isinstance(given, dict) and "url" in given:  # OpenAI: {"image_url": {"url": ...}}
        return given["url"]
    return {"bytes": given} if isinstance(given, bytes) else given


def _has_mark(value: Any) -> bool:
    if isinstance(value, str):
        return _SIGN in value
    return any(map(_has_mark, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def _before_the_first_question(row: dict[str, Any], found: _Found) -> dict[str, Any]:
    for key in ("conversations", "messages", "prompt", "instruction"):
        turns = row.get(key)
        if isinstance(turns, str):
            return {**row, key: "".join(found.mark() for _ in found.column) + turns}
        for number, turn in enumerate(turns or ()):
            role = turn.get("from") or turn.get("role") if isinstance(turn, dict) else None
            if role in ("human", "user"):
                field_ = "value" if turn.get("value") is not None else "content"
                marks = "".join(found.mark() for _ in found.column)
                content = turn.get(field_)
                parts = [{"type": "text", "text": marks}, *content] if isinstance(content, list) else None
                changed = {**turn, field_: parts or f"{marks}{content or ''}"}
                return {**row, key: [*turns[:number], changed, *turns[number + 1 :]]}
    return row


class ImageTokens:
    """Images of the rows of one data set: found as files, put into rendered texts, and into their tokens."""

    def __init__(self, reader: ImageReader, image_dir: str | None, store: Path) -> None:
        self._reader, self._store = reader, store
        self._image_dir = None if image_dir is None else Path(image_dir)
        self._pattern = re.compile(f"{IMAGE_MARK.pattern}|{re.escape(reader.template_text)}")

    @property
    def token_id(self) -> int:
        return self._reader.token_id

    def pictures(self, conversation: Conversation, references: Sequence[Any], source: str) -> list[ImageFile]:
        """The pictures that the conversation shows, in its order; a BadRow if one is missing or broken."""
        shown = [
            int(number)
            for message in conversation.messages
            for number in IMAGE_MARK.findall(message.content) + IMAGE_MARK.findall(message.input)
        ]
        beside = Path(source.rpartition(":")[0] or source).parent
        folders = (beside,) if self._image_dir is None else (self._image_dir,)
        try:
            found = [check_image(locate_image(references[number], folders, self._store)) for number in shown]
            for picture in found:
                self._reader.tokens(picture)
        except ImageError as error:
            raise BadRow(error.reason, error.detail) from error
        return found

    def placed(self, rendered: Rendered, pictures: Sequence[ImageFile]) -> Rendered:
        """The text with what stands for each picture in this family; templates and marks may have written it."""
        literal = {start for start, _ in rendered.literal}
        found = [match for match in self._pattern.finditer(rendered.text) if match.start() not in literal]
        if len(found) != len(pictures):
            raise BadRow("the template leaves an image out", f"{len(found)} of {len(pictures)} are in the text")
        pieces, moves, done = [], [], 0
        for match in found:
            pieces += [rendered.text[done : match.start()], self._reader.image_text]
            done = match.end()
            moves.append((match.end(), len(self._reader.image_text) - len(match[0])))
        text = "".join([*pieces, rendered.text[done:]])

        def moved(spans: Sequence[Span]) -> tuple[Span, ...]:
            return tuple((_moved(start, moves), _moved(end, moves)) for start, end in spans)

        return rendered._replace(text=text, trained=moved(rendered.trained), literal=moved(rendered.literal))

    def expanded(self, encoded: Encoded, pictures: Sequence[ImageFile]) -> Encoded:
        """The tokens with as many for each picture as it takes; none of them, nor those around them, is trained."""
        ids = encoded.input_ids
        at = np.flatnonzero(ids == self._reader.token_id)
        if len(at) != len(pictures):
            raise BadRow("image marks do not fit", f"{len(at)} tokens for {len(pictures)} images")
        times = np.ones(len(ids), dtype=np.int64)
        times[at] = [self._reader.tokens(picture) for picture in pictures]
        input_ids = np.repeat(ids, times)
        labels = np.repeat(encoded.labels, times)
        labels[np.isin(input_ids, list(self._reader.untrained))] = IGNORE_INDEX
        return Encoded(input_ids, labels, encoded.straddling, int((labels != IGNORE_INDEX).sum()))


def _moved(place: int, moves: Sequence[tuple[int, int]]) -> int:
    return place + sum(growth for end, growth in moves if end <= place)


def image_parts(text: str) -> list[dict[str, Any]]:
    """A text with marks as the parts that chat templates read: images and the texts between them."""
    return list(_parts(text))


def _parts(text: str) -> Iterator[dict[str, Any]]:
    done = 0
    for match in IMAGE_MARK.finditer(text):
        if text[done : match.start()]:
            yield {"type": "text", "text": text[done : match.start()]}
        yield {"type": "image"}
        done = match.end()
    if text[done:] or not done:
        yield {"type": "text", "text": text[done:]}
