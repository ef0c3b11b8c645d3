"""Optimizers against the formulas of their papers, parameter groups, stochastic rounding, and learning rates."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.features.medusa.medusa_model import MedusaModel
from ligertune.planning.optimization import Optimizer, TrainSchedule, total_steps
from ligertune.training.optim.optimizers import BUILDERS, build_optimizer, set_learning_rate
from ligertune.training.optim.schedules import SHAPES, learning_rate

BETAS, EPS, DECAY, RATE = (0.7, 0.9), 0.05, 0.5, 0.1  # far from the defaults, so that two steps show each
SHAPE = (6, 10)


def plan(name: str, **changes: object) -> Optimizer:
    return Optimizer(name=name, **{"weight_decay": DECAY, "betas": BETAS, "eps": EPS, "max_grad_norm": 0.0, **changes})


def adamw(w: Tensor, grads: list[Tensor]) -> Tensor:
    """Loshchilov and Hutter 2019, algorithm 2."""
    m = v = torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
        w = w - RATE * (m_hat / (v_hat.sqrt() + EPS) + DECAY * w)
    return w


def lion(w: Tensor, grads: list[Tensor]) -> Tensor:
    """Chen et al. 2023, algorithm 2."""
    m = torch.zeros_like(w)
    for g in grads:
        w = w - RATE * (torch.sign(BETAS[0] * m + (1 - BETAS[0]) * g) + DECAY * w)
        m = BETAS[1] * m + (1 - BETAS[1]) * g
    return w


def sgd(w: Tensor, grads: list[Tensor]) -> Tensor:
    for g in grads:
        w = w - RATE * (g + DECAY * w)
    return w


def adafactor(w: Tensor, grads: list[Tensor]) -> Tensor:
    """Shazeer and Stern 2018, algorithm 4, with the decoupled weight decay and constants of torch.optim.Adafactor."""
    rows, columns = torch.zeros(SHAPE[0], 1, dtype=w.dtype), torch.zeros(1, SHAPE[1], dtype=w.dtype)
    for t, g in enumerate(grads, start=1):
        beta2, rho = 1 - t**-0.8, min(RATE, t**-0.5)
        alpha = max(1e-3, w.square().mean().sqrt().item()) * rho
        rows = beta2 * rows + (1 - beta2) * g.square().mean(1, keepdim=True)
        columns = beta2 * columns + (1 - beta2) * g.square().mean(0, keepdim=True)
        u = g / (rows @ columns / rows.mean()).clamp(min=torch.finfo(torch.float32).eps ** 2).sqrt()
        w = w * (1 - RATE * DECAY) - alpha * u / max(1.0, u.square().mean().sqrt().item())
    return w


# optimizer -> (its formula, tolerance); bfloat16 states are exact to 1 %
FORMULAS = {
    "adamw_torch": (adamw, 1e-5),
    "adamw_torch_fused": (adamw, 1e-5),
    "adamw_bf16": (adamw, 1e-2),
    "lion": (lion, 1e-5),
    "sgd": (sgd, 1e-5),
    "adafactor": (adafactor, 1e-5),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_three_steps_follow_the_formula(name):
    formula, tolerance = FORMULAS[name]
    chance = torch.Generator().manual_seed(3)
    start, *grads = (torch.randn(*SHAPE, generator=chance) for _ in range(4))
    weight = nn.Parameter(start.clone())
    optimizer = BUILDERS[name]([{"params": [weight], "weight_decay": DECAY}], plan(name))
    set_learning_rate(optimizer, RATE)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    expected = formula(start.double(), [g.double() for g in grads])
    torch.testing.assert_close(weight.detach().double(), expected, rtol=tolerance, atol=tolerance)


def test_muon_steps_by_an_orthogonal_matrix_with_the_norm_of_adamw():
    """Liu et al. 2025, section 2.2: W (1 - rate decay) - rate * 0.2 sqrt(max(S, L)) U V^T of the momentum's SVD."""
    start, grad = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(start.clone())
    optimizer = BUILDERS["muon"]([{"params": [weight], "weight_decay": DECAY}], plan("muon"))
    set_learning_rate(optimizer, RATE)
    weight.grad = grad.clone()
    optimizer.step()
    update = (start * (1 - RATE * DECAY) - weight.detach()) / (RATE * 0.2 * 20**0.5)
    u, _, v = torch.linalg.svd(grad, full_matrices=False)
    rotated = u.T @ update @ v.T
    # Five Newton-Schulz iterations leave singular values between 0.7 and 1.2.
    torch.testing.assert_close(rotated, rotated.diagonal().diag(), rtol=0, atol=0.05)
    assert rotated.diagonal().min() > 0.6 and rotated.diagonal().max() < 1.25


