"""Run the tests of ops/, and of kernels within models, in a separate process that interprets Triton on the CPU."""

from pathlib import Path

import pytest
from support.rerun_interpreted import rerun_interpreted

OPS = Path(__file__).parent / "ops"
# have an interpreter of their own, also without this switch
EMULATED = (OPS / "attention" / "test_hopper_emulated.py", OPS / "recurrence" / "test_hopper_scans_emulated.py")
IGNORED = tuple(f"--ignore={file}" for file in EMULATED)
TESTS = Path(__file__).parents[1]
RECOMPUTED = TESTS / "patching" / "test_recompute.py"
IN_MODELS = (
    TESTS / "patching" / "test_patch_in_place.py",
    TESTS / "training" / "optim" / "test_kernel_adamw.py",
    TESTS / "decode" / "test_sampling.py",
)


def test_the_kernels_agree_with_float64_under_the_interpreter() -> None:
    """All run in one process, which imports torch once. In float16 they are slow tests."""
    chosen = "ops or test_patch_in_place or trains_as_torchs_adamw or (greedy_answers and sliding)"
    chosen = f"({chosen}) and not torch.float16"
    rerun_interpreted(str(OPS), *map(str, IN_MODELS), "-m", "not slow", "-k", chosen, *IGNORED)


@pytest.mark.slow
def test_recomputed_layers_have_every_bit_under_the_interpreter() -> None:
    """Of the families whose norms and MLPs launch in different ways. Others differ outside the kernels."""
    different = "llama- or llama] or gemma2 or phi3] or mixtral or olmo2"
    freed = "freed and not qwen2 and (llama- or True- or adapter or casts)"
    rerun_interpreted(
        str(RECOMPUTED), "-m", "not slow", "-k", f"(every_bit and ({different})) or two_backwards or ({freed})"
    )


@pytest.mark.slow
def test_the_kernels_agree_with_float64_at_the_sizes_of_models_under_the_interpreter() -> None:
    rerun_interpreted(str(OPS), "-m", "slow", *IGNORED)


@pytest.mark.slow
def test_the_kernels_agree_with_float64_in_float16_under_the_interpreter() -> None:
    rerun_interpreted(str(OPS), "-m", "not slow", "-k", "torch.float16", *IGNORED)
