"""Run the tests of ops/, and of kernels within models, in a separate process that interprets Triton on the CPU."""

from pathlib import Path

import pytest
from support.rerun_interpreted import rerun_interpreted

OPS = Path(__file__).parent / "ops"
# have an interpreter of their own, also without this switch
EMULATED = (OPS / "attention" / "test_hopper_emulated.py", OPS / "recurrence" / "test_hopper_scans_emulated.py")
IGNORED = tuple(f"--ignore={file}" for file in EMULATED)
TESTS = Path(__file__).parents[1]
IN_MODELS = (
    "patching/test_recompute.py",
    "patching/test_patch_in_place.py",
    "training/optim/test_kernel_adamw.py",
    "decode/test_sampling.py",
)


def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    """Within models: of the families whose norms and MLPs launch in different ways. Others differ outside the kernels.

    All run in one process, which imports torch once.
    """
    different = "llama- or llama] or gemma2 or phi3] or mixtral or olmo2"
    freed = "freed and not qwen2 and (llama- or True- or adapter or casts)"
    chosen = f"(every_bit and ({different})) or two_backwards or ({freed}) or test_patch_in_place"
    generated = "(greedy_answers and sliding)"
    files = [str(OPS), *(str(TESTS / file) for file in IN_MODELS)]
    rerun_interpreted(
        *files, "-m", "not slow", "-k", f"ops or {chosen} or trains_as_torchs_adamw or {generated}", *IGNORED
    )


@pytest.mark.slow
def test_the_kernels_agree_with_float64_at_the_sizes_of_models_under_the_interpreter() -> None:
    rerun_interpreted(str(OPS), "-m", "slow", *IGNORED)
