"""Rows of preferences: each published form gives the expected prompt and answers; wrong rows have their reason."""

import json

import pytest

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import ParsedRow
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.row_kind import CONVERSATIONS, FirstRows, check_columns, row_kinds
from ligertune.data.shapes.recognise_shape import recognise_shape
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions


def recognised(row: dict, rows: str = "pairs", name: str = "auto"):
    return row_kinds()[rows].recognise(FirstRows([Record(row, "d.jsonl:1")], name, "d.jsonl"))


def parsed(row: dict, rows: str = "pairs", repairs: list[str] | None = None, name: str = "auto") -> ParsedRow:
    return recognised(row, rows, name).parse(Record(row, "d.jsonl:7"), repairs)


def sides(row: dict, **more) -> list[str]:
    """Return the prompt, the chosen and the rejected answer; each as "role: text | role: text"."""

    def text(messages) -> str:
        return " | ".join(f"{message.role[0]}: {message.content}{message.input}" for message in messages)

    found = []
    for conversation in parsed(row, **more).conversations:
        n_prompt = sum(not message.trained for message in conversation.messages)
        prompt, answer = conversation.messages[:n_prompt], conversation.messages[n_prompt:]
        assert all(message.trained for message in answer)
        found.append((text(prompt), text(answer)))
    assert len({prompt for prompt, _ in found}) == 1
    return [found[0][0], *(answer for _, answer in found)]


def turns(*texts: str, roles: str = "ua", keys: tuple[str, str] = ("role", "content")) -> list[dict]:
    """Return turns of alternating roles, given by their first letters."""
    names = {"s": "system", "u": "user", "a": "assistant", "h": "human", "g": "gpt"}
    return [
        {keys[0]: names[roles[number % len(roles)]], keys[1]: text} for number, text in enumerate(texts)
    ]  # fmt: skip


