"""Scored answers that are kept as training data: best of a prompt, above a threshold, pairs, or all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ligertune.features.sample.answer_files import StoredAnswer
from ligertune.features.sample.recipe import SampleSpec
from ligertune.features.sample.sample_prompts import SamplePrompt


@dataclass(frozen=True)
class RatedAnswer:
    """An answer with its prompt. score: weighted sum; None if nothing scores. scores: of each function by name."""

    prompt: SamplePrompt
    answer: StoredAnswer
    score: float | None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The answer as training data: without white space around it where a chat template renders it."""
        return self.answer.text.strip() if self.prompt.form == "chat" else self.answer.text

    def as_dict(self) -> dict[str, Any]:
        """Return a line of the file with all scored answers."""
        return {
            "prompt": self.prompt.scored,
            "completion": self.answer.text,
            "score": self.score,
            "scores": self.scores,
            "finish": self.answer.finish,
            "tokens": self.answer.tokens,
            "number": self.answer.number,
            "source": self.prompt.source,
        }


@dataclass
class KeptRows:
    """Rows for `ligertune train`. truncated: kept answers that were cut at max_new_tokens.

    empty: answers without text, which cannot be trained. ties: prompts whose best and worst score are equal.
    below: prompts without an answer that reaches the threshold.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    truncated: int = 0
    empty: int = 0
    ties: int = 0
    below: int = 0


def keep_rows(spec: SampleSpec, rated: Sequence[RatedAnswer]) -> KeptRows:
    """Return the rows to train on. rated: in the order of prompts, and of their answers."""
    kept = KeptRows()
    for _, group in groupby(rated, key=lambda one: one.answer.prompt):
        answers = list(group)
        # an empty answer cannot be trained, and it would be the rejected one of a pair
        usable = [one for one in answers if one.text.strip()]
        kept.empty += len(answers) - len(usable)
        if not usable:
            continue
        if spec.keep == "pairs":
            _keep_pair(spec, usable, kept)
            continue
        chosen = list(_chosen(spec, usable))
        kept.below += not chosen
        kept.rows += map(_row, chosen)
        kept.truncated += sum(one.answer.finish == "length" for one in chosen)
    return kept


def _chosen(spec: SampleSpec, answers: Sequence[RatedAnswer]) -> Iterator[RatedAnswer]:
    """Yield the answers to one prompt that are kept; of equally good ones the first is best."""
    candidates = [max(answers, key=_score)] if spec.keep == "best" else answers
    yield from (one for one in candidates if _reaches(spec, one))


def _reaches(spec: SampleSpec, one: RatedAnswer) -> bool:
    return spec.threshold is None or _score(one) >= spec.threshold


def _score(one: RatedAnswer) -> float:
    return one.score if one.score is not None else 0.0


def _keep_pair(spec: SampleSpec, answers: Sequence[RatedAnswer], kept: KeptRows) -> None:
    best = max(answers, key=_score)
    worst = min(answers, key=_score)
    if best.text == worst.text:  # also if all scores are equal: both are the first answer then
        kept.ties += 1
    elif not _reaches(spec, best):
        kept.below += 1
    else:
        kept.rows.append(_pair(best, worst))
        kept.truncated += best.answer.finish == "length"


def _row(one: RatedAnswer) -> dict[str, Any]:
    """Return a row of the format that `train` renders as the prompt was rendered."""
    prompt = one.prompt
    if prompt.form == "chat":
        row: dict[str, Any] = {"messages": [*prompt.turns, {"role": "assistant", "content": one.text}]}
        return row | _tools(prompt)
    if prompt.form == "alpaca":
        return {**_alpaca(prompt), "output": one.text}
    return {"prompt": prompt.text, "completion": one.text}


def _pair(best: RatedAnswer, worst: RatedAnswer) -> dict[str, Any]:
    prompt = best.prompt
    scores = {"score_chosen": best.score, "score_rejected": worst.score}
    if prompt.form == "chat":
        turns = {"prompt": prompt.turns, "chosen": best.prompt.completion(best.text)}
        return {**turns, "rejected": prompt.completion(worst.text), **_tools(prompt), **scores}
    asked = _alpaca(prompt) if prompt.form == "alpaca" else {"prompt": prompt.text}
    return {**asked, "chosen": best.text, "rejected": worst.text, **scores}


def _alpaca(prompt: SamplePrompt) -> dict[str, str]:
    last = prompt.messages[-1]
    return {"instruction": last.content, "input": last.input}


def _tools(prompt: SamplePrompt) -> dict[str, Any]:
    return {"tools": list(prompt.tools)} if prompt.tools else {}
