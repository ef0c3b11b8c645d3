"""`ligertune serve`: answers of the endpoint are those of `ligertune generate`, and bad requests are refused."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from support.command_line import ROOT, environment, run_here

from ligertune.decode.generate import Decoding, encode_prompt, generate_answer, load_model
from ligertune.errors import UserError
from ligertune.models.save import write_prompt
from ligertune.serving.openai_server import ServedRun, StopFilter, _StoppedError, is_loopback, listen

CHAT, TEXT = "/chat/completions", "/completions"
HI = [{"role": "user", "content": "Once upon a time"}]
LONGER = [
    {"role": "system", "content": "Be brief."},
    *HI,
    {"role": "assistant", "content": "There was a dog."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]},
]


@contextlib.contextmanager
def serving(loaded, tokens=24):
    lines = []
    server = listen("127.0.0.1", 0)
    server.served = ServedRun("tiny", loaded, Decoding(tokens), lines.append)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, lines
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def loaded(quickstart):
    return load_model(str(quickstart / "stories260K"), raw=False)


@pytest.fixture(scope="module")
def server(loaded):
    with serving(loaded) as (found, _):
        yield found


def ask(server, path, body, *, headers=None):
    """Return (status, object or text of the answer)."""
    data = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(server.address + path, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
            status = answer.status
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        status = error.code
    return status, text if text.startswith("data: ") else json.loads(text)


def events(text):
    """Return the objects of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def spoken(text):
    """Return (text, finish reason) of a stream."""
    choices = [event["choices"][0] for event in events(text) if event["choices"]]
    pieces = [one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices]
    return "".join(pieces), choices[-1]["finish_reason"]


