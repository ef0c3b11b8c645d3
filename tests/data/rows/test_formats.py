"""Rows are converted by the format of their columns; bad rows have a reason, and on_bad_row: repair fixes some."""

import json

import pytest

from ligertune.data.bad_rows import DROP_REASONS, BadRow
from ligertune.data.rows.conversation import ROLES, Conversation
from ligertune.data.rows.formats import FORMATS, recognise_format
from ligertune.data.rows.pairs import PAIR_FORMATS
from ligertune.data.rows.row_kind import FirstRows, check_columns
from ligertune.data.rows.sources import Record
from ligertune.errors import UserError
from ligertune.features.scores.label_formats import recognise_labels


def convert(row: dict, repairs: list[str] | None = None) -> Conversation:
    return recognise_format("auto", row.keys(), "data.jsonl").convert(Record(row, "data.jsonl:7"), repairs)


def shape(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def chat(*turns: tuple[str, object], **more) -> dict:
    return {"messages": [{"role": role, "content": content, **more} for role, content in turns]}


def shared(*turns: tuple[str, object]) -> dict:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


def test_alpaca_input_may_be_missing_or_null_and_system_and_history_come_first():
    user, answer = convert({"instruction": "i", "input": "n", "output": "o", "category": 3}).messages
    assert (user.content, user.input, answer.content) == ("i", "n", "o")
    missing, null, empty = (convert({"instruction": "i", "output": "o", **more})
                            for more in ({}, {"input": None}, {"input": ""}))  # fmt: skip
    assert missing == null == empty
    row = {"instruction": "i", "output": "o", "system": "s", "history": [["q", "a"]]}
    earlier = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert shape(convert(row)) == [*earlier, ("user", "i"), ("assistant", "o")]


SYSTEM_NAMES, USER_NAMES = ("system", "developer"), ("human", "user", "User ", "prompter")
ASSISTANT_NAMES = ("gpt", "chatgpt", "bing", "bard", "bot", "assistant", "model", "chatbot", "AI", " GPT")
TOOL_NAMES = ("tool", "function", "observation", "function_response", "Observation", "tool_response")


def test_roles_have_many_names():
    for system, user, assistant in zip(SYSTEM_NAMES * 5, USER_NAMES * 3, ASSISTANT_NAMES, strict=False):
        turns = [(system, "s"), (user, "q"), (assistant, "a")]
        expected = [("system", "s"), ("user", "q"), ("assistant", "a")]
        assert shape(convert(shared(*turns))) == shape(convert(chat(*turns))) == expected, turns
    columns = convert({**chat(("user", "q"), ("assistant", "a")), "system": "s"})
    assert shape(columns) == expected
    for call, tool in zip(("function_call", "tool_call") * 3, TOOL_NAMES, strict=False):
        messages = convert(shared(("user", "q"), (call, '{"name": "f"}'), (tool, "49"), ("gpt", "a"))).messages
        assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
        assert messages[1].calls[0].name == "f" and messages[2].content == "49"
    names = (*SYSTEM_NAMES, *USER_NAMES, *ASSISTANT_NAMES, *TOOL_NAMES, "function_call", "tool_call")
    assert set(ROLES) == {name.strip().lower() for name in names}


def test_openais_tool_calls_and_older_function_call():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    made = convert({"messages": turns}).messages[1].calls[0]
    assert (made.name, made.arguments, made.text) == ("f", {"x": "é"}, '{"name": "f", "arguments": {"x": "é"}}')
    call = {"name": "f", "arguments": '{"x": 1}'}
    row = chat(("user", "q"), ("assistant", None), ("function", "2"), ("assistant", "It is 2."))
    row["messages"][1]["function_call"] = call
    messages = convert(row).messages
    assert (messages[1].calls[0].arguments, messages[2].role) == ({"x": 1}, "tool")


def test_raw_text_and_prompt_and_completion_as_texts_or_turns():
    assert shape(convert({"text": " one\n\n"})) == [("assistant", " one\n\n")]
    assert shape(convert({"prompt": "2 + 2 =", "completion": " 4"})) == [("user", "2 + 2 ="), ("assistant", " 4")]
    prompt = chat(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"))["messages"]
    messages = convert({"prompt": prompt, "completion": chat(("assistant", "b"))["messages"]}).messages
    trained = [message.content for message in messages if message.trained and message.role == "assistant"]
    assert trained == ["b"] and len(messages) == 5
    # turns with null keys, and turns in a cell of a CSV file
    turns = [{"role": "user", "content": "q", "from": None, "value": None}, {"role": "assistant", "content": "a"}]
    assert shape(convert({"conversations": turns})) == [("user", "q"), ("assistant", "a")]
    assert convert({"messages": json.dumps(turns)}) == convert({"messages": turns})


def test_media_are_an_error_with_their_source():
    rows = [chat(("user", "q"), ("assistant", "a")), {"instruction": "i", "output": "o"}]
    for column, row in zip(("image", "images", "videos", "audio"), rows * 2, strict=True):
        assert convert({**row, column: []}) == convert({**row, column: None}) == convert(row)
        with pytest.raises(UserError, match=rf"data\.jsonl:7: the row's `{column}` is not text, and this run"):
            convert({**row, column: ["x.png"]})
    for kind in ("image", "image_url", "video", "input_audio"):
        parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: "x"}]
        with pytest.raises(UserError, match=rf"data\.jsonl:7: a part of type {kind} is not text"):
            convert(chat(("user", parts), ("assistant", "a")))


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_arguments_under_the_names_of_other_libraries(key):
    for call in ({"name": "f", key: {"x": 1}}, {"function": {"name": "f", key: '{"x": 1}'}}):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        (made,) = convert({"messages": turns}).messages[1].calls
        assert made.arguments == {"x": 1}


