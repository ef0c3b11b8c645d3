"""Prompts are formatted as in training."""

import pytest
from transformers import AutoTokenizer

from ligertune.decode.generate import format_prompt

ALPACA_END = "### Instruction:\nSay hi.\n\n### Response:\n"
CHAT = "<s>### system:\nBe brief.\n\n### user:\nSay hi.\n\n### assistant:\n"


@pytest.mark.parametrize(
    ("template", "end", "has_bos"),
    [("alpaca", ALPACA_END, False), ("chat", CHAT, True), ("raw", "Say hi.", False)],  # a chat template writes BOS
)
def test_a_prompt_has_the_template_of_training(template, end, has_bos, quickstart):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    system = "Be brief." if template == "chat" else None
    text, found = format_prompt(tokenizer, "Say hi.", {"prompt_template": template, "system_prompt": system})
    assert (text if template != "alpaca" else text[-len(end) :], found) == (end, has_bos)
