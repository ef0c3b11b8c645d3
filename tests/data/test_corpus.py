"""Real, irregular data sets: the number of rows that are read and dropped, by reason, for every file of the corpus."""

from __future__ import annotations

from functools import cache

import pytest

from ligertune.data.prepare import prepare
from ligertune.planning.options import DataOptions, DatasetOptions

pytestmark = pytest.mark.corpus

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
# Mistral's template supports neither tools nor a system turn without a user turn after it
LEFT_OUT_BY_MISTRAL = {
    "sharegpt/glaive_toolcall_en_demo.json": 153,
    "messages/toy_chat_fine_tuning.jsonl": 1,
    "messages/reason_tool_use_demo_50.jsonl": 22,
}


@cache
def report_of(path, tokenizer, **section):
    # by default nothing is dropped for its length
    data = DataOptions(datasets=[DatasetOptions(path=str(path))], **{"max_length": 200_000, **section})
    prepared = prepare(data, tokenizer, seed=0)
    report = prepared.report
    assert report.rows_read == len(prepared.train) + sum(report.dropped.values())
    assert report.trained_tokens == sum(int((example.labels != -100).sum()) for example in prepared.train)
    return report


@pytest.mark.parametrize("file", FILES)
def test_counts_of_every_file(corpus, tokenizer_named, file):
    report, kind = report_of(corpus / file, tokenizer_named("qwen2.5")), file.split("/")[0]
    assert (report.rows_read, report.dropped, report.notes) == (*FILES[file], ())
    assert (report.sets[0].format, report.sets[0].template) == (kind, "alpaca" if kind == "alpaca" else "chat")
    assert kind != "alpaca" or report.straddling == 0


@pytest.mark.parametrize("file", LEFT_OUT_BY_MISTRAL)
def test_turns_that_a_template_does_not_support(corpus, tokenizer_named, file):
    rows, dropped = FILES[file]
    report = report_of(corpus / file, tokenizer_named("mistral-7b-v0.1"))
    assert (report.rows_read, report.dropped) == (
        rows, {**dropped, "the template leaves a turn out": LEFT_OUT_BY_MISTRAL[file]},
    )  # fmt: skip


def test_first_dropped_rows_are_those_of_the_corpus_readme(corpus, tokenizer_named):
    report = report_of(corpus / "sharegpt/sharegpt_zh_1K_format.jsonl.gz", tokenizer_named("qwen2.5"))
    lines = {reason: place.split(":")[-1].split(" ")[0] for reason, place in report.first_dropped.items()}
    assert lines == {"last turn is not an answer": "119", "empty prompt": "59", "no answer": "781"}


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2", "stories260K"])
def test_alpaca_rows_under_a_chat_template(corpus, tokenizer_named, name):
    report = report_of(corpus / "alpaca/alpaca_random_head1000.jsonl", tokenizer_named(name), prompt_template="chat")
    assert (report.rows_read, report.dropped, report.sets[0].template) == (1000, {}, "chat")


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
