"""Ollama's Modelfile: the GGUF file, the prompt format of training as a Go template, stop strings and parameters.

Most chat templates only put fixed texts around the contents of turns. These texts are read from the rendered Jinja
template, and a Go template is made of them; it is used if it gives the same prompts for other conversations, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ligertune.data.templates.bounded_jinja import TemplateRefusalError

# As long as a prompt and an answer usually are; Ollama allocates keys and values for all of it.
MOST_CONTEXT = 8192
_CONTENTS = ("Qxq1", "Qxq2", "Qxq3", "Qxq4", "Qxq5")  # in no template
_SYSTEM = "Qxq0"

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]  # conversation -> prompt


@dataclass(frozen=True)
class TurnTexts:
    """The fixed texts of a chat template.

    start: before the first message of a user. answer: between a message and its answer in earlier turns. next: between
    an answer and the next message. generate: after the last message. system: before and after a system prompt, which
    stand in place of start; None if the template takes none.
    """

    start: str
    answer: str
    next: str
    generate: str
    system: tuple[str, str] | None

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt of a conversation: a system prompt or none, then messages and answers in turn."""
        contents = [message["content"] for message in messages]
        if messages[0]["role"] == "system":
            assert self.system is not None
            text = self.system[0] + contents.pop(0) + self.system[1]
        else:
            text = self.start
        between = itertools.cycle((self.answer, self.next))
        return (
            text
            + "".join(content + after for content, after in zip(contents[:-1], between, strict=False))
            + (contents[-1] + self.generate)
        )


def conversation(turns: int, *, system: str | None = None) -> list[Message]:
    """Return a conversation of so many messages, the last one of the user."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, _CONTENTS[:turns], strict=False)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def turn_texts(render: Render) -> TurnTexts | None:
    """Return the fixed texts of a chat template; None if it is no sequence of them."""
    try:
        whole = render(conversation(5))
    except TemplateRefusalError:
        return None
    parts = _split(whole, _CONTENTS)
    if parts is None:
        return None
    start, answer, following, *_, generate = parts
    found = TurnTexts(start, answer, following, generate, _system_texts(render))
    checked = [conversation(turns) for turns in (1, 3, 5)]
    if found.system is not None:
        checked += [conversation(turns, system=_SYSTEM) for turns in (1, 3, 5)]
    try:
        is_right = all(found.prompt(messages) == render(messages) for messages in checked)
    except TemplateRefusalError:
        return None
    return found if is_right else None


def _system_texts(render: Render) -> tuple[str, str] | None:
    try:
        text = render(conversation(1, system=_SYSTEM))
    except TemplateRefusalError:
        return None
    parts = _split(text, (_SYSTEM, _CONTENTS[0]))
    return None if parts is None else (parts[0], parts[1])


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return the texts around marks; None unless each mark occurs once, in this order."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        parts.append(before)
    return [*parts, text]


def go_template(texts: TurnTexts, *, bos: str) -> str | None:
    """Return the texts as a Go template; None if they hold what it cannot. bos: is written by Ollama itself."""
    begins = [texts.start, *(texts.system or ())[:1]]
    rest = [texts.answer, texts.next, texts.generate, *(texts.system or ())[1:]]
    if any("{{" in text or '"""' in text for text in (*begins, *rest)):
        return None
    start = texts.start.removeprefix(bos)
    if texts.system is not None:
        before, after = texts.system
        start = (
            f"{{{{ if .System }}}}{before.removeprefix(bos)}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}"
        )
    answer = texts.answer
    if texts.answer != texts.generate:  # the last message has another ending
        is_last = "{{ if eq (len (slice $.Messages $i)) 1 }}"
        answer = f"{is_last}{texts.generate}{{{{ else }}}}{texts.answer}{{{{ end }}}}"
    return (
        f"{start}{{{{ range $i, $_ := .Messages }}}}"
        f'{{{{ if eq .Role "user" }}}}{{{{ .Content }}}}{answer}'
        f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{texts.next}{{{{ end }}}}{{{{ end }}}}'
    )


PLAIN_TEMPLATE = "{{ .Prompt }}"  # the text is continued as it is


def modelfile(
    file: str, *, template: str | None, system: str | None, stops: Sequence[str], context: int, comment: str
) -> str:
    """Return the text of a Modelfile. file: name of the GGUF file next to it. template: None leaves it to Ollama."""
    lines = [f"# {comment}", f"FROM ./{file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop and "\n" not in stop]
    lines += [
        f"PARAMETER num_ctx {min(context, MOST_CONTEXT)}",
        "PARAMETER repeat_penalty 1",
        "PARAMETER temperature 0",
    ]
    return "\n".join(lines) + "\n"
