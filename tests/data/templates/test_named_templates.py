"""Chat templates by name: the published formats, letter by letter, and which of their tokens are trained."""

import pytest

from ligertune.data.rows.conversation import Conversation, Message
from ligertune.data.rows.formats import recognise_format
from ligertune.data.templates.bounded_jinja import BUILT_IN, read_template
from ligertune.data.templates.prompt_templates import ChatTemplate, choose_template
from ligertune.errors import UserError
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.planning.options import DataOptions, DatasetOptions, ModelOptions

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
BAR = "\uff5c"  # in the tokens of DeepSeek V3
STANFORD = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


def im(*turns: str) -> str:
    """ChatML: a turn is "role content"."""
    return "".join("<|im_start|>{}\n{}<|im_end|>\n".format(*turn.split(" ", 1)) for turn in turns)


# name -> (text of user A, assistant B, user C, assistant D; text of system S, user A, assistant B)
TEXTS = {
    "alpaca": (
        f"<s>{STANFORD}\n\n### Instruction:\nA\n\n### Response:\nB</s>\n\n"
        "### Instruction:\nC\n\n### Response:\nD</s>\n\n",
        "<s>S\n\n### Instruction:\nA\n\n### Response:\nB</s>\n\n",
    ),
    "chatml": (im("user A", "assistant B", "user C", "assistant D"), im("system S", "user A", "assistant B")),
    "command-r": (
        "<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>A<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>B<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>C<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>D<|END_OF_TURN_TOKEN|>",
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>A<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>B<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek": (
        "<s>User: A\n\nAssistant: B</s>User: C\n\nAssistant: D</s>",
        "<s>S\n\nUser: A\n\nAssistant: B</s>",
    ),
    "deepseek3": (
        f"<s><{BAR}User{BAR}>A<{BAR}Assistant{BAR}>B</s><{BAR}User{BAR}>C<{BAR}Assistant{BAR}>D</s>",
        f"<s>S<{BAR}User{BAR}>A<{BAR}Assistant{BAR}>B</s>",
    ),
    "gemma": (
        "<s><start_of_turn>user\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
        "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\nD<end_of_turn>\n",
        "<s><start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n",
    ),
    "granite": (
        "<|start_of_role|>user<|end_of_role|>A<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>B<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>C<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>D<|end_of_text|>\n",
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>A<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>B<|end_of_text|>\n",
    ),
    "llama2": (
        "<s>[INST] A [/INST] B </s><s>[INST] C [/INST] D </s>",
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nA [/INST] B </s>",
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nD<|eot_id|>",
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>",
    ),
    "mistral": ("<s>[INST] A [/INST] B</s>[INST] C [/INST] D</s>", "<s>[INST] S\n\nA [/INST] B</s>"),
    "mistral-v3": ("<s>[INST] A[/INST] B</s>[INST] C[/INST] D</s>", "<s>[INST] S\n\nA[/INST] B</s>"),
    "phi3": (
        "<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\nD<|end|>\n</s>",
        "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n</s>",
    ),
    "phi4": (
        "<|im_start|>user<|im_sep|>A<|im_end|><|im_start|>assistant<|im_sep|>B<|im_end|>"
        "<|im_start|>user<|im_sep|>C<|im_end|><|im_start|>assistant<|im_sep|>D<|im_end|>",
        "<|im_start|>system<|im_sep|>S<|im_end|>"
        "<|im_start|>user<|im_sep|>A<|im_end|><|im_start|>assistant<|im_sep|>B<|im_end|>",
    ),
    "qwen2": (
        im("system You are a helpful assistant.", "user A", "assistant B", "user C", "assistant D"),
        im("system S", "user A", "assistant B"),
    ),
    "qwen2.5": (
        im("system You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
           "user A", "assistant B", "user C", "assistant D"),
        im("system S", "user A", "assistant B"),
    ),
    "tulu": (
        "<|user|>\nA\n<|assistant|>\nB</s>\n<|user|>\nC\n<|assistant|>\nD</s>\n",
        "<|system|>\nS\n<|user|>\nA\n<|assistant|>\nB</s>\n",
    ),
    "vicuna": (f"<s>{VICUNA}USER: A ASSISTANT: B</s>USER: C ASSISTANT: D</s>", "<s>S USER: A ASSISTANT: B</s>"),
    "zephyr": (
        "<|user|>\nA</s>\n<|assistant|>\nB</s>\n<|user|>\nC</s>\n<|assistant|>\nD</s>\n",
        "<|system|>\nS</s>\n<|user|>\nA</s>\n<|assistant|>\nB</s>\n",
    ),
}  # fmt: skip
MESSAGES = recognise_format("auto", ["messages"], "")
CHAT = Conversation((Message("user", "A"), Message("assistant", "B"), Message("user", "C"), Message("assistant", "D")))
WITH_SYSTEM = Conversation((Message("system", "S"), Message("user", "A"), Message("assistant", "B")))


def template(name: str, tokenizer) -> ChatTemplate:
    if name == "alpaca":  # data.prompt_template: alpaca is Stanford's prompt for one exchange
        return ChatTemplate(tokenizer, read_template(name), name, None, "assistant")
    options = DataOptions(datasets=[DatasetOptions(path="unused")], prompt_template=name)
    return choose_template(options, MESSAGES, tokenizer)


def test_every_template_has_its_text_here():
    assert tuple(TEXTS) == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_template_writes_the_published_format_and_trains_the_answers_with_their_ends(name, stories):
    rendered, with_system = (template(name, stories).render(turns) for turns in (CHAT, WITH_SYSTEM))
    assert (rendered.text, with_system.text) == TEXTS[name]
    trained = [rendered.text[start:end] for start, end in rendered.trained]
    assert [text.strip()[:1] for text in trained] == ["B", "D"]
    ends = {text.strip()[1:].strip() for text in trained}
    assert all(end.startswith(("<", "</s>")) for end in ends)  # the token that ends a turn


@pytest.mark.corpus
@pytest.mark.parametrize(("name", "of"), [("qwen2", "qwen2.5"), ("mistral", "mistral-7b-v0.1"), ("phi3", "phi-3-mini")])
def test_a_template_writes_what_the_tokenizers_own_writes(name, of, tokenizer_named):
    tokenizer = tokenizer_named(of)
    for conversation in (CHAT, WITH_SYSTEM):
        assert template(name, tokenizer).render(conversation) == template("chat", tokenizer).render(conversation)


def test_rows_with_tools_are_refused_and_a_misspelt_name_gets_a_suggestion(stories):
    for name in BUILT_IN:
        assert "tools" in read_template(name)
    with pytest.raises(UserError, match=r"a built-in template\. Did you mean chatml"):
        template("chat-ml", stories)


def test_the_tokenizer_takes_a_template_by_name(quickstart):
    spec = {"model_name_or_path": str(quickstart / "stories260K"), "tokenizer": {"chat_template": "zephyr"}}
    tokenizer = load_tokenizer(ModelOptions.model_validate(spec)).tokenizer
    turns = [{"role": "user", "content": "A"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nA</s>\n<|assistant|>\n"
    spec["tokenizer"]["chat_template"] = "zefyr"
    with pytest.raises(UserError, match=r"there is no file zefyr.*Did you mean zephyr"):
        load_tokenizer(ModelOptions.model_validate(spec))
