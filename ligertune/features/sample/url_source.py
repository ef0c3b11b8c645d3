"""A server that answers: chat completions as OpenAI's clients ask for them, with time limits and retries.

The key for the server comes from an environment variable. It is sent in one header, and is in no message and no file.
"""

from __future__ import annotations

import email.utils
import ipaddress
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ligertune.errors import UserError, message_of, printable
from ligertune.features.sample.recipe import SampleSpec
from ligertune.features.sample.sample_prompts import SamplePrompt
from ligertune.files.checked_files import DamagedFileError, parse_json_text

MAX_BODY_BYTES = 64 * 2**20  # of a response: thousands of answers
LONGEST_WAIT = 60.0  # seconds between two tries, whatever Retry-After says
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # of servers that are busy or being restarted
_KEY = "sample.url"


@dataclass(frozen=True)
class ServerAnswer:
    """An answer of a server. tokens: their number, as the server says; 0 if it does not."""

    text: str
    finish: str
    tokens: int


class _NoAnswerError(Exception):
    """A try that may be repeated. wait: seconds that the server has asked for; None: it has not."""

    def __init__(self, what: str, wait: float | None = None) -> None:
        super().__init__(what)
        self.wait = wait


class UrlSource:
    """Asks a server for answers. sleep: waits for seconds; tests replace it."""

    def __init__(
        self, spec: SampleSpec, system_prompt: str | None, *, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        assert spec.url is not None
        self._spec = spec
        self._system_prompt = system_prompt
        self._sleep = sleep
        self._url = checked_url(spec.url)
        self._key = _key_of(spec.url_key_variable)
        self._one_each = threading.Event()  # set if the server refuses to give several answers at a time
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # a proxy would not find a server on this machine
        self._client = httpx.Client(headers=headers, trust_env=not _is_loopback(self._url), follow_redirects=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def answers(self, prompt: SamplePrompt, seeds: Sequence[int]) -> list[ServerAnswer]:
        """Return as many answers to a prompt as there are seeds. Raises UserError."""
        found: list[ServerAnswer] = []
        while len(found) < len(seeds):
            wanted = 1 if self._one_each.is_set() else len(seeds) - len(found)
            found += self._request(prompt, wanted, seeds[len(found)])[:wanted]
        return found

    def _request(self, prompt: SamplePrompt, wanted: int, seed: int) -> list[ServerAnswer]:
        """Return the answers of one request, at least one. Raises UserError when all tries have failed."""
        body = self._body(prompt, wanted, seed)
        tries = self._spec.url_retries + 1
        for number in range(tries):
            try:
                status, content = self._post(body)
                if status == 400 and wanted > 1:
                    self._one_each.set()  # the next request shows whether it was the number of answers
                    return self._request(prompt, 1, seed)
                self._check_status(status, content)
                return _read_choices(content)
            except _NoAnswerError as problem:
                if number + 1 == tries:
                    raise UserError(
                        f"{_KEY}: {self._host} gave no answer in {tries} tries: {self._masked(str(problem))}.",
                        hint="Answers so far are kept: run the command again to continue.",
                        exit_code=1,
                    ) from None
                # doubled each time, so that a server that is restarted is found again
                seconds = min(0.5 * 2**number, 30.0) if problem.wait is None else problem.wait
                self._sleep(min(max(seconds, 0.0), LONGEST_WAIT))
        raise AssertionError("unreachable")

    def _body(self, prompt: SamplePrompt, wanted: int, seed: int) -> dict[str, Any]:
        spec = self._spec
        turns = prompt.turns if prompt.form != "plain" else [{"role": "user", "content": prompt.text}]
        if self._system_prompt and (not turns or turns[0]["role"] != "system"):
            turns = [{"role": "system", "content": self._system_prompt}, *turns]
        body: dict[str, Any] = {
            "model": spec.url_model,
            "messages": turns,
            "max_tokens": spec.max_new_tokens,
            "temperature": spec.temperature,
            "top_p": spec.top_p,
            "seed": seed,
        }
        optional = {
            "n": wanted if wanted > 1 else 0,
            "top_k": spec.top_k,
            "min_p": spec.min_p,
            "stop": list(spec.stop),
            "tools": list(prompt.tools),
        }
        return body | {name: value for name, value in optional.items() if value}

    def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and content of the response. Raises _NoAnswerError for a lost connection or a time-out."""
        deadline = time.monotonic() + self._spec.url_timeout
        late = f"no whole answer in {self._spec.url_timeout:g} seconds"
        content = bytearray()
        try:
            # httpx limits each read, and a server may send a byte at a time: the sum is limited here
            with self._client.stream("POST", self._url, json=body, timeout=self._spec.url_timeout) as response:
                for part in response.iter_bytes():
                    content += part
                    if time.monotonic() > deadline:
                        raise _NoAnswerError(late)
                    if len(content) > MAX_BODY_BYTES:
                        raise UserError(f"{_KEY}: {self._host} sent more than {MAX_BODY_BYTES >> 20} MiB.")
                status = response.status_code
                if status in RETRIED:
                    raise _NoAnswerError(
                        f"it answered with the status {status}", _seconds_of(response.headers.get("Retry-After"))
                    )
                return status, bytes(content)
        except httpx.TimeoutException:
            raise _NoAnswerError(late) from None
        except httpx.TransportError as problem:
            raise _NoAnswerError(f"the connection failed ({message_of(problem).rstrip('.')})") from None

    def _check_status(self, status: int, content: bytes) -> None:
        if status == 200:
            return
        said = self._masked(_error_message(content))
        hints = {
            401: f"Put the key into the environment variable {self._spec.url_key_variable}.",
            403: f"Check the key in the environment variable {self._spec.url_key_variable}.",
            404: "Give the address up to /v1, and the name of a model that the server has in sample.url_model.",
        }
        raise UserError(
            f"{_KEY}: {self._host} refuses the request with the status {status}{said and f': {said}'}.",
            hint=hints.get(status, ""),
        )

    @property
    def _host(self) -> str:
        return printable(urlsplit(self._url).netloc, one_line=True)

    def _masked(self, text: str) -> str:
        text = printable(text, one_line=True).strip().rstrip(".")[:300]
        return text.replace(self._key, "MASKED") if self._key else text


def checked_url(url: str) -> str:
    """Return the address of chat completions below an address that ends with /v1. Raises UserError."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable():
        raise UserError(
            f"{_KEY}: {printable(url, one_line=True)} is no address of a server.", hint="Write http://HOST:PORT/v1."
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            f"{_KEY}: the address holds a user, a password or a query.",
            hint="Put the key into the environment variable that sample.url_key_variable names.",
        )
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/chat/completions')}/chat/completions"


def _key_of(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"The environment variable {variable} holds characters that no key has.")
    return key


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None without one."""
    if not retry_after:
        return None
    try:
        return float(retry_after)
    except ValueError:
        pass
    try:
        return email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (TypeError, ValueError):
        return None


def _error_message(content: bytes) -> str:
    try:
        found = parse_json_text(content)
        error = found.get("error", found) if isinstance(found, dict) else ""
        message = error.get("message", "") if isinstance(error, dict) else error
    except (DamagedFileError, UnicodeDecodeError):
        return ""
    return message if isinstance(message, str) else ""


def _read_choices(content: bytes) -> list[ServerAnswer]:
    """Return the answers in the body of a chat completion. Raises UserError for anything else."""
    try:
        found = parse_json_text(content)
    except (DamagedFileError, UnicodeDecodeError):
        raise _garbage("no JSON") from None
    choices = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(choices, list) or not choices:
        raise _garbage("no list of choices")
    usage = found.get("usage")
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # the server counts the tokens of all choices together
    tokens = total // len(choices) if type(total) is int and total > 0 else 0
    return [_read_choice(choice, tokens) for choice in choices]


def _read_choice(choice: Any, tokens: int) -> ServerAnswer:
    message = choice.get("message") if isinstance(choice, dict) else None
    text = message.get("content") if isinstance(message, dict) else 0
    if text is None:  # a refusal, or a call of a tool
        text = ""
    if not isinstance(text, str):
        raise _garbage("a choice without a message")
    return ServerAnswer(text, "length" if choice.get("finish_reason") == "length" else "stop", tokens)


def _garbage(what: str) -> UserError:
    return UserError(
        f"{_KEY}: the server's answer is {what}, and not the chat completion of an OpenAI-compatible server.",
        hint="Give the address up to /v1. Answers so far are kept.",
    )


def answers_of_server(
    source: UrlSource,
    prompts: Sequence[SamplePrompt],
    missing: Sequence[tuple[int, Sequence[int]]],
    seeds: Callable[[int, int], int],
    requests: int,
) -> Iterator[tuple[int, int, ServerAnswer]]:
    """Yield (prompt, number, answer) as requests finish. missing: prompts with the numbers of their missing answers.

    seeds: (prompt, number) -> seed. If a request fails, the answers of those that had begun are yielded, then its
    UserError is raised.
    """
    waiting = iter(missing)
    pending: dict[Future[list[ServerAnswer]], tuple[int, Sequence[int]]] = {}
    failed: UserError | None = None
    with ThreadPoolExecutor(requests) as pool:
        while True:
            while failed is None and len(pending) < requests and (job := next(waiting, None)) is not None:
                place, numbers = job
                wanted = [seeds(place, number) for number in numbers]
                pending[pool.submit(source.answers, prompts[place], wanted)] = job
            if not pending:
                break
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                place, numbers = pending.pop(done)
                try:
                    answers = done.result()
                except UserError as problem:
                    failed = failed or problem
                    continue
                for number, answer in zip(numbers, answers, strict=True):
                    yield place, number, answer
    if failed is not None:
        raise failed