def test_a_call_without_arguments_and_fields_for_templates():
    call = {"id": "c1", "function": {"name": "f", "arguments": ""}}
    turns = [
        {"role": "user", "content": "a", "name": "Ann", "weight": None},
        {"role": "assistant", "tool_calls": [call], "weight": 1},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "assistant", "content": "b"},
    ]
    question, calling, result, _ = convert({"messages": turns}).messages
    assert (calling.calls[0].arguments, calling.calls[0].id) == ({}, "c1")
    assert (question.fields, calling.fields, result.fields) == ({"name": "Ann"}, {}, {"tool_call_id": "c1"})


def test_function_calls_observations_and_parts_of_a_turn():
    call = '{"name": "area", "arguments": {"side": 7}}'
    row = shared(("human", "q"), ("function_call", call), ("observation", "49"), ("gpt", "It is 49."))
    row["tools"] = json.dumps([{"name": "area", "parameters": {}}])
    conversation = convert(row)
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    made = conversation.messages[1].calls[0]
    assert (made.name, made.arguments, made.text) == ("area", {"side": 7}, call)
    assert conversation.tools == ({"type": "function", "function": {"name": "area", "parameters": {}}},)
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "text", "text": "a"}, "b",
             {"type": "tool_call", "value": '{"name": "f"}'}]  # fmt: skip
    message = convert(chat(("user", [{"type": "text", "value": "q"}]), ("assistant", parts))).messages[1]
    assert (message.content, message.reasoning, message.calls[0].name) == ("ab", "hm", "f")


CALL = {"function": {"name": "f", "arguments": {"n": 1}}}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "content": "3"}, {"role": "assistant", "content": "a"}]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(TURNS), "tools": json.dumps([TOOL])},
        {"messages": [json.dumps(turn) for turn in TURNS], "tools": [json.dumps(TOOL)]},
        {"messages": json.dumps([json.dumps(turn) for turn in TURNS]), "tools": [TOOL["function"]]},
        {"messages": json.dumps(json.dumps(TURNS)), "tools": [{**TOOL, "function": json.dumps(TOOL["function"])}]},
        {"messages": [TURNS[0], {**TURNS[1], "tool_calls": json.dumps([CALL])}, *map(json.dumps, TURNS[2:])],
         "tools": [{"name": "f", "parameters": '{"type": "object"}'}]},
        {"messages": [TURNS[0], {**TURNS[1], "tool_calls": [json.dumps(CALL)]}, *TURNS[2:]], "tools": [TOOL]},
        {"messages": [TURNS[0], {**TURNS[1], "tool_calls": [{"function": json.dumps(CALL["function"])}]}, *TURNS[2:]],
         "tools": [TOOL]},
        {"prompt": json.dumps(TURNS[:1]), "completion": json.dumps(TURNS[1:]), "tools": json.dumps([TOOL])},
    ],
    ids=["column", "turns", "turns in a column", "twice", "some turns", "calls", "function of a call", "prompt"],
)  # fmt: skip
def test_objects_that_are_written_as_text_are_read(row):
    conversation = convert(row)
    assert shape(conversation) == [("user", "q"), ("assistant", ""), ("tool", "3"), ("assistant", "a")]
    assert [(call.name, call.arguments) for call in conversation.messages[1].calls] == [("f", {"n": 1})]
    assert conversation.tools == (TOOL,)


