"""Run the tests of ops/ in a separate process, with the Triton kernels interpreted on the CPU."""

from pathlib import Path

from rerun_interpreted import rerun_interpreted


def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    rerun_interpreted(str(Path(__file__).parent / "ops"))