USER, GOOD, BAD = turns("q"), turns("good", roles="a"), turns("bad", roles="a")
HH = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Two\nlines?\n\nAssistant: "
FORMATS = {
    "texts": ("prompt_pairs", "plain", {"prompt": "q", "chosen": " good", "rejected": " bad"},
              ["u: q", "a:  good", "a:  bad"]),
    "turns": ("prompt_pairs", "chat", {"prompt": USER, "chosen": GOOD, "rejected": BAD}, ["u: q", "a: good", "a: bad"]),
    "several turns": ("prompt_pairs", "chat",
                      {"prompt": turns("s", "q", roles="su"), "chosen": [*GOOD, *turns("r", "x")], "rejected": BAD},
                      ["s: s | u: q", "a: good | u: r | a: x", "a: bad"]),
    "prompt that ends with an answer": ("prompt_pairs", "chat",
                                        {"prompt": turns("q", "a"), "chosen": turns("r", "x"),
                                         "rejected": turns("r", "y")},
                                        ["u: q | a: a", "u: r | a: x", "u: r | a: y"]),
    "implicit prompt": ("pairs", "chat", {"chosen": turns("q", "good"), "rejected": turns("q", "bad")},
                        ["u: q", "a: good", "a: bad"]),
    "implicit prompt, later turns": ("pairs", "chat",
                                     {"chosen": turns("q", "a", "r", "x"),
                                      "rejected": turns("q", "a", "r", "y", "t", "z")},
                                     ["u: q | a: a | u: r", "a: x", "a: y | u: t | a: z"]),
    "one conversation begins with the other": ("pairs", "chat",
                                               {"chosen": turns("q", "a"), "rejected": turns("q", "a", "r", "y")},
                                               ["u: q", "a: a", "a: a | u: r | a: y"]),
    "implicit text": ("pairs", "plain", {"chosen": "The sky is blue.", "rejected": "The sky is bright green."},
                      ["u: The sky is", "a:  blue.", "a:  bright green."]),
    "hh-rlhf": ("pairs", "chat", {"chosen": HH + "Yes.", "rejected": HH + "No."},
                ["u: Hi | a: Hello. | u: Two\nlines?", "a: Yes.", "a: No."]),
    "UltraFeedback": ("prompt_pairs", "chat",
                      {"prompt": "q", "prompt_id": "1", "chosen": turns("q", "good"), "rejected": turns("q", "bad"),
                       "messages": turns("q", "good"), "score_chosen": 8.0, "score_rejected": 9.0},
                      ["u: q", "a: good", "a: bad"]),
    "question": ("question_pairs", "chat", {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
                 ["s: s | u: q", "a: good", "a: bad"]),
    "question, empty system": ("question_pairs", "chat",
                               {"system": "", "question": "q", "chosen": "good", "rejected": "bad"},
                               ["u: q", "a: good", "a: bad"]),
    "alpaca": ("alpaca_pairs", "alpaca", {"instruction": "i", "input": "n", "chosen": "good", "rejected": "bad"},
               ["u: in", "a: good", "a: bad"]),
    "ShareGPT": ("sharegpt_pairs", "chat",
                 {"conversations": turns("q", roles="h", keys=("from", "value")),
                  "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
                 ["u: q", "a: good", "a: bad"]),
    "messages": ("messages_pairs", "chat",
                 {"system": "s", "messages": USER, "chosen": GOOD[0], "rejected": BAD[0]},
                 ["s: s | u: q", "a: good", "a: bad"]),
    "system column": ("pairs", "chat",
                      {"system": "s", "chosen": turns("q", "good"), "rejected": turns("q", "bad")},
                      ["s: s | u: q", "a: good", "a: bad"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_each_form_of_pairs(name):
    format, template, row, expected = FORMATS[name]
    found = recognised(row, name=format)
    assert (found.name, found.template) == (format, template)
    assert name == "implicit text" or recognised(row) == found
    assert sides(row, name=format) == expected
    assert parsed(row, name=format).desirable == -1


def test_tools_are_in_both_conversations():
    tools = json.dumps([{"name": "f", "parameters": {}}])
    for conversation in parsed({"prompt": USER, "chosen": GOOD, "rejected": BAD, "tools": tools}).conversations:
        assert conversation.tools[0]["function"]["name"] == "f"


REFUSED = [
    ("equal answers", {"prompt": "q", "chosen": "a", "rejected": "a"}),
    ("equal answers", {"chosen": turns("q", "a"), "rejected": turns("q", "a")}),
    ("equal scores", {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 7, "score_rejected": 7.0}),
    ("equal scores", {"prompt": "q", "chosen": "a", "rejected": "b", "chosen_score": 1, "rejected_score": 1}),
    ("empty answer", {"prompt": "q", "chosen": "a", "rejected": " \n"}),
    ("empty answer", {"prompt": "q", "chosen": "", "rejected": "b"}),
    ("empty prompt", {"question": "", "chosen": "a", "rejected": "b"}),
    ("missing value", {"prompt": "q", "chosen": "a", "rejected": None}),
    ("missing value", {"question": None, "chosen": "a", "rejected": "b"}),
    ("not text", {"prompt": "q", "chosen": 3, "rejected": "b"}),
    ("roles out of order", {"messages": turns("q", "a"), "chosen": GOOD[0], "rejected": BAD[0]}),
    ("last turn is not an answer", {"chosen": turns("q", "a", "r"), "rejected": turns("q", "b")}),
    ("last turn is not an answer", {"chosen": HH + "Yes.\n\nHuman: Thanks", "rejected": HH + "No."}),
]


@pytest.mark.parametrize(("reason", "row"), REFUSED, ids=[f"{reason}-{n}" for n, (reason, _) in enumerate(REFUSED)])
def test_a_bad_pair_has_its_reason(reason, row):
    with pytest.raises(BadRow) as caught:
        parsed(row)
    assert caught.value.reason == reason


def test_repairs_of_a_pair_are_listed_once():
    repairs: list[str] = []
    asked = turns("q", "r", roles="u")
    row = {"chosen": [*asked, *GOOD], "rejected": [*asked, *BAD]}
    assert sides(row, repairs=repairs) == ["u: q\n\nr", "a: good", "a: bad"]
    assert set(repairs) == {"repeated role"}


LABELS = [(1, 1), (0, 0), (True, 1), (False, 0), ("true", 1), ("False", 0), ("1", 1), ("0", 0), (1.0, 1)]


@pytest.mark.parametrize(("label", "desirable"), LABELS, ids=str)
def test_labels_of_answers(label, desirable):
    for row in (
        {"prompt": "q", "completion": "a", "label": label},
        {"prompt": USER, "completion": GOOD, "label": label},
        {"messages": turns("q", "a", "r", "b"), "label": label},
        {"conversations": turns("q", "b", roles="hg", keys=("from", "value")), "kto_tag": label},
        {"instruction": "i", "input": "", "output": "o", "kto_tag": label},
    ):
        found = parsed(row, rows="labelled")
        (conversation,) = found.conversations
        trained = [turn for turn in conversation.messages if turn.role == "assistant" and turn.trained]
        assert found.desirable == desirable
        assert trained == [conversation.messages[-1]]
    assert recognised({"prompt": USER, "completion": GOOD, "label": label}, rows="labelled").template == "chat"
    assert recognised({"prompt": "q", "completion": "a", "label": label}, rows="labelled").template == "plain"


def test_a_label_is_about_the_whole_completion():
    row = {"prompt": USER, "completion": turns("a", "q", "b", roles="aua"), "label": 1}
    (conversation,) = parsed(row, rows="labelled").conversations
    assert [turn.content for turn in conversation.messages if turn.role == "assistant" and turn.trained] == ["a", "b"]


@pytest.mark.parametrize("label", [2, 0.5, "good", None, [1]], ids=str)
def test_an_unknown_label_is_a_bad_row(label):
    with pytest.raises(BadRow) as caught:
        parsed({"prompt": "q", "completion": "a", "label": label}, rows="labelled")
    assert caught.value.reason == "no label"


PAIR, ANSWER = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a"}
WRONG = [
    ("pairs", ANSWER, r"lack `chosen` and `rejected`, and task: dpo needs pairs .*columns: \{chosen"),
    ("pairs", {**ANSWER, "label": 1}, "lack `chosen` and `rejected`.*preference.loss_type: kto"),
    ("pairs", {"prompt": "q", "chosen": "a"}, "lack `rejected`, and"),
    ("pairs", {"prompt": "q", "preferred": "a", "dispreferred": "b"}, "chosen: preferred, rejected: dispreferred"),
    ("pairs", {"input": "q", "chosen": "The a", "rejected": "The b"}, r"lack the prompt of .*columns: \{prompt: input"),
    ("pairs", {"chosen": "The a", "rejected": "The b"}, "format: pairs, if both texts begin with the prompt"),
    ("labelled", ANSWER, r"lack `label`, 1 or 0, which preference.loss_type: kto needs.*\{label: its name\}"),
    ("labelled", PAIR, "lack `label`.*To train on pairs, write another preference.loss_type than kto"),
    ("pairs", {"prompt": "q", "question": "q", "chosen": "a", "rejected": "b"}, "fit prompt_pairs and question_pairs"),
]


@pytest.mark.parametrize(("rows", "row", "says"), WRONG)
def test_rows_of_another_task_name_the_setting(rows, row, says):
    with pytest.raises(UserError, match=says):
        recognised(row, rows)


@pytest.mark.parametrize(
    ("rows", "name", "says"),
    [
        ("pairs", "alpaca", "task: dpo needs pairs. Write auto, prompt_pairs, .* or pairs"),
        ("labelled", "text", "preference.loss_type: kto needs answers with a label. Write auto, alpaca"),
    ],
)
def test_a_format_of_another_task_is_refused(rows, name, says):
    with pytest.raises(UserError, match=says):
        recognised(PAIR, rows, name)


def test_columns_may_be_renamed_to_those_of_preferences():
    check_columns(["chosen", "rejected", "question", "label", "score_chosen"])


def shape_of(row: dict, name: str = "auto"):
    spec = DatasetOptions(path="d.jsonl", format=name)
    return recognise_shape(spec, CONVERSATIONS, [Record(row, "d.jsonl:1")], "d.jsonl")


@pytest.mark.parametrize("prompt", ["prompt", "conversations", "instruction"])
def test_preferences_are_not_taken_for_answers(prompt):
    row = {prompt: USER if prompt == "conversations" else "q", "chosen": "good", "rejected": "bad"}
    with pytest.raises(UserError, match=r"jsonl: its columns .* of preference pairs\. Write task: dpo to train on the"):
        shape_of(row)
    with pytest.raises(UserError, match=r"data.datasets\[\].format: pairs is for preference pairs. Write task: dpo"):
        shape_of(row, "pairs")
    # UltraFeedback's turns of the chosen conversation are trained on, as before
    ultra_feedback = {"prompt": "q", "chosen": "good", "rejected": "bad", "messages": turns("q", "good")}
    assert shape_of(ultra_feedback).format.name == "messages"


def test_a_format_of_texts_with_labels_names_its_task():
    with pytest.raises(UserError, match=r"text_label is for texts with a label\. Write task: classification"):
        shape_of({"text": "t", "label": 1}, "text_label")
