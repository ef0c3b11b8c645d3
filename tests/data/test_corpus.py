"""The real irregular data loads: what is read, kept and dropped, by reason, for every file of the corpus."""

from __future__ import annotations

from functools import cache

import pytest

from ligertune.data.prepare import prepare
from ligertune.planning.options import DataOptions, DatasetOptions

pytestmark = pytest.mark.corpus

ALPACA = {  # file: (rows, dropped, line of the first)
    "alpaca_random_9k.json.gz": (9229, {"empty answer": 4}),
    "alpaca_random_head1000.jsonl": (1000, {}),
    "alpaca_claude_t45.json.gz": (5305, {"empty answer": 4}),
    "cherry_alpaca_5_percent.json.gz": (3111, {}),
    "dolly_3k.json.gz": (2996, {}),
    "code_alpaca_2k.json.gz": (2017, {"empty answer": 2}),
    "alpaca_en_demo.json": (999, {}),
    "alpaca_zh_demo.json": (1000, {}),
    "identity.json": (91, {}),
}
CHATS = {
    "sharegpt/sharegpt_gpt4_256.jsonl": (256, {}),  # 257 lines, were U+2028 one
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
# Mistral's template knows neither tools nor a system turn without a user turn behind it
LEFT_OUT_BY_MISTRAL = {
    "sharegpt/glaive_toolcall_en_demo.json": 153,
    "messages/toy_chat_fine_tuning.jsonl": 1,
    "messages/reason_tool_use_demo_50.jsonl": 22,
}
# too long for any max_length that a test would set: nothing is dropped for its length here
SECTION = {"max_length": 200_000}


@cache
def report_of(path, tokenizer, **section):
    data = DataOptions(datasets=[DatasetOptions(path=str(path))], **{**SECTION, **section})
    prepared = prepare(data, tokenizer, seed=0)
    report = prepared.report
    assert report.rows_read == len(prepared.train) + sum(report.dropped.values())
    assert report.trained_tokens == sum(int((example.labels != -100).sum()) for example in prepared.train)
    return report


@pytest.mark.parametrize("file", ALPACA)
def test_alpaca_counts(corpus, tokenizer_named, file):
    rows, dropped = ALPACA[file]
    report = report_of(corpus / "alpaca" / file, tokenizer_named("qwen2.5"))
    assert (report.rows_read, report.dropped, report.straddling, report.notes) == (rows, dropped, 0, ())
    assert (report.sets[0].format, report.sets[0].template) == ("alpaca", "alpaca")


BIG = "sharegpt/sharegpt_zh_1K_format.jsonl.gz"  # seconds with each tokenizer


@pytest.mark.parametrize(
    ("file", "name"),
    [(file, name) for file in CHATS for name in ("qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2")
     if file != BIG or name in ("qwen2.5", "mistral-7b-v0.1")],
)  # fmt: skip
def test_conversation_counts(corpus, tokenizer_named, file, name):
    rows, dropped = CHATS[file]
    if name.startswith("mistral") and file in LEFT_OUT_BY_MISTRAL:
        dropped = {**dropped, "the template leaves a turn out": LEFT_OUT_BY_MISTRAL[file]}
    report = report_of(corpus / file, tokenizer_named(name))
    assert (report.rows_read, report.dropped, report.notes) == (rows, dropped, ())
    assert report.sets[0].format == file.split("/")[0]


def test_first_dropped_rows_are_where_the_notes_on_the_data_say(corpus, tokenizer_named):
    report = report_of(corpus / BIG, tokenizer_named("mistral-7b-v0.1"))
    lines = {reason: place.split(":")[-1].split(" ")[0] for reason, place in report.first_dropped.items()}
    assert lines == {"last turn is not an answer": "119", "empty prompt": "59", "no answer": "781"}


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2", "stories260K"])
@pytest.mark.parametrize("file", ["alpaca/alpaca_random_head1000.jsonl", "alpaca/identity.json"])
def test_alpaca_as_turns_of_a_chat(corpus, tokenizer_named, name, file):
    report = report_of(corpus / file, tokenizer_named(name), prompt_template="chat")
    assert report.dropped == {} and report.sets[0].template == "chat"


def test_tokens_agree_with_what_was_measured_beside_us(corpus, tokenizer_named):
    """The data's own README: 103.5 tokens a record, 57.4 of them output and EOS; ours has a line break more."""
    report = report_of(corpus / "alpaca/alpaca_random_9k.json.gz", tokenizer_named("qwen2.5"))
    assert report.tokens / report.examples == pytest.approx(103.5, abs=0.6)
    assert report.trained_tokens / report.examples == pytest.approx(57.4, abs=0.2)


def test_overlength_counts(corpus, tokenizer_named):
    """The data's own README: as ChatML 44 of 256 are longer than 2,048; one of them for its first prompt alone."""
    path, tokenizer = corpus / "sharegpt/sharegpt_gpt4_256.jsonl", tokenizer_named("qwen2.5")
    dropped = report_of(path, tokenizer, max_length=2048)
    cut = report_of(path, tokenizer, max_length=2048, on_overlength="truncate")
    assert dropped.overlength == cut.overlength == dropped.dropped["too long"] == 44
    assert (cut.truncated, cut.dropped) == (43, {"cut before the answer": 1})
