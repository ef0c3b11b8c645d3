"""Launch candidates of scripts/bench tune_kernels replace the plans of the norms, and are put into words."""

import pytest
import torch
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import meta_runs_as
from ligertune_kernels.ops.norms import kernels as norm_kernels
from ligertune_kernels.ops.norms.tiles import NormCall
from support.script_modules import script_module

from ligertune.bench.case import Case

H100 = Chip("nvidia", "sm90", 32, 132, 50 << 20, 227 << 10)


@pytest.mark.parametrize(("columns", "kernel"), [(4096, "backward_kernel"), (16384, "backward_halves_kernel")], ids=str)
def test_the_backward_of_a_layer_norm_is_tried_with_other_warps(columns, kernel):
    candidates = script_module("benchmarks.ops.launch_candidates")
    trial = script_module("benchmarks.ops.launch_trial").trial
    bf16 = torch.bfloat16
    call = NormCall(columns, (columns,) * 3, (bf16, None, bf16, bf16), True, False, torch.device("meta"))
    said = {}
    with meta_runs_as(H100):
        for candidate in (
            candidates.PRESENT,
            candidates.Candidate("warps", "", (candidates.Norm("backward", warps=4),)),
        ):
            decided: dict[str, str] = {}
            with trial(Case("layer_norm", (8192, columns), bf16), candidate, decided)():
                norm_kernels._plan_backward(call, (True, True, True))
            said[candidate.name] = decided["backward"]
    assert said["now"].startswith(f"{kernel}, ") and f"rows of {columns}, " in said["now"]
    assert ", 4 warps" in said["warps"] and ", 4 warps" not in said["now"]
