"""Prompts are formatted as in training."""

import json

import pytest
from transformers import AutoTokenizer

from ligertune.decode.generate import (
    Decoding,
    choose_prompt,
    encode_prompt,
    format_prompt,
    generate_answer,
    generate_answers,
    load_model,
)
from ligertune.errors import UserError
from ligertune.models.save import write_prompt

ALPACA_END = "### Instruction:\nSay hi.\n\n### Response:\n"
CHAT = "<s>### system:\nBe brief.\n\n### user:\nSay hi.\n\n### assistant:\n"


@pytest.mark.parametrize(
    ("template", "end", "has_bos"),
    [("alpaca", ALPACA_END, False), ("chat", CHAT, True), ("raw", "Say hi.", False)],  # a chat template writes BOS
)
def test_a_prompt_has_the_template_of_training(template, end, has_bos, quickstart, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    system = "Be brief." if template == "chat" else None
    prompt = {"prompt_template": template, "system_prompt": system}
    text, found = format_prompt(tokenizer, "Say hi.", prompt)
    assert (text if template != "alpaca" else text[-len(end) :], found) == (end, has_bos)
    write_prompt(tmp_path, prompt)
    ids = encode_prompt(tokenizer, "Say hi.", choose_prompt(tmp_path, raw=False))[1]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_variables_of_the_chat_template_are_those_of_training(quickstart, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    tokenizer.chat_template = "{% if calm %}Calm. {% endif %}{{ messages[-1].content }}"
    plain = {"prompt_template": "chat", "system_prompt": None}
    write_prompt(tmp_path, {**plain, "chat_template_kwargs": {"calm": True}})
    assert format_prompt(tokenizer, "Hi", choose_prompt(tmp_path, raw=False)) == ("Calm. Hi", True)
    write_prompt(tmp_path, plain)
    assert format_prompt(tokenizer, "Hi", choose_prompt(tmp_path, raw=False)) == ("Hi", True)
    for wrong in ([1], {"messages": []}):
        write_prompt(tmp_path, plain)
        path = tmp_path / "ligertune.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template_kwargs": wrong}))
        with pytest.raises(UserError, match=r"chat_template_kwargs must be an object of variables"):
            choose_prompt(tmp_path, raw=False)


def test_a_template_that_reads_only_parts_has_the_text(quickstart):
    """As LLaVA's: it renders a message that is a string as nothing."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content if p.type == 'text' %} {{ p.text }}{% endfor %}. "
        "{% endfor %}"
    )
    prompt = {"prompt_template": "chat", "system_prompt": "Be brief."}
    text, _ = format_prompt(tokenizer, "Say hi.", prompt, [("Hello", "Hi!")])
    assert text == "system: Be brief.. user: Hello. assistant: Hi!. user: Say hi.. "
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.upper() }}. {% endfor %}"
    assert format_prompt(tokenizer, "Say hi.", prompt)[0] == "BE BRIEF.. SAY HI.. "


def test_a_token_that_the_model_does_not_know_is_refused(quickstart):
    loaded = load_model(str(quickstart / "stories260K"), raw=True)
    loaded.tokenizer.add_tokens(["<new>"])
    message = "stories260K gives a prompt the token id 512, and the model knows 512 tokens"
    with pytest.raises(UserError, match=message):
        generate_answer(loaded, "Say <new>", Decoding(1), seed=0)
    assert generate_answer(loaded, "Say old", Decoding(1), seed=0).new_tokens == 1


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_answers_to_many_prompts_are_those_to_each(temperature, quickstart):
    loaded = load_model(str(quickstart / "stories260K"), raw=True)
    prompts = ["Once upon a time", "Lily", "One day, a big dog", "The end"]
    decoding = Decoding(20, temperature, 0.9)
    expected = [generate_answer(loaded, prompt, decoding, seed=7) for prompt in prompts]
    found = list(generate_answers(loaded, prompts, decoding, seed=7))
    assert [(a.prompt, a.text, a.new_tokens) for a in found] == [(a.prompt, a.text, a.new_tokens) for a in expected]
    assert len({answer.text for answer in found}) == 4
    others = [answer.text for answer in generate_answers(loaded, prompts, decoding, seed=8)]
    assert (others == [answer.text for answer in found]) == (temperature == 0)


def test_settings_of_a_model_that_answers_cannot_have_are_refused(quickstart):
    loaded = load_model(str(quickstart / "stories260K"), raw=True)
    loaded.model.generation_config.typical_p = 0.9
    with pytest.raises(UserError, match="typical_p: answers are made without it"), pytest.warns(UserWarning):
        generate_answer(loaded, "Lily", Decoding(4, temperature=1.0), seed=0)
    assert generate_answer(loaded, "Lily", Decoding(4), seed=0).text  # which draws nothing
    loaded.model.generation_config.typical_p = 1.0
    loaded.model.generation_config.temperature = -1.0
    loaded.model.generation_config.repetition_penalty = -2.0
    with pytest.raises(
        UserError, match=r"The model .*stories260K cannot generate with its generation_config\.json: `penalty`"
    ):
        generate_answer(loaded, "Lily", Decoding(4, temperature=1.0), seed=0)
