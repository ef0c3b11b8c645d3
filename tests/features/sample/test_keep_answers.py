"""Which scored answers are kept, and that `train` reads what is written."""

import json
from pathlib import Path

import pytest

from ligertune.data.prepare import prepare
from ligertune.data.rows.conversation import Message
from ligertune.features.sample.answer_files import StoredAnswer
from ligertune.features.sample.keep_answers import KeptRows, RatedAnswer, keep_rows
from ligertune.features.sample.recipe import SampleSpec
from ligertune.features.sample.sample_prompts import SamplePrompt
from ligertune.features.sample.sample_report import distribution, histogram
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.recipe.read import recipe_of

# prompt -> (text, score) of its answers
SCORED = {
    0: [("one", 0.2), ("two", 0.9), ("three", 0.9), ("four", 0.1)],
    1: [("five", 0.5), ("six", 0.5)],
    2: [(" \n", 2.0), ("seven", 0.4), ("eight", 0.3)],
}


def rated(form: str) -> list[RatedAnswer]:
    found = []
    for place, answers in SCORED.items():
        messages = (Message("user", f"Question {place}", input="More" if form == "alpaca" else ""),)
        prompt = SamplePrompt((1,), form, messages, (), f"Question {place}: ", {}, f"rows.jsonl:{place + 1}")
        for number, (text, score) in enumerate(answers):
            shown = f" {text}\n" if form == "chat" else text
            finish = "length" if text == "two" else "stop"
            found.append(RatedAnswer(prompt, StoredAnswer(place, number, shown, finish, 3), score, {"f": score}))
    return found


def kept(form: str = "plain", **settings: object) -> KeptRows:
    return keep_rows(SampleSpec(**settings), rated(form))


def answers(rows: KeptRows) -> list[str]:
    return [row["completion"] for row in rows.rows]


def test_best_is_the_first_of_the_highest_and_empty_answers_are_left_out():
    found = kept(keep="best")
    assert answers(found) == ["two", "five", "seven"]
    assert (found.empty, found.truncated, found.below) == (1, 1, 0)


def test_a_threshold_is_the_lowest_score_that_is_kept():
    assert answers(kept(keep="best", threshold=0.5)) == ["two", "five"]
    above = kept(keep="above", threshold=0.5)
    assert answers(above) == ["two", "three", "five", "six"] and above.below == 1
    assert answers(kept(keep="all")) == ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def test_pairs_are_best_against_worst_without_ties():
    found = kept(keep="pairs")
    assert [(row["chosen"], row["rejected"]) for row in found.rows] == [("two", "four"), ("seven", "eight")]
    assert found.rows[0]["score_chosen"] == 0.9 and found.ties == 1
    assert len(kept(keep="pairs", threshold=0.5).rows) == 1


@pytest.mark.parametrize("form", ["plain", "alpaca", "chat"])
@pytest.mark.parametrize("keep", ["best", "pairs"])
def test_training_reads_the_rows_with_the_same_prompt(form, keep, quickstart: Path, tmp_path):
    """The prompt of the prepared rows ends as the sampled prompt did, and the answer is what was kept."""
    path = tmp_path / "kept.jsonl"
    rows = kept(form, keep=keep).rows
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    task = {"task": "dpo"} if keep == "pairs" else {}
    recipe = recipe_of(
        {
            **task,
            "model": {"model_name_or_path": str(quickstart / "stories260K")},
            "data": {"datasets": [{"path": str(path)}], "cache": False, "num_proc": 1},
            "checkpoint": {"output_dir": "runs/none"},
        }
    )
    tokenizer = load_tokenizer(recipe.model).tokenizer
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    prepared = prepare(recipe.data, tokenizer, seed=0, rows="pairs" if keep == "pairs" else "conversations")
    assert len(prepared.train) == len(rows)
    text = tokenizer.decode(prepared.train[0].input_ids)
    assert {"plain": "Question 0: two", "alpaca": "More\n\n### Response:\ntwo", "chat": "assistant: two"}[form] in text


def test_distributions_are_those_of_numpy_by_hand():
    found = distribution([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.quantiles["0"], found.quantiles["50"], found.quantiles["100"]) == (2.5, 1.0, 2.5, 4.0)
    few = histogram([0.0, 1.0, 1.0])
    assert (few.values, few.counts, few.width) == ([0.0, 1.0], [1, 2], 0.0)
    many = histogram([float(value) for value in range(100)])
    assert many.counts == [10] * 10 and many.width == pytest.approx(9.9)
