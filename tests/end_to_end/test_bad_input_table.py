"""Sixty kinds of bad input, each answered with one sentence, the right exit code and no traceback."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter

import pytest
from bad_input_cases import CASES, REQUIRED, Bad
from command_line import overrides, run

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


LIMITED = (
    "import resource, sys; from ligertune.cli.app import main\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (int(sys.argv.pop(1)),))\nmain()"
)


def test_a_disk_that_is_full(recipe, tmp_path):
    """Files of at most 1.1 MB stand for it: the system refuses the rest of the first checkpoint, as it does there."""
    settings = {"train.max_steps": 2, "checkpoint.save_steps": 1, "data.datasets.0.max_samples": 300}
    command = [sys.executable, "-c", LIMITED, "1100000", "train", str(recipe), *overrides(settings)]
    done = run(command, cwd=tmp_path)
    assert done.code == 1 and "Traceback" not in done.err, done.err
    (said,) = [line for line in done.err.splitlines() if line.startswith("Error:")]
    assert (
        said.startswith("Error: The checkpoint of step 1 could not be written to runs/quickstart")
        and "--resume" in said
    )
    assert not list(tmp_path.glob("runs/quickstart/checkpoints/step-*"))  # complete or absent


def test_output_that_nobody_reads(recipe, tmp_path):
    """`ligertune recipe show ... | head -1`: no traceback."""
    command = f"'{sys.executable}' -m ligertune recipe show '{recipe}' | head -1"
    done = run(["bash", "-c", command], cwd=tmp_path)
    assert "Traceback" not in done.err and done.out == "version: 1\n"
