"""Prompts are formatted as in training."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from ligertune.decode.generate import format_prompt


@pytest.fixture
def tokenizer(quickstart):
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


def test_alpaca_prompts_leave_bos_to_the_tokenizer(tokenizer):
    text, has_bos = format_prompt(tokenizer, "Say hi.", {"prompt_template": "alpaca", "system_prompt": None})
    assert text.endswith("### Instruction:\nSay hi.\n\n### Response:\n")
    assert not has_bos


def test_a_chat_template_writes_its_own_special_tokens(tokenizer):
    template = {"prompt_template": "chat", "system_prompt": "Be brief."}
    text, has_bos = format_prompt(tokenizer, "Say hi.", template)
    assert text == "<s>### system:\nBe brief.\n\n### user:\nSay hi.\n\n### assistant:\n"
    assert has_bos


def test_raw_text_is_not_changed(tokenizer):
    assert format_prompt(tokenizer, "Once upon", {"prompt_template": "raw"}) == ("Once upon", False)
