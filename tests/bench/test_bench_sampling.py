"""scripts/bench sampling on a CPU: all sides make the same number of tokens, and the page has their rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_sides_are_measured_in_their_processes():
    command = [sys.executable, str(ROOT / "scripts" / "bench"), "sampling", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"page"')))
    rows = {row["side"]: row for row in page["rows"]}
    assert rows.keys() == {"slots 4", "generate 4"} and not page["left_out"]
    assert rows["slots 4"]["answers"] == 6 and rows["generate 4"]["answers"] == 4  # all; one batch
    assert rows["generate 4"]["ratio"] == rows["slots 4"]["rate"] / rows["generate 4"]["rate"]
