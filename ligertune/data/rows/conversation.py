"""The one form every row takes before it is rendered, and the reasons for which a row is not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

# what data sets call the four roles
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}

DROP_REASONS: dict[str, str] = {
    "missing value": "a column or a field that the format needs is absent or null",
    "not text": "a value that must be text is a number, a list, an image, ...",
    "not a list of turns": "the conversation is not a list of objects with a role and a text",
    "unknown role": "a turn is by somebody who is none of system, user, assistant, tool and their other names",
    "roles out of order": "a system turn after the first, an answer to nothing, two turns of one role in a row",
    "no answer": "there is no turn of the assistant",
    "last turn is not an answer": "the conversation breaks off: what follows its last answer would teach nothing",
    "empty prompt": "a user turn without text, often a lost attachment: the answer to it answers nothing",
    "empty answer": "no text, no reasoning and no call: it would teach the model to stop at once",
    "call is not JSON": "a tool call that is not an object with a name and arguments",
    "tools are not JSON": "the list of tools cannot be read",
    "broken text": "half of a surrogate pair, which is no character and has no UTF-8",
    "control token in the text": "the tokenizer makes a control token of a text, whatever it is told",
    "the template refuses it": "the chat template raises an error for this conversation",
    "the template leaves a turn out": "a system or tool turn is nowhere in the rendered text",
    "the answer cannot be placed": "it is not to be found exactly once in the rendered text, so it cannot be marked",
    "several exchanges": "it holds more than one question and one answer, which needs prompt_template: chat",
    "image is missing": "there is no such file beside the data, or in data.image_dir",
    "image cannot be read": "the file is cut off, broken, no picture, or far too narrow",
    "image on the network": "only files, data URLs and data sets with images in them are read",
    "image marks do not fit": "the marks in the text (<image>, or parts of type image) are not as many as the images",
    "image in an answer": "the model writes text only",
    "the template leaves an image out": "the rendered text does not hold each image once",
    "cut through an image": "data.max_length ends before the last image does, with on_overlength: truncate",
    "no text": "the row is empty: there is nothing to learn",
    "no trained token": "all its answers have weight 0, or the tokenizer merged them into the prompt",
    "too long": "more than data.max_length tokens, with on_overlength: drop",
    "cut before the answer": "no trained token is left within data.max_length, with on_overlength: truncate",
}
# what on_bad_row: repair does, in the words of the report
REPAIRS: dict[str, str] = {
    "not text": "a number, a list or an object became the text that JSON writes for it",
    "empty turn": "a question or an answer without text is left out, together with its exchange",
    "leading answer": "turns before the first question are left out: they answer nothing",
    "trailing question": "turns behind the last answer are left out: they teach nothing",
    "repeated role": "turns of one role in a row became one, with an empty line between them",
}
LENGTH_REASONS = (
    "too long",
    "cut before the answer",
    "cut through an image",
)  # data.on_overlength decides, not on_bad_row


class BadRow(Exception):
    """A row that cannot be used: `reason` is one of REASONS, `detail` what was found. data.on_bad_row decides."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in DROP_REASONS:
            raise ValueError(f"not one of REASONS: {reason!r}")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant makes; `text` is how the data set wrote it."""

    name: str
    arguments: Any
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `input` is Alpaca's second field; `reasoning` and `calls` are the assistant's."""

    role: Role
    content: str
    input: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    trained: bool = True  # an assistant's turn may be context only

    @property
    def is_empty(self) -> bool:
        return not (self.content.strip() or self.input.strip() or self.reasoning.strip() or self.calls)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row that was found to be in order."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


# who may speak after whom; None is the beginning
_MAY_FOLLOW: dict[Role | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),  # several calls, several results
}


def check_conversation(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Conversation:
    """The conversation, if the model can learn from it; an empty system turn is left out."""
    messages = tuple(message for message in messages if message.role != "system" or not message.is_empty)
    if all(message.role != "assistant" for message in messages):
        raise BadRow("no answer", f"{len(messages)} turns")
    before = None
    for number, message in enumerate(messages, start=1):
        if message.role not in _MAY_FOLLOW[before]:
            raise BadRow("roles out of order", f"turn {number}: {message.role} after {before or 'nothing'}")
        if message.is_empty and message.role in ("user", "assistant"):
            raise BadRow("empty prompt" if message.role == "user" else "empty answer", f"turn {number}")
        before = message.role
    if before != "assistant":
        raise BadRow("last turn is not an answer", f"it is by the {before}")
    return Conversation(messages, tuple(tools))
