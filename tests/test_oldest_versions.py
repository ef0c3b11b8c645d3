"""The oldest transformers that pyproject.toml allows, in an environment of its own."""

import os
import subprocess

import pytest
from support.command_line import ROOT


@pytest.mark.slow
def test_a_part_of_the_tests_passes_on_the_oldest_transformers():
    """Minutes on two cores, and a download on the first run."""
    # the paths of this environment would shadow the packages of the other one
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(["bash", "scripts/test", "--oldest", "-q"], cwd=ROOT, env=variables, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