def test_a_chat_has_the_text_of_generate(server, loaded):
    expected = generate_answer(loaded, "Once upon a time", Decoding(24), seed=0)
    status, whole = ask(server, CHAT, {"messages": HI})
    assert status == 200 and whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    prompt = encode_prompt(loaded.tokenizer, "Once upon a time", loaded.template)[1]
    assert whole["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 24, "total_tokens": len(prompt) + 24}
    assert whole["choices"][0]["finish_reason"] == "length"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = ask(server, CHAT, {"messages": HI, **options})[1]
    assert spoken(text) == (expected.text, "length")
    found = events(text)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant"} and len(found) > 10
    assert found[-1] == {**found[-1], "choices": [], "usage": whole["usage"]}
    assert {event["object"] for event in found} == {"chat.completion.chunk"}


def test_a_conversation_is_rendered_as_in_training(server, loaded):
    template = {"prompt_template": "chat", "system_prompt": "Be brief."}
    ids = encode_prompt(loaded.tokenizer, "And then?", template, [("Once upon a time", "There was a dog.")])[1]
    output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    expected = loaded.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    whole = ask(server, CHAT, {"messages": LONGER})[1]
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["usage"]["prompt_tokens"] == len(ids)


def test_a_text_is_continued_as_it_is(server, quickstart):
    plain = load_model(str(quickstart / "stories260K"), raw=True)
    expected = generate_answer(plain, "Lily and Tom", Decoding(24), seed=0).text
    for prompt in ("Lily and Tom", ["Lily and Tom"]):
        whole = ask(server, TEXT, {"prompt": prompt})[1]
        assert whole["choices"][0]["text"] == expected and whole["object"] == "text_completion"
    assert spoken(ask(server, TEXT, {"prompt": "Lily and Tom", "stream": True})[1]) == (expected, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(server, quickstart, stream):
    plain = load_model(str(quickstart / "stories260K"), raw=True)
    whole = generate_answer(plain, "Lily and Tom", Decoding(24), seed=0).text
    stop = whole[10:15]  # over the ends of tokens
    found = ask(server, TEXT, {"prompt": "Lily and Tom", "stop": ["never", stop], "stream": stream})[1]
    one = spoken(found) if stream else (found["choices"][0]["text"], found["choices"][0]["finish_reason"])
    assert one == (whole[: whole.index(stop)], "stop")


def test_a_text_that_begins_like_a_stop_string_is_passed_on():
    got = []
    stops = StopFilter(("<end>", "nd>x"), got.append)
    for piece in ("a<", "en", "d", "", "b<e"):
        stops.add(piece)
    stops.end()
    assert "".join(got) == "a<endb<e" and got[0] == "a"
    with pytest.raises(_StoppedError):
        stops.add("1<end>2")
    assert "".join(got) == "a<endb<e1"


def test_samples_repeat_with_a_seed_and_the_end_token_is_a_stop(server, loaded, monkeypatch):
    body = {"messages": HI, "temperature": 1.0, "top_p": 0.9, "max_tokens": 12}
    texts = [ask(server, CHAT, {**body, "seed": seed})[1]["choices"][0]["message"]["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    usual = ask(server, CHAT, {"messages": HI, "max_completion_tokens": 3, "max_tokens": 9})[1]
    assert usual["usage"]["completion_tokens"] == 3
    ids = encode_prompt(loaded.tokenizer, "Once upon a time", loaded.template)[1]
    third = int(loaded.model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0, -1])
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [2, third])
    assert ask(server, CHAT, {"messages": HI})[1]["choices"][0]["finish_reason"] == "stop"


def test_models_are_listed(server):
    with urllib.request.urlopen(f"{server.address}/models") as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == ["tiny"]
    with urllib.request.urlopen(server.address.removesuffix("/v1") + "/health") as answer:
        assert json.load(answer) == {"status": "ok"}


USER = {"role": "user", "content": "Hi"}
REFUSED = [
    (CHAT, {"messages": []}, 400, "must be a list of messages"),
    (CHAT, {"messages": [USER, USER]}, 400, "user and assistant in turn"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "Hello"}]}, 400, "the last one is of the user"),
    (CHAT, {"messages": [{"role": "system", "content": "Hi"}]}, 400, "the last one is of the user"),
    (CHAT, {"messages": [{"role": "tool", "content": "3C"}]}, 400, "The role tool is not served"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
    (CHAT, {"messages": [{"role": "user", "content": "  "}]}, 400, "The prompt is empty"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 600}]}, 400, "the model's context is 512"),
    (CHAT, {"messages": HI, "n": 2}, 400, "n is not computed"),
    (CHAT, {"messages": HI, "logprobs": True}, 400, "logprobs is not computed"),
    (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools is not computed"),
    (CHAT, {"messages": HI, "temperature": 3}, 400, "temperature must be a number from 0 to 2"),
    (CHAT, {"messages": HI, "top_p": True}, 400, "top_p must be a number"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens must be a whole number"),
    (CHAT, {"messages": HI, "seed": -1}, 400, "seed must be a whole number"),
    (CHAT, {"messages": HI, "stop": [""]}, 400, "Each stop must be a text"),
    (CHAT, {"messages": HI, "model": "gpt"}, 404, "The model is called tiny"),
    (TEXT, {"prompt": ["a", "b"]}, 400, "prompt must be one text"),
    (TEXT, {"prompt": "\\ud800"}, 400, "not UTF-8"),
    (CHAT, b"[1]", 404, "The model is called tiny"),
    (CHAT, b"{", 400, "not a valid JSON file"),
    (CHAT, b"\xff\xfe{", 400, "The body"),
    (CHAT, b"[" * 100_000, 400, "nested too deeply"),
    ("/embeddings", {}, 404, "There is no such path"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_request_is_refused_in_a_sentence(server, path, body, status, message):
    if body == {"prompt": "\\ud800"}:
        body = b'{"model": "tiny", "prompt": "\\ud800"}'
    found, answer = ask(server, path, body)
    assert (found, message in answer["error"]["message"]) == (status, True), answer


def test_fields_that_change_nothing_are_accepted(server):
    body = {"messages": HI, "n": 1, "presence_penalty": 0, "user": "me", "tools": None, "max_tokens": 2}
    assert ask(server, CHAT, body)[0] == 200


def test_a_web_page_cannot_ask(server):
    assert ask(server, CHAT, {"messages": HI}, headers={"Content-Type": "text/plain"})[0] == 415
    for host, status in (("evil.example:80", 403), ("localhost:1", 200), ("127.0.0.1", 200)):
        assert ask(server, CHAT, {"messages": HI, "max_tokens": 1}, headers={"Host": host})[0] == status
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("0.0.0.0") and is_loopback("localhost")


def test_a_client_that_leaves_ends_its_answer(loaded):
    with serving(loaded, 400) as (server, lines):
        body = json.dumps({"model": "tiny", "messages": HI, "stream": True}).encode()
        head = f"POST /v1{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(server.server_address) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            client.recv(200)
        assert ask(server, CHAT, {"messages": HI, "max_tokens": 1})[0] == 200  # after the other answer has ended
        deadline = time.monotonic() + 20
        while len(lines) < 2 and time.monotonic() < deadline:  # a line is written after the next answer may begin
            time.sleep(0.01)
    assert "the client closed the connection" in lines and len(lines) == 2  # in either order


def test_alpaca_and_plain_text_have_their_prompts(loaded, quickstart, tmp_path):
    from dataclasses import replace

    alpaca = replace(loaded, template={"prompt_template": "alpaca", "system_prompt": "Be brief."})
    expected = generate_answer(alpaca, "Say hi.", Decoding(8), seed=0).text
    with serving(alpaca, 8) as (server, _):
        body = {"messages": [{"role": "user", "content": "Say hi."}]}
        assert ask(server, CHAT, body)[1]["choices"][0]["message"]["content"] == expected
    plain = replace(loaded, template={"prompt_template": "raw", "system_prompt": None})
    with serving(plain, 8) as (server, _):
        assert ask(server, CHAT, {"messages": HI})[0] == 200
        assert "send one message" in ask(server, CHAT, {"messages": LONGER[1:]})[1]["error"]["message"]
        assert "no place in plain text" in ask(server, CHAT, {"messages": LONGER})[1]["error"]["message"]


def test_a_port_in_use_is_one_sentence(server, quickstart, tmp_path):
    port = server.server_address[1]
    done = run_here("serve", quickstart / "stories260K", "--port", port, cwd=tmp_path)
    assert done.code == 2 and f"--port: {port} is in use on 127.0.0.1. Name another" in done.err
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.1:0"):
        listen("203.0.113.1", 0)


# ---- with OpenAI's client


def started(folder: Path) -> tuple[subprocess.Popen, dict[str, str]]:
    """Start `ligertune serve FOLDER --json` on a free port, and return it with its report."""
    command = [sys.executable, "-m", "ligertune", "serve", str(folder), "--port", "0", "--json"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    report = ""
    while not report.endswith("}\n"):
        report += process.stdout.readline()
    return process, json.loads(report)


@pytest.mark.slow
def test_openais_client_streams_the_text_of_generate(quickstart, tmp_path):
    """With an adapter that is attached, and the system prompt of training."""
    openai = pytest.importorskip("openai")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = quickstart / "stories260K"
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    write_prompt(tmp_path / "adapter", {"prompt_template": "chat", "system_prompt": "Be brief."})
    done = run_here("generate", "adapter", "Say hi.", "--max-new-tokens", 40, "--json", cwd=tmp_path)
    expected = json.loads(done.out)["text"]
    process, report = started(tmp_path / "adapter")
    try:
        client = openai.OpenAI(base_url=report["address"], api_key="none")
        name = client.models.list().data[0].id
        assert name == report["model"] == "adapter"
        asked = {"model": name, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 40}
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
        )
        assert streamed == expected == client.chat.completions.create(**asked).choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="n is not computed"):
            client.chat.completions.create(**asked, n=2)
        text = client.completions.create(model=name, prompt="Once", max_tokens=5).choices[0].text
        assert text
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and said.strip().endswith("Stopped by SIGINT.") and "Traceback" not in said