class WithHeads(LlamaForCausalLM):
    """A Llama with biases, and Medusa heads as `MedusaModel` names them."""

    heads_prefix = MedusaModel.heads_prefix

    def __init__(self) -> None:
        config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                             num_attention_heads=2, attention_bias=True)  # fmt: skip
        super().__init__(config)
        self.medusa_head = nn.ModuleList([nn.Linear(16, 16)])


WAYS = {"plain": {}, "in the backward": {"in_backward": True}, "on the host": {"offload": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["adamw_torch_fused", "muon", "lion"])
def test_matrices_decay_vectors_do_not_and_heads_have_another_rate(name, way):
    model = WithHeads()
    optimizer = build_optimizer(model, plan(name, heads_lr_multiplier=4.0, **WAYS[way]))
    set_learning_rate(optimizer, 0.25)
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: (g["weight_decay"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    assert found == {
        name: (DECAY if p.ndim >= 2 else 0.0, 1.0 if name.startswith("medusa_head.") else 0.25)
        for name, p in model.named_parameters()
    }


def adamw_bf16_after(steps: int, *, weight: float, grad: float, rate: float, dtype: torch.dtype) -> SimpleNamespace:
    weights = nn.Parameter(torch.full((4096,), weight, dtype=dtype))
    group = {"params": [weights], "weight_decay": 0.0}
    how = plan("adamw_bf16", betas=(0.9, 0.999), eps=1e-8)
    optimizer = BUILDERS["adamw_bf16"]([group], how)
    set_learning_rate(optimizer, rate)
    for _ in range(steps):
        weights.grad = torch.full_like(weights, grad)
        optimizer.step()
    states = {name: t.float() for name, t in optimizer.state[weights].items()}
    return SimpleNamespace(weight=weights.detach().float(), **states)


def test_stochastic_rounding_uses_new_random_numbers_in_each_step():
    """50 steps of 1e-4 from 1, in units of bfloat16's spacing 2**-8: binomially distributed with mean 1.28.

    With the same random numbers in each step 2.6 % of the elements would move 50 times and the others never.
    """
    moves = (1 - adamw_bf16_after(50, weight=1.0, grad=1.0, rate=1e-4, dtype=torch.bfloat16).weight) * 256
    assert moves.mean() == pytest.approx(50 * 1e-4 * 256, rel=0.05)
    assert moves.std() == pytest.approx((50 * 0.0256 * 0.9744) ** 0.5, rel=0.1)
    assert moves.max() < 9


def test_bf16_moments_follow_the_formula_with_changes_below_their_spacing():
    after = adamw_bf16_after(200, weight=1.0, grad=2.0, rate=0.0, dtype=torch.float32)
    assert after.exp_avg.mean() == pytest.approx(2 * (1 - 0.9**200), rel=2e-3)
    assert after.exp_avg_sq.mean() == pytest.approx(4 * (1 - 0.999**200), rel=5e-3)


def schedule(kind: str, *, total: int = 100, warmup: int = 10) -> TrainSchedule:
    return TrainSchedule(total_steps=total, warmup_steps=warmup, learning_rate=1.0, type=kind, min_lr_ratio=0.1)


@pytest.mark.parametrize("kind", SHAPES)
def test_it_warms_up_linearly_and_the_first_rate_is_not_zero(kind):
    rates = [learning_rate(schedule(kind), step) for step in range(11)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0) == rates[10]
    assert rates == sorted(rates)
    assert learning_rate(schedule(kind, warmup=0), 0) == 1.0  # without a warm-up


@pytest.mark.parametrize(
    ("kind", "middle", "end"),
    [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("cosine_with_min_lr", 0.55, 0.1), ("constant_with_warmup", 1.0, 1.0)],
)
def test_it_falls_by_its_schedule(kind, middle, end):
    assert learning_rate(schedule(kind), 55) == pytest.approx(middle)
    assert learning_rate(schedule(kind), 100) == pytest.approx(end, abs=1e-9)


def test_a_smaller_last_batch_is_a_step():
    assert [total_steps(10, 4, epochs=epochs, max_steps=None) for epochs in (1, 1.2, 2, 0.01)] == [3, 3, 5, 1]
    assert total_steps(10, 4, epochs=None, max_steps=7) == 7
