"""KernelAdamW computes the weights of torch's fused AdamW, and each can load the states of the other."""

import pytest
import torch
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import meta_runs_as
from rerun_interpreted import DEVICE, RUNS_TRITON

from ligertune.errors import UserError
from ligertune.patching.deferred_logits import LossCounts
from ligertune.planning.plan import KernelLine
from ligertune.recipe import load_recipe
from ligertune.training.checks import kernels_as_run
from ligertune.training.optim.algorithms import KERNEL_STEP_SIZE, KernelAdamW, kernel_step_pays, with_kernel_step

H100 = Chip("nvidia", "sm90", 32, 132, 50 << 20)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(DEVICE)
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


@pytest.mark.skipif(not RUNS_TRITON, reason="test_recompute.py runs this test under Triton's interpreter")
def test_it_trains_as_torchs_adamw_and_states_are_exchangeable():
    (model, one), (expected, other) = model_and_optimizer(), model_and_optimizer()
    one = with_kernel_step(one)
    one.grad_scale = other.grad_scale = torch.tensor(2.0, device=DEVICE)
    for step in range(6):
        x = torch.randn(4, 7, device=DEVICE)
        for each, optimizer in ((model, one), (expected, other)):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 2:  # each continues with the states of the other
            a, b = one.state_dict(), other.state_dict()
            one.load_state_dict(b)
            other.load_state_dict(a)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert one.state[next(model.parameters())]["step"] == 6
    assert kernels_as_run((), LossCounts(), one) == (KernelLine("adamw_step", 4, 0, ""),)
    assert kernels_as_run((), LossCounts(), other) == ()


def test_groups_and_options_are_kept():
    weight = torch.nn.Parameter(torch.ones(2))
    given = torch.optim.AdamW([{"params": [weight], "weight_decay": 0.3}], lr=0.5, betas=(0.8, 0.9), fused=True)
    found = with_kernel_step(given)
    assert isinstance(found, KernelAdamW)
    group = found.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["fused"]) == (0.5, (0.8, 0.9), 0.3, True)
    assert group["params"][0] is weight


def test_auto_takes_the_kernel_for_large_tensors_of_fused_adamw_on_a_measured_chip():
    def pays(size: int, *, ranks: int = 1, **options: object) -> bool:
        weights = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in (2 * size, 0)]
        return kernel_step_pays(torch.optim.AdamW(weights, **options), torch.device("meta"), ranks=ranks)

    with meta_runs_as(H100):
        assert pays(KERNEL_STEP_SIZE, fused=True) and not pays(KERNEL_STEP_SIZE - 1, fused=True)
        assert pays(2 * KERNEL_STEP_SIZE, fused=True, ranks=2)
        assert not pays(KERNEL_STEP_SIZE, fused=True, ranks=2)
        assert not pays(KERNEL_STEP_SIZE, fused=False)
    with meta_runs_as(Chip("nvidia", "sm80", 32, 108, 40 << 20)):
        assert not pays(KERNEL_STEP_SIZE, fused=True)
    assert not kernel_step_pays(model_and_optimizer()[1], torch.device("cpu"), ranks=1)


def test_the_key_requires_fused_adamw(quickstart):
    path = quickstart / "stories260k.yaml"
    assert load_recipe(path, overrides=["kernels.optimizer=true"]).kernels.optimizer
    with pytest.raises(UserError, match=r"kernels\.optimizer is the step of adamw_torch_fused"):
        load_recipe(path, overrides=["kernels.optimizer=true", "train.optim=adamw_torch"])
