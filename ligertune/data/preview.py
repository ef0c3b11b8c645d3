"""What a person looks at before training: examples as text with what is trained marked, how long they are, what they
come to as batches and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligertune.data.examples import Example, Examples
from ligertune.data.prepare import DataReport, PreparedData
from ligertune.data.templates.control_tokens import ControlTokens
from ligertune.data.templates.label_masking import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.statistics import DataStatistics
    from ligertune.vision.reader import ImageReader

_HALF_A_CHARACTER = "\ufffd"
_BINS = 24
_STREAMED = 2000  # examples of a stream that are looked at
# characters that change how others are shown, or that a terminal obeys
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_HIDDEN = [*range(0x80, 0xA0), *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF]
_VISIBLE = str.maketrans(_PICTURES | {code: f"\u27e8U+{code:04X}\u27e9" for code in _HIDDEN if code != 0x200D})


class Piece(NamedTuple):
    """A token's share of the text; several tokens that only together make a character are one piece."""

    text: str
    trained: bool
    special: bool  # a control token


@dataclass(frozen=True)
class PreviewExample:
    """An example, decoded."""

    source: str
    tokens: int
    trained_tokens: int
    pieces: tuple[Piece, ...]
    images: tuple[str, ...] = ()

    @property
    def spans(self) -> list[tuple[str, bool]]:
        """The pieces, joined where their neighbour is trained as they are."""
        runs = groupby(self.pieces, key=lambda piece: piece.trained)
        return [("".join(piece.text for piece in run), trained) for trained, run in runs]


@dataclass(frozen=True)
class LengthStatistics:
    """Tokens of an example. The histogram's bins are of equal width: bin i begins at `edges[i]`."""

    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    max: int
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: np.ndarray) -> LengthStatistics:
        p50, p90, p95, p99 = (int(np.percentile(lengths, share, method="nearest")) for share in (50, 90, 95, 99))
        width = max(1, -(-int(lengths.max()) // _BINS))
        counts = np.bincount((lengths - 1) // width)
        edges = tuple(range(1, 1 + width * len(counts), width))
        mean = round(float(lengths.mean()), 1)
        return cls(mean, p50, p90, p95, p99, int(lengths.max()), edges, tuple(counts.tolist()))


def preview_examples(prepared: PreparedData) -> Examples:
    """The training examples; of a stream, its first."""
    if not prepared.streamed:
        return prepared.train
    return Examples(islice(prepared.train.stream, _STREAMED))


def preview(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, n: int, images: ImageReader | None = None
) -> list[PreviewExample]:
    """The first `n` examples, as the model sees them; the tokens of an image are one piece that names it."""
    special = ControlTokens(tokenizer).ids
    return [_decoded(examples[index], tokenizer, special, images) for index in range(min(n, len(examples)))]


def preview_summary(
    prepared: PreparedData,
    examples: Examples,
    previews: Sequence[PreviewExample],
    statistics: DataStatistics | None = None,
) -> dict:
    """All of it for machines."""
    return {
        "template": prepared.template,
        "streamed": prepared.streamed,
        "fingerprint": prepared.train.fingerprint,
        "images": int(examples.n_images.sum()),
        "lengths": asdict(LengthStatistics.of(examples.lengths)),
        "report": _as_dict(prepared.report),
        "eval_examples": len(prepared.eval) if prepared.eval is not None else 0,
        "eval_report": _as_dict(prepared.eval_report) if prepared.eval_report else None,
        "outlook": asdict(statistics) if statistics else None,
        "examples": [
            {
                "source": shown.source,
                "tokens": shown.tokens,
                "trained_tokens": shown.trained_tokens,
                "images": list(shown.images),
                "spans": [{"text": text, "trained": trained} for text, trained in shown.spans],
                "pieces": [piece._asdict() for piece in shown.pieces],
            }
            for shown in previews
        ],
    }


def visible_text(text: str) -> str:
    """With a sign for each character that is not seen, that turns the text around, or that a terminal obeys."""
    return text.translate(_VISIBLE)


def _as_dict(report: DataReport) -> dict:
    return {**asdict(report), "trained_share": report.trained_share}


def _decoded(
    example: Example, tokenizer: PreTrainedTokenizerBase, special: frozenset[int], images: ImageReader | None
) -> PreviewExample:
    trained = example.labels != IGNORE_INDEX
    is_image = np.zeros(len(trained), dtype=bool) if images is None else example.input_ids == images.token_id
    bounds = [0, *(np.flatnonzero(np.diff(is_image)) + 1).tolist(), len(trained)]
    pieces: list[Piece] = []
    names = iter(example.images)
    for start, end in pairwise(bounds):
        if is_image[start:end].any():
            each = images.fixed_tokens or end - start
            shown = islice(names, (end - start) // each)
            pieces += (Piece(f"\u27e8{Path(name).name}: {each} tokens\u27e9", False, True) for name in shown)
        else:
            part = example.input_ids[start:end].tolist(), trained[start:end].tolist()
            pieces += _pieces(*part, tokenizer, special)
    return PreviewExample(example.source, len(trained), int(trained.sum()), tuple(pieces), example.images)


def _pieces(
    ids: list[int], trained: list[bool], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]
) -> Iterator[Piece]:
    """Each token's share of the text: what decoding it behind its predecessor adds, so that no space is lost."""
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        last_of_its_kind = end == len(ids) or trained[end] != trained[start]
        context = tokenizer.decode(ids[before:start])
        text = tokenizer.decode(ids[before:end])[len(context) :]
        if last_of_its_kind or not text.endswith(_HALF_A_CHARACTER):
            yield Piece(text, trained[start], ids[start] in special)
            before, start = start, end
