"""on_bad_row: repair fixes rows where no guess is needed, reports each repair, and drops the others."""

from __future__ import annotations

import pytest

from ligertune.data.rows.conversation import REPAIRS, BadRow
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.errors import UserError


def convert(row: dict, repairs: list[str] | None):
    conversation = recognise_format("auto", row.keys(), "d").convert(Record(row, "d:1"), repairs)
    return [(message.role, message.content) for message in conversation.messages]


def chat(*turns: tuple[str, object]) -> dict:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


Q, A, Q2, A2 = ("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")
S, HI, RESULT, CALL = ("system", "s"), ("gpt", "Hi."), ("observation", "o"), ("function_call", '{"name": "f"}')
USER, ANSWER = ("user", "q"), ("assistant", "a")
REPAIRED = {
    "leading answer": ([HI, Q, A], [USER, ANSWER], ["leading answer"]),
    "leading answer between system and question": ([S, RESULT, HI, Q, A], [S, USER, ANSWER], ["leading answer"]),
    "greeting after the system turn is kept": ([S, HI, Q, A], [S, ("assistant", "Hi."), USER, ANSWER], []),
    "trailing question": ([Q, A, Q2], [USER, ANSWER], ["trailing question"]),
    "trailing result": ([Q, A, RESULT], [USER, ANSWER], ["trailing question"]),
    "empty question and its answer": ([("human", " "), A2, Q, A], [USER, ANSWER], ["empty turn"]),
    "empty answer and its question": ([Q2, ("gpt", ""), Q, A], [USER, ANSWER], ["empty turn"]),
    "null is empty": ([Q2, ("gpt", None), Q, A], [USER, ANSWER], ["empty turn"]),
    "consecutive questions": ([Q, Q2, A], [("user", "q\n\nr"), ANSWER], ["repeated role"]),
    "consecutive questions, one empty": ([Q, ("human", ""), A], [USER, ANSWER], ["empty turn"]),
    "consecutive answers": ([Q, A, A2], [USER, ("assistant", "a\n\nb")], ["repeated role"]),
    "consecutive system turns": ([S, ("system", "t"), Q, A], [("system", "s\n\nt"), USER, ANSWER], ["repeated role"]),
    "numbers, booleans and objects": (
        [("human", 3), ("gpt", True), ("human", {"a": "é"}), A],
        [("user", "3"), ("assistant", "true"), ("user", '{"a": "é"}'), ANSWER], ["not text"],
    ),
    "consecutive tool results are correct": (
        [Q, CALL, ("observation", ""), RESULT, A],
        [USER, ("assistant", ""), ("tool", ""), ("tool", "o"), ANSWER], [],
    ),
    "all repairs": (
        [HI, ("human", 1), Q, A, Q2, ("gpt", None), ("human", "t")], [("user", "1\n\nq"), ANSWER],
        ["not text", "leading answer", "repeated role", "empty turn", "trailing question"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPAIRED)
def test_repaired_turns_and_reported_repairs(name):
    turns, expected, expected_repairs = REPAIRED[name]
    repairs: list[str] = []
    assert (convert(chat(*turns), repairs), repairs) == (expected, expected_repairs)
    assert set(repairs) <= set(REPAIRS)
    if repairs:
        with pytest.raises(BadRow):
            convert(chat(*turns), None)


def test_alpaca_values_that_are_not_text():
    repairs: list[str] = []
    row = {"instruction": "How many?", "input": [1, 2], "output": 7}
    assert convert(row, repairs) == [("user", "How many?"), ("assistant", "7")] and repairs == ["not text"]


DIFFERENT_WEIGHTS = [{"role": "assistant", "content": text, "train": text == "b"} for text in "ab"]


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no answer", chat(Q, ("gpt", ""))),
        ("no answer", chat(A)),
        ("no answer", {"instruction": "i", "output": None}),
        ("roles out of order", chat(Q, A, S, A2)),
        ("roles out of order", {"messages": [{"role": "user", "content": "q"}, *DIFFERENT_WEIGHTS]}),
        ("unknown role", chat(Q, ("critic", "a"))),
        ("not text", {"instruction": "i", "output": b"bytes"}),
        ("call is not JSON", chat(Q, ("function_call", "f(1)"), A)),
    ],
)
def test_rows_whose_repair_would_be_a_guess_stay_bad(reason, row):
    with pytest.raises(BadRow) as caught:
        convert(row, [])
    assert caught.value.reason == reason


def test_images_are_not_repaired():
    with pytest.raises(UserError, match=r"d:1: the row's `images` is not text"):
        convert({**chat(Q, A), "images": ["a.jpg"]}, [])


def test_prepare_counts_repairs_with_the_first_source(tmp_path, prepared):
    rows = [chat(Q, A), chat(HI, Q, ("gpt", 1)), chat(Q)]
    report = prepared(rows, dataset={"on_bad_row": "repair"}).report
    assert (report.rows_read, report.examples, report.dropped) == (3, 2, {"no answer": 1})
    assert report.repaired == {"not text": 1, "leading answer": 1}
    assert report.first_repaired == dict.fromkeys(report.repaired, f"{tmp_path}/d.jsonl:2")
