"""Texts that contain a whole dialogue with role markers: guanaco's "### Human:", glaive's "USER:", ChatML and others.

Such a text was written for one model's prompt format. It is split into turns again, so that the chat template of the
model to train is used and only the answers are trained.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ligertune.data.bad_rows import BadRow


class Markers(NamedTuple):
    """A way to mark turns. `turn` matches the marker before a turn; its group is the role's word."""

    turn: re.Pattern[str]
    user: tuple[str, ...]
    assistant: tuple[str, ...]


_FAMILIES = (
    # guanaco, and the prompts of Alpaca
    Markers(
        re.compile(r"### ?(Human|User|Instruction|Input|Assistant|Response|System) ?:[ \n]*"),
        ("Human", "User", "Instruction", "Input"),
        ("Assistant", "Response"),
    ),
    # Anthropic's hh-rlhf
    Markers(re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):"), ("Human",), ("Assistant",)),
    # glaive-function-calling, Vicuna
    Markers(re.compile(r"(?:\A|\s|</s>)(SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE):"), ("USER",), ("ASSISTANT",)),
    # ChatML
    Markers(re.compile(r"<\|im_start\|>\s?(system|user|assistant|tool)\s?\n"), ("user",), ("assistant",)),
    # Llama 3
    Markers(
        re.compile(r"<\|start_header_id\|>(system|user|assistant|ipython)<\|end_header_id\|>\n+"),
        ("user",),
        ("assistant",),
    ),
    # Zephyr, Phi-3
    Markers(re.compile(r"<\|(system|user|assistant)\|>\n?"), ("user",), ("assistant",)),
    # Gemma
    Markers(re.compile(r"<start_of_turn>(user|model)\n"), ("user",), ("model",)),
    # Llama 2 and Mistral
    Markers(re.compile(r"\[(/?INST)\]"), ("INST",), ("/INST",)),
    # Baize
    Markers(re.compile(r"\[\|(Human|AI)\|\]"), ("Human",), ("AI",)),
)
_STARTS = ("<s>", "<|begin_of_text|>", "<bos>")
_STOPS = ("<|im_end|>", "</s>", "<s>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
_MAX_BEGINNING = 2000  # characters within which the first marker is
_BEGINNING = re.compile(
    r"(?:Below is an instruction that describes a task[^#]*"  # the chat template replaces it
    r"|(?P<system>The conversation between human and AI assistant\.|A chat between [^#\n]*\.))?\Z"
)
_LLAMA_SYSTEM = re.compile(r"<<SYS>>(.*?)<</SYS>>", re.DOTALL)
_SEPARATOR = re.compile(r"[,\s]*")
_QUOTED_CALL = re.compile(r'\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*\'(.*)\'\s*\}\s*\Z', re.DOTALL)
_CALL = "<functioncall>"
_FUNCTIONS = re.compile(r"\bwith access to the following functions\b[^{]*")


def parse_marked_text(text: str) -> list[dict[str, Any]] | None:
    """Return the turns of a dialogue, or None for a text without role markers at its beginning."""
    for markers in _FAMILIES:
        first = markers.turn.search(text, 0, _MAX_BEGINNING)
        beginning = _BEGINNING.match(_without_start(text[: first.start()])) if first else None
        if beginning:
            break
    else:
        return None
    found = list(markers.turn.finditer(text))
    turns = [{"role": "system", "content": beginning["system"]}] if beginning["system"] else []
    ends = [*(match.start() for match in found[1:]), len(text)]
    for match, end in zip(found, ends, strict=True):
        content = _without_stops(text[match.end() : end])
        if match[1] == "Input" and turns:  # of Alpaca's prompt
            turns[-1]["content"] += f"\n\n{content}" if content else ""
        else:
            turns += _turn(match[1], content, markers)
            _join_call(turns)
    return turns


def _join_call(turns: list[dict[str, Any]]) -> None:
    """Make one turn of a text by the assistant and the call that follows it, which glaive writes as two turns."""
    before = turns[-2] if len(turns) > 1 else {}
    last = turns[-1]
    if before.get("role") == "assistant" and "function_call" in last and "function_call" not in before:
        texts = [text for text in (before["content"], last["content"]) if text]
        turns[-2:] = [{**last, "content": "\n\n".join(texts)}]


def _without_start(text: str) -> str:
    return next((text.strip().removeprefix(start).strip() for start in _STARTS if start in text), text.strip())


def _without_stops(text: str) -> str:
    """Return the text without white space around it and stop tokens at its end."""
    text = text.strip()
    while stop := next((stop for stop in _STOPS if text.endswith(stop)), ""):
        text = text.removesuffix(stop).rstrip()
    return text


def is_marked_text(text: str) -> bool:
    """Return whether a text is a dialogue of at least one question and one answer."""
    return {"user", "assistant"} <= {turn["role"] for turn in parse_marked_text(text) or ()}


def _turn(word: str, text: str, markers: Markers) -> list[dict[str, Any]]:
    """Return the turn, preceded by a system turn that Llama 2 writes into the question."""
    if word in markers.assistant:
        return [_answer(text)]
    if word not in markers.user:
        return [{"role": "system" if word.lower() == "system" else "tool", "content": text}]
    if system := _LLAMA_SYSTEM.match(text):
        question = text[system.end() :].strip()
        return [{"role": "system", "content": system[1].strip()}, {"role": "user", "content": question}]
    return [{"role": "user", "content": text}]


def _answer(text: str) -> dict[str, Any]:
    """Return an answer, with glaive's function call read."""
    content, mark, call = text.partition(_CALL)
    if not mark:
        return {"role": "assistant", "content": text}
    read = quoted_call(call) or call.strip()
    return {"role": "assistant", "content": content.strip(), "function_call": read}


def quoted_call(call: str) -> dict[str, str] | None:
    """Return a call whose arguments are JSON between single quotes, as glaive writes them; None for another."""
    quoted = _QUOTED_CALL.match(call.strip())
    return {"name": quoted[1], "arguments": quoted[2].replace("\\'", "'")} if quoted else None


def functions_in(system: str) -> tuple[str, list[dict[str, Any]]]:
    """Split glaive's system text into the text before its functions, and the functions. Others have no functions."""
    system = re.sub(r"\A\s*SYSTEM:\s*", "", system)
    found = _FUNCTIONS.search(system)
    if not found or found.end() == len(system):
        return system, []
    decoder = json.JSONDecoder()
    place = found.end()
    functions = []
    while place < len(system):
        try:
            function, place = decoder.raw_decode(system, place)
        except (ValueError, RecursionError) as error:
            raise BadRow("tools are not JSON", f"{system[place:]:.40}") from error
        functions.append(function)
        separator = _SEPARATOR.match(system, place)
        assert separator is not None  # the pattern also matches an empty text
        place = separator.end()
    return f"{system[: found.start()].strip(' ,-')}.", functions
