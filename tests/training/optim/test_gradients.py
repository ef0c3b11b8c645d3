"""Gradients between backward and step: clipping inside the optimizer's step, and steps without any gradient."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.quickstart_runs import detach_loss, plan_run
from test_optimizers import plan, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from ligertune.errors import UserError
from ligertune.run import run
from ligertune.training.optim.gradients import check_gradients, clip_gradients
from ligertune.training.optim.optimizers import build_optimizer, set_learning_rate

# Below all gradient norms of the tiny model, between them, and above them: each, some and no step is clipped.
MAX_NORMS = (0.05, 2.0, 1e6)
ONE_MICRO_BATCH = {"data.val_split": 0, "train.gradient_accumulation_steps": 1}
WAYS = {
    "clipped": {"train.max_grad_norm": 1.0},
    "not clipped": {"train.max_grad_norm": 0},
    "in backward": {"train.max_grad_norm": 0, "train.optim_in_backward": True},
}


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run may have been on a GPU
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def adamw(model: torch.nn.Module, *, fused: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=fused)  # eps shows a wrong scale


def backward(model: torch.nn.Module, seed: int) -> None:
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_clipping_inside_the_step_equals_torchs_clipping(max_norm, accelerator):
    model, expected = tiny(), tiny()
    optimizer, expected_optimizer = accelerator.prepare(adamw(model)), adamw(expected)
    for step in range(4):
        backward(model, step)
        backward(expected, step)
        norm = clip_gradients(accelerator, optimizer, model.parameters(), max_norm)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), max_norm))
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Operations(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: list[set[torch.dtype]] = []  # of the tensors of each _foreach_norm

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if "_foreach_norm" in str(func):
            self.dtypes.append({tensor.dtype for tensor in args[0]})
        return func(*args, **(kwargs or {}))


def test_clipping_copies_nothing_from_the_host(accelerator):
    """Such a copy waits for the backward on a GPU, which is then idle until the host has launched the next step."""
    model = tiny()
    backward(model, 1)
    with Operations() as operations:
        clip_gradients(accelerator, adamw(model), model.parameters(), 1.0)
    assert "aten.stack.default" in operations.names and "aten.sqrt.default" in operations.names
    assert "aten.lift_fresh.default" not in operations.names  # a tensor of Python numbers, such as a list as an index


def test_the_norm_of_bfloat16_gradients_is_float32(accelerator):
    model = tiny().bfloat16()
    backward(model, 1)
    expected = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
    norm = clip_gradients(accelerator, adamw(model), model.parameters(), 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)


def mixed() -> torch.nn.Module:
    """Return a model in bfloat16 whose norms are float32, as decays of hybrid models are."""
    model = tiny().bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
            parameter.grad = torch.randn_like(parameter)
        else:
            parameter.grad = 0.1 * torch.randn_like(parameter)
    return model


def test_the_norm_of_gradients_of_several_dtypes_copies_none(accelerator):
    """torch copies every tensor of a list of several dtypes to float64."""
    model = mixed()
    with Operations() as operations:
        norm = clip_gradients(accelerator, adamw(model), model.parameters(), 1e9)
    assert sorted(map(str, operations.dtypes)) == ["{torch.bfloat16}", "{torch.float32}"]
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_the_norm_of_gradients_of_several_dtypes_takes_no_memory():
    model = mixed().cuda()
    model.embed = torch.nn.Parameter(torch.zeros(1 << 26, device="cuda", dtype=torch.bfloat16))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    norm = clip_gradients(Accelerator(), adamw(model), model.parameters(), 1e9)
    assert torch.cuda.max_memory_allocated() - held < 16 << 20
    assert norm.item() == pytest.approx(sum(p.numel() for p in model.parameters()) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw that is not fused", "sgd"])
def test_other_optimizers_get_scaled_gradients(name, accelerator):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if name == "sgd" else adamw(model, fused=False)
    backward(model, 1)
    before = copy.deepcopy([p.grad for p in model.parameters()])
    norm = clip_gradients(accelerator, optimizer, model.parameters(), 0.5)
    for p, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, grad * (0.5 / (norm + 1e-6)))


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_without_gradients_ends_the_run_at_its_first_step(way, tmp_path):
    shown = []
    with pytest.raises(UserError, match="No gradient reached any") as caught:
        run(plan_run(tmp_path, **ONE_MICRO_BATCH, **WAYS[way]), shown.append, change=detach_loss)
    assert caught.value.exit_code == 1
    assert not shown and not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("in_backward", [False, True])
def test_each_step_needs_gradients_of_its_backward(in_backward):
    model = tiny()
    optimizer = build_optimizer(model, plan("adamw_torch", in_backward=in_backward))
    set_learning_rate(optimizer, 1e-3)
    backward(model, 1)
    check_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="No gradient reached any"):
        check_gradients(optimizer)
    if not in_backward:  # one parameter with a gradient is enough: some experts get no token in a step
        model.model.norm.weight.grad = torch.zeros_like(model.model.norm.weight)
        check_gradients(optimizer)
