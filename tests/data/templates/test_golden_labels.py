"""Golden labels: for all conversations of the corpus and five tokenizers, trained tokens decode to the answers.

The expected answers are read from the raw rows here, independently of the package. The number of rows that are read and
dropped, by reason, is that of every file.
"""

import gzip
import itertools
import json
import unicodedata
from collections import Counter
from functools import cache

import numpy as np
import pytest

from ligertune.data.bad_rows import BadRow
from ligertune.data.prepare import prepare
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
FILES = {  # file: (rows, dropped)
    "alpaca/alpaca_random_9k.json.gz": (9229, {"empty answer": 4}),
    "alpaca/alpaca_claude_t45.json.gz": (5305, {"empty answer": 4}),
    "alpaca/cherry_alpaca_5_percent.json.gz": (3111, {}),
    "alpaca/dolly_3k.json.gz": (2996, {}),
    "alpaca/code_alpaca_2k.json.gz": (2017, {"empty answer": 2}),
    "alpaca/alpaca_en_demo.json": (999, {}),
    "alpaca/alpaca_zh_demo.json": (1000, {}),
    "alpaca/identity.json": (91, {}),
    "sharegpt/sharegpt_gpt4_256.jsonl": (256, {}),  # 257 lines if U+2028 ended one
    "sharegpt/sharegpt_zh_1K_format.jsonl.gz": (
        1000, {"last turn is not an answer": 6, "empty prompt": 1, "no answer": 1},
    ),
    "sharegpt/glaive_toolcall_en_demo.json": (300, {}),
    "sharegpt/vicuna_dummy_conversation.json": (500, {}),
    "messages/toy_chat_fine_tuning.jsonl": (5, {}),
    "messages/sharegpt_gpt4-qwen3_a22B_output.jsonl": (256, {"empty answer": 36}),
    "messages/v1_sft_demo.jsonl": (500, {}),
    "messages/reason_tool_use_demo_50.jsonl": (50, {}),
}  # fmt: skip
# rows with a system prompt, where it is more than half of them
SYSTEM_PROMPTS = {"messages/toy_chat_fine_tuning.jsonl": "4 of 5", "messages/reason_tool_use_demo_50.jsonl": "50 of 50"}
# Mistral's template supports neither tools nor a system turn without a user turn after it
LEFT_OUT_BY_MISTRAL = {
    "sharegpt/glaive_toolcall_en_demo.json": 153,
    "messages/toy_chat_fine_tuning.jsonl": 1,
    "messages/reason_tool_use_demo_50.jsonl": 22,
}
LARGEST = {"qwen2.5": 500}  # rows of the chats that the fast tests render; 50 for other tokenizers
CHATS = [file for file in FILES if not file.startswith("alpaca")]
ALPACA = [  # one of the random and filtered sets each: the other 20,000 records would take a minute
    "alpaca_random_head1000.jsonl", "code_alpaca_2k.json.gz", "alpaca_en_demo.json", "alpaca_zh_demo.json",
    "identity.json", pytest.param("dolly_3k.json.gz", marks=pytest.mark.slow),
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
    kinds = ("reasoning", "text", "tool_call")
    parts = {kind: [part["value"] for part in value if part["type"] == kind] for kind in kinds}
    calls = [text for call in parts["tool_call"] for text in _calls(call)]
    spoken = "\n".join(filter(None, ["".join(parts["text"]), *calls]))
    thought = "".join(parts["reasoning"])
    return f"<think>\n{thought}\n</think>\n\n{spoken}" if thought else spoken


def _calls(call: str) -> list[str]:
    parsed = json.loads(call)
    return [json.dumps(one, ensure_ascii=False) for one in parsed] if isinstance(parsed, list) else [call]


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
        assert row.get("input", "").strip() in rendered.text
        answers, runs = answers_of(row), trained_runs(encoded, tokenizer)
        closes = [ends[0]] * (len(answers) - 1) + [ends[1]]
        assert len(runs) == len(answers), rendered.text
        for run, answer, end in zip(runs, answers, closes, strict=True):
            assert same_text(run, answer, end), (run, answer)
    return dropped


@pytest.mark.parametrize(
    "name, file",
    [
        pytest.param(name, file, marks=pytest.mark.slow if FILES[file][0] > LARGEST.get(name, 50) else ())
        for name, file in itertools.product(ENDS, CHATS)
    ],
)
def test_every_conversation_trains_its_answers_and_their_ends(corpus, tokenizer_named, name, file):
    dropped = check_file(corpus / file, tokenizer_named(name), ENDS[name])
    left_out = dropped.pop("the template leaves a turn out", 0)
    assert dropped == FILES[file][1] and (left_out == 0 or name == "mistral-7b-v0.1")


@pytest.mark.parametrize("name", ["qwen2.5", *(pytest.param(name, marks=pytest.mark.slow) for name in list(ENDS)[1:])])
@pytest.mark.parametrize("file", ALPACA)
def test_every_alpaca_record_trains_its_output_and_one_eos(corpus, tokenizer_named, name, file):
    tokenizer = tokenizer_named(name)
    dropped = check_file(corpus / "alpaca" / file, tokenizer, (tokenizer.eos_token,) * 2)
    assert set(dropped) <= {"empty answer"}


@cache
def report_of(path, tokenizer, **section):
    # by default nothing is dropped for its length
    data = DataOptions(datasets=[DatasetOptions(path=str(path))], **{"max_length": 200_000, **section})
    prepared = prepare(data, tokenizer, seed=0)
    report = prepared.report
    assert report.rows_read == len(prepared.train) + sum(report.dropped.values())
    assert report.trained_tokens == sum(int((example.labels != -100).sum()) for example in prepared.train)
    return report


# code_alpaca_2k has rows of their shape, and empty answers; the other reasons have cases of test_formats.py
SAME_SHAPE = (
    "alpaca/alpaca_claude_t45.json.gz", "alpaca/cherry_alpaca_5_percent.json.gz", "alpaca/dolly_3k.json.gz",
    "alpaca/alpaca_random_9k.json.gz", "sharegpt/sharegpt_zh_1K_format.jsonl.gz",
)  # fmt: skip


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.slow if file in SAME_SHAPE else ()) for file in FILES]
)
def test_counts_of_every_file(corpus, tokenizer_named, file):
    report, kind = report_of(corpus / file, tokenizer_named("qwen2.5")), file.split("/")[0]
    assert (report.rows_read, report.dropped) == FILES[file]
    noted = [note.split(" rows have a system prompt")[0] for note in report.notes]
    assert noted == ([SYSTEM_PROMPTS[file]] if file in SYSTEM_PROMPTS else [])
    assert (report.sets[0].format, report.sets[0].template) == (kind, "alpaca" if kind == "alpaca" else "chat")
    assert kind != "alpaca" or report.straddling == 0


