"""Read the requests of OpenAI's API for chat completions and completions, and check their fields.

A field that would change the answer and is not computed here is refused, unless it has its neutral value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ligertune.decode.generate import Decoding, LoadedModel, encode_prompt
from ligertune.errors import UserError

# Fields without effect on the text.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")
# Fields that are not computed, and the values with which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "logprobs": (False,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "tools": ([],), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "parallel_tool_calls": (True, False), "top_k": (-1, 0),
}  # fmt: skip
KNOWN = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop",
    "stream", "stream_options",
)  # fmt: skip
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


class BadRequestError(Exception):
    """A request that is refused. status: of HTTP. param: the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


@dataclass(frozen=True)
class Completion:
    """What a request asks of the model. ids: token ids of the prompt. seed: None draws one."""

    ids: list[int]
    decoding: Decoding
    stops: tuple[str, ...]
    seed: int | None
    is_chat: bool
    is_stream: bool
    with_usage: bool


def read_completion(body: Any, loaded: LoadedModel, default: Decoding, *, is_chat: bool) -> Completion:
    """Return what the object of a request asks for. Raises BadRequestError.

    default: how the next token is chosen where the request does not say.
    """
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object.")
    _check_fields(body)
    try:
        ids = _chat_ids(body, loaded) if is_chat else _text_ids(body, loaded)
    except UserError as error:
        raise BadRequestError(str(error), param="messages" if is_chat else "prompt") from error
    options = body.get("stream_options")
    return Completion(
        ids=ids,
        decoding=_decoding(body, default, _room(ids, loaded)),
        stops=_stops(body),
        seed=_integer(body, "seed", 0, 2**64 - 1),
        is_chat=is_chat,
        is_stream=body.get("stream") is True,
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _check_fields(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in KNOWN or name in IGNORED or value is None or value in NEUTRAL.get(name, ()):
            continue
        raise BadRequestError(f"{name} is not computed by this server: leave it out.", param=name)


# ---- prompts


def _chat_ids(body: dict[str, Any], loaded: LoadedModel) -> list[int]:
    """Return the token ids of the conversation in the prompt format of training."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of messages.", param="messages")
    turns = [_turn(message) for message in messages]
    template = loaded.template
    if turns[0][0] == "system":
        if _is_plain(loaded):
            raise BadRequestError("A system prompt has no place in plain text.", param="messages")
        template = {**template, "system_prompt": turns.pop(0)[1]}
    roles = [role for role, _ in turns]
    if roles != (["user", "assistant"] * len(turns))[: len(turns)] or len(turns) % 2 == 0:
        raise BadRequestError(
            "messages must be a system message or none, then messages of user and assistant in turn; the last one is of"
            " the user.",
            param="messages",
        )
    if len(turns) > 1 and _is_plain(loaded):
        raise BadRequestError("This model continues plain text: send one message.", param="messages")
    texts = [text for _, text in turns]
    history = list(zip(texts[:-1:2], texts[1::2], strict=True))
    return encode_prompt(loaded.tokenizer, texts[-1], template, history)[1]


def _is_plain(loaded: LoadedModel) -> bool:
    return not loaded.uses_chat_template and loaded.template["prompt_template"] != "alpaca"


def _turn(message: Any) -> tuple[str, str]:
    """Return (role, text) of a message, whose content may be a list of texts."""
    if not isinstance(message, dict):
        raise BadRequestError("Each message must be an object.", param="messages")
    if message.get("tool_calls"):
        raise BadRequestError("tool_calls are not served.", param="messages")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ("system", "user", "assistant"):
        raise BadRequestError(f"The role {str(role)[:40]} is not served.", param="messages")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequestError("The content of a message must be text.", param="messages")
    return role, "".join(map(str, texts))


def _text_ids(body: dict[str, Any], loaded: LoadedModel) -> list[int]:
    """Return the token ids of a text that is continued as it is."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise BadRequestError("prompt must be one text.", param="prompt")
    return encode_prompt(loaded.tokenizer, prompt, {"prompt_template": "raw", "system_prompt": None})[1]


def _room(ids: list[int], loaded: LoadedModel) -> int:
    """Return the number of tokens that fit in the context behind the prompt."""
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return 2**20
    if len(ids) >= context:
        raise BadRequestError(f"The prompt has {len(ids)} tokens, and the model's context is {context}.")
    return int(context) - len(ids)


# ---- numbers


def _decoding(body: dict[str, Any], default: Decoding, room: int) -> Decoding:
    asked = [_integer(body, name, 1, 2**20) for name in ("max_completion_tokens", "max_tokens")]
    most = next((number for number in asked if number is not None), default.max_new_tokens)
    temperature = _number(body, "temperature", 0.0, 2.0)
    top_p = _number(body, "top_p", 0.0, 1.0)
    return Decoding(
        max_new_tokens=min(most, room),
        temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p,
    )


def _integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise BadRequestError(f"{name} must be a whole number from {least} to {most}.", param=name)
    return value


def _number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not least <= value <= most:
        raise BadRequestError(f"{name} must be a number from {least:g} to {most:g}.", param=name)
    return float(value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop must be a text, or a list of at most {MAX_STOPS}.", param="stop")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in stops):
        raise BadRequestError(f"Each stop must be a text of 1 to {MAX_STOP_CHARACTERS:,} characters.", param="stop")
    return tuple(stops)
