"""The Go template of a Modelfile makes the prompts that the chat template makes."""

import pytest
from support.go_templates import execute
from transformers import AutoTokenizer

from ligertune.data.templates.bounded_jinja import render_chat_template
from ligertune.decode.generate import format_prompt
from ligertune.gguf_export.export_gguf import ALPACA_TEMPLATE
from ligertune.gguf_export.ollama_modelfile import go_template, modelfile, turn_texts

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set text = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' +"
    " message.content | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
# no system prompt, another name for the assistant
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{% for message in messages %}{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' +"
    " message.content + '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
# another text after the last message than after earlier ones; the system prompt is part of the first message
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{% set _ = 0 %}"
    "{% elif message.role == 'user' %}{{ '[INST] ' + (messages[0].content + '\n\n' if messages[0].role == 'system' and"
    " loop.index == 2 else '') + message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
# what no sequence of fixed texts is
NUMBERED = "{% for message in messages %}{{ loop.index ~ message.content }}{% endfor %}"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def said(*turns, system=None):
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def renderer(source):
    def render(messages):
        return render_chat_template(source, messages, name="t", add_generation_prompt=True, **SPECIAL)[0]

    return render


CONVERSATIONS = (said("Hi"), said("Hi", "Hello!", "Why?"), said("a", "b", "c", "d", "e", "f", "Is it <so>?"))
WITH_SYSTEM = (said("Hi", system="Be brief."), said("Hi", "Hello!\n", "And?", system="Two\n\nlines."))


@pytest.mark.parametrize(
    ("source", "takes_system"),
    [(CHATML, True), (LLAMA_3, True), (GEMMA, False), (MISTRAL, True), (DEFAULT_SYSTEM, True), (ALPACA_TEMPLATE, True)],
    ids=["chatml", "llama 3", "gemma", "mistral", "default system", "alpaca"],
)
@pytest.mark.parametrize("bos", ["<s>", ""])
def test_a_go_template_makes_the_prompts_of_the_chat_template(source, takes_system, bos):
    render = renderer(source)
    template = go_template(turn_texts(render), bos=bos)
    trimmed = [[{**one, "content": one["content"].strip()} for one in row] for row in (*CONVERSATIONS, *WITH_SYSTEM)]
    for messages in trimmed if takes_system else trimmed[: len(CONVERSATIONS)]:
        assert execute(template, messages) == render(messages).removeprefix(bos)


def test_the_alpaca_template_is_the_prompt_of_training(quickstart):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    for system in (None, "Be brief."):
        prompt = {"prompt_template": "alpaca", "system_prompt": system}
        text, _ = format_prompt(tokenizer, "Why?", prompt, [("Hi", "Hello!")])
        assert renderer(ALPACA_TEMPLATE)(said("Hi", "Hello!", "Why?", system=system)) == text


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2"])
def test_published_chat_templates_become_go_templates(name, corpus):
    source = (corpus / "tokenizers" / name / "chat_template.jinja").read_text(encoding="utf-8")
    template = go_template(turn_texts(renderer(source)), bos="<s>")
    for messages in (*CONVERSATIONS, *WITH_SYSTEM[:1]):
        assert execute(template, messages) == renderer(source)(messages).removeprefix("<s>")


def test_a_template_that_is_no_sequence_of_texts_is_left_to_ollama():
    assert turn_texts(renderer(NUMBERED)) is None
    assert turn_texts(renderer("{{ raise_exception('no') }}")) is None
    assert go_template(turn_texts(renderer(CHATML.replace("<|im_end|>", '"""'))), bos="") is None
    text = modelfile("x.gguf", template=None, system=None, stops=[], context=99_999, comment="c")
    assert "TEMPLATE" not in text and "num_ctx 8192" in text


def test_a_modelfile_names_file_prompt_and_stops():
    text = modelfile("x.gguf", template="T\n", system="S", stops=["</s>", '"'], context=512, comment="c")
    assert text == (
        '# c\nFROM ./x.gguf\nTEMPLATE """T\n"""\nSYSTEM """S"""\nPARAMETER stop "</s>"\nPARAMETER num_ctx 512\n'
        "PARAMETER repeat_penalty 1\nPARAMETER temperature 0\n"
    )
