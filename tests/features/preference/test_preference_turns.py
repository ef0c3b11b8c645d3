"""System turns, template variables, margins and labels of preference rows."""

import math

import pytest

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.row_kind import FirstRows, row_kinds


def parsed(row: dict, rows: str = "pairs"):
    record = Record(row, "d.jsonl:1")
    return row_kinds()[rows].recognise(FirstRows([record], "auto", "d.jsonl")).parse(record, None)


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def words(conversation: Conversation) -> list[tuple[str, str, bool]]:
    return [(message.role, message.content, message.trained) for message in conversation.messages]


SYSTEM, QUESTION = turn("system", "s"), turn("user", "q")
GOOD, BAD = turn("assistant", "good"), turn("assistant", "bad")
WITH_SYSTEM = [("system", "s", False), ("user", "q", False)]
SYSTEMS = {
    "in prompt and answers": {
        "prompt": [SYSTEM, QUESTION],
        "chosen": [SYSTEM, QUESTION, GOOD],
        "rejected": [SYSTEM, QUESTION, BAD],
    },
    "in the prompt, answers repeat the question": {
        "prompt": [SYSTEM, QUESTION],
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
    },
    "in the prompt": {"prompt": [SYSTEM, QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "in a column": {"system": "s", "prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "in a column and the prompt": {"system": "s", "prompt": [SYSTEM, QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "in a column and a question": {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
    "in both conversations": {"chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
}


@pytest.mark.parametrize("place", SYSTEMS)
def test_a_system_turn_is_read_once(place):
    chosen, rejected = parsed(SYSTEMS[place]).conversations
    assert words(chosen) == [*WITH_SYSTEM, ("assistant", "good", True)]
    assert words(rejected) == [*WITH_SYSTEM, ("assistant", "bad", True)]


@pytest.mark.parametrize("given", [{"thinking": True, "unused": None}, '{"thinking": true}'], ids=["object", "text"])
def test_variables_of_the_template_hold_for_both_answers(given):
    row = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD], "chat_template_kwargs": given}
    plain = parsed({key: value for key, value in row.items() if key != "chat_template_kwargs"}).conversations
    for conversation, bare in zip(parsed(row).conversations, plain, strict=True):
        assert conversation == Conversation(bare.messages, bare.tools, {"thinking": True})


def test_the_margin_is_that_of_a_reward_model():
    row = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}
    assert parsed({**row, "margin": 2}, "reward_pairs").targets == (2.0,)
    assert parsed({**row, "margin": -0.5}, "reward_pairs").targets == (-0.5,)
    assert parsed({**row, "margin": None}, "reward_pairs").targets == ()
    assert parsed({**row, "margin": 2}).targets == ()
    for margin in (math.nan, math.inf, 1e19, "two", True, [1]):
        with pytest.raises(BadRow) as caught:
            parsed({**row, "margin": margin}, "reward_pairs")
        assert caught.value.reason == "margin is not a number"
        assert parsed({**row, "margin": margin}).targets == ()


@pytest.mark.parametrize(("label", "desirable"), [(0, 0), (False, 0), ("0.0", 0), (0.0, 0), (1, 1), (" TRUE ", 1)])
def test_a_label_of_zero_is_a_label(label, desirable):
    assert parsed({"prompt": "q", "completion": "a", "label": label}, "labelled").desirable == desirable
    assert (
        parsed({"prompt": "q", "completion": "a", "label": None, "kto_tag": label}, "labelled").desirable == desirable
    )


def test_only_the_last_assistant_turns_of_hh_rlhf_are_trained():
    text = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Go on\n\nAssistant: "
    chosen, rejected = parsed({"chosen": text + "Yes.", "rejected": text + "No."}).conversations
    prompt = [("user", "Hi", False), ("assistant", "Hello.", False), ("user", "Go on", False)]
    assert words(chosen) == [*prompt, ("assistant", "Yes.", True)]
    assert words(rejected) == [*prompt, ("assistant", "No.", True)]
