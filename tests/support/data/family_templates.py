"""Chat templates that follow the published conventions of model families.

Each has the special tokens that it writes and the text of its answers, which is trained.
"""

from typing import NamedTuple


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    trained: tuple[str, ...]
    system: bool = True  # whether the template accepts a system turn


def _turns(before: str, turn: str, after: str = "") -> str:
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + after


def _prompt(text: str) -> str:
    return "{% if add_generation_prompt %}" + text + "{% endif %}"


_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CHATML_PROMPT = _prompt("{{ '<|im_start|>assistant\n' }}")
_IM = ("<|im_start|>", "<|im_end|>")
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
_HEADER_PROMPT = _prompt("<|start_header_id|>assistant<|end_header_id|>\n\n")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_ALTERNATING = (
    "{% set first = messages[0].role == 'system' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set content = (SYSTEM if first and loop.first else '') + m.content %}"
)
# The thoughts of earlier answers are dropped; the last answer gets an empty thought if it has none.
_QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set content = m.content %}"
    "{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}" + _CHATML_PROMPT
)
# The generation prompt opens a thought that finished conversations do not contain.
_R1 = _turns(
    "{{ bos_token }}",
    "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end|>{% else %}{{ m.content }}{% endif %}",
    _prompt("<|Assistant|><think>\n"),
)

FAMILIES = {
    "Llama-3": Family(
        _turns("{{ bos_token }}", _HEADER, _HEADER_PROMPT), _HEADERS, ("Two.<|eot_id|>", "Two.<|eot_id|>")
    ),
    "Llama-3.2": Family(
        "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
        + _turns("", "{% if m.role != 'system' %}" + _HEADER + "{% endif %}", _HEADER_PROMPT),
        _HEADERS,
        ("Two.<|eot_id|>", "Two.<|eot_id|>"),
    ),
    "Llama-2": Family(
        _ALTERNATING.replace("SYSTEM", "'<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n'")
        + "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        (),
        (" Two. </s>", " Two. </s>"),
    ),
    "Mistral-v0.3": Family(
        "{{ bos_token }}" + _ALTERNATING.replace("SYSTEM", "messages[0].content + '\n\n'")
        + "{% if m.role == 'user' %}{{ '[INST] ' + content + '[/INST]' }}"
        "{% else %}{{ ' ' + content | trim + eos_token }}{% endif %}{% endfor %}",
        ("[INST]", "[/INST]"),
        (" Two.</s>", " Two.</s>"),
    ),
    "Gemma": Family(
        _turns(
            "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
            "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
            _prompt("<start_of_turn>model\n"),
        ),
        ("<start_of_turn>", "<end_of_turn>"),
        ("Two.<end_of_turn>", "Two.<end_of_turn>"),
        system=False,
    ),
    "Qwen2.5": Family(
        _turns(
            "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}",
            _CHATML,
            _CHATML_PROMPT,
        ),
        _IM,
        ("Two.<|im_end|>", "Two. <|im_end|>"),
    ),
    "Qwen3": Family(_QWEN3, _IM, ("Two.<|im_end|>", "<think>\n\n</think>\n\nTwo. <|im_end|>")),
    "DeepSeek-R1": Family(_R1, ("<|User|>", "<|Assistant|>", "<|end|>"), ("Two.<|end|>", "Two. <|end|>")),
    "Phi-3": Family(
        _turns("", "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", _prompt("<|assistant|>\n") + "{% if not "
               "add_generation_prompt %}{{ eos_token }}{% endif %}"),
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        ("Two.<|end|>", "Two. <|end|>\n</s>"),
    ),
    "Zephyr, TinyLlama": Family(
        _turns("", "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n", _prompt("<|assistant|>\n")),
        (),
        ("Two.</s>", "Two. </s>"),
    ),
    "Vicuna": Family(
        _turns(
            "{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}",
            "{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}"
            "ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}",
            _prompt("ASSISTANT:"),
        ),
        (),
        (" Two.</s>", " Two. </s>"),
    ),
    "marked by the template": Family(
        _turns(
            "",
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
            "{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
            _CHATML_PROMPT,
        ),
        _IM,
        ("Two.<|im_end|>", "Two. <|im_end|>"),
    ),
}  # fmt: skip