def test_json_that_somebody_wants_to_train_stays_text():
    texts = ['{"city": "Oslo", "author": "x"}', '["a", "b"]']
    expected = [("user", texts[0]), ("assistant", texts[1])]
    assert shape(convert({"messages": texts})) == expected
    assert shape(convert({"instruction": texts[0], "output": texts[1]})) == expected
    assert shape(convert({"prompt": texts[0], "completion": texts[1]})) == expected
    assert shape(convert({"prompt": "{'city': 1}", "completion": "[{'role': 'clerk'}]"}))[0] == ("user", "{'city': 1}")
    about_chats = json.dumps(TURNS)
    assert shape(convert({"prompt": "Make up a chat.", "completion": about_chats}))[1] == ("assistant", about_chats)


@pytest.mark.parametrize("column", ["prompt", "completion", "chosen", "rejected", "messages"])
@pytest.mark.parametrize(
    "text", [str(TURNS), str(TURNS[0]), "[{'content': 'q', 'role': 'user'}\n {", json.dumps(TURNS)[:-1]]
)
def test_turns_that_are_written_as_the_text_of_another_language_are_not_trained(column, text):
    """pandas writes a list in a cell of a csv file as Python does."""
    row = {"prompt": "q", "completion": "a"} if column in ("prompt", "completion") else {"messages": TURNS[:1]}
    if column in ("chosen", "rejected"):
        row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    formats = PAIR_FORMATS if "chosen" in row else FORMATS
    with pytest.raises(BadRow) as caught:
        recognise_format("auto", row, "d.csv", formats).parse(Record({**row, column: text}, "d.csv:2"))
    assert caught.value.reason == "not a list of turns"


def test_an_answer_may_be_one_turn_and_parts_may_have_the_names_of_a_response():
    question, answer = chat(("user", "q"), ("assistant", "a"))["messages"]
    for completion in (answer, json.dumps(answer), [answer], "a"):
        messages = convert({"prompt": [question], "completion": completion}).messages
        assert [(turn.content, turn.trained) for turn in messages] == [("q", False), ("a", True)]
    parts = [[{"type": kind, "text": "x"}] for kind in ("input_text", "output_text")]
    assert shape(convert(chat(("user", parts[0]), ("assistant", parts[1])))) == [("user", "x"), ("assistant", "x")]


def weighted(role: int, key: str, weight: float | None) -> dict:
    row = chat(("user", "q"), ("assistant", "a"))
    row["messages"][role][key] = weight
    return row


@pytest.mark.parametrize("key", ["loss_weight", "weight", "train", "training", "loss"])
def test_the_weight_of_a_turn(key):
    for weight in (0, 0.0, False):
        assert not convert(weighted(1, key, weight)).messages[1].trained, weight
    for weight in (1, 1.0, True, None):
        assert convert(weighted(1, key, weight)).messages[1].trained, weight
    for role, weight, says in ((1, 0.5, "only 0 and 1"), (0, 1, "only the assistant's turns")):
        with pytest.raises(UserError, match=rf"data\.jsonl:7: {key} .*{says}"):
            convert(weighted(role, key, weight))


@pytest.mark.parametrize("key", ["train_detail", "training_detail", "mask"])
def test_a_mask_of_a_part_of_a_turn_is_refused(key):
    for nothing in (None, False, 0, []):
        assert convert(weighted(1, key, nothing)).messages[1].trained
    with pytest.raises(UserError, match=rf"data\.jsonl:7: the key `{key}` of a turn masks it in a form"):
        convert(weighted(1, key, [{"begin_offset": 0, "end_offset": 1, "train": False}]))


