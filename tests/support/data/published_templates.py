"""Chat templates that model families publish, as TRL ships them for its trainers: a client's files, read as data."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

# names of special tokens, as these templates write them
_SPECIAL = re.compile(r"<\|[A-Za-z0-9_]+\|>|<\uff5c[^<>]{1,40}\uff5c>|<start_of_turn>|<end_of_turn>|\[gMASK\]|<sop>")
# templates whose tool calls are tested; each has another form of calls, reasoning or generation prompt
WITH_TOOLS = (
    "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "deepseekv3", "llama3_1", "glm4moe", "gptoss", "lfm2_v2",
)  # fmt: skip


@cache
def published(name: str) -> str:
    """Return the text of a template; NAME_training is TRL's version of it, with `{% generation %}` blocks."""
    folder = Path(find_spec("trl").origin).parent / "chat_templates"  # found without importing it
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, *names: str) -> PreTrainedTokenizerBase:
    """Add the special tokens of these templates to a tokenizer, and return it."""
    tokens = sorted({token for name in names for token in _SPECIAL.findall(published(name))})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def _call(**arguments: int) -> dict:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


_PARAMETERS = {name: {"type": "integer", "description": f"Number {name}."} for name in "ab"}
_ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": _PARAMETERS, "required": ["a", "b"]},
}
TOOLS = [{"type": "function", "function": _ADD}]
# one answer of each kind: in an earlier turn, a call with reasoning, after a result, and the last with reasoning
CALLING = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [_call(a=2, b=3)]},
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "Five."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "It is."},
]
PARALLEL = [
    {"role": "user", "content": "2 + 3, and 4 + 5?"},
    {"role": "assistant", "content": "", "tool_calls": [_call(a=2, b=3), _call(a=4, b=5)]},
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "tool", "name": "add", "content": "9"},
    {"role": "assistant", "content": "Five and nine."},
]
