"""The same rows in every container give the same token ids and labels as the rows rendered by transformers.

The truth is written by hand: the messages and tools of each row, which `apply_chat_template` renders. What a container
cannot hold is in CANNOT, with the reason.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import datasets
import pyarrow
import pytest
from support.data import containers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ligertune.data.prepare import PreparedData, prepare
from ligertune.features.scores.recipe import ClassificationSpec
from ligertune.planning.options import DataOptions, DatasetOptions

TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}:\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}{{ mood or '' }}"
)


@dataclass
class Case:
    """Rows, and their truth: for each example its conversations as the arguments of apply_chat_template."""

    rows: list[dict]
    truth: list[list[dict]]
    content: str = "conversations"
    targets: list[tuple[float, ...]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def bot(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(**arguments) -> dict:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(**properties) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}


def chats(*conversations: list[dict], **columns: list) -> Case:
    """Return rows with `messages`, which are their own truth."""
    rows = [{"messages": turns} for turns in conversations]
    for name, values in columns.items():
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    truth = [[{"conversation": row["messages"], "tools": row.get("tools")}] for row in rows]
    return Case(rows, truth)


def exchanges(rows: list[dict], *texts: tuple[str, str], **more) -> Case:
    """Return rows that hold these exchanges of a question and an answer."""
    return Case(rows, [[{"conversation": [user(text), bot(answer)]}] for text, answer in texts], **more)


def calling(*calls: dict) -> Case:
    """Return a conversation with each of these tool calls."""
    return chats(
        *([user("u"), bot("", tool_calls=[one]), {"role": "tool", "content": "3"}, bot("ok")] for one in calls)
    )


ODD = 'é 你好 \u2028 👩‍👩‍👧 \u0085 x,y;z\t"q" \'r\' \\n {"a": 1}'
LONG = "word and number 7; " * 900
WHEN = datetime.datetime(2024, 5, 1, 10, 30)
ANSWER_IN_JSON = '{"city": "Oslo", "n": 1}'
A_PAIR = [[{"conversation": [user("a"), bot("b")]}, {"conversation": [user("a"), bot("c")]}]]

CASES = {
    "alpaca": exchanges([{"instruction": "Add 2 and 3.", "input": "", "output": "5"},
                         {"instruction": "Say a.", "input": "", "output": "a"}],
                        ("Add 2 and 3.", "5"), ("Say a.", "a")),
    "question and answer": exchanges([{"question": "q", "answer": "[1, 2]"}, {"question": "r", "answer": "7"}],
                                     ("q", "[1, 2]"), ("r", "7")),
    "messages": chats([user("a"), bot("b")], [user("c"), bot("d"), user("e"), bot("f")]),
    "answers in JSON": chats([user(ANSWER_IN_JSON), bot(ANSWER_IN_JSON)], [user("[1]"), bot("[1, {}]")]),
    "system": chats([{"role": "system", "content": "Be brief."}, user("a"), bot("b")], [user("c"), bot("d")]),
    "calls with other arguments": calling(call(city="Oslo"), call(a=1, b=2)),
    "calls with numbers": calling(call(n=1, x=2.5, yes=True, text="4"), call(n=-3, x=0.125, yes=False, text="true")),
    "calls with mixed types": calling(call(v=1), call(v="x"), call(v=[1, {"w": None}])),
    "calls with null": calling(call(city="Oslo", unit=None), call(city=None, deep={"a": None, "b": [None, 1]})),
    "call with a date": calling(call(when=WHEN.isoformat()), call(when=WHEN.isoformat())),
    "tools": chats([user("a"), bot("b")], [user("c"), bot("d")],
                   tools=[[tool(city={"type": "string"})], [tool(n={"type": "integer", "enum": [1, 2]}), tool()]]),
    "unicode": chats([user(ODD), bot(ODD)], [user("a"), bot("\U0001f600")]),
    "long": chats([user("a"), bot(LONG)], [user(LONG), bot("b")]),
    "reasoning": chats([user("a"), bot("b", reasoning_content="because")], [user("c"), bot("d")]),
    "sharegpt": Case([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                         {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}],
                     [[{"conversation": [user("a"), bot("b"), user("c"), bot("d")]}]]),
    "prompt and completion": exchanges([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}],
                                       ("a", "b"), ("c", "d")),
    "turns as prompt": exchanges([{"prompt": [user("a")], "completion": [bot("b")]}], ("a", "b")),
    "pairs": Case([{"prompt": "a", "chosen": "b", "rejected": "c"}], A_PAIR, "pairs"),
    "pairs of turns": Case([{"chosen": [user("a"), bot("b")], "rejected": [user("a"), bot("c")]}], A_PAIR, "pairs"),
    "answers with a label": exchanges([{"prompt": "a", "completion": "b", "label": True},
                                       {"prompt": "c", "completion": "d", "label": False}],
                                      ("a", "b"), ("c", "d"), content="labelled", answers=[1, 0]),
    "variables of the template": Case(
        [{"messages": [user("a"), bot("b")], "chat_template_kwargs": {"mood": "glad"}},
         {"messages": [user("a"), bot("b")], "chat_template_kwargs": {"other": 1}}],
        [[{"conversation": [user("a"), bot("b")], "mood": "glad"}], [{"conversation": [user("a"), bot("b")]}]]),
    "label of names": Case([{"text": "one", "label": "b"}, {"text": "two", "label": "a"}], [], "texts", [(1,), (0,)]),
    "label of numbers": Case([{"text": "one", "label": 1}, {"text": "two", "label": 0}], [], "texts", [(1,), (0,)]),
    "lists of names": Case([{"text": "one", "labels": ["b", "a"]}, {"text": "two", "labels": []}], [], "texts",
                           [(1, 0), ()]),
    "lists of numbers": Case([{"text": "one", "labels": [0.5, 2]}, {"text": "two", "labels": [1, 1.5]}], [], "texts",
                             [(0.5, 2), (1, 1.5)]),
}  # fmt: skip

_MIXED = "a struct has one type for each key"
# (container, case) -> why the container cannot hold these rows
CANNOT = {(container, "calls with mixed types"): _MIXED for container in containers.STRUCT_CONTAINERS}
# Rows with null in an object: a struct has nulls also where a row has no such key, so they are left out.
NULLS = ("calls with null",)
PLAIN = {**containers.JSON_CONTAINERS, **containers.CSV_CONTAINERS}
ALL = (*PLAIN, *containers.DATASETS_CONTAINERS, *containers.STRUCT_CONTAINERS, "hub", "hub stream")


@pytest.fixture(scope="module")
def tokenizer(quickstart) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def truth_of(tokenizer) -> Callable[[str, bool], list[tuple]]:
    """truth_of(case, without_nulls): for each example (ids, labels), rendered and tokenized by transformers."""

    def rendered(conversation: list[dict], **options) -> tuple[list[int], list[int]]:
        found = tokenizer.apply_chat_template(
            conversation, return_dict=True, return_assistant_tokens_mask=True, tokenize=True, **options
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
        return ids, [token if is_trained else -100 for token, is_trained in zip(ids, mask, strict=True)]

    @cache
    def truth(name: str, without_nulls: bool) -> list[tuple]:
        examples = []
        for sides in CASES[name].truth:
            sides = _without_nulls(sides) if without_nulls else sides
            both = [rendered(**side) for side in sides]
            examples.append(tuple([token for part in parts for token in part] for parts in zip(*both, strict=True)))
        return examples

    return truth


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture
def read(tokenizer, tmp_path, monkeypatch) -> Callable[..., PreparedData]:
    """read(container, case): the rows written into the container, and prepared by ligertune."""

    def call(container: str, case: Case, **data) -> PreparedData:
        path, rows = "some/set", case.rows
        if container in PLAIN:
            path = PLAIN[container](tmp_path, rows)
        elif container in containers.DATASETS_CONTAINERS:
            path = containers.DATASETS_CONTAINERS[container](tmp_path, rows)
        elif container in containers.STRUCT_CONTAINERS:
            path = containers.STRUCT_CONTAINERS[container](tmp_path, pyarrow.Table.from_pylist(rows))
        else:  # what `load_dataset` makes of the files of a hub repository, here of a folder
            (tmp_path / "repository").mkdir()
            containers.JSON_CONTAINERS["jsonl"](tmp_path / "repository", rows)
            load = partial(datasets.load_dataset, str(tmp_path / "repository"), cache_dir=tmp_path / "cache")
            monkeypatch.setattr(datasets, "load_dataset", lambda _, name, **more: load(name, **more))
        sets = [DatasetOptions(path=str(path))]
        options = DataOptions(
            datasets=sets, cache=False, num_proc=1, max_length=20_000, streaming=container == "hub stream",
            prompt_template="auto" if case.content == "texts" else "chat", **data
        )  # fmt: skip
        return prepare(options, tokenizer, seed=0, rows=case.content, label_options=ClassificationSpec())

    return call


# Each container with half of the cases, and each case in half of the containers; the others are slow tests.
PAIRS = [
    pytest.param(name, container, marks=pytest.mark.slow if (place + position) % 2 else ())
    for place, container in enumerate(ALL)
    for position, name in enumerate(CASES)
]


@pytest.mark.parametrize(("name", "container"), PAIRS)
def test_every_container_gives_the_ids_and_labels_of_the_rows(name, container, read, truth_of, tokenizer):
    case = CASES[name]
    if (container, name) in CANNOT:
        pytest.skip(CANNOT[container, name])
    if container == "hub stream" and case.content != "conversations":
        pytest.skip("preferences and labels are not streamed")
    prepared = read(container, case)
    if prepared.streamed:
        examples = sorted((next_ for next_, _ in zip(prepared.train.stream, case.rows, strict=False)), key=_row_number)
    else:
        examples = list(prepared.train)
    found = [(example.input_ids.tolist(), example.labels.tolist()) for example in examples]
    if case.content == "texts":
        assert [ids for ids, _ in found] == [tokenizer(row["text"]).input_ids for row in case.rows]
        assert [example.targets for example in examples] == case.targets
    else:
        assert found == truth_of(name, name in NULLS and container in containers.STRUCT_CONTAINERS)
    if case.answers:
        assert [example.desirable for example in examples] == case.answers


def _row_number(example) -> int:
    return int(example.source.rpartition(":")[2])
