"""A run that is killed at chosen moments and resumed ends with the model of an undisturbed run, and leaves nothing.

`scripts/chaos` does it with 30 kills.
"""

import re
import sys

import pytest
from support.command_line import ROOT, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_model(async_save, tmp_path):
    options = ("--kills", "3", "--async-save", async_save, "--folder", str(tmp_path))
    done = run([sys.executable, str(ROOT / "scripts" / "chaos"), *options], cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert re.search(rf"async_save {async_save}: 3 kills, \d finished runs?: .*bit-equal", done.out), done.out
