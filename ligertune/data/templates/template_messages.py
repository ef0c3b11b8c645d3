"""Messages for chat templates: the dicts that a template reads, and the forms of tool calls that templates want.

Templates differ in what they take as a tool call. The forms are tried in order, and the first is used that the template
accepts and writes completely:

- arguments as an object (Qwen, Llama, GLM), or as JSON text (DeepSeek);
- no content as an empty text, or as null (DeepSeek-R1);
- the text of a turn with calls as it is, or as the end of its reasoning (gpt-oss, which has one place for both);
- all calls of a turn together, or one in each turn (Llama 3.1): each is followed by its result, as when they are made
  one after the other;
- if the template writes no calls: their JSON text in the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product, takewhile
from typing import Any, NamedTuple

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Message, ToolCall

# a template that reads this field of a message, and not only a variable with the same name
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_READS = {
    name: re.compile(rf"""(?:\.|\[\s*["']|\bget\(\s*["']){name}\b|["']{name}["']\s*(?:not\s+)?in\b""")
    for name in REASONING_FIELDS
}


class MessageForm(NamedTuple):
    """How the messages of a conversation are passed to a template."""

    split: bool = False  # one call in each turn
    joined: bool = False  # text before a call belongs to the reasoning
    json_arguments: bool = False
    null_content: bool = False
    as_text: bool = False  # calls are text of the content


_USUAL = MessageForm()


def forms_of(messages: Sequence[Message], source: str) -> Iterator[MessageForm]:
    """Yield the forms in which a template may take these messages, the usual one first."""
    calling = [message for message in messages if message.calls]
    if not calling:
        yield _USUAL
        return
    if "tool_calls" in source:
        several = any(len(message.calls) > 1 for message in calling)
        mixed = any(message.content.strip() and message.reasoning for message in calling)
        silent = any(not message.content for message in calling)
        choices = ((False, True)[: 1 + possible] for possible in (several, mixed, True, silent))
        yield from (MessageForm(*chosen) for chosen in product(*choices))
    yield MessageForm(as_text=True)


def split_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the turns with one call in each. Results follow their calls if there is one result for each call.

    Results belong to calls by their ids, and without these by their order.
    """
    turns: list[Message] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        n_calls = len(message.calls)
        made = [replace(message, calls=(call,)) for call in message.calls] or [message]
        made[1:] = [replace(turn, content="", reasoning="") for turn in made[1:]]
        results = list(takewhile(lambda turn: turn.role == "tool", left))
        if n_calls == len(results) > 1:
            by_id = {turn.fields.get("tool_call_id"): turn for turn in results}
            if by_id.keys() == {call.id for call in message.calls}:
                results = [by_id[call.id] for call in message.calls]
            made = [turn for pair in zip(made, results, strict=True) for turn in pair]
            del left[:n_calls]
        turns += made
    return turns


def template_messages(messages: Sequence[Message], source: str, form: MessageForm) -> list[dict[str, Any]]:
    """Return the dicts that a chat template reads, with `tool_calls` and reasoning in the given form."""
    return [_template_message(message, source, form) for message in messages]


@lru_cache(maxsize=16)
def reads_reasoning(source: str) -> list[str]:
    """Return the names of the fields in which a template reads the reasoning of a message."""
    return [name for name, pattern in _READS.items() if pattern.search(source)]


def _tool_call(call: ToolCall, form: MessageForm) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments, form)}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _joined(text: str, more: str) -> str:
    """Return two texts with an empty line between them, or the first if the second is blank."""
    return f"{text}\n\n{more}" if more.strip() else text


def _template_message(message: Message, source: str, form: MessageForm) -> dict[str, Any]:
    """Return one message. Fields that this template does not read become text of the content."""
    content = _joined(message.content, message.input)
    reasoning = message.reasoning
    fields: dict[str, Any] = {**message.fields, "role": message.role}
    names = reads_reasoning(source) if reasoning else []
    if message.calls and form.as_text:
        content = "\n".join([*([content] if content else []), *(call.text for call in message.calls)])
    elif message.calls:
        fields["tool_calls"] = [_tool_call(call, form) for call in message.calls]
        if form.joined and names and content.strip():
            reasoning = _joined(reasoning, content)
            content = ""
    if reasoning and names:
        fields |= dict.fromkeys(names, reasoning)
    elif reasoning:
        content = f"<think>\n{reasoning}\n</think>\n\n{content}"
    return {**fields, "content": None if form.null_content and message.calls and not content else content}


def _arguments(arguments: Any, form: MessageForm) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if form.json_arguments else arguments


def check_calls(messages: Sequence[dict[str, Any]], text: str, render: Callable[..., str | None]) -> None:
    """Raise BadRow if the text lacks a call of `messages`, or has its arguments as Python writes them and not as JSON.

    A call is in the text if a tag in its name is in the rendering with it.
    """
    if not any("tool_calls" in message for message in messages):
        return
    number = 0
    tagged = []
    for message in messages:
        functions = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = function["arguments"]
            if isinstance(arguments, dict) and _is_added(repr(arguments), text, messages):
                raise BadRow("the template leaves a turn out", "the arguments of a call are not written as JSON")
            functions.append({**call, "function": {**function, "name": f"{_tag(number)}{function['name']}"}})
            number += 1
        tagged.append({**message, "tool_calls": functions} if functions else message)
    written = render(tagged)
    if written is None or not all(_tag(place) in written for place in range(number)):
        raise BadRow("the template leaves a turn out", "a call")


def _is_added(arguments: str, text: str, messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether a template writes arguments as Python does, which differs from JSON by its quotes."""
    if "'" not in arguments or arguments not in text:
        return False
    given = (message.get(name) or "" for message in messages for name in ("content", "reasoning_content"))
    return text.count(arguments) > sum(part.count(arguments) for part in given)


def _tag(number: int) -> str:
    return f"\ufdd2{number}\ufdd2"
