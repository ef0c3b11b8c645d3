"""Bad input: one message of one sentence, the right exit code and no traceback; nothing is written."""

from __future__ import annotations

import logging
import shutil
import sys

import pytest
from bad_input_cases import CASES, REQUIRED, Bad
from command_line import RECIPE, run


@pytest.fixture
def folder(tmp_path, monkeypatch, quickstart):
    """folder(case): make the working directory of a case."""
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_bad_input_is_refused_with_one_sentence(case, folder, ligertune, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers' logger keeps the stderr of an earlier test
    before = folder(case)
    files = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    done = ligertune(*case.argv)
    assert done.code == case.code, done.err
    assert "Traceback" not in done.err
    said = [line for line in done.err.splitlines() if line.startswith("Error:")]
    assert len(said) == 1, done.err
    for words in case.says:
        assert words in said[0], said[0]
    assert {path: path.read_bytes() for path in files} == files  # nothing lost, nothing overwritten


WITHOUT_TORCH = {
    "unknown key": "train.learning_rat=0.001",
    "key of another section": "model.learning_rate=0.001",
    "wrong type": "train.learning_rate=fast",
    "missing data file": "data.datasets.0.path=nowhere.jsonl",
    "missing model folder": "model.model_name_or_path=./no-model",
}
REFUSE_ALL = """
import sys
from ligertune.cli.app import main
recipe, *overrides = sys.argv[1:]
for override in overrides:
    sys.argv = ["ligertune", "train", recipe, "--set", override]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, override
    assert "torch" not in sys.modules, override
"""


def test_torch_is_not_imported_to_refuse_a_recipe(tmp_path):
    done = run([sys.executable, "-c", REFUSE_ALL, str(RECIPE), *WITHOUT_TORCH.values()], cwd=tmp_path)
    assert done.code == 0 and done.err.count("Error:") == len(WITHOUT_TORCH), done.err


def test_a_closed_pipe_gives_no_traceback(tmp_path):
    """`ligertune recipe show ... | head -1`."""
    done = run(["bash", "-c", f"'{sys.executable}' -m ligertune recipe show '{RECIPE}' | head -1"], cwd=tmp_path)
    assert "Traceback" not in done.err and done.out == "version: 1\n"