@pytest.mark.parametrize("file", LEFT_OUT_BY_MISTRAL)
def test_turns_that_a_template_does_not_support(corpus, tokenizer_named, file):
    rows, dropped = FILES[file]
    report = report_of(corpus / file, tokenizer_named("mistral-7b-v0.1"))
    dropped = {**dropped, "the template leaves a turn out": LEFT_OUT_BY_MISTRAL[file]}
    assert (report.rows_read, report.dropped) == (rows, dropped)


@pytest.mark.slow
def test_first_dropped_rows_are_those_of_the_corpus_readme(corpus, tokenizer_named):
    report = report_of(corpus / "sharegpt/sharegpt_zh_1K_format.jsonl.gz", tokenizer_named("qwen2.5"))
    lines = {reason: place.split(":")[-1].split(" ")[0] for reason, place in report.first_dropped.items()}
    assert lines == {"last turn is not an answer": "119", "empty prompt": "59", "no answer": "781"}


# one tokenizer whose template refuses roles out of order, and one without a template
STRICT_AND_NONE = ("mistral-7b-v0.1", "stories260K")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in STRICT_AND_NONE else pytest.mark.slow) for name in ENDS]
)
def test_alpaca_rows_under_a_chat_template(corpus, tokenizer_named, name):
    report = report_of(corpus / "alpaca/alpaca_random_head1000.jsonl", tokenizer_named(name), prompt_template="chat")
    assert (report.rows_read, report.dropped, report.sets[0].template) == (1000, {}, "chat")


@pytest.mark.slow
def test_tokens_agree_with_the_corpus_readme(corpus, tokenizer_named):
    """103.5 tokens per record, 57.4 of them output and EOS; our prompt has one line break more."""
    report = report_of(corpus / "alpaca/alpaca_random_9k.json.gz", tokenizer_named("qwen2.5"))
    assert report.tokens / report.examples == pytest.approx(103.5, abs=0.6)
    assert report.trained_tokens / report.examples == pytest.approx(57.4, abs=0.2)


def test_overlength_counts_agree_with_the_corpus_readme(corpus, tokenizer_named):
    """As ChatML 44 of 256 are longer than 2,048 tokens; the first prompt alone of one of them is."""
    path, tokenizer = corpus / "sharegpt/sharegpt_gpt4_256.jsonl", tokenizer_named("qwen2.5")
    dropped = report_of(path, tokenizer, max_length=2048)
    cut = report_of(path, tokenizer, max_length=2048, on_overlength="truncate")
    assert dropped.overlength == cut.overlength == dropped.dropped["too long"] == 44
    assert (cut.truncated, cut.dropped) == (43, {"cut before the answer": 1})
