"""Control tokens in data: only templates write them. Their names inside a row's text ("<|im_end|>") stay text.

A tokenizer replaces the name of a control token anywhere in its input. So names inside a row's text are marked with a
noncharacter after their first letter before the template is rendered, which distinguishes them from the template's own.
Such a text is tokenized by a copy of the tokenizer that knows its control tokens by other names (aliases), under which
the template's control tokens are passed to it. The text between them is tokenized as by `split_special_tokens=True`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ligertune.data.bad_rows import BadRow

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # first character and the one after the last

# Noncharacters of Unicode: they are reserved for internal use, so no exchanged text contains them.
_MARK = "\ufdd0"
_ALIAS_QUOTE = "\ufdd1"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd3]")  # the last two are the tags of answer_spans.py


class Rendered(NamedTuple):
    """A rendered text and its trained spans. `bos` and `eos` are ids to add before and after its tokens."""

    text: str
    trained: tuple[Span, ...]
    bos: int | None = None
    eos: int | None = None
    literal: tuple[Span, ...] = ()  # names of control tokens that are the row's text
    unplaced: tuple[str, ...] = ()  # why answers that should be trained are not
    eos_trained: bool | None = None  # None: if the text has a trained span

    @property
    def trains_eos(self) -> bool:
        """Whether `eos` is trained."""
        return bool(self.trained) if self.eos_trained is None else self.eos_trained

    def substitute(self, matches: Iterable[re.Match[str]], replacement: str) -> Rendered:
        """Replace each match by `replacement`, and move the spans."""
        pieces = []
        changes = []
        done = 0
        for match in matches:
            pieces += [self.text[done : match.start()], replacement]
            done = match.end()
            changes.append((done, len(replacement) - len(match[0])))

        def moved(place: int) -> int:
            return place + sum(growth for end, growth in changes if end <= place)

        trained, literal = (tuple((moved(a), moved(b)) for a, b in spans) for spans in (self.trained, self.literal))
        return self._replace(text="".join([*pieces, self.text[done:]]), trained=trained, literal=literal)


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and added tokens that are flagged as special."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._aliases = {name: f"{_ALIAS_QUOTE}{number}{_ALIAS_QUOTE}" for number, name in enumerate(self._ids)}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all control tokens."""
        return frozenset(self._ids.values())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all control tokens."""
        return tuple(self._ids)

    def id_of(self, name: str) -> int:
        """Return the id of a control token."""
        return self._ids[name]

    def found_in(self, text: str) -> tuple[Span, ...]:
        """Return the spans of names of control tokens."""
        return tuple(match.span() for match in self.pattern.finditer(text))

    def mark(self, value: Any) -> Any:
        """Return `value` with a mark in each name of a control token, in all strings of nested lists and dicts.

        Raises BadRow if the text already contains a noncharacter that is used as a mark.
        """
        if isinstance(value, str):
            if found := _NONCHARACTERS.search(value):
                raise BadRow("broken text", f"U+{ord(found[0]):04X}")
            return self.pattern.sub(lambda match: f"{match[0][0]}{_MARK}{match[0][1:]}", value)
        if isinstance(value, dict):
            return {key: self.mark(inner) for key, inner in value.items()}
        return [self.mark(inner) for inner in value] if isinstance(value, list) else value

    def unmark(self, rendered: Rendered) -> Rendered:
        """Remove the marks, move the spans, and set `literal` to the marked names."""
        marks = list(re.finditer(_MARK, rendered.text))
        if not marks:
            return rendered
        found = rendered._replace(literal=tuple(mark.span() for mark in marks)).substitute(marks, "")
        starts = {start - 1 for start, _ in found.literal}
        return found._replace(literal=tuple(span for span in self.found_in(found.text) if span[0] in starts))

    def tokenize(self, rendered: Rendered) -> tuple[list[int], list[Span]]:
        """Return the ids and offsets of a text with literal names of control tokens.

        Raises BadRow if the tokenizer makes a control token of the row's text nevertheless.
        """
        literal = set(rendered.literal)
        pieces = []
        places = []
        done = 0
        for start, end in self.found_in(rendered.text):
            if (start, end) not in literal:
                alias = self._aliases[rendered.text[start:end]]
                pieces += [rendered.text[done:start], alias]
                # one place per character; only the first and last of an alias can be the ends of a token
                places += [*range(done, start), start, *[start + 1] * (len(alias) - 2), end - 1]
                done = end
        pieces.append(rendered.text[done:])
        places += [*range(done, len(rendered.text))]
        encoding = self._renamed.encode("".join(pieces), add_special_tokens=False)
        own = {self._renamed.token_to_id(alias): self._ids[name] for name, alias in self._aliases.items()}
        ids = [own.get(index, index) for index in encoding.ids]
        if self.ids & {index for index in encoding.ids if index not in own}:
            raise BadRow("control token in the text", rendered.text[slice(*rendered.literal[0])])
        return ids, [_original_span(start, end, places) for start, end in encoding.offsets]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer copy to which names of control tokens are text, and their aliases are control tokens."""
        from tokenizers import AddedToken

        known = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        renamed = copy.deepcopy(self._tokenizer.backend_tokenizer)
        renamed.encode_special_tokens = True
        for name, alias in self._aliases.items():
            sides = {side: getattr(known.get(name), side, False) for side in ("lstrip", "rstrip")}
            renamed.add_tokens([AddedToken(alias, normalized=False, special=False, **sides)])
        return renamed


def _original_span(start: int, end: int, places: Sequence[int]) -> Span:
    """Return a token's offsets in the text without aliases. `places` maps characters of the text with aliases."""
    if end > start:
        return places[start], places[end - 1] + 1
    place = places[start - 1] + 1 if start else 0
    return place, place