BAD = [
    ("missing value", {"instruction": "i", "output": None}),
    ("missing value", {"messages": None}),
    ("missing value", chat(("user", "q"), ("assistant", None))),
    ("missing value", {"messages": [{"content": "q"}]}),
    ("not text", {"instruction": "i", "output": 42}),
    ("not text", {"instruction": ["i"], "output": "o"}),
    ("not text", shared(("human", 1), ("gpt", "a"))),
    ("not text", chat(("user", [{"type": "refusal", "refusal": "x"}]), ("assistant", "a"))),
    ("not a list of turns", {"messages": "hello"}),
    ("not a list of turns", {"messages": ["hello"]}),
    ("not a list of turns", {"conversations": {"from": "human", "value": "q"}}),
    ("not a list of turns", {"instruction": "i", "output": "o", "history": 3}),
    ("not a list of turns", {"messages": [{"role": "user", "content": "q", "tool_calls": 1}]}),
    ("not a list of turns", {"messages": ['{"role": "user", "content": "q"}', "a"]}),
    ("not a list of turns", {"messages": ['{"role": "user", "content": "q"}', '{"role": "assistant", "content": ']}),
    (
        "not a list of turns",
        {"messages": ["{'role': 'user', 'content': 'q'}", "{'role': 'assistant', 'content': 'a'}"]},
    ),
    ("not a list of turns", {"messages": ['{"from": "critic", "value": "q"}', '{"from": "critic", "value": "a"}']}),
    ("unknown role", shared(("human", "q"), ("critic", "a"))),
    ("roles out of order", shared(("human", "q"), ("human", "q"), ("gpt", "a"))),
    ("roles out of order", shared(("gpt", "a"), ("human", "q"), ("gpt", "a"))),
    ("roles out of order", chat(("user", "q"), ("system", "s"), ("assistant", "a"))),
    ("roles out of order", chat(("user", "q"), ("tool", "t"), ("assistant", "a"))),
    ("no answer", shared(("human", "q"))),
    ("no answer", {"messages": []}),
    ("no text", {"text": " \n"}),
    ("not text", {"prompt": 3, "completion": "c"}),
    ("empty answer", {"prompt": "p", "completion": ""}),
    ("last turn is not an answer", shared(("human", "q"), ("gpt", "a"), ("human", "q"))),
    ("empty prompt", {"instruction": " ", "input": "", "output": "o"}),
    ("empty prompt", shared(("human", ""), ("gpt", "a"))),
    ("empty answer", {"instruction": "i", "output": " \n"}),
    ("empty answer", chat(("user", "q"), ("assistant", ""))),
    ("call is not JSON", shared(("human", "q"), ("function_call", "area(7)"), ("gpt", "a"))),
    ("call is not JSON", shared(("human", "q"), ("function_call", '{"side": 7}'), ("gpt", "a"))),
    ("tools are not JSON", {**chat(("user", "q"), ("assistant", "a")), "tools": "[{"}),
]


@pytest.mark.parametrize(("reason", "row"), BAD, ids=[f"{reason}-{n}" for n, (reason, _) in enumerate(BAD)])
def test_a_bad_row_has_its_reason(reason, row):
    with pytest.raises(BadRow) as caught:
        convert(row)
    assert caught.value.reason == reason and reason in DROP_REASONS


def test_unusual_rows_are_kept():
    for row in (
        {"instruction": "", "input": "n", "output": "o"},
        {"instruction": "i", "input": "no input", "output": "o"},
        chat(("system", "s"), ("assistant", "Welcome.")),
        chat(("system", " "), ("user", "q"), ("assistant", "a")),
        chat(("user", "q"), ("assistant", ""), reasoning="It is the key `reasoning`."),
        shared(("human", "q"), ("function_call", '{"name": "f"}'), ("observation", ""), ("gpt", "a")),
    ):
        assert convert(row).messages[-1].role == "assistant"


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (("instruction", "output"), "alpaca"), (("instruction", "input", "output", "text"), "alpaca"),
        (("id", "conversations"), "sharegpt"), (("messages", "prompt", "prompt_id"), "messages"),
        (("prompt", "completion", "id"), "prompt_completion"), (("text", "url"), "text"),
    ],
)  # fmt: skip
def test_formats_are_recognised_by_columns(columns, name):
    assert recognise_format("auto", columns, "d").name == name == recognise_format(name, columns, "d").name


@pytest.mark.parametrize(
    ("name", "columns", "says"),
    [
        ("auto", ("instruction", "response"), r"columns \(instruction, response\).*nearest is alpaca.*needs `output`"),
        ("auto", (), r"columns \(none\)"),
        ("auto", ("conversation",), "nearest is sharegpt, which also needs `conversations`"),
        ("messages", ("instruction", "output"), "do not fit messages, which also needs `messages`"),
        ("auto", ("messages", "conversations"), "fit sharegpt and messages"),
        ("auto", ("prompt", "completion", "text"), "fit prompt_completion and text"),
    ],
)
def test_other_columns_name_the_nearest_format(name, columns, says):
    with pytest.raises(UserError, match=says):
        recognise_format(name, columns, "d")


