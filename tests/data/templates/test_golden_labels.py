"""Golden labels: for all conversations of the corpus and five tokenizers, trained tokens decode to the answers.

The expected answers are read from the raw rows here, independently of the package.
"""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections import Counter

import numpy as np
import pytest

from ligertune.data.rows.conversation import BadRow
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import choose_template
from ligertune.planning.options import DataOptions, DatasetOptions

pytestmark = pytest.mark.corpus

ENDS = {  # after an answer, and after the last answer
    "qwen2.5": ("<|im_end|>", "<|im_end|>"),
    "mistral-7b-v0.1": ("</s>", "</s>"),
    "phi-3-mini": ("<|end|>", "<|end|><|endoftext|>"),
    "gpt2": ("<|endoftext|>", "<|endoftext|>"),
    "stories260K": ("</s>", "</s>"),
}
DROPPED = {  # under every template; Mistral's also leaves out turns
    "sharegpt/sharegpt_gpt4_256.jsonl": {},
    "sharegpt/sharegpt_zh_1K_format.jsonl.gz": {"last turn is not an answer": 6, "empty prompt": 1, "no answer": 1},
    "sharegpt/glaive_toolcall_en_demo.json": {},
    "sharegpt/vicuna_dummy_conversation.json": {},
    "messages/toy_chat_fine_tuning.jsonl": {},
    "messages/sharegpt_gpt4-qwen3_a22B_output.jsonl": {"empty answer": 36},
    "messages/v1_sft_demo.jsonl": {},
    "messages/reason_tool_use_demo_50.jsonl": {},
}
ALPACA = [  # one of the random and filtered sets each: the other 20,000 records would take a minute
    "alpaca_random_head1000.jsonl", "dolly_3k.json.gz", "code_alpaca_2k.json.gz", "alpaca_en_demo.json",
    "alpaca_zh_demo.json", "identity.json",
]  # fmt: skip


def rows_of(path) -> list[dict]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.split("\n") if line]


def answers_of(row: dict) -> list[str]:
    """Return the assistant's turns; reasoning and calls as the text that a template without fields for them gets."""
    if "output" in row:
        return [row["output"]]
    turns = row.get("conversations") or row["messages"]
    said = [turn for turn in turns if (turn.get("from") or turn.get("role")) in ("gpt", "function_call", "assistant")]
    return [_said(turn.get("value") or turn.get("content") or "") for turn in said]


def _said(value: str | list[dict]) -> str:
    if isinstance(value, str):
        return value
    parts = {kind: [part["value"] for part in value if part["type"] == kind] for kind in ("reasoning", "text")}
    calls = [part["value"] for part in value if part["type"] == "tool_call"]
    spoken = "\n".join(filter(None, ["".join(parts["text"]), *_each(calls)]))
    thought = "".join(parts["reasoning"])
    return f"<think>\n{thought}\n</think>\n\n{spoken}" if thought else spoken


def _each(calls: list[str]) -> list[str]:
    """Return the calls of all parts, one per line."""
    lists = [json.loads(call) for call in calls]
    return [
        text
        for call, parsed in zip(calls, lists, strict=True)
        for text in ([json.dumps(one, ensure_ascii=False) for one in parsed] if isinstance(parsed, list) else [call])
    ]


def trained_runs(encoded, tokenizer) -> list[str]:
    trained = np.flatnonzero(encoded.labels != -100)
    runs = np.split(trained, np.flatnonzero(np.diff(trained) != 1) + 1)
    return [tokenizer.decode(encoded.input_ids[run]) for run in runs]


def same_text(run: str, answer: str, end: str) -> bool:
    """Compare without Qwen's NFC and the outer white space, which the prompt's last token or trimming takes."""
    if not run.endswith(end):
        return False
    return unicodedata.normalize("NFC", run.removesuffix(end)).strip() == unicodedata.normalize("NFC", answer).strip()


def check_file(path, tokenizer, ends, template="auto") -> Counter:
    rows = rows_of(path)
    format = recognise_format("auto", rows[0].keys(), str(path))
    section = DataOptions(datasets=[DatasetOptions(path=str(path))], prompt_template=template)
    chosen, dropped, kept = choose_template(section, format, tokenizer), Counter(), []
    for line, row in enumerate(rows):
        try:
            kept.append((chosen.render(format.convert(Record(row, f"{path.name}:{line}"))), row))
        except BadRow as bad:
            dropped[bad.reason] += 1
    for encoded, (rendered, row) in zip(Encoder(tokenizer).encode([text for text, _ in kept]), kept, strict=True):
        answers, runs = answers_of(row), trained_runs(encoded, tokenizer)
        closes = [ends[0]] * (len(answers) - 1) + [ends[1]]
        assert len(runs) == len(answers), rendered.text
        for run, answer, end in zip(runs, answers, closes, strict=True):
            assert same_text(run, answer, end), (run, answer)
    return dropped


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("file", DROPPED)
def test_every_conversation_trains_its_answers_and_their_ends(corpus, tokenizer_named, name, file):
    dropped = check_file(corpus / file, tokenizer_named(name), ENDS[name])
    left_out = dropped.pop("the template leaves a turn out", 0)
    assert dropped == DROPPED[file] and (left_out == 0 or name == "mistral-7b-v0.1")


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("file", ALPACA)
def test_every_alpaca_record_trains_its_output_and_one_eos(corpus, tokenizer_named, name, file):
    tokenizer = tokenizer_named(name)
    dropped = check_file(corpus / "alpaca" / file, tokenizer, (tokenizer.eos_token,) * 2)
    assert set(dropped) <= {"empty answer"}
