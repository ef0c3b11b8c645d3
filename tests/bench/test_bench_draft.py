"""scripts/bench draft on a CPU: both sides compute one loss, and the page has their rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_plain_torch_computes_the_same_loss():
    command = [sys.executable, str(ROOT / "scripts" / "bench"), "draft", "--small", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"page"')))
    assert not page["left_out"]
    losses = {(row["side"], row["length"]): row["loss"] for row in page["rows"] if "loss" in row}
    for length in (40, 80):
        assert losses["ligertune", length] == pytest.approx(losses["plain PyTorch", length], rel=1e-5)
    assert losses["ligertune, recomputed", 40] == losses["ligertune", 40]
    assert {"ligertune draft"} < {row["side"] for row in page["rows"]}