def test_a_csv_without_names_of_columns_is_told_by_its_values():
    columns = ("When will my order arrive?", "delivery")
    with pytest.raises(UserError, match="names of the columns into the first line"):
        recognise_format("auto", columns, "tickets.csv")
    with pytest.raises(UserError, match=r"data.datasets\[\]\.columns"):
        recognise_format("auto", columns, "tickets.jsonl")
    with pytest.raises(UserError, match="names of the columns into the first line"):
        recognise_labels(FirstRows([Record(dict.fromkeys(columns, "a"), "tickets.csv:2")], "auto", "tickets.csv"))


@pytest.mark.parametrize(
    ("columns", "renames"),
    [
        ("type query original_question response", "{instruction: query, output: response}"),  # MetaMathQA
        ("id query answers tools", "{instruction: query, output: answers}"),  # xLAM
        ("inputs targets", "{instruction: inputs, output: targets}"),  # Aya
        ("instruction response", "{output: response}"),
        ("conversation id", "{messages: conversation}"),
        ("url content", "{text: content}"),
    ],
)
def test_the_hint_names_the_columns_that_work(columns, renames):
    with pytest.raises(UserError) as caught:
        recognise_format("auto", columns.split(), "d")
    assert caught.value.hint == f"Write data.datasets[].columns: {renames}."
    ours = dict(pair.split(": ") for pair in renames.strip("{}").split(", "))
    check_columns(ours)
    renamed = {*columns.split(), *ours} - set(ours.values())
    assert set(recognise_format("auto", renamed, "d").required) <= renamed


def test_a_rename_to_a_column_that_no_format_reads_is_refused():
    # `thread` is made of the rows of a message tree, and is no column of a data set
    check_columns({column for row in FORMATS for column in row.required + row.optional} - {"thread"})
    with pytest.raises(UserError, match="no format reads a column `verdict`"):
        check_columns(["verdict"])


# ---- on_bad_row: repair

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
    assert (shape(convert(shared(*turns), repairs)), repairs) == (expected, expected_repairs)
    if repairs:
        with pytest.raises(BadRow):
            convert(shared(*turns), None)


def test_alpaca_values_that_are_not_text_are_repaired_and_images_are_not():
    with pytest.raises(UserError, match=r"data\.jsonl:7: the row's `images` is not text"):
        convert({**shared(Q, A), "images": ["a.jpg"]}, [])
    repairs: list[str] = []
    row = {"instruction": "How many?", "input": [1, 2], "output": 7}
    assert shape(convert(row, repairs)) == [("user", "How many?"), ("assistant", "7")] and repairs == ["not text"]


DIFFERENT_WEIGHTS = [{"role": "assistant", "content": text, "train": text == "b"} for text in "ab"]


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no answer", shared(Q, ("gpt", ""))),
        ("no answer", shared(A)),
        ("no answer", {"instruction": "i", "output": None}),
        ("roles out of order", shared(Q, A, S, A2)),
        ("roles out of order", {"messages": [{"role": "user", "content": "q"}, *DIFFERENT_WEIGHTS]}),
        ("unknown role", shared(Q, ("critic", "a"))),
        ("not text", {"instruction": "i", "output": b"bytes"}),
        ("call is not JSON", shared(Q, ("function_call", "f(1)"), A)),
    ],
)
def test_rows_whose_repair_would_be_a_guess_stay_bad(reason, row):
    with pytest.raises(BadRow) as caught:
        convert(row, [])
    assert caught.value.reason == reason


def test_prepare_counts_repairs_with_the_first_source(tmp_path, prepared):
    rows = [shared(Q, A), shared(HI, Q, ("gpt", 1)), shared(Q)]
    report = prepared(rows, dataset={"on_bad_row": "repair"}).report
    assert (report.rows_read, report.examples, report.dropped) == (3, 2, {"no answer": 1})
    assert report.repaired == {"not text": 1, "leading answer": 1}
    assert report.first_repaired == dict.fromkeys(report.repaired, f"{tmp_path}/d.jsonl:2")
