"""Run the tests of ops/ in a separate process, with the Triton kernels interpreted on the CPU."""

from pathlib import Path

import pytest
from support.rerun_interpreted import rerun_interpreted

OPS = Path(__file__).parent / "ops"
# have an interpreter of their own, also without this switch
EMULATED = (OPS / "attention" / "test_hopper_emulated.py", OPS / "recurrence" / "test_hopper_scans_emulated.py")
IGNORED = tuple(f"--ignore={file}" for file in EMULATED)


def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    rerun_interpreted(str(OPS), "-m", "not slow", *IGNORED)


@pytest.mark.slow
def test_the_kernels_agree_with_float64_at_the_sizes_of_models_under_the_interpreter() -> None:
    rerun_interpreted(str(OPS), "-m", "slow", *IGNORED)
