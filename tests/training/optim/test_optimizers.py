"""Every optimizer lowers the loss, resumes bit-exactly, also on the host; planned sizes of states; GaLore; rounding."""

import copy
import functools
import io
from importlib.util import find_spec

import pytest
import torch
from support.quickstart_runs import bare_recipe, plan_run
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.models.shape import read_shape
from ligertune.planning.memory.states import states_of
from ligertune.planning.optimization import Galore, Optimizer
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.run import run
from ligertune.training.optim.algorithms import stochastic_round, top_singular_vectors
from ligertune.training.optim.combined import CombinedOptimizer
from ligertune.training.optim.optimizers import BUILDERS, build_optimizer, set_learning_rate

# Learning rates: sgd moves by the gradient, lion by its sign, adafactor by a share of each weight.
RATES = {"sgd": 0.2, "lion": 1e-3, "adafactor": 3e-2, "galore_adamw": 2e-2}


def tiny(layers: int = 1) -> LlamaForCausalLM:
    """Return a Llama whose matrices have at least 4096 elements, which quantising optimizers need."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


def plan(name: str, **changes: object) -> Optimizer:
    usual = {"weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "max_grad_norm": 0.0}
    return Optimizer(name=name, **{**usual, **changes})


def steps(model, optimizer, numbers, rate: float) -> list[float]:
    """Return the losses of some steps, each on a batch that depends on its number."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number % 4)
        ids = torch.randint(0, 8, (2, 24), generator=generator)  # 8 of 64 tokens: learnt quickly
        set_learning_rate(optimizer, rate)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_and_loaded(state: dict) -> dict:
    """Save and load a state dict as a checkpoint does."""
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


def installed(name: str):
    package = OPTIMIZERS[name].needs
    absent = package is not None and find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"needs {package}"))


def test_every_optimizer_has_a_builder():
    assert list(BUILDERS) == list(OPTIMIZERS)


@functools.cache
def losses_on_the_device(name: str) -> list[float]:
    model = tiny()
    return steps(model, build_optimizer(model, plan(name)), range(12), RATES.get(name, 5e-3))


@pytest.mark.parametrize("way", ["on the device", "in_backward", "offload"])
@pytest.mark.parametrize("name", [installed(name) for name in OPTIMIZERS])
def test_it_lowers_the_loss_and_resumes_bit_exactly(name, way):
    if way == "offload" and OPTIMIZERS[name].needs:
        pytest.skip("only torch's optimizers and ours step on the host")
    rate, how = RATES.get(name, 5e-3), plan(name, in_backward=way == "in_backward", offload=way == "offload")
    model = tiny()
    optimizer = build_optimizer(model, how)
    before = steps(model, optimizer, range(6), rate)
    weights, state = copy.deepcopy(model.state_dict()), saved_and_loaded(optimizer.state_dict())
    after = steps(model, optimizer, range(6, 12), rate)
    assert sum(after[-4:]) < 0.9 * sum(before[:4])
    if OPTIMIZERS[name].needs is None:  # quantising optimizers may choose other blocks for one parameter
        assert before + after == losses_on_the_device(name)

    again = tiny()
    resumed = build_optimizer(again, how)  # with `offload`, its host copies have other weights than are loaded now
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert steps(again, resumed, range(6, 12), rate) == after
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.needs is None])
def test_its_states_have_the_planned_size(name, dtype):
    """The layout of quantised states is that of their package, so they are left out."""
    model = tiny().to(getattr(torch, dtype))
    optimizer = build_optimizer(model, plan(name))
    steps(model, optimizer, range(1), 1e-3)
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
    planned = states_of(bare_recipe(optim=name), read_shape(model).parameters, dtype)
    assert planned.optimizer == held
    assert planned.weights == sum(p.numel() * p.element_size() for p in model.parameters())


def test_steps_in_the_backward_free_gradients():
    model = tiny()
    set_learning_rate(build_optimizer(model, plan("adamw_torch", in_backward=True)), 1e-3)
    ids = torch.arange(24)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_muon_steps_layer_matrices_and_adamw_the_rest():
    model = tiny()
    optimizer = build_optimizer(model, plan("muon"))
    muon, adamw = optimizer.parts
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    layers = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    assert taken == {id(p) for p in layers}
    assert type(adamw) is torch.optim.AdamW


