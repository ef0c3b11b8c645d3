"""Data that cannot be used: one sentence with file and line, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from command_line import overrides

GOOD = {"instruction": "Say hello.", "output": "Hello."}
CHAT = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
SEEN = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]}


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# name -> (file, what is in it, what the sentence must say)
FILES = {
    "columns of no format": (
        "d.jsonl", lines({"instruction": "a", "response": "b"}),
        ["d.jsonl", "instruction, response", "nearest is alpaca", "`output`"],
    ),
    "preferences": ("d.jsonl", lines({"prompt": "a", "chosen": "b", "rejected": "c"}), ["chosen", "`completion`"]),
    "a gzip file that is cut off": ("d.jsonl.gz", gzip.compress(lines(GOOD) * 9)[:-4], ["d.jsonl.gz:1:", "cut off"]),
    "a gzip file that is none": ("d.jsonl.gz", lines(GOOD), ["d.jsonl.gz:1:", "not a sound gzip file"]),
    "a corrupt parquet file": ("d.parquet", b"PAR1" + b"x" * 40 + b"PAR1", ["d.parquet:1:", "not a sound parquet"]),
    "Latin-1": (
        "d.jsonl", lines(GOOD) + '{"instruction": "né", "output": "o"}\n'.encode("latin-1"),
        ["d.jsonl:2:", "byte 0xe9", "not UTF-8", "Latin-1"],
    ),
    "UTF-16": ("d.json", "[]".encode("utf-16"), ["d.json:1:", "UTF-16"]),
    "half a record": ("d.jsonl", lines(GOOD) + b'{"instruction": ', ["d.jsonl:2:", "not JSON"]),
    "an image among the parts": (
        "d.jsonl", lines(CHAT, {"messages": [SEEN, CHAT["messages"][1]]}),
        ["d.jsonl:2:", "part of type image", "text only"],
    ),
    "a column of images": ("d.jsonl", lines({**CHAT, "images": ["a.png"]}), ["d.jsonl:1:", "`images`", "text only"]),
    "a weight of a half": (
        "d.jsonl", lines({"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0.5}]}),
        ["d.jsonl:1:", "weight 0.5", "0 and 1"],
    ),
}  # fmt: skip
TEMPLATES = {
    "not jinja": ("a\n{% for %}", ["t.jinja:2:", "not jinja"]),
    "refuses all": ("{{ raise_exception('no') }}", ["d.jsonl:1", "the template refuses it", "no"]),
    "fails on all": ("{{ nothing.at.all }}", ["d.jsonl:1", "the template refuses it", "nothing"]),
    "leaves the answers out": ("{% for m in messages %}{{ m.role }}{% endfor %}", ["d.jsonl:1", "cannot be placed"]),
}


@pytest.fixture
def refused(recipe, monkeypatch, capsys, tmp_path):
    """refused(settings, words): `ligertune data` and `ligertune train` end with this one sentence."""
    from ligertune.cli.app import main

    monkeypatch.chdir(tmp_path)

    def refused(settings: dict[str, object], words: list[str]) -> None:
        for command in ("data", "train"):
            monkeypatch.setattr(sys, "argv", ["ligertune", command, str(recipe), *overrides(settings)])
            with pytest.raises(SystemExit) as end:
                main()
            said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error:")]
            assert end.value.code == 2 and len(said) == 1
            for word in words:
                assert word in said[0], said[0]

    return refused


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used(name, streaming, refused):
    file, content, words = FILES[name]
    Path(file).write_bytes(content)
    stream = {"data.streaming": "true", "data.val_split": 0, "train.max_steps": 2} if streaming else {}
    refused({"data.datasets.0.path": file, **stream}, words)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_does_not_render(name, refused):
    template, words = TEMPLATES[name]
    Path("t.jinja").write_text(template)
    Path("d.jsonl").write_bytes(lines(CHAT, CHAT))
    refused({"data.datasets.0.path": "d.jsonl", "data.prompt_template": "t.jinja"}, words)
