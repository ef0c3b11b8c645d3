"""Every optimizer of the table: it lowers the loss, resumes to the same bits, and keeps as many bytes as planned."""

from __future__ import annotations

import copy
import io
from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.models.shape import read_shape
from ligertune.planning.memory.states import state_bytes
from ligertune.planning.optimization import Galore, Optimizer
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.train.optim.adamw_bf16 import stochastic_round
from ligertune.train.optim.galore import top_singular_vectors
from ligertune.train.optim.lr_schedule import set_learning_rate
from ligertune.train.optim.optimizers import BUILDERS, build_optimizer

# sgd moves by the gradient itself, lion by its sign, adafactor by a share of each weight
RATES = {"sgd": 0.5, "lion": 1e-3, "adafactor": 3e-2, "galore_adamw": 2e-2}


def tiny() -> LlamaForCausalLM:
    """Its matrices have 4096 elements or more, as quantising optimizers ask."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


def plan(name: str, **changes: object) -> Optimizer:
    usual = {"weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "max_grad_norm": 0.0}
    return Optimizer(name=name, **{**usual, **changes})


def steps(model, optimizer, numbers, rate: float) -> list[float]:
    """Losses of some steps, on a batch that depends on the step's number."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number % 4)
        ids = torch.randint(0, 8, (2, 24), generator=generator)  # eight of 64 tokens: soon learnt
        set_learning_rate(optimizer, rate)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_and_loaded(state: dict) -> dict:
    """As a checkpoint does it."""
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


def installed(name: str):
    package = OPTIMIZERS[name].needs
    absent = package is not None and find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"needs {package}"))


def test_the_table_and_its_builders_are_the_same_list():
    assert list(BUILDERS) == list(OPTIMIZERS)


@pytest.mark.parametrize("in_backward", [False, True], ids=["", "in-backward"])
@pytest.mark.parametrize("name", [installed(name) for name in OPTIMIZERS])
def test_it_lowers_the_loss_and_resumes_bit_exactly(name, in_backward):
    rate, how = RATES.get(name, 5e-3), plan(name, in_backward=in_backward)
    model = tiny()
    optimizer = build_optimizer(model, how)
    before = steps(model, optimizer, range(8), rate)
    weights, state = copy.deepcopy(model.state_dict()), saved_and_loaded(optimizer.state_dict())
    after = steps(model, optimizer, range(8, 16), rate)
    assert sum(after[-4:]) < 0.9 * sum(before[:4])

    again = tiny()
    again.load_state_dict(weights)
    resumed = build_optimizer(again, how)
    resumed.load_state_dict(state)
    assert steps(again, resumed, range(8, 16), rate) == after
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [installed(name) for name in OPTIMIZERS])
def test_its_states_take_the_planned_bytes(name, dtype):
    if OPTIMIZERS[name].needs:
        pytest.skip("a quantised state's parts are its package's own")
    model = tiny().to(getattr(torch, dtype))
    optimizer = build_optimizer(model, plan(name))
    steps(model, optimizer, range(1), 1e-3)
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
    planned = state_bytes(read_shape(model).parameters, weight_dtype=dtype, optim=name, method="full", rank=128)
    assert planned.optimizer == held
    assert planned.weights == sum(p.numel() * p.element_size() for p in model.parameters())


def test_in_backward_keeps_no_gradients_and_computes_the_same():
    weights = []
    for in_backward in (False, True):
        model = tiny()
        optimizer = build_optimizer(model, plan("adamw_torch", in_backward=in_backward))
        set_learning_rate(optimizer, 1e-3)
        ids = torch.arange(24)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is None for p in model.parameters()) == in_backward
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_muon_leaves_embedding_head_and_norms_to_adamw():
    model = tiny()
    optimizer = build_optimizer(model, plan("muon"))
    muon, adamw = optimizer.parts
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    layers = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    assert taken == {id(p) for p in layers}
    assert type(adamw) is torch.optim.AdamW
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {0.125}


def galore_by_the_paper(weights: torch.Tensor, grads: list[torch.Tensor], how: Optimizer, rate: float) -> torch.Tensor:
    """Algorithm 2 for a wide matrix, in float64 and with a whole singular value decomposition."""
    weight, (beta1, beta2), numbers = weights.double(), how.betas, how.galore
    mean = square = 0
    for step, grad in enumerate(g.double() for g in grads):
        if step % numbers.update_proj_gap == 0:
            projector = torch.linalg.svd(grad).U[:, : numbers.rank]
            projector = projector * projector.gather(0, projector.abs().argmax(0, keepdim=True)).sign()
        low = projector.T @ grad
        mean, square = beta1 * mean + (1 - beta1) * low, beta2 * square + (1 - beta2) * low**2
        update = (mean / (1 - beta1 ** (step + 1))) / ((square / (1 - beta2 ** (step + 1))).sqrt() + how.eps)
        weight = weight * (1 - rate * how.weight_decay) - rate * numbers.scale * projector @ update
    return weight


@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
def test_galore_is_the_paper_s(tall):
    """Gradients with directions that are clearly strongest, as subspace iteration needs.

    The projector is chosen at the first and the fourth of five steps.
    """
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 24, generator=chance)).Q for n in (24, 40))
    strengths = torch.tensor([2.0**-i for i in range(24)])
    grads = [left @ torch.diag(strengths * (1 + 0.1 * i)) @ right.T for i in range(5)]
    how = plan("galore_adamw", galore=Galore(rank=3, update_proj_gap=3, scale=0.5))
    start = torch.randn(24, 40, generator=chance)
    weight = torch.nn.Parameter((start.T if tall else start).clone())
    optimizer = BUILDERS["galore_adamw"]([{"params": [weight], "weight_decay": 0.01}], how)
    set_learning_rate(optimizer, 0.1)
    for grad in grads:
        weight.grad = grad.T.contiguous() if tall else grad
        optimizer.step()
    expected = galore_by_the_paper(start, grads, how, 0.1).float()
    torch.testing.assert_close(weight.T if tall else weight, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("decay", "share"), [(1.0, 0.99), (0.5, 0.97), (0.1, 0.9)], ids=["fast", "slow", "hardly"])
def test_the_directions_of_galore_hold_almost_what_the_strongest_do(decay, share):
    """Singular values fall as i**-decay."""
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 96, generator=chance)).Q for n in (96, 160))
    values = torch.arange(1, 97).float() ** -decay
    found = top_singular_vectors(left @ torch.diag(values) @ right.T, 16, seed=3)
    torch.testing.assert_close(found.T @ found, torch.eye(16), rtol=0, atol=1e-5)
    held = (found.T @ left @ torch.diag(values)).square().sum() / values[:16].square().sum()
    assert share < held < 1 + 1e-5


def test_rounding_by_chance_is_right_on_average_and_keeps_what_is_not_finite():
    value = torch.full((200_000,), 1.001)  # between 1 and 1 + 2**-7
    rounded = stochastic_round(value, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert rounded.float().mean() == pytest.approx(1.001, abs=5e-5)
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -2.0])
    kept = stochastic_round(odd, torch.Generator().manual_seed(0))
    assert torch.equal(kept.float().nan_to_num(7.0), odd.nan_to_num(7.0))
