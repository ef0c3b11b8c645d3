"""scripts/bench moe_whole: sides in processes of their own, with a time limit; pages of what this run measured only."""

import json
import subprocess
import sys

import pytest
from support.command_line import ROOT
from support.script_modules import script_module

SAYS = """
import sys
sys.path.insert(0, {!r})
from benchmarks import processes
processes.say({{'side': 'a', 'peak': 3}})
{}
"""


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("", None),
        ("raise ValueError('no such side')", "failed: ValueError: no such side"),
        ("import time; time.sleep(60)", "stopped after 2 s"),
    ],
)
def test_points_of_a_side_are_kept_whatever_ends_its_process(then, reason):
    processes, shown = script_module("benchmarks.processes"), []
    code = SAYS.format(str(ROOT / "scripts"), then)
    found = processes.run([sys.executable, "-c", code], limit=2, show=shown.append)
    assert found == ([{"side": "a", "peak": 3}], reason)
    assert shown == [{"side": "a", "peak": 3}]


@pytest.mark.slow
def test_both_sides_train_a_small_model_from_the_same_rows(tmp_path):
    """The losses of random weights are near the logarithm of the vocabulary's 512 tokens."""
    sides = ["ligertune bf16", "hf_peft bf16"]
    command = [sys.executable, ROOT / "scripts" / "bench", "moe_whole", "--small", "--sides", "; ".join(sides)]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " tokens/s, peak " in line]
    assert [line.partition(":")[0] for line in lines] == sides
    for line in lines:
        losses = [float(word) for word in line.rpartition("losses ")[2].split()]
        assert losses == pytest.approx([6.24] * 5, abs=0.15)
    assert "| ligertune bf16 | " in done.stdout


@pytest.mark.slow
def test_the_benchmark_of_mxfp4_runs_on_a_small_model(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench", "mxfp4", "--small", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"phase"')]
    kernels, train, merge = phases
    assert kernels["equals_transformers"] and len(train["losses"]) == 8
    assert 0 < merge["kl_merge"] < 0.01 and 0 < merge["kl_base"] < 0.01
    assert not (tmp_path / "base").exists()


@pytest.mark.slow
def test_the_benchmark_of_block_float8_runs_on_a_small_model(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench", "float8_base", "--small", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stored, dense = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"base"'))
    assert len(stored["losses"]) == 8
    assert stored["losses"] == pytest.approx(dense["losses"], rel=1e-3)
