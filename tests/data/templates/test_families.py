"""Templates of model families: exactly the tokens that the model has to write are trained."""

from __future__ import annotations

import numpy as np
import pytest
from family_templates import FAMILIES
from transformers import AutoTokenizer

from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.templates.chat_template import ChatTemplate
from ligertune.data.templates.label_masking import Encoder

QUESTION = "How much is 1 + 1?"
# the same answer twice, the second with a trailing space: searching for its text would find two
CHAT = (
    Message("user", QUESTION), Message("assistant", "Two."), Message("user", "Sure?"), Message("assistant", "Two. "),
)  # fmt: skip
SYSTEM = Message("system", "Be brief.")


@pytest.fixture
def template_of(quickstart):
    def of(name: str, **given) -> tuple[ChatTemplate, object]:
        tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
        tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILIES[name].special)})
        source = FAMILIES[name].template
        return ChatTemplate(tokenizer, source, name, None, given.get("train_on", "assistant")), tokenizer

    return of


def runs_of(labels: np.ndarray, tokenizer) -> list[str]:
    """Return the text of each run of trained tokens."""
    trained = np.flatnonzero(labels != -100)
    return [tokenizer.decode(labels[run]) for run in np.split(trained, np.flatnonzero(np.diff(trained) != 1) + 1)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("system", [(), (SYSTEM,)], ids=["", "system"])
def test_what_is_trained_is_what_the_model_has_to_write(template_of, name, system):
    family = FAMILIES[name]
    template, tokenizer = template_of(name)
    conversation = Conversation((*system, *CHAT))
    if system and not family.system:
        with pytest.raises(BadRow, match="the template refuses it: no system role"):
            template.render(conversation)
        return
    rendered = template.render(conversation)
    assert tuple(rendered.text[start:end] for start, end in rendered.trained) == family.trained
    (encoded,) = Encoder(tokenizer).encode([rendered])
    runs = runs_of(encoded.labels, tokenizer)  # this tokenizer decodes a space next to special tokens
    assert ["".join(run.split()) for run in runs] == ["".join(text.split()) for text in family.trained]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_generation_prompt_and_the_answer_make_the_example(template_of, name):
    """In one exchange, all text before the trained span is the prompt at inference."""
    template, tokenizer = template_of(name)
    rendered = template.render(Conversation(CHAT[:2]))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        chat_template=FAMILIES[name].template,
        tokenize=False,
        add_generation_prompt=True,
    )
    (start, _) = rendered.trained[0]
    if name == "DeepSeek-R1":  # its prompt opens a thought, which the row does not have
        assert prompt == rendered.text[:start] + "<think>\n"
    else:
        assert prompt == rendered.text[:start]


@pytest.mark.parametrize("name", FAMILIES)
def test_last_trains_the_last_answer_only(template_of, name):
    template, _ = template_of(name, train_on="last")
    rendered = template.render(Conversation(CHAT))
    assert [rendered.text[start:end] for start, end in rendered.trained] == [FAMILIES[name].trained[-1]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3", ["Two.<|im_end|>", "<think>\nAgain.\n</think>\n\nYes.<|im_end|>"]),
        ("DeepSeek-R1", ["\n\nTwo.<|end|>", "\n\nYes.<|end|>"]),
    ],
)
def test_reasoning_that_a_template_drops_is_not_trained(template_of, name, expected):
    turns = (CHAT[0], Message("assistant", "Two.", reasoning="1 and 1"), *CHAT[2:3])
    template, _ = template_of(name)
    rendered = template.render(Conversation((*turns, Message("assistant", "Yes.", reasoning="Again."))))
    assert [rendered.text[start:end] for start, end in rendered.trained] == expected
