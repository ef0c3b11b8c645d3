"""Run the tests of ops/ in a separate process, with the Triton kernels interpreted on the CPU."""

from pathlib import Path

from support.rerun_interpreted import rerun_interpreted


def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    ops = Path(__file__).parent / "ops"
    emulated = ops / "attention" / "test_hopper_emulated.py"  # has an interpreter of its own, also without this switch
    rerun_interpreted(str(ops), f"--ignore={emulated}")
