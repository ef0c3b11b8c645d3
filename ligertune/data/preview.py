"""What a person looks at before training: examples as text with what is trained marked, and how long they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.encode import IGNORE_INDEX
from ligertune.data.examples import Example
from ligertune.data.prepare import DataReport, PreparedData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class PreviewExample:
    """An example, decoded. `pieces` are its tokens; those that only together make a character are one piece."""

    source: str
    tokens: int
    trained_tokens: int
    pieces: tuple[tuple[str, bool], ...]  # (text, trained)

    @property
    def spans(self) -> list[tuple[str, bool]]:
        """The pieces, joined where their neighbour is trained as they are."""
        runs = groupby(self.pieces, key=lambda piece: piece[1])
        return [("".join(text for text, _ in run), trained) for trained, run in runs]


@dataclass(frozen=True)
class LengthStatistics:
    """Tokens of an example."""

    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    max: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> LengthStatistics:
        p50, p90, p95, p99 = (int(np.percentile(lengths, share, method="nearest")) for share in (50, 90, 95, 99))
        return cls(round(float(lengths.mean()), 1), p50, p90, p95, p99, int(lengths.max()))


def preview(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, n: int) -> list[PreviewExample]:
    """The first `n` training examples, as the model sees them."""
    return [_decoded(prepared.train[index], tokenizer) for index in range(min(n, len(prepared.train)))]


def summary(prepared: PreparedData, previews: Sequence[PreviewExample]) -> dict:
    """All of it for machines."""
    return {
        "template": prepared.template,
        "fingerprint": prepared.train.fingerprint,
        "lengths": asdict(LengthStatistics.of(prepared.train.lengths)),
        "report": _as_dict(prepared.report),
        "eval_examples": len(prepared.eval) if prepared.eval is not None else 0,
        "eval_report": _as_dict(prepared.eval_report) if prepared.eval_report else None,
        "examples": [
            {
                "source": shown.source,
                "tokens": shown.tokens,
                "trained_tokens": shown.trained_tokens,
                "spans": [{"text": text, "trained": trained} for text, trained in shown.spans],
                "pieces": [text for text, _ in shown.pieces],
            }
            for shown in previews
        ],
    }


def _as_dict(report: DataReport) -> dict:
    return {**asdict(report), "trained_share": report.trained_share}


def _decoded(example: Example, tokenizer: PreTrainedTokenizerBase) -> PreviewExample:
    trained = example.labels != IGNORE_INDEX
    pieces = tuple(_pieces(example.input_ids.tolist(), trained.tolist(), tokenizer))
    return PreviewExample(example.source, len(trained), int(trained.sum()), pieces)


def _pieces(ids: list[int], trained: list[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Each token's share of the text: what decoding it behind its predecessor adds, so that no space is lost."""
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        last_of_its_kind = end == len(ids) or trained[end] != trained[start]
        context = tokenizer.decode(ids[before:start])
        text = tokenizer.decode(ids[before:end])[len(context) :]
        if last_of_its_kind or not text.endswith(_HALF_A_CHARACTER):
            yield text, trained[start]
            before, start = start, end
