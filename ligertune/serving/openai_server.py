"""`ligertune serve`: chat completions and completions as OpenAI's clients ask for them, on this machine.

To try a run in a client: one answer at a time, by the code of `ligertune generate`, in the prompt format of training.
transformers' own server is not used: it knows neither Alpaca's prompt nor the system prompt and dtype of training.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock
from typing import Any

import torch

from ligertune.decode.generate import Decoding, LoadedModel, TextPieces, continue_text
from ligertune.errors import UserError, printable
from ligertune.files.checked_files import DamagedFileError, parse_json_text
from ligertune.serving.completion_requests import BadRequestError, Completion, read_completion

MAX_BODY_BYTES = 16 * 2**20  # a conversation as long as any context
SECONDS_TO_SEND = 60  # a client that sends no more is left
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ROUTES = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> whether it is a chat


@dataclass
class ServedRun:
    """A loaded model under a name. decoding: where a request does not say. on_line: receives a line per request."""

    name: str
    loaded: LoadedModel
    decoding: Decoding
    on_line: Callable[[str], object]
    lock: Lock = field(default_factory=Lock)  # one answer at a time


class OpenAIServer(ThreadingHTTPServer):
    """Listens from its construction on, and answers in `serve_forever`, once `served` is set."""

    daemon_threads = True
    block_on_close = False
    served: ServedRun | None = None

    def server_bind(self) -> None:
        """Bind without looking up the name of the address, which takes seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    @property
    def address(self) -> str:
        """The address of the API: http://127.0.0.1:8000/v1."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback: the client has closed the connection."""


def listen(host: str, port: int) -> OpenAIServer:
    """Bind a server, before the model is loaded. port: 0 for a free one. Raises UserError if it cannot be bound."""
    try:
        return OpenAIServer((host, port), _Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port: {port} is in use on {host}.", hint="Name another, or 0 for a free one."
            ) from error
        raise UserError(f"--host, --port: cannot listen on {host}:{port} ({error.strerror}).") from error


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach a host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class _StoppedError(Exception):
    """A stop string has been generated: ends `generate` from within its streamer."""


class StopFilter:
    """Passes text on up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...], on_text: Callable[[str], object]) -> None:
        self._stops = stops
        self._on_text = on_text
        self._held = ""

    def add(self, piece: str) -> None:
        """Take a piece of text. Raises _StoppedError at a stop string."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            self._pass(text[: min(places)])
            raise _StoppedError
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        self._pass(text[: len(text) - kept])

    def end(self) -> None:
        """Pass on what was held back: no stop string follows."""
        self._pass(self._held)
        self._held = ""

    def _pass(self, text: str) -> None:
        if text:
            self._on_text(text)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)


@dataclass(frozen=True)
class Finished:
    """The end of an answer. reason: stop or length."""

    reason: str
    new_tokens: int
    seconds: float


def generate_completion(served: ServedRun, asked: Completion, on_text: Callable[[str], object]) -> Finished:
    """Generate an answer, and pass its text on as it is made. Raises UserError."""
    filtered = StopFilter(asked.stops, on_text)
    pieces = TextPieces(served.loaded.tokenizer, filtered.add)
    start = time.perf_counter()
    with served.lock:
        seed = int(torch.randint(2**62, ())) if asked.seed is None else asked.seed
        reason = "stop"
        try:
            continue_text(served.loaded, asked.ids, asked.decoding, pieces, seed=seed)
            filtered.end()
            if pieces.ids[-1] not in _end_ids(served.loaded):
                reason = "length"
        except _StoppedError:
            pass
    return Finished(reason, len(pieces.ids), time.perf_counter() - start)


def _end_ids(loaded: LoadedModel) -> list[int]:
    settings: Any = loaded.model.generation_config
    found = settings.eos_token_id
    return found if isinstance(found, list) else [found]


