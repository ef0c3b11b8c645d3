"""Run the tests of ops/ in a separate process, with the Triton kernels interpreted on the CPU."""

from pathlib import Path

from support.rerun_interpreted import rerun_interpreted


def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    ops = Path(__file__).parent / "ops"
    # have an interpreter of their own, also without this switch
    emulated = (ops / "attention" / "test_hopper_emulated.py", ops / "recurrence" / "test_hopper_scans_emulated.py")
    rerun_interpreted(str(ops), *(f"--ignore={file}" for file in emulated))
