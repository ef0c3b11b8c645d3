"""scripts/bench qlora_fsdp2: two CPU processes run all sides, and losses are compared with those of one process."""

import json
import subprocess
import sys

import pytest
from support.command_line import ROOT, environment
from support.script_modules import script_module

benchmark = script_module("benchmarks.runs.qlora_fsdp2")


def test_losses_of_two_gpus_are_compared_with_those_of_one():
    later = [1.0] * (benchmark.COMPARED - 2)
    points = [
        {"side": "one", "losses": [2.0, 1.0, *later, 9.0]},
        {"side": "fused", "losses": [2.0, 1.01, *later, 8.0]},
        {"side": "hf_peft", "failed": "out of memory"},
    ]
    assert benchmark.differences_of(points) == {"fused": pytest.approx(0.01)}
    assert benchmark.differences_of(points[1:]) == {}


@pytest.mark.slow
def test_all_sides_train_a_small_model(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    command = [sys.executable, "scripts/bench", "qlora_fsdp2", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page": '))
    assert [row["side"] for row in page["rows"]] == ["one", "fused", "plain", "hf_peft"]
    assert all(row["losses_differ"] < 1e-5 for row in page["rows"][1:])  # the peer's, too: in float32
