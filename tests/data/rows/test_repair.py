"""on_bad_row: repair mends what needs no guess, says what it did, and leaves the rest to be dropped."""

from __future__ import annotations

import json

import pytest

from ligertune.data.rows.conversation import REPAIRS, BadRow
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.errors import UserError


def repair(row: dict):
    done: list[str] = []
    conversation = recognise_format("auto", row.keys(), "d").convert(Record(row, "d:1"), done)
    return [(message.role, message.content) for message in conversation.messages], done


def chat(*turns: tuple[str, object]) -> dict:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


MENDED = {
    "a leading answer": (
        [("gpt", "Hi."), ("human", "q"), ("gpt", "a")], [("user", "q"), ("assistant", "a")], ["leading answer"],
    ),
    "a leading answer between system and question": (
        [("system", "s"), ("observation", "o"), ("gpt", "Hi."), ("human", "q"), ("gpt", "a")],
        [("system", "s"), ("user", "q"), ("assistant", "a")], ["leading answer"],
    ),
    "a greeting after the system turn is kept": (
        [("system", "s"), ("gpt", "Hi."), ("human", "q"), ("gpt", "a")],
        [("system", "s"), ("assistant", "Hi."), ("user", "q"), ("assistant", "a")], [],
    ),
    "a trailing question": (
        [("human", "q"), ("gpt", "a"), ("human", "q2")], [("user", "q"), ("assistant", "a")], ["trailing question"],
    ),
    "a trailing result": (
        [("human", "q"), ("gpt", "a"), ("observation", "o")], [("user", "q"), ("assistant", "a")],
        ["trailing question"],
    ),
    "an empty question with its answer": (
        [("human", " "), ("gpt", "a"), ("human", "q"), ("gpt", "b")], [("user", "q"), ("assistant", "b")],
        ["empty turn"],
    ),
    "an empty answer with its question": (
        [("human", "q"), ("gpt", ""), ("human", "r"), ("gpt", "b")], [("user", "r"), ("assistant", "b")],
        ["empty turn"],
    ),
    "null is empty": (
        [("human", "q"), ("gpt", None), ("human", "r"), ("gpt", "b")], [("user", "r"), ("assistant", "b")],
        ["empty turn"],
    ),
    "questions in a row": (
        [("human", "q"), ("human", "r"), ("gpt", "a")], [("user", "q\n\nr"), ("assistant", "a")], ["repeated role"],
    ),
    "an empty question in a row": (
        [("human", "q"), ("human", ""), ("gpt", "a")], [("user", "q"), ("assistant", "a")], ["empty turn"],
    ),
    "answers in a row": (
        [("human", "q"), ("gpt", "a"), ("gpt", "b")], [("user", "q"), ("assistant", "a\n\nb")], ["repeated role"],
    ),
    "system turns in a row": (
        [("system", "s"), ("system", "t"), ("human", "q"), ("gpt", "a")],
        [("system", "s\n\nt"), ("user", "q"), ("assistant", "a")], ["repeated role"],
    ),
    "numbers, truth and objects": (
        [("human", 3), ("gpt", True), ("human", {"a": "é"}), ("gpt", "b")],
        [("user", "3"), ("assistant", "true"), ("user", '{"a": "é"}'), ("assistant", "b")], ["not text"],
    ),
    "results in a row are as they should be": (
        [("human", "q"), ("function_call", '{"name": "f"}'), ("observation", ""), ("observation", "o"), ("gpt", "a")],
        [("user", "q"), ("assistant", ""), ("tool", ""), ("tool", "o"), ("assistant", "a")], [],
    ),
    "all at once": (
        [("gpt", "x"), ("human", 1), ("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", None), ("human", "t")],
        [("user", "1\n\nq"), ("assistant", "a")],
        ["not text", "leading answer", "repeated role", "empty turn", "trailing question"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MENDED)
def test_turns_are_mended_and_it_is_said_how(name):
    turns, expected, done = MENDED[name]
    assert repair(chat(*turns)) == (expected, done)
    assert set(done) <= set(REPAIRS)


@pytest.mark.parametrize("name", [name for name, (_, _, done) in MENDED.items() if done])
def test_what_is_mended_is_a_bad_row_otherwise(name):
    row = chat(*MENDED[name][0])
    with pytest.raises(BadRow):
        recognise_format("auto", row.keys(), "d").convert(Record(row, "d:1"))


def test_alpaca_values_that_are_no_text():
    assert repair({"instruction": "How many?", "input": [1, 2], "output": 7}) == (
        [("system", ""), ("user", "How many?"), ("assistant", "7")][1:], ["not text"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no answer", chat(("human", "q"), ("gpt", ""))),
        ("no answer", chat(("gpt", "a"))),
        ("no answer", {"instruction": "i", "output": None}),
        ("roles out of order", chat(("human", "q"), ("gpt", "a"), ("system", "s"), ("gpt", "b"))),
        ("unknown role", chat(("human", "q"), ("critic", "a"))),
        ("not text", {"instruction": "i", "output": b"bytes"}),
        ("call is not JSON", chat(("human", "q"), ("function_call", "f(1)"), ("gpt", "a"))),
    ],
)
def test_what_would_take_a_guess_stays_a_bad_row(reason, row):
    with pytest.raises(BadRow) as caught:
        repair(row)
    assert caught.value.reason == reason


def test_turns_of_different_weight_are_not_joined():
    turns = [{"role": "user", "content": "q"}] + [
        {"role": "assistant", "content": text, "train": text == "b"} for text in "ab"
    ]
    with pytest.raises(BadRow, match="roles out of order"):
        repair({"messages": turns})


def test_images_are_no_matter_of_repair():
    with pytest.raises(UserError, match=r"d:1: the row's `images` is not text"):
        repair({**chat(("human", "q"), ("gpt", "a")), "images": ["a.jpg"]})


def test_prepare_counts_repairs_with_the_first_place(tmp_path, prepared):
    rows = [chat(("human", "q"), ("gpt", "a")), chat(("gpt", "x"), ("human", "q"), ("gpt", 1)), chat(("human", "q"))]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = prepared(path, dataset={"on_bad_row": "repair"}).report
    assert (report.rows_read, report.examples, report.dropped) == (3, 2, {"no answer": 1})
    assert report.repaired == {"not text": 1, "leading answer": 1}
    assert report.first_repaired == dict.fromkeys(report.repaired, f"{path}:2")
    assert prepared(path).report.examples == 1