# ---- HTTP


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ligertune"
    sys_version = ""
    timeout = SECONDS_TO_SEND
    server: OpenAIServer

    def do_GET(self) -> None:
        if not self._is_trusted():
            return
        served = self._served()
        if self.path == "/health":
            self._send_json(200, {"status": "ok"})
        elif self.path == "/v1/models":
            model = {"id": served.name, "object": "model", "created": 0, "owned_by": "ligertune"}
            self._send_json(200, {"object": "list", "data": [model]})
        else:
            self._refuse(BadRequestError("There is no such path.", status=404))

    def do_POST(self) -> None:
        if not self._is_trusted():
            return
        served = self._served()
        try:
            asked = self._asked(served)
        except BadRequestError as error:
            self._refuse(error)
            return
        try:
            finished = self._stream(served, asked) if asked.is_stream else self._answer(served, asked)
        except OSError:  # the client has left, which ends the answer, too
            served.on_line("the client closed the connection")
            self.close_connection = True
            return
        rate = finished.new_tokens / max(finished.seconds, 1e-9)
        served.on_line(f"{printable(self.path)}: {finished.new_tokens} tokens, {rate:,.0f} tokens/s")

    def _served(self) -> ServedRun:
        assert self.server.served is not None  # before `serve_forever`
        return self.server.served

    def _is_trusted(self) -> bool:
        """Refuse the requests of a web page whose host name leads to this machine (DNS rebinding)."""
        name = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        if name in LOOPBACK or not is_loopback(str(self.server.server_address[0])):
            return True
        self._refuse(BadRequestError("The Host header must name this machine: localhost or 127.0.0.1.", status=403))
        return False

    def _asked(self, served: ServedRun) -> Completion:
        is_chat = ROUTES.get(self.path)
        if is_chat is None:
            raise BadRequestError(f"There is no such path; there are {' and '.join(ROUTES)}.", status=404)
        if self.headers.get_content_type() != "application/json":  # a web page may send others without asking first
            raise BadRequestError("The Content-Type must be application/json.", status=415)
        body = self._body()
        wanted = body.get("model") if isinstance(body, dict) else None
        if wanted != served.name:
            raise BadRequestError(f"The model is called {served.name}.", param="model", status=404)
        return read_completion(body, served.loaded, served.decoding, is_chat=is_chat)

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or not 0 < int(length) <= MAX_BODY_BYTES:
            raise BadRequestError(f"The body must have a length of 1 to {MAX_BODY_BYTES:,} bytes.", status=413)
        try:
            return parse_json_text(self.rfile.read(int(length)))
        except (DamagedFileError, UnicodeDecodeError) as error:
            raise BadRequestError(f"The body {error}.") from error

    def _answer(self, served: ServedRun, asked: Completion) -> Finished:
        pieces: list[str] = []
        try:
            finished = generate_completion(served, asked, pieces.append)
        except UserError as error:
            self._refuse(BadRequestError(str(error), status=500))
            return Finished("error", 0, 0.0)
        text = "".join(pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finished.reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if asked.is_chat else {"text": text}
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._send_json(200, {**_head(kind, served), "choices": [choice], "usage": _usage(asked, finished)})
        return finished

    def _stream(self, served: ServedRun, asked: Completion) -> Finished:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")  # its end is the end of the body
        self.end_headers()
        head = _head("chat.completion.chunk" if asked.is_chat else "text_completion", served)

        def send(text: str, reason: str | None = None, **delta: str) -> None:
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
            content = {**delta, **({"content": text} if text else {})}
            choice |= {"delta": content} if asked.is_chat else {"text": text}
            self._send_event({**head, "choices": [choice]})

        if asked.is_chat:
            send("", role="assistant")
        try:
            finished = generate_completion(served, asked, send)
        except UserError as error:
            self._send_event(_error_body(BadRequestError(str(error), status=500)))
            return Finished("error", 0, 0.0)
        send("", finished.reason)
        if asked.with_usage:
            self._send_event({**head, "choices": [], "usage": _usage(asked, finished)})
        self.wfile.write(b"data: [DONE]\n\n")
        return finished

    def _send_event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def _refuse(self, error: BadRequestError) -> None:
        self.close_connection = True  # its body may be unread
        self._send_json(error.status, _error_body(error))

    def _send_json(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing for each request: `do_POST` says what was answered."""


def _head(kind: str, served: ServedRun) -> dict[str, Any]:
    name = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": served.name}


def _usage(asked: Completion, finished: Finished) -> dict[str, int]:
    total = len(asked.ids) + finished.new_tokens
    return {"prompt_tokens": len(asked.ids), "completion_tokens": finished.new_tokens, "total_tokens": total}


def _error_body(error: BadRequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}
