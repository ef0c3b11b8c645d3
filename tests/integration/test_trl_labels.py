"""Labels are those of TRL's SFTTrainer with `assistant_only_loss` and its published training templates.

TRL's templates mark what is trained with `{% generation %}`. With the marks, ids and labels must be TRL's. Without
them, our own search for the answers must find the same tokens, except for those of MORE_IN_TRL: TRL trains them, we do
not. Slow tests run the real trainer on 200 records of each kind of data; fast ones take the mask of transformers, as it
does.
"""

import gzip
import json
import os
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from support.data.published_templates import add_special_tokens, published
from transformers import AutoTokenizer

from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import ChatTemplate

pytestmark = pytest.mark.corpus
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

LINE = "the line break after the end of a turn: the model has stopped before it"
PROMPT = "part of the generation prompt: the model gets it and need not write it"
BEGUN = "a token that begins in the prompt and reaches into the answer: the model cannot write it after the prompt"
# template: {expression of tokens that only TRL trains: why they are not trained here}
MORE_IN_TRL: dict[str, dict[str, str]] = {
    "qwen2_5": {r"\n": LINE + "; or before the answer: " + PROMPT},
    "qwen3": {r"\n": LINE},
    "qwen3_5_think": {r"\n": LINE, r"<think>\n": PROMPT, r"<think>\n\n": BEGUN},
    "deepseekv3": {
        r"<\uff5cAssistant\uff5c>": PROMPT,
        r"<\uff5ctool\u2581outputs\u2581end\uff5c>": "the end of the results, which a program writes",
        r"[^<\n]{1,4}\n": BEGUN,
    },
    "llama3": {},
    "glm4moe": {},
    "gptoss": {
        r"<\|start\|>assistant": PROMPT,
        r"<\|end\|>": "the end of an answer in the history; the model has to write <|return|>, which stops it",
    },
    "lfm2_v2": {r"\n": LINE},
}
# also with TRL's marks
BEGUN_BEFORE = {name: "|".join(key for key, why in more.items() if why is BEGUN) for name, more in MORE_IN_TRL.items()}
READS_REASONING = ("qwen3", "qwen3_5_think", "glm4moe", "gptoss")
# Rows whose text differs, where ours is right. TRL's text under llama3 has no tool calls, and under gptoss only the
# first of several calls in a turn. Ours has them as JSON text, and one after the other.
LOST_CALLS = {"llama3": 0, "gptoss": 1}
NO_LONE_RESULTS = ("gptoss",)  # the template refuses a tool's result without a call, which ToolACE's rows have


def _messages(row: dict) -> dict:
    """Return the messages and tools of a row, read here and not by the package."""
    if "output" in row:
        prompt = "\n\n".join(filter(str.strip, (row["instruction"], row["input"])))
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]}]
        if "reasoning" in row:
            turns[1]["reasoning_content"] = row["reasoning"]
        return {"messages": turns}
    turns = [_turn(turn) for turn in row.get("conversations") or row["messages"]]
    tools = json.loads(row["tools"]) if row.get("tools") else []
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return {"messages": turns, **({"tools": tools} if tools else {})}


ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def _turn(turn: dict) -> dict:
    role, value = turn.get("from") or turn["role"], turn.get("value") or turn.get("content")
    if role == "function_call":
        value = [{"type": "tool_call", "value": value}]
    parts = [{"type": "text", "value": value}] if isinstance(value, str) else value
    texts = {
        kind: [part["value"] for part in parts if part["type"] == kind] for kind in ("text", "reasoning", "tool_call")
    }
    made = {"role": ROLES.get(role, role), "content": "".join(texts["text"])}
    if texts["reasoning"]:
        made["reasoning_content"] = "".join(texts["reasoning"])
    calls = [call for text in texts["tool_call"] for call in _list(json.loads(text))]
    if calls:
        made["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return made


def _list(value: dict | list) -> list:
    return value if isinstance(value, list) else [value]


def _as_toolace(row: dict) -> dict:
    """Return a row of glaive in ToolACE's form: tools in the system turn, calls as Python text."""
    turns = [{"from": "system", "value": f"You can use these functions:\n{row['tools']}"}]
    for turn in row["conversations"]:
        if turn["from"] == "function_call":
            call = json.loads(turn["value"])
            values = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
            turn = {"from": "gpt", "value": f"[{call['name']}({values})]"}
        turns.append(turn)
    return {"conversations": turns}


@cache
def read(path) -> list[dict]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.split("\n") if line]


def _reasoning(corpus) -> list[dict]:
    """Return real agents' reasoning, and Dolly's answers with the passage that they are from as reasoning."""
    real = read(corpus / "messages/reason_tool_use_demo_50.jsonl")
    passages = [row for row in read(corpus / "alpaca/dolly_3k.json.gz") if row["input"].strip()]
    turns = [
        [{"role": "user", "content": row["instruction"]},
         {"role": "assistant", "content": [{"type": "reasoning", "value": row["input"].strip()},
                                           {"type": "text", "value": row["output"].strip()}]}]
        for row in passages
    ]  # fmt: skip
    return real + [{"messages": [*first, *second]} for first, second in zip(turns[::2], turns[1::2], strict=False)]


