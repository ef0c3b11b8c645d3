"""Data preview: decoded examples with their trained tokens marked, length statistics, and a summary as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ligertune.data.examples import Example, Examples
from ligertune.data.prepare import DataReport, PreparedData
from ligertune.data.templates.control_tokens import ControlTokens
from ligertune.data.templates.label_masking import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.modalities.modality import ModalityReader
    from ligertune.data.rows.row_kind import TargetNames

_INCOMPLETE = "\ufffd"  # what decode returns for some bytes of a character
_MAX_BINS = 20
PAIR_ANSWERS = ("chosen", "rejected")
_LABELS = {1: "desirable", 0: "undesirable"}
_STREAM_SAMPLE = 2000  # examples of a stream that are previewed


class Piece(NamedTuple):
    """The text of one token, or of several tokens that only together make a character."""

    text: str
    trained: bool
    special: bool  # a control token


@dataclass(frozen=True)
class PreviewExample:
    """A decoded sequence: an example, or one side of a pair."""

    number: int  # of its example, from 1
    source: str
    tokens: int
    trained_tokens: int
    pieces: tuple[Piece, ...]
    images: tuple[str, ...] = ()
    answer: str = ""  # a key of `answer_counts`, or empty

    @property
    def spans(self) -> list[tuple[str, bool]]:
        """The text as (text, is trained), as few as possible."""
        runs = groupby(self.pieces, key=lambda piece: piece.trained)
        return [("".join(piece.text for piece in run), trained) for trained, run in runs]

    def as_dict(self) -> dict[str, Any]:
        """Return the example for the JSON report."""
        spans = [{"text": text, "trained": trained} for text, trained in self.spans]
        return {**vars(self), "spans": spans, "pieces": [piece._asdict() for piece in self.pieces]}


def length_statistics(lengths: np.ndarray) -> dict[str, Any]:
    """Return mean, percentiles, maximum and histogram of lengths (N,).

    The bins of the histogram have equal width; bin i begins at `edges[i]`, the first at the shortest length.
    """
    shortest = int(lengths.min())
    longest = int(lengths.max())
    width = -(-(longest - shortest + 1) // _MAX_BINS)
    counts = np.bincount((lengths - shortest) // width).tolist()
    return {
        "mean": round(float(lengths.mean()), 1),
        **{f"p{share}": int(np.percentile(lengths, share, method="nearest")) for share in (50, 90, 95, 99)},
        "max": int(lengths.max()),
        "edges": [shortest + i * width for i in range(len(counts))],
        "counts": counts,
    }


def preview_examples(prepared: PreparedData) -> Examples:
    """Return the training examples, or the first of a stream."""
    examples = prepared.train
    return examples if isinstance(examples, Examples) else Examples(islice(examples.stream, _STREAM_SAMPLE))


def preview(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    reader: ModalityReader | None = None,
    *,
    labels: TargetNames | None = None,
) -> list[PreviewExample]:
    """Decode the first `n` examples; of a pair, both sequences. The tokens of an image are one piece with its name.

    labels: what the targets of the examples stand for.
    """
    special = ControlTokens(tokenizer).ids
    shown = []
    for number, example in enumerate(examples.select(range(min(n, len(examples)))), start=1):
        names = PAIR_ANSWERS if example.first_length else [_LABELS.get(example.desirable, "")]
        if labels is not None:
            # `resolve` of the kind of rows has replaced names of labels by numbers
            names = [labels.words(cast("tuple[float, ...]", example.targets))]
        for name, document in zip(names, example.documents(), strict=True):
            shown.append(replace(_decoded(document, tokenizer, special, reader), number=number, answer=name))
    return shown


def answer_counts(examples: Examples) -> dict[str, dict[str, int]]:
    """Return examples, tokens and trained tokens of each kind of answer: of both sides of pairs, or of each label."""
    counts = {}
    if examples.documents_per_example == 2:
        chosen = len(examples), examples.first_lengths, examples.first_trained
        rejected = len(examples), examples.lengths - chosen[1], examples.trained - chosen[2]
        counts = dict(zip(PAIR_ANSWERS, (chosen, rejected), strict=True))
    elif (examples.desirable >= 0).any():
        for value, name in _LABELS.items():
            here = examples.desirable == value
            counts[name] = int(here.sum()), examples.lengths[here], examples.trained[here]
    return {
        name: {"examples": count, "tokens": int(lengths.sum()), "trained_tokens": int(trained.sum())}
        for name, (count, lengths, trained) in counts.items()
    }


def preview_summary(
    prepared: PreparedData, examples: Examples, previews: Sequence[PreviewExample], statistics: dict[str, Any]
) -> dict[str, Any]:
    """Return the report of `ligertune data --json`. statistics: from `data_statistics`."""
    return {
        "template": prepared.template,
        "streamed": prepared.streamed,
        "fingerprint": prepared.train.fingerprint,
        "images": int(examples.n_media.sum()),
        "sequences_per_example": examples.documents_per_example,
        "answers": answer_counts(examples),
        "labels": prepared.labels.as_dict() if prepared.labels else None,
        "lengths": length_statistics(examples.document_lengths),
        "report": _report_as_dict(prepared.report, prepared),
        "eval_examples": len(prepared.eval or ()),
        "eval_report": _report_as_dict(prepared.eval_report, prepared) if prepared.eval_report else None,
        "outlook": statistics,
        "examples": [shown.as_dict() for shown in previews],
    }


def _report_as_dict(report: DataReport, prepared: PreparedData) -> dict[str, Any]:
    return {**asdict(report), "notes": prepared.notes_on(report), "trained_share": report.trained_share}


def _decoded(
    example: Example, tokenizer: PreTrainedTokenizerBase, special: frozenset[int], reader: ModalityReader | None
) -> PreviewExample:
    trained = example.labels != IGNORE_INDEX
    is_image = np.zeros(len(trained), dtype=bool) if reader is None else example.input_ids == reader.token_id
    bounds = [0, *(np.flatnonzero(np.diff(is_image)) + 1).tolist(), len(trained)]
    pieces: list[Piece] = []
    names = iter(example.media)
    for start, end in pairwise(bounds):
        if reader is not None and is_image[start:end].any():
            each = reader.fixed_tokens or end - start
            shown = islice(names, (end - start) // each)
            pieces += (Piece(f"\u27e8{Path(name).name}: {each} tokens\u27e9", False, True) for name in shown)
        else:
            part = example.input_ids[start:end].tolist(), trained[start:end].tolist()
            pieces += _pieces(*part, tokenizer, special)
    return PreviewExample(0, example.source, len(trained), int(trained.sum()), tuple(pieces), example.media)


def _pieces(
    ids: list[int], trained: list[bool], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]
) -> Iterator[Piece]:
    """Yield the text that each token adds to that of the tokens before it. Decoded alone, it would lose its space."""
    before = 0
    start = 0
    for end in range(1, len(ids) + 1):
        is_last_of_run = end == len(ids) or trained[end] != trained[start]
        context = str(tokenizer.decode(ids[before:start]))  # one text for one list of ids
        text = str(tokenizer.decode(ids[before:end]))[len(context) :]
        if is_last_of_run or not text.endswith(_INCOMPLETE):
            yield Piece(text, trained[start], ids[start] in special)
            before = start
            start = end