def galore_reference(weights: torch.Tensor, grads: list[torch.Tensor], how: Optimizer, rate: float) -> torch.Tensor:
    """Zhao et al. 2024, algorithm 2, for a wide matrix, in float64 and by singular value decomposition."""
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
def test_galore_is_algorithm_2_of_its_paper(tall):
    """Singular values fall fast, as subspace iteration needs. The projector is updated at steps 1 and 4 of 5."""
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 24, generator=chance)).Q for n in (24, 40))
    strengths = torch.tensor([2.0**-i for i in range(24)])
    grads = [left @ torch.diag(strengths * (1 + 0.1 * i)) @ right.T for i in range(5)]
    grads[3:] = [grad.roll(1, 0).roll(1, 1) for grad in grads[3:]]  # other singular vectors: an old projector is wrong
    how = plan("galore_adamw", galore=Galore(rank=3, update_proj_gap=3, scale=0.5))
    start = torch.randn(24, 40, generator=chance)
    weight = torch.nn.Parameter((start.T if tall else start).clone())
    optimizer = BUILDERS["galore_adamw"]([{"params": [weight], "weight_decay": 0.01}], how)
    set_learning_rate(optimizer, 0.1)
    for grad in grads:
        weight.grad = grad.T.contiguous() if tall else grad
        optimizer.step()
    expected = galore_reference(start, grads, how, 0.1).float()
    torch.testing.assert_close(weight.T if tall else weight, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("decay", "share"), [(1.0, 0.99), (0.5, 0.97), (0.1, 0.9)], ids=["fast", "slow", "hardly"])
def test_the_projector_keeps_almost_the_largest_singular_values(decay, share):
    """Singular values fall as i**-decay."""
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 96, generator=chance)).Q for n in (96, 160))
    values = torch.arange(1, 97).float() ** -decay
    found = top_singular_vectors(left @ torch.diag(values) @ right.T, 16, seed=3)
    torch.testing.assert_close(found.T @ found, torch.eye(16), rtol=0, atol=1e-5)
    held = (found.T @ left @ torch.diag(values)).square().sum() / values[:16].square().sum()
    assert share < held < 1 + 1e-5


def test_stochastic_rounding_keeps_the_mean_and_non_finite_values():
    value = torch.full((200_000,), 1.001)  # between 1 and 1 + 2**-7
    rounded = stochastic_round(value, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert rounded.float().mean() == pytest.approx(1.001, abs=5e-5)
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -2.0])
    kept = stochastic_round(odd, torch.Generator().manual_seed(0))
    assert torch.equal(kept.float().nan_to_num(7.0), odd.nan_to_num(7.0))


def test_a_run_with_the_key_has_the_same_losses(tmp_path):
    found = []
    for offload in ("false", "true"):
        changes = {"data.val_split": 0, "train.max_grad_norm": 0.5, "train.optim_offload": offload}
        job, lines = plan_run(tmp_path / offload, **changes), []
        run(job, lines.append)
        found.append(([line["loss"] for line in lines], job.plan.bytes.optimizer > 0, job.plan.bytes.saved_states))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert [on_device for _, on_device, _ in found] == [True, False] and found[0][2] == found[1][2] > 0


@pytest.mark.gpu
def test_on_a_gpu_the_states_are_on_the_host_and_the_weights_are_the_same():
    found = []
    for offload in (False, True):
        model = tiny().cuda().bfloat16()
        optimizer = build_optimizer(model, plan("adamw_torch", offload=offload))
        for step in range(4):
            ids = torch.arange(24, device="cuda")[None] % (8 + step)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    states = optimizer.state_dict()["state"].values()
    assert {t.device.type for state in states for t in state.values()} == {"cpu"}
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-3)


def test_each_part_of_a_combined_optimizer_loads_its_own_states():
    def combined() -> tuple[CombinedOptimizer, list[torch.nn.Parameter]]:
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)]
        return CombinedOptimizer([torch.optim.AdamW([p]) for p in parameters]), parameters

    first, parameters = combined()
    for size, p in enumerate(parameters, 1):
        p.grad = torch.full_like(p, size)
    first.step()
    second, parameters = combined()
    second.load_state_dict(first.state_dict())
    assert list(second.state) == parameters
    assert [second.state[p]["exp_avg"][0].item() for p in parameters] == pytest.approx([0.1, 0.2])
