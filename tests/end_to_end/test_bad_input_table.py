"""Sixty kinds of bad input, each answered with one sentence, the right exit code and no traceback."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter

import pytest
from bad_input_cases import CASES, REQUIRED, Bad

from ligertune.cli.app import main


@pytest.fixture
def folder(tmp_path, monkeypatch, quickstart):
    """folder(case): the current one, made as the case says."""
    monkeypatch.chdir(tmp_path)

    def folder(case: Bad):
        shutil.copytree(quickstart / "stories260K", tmp_path / "model")
        (tmp_path / "data.jsonl").write_text('{"instruction": "Say hello.", "output": "Hello."}\n' * 8)
        for name, content in {"r.yaml": REQUIRED, **case.files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = content.encode() if isinstance(content, str) else content
            if "*" not in name:
                path.write_bytes(content.replace(b"MODEL", b"./model").replace(b"DATA", b"data.jsonl"))
        if case.prepare:
            case.prepare(tmp_path)
        for name, value in case.variables.items():
            monkeypatch.setenv(name, value)
        return tmp_path

    return folder


def test_there_are_sixty():
    assert len(CASES) >= 60
    assert not [name for name, n in Counter((case.kind, case.name) for case in CASES).items() if n > 1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_one_sentence_the_right_code_and_no_traceback(case, folder, monkeypatch, capsys):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers' logger keeps the stderr of an earlier test
    before = folder(case)
    held = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["ligertune", *case.argv])
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == case.code, err
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("Error:")]
    assert len(said) == 1, err
    for words in case.says:
        assert words in said[0], said[0]
    assert {path: path.read_bytes() for path in held} == held  # nothing lost, nothing overwritten
