"""A prompt is asked in the words of training."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from ligertune.decode.generate import format_prompt


@pytest.fixture
def tokenizer(quickstart):
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


def test_alpaca_prompts_leave_bos_to_the_tokenizer(tokenizer):
    text, writes_special = format_prompt(tokenizer, "Say hi.", {"prompt_template": "alpaca", "system_prompt": None})
    assert text.endswith("### Instruction:\nSay hi.\n\n### Response:\n")
    assert not writes_special


def test_a_chat_template_writes_its_own_special_tokens(tokenizer):
    how = {"prompt_template": "chat", "system_prompt": "Be brief."}
    text, writes_special = format_prompt(tokenizer, "Say hi.", how)
    assert text == "<s>### system:\nBe brief.\n\n### user:\nSay hi.\n\n### assistant:\n"
    assert writes_special


def test_raw_text_is_continued_as_it_is(tokenizer):
    assert format_prompt(tokenizer, "Once upon", {"prompt_template": "raw"}) == ("Once upon", False)
