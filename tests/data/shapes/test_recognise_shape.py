"""Shapes of published data sets: each is read with the right turns and trained answers, or refused with the line
that works."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.data.row_files import write_rows

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import RowShape, plain_format
from ligertune.data.rows.row_kind import CONVERSATIONS, row_kinds
from ligertune.data.rows.sources import RecordStream
from ligertune.data.shapes.message_trees import assemble_trees
from ligertune.data.shapes.recognise_shape import recognise_shape
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions

SHAPES = [json.loads(line) for line in Path(__file__).with_name("data_set_shapes.jsonl").read_text().split("\n")[:-1]]
LETTERS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}


def options(folder: Path, rows: list[dict], **spec) -> DatasetOptions:
    return DatasetOptions(path=str(write_rows(folder / "d.jsonl", rows)), **spec)


def read(folder: Path, shape: dict, *, rows: str = "conversations", **spec) -> tuple[RowShape, list[Conversation]]:
    """Return the recognised shape of the rows in a file, and the conversations in it."""
    chosen = options(folder, shape["rows"], **spec)
    records = list(RecordStream(chosen))
    found = recognise_shape(chosen, row_kinds()[rows], records, "d.jsonl")
    repairs = [] if shape.get("repair") else None
    parsed = [found.format.parse(found.of(record), repairs) for record in records]
    return found, [conversation for row in parsed for conversation in row.conversations]


def lines(hint: str) -> list[dict]:
    """Return the values of `columns` that a hint says to write."""
    return [yaml.safe_load(line) for line in re.findall(r"columns: (\{.*?\})", hint)]


def turns(conversation: Conversation) -> list[str]:
    """Return "role: text | input" of each turn, with a capital letter if it is trained."""
    written = []
    for turn in conversation.messages:
        letter = LETTERS[turn.role].upper() if turn.role == "assistant" and turn.trained else LETTERS[turn.role]
        text = f"({turn.reasoning}) " * bool(turn.reasoning) + turn.content + f" | {turn.input}" * bool(turn.input)
        written.append(f"{letter}: {text}" + "".join(f" -> {call.name} {call.arguments}" for call in turn.calls))
    return written


def texts(conversations: list[Conversation]) -> list[list[str]]:
    return [turns(conversation) for conversation in conversations]


def shapes(*, refused: bool, task: str | None = None):
    chosen = [shape for shape in SHAPES if ("refused" in shape, shape.get("task")) == (refused, task)]
    return pytest.mark.parametrize("shape", chosen, ids=[shape["name"] for shape in chosen])


@shapes(refused=False)
def test_a_shape_is_read(tmp_path, shape):
    found, conversations = read(tmp_path, shape)
    assert (found.format.name, found.columns) == (shape["format"], shape.get("read", {}))
    assert texts(conversations) == shape["says"]
    assert [tool["function"]["name"] for tool in conversations[0].tools] == shape.get("tools", [])
    assert conversations[0].chat_template_kwargs == shape.get("variables", {})
    assert shape["note"] in found.note if "note" in shape else not found.note
    assert shape.get("template", found.format.template) == found.format.template
    plain = plain_format(shape["rows"][0])  # recognised without a look at values
    assert plain is None or (RowShape(plain).columns, plain) == (found.columns, found.format)


@shapes(refused=True)
def test_a_shape_is_refused_with_the_line_that_works(tmp_path, shape):
    with pytest.raises(UserError, match=shape["refused"]) as caught:
        read(tmp_path, shape)
    check_lines(tmp_path, shape, caught.value.hint)


@shapes(refused=True, task="dpo")
def test_pairs_are_refused_with_the_lines_for_both_tasks(tmp_path, shape):
    with pytest.raises(UserError, match=shape["refused"]) as caught:
        read(tmp_path, shape)
    for_pairs, _, for_answers = caught.value.hint.partition(" To fine-tune on the chosen answers, ")
    assert for_pairs.startswith("Write task: dpo to train on the pairs")
    columns = (lines(for_pairs) or [{}])[0]
    _, (chosen, rejected) = read(tmp_path, shape, rows="pairs", columns=columns)
    assert (chosen.messages[-1].content, rejected.messages[-1].content) == ("a", "b")
    check_lines(tmp_path, shape, for_answers)


@shapes(refused=True, task="kto")
def test_answers_with_a_label_are_refused_with_the_lines_for_both_tasks(tmp_path, shape):
    with pytest.raises(UserError, match=shape["refused"]) as caught:
        read(tmp_path, shape)
    for_labels, _, for_answers = caught.value.hint.partition(" To train on every answer alike, ")
    assert for_labels.startswith("Write task: dpo and preference.loss_type: kto to train on the labels")
    read(tmp_path, shape, rows="labelled", columns=(lines(for_labels) or [{}])[0])
    format, columns = re.search(r"format: (\w+)", for_answers)[1], (lines(for_answers) or [{}])[0]
    found, conversations = read(tmp_path, shape, format=format, columns=columns)
    assert (found.format.name, texts(conversations)) == (shape["format"], shape["says"])
    assert "label" in found.note or "kto_tag" in found.note


def check_lines(folder: Path, shape: dict, hint: str) -> None:
    """Assert that each `columns` of the hint is accepted, and that the expected one gives the expected turns."""
    given = lines(hint)
    if "columns" not in shape:
        assert given in ([], [{"our name": "its name"}])
        return
    assert shape["columns"] in given
    for columns in given:
        found, conversations = read(folder, shape, columns=columns)
        if columns == shape["columns"]:
            assert (found.format.name, texts(conversations)) == (shape["format"], shape["says"])
            assert found.columns.keys() <= {"input", "system"}


def test_there_are_shapes_of_every_kind():
    assert len(SHAPES) >= 69 and len({shape["name"] for shape in SHAPES}) == len(SHAPES)
    assert len({json.dumps(sorted(shape["rows"][0])) for shape in SHAPES}) >= 69  # different columns


def refusal(folder: Path, row: dict, **spec) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, {"rows": [row]}, **spec)
    return str(caught.value)


def test_nested_names_that_are_not_there_say_where_they_end(tmp_path):
    row = {"data": {"items": [{"q": "q"}], "a": "a"}}
    columns = {"question": "data.items.q", "answer": "data.a"}
    assert "has no column `data.items.q` (data.datasets[].columns); it has data." in refusal(
        tmp_path, row, columns=columns
    )
    assert "`data.items` is a list: `data.items.0` is its first item." in refusal(tmp_path, row, columns=columns)
    for missing in ("data.items.1.q", "data.b", "data.a.b", "question.x"):
        assert f"no column `{missing}`" in refusal(tmp_path, row, columns={**columns, "question": missing})
    found, conversations = read(tmp_path, {"rows": [row]}, columns={**columns, "question": "data.items.0.q"})
    assert (texts(conversations), found.format.name) == ([["u: q", "A: a"]], "question_answer")


def test_a_column_whose_name_has_dots_comes_before_a_nested_one(tmp_path):
    row = {"data.q": "flat", "data": '{"q": "nested", "a": "a"}'}
    _, conversations = read(tmp_path, {"rows": [row]}, columns={"question": "data.q", "answer": "data.a"})
    assert texts(conversations) == [["u: flat", "A: a"]]


def test_two_system_prompts_are_ambiguous_unless_one_is_empty(tmp_path):
    row = {"question": "q", "answer": "a", "system_prompt": "s", "system_message": "t"}
    assert "columns: {system: system_prompt} or data.datasets[].columns: {system: system_message}" in refusal(
        tmp_path, row
    )
    _, conversations = read(tmp_path, {"rows": [{**row, "system_message": None}]})
    assert texts(conversations) == [["s: s", "u: q", "A: a"]]


def test_mixed_texts_are_dialogues_if_most_have_role_markers(tmp_path):
    marked, plain = {"text": "### Human: q### Assistant: a"}, {"text": "A heading: ### Human: and more."}
    assert read(tmp_path, {"rows": [marked, plain, plain]})[0].format.name == "text"
    with pytest.raises(BadRow, match="not a list of turns: no role markers in A heading"):
        read(tmp_path, {"rows": [marked, marked, plain]})
    assert read(tmp_path, {"rows": [marked]}, format="text")[1][0].messages[0].content == marked["text"]


def test_a_column_with_a_few_numbers_is_still_text(tmp_path):
    rows = [{"query": "q", "response": answer} for answer in ("a", "b", 3)]
    with pytest.raises(BadRow, match="not text: `answer` is 3"):
        read(tmp_path, {"rows": rows})
    assert texts(read(tmp_path, {"rows": rows, "repair": True})[1])[2] == ["u: q", "A: 3"]


@pytest.mark.parametrize(
    ("format", "columns"),
    [
        ("alpaca", {"instruction": "query", "output": "response"}),
        ("prompt_completion", {"prompt": "query", "completion": "response"}),
        ("question_answer", {"question": "query", "answer": "response"}),
    ],
)
def test_a_format_that_is_asked_for_prints_its_line(tmp_path, format, columns):
    row = {"query": "q", "response": "a"}
    assert lines(refusal(tmp_path, row, format=format)) == [columns]
    assert texts(read(tmp_path, {"rows": [row]}, format=format, columns=columns)[1]) == [["u: q", "A: a"]]


def test_messages_without_their_parent_and_prompts_without_answer_are_not_lost(tmp_path):
    keys = ("message_id", "parent_id", "role", "text")
    rows = [("1", None, "prompter", "q"), ("2", "1", "assistant", "a"), ("4", "3", "assistant", "lost")]
    rows += [("5", None, "prompter", "unanswered")]
    records = list(RecordStream(options(tmp_path, [dict(zip(keys, row, strict=True)) for row in rows])))
    assert [len(record.row["thread"] or ()) for record in records] == [0, 2, 1]
    assert [record.source.rpartition(":")[2] for record in records] == ["3", "2", "4"]
    reasons = []
    for record in records:
        try:
            recognise_shape(options(tmp_path, []), CONVERSATIONS, records, "d").format.parse(record)
        except BadRow as bad:
            reasons.append(bad.reason)
    assert reasons == ["parent is missing", "no answer"]


@pytest.mark.parametrize("name", ["oasst1, oasst2: rows are messages", "MetaMathQA", "openassistant-guanaco"])
def test_streams_and_the_cache_give_the_same_examples(tmp_path, prepared, name):
    rows = next(shape["rows"] for shape in SHAPES if shape["name"] == name)
    chosen = {"prompt_template": str(tmp_path / "chat.jinja"), "max_length": 512}
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    fresh, again = (prepared(rows, **chosen) for _ in range(2))
    assert (fresh.report.sets[0].cached, again.report.sets[0].cached) == (False, True)
    streamed = prepared(rows, streaming=True, **chosen)
    streamed.train.read_to(len(fresh.train))
    expected = sorted((example.input_ids.tolist(), example.labels.tolist()) for example in fresh.train)
    for data in (again.train, [streamed.train[number] for number in range(len(expected))]):
        assert sorted((example.input_ids.tolist(), example.labels.tolist()) for example in data) == expected
    first = [(part.format, part.columns, tuple(part.unread), part.note) for part in
             (data.report.sets[0] for data in (fresh, again, streamed))]  # fmt: skip
    assert first[0] == first[1] == first[2]
    assert all(note in data.notes for data in (fresh, again, streamed) if (note := first[0][3]))


ODD = (
    "", "q", "assistant", "[{", "### Human: q### Assistant: a", "[INST] <<SYS>>", None, True, 3, [], {}, ["q", 1], b"x",
    [{"role": "user"}], {"text": "q", "replies": [None]}, float("nan"), "USER: q\nASSISTANT: <functioncall> {'x'}",
)  # fmt: skip


def damaged(rng: random.Random, value: object) -> object:
    """Return the value with one place in it replaced, removed or renamed."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(ODD)
    if isinstance(value, list):
        place = rng.randrange(len(value))
        return [*value[:place], *([] if rng.random() < 0.2 else [damaged(rng, value[place])]), *value[place + 1 :]]
    place = rng.choice(list(value))
    others = {key: inner for key, inner in value.items() if key != place}
    if rng.random() < 0.3:
        return others if rng.random() < 0.5 else {**others, rng.choice(("text", "prompt", "value")): value[place]}
    return {**others, place: damaged(rng, value[place])}


def test_damaged_rows_are_read_dropped_or_refused():
    """No other exception leaves the recognition or the reading of rows."""
    rng = random.Random(0)
    ends = Counter()
    for _ in range(2000):
        damage = [damaged(rng, row) if rng.random() < 0.7 else row for row in rng.choice(SHAPES)["rows"]]
        rows = [Record(row if isinstance(row, dict) else {}, f"d:{number}") for number, row in enumerate(damage)]
        spec = DatasetOptions(path="d", format=rng.choice(("auto",) * 8 + ("question_answer", "dialogue")))
        try:
            records = list(assemble_trees(iter(rows), rows[0].row))
            kind = row_kinds()[rng.choice(("conversations",) * 8 + ("pairs", "labelled"))]
            found = recognise_shape(spec, kind, records, "d")
        except UserError:
            ends["refused"] += 1
            continue
        for record in records:
            try:
                found.format.parse(found.of(record), rng.choice((None, [])))
                ends["read"] += 1
            except (BadRow, UserError):
                ends["dropped"] += 1
    assert min(ends[end] for end in ("refused", "read", "dropped")) > 100, ends
