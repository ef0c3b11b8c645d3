"""Dropout of fused adapters: peft's own code with the same elements dropped, torch's law, recomputation."""

import copy
import math

import peft
import pytest
import torch
from ligertune_kernels import draw_seed, seeded_dropout
from peft.tuners.lora import Linear as LoraLinear
from support.models import tiny_models
from support.quickstart_runs import plan_run
from torch import nn

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.lora.fused_lora import FusedLora, fuse_adapters
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy, backward_bytes, layer_bytes
from ligertune.planning.memory.activation_policy import choose_policy
from ligertune.planning.options import MethodOptions
from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E, F, R, P = 24, 40, 3, 0.4
SIBLINGS = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}


class SameDropout(nn.Module):
    """Dropout in plain autograd of the elements that a fused layer drops; the first sibling draws for all."""

    drawn: torch.Tensor

    def __init__(self, p: float, stream: int) -> None:
        super().__init__()
        self.p = p
        self.stream = stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        if self.stream == 0:
            SameDropout.drawn = draw_seed(x.device)
        return x * seeded_dropout(torch.ones_like(x), SameDropout.drawn, self.p, stream=self.stream)


def with_same_dropout(model: nn.Module) -> nn.Module:
    """Replace the dropout of peft's layers."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            stream = SIBLINGS.get(name.rpartition(".")[2], 0)
            module.lora_dropout["default"] = SameDropout(module.lora_dropout["default"].p, stream)
    return model


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            new = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = new.to(parameter)


def layer(*, trained_base: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float64) -> LoraLinear:
    torch.manual_seed(0)
    base = nn.Linear(E, F, dtype=dtype, device=device).requires_grad_(trained_base)
    config = peft.LoraConfig(r=R, lora_dropout=P)
    made = LoraLinear(base, "default", config, r=R, lora_alpha=7, lora_dropout=P)
    made.cast_input_dtype_enabled = False
    nn.init.normal_(made.lora_B["default"].weight, std=0.3)
    return made.train()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained_base", [False, True], ids=["frozen", "trained base"])
def test_output_and_gradients_are_pefts_with_the_same_elements_dropped(trained_base, device):
    usual = layer(trained_base=trained_base, device=device)
    fused = copy.deepcopy(usual)
    with_same_dropout(usual)
    assert fuse_adapters(fused) == 1
    x = torch.randn(5, 7, E, dtype=torch.float64, device=device)
    found = []
    for module in (fused, usual):
        torch.manual_seed(11)
        read = x.clone().requires_grad_()
        y = module(read)
        (y * torch.linspace(-1, 1, y.numel(), device=device, dtype=y.dtype).view(y.shape)).sum().backward()
        found.append([y, read.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained_base", [False, True], ids=["frozen", "trained base"])
def test_gradients_are_those_of_finite_differences(trained_base):
    fused = layer(trained_base=trained_base)
    fuse_adapters(fused)
    x = torch.randn(3, E, dtype=torch.float64, requires_grad=True)

    def call(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)  # the same elements in each call
        return fused(x)

    assert torch.autograd.gradcheck(
        call, (x, fused.lora_A["default"].weight, fused.lora_B["default"].weight), fast_mode=True
    )


def test_the_expectation_is_the_output_without_dropout_and_the_variance_torchs():
    fused = layer()
    plain = copy.deepcopy(fused)
    fuse_adapters(fused)
    n = 20_000
    x = torch.randn(E, dtype=torch.float64).expand(n, E)  # each row drops other elements
    with torch.no_grad():
        samples = [module(x) for module in (fused, plain)]
        expected = plain.eval()(x[:1])
        torch.testing.assert_close(fused.eval()(x[:1]), expected, rtol=1e-12, atol=1e-12)
    assert ((samples[0].mean(0) - expected).abs() < 5 * samples[1].std(0) / math.sqrt(n)).all()
    ratio = samples[0].var(0) / samples[1].var(0)
    assert (ratio - 1).abs().max() < 5 * math.sqrt(4 / n)  # of two sample variances


def adapted(family: str, *, fused: bool, dropout: float = P, recompute: bool = False, **changes: object) -> nn.Module:
    model = tiny_models.make(family).double()
    patch(model, recompute=recompute)
    method = MethodOptions(type="lora", lora_r=4, lora_dropout=dropout, **changes)
    model = apply_method(model, method, seed=1, fused=fused).double().train()
    randomise(model)
    return model


def outcome(model: nn.Module, *, seed: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    loss = model(**tiny_models.batch(), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_a_model_trains_as_with_peft_and_the_same_elements_dropped(family):
    found = [outcome(adapted(family, fused=True)), outcome(with_same_dropout(adapted(family, fused=False)))]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [True, "offload", "offload_gate", "recompute"], ids=str)
def test_layers_that_run_again_drop_the_same_elements(kind):
    usual = outcome(adapted("llama", fused=True))
    model = adapted("llama", fused=True, recompute=kind == "recompute")
    if kind != "recompute":
        checkpoint_layers(model.base_model.model, kind)
    torch.testing.assert_close(outcome(model), usual, rtol=1e-10, atol=1e-12)


def test_steps_differ_seeds_repeat_and_evaluations_drop_nothing():
    model = adapted("llama", fused=True)
    batch = tiny_models.batch()
    torch.manual_seed(2)
    first, second = (model(**batch, use_cache=False).loss.item() for _ in range(2))
    torch.manual_seed(2)
    assert model(**batch, use_cache=False).loss.item() == first != second
    state = torch.get_rng_state()
    evaluated = model.eval()(**batch).loss.item()
    assert torch.equal(torch.get_rng_state(), state)  # an evaluation draws nothing
    assert evaluated == pytest.approx(adapted("llama", fused=True, dropout=0.0).eval()(**batch).loss.item(), rel=1e-12)


def test_queries_keys_and_values_drop_elements_of_their_own():
    model = adapted("llama", fused=True)
    block = next(module for module in model.modules() if hasattr(module, "q_proj"))
    for name in ("q_proj", "k_proj"):
        part = getattr(block, name)
        part.lora_A["default"].weight.data = torch.eye(4, 64, dtype=torch.float64)
        part.lora_B["default"].weight.data = torch.eye(part.out_features, 4, dtype=torch.float64)
        part.base_layer.weight.data.zero_()
    x = torch.ones(500, 1, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.manual_seed(4)
        read = [getattr(block, name)(x)[..., :4] != 0 for name in ("q_proj", "k_proj")]
    together = (read[0] & read[1]).double().mean().item()
    assert together == pytest.approx((1 - P) ** 2, abs=5 * math.sqrt(0.25 / 2000))


def test_a_head_with_dropout_and_layers_with_dora_say_that_peft_computes_them(tmp_path):
    settings = {"method.type": "lora", "kernels.lora": True}

    def line(**changes: object):
        plan = plan_run(tmp_path, **settings, **changes).plan
        return next(one for one in plan.kernels if one.kernel == "lora_linear")

    dropped = line(**{"method.lora_dropout": 0.1})
    assert (dropped.applied, dropped.left, dropped.note) == (35, 0, "")
    dora = line(**{"method.use_dora": True})
    assert (dora.applied, dora.left) == (0, 35)
    assert dora.note == "35 its adapter is more than a low-rank term, so PEFT computes it"
    model = adapted("llama", fused=True, lora_target_modules=["q_proj", "lm_head"])
    with pytest.warns(UserWarning, match="materialised logits"):
        outcome(model)
    assert loss_counts(model).materialised == {"the head's adapter has dropout": 1}
    assert sum(isinstance(module, FusedLora) for module in model.modules()) == 2


def test_the_memory_plan_counts_what_dropout_saves():
    layer = read_shape(apply_method(tiny_models.make("llama"), MethodOptions(type="lora", lora_r=4))).layer
    hidden, mlp, query = 64, 96, 64
    fused, usual = ActivationPolicy(fused_lora=True), ActivationPolicy()
    dropped = {
        policy: ActivationPolicy(fused_lora=policy == "fused", lora_dropout=True) for policy in ("fused", "peft")
    }
    assert layer_bytes(layer, dropped["fused"], 2, 8) == layer_bytes(layer, fused, 2, 8)  # a seed
    # a copy of the input of q, k, v, o, gate, up and down and a mask, in place of what the layers share
    inputs = 3 * hidden + query + 2 * hidden + mlp
    assert (layer.adapter_inputs, layer.widest_adapter) == (inputs, mlp)
    assert layer_bytes(layer, dropped["peft"], 2, 8) - layer_bytes(layer, usual, 2, 8) == 3 * inputs - 2 * (
        2 * hidden + mlp
    )
    more = backward_bytes(layer, dropped["fused"], 2, 8) - backward_bytes(layer, fused, 2, 8)
    assert more == 8 * mlp * 2  # the gradient of what an adapter has read


@pytest.mark.parametrize(("lora", "expected"), [(True, (True, True, True)), (False, (False, False, True))])
def test_the_plan_frees_inputs_of_fused_layers_with_dropout_only(lora, expected):
    changes = ["method.type=lora", "method.lora_dropout=0.1", f"kernels.lora={lora}", "kernels.recompute=true"]
    recipe = load_recipe(bundled("quickstart/stories260k.yaml"), overrides=changes)
    policy = choose_policy(recipe, "sdpa", {"recompute"})
    assert (policy.recompute, policy.fused_lora, policy.lora_dropout) == expected
