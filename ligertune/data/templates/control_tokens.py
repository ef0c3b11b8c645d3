"""Control tokens are written by templates. What looks like one inside a row's text ("<|im_end|>") is text.

A tokenizer takes a control token wherever its name stands. So names inside a row's text are marked before the template
is filled in (a noncharacter behind their first letter), which tells them from the template's own. Such a text is
tokenised by a copy of the tokenizer that knows control tokens by other names, under which the template's are passed to
it: the text between them comes out exactly as by `split_special_tokens=True`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ligertune.data.rows.conversation import BadRow

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

# noncharacters of Unicode: never in a text that was written to be exchanged
_MARK = "\ufdd0"
_QUOTE = "\ufdd1"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd3]")  # the last two are those of `answers`
_NONE = re.compile("(?!)")


class Rendered(NamedTuple):
    """A text and its trained spans of characters; `bos` and `eos` are ids put before and behind its tokens."""

    text: str
    trained: tuple[Span, ...]
    bos: int | None = None
    eos: int | None = None  # trained if the text ends in a trained span
    literal: tuple[Span, ...] = ()  # what looks like a control token and is text


class ControlTokens:
    """The control tokens of a tokenizer: the added tokens that it calls special."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        longest_first = sorted(self._ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NONE

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    def found_in(self, text: str) -> tuple[Span, ...]:
        """Where names of control tokens stand."""
        return tuple(match.span() for match in self.pattern.finditer(text))

    def marked(self, value: Any) -> Any:
        """`value` with a mark in each name of a control token, in every text of it: a template reads it as text."""
        if isinstance(value, str):
            if found := _NONCHARACTERS.search(value):
                raise BadRow("broken text", f"U+{ord(found[0]):04X}")
            return self.pattern.sub(lambda match: f"{match[0][0]}{_MARK}{match[0][1:]}", value)
        if isinstance(value, dict):
            return {key: self.marked(inner) for key, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, list) else value

    def unmarked(self, rendered: Rendered) -> Rendered:
        """The text without marks, its spans moved with it, and `literal`: where the marks were."""
        if _MARK not in rendered.text:
            return rendered
        marks = [index for index, character in enumerate(rendered.text) if character == _MARK]
        text = rendered.text.replace(_MARK, "")
        trained = tuple((_moved(start, marks), _moved(end, marks)) for start, end in rendered.trained)
        starts = {_moved(mark, marks) - 1 for mark in marks}
        literal = tuple(span for span in self.found_in(text) if span[0] in starts)
        return rendered._replace(text=text, trained=trained, literal=literal)

    def tokenised(self, rendered: Rendered) -> tuple[list[int], list[Span]]:
        """Ids and offsets of a text some of whose control tokens are text."""
        literal = set(rendered.literal)
        names, pieces, places, done = list(self._ids), [], [], 0
        for start, end in self.found_in(rendered.text):
            if (start, end) not in literal:
                alias = f"{_QUOTE}{names.index(rendered.text[start:end])}{_QUOTE}"
                pieces += [rendered.text[done:start], alias]
                places += [*range(done, start), start, *[start + 1] * (len(alias) - 2), end - 1]
                done = end
        pieces.append(rendered.text[done:])
        places += [*range(done, len(rendered.text))]
        encoding = self._renamed.encode("".join(pieces), add_special_tokens=False)
        own = {self._renamed.token_to_id(f"{_QUOTE}{n}{_QUOTE}"): self._ids[name] for n, name in enumerate(names)}
        ids = [own.get(index, index) for index in encoding.ids]
        if self.ids & {index for index in encoding.ids if index not in own}:
            raise BadRow("control token in the text", rendered.text[slice(*rendered.literal[0])])
        return ids, [_placed(start, end, places) for start, end in encoding.offsets]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer to which the names of control tokens are text, and their aliases are control tokens."""
        from tokenizers import AddedToken

        known = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        renamed = copy.deepcopy(self._tokenizer.backend_tokenizer)
        renamed.encode_special_tokens = True
        aliases = []
        for number, name in enumerate(self._ids):
            sides = {side: getattr(known.get(name), side, False) for side in ("lstrip", "rstrip")}
            aliases.append(AddedToken(f"{_QUOTE}{number}{_QUOTE}", normalized=False, special=False, **sides))
        renamed.add_tokens(aliases)
        return renamed


def _moved(place: int, marks: Sequence[int]) -> int:
    """A place in a text, once the marks before it are gone."""
    return place - sum(mark < place for mark in marks)


def _placed(start: int, end: int, places: Sequence[int]) -> Span:
    """Offsets of a text with aliases as offsets of the text itself."""
    return (places[start], places[end - 1] + 1) if end > start else (places[start - 1] + 1 if start else 0,) * 2