KINDS: dict[str, Callable] = {
    "alpaca": lambda corpus: read(corpus / "alpaca/alpaca_random_head1000.jsonl"),
    "dolly": lambda corpus: read(corpus / "alpaca/dolly_3k.json.gz"),
    "sharegpt": lambda corpus: read(corpus / "sharegpt/sharegpt_gpt4_256.jsonl"),
    "glaive": lambda corpus: read(corpus / "sharegpt/glaive_toolcall_en_demo.json"),
    "toolace": lambda corpus: list(map(_as_toolace, read(corpus / "sharegpt/glaive_toolcall_en_demo.json"))),
    "reasoning": _reasoning,
}


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return add_special_tokens(AutoTokenizer.from_pretrained(corpus / "tokenizers/qwen2.5"), *MORE_IN_TRL)


def without_marks(source: str) -> str:
    """Return a template that writes the same text and marks nothing."""
    source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", source)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)


def ours(tokenizer, rows: list[dict], source: str) -> list:
    format = recognise_format("auto", rows[0].keys(), "rows")
    template = ChatTemplate(tokenizer, source, "test", None, "assistant")
    texts = [template.render(format.convert(Record(row, f"rows:{number}"))) for number, row in enumerate(rows)]
    return list(Encoder(tokenizer).encode(texts))


def for_trl(rows: list[dict], name: str) -> list[dict]:
    """Return the rows for TRL. A template that does not read reasoning gets it in the content, as users write it."""
    made = [_messages(row) for row in rows]
    for turn in (turn for row in made for turn in row["messages"]):
        if name not in READS_REASONING and (thought := turn.pop("reasoning_content", None)):
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
    return made


def by_transformers(tokenizer, rows: list[dict], name: str) -> list[tuple[list, list]]:
    """Return (ids, labels) from the mask of transformers, which TRL's trainer asks for."""
    found = []
    for row in rows:
        tokens = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), chat_template=published(f"{name}_training"),
            return_assistant_tokens_mask=True, return_dict=True,
        )  # fmt: skip
        mask = zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
        found.append((tokens["input_ids"], [index if trained else -100 for index, trained in mask]))
    return found


def by_trl(tokenizer, rows: list[dict], name: str, folder) -> list[tuple[list, list]]:
    """Return (ids, labels) of the data set that TRL's SFTTrainer prepares."""
    from datasets import IterableDataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    options = {"max_length": None, "max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
    before = tokenizer.chat_template
    tokenizer.chat_template = published(name)  # the trainer replaces it by the template for training
    trainer = SFTTrainer(
        model,
        SFTConfig(str(folder), assistant_only_loss=True, **options),
        train_dataset=IterableDataset.from_generator(lambda: iter(rows)),
        processing_class=tokenizer,
    )
    found = [(example["input_ids"], example["labels"]) for example in trainer.train_dataset]
    tokenizer.chat_template = before
    return found


def check(tokenizer, rows: list[dict], name: str, theirs: Callable) -> None:
    source = published(f"{name}_training")
    rows = [row for row in rows if not is_refused(row, name)]
    lost = [row for row in rows if n_calls(row) > LOST_CALLS.get(name, 99)]
    rows = [row for row in rows if row not in lost]
    if lost:
        calls = [turn["tool_calls"][-1]["function"] for row in lost for turn in _turns_with_calls(row)]
        written = "".join(
            tokenizer.decode(found.labels[found.labels != -100]) for found in ours(tokenizer, lost, source)
        )
        assert all(call["name"] in written for call in calls)
    if not rows:
        return
    expected = theirs(for_trl(rows, name))
    marked, searched = ours(tokenizer, rows, source), ours(tokenizer, rows, without_marks(source))
    for row, (ids, labels), with_marks, found in zip(rows, expected, marked, searched, strict=True):
        assert ids == with_marks.input_ids.tolist() == found.input_ids.tolist(), row
        compare(tokenizer, np.array(labels), with_marks, BEGUN_BEFORE[name] or "(?!)")
        compare(tokenizer, np.array(labels), found, "|".join(MORE_IN_TRL[name]) or "(?!)")


def compare(tokenizer, labels: np.ndarray, ours, only_trl: str) -> None:
    """Check that labels are equal, but for runs of tokens whose text `only_trl` matches and that TRL trains."""
    differing = np.flatnonzero(labels != ours.labels)
    assert (ours.labels[differing] == -100).all()
    runs = np.split(differing, np.flatnonzero(np.diff(differing) != 1) + 1) if len(differing) else []
    texts = {tokenizer.decode(ours.input_ids[run]) for run in runs}
    assert not [text for text in texts if not re.fullmatch(only_trl, text)]


def _turns_with_calls(row: dict) -> list[dict]:
    return [turn for turn in _messages(row)["messages"] if "tool_calls" in turn]


def n_calls(row: dict) -> int:
    """Return the largest number of calls in a turn."""
    return max((len(turn["tool_calls"]) for turn in _turns_with_calls(row)), default=0)


def is_refused(row: dict, name: str) -> bool:
    has_result = any(turn["role"] == "tool" for turn in _messages(row)["messages"])
    return name in NO_LONE_RESULTS and has_result and not n_calls(row)


FAST = [(name, kind) for name in MORE_IN_TRL for kind in ("glaive", "reasoning")] + [
    ("qwen3", "alpaca"), ("gptoss", "dolly"), ("glm4moe", "sharegpt"), ("deepseekv3", "toolace"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), FAST)
def test_labels_are_those_of_trls_templates(corpus, tokenizer, name, kind):
    rows = KINDS[kind](corpus)
    check(tokenizer, rows[:60:12] + rows[60:62], name, lambda given: by_transformers(tokenizer, given, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_IN_TRL)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_those_of_trls_trainer(corpus, tokenizer, name, kind, tmp_path):
    rows = KINDS[kind](corpus)[:200]
    check(tokenizer, rows, name, lambda given: by_trl(tokenizer, given, name, tmp_path))
