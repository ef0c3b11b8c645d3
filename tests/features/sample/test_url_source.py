"""Answers of a server: time limits, retries, and one sentence for what is no chat completion. The key stays secret."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ligertune.data.rows.conversation import Message
from ligertune.errors import UserError
from ligertune.features.sample.recipe import SampleSpec
from ligertune.features.sample.sample_prompts import SamplePrompt
from ligertune.features.sample.url_source import ServerAnswer, UrlSource, answers_of_server, checked_url

KEY = "sk-secret-0123456789"


def completion(*texts: str, finish: str = "stop") -> bytes:
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": finish} for text in texts]
    return json.dumps({"choices": choices, "usage": {"completion_tokens": 3 * len(texts)}}).encode()


class Loopback(ThreadingHTTPServer):
    """Answers each request with the next (status, headers, body) of `replies`; a number is a stall in seconds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Any] = []
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Loopback

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["Authorization"])
            reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        if isinstance(reply, float):
            time.sleep(reply)
            return
        if callable(reply):
            reply = reply(body)
        status, headers, content = reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Loopback]:
    found = Loopback()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def ask(server, monkeypatch):
    """ask(*replies, seeds=..., **keys of the section): the answers, and the waits between tries."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    waits: list[float] = []

    def ask(*replies: Any, seeds: tuple[int, ...] = (1, 2), **settings: Any) -> tuple[list[ServerAnswer], list[float]]:
        server.replies = list(replies)
        waits.clear()
        spec = SampleSpec(url=server.url, url_model="big", **settings)
        source = UrlSource(spec, "Be brief.", sleep=waits.append)
        try:
            return source.answers(prompt_of("Who?"), seeds), waits
        finally:
            source.close()

    return ask


def prompt_of(text: str, form: str = "chat") -> SamplePrompt:
    return SamplePrompt((), form, (Message("user", text),), (), text, {}, "rows.jsonl:1")


def test_one_request_asks_for_all_answers_of_a_prompt(ask, server):
    found, waits = ask((200, {}, completion("Tim", "Tom")), max_new_tokens=9, top_k=5, stop=("\n",), temperature=0.5)
    assert found == [ServerAnswer("Tim", "stop", 3), ServerAnswer("Tom", "stop", 3)] and not waits
    (body,) = server.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert (body["model"], body["n"], body["max_tokens"], body["top_k"], body["stop"]) == ("big", 2, 9, 5, ["\n"])
    assert body["temperature"] == 0.5 and body["seed"] == 1 and "min_p" not in body
    assert server.keys == [f"Bearer {KEY}"]


def test_the_key_is_read_from_the_variable_that_the_recipe_names(ask, server, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "other-0123456789")
    for variable in ("OTHER_KEY", "NO_KEY"):
        ask((200, {}, completion("Tim", "Tom")), url_key_variable=variable)
    assert server.keys == ["Bearer other-0123456789", None]


def test_a_server_that_gives_fewer_or_refuses_several_is_asked_again(ask, server):
    found, _ = ask((200, {}, completion("Tim")), seeds=(1, 2, 3))
    assert len(found) == 3 and [body["seed"] for body in server.bodies] == [1, 2, 3]
    server.bodies.clear()

    def one_only(body: dict) -> tuple:
        return (400, {}, b'{"error": {"message": "n must be 1"}}') if "n" in body else (200, {}, completion("Tim"))

    found, _ = ask(one_only, seeds=(1, 2, 3))
    assert len(found) == 3 and ["n" in body for body in server.bodies] == [True, False, False, False]


def test_busy_servers_are_asked_again_and_retry_after_is_honoured_and_bounded(ask):
    busy = [(429, {"Retry-After": "2"}, b""), (429, {"Retry-After": "86400"}, b""), (500, {}, b"oops"), (503, {}, b"")]
    found, waits = ask(*busy, (200, {}, completion("Tim", "Tom", finish="length")))
    assert [answer.finish for answer in found] == ["length", "length"]
    assert waits == [2.0, 60.0, 2.0, 4.0]  # without the header the waits double
    with pytest.raises(
        UserError, match=r"127.0.0.1:\d+ gave no answer in 3 tries: it answered with the status 500"
    ) as e:
        ask((500, {}, b""), url_retries=2)
    assert e.value.exit_code == 1


def test_a_server_that_stalls_or_closes_is_left_after_the_time_limit(ask):
    began = time.monotonic()
    found, waits = ask(5.0, (200, {}, completion("Tim", "Tom")), url_timeout=0.2)
    assert len(found) == 2 and len(waits) == 1 and time.monotonic() - began < 4
    with pytest.raises(UserError, match="the connection failed"):
        ask(0.0, url_retries=0)  # it closes the connection without an answer


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[]", "no list of choices"),
        (b'{"choices": []}', "no list of choices"),
        (b'{"choices": [3]}', "a choice without a message"),
        (b'{"choices": [{"message": {"content": 3}}]}', "a choice without a message"),
        (b'{"choices": ' + b"[" * 5000, "no JSON"),
    ],
)
def test_garbage_is_one_sentence(ask, body, words):
    with pytest.raises(UserError, match=words) as refused:
        ask((200, {}, body))
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)


def test_a_refusal_is_quoted_without_the_key(ask):
    content = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}.\x1b[31m"}}).encode()
    with pytest.raises(UserError) as refused:
        ask((401, {}, content))
    said = str(refused.value)
    assert "status 401: Incorrect API key provided: MASKED" in said and "OPENAI_API_KEY" in said
    assert KEY not in said and "\x1b" not in said


def test_keys_with_odd_characters_and_addresses_with_secrets_are_refused(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a\nb-secret")
    with pytest.raises(UserError, match="holds characters that no key has") as refused:
        UrlSource(SampleSpec(url="http://localhost/v1", url_model="m"), None)
    assert "secret" not in str(refused.value)
    for url in ("http://user:secret@host/v1", "https://host/v1?key=secret"):
        with pytest.raises(UserError) as refused:
            checked_url(url)
        assert "secret" not in str(refused.value)
    for url in ("host/v1", "ftp://host/v1", "http://", "http://host:port/v1"):
        with pytest.raises(UserError, match="is no address of a server"):
            checked_url(url)
    assert checked_url("http://host:8000/v1/") == checked_url("http://host:8000/v1/chat/completions")


def test_requests_are_open_side_by_side_and_a_failure_keeps_what_the_others_gave(server):
    spec = SampleSpec(url=server.url, url_model="big", url_retries=0)

    def reply(body: dict) -> tuple:
        number = int(body["messages"][-1]["content"])
        time.sleep(0.05)
        return (200, {}, completion(f"a{number}", f"b{number}")) if number != 5 else (200, {}, b"garbage")

    server.replies = [reply]
    prompts = [prompt_of(str(number), form="plain") for number in range(12)]
    source = UrlSource(spec, None)
    found = []
    with pytest.raises(UserError, match="no JSON"):
        for place, number, answer in answers_of_server(
            source, prompts, [(place, [0, 3]) for place in range(12)], lambda place, number: place, requests=4
        ):
            found.append((place, number, answer.text))
    source.close()
    places = {place for place, _, _ in found}
    assert {0, 1, 2, 3, 4} <= places and 5 not in places
    assert all(text == f"{'a' if number == 0 else 'b'}{place}" for place, number, text in found)
