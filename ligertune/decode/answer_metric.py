"""Answers to the prompts of examples, compared with the answers of the data: exact match, or a user's function.

The prompt of an example is what stands before its last answer, the last run of tokens with labels. So prompts have the
template of training, and earlier turns of a conversation are part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ligertune.any_types import AnyModule
from ligertune.data.examples import Example, Examples
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.decode.batched_answers import AnswerRequest, answer_batches
from ligertune.errors import UserError, message_of
from ligertune.files.user_functions import load_function
from ligertune.recipe.section import EXACT_MATCH

# Tokens before an answer: BOS alone is no prompt.
_SHORTEST_PROMPT = 2
TRAINED = "that trains"  # what messages call the model of a run, after "the model"
# (answer of the model, answer of the data, prompt) -> score of a row
ScoreFunction = Callable[[str, str, str], Any]


@dataclass(frozen=True)
class Question:
    """A prompt as token ids and as text, and the answer that the data have. source: "file:line"."""

    ids: tuple[int, ...]
    prompt: str
    reference: str
    source: str


@dataclass(frozen=True)
class Questions:
    """Prompts of examples. end_tokens: ids that end answers in the data, besides those that the model knows."""

    asked: tuple[Question, ...]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True)
class AnswerMetric:
    """A metric of answers. name: of its measure."""

    name: str
    score: ScoreFunction


@dataclass(frozen=True)
class ScoredAnswer:
    """A question, the answer of the model, and its score."""

    question: Question
    answer: str
    score: float


def exact_match(answer: str, reference: str, prompt: str) -> float:
    """Return 1 if the answer is that of the data, without white space around both, else 0."""
    return float(answer.strip() == reference.strip())


def load_metric(name: str, *, key: str) -> AnswerMetric:
    """Return exact_match, or the function that "file.py:function" names: the file is executed.

    key: what messages name. Raises UserError.
    """
    if name == EXACT_MATCH:
        return AnswerMetric(EXACT_MATCH, exact_match)
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    if not file or path.suffix != ".py" or not function.isidentifier():
        raise UserError(f"{key}: {name} is no metric.", hint=f"Write {EXACT_MATCH}, or file.py:function.")
    if function == "loss":  # its measure would be eval_loss
        raise UserError(f"{key}: {name}: loss is the name of a measure.", hint="Give the function another name.")
    return AnswerMetric(function, load_function(name, key=key))


def read_questions(examples: Examples, tokenizer: PreTrainedTokenizerBase, *, most: int | None, key: str) -> Questions:
    """Return the prompts and answers of the first examples, at most `most` of them.

    key: what messages name. Raises UserError for pairs, images, and texts without a prompt.
    """
    if examples.documents_per_example > 1:
        raise UserError(f"{key}: pairs have no single answer to compare with.", hint="Leave it out.")
    if examples.n_media.any():
        raise UserError(f"{key}: answers to prompts with images are not generated.", hint="Leave it out.")
    count = len(examples) if most is None else min(most, len(examples))
    spans = [_last_answer(examples[index]) for index in range(count)]
    if all(start < _SHORTEST_PROMPT for start, _ in spans):
        raise UserError(
            f"{key}: the data are texts without prompts, so there is nothing to answer.",
            hint="Give rows with prompts and answers, or leave it out.",
        )
    asked = []
    ends = set()
    for index, (start, end) in enumerate(spans):
        ids = examples[index].input_ids.tolist()
        ends |= end_token(ids[start:end], tokenizer)
        asked.append(
            Question(
                tuple(ids[:start]),
                str(tokenizer.decode(ids[:start], skip_special_tokens=True)),
                str(tokenizer.decode(ids[start:end], skip_special_tokens=True)).strip(),
                examples[index].source,
            )
        )
    return Questions(tuple(asked), tuple(sorted(ends)))


def _last_answer(example: Example) -> tuple[int, int]:
    """Return the begin and end of the last run of tokens with labels; both 0 without any."""
    labelled = np.flatnonzero(example.labels != IGNORE_INDEX)
    if not len(labelled):
        return 0, 0
    gaps = np.flatnonzero(np.diff(labelled) > 1)
    first = labelled[gaps[-1] + 1] if len(gaps) else labelled[0]
    return int(first), int(labelled[-1]) + 1


def end_token(answer: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special token that ends an answer, if the last token that is no white space is one."""
    for token in reversed(answer):
        if token in tokenizer.all_special_ids:
            return {token}
        if str(tokenizer.decode([token])).strip():
            return set()
    return set()


def score_answers(
    model: AnyModule,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    metric: AnswerMetric,
    *,
    max_new_tokens: int,
    name: str,
    progress: Callable[[float], None] = lambda share: None,
) -> list[ScoredAnswer]:
    """Answer all questions greedily, and score the answers. name: of the model, for errors. Raises UserError."""
    requests = [
        AnswerRequest(question.ids, (), max_new_tokens, end_tokens=questions.end_tokens)
        for question in questions.asked
        if question.ids
    ]
    answered = iter(answer_batches(model, tokenizer, requests, name=name, progress=progress))
    found = []
    for question in questions.asked:
        answer = next(answered) if question.ids else ""
        found.append(ScoredAnswer(question, answer, _score(metric, answer, question)))
    return found


def _score(metric: AnswerMetric, answer: str, question: Question) -> float:
    try:
        return float(metric.score(answer, question.reference, question.prompt))
    except Exception as error:  # of a user's code
        raise UserError(
            f"The metric {metric.name} raised {type(error).__name__} for {question.source}: {message_of(error)}.",
            hint="It gets (answer, reference, prompt) as texts, and returns a number.",
        ) from error


@dataclass(frozen=True)
class AnswerMeasure:
    """The mean score of answers to held-out prompts, which a run computes with each evaluation."""

    tokenizer: PreTrainedTokenizerBase
    questions: Questions
    metric: AnswerMetric
    max_new_tokens: int

    def __call__(self, model: AnyModule) -> dict[str, float]:
        """Return the mean by the metric's name."""
        answered = score_answers(
            model, self.tokenizer, self.questions, self.metric, max_new_tokens=self.max_new_tokens, name=TRAINED
        )
        return {self.metric.name: sum(one.score for one in answered) / len(answered)}


def answer_measure(
    name: str, examples: Examples, tokenizer: PreTrainedTokenizerBase, *, max_samples: int | None, max_new_tokens: int
) -> AnswerMeasure:
    """Return the measure of `eval.metric`. The file of a function is executed. Raises UserError."""
    key = "eval.metric"
    metric = load_metric(name, key=key)
    questions = read_questions(examples, tokenizer, most=max_samples, key=key)
    return AnswerMeasure(tokenizer, questions, metric, max_new_tokens)
