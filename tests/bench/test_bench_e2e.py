"""scripts/bench_e2e: batches of longer rows, and fine-tuning in float8 on a CPU."""

import argparse
import json
import sys

import pytest
from command_line import ROOT
from script_modules import load_script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("bench_e2e")


@pytest.mark.parametrize(
    ("length", "batches", "expected"),
    [(512, "4,16,32", "4,16,32"), (4096, "4,16,32", "1,2,4"), (4096, "4,8", "1"), (256, "16", "32")],
)
def test_batches_of_longer_rows_have_as_many_tokens(script, length: int, batches: str, expected: str) -> None:
    assert script.scaled(argparse.Namespace(small=False, length=length), batches) == expected


@pytest.mark.slow
def test_fine_tuning_in_float8_begins_with_trained_weights(script, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_e2e", "--small", "--only", "fp8_tuning", "--out", str(tmp_path)])
    assert script.main() == 0
    (page,) = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"page": '))
    assert {row["side"] for row in page["rows"]} == {"ligertune", "ligertune, fp8"}
    log = (tmp_path / "trained.log").read_text(encoding="utf-8")
    assert (tmp_path / "trained" / "model" / "model.safetensors").is_file() and "20/20" in log
    losses = page["chart"]["curves"]["ligertune"]
    untrained = 4.1  # of stories260K on these records
    assert losses[0] < untrained - 0.5
