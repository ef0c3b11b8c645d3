"""Prompts of rows: in the template of training, from rows with and without an answer, with their other columns."""

import json
from pathlib import Path

import pytest

from ligertune.data.prepare import prepare
from ligertune.decode.answer_metric import read_questions
from ligertune.errors import UserError
from ligertune.features.sample.sample_prompts import SamplePrompts, read_prompts
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.recipe.read import recipe_of

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer(quickstart: Path):
    found = load_tokenizer(recipe_of(sections(quickstart, [])).model).tokenizer
    found.chat_template = TEMPLATE
    return found


def sections(quickstart: Path, paths: list[Path], **data: object) -> dict:
    return {
        "model": {"model_name_or_path": str(quickstart / "stories260K")},
        "data": {"datasets": [{"path": str(path)} for path in paths] or [{"path": "none"}], **data},
        "checkpoint": {"output_dir": "runs/none"},
    }


@pytest.fixture
def prompts_of(quickstart: Path, tmp_path: Path, tokenizer):
    """prompts_of(rows, server=False, **data): the prompts of a file with these rows."""

    def read(rows: list[dict], *, server: bool = False, **data: object) -> SamplePrompts:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        options = recipe_of(sections(quickstart, [path], **data)).data
        return read_prompts(options, None if server else tokenizer)

    return read


def test_a_prompt_is_what_training_reads_before_the_last_answer(prompts_of, quickstart, tmp_path, tokenizer):
    """Compared with the prepared examples of training, whose labels begin with the answer."""
    several = [
        [{"prompt": "3+4=", "completion": "7"}, {"prompt": "The sun ", "completion": "is up."}],
        [{"instruction": "Add.", "input": "3 and 4", "output": "7"}],
        [{"messages": [user("Hello"), answer("Hi"), user("Who?"), answer("Tim")]}],
        [{"prompt": [user("Hello")], "completion": [answer("Hi")]}],
    ]
    for rows in several:
        found = prompts_of(rows)
        options = recipe_of(sections(quickstart, [tmp_path / "rows.jsonl"], cache=False, num_proc=1)).data
        prepared = prepare(options, tokenizer, seed=0)
        questions = read_questions(prepared.train, tokenizer, most=None, key="eval.metric")
        assert [prompt.ids for prompt in found.prompts] == [question.ids for question in questions.asked]
        assert tuple(sorted(found.end_tokens)) == questions.end_tokens == (tokenizer.eos_token_id,)


@pytest.mark.parametrize(
    ("row", "form", "text"),
    [
        ({"prompt": "3+4=", "right": "7"}, "plain", "3+4="),
        ({"instruction": "Add.", "input": "3"}, "alpaca", "### Input:\n3\n\n### Response:\n"),
        ({"question": "Who?", "gold": 3}, "chat", "<s>user\nWho?</s><s>assistant\n"),
        ({"question": "Who?", "answer": "Tim"}, "chat", "<s>user\nWho?</s><s>assistant\n"),
        ({"prompt": [user("Who?")], "gold": 3}, "chat", "<s>user\nWho?</s><s>assistant\n"),
        ({"messages": [user("Who?")]}, "chat", "<s>user\nWho?</s><s>assistant\n"),
        ({"conversations": [{"from": "human", "value": "Who?"}]}, "chat", "<s>user\nWho?</s><s>assistant\n"),
        ({"prompt": "3+4=", "chosen": "7", "rejected": "8"}, "plain", "3+4="),
        (
            {"chosen": [user("Who?"), answer("Tim")], "rejected": [user("Who?"), answer("Tom")]},
            "chat",
            "<s>user\nWho?</s><s>assistant\n",
        ),
    ],
    ids=["prompt", "instruction", "question", "answered", "turns", "messages", "sharegpt", "pair", "chat pair"],
)
def test_rows_without_an_answer_and_pairs_have_prompts(prompts_of, row, form, text):
    (prompt,) = prompts_of([row]).prompts
    assert prompt.form == form and prompt.text.endswith(text)
    assert prompt.columns == row  # no placeholder is left in the columns


def test_score_functions_get_texts_or_messages_as_in_trl(prompts_of):
    (plain,) = prompts_of([{"prompt": "3+4=", "right": "7"}]).prompts
    assert plain.scored == "3+4=" and plain.completion("7") == "7"
    (chat,) = prompts_of([{"messages": [user("Who?")]}]).prompts
    assert chat.scored == [user("Who?")] and chat.completion("Tim") == [answer("Tim")]


def test_a_server_gets_the_turns_without_a_tokenizer(prompts_of):
    (prompt,) = prompts_of(
        [{"messages": [{"role": "system", "content": "Be brief."}, user("Who?")]}], server=True
    ).prompts
    assert prompt.ids == () and prompt.turns == [{"role": "system", "content": "Be brief."}, user("Who?")]


def test_unusable_rows_are_counted_and_long_prompts_dropped(prompts_of):
    rows = [{"prompt": "3+4=", "right": "7"}] * 8 + [{"prompt": "one " * 40, "right": ""}, {"prompt": "", "right": ""}]
    found = prompts_of(rows, max_length=16, max_dropped=0.5)
    assert len(found.prompts) == 8 and found.rows_read == 10 and found.dropped["too long"] == 1
    with pytest.raises(UserError, match="max_dropped"):
        prompts_of(rows, max_length=16, max_dropped=0.1)


def test_texts_without_prompts_are_refused_and_unapplied_keys_are_said(prompts_of):
    with pytest.raises(UserError, match="texts without prompts"):
        prompts_of([{"text": "Once upon a time"}])
    notes = prompts_of([{"prompt": "3+4=", "right": "7"}] * 4, val_split=0.5).notes
    assert len(notes) == 1 and "val_split" in notes[0]
