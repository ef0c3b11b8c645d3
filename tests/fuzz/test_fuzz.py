"""Random bad input ends with exit code 0 or 2, or 1 and one sentence, quickly, in little memory, in its own folder.

14 cases of one seed, one of each kind; `scripts/fuzz` runs more.
"""

import json
import os
import subprocess
import sys

import pytest
from support.command_line import ROOT, environment
from support.fuzz import fuzz_cases

CASES = 14


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case runs in a fork")
def test_random_bad_input_ends_in_one_sentence(tmp_path):
    """In a new process, because its forks must not contain the threads of other tests."""
    command = [sys.executable, ROOT / "scripts" / "fuzz", "--cases", CASES, "--seed", 1, "--folder", tmp_path]
    done = subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 of {CASES} faulty" in done.stdout


def test_a_case_depends_on_its_seed_and_number_only(tmp_path, quickstart):
    base = tmp_path / "base"
    (base / "model").mkdir(parents=True)
    (base / "model" / "config.json").write_text("{}")
    (base / "r.yaml").write_text("train: {seed: 1}\n")
    for name in ("adapter", "teacher", "runs"):
        (base / name).mkdir()
    (base / "data.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    made = []
    for number, seed in ((0, 1), (0, 1), (0, 2), (14, 1)):
        folder = tmp_path / str(len(made))
        case = fuzz_cases.CaseMaker(base, seed).make(number, folder)
        made.append((case.name, (folder / "r.yaml").read_bytes()))
    assert made[0] == made[1] and len(set(made)) == 3
