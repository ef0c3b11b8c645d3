"""Invalid data files and templates: one sentence with file and line, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from command_line import overrides

GOOD = {"instruction": "Say hello.", "output": "Hello."}
CHAT = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
IMAGE_TURN = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]}


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# name -> (file, content, words that the message must contain)
FILES = {
    "columns of no format": (
        "d.jsonl", lines({"instruction": "a", "response": "b"}),
        ["d.jsonl", "instruction, response", "nearest is alpaca", "`output`"],
    ),
    "preferences": ("d.jsonl", lines({"prompt": "a", "chosen": "b", "rejected": "c"}), ["chosen", "`completion`"]),
    "a truncated gzip file": ("d.jsonl.gz", gzip.compress(lines(GOOD) * 9)[:-4], ["d.jsonl.gz:1:", "cut off"]),
    "not a gzip file": ("d.jsonl.gz", lines(GOOD), ["d.jsonl.gz:1:", "not a valid gzip file"]),
    "a corrupt parquet file": ("d.parquet", b"PAR1" + b"x" * 40 + b"PAR1", ["d.parquet:1:", "not a valid parquet"]),
    "Latin-1": (
        "d.jsonl", lines(GOOD) + '{"instruction": "né", "output": "o"}\n'.encode("latin-1"),
        ["d.jsonl:2:", "byte 0xe9", "not UTF-8", "Latin-1"],
    ),
    "UTF-16": ("d.json", "[]".encode("utf-16"), ["d.json:1:", "UTF-16"]),
    "an incomplete record": ("d.jsonl", lines(GOOD) + b'{"instruction": ', ["d.jsonl:2:", "not JSON"]),
    "an image in a turn": (
        "d.jsonl", lines(CHAT, {"messages": [IMAGE_TURN, CHAT["messages"][1]]}),
        ["d.jsonl:2:", "part of type image", "text only"],
    ),
    "a column of images": ("d.jsonl", lines({**CHAT, "images": ["a.png"]}), ["d.jsonl:1:", "`images`", "text only"]),
    "a fractional weight": (
        "d.jsonl", lines({"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0.5}]}),
        ["d.jsonl:1:", "weight 0.5", "0 and 1"],
    ),
}  # fmt: skip
TEMPLATES = {
    "not jinja": ("a\n{% for %}", ["t.jinja:2:", "not jinja"]),
    "raises an exception": ("{{ raise_exception('no') }}", ["d.jsonl:1", "the template refuses it", "no"]),
    "reads an undefined variable": ("{{ nothing.at.all }}", ["d.jsonl:1", "the template refuses it", "nothing"]),
    "omits the answers": ("{% for m in messages %}{{ m.role }}{% endfor %}", ["d.jsonl:1", "cannot be placed"]),
}


@pytest.fixture
def assert_refused(ligertune, recipe, monkeypatch, tmp_path):
    """assert_refused(settings, words): `ligertune data` and `ligertune train` refuse them with these words."""
    monkeypatch.chdir(tmp_path)

    def check(settings: dict[str, object], words: list[str]) -> None:
        for command in ("data", "train"):
            done = ligertune(command, recipe, *overrides(settings))
            said = [line for line in done.err.splitlines() if line.startswith("Error:")]
            assert done.code == 2 and len(said) == 1
            assert all(word in said[0] for word in words), said[0]

    return check


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_an_invalid_file_is_refused_with_its_line(name, streaming, assert_refused):
    file, content, words = FILES[name]
    Path(file).write_bytes(content)
    stream = {"data.streaming": "true", "data.val_split": 0, "train.max_steps": 2} if streaming else {}
    assert_refused({"data.datasets.0.path": file, **stream}, words)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_invalid_template_is_refused(name, assert_refused):
    template, words = TEMPLATES[name]
    Path("t.jinja").write_text(template)
    Path("d.jsonl").write_bytes(lines(CHAT, CHAT))
    assert_refused({"data.datasets.0.path": "d.jsonl", "data.prompt_template": "t.jinja"}, words)
