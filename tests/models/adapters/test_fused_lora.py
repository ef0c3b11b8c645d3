"""Fused LoRA layers compute what peft does, and call peft's own code where it does more."""

import copy
import dataclasses

import peft
import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from support.models import tiny_models
from support.quickstart_runs import plan_run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.hardware import this_machine
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.lora.fused_lora import FusedLora, fuse_adapters
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_policy import recomputes
from ligertune.planning.options import MethodOptions, fuses_lora
from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled
from ligertune.training.build import trained_model
from ligertune.training.parallel.distributed import start_accelerator
from ligertune.training.resolve import plan_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E, F, R = 24, 40, 3


def layer(*, bias: bool = False, dtype: torch.dtype = torch.float64, device: str = "cpu", **options) -> LoraLinear:
    torch.manual_seed(0)
    base = nn.Linear(E, F, bias=bias, dtype=dtype, device=device).requires_grad_(False)
    made = LoraLinear(base, "default", peft.LoraConfig(r=R), r=R, lora_alpha=7, **options)
    made.cast_input_dtype_enabled = False
    nn.init.normal_(made.lora_B["default"].weight, std=0.3)
    return made


def outcome(module: nn.Module, x: torch.Tensor, *, autocast: bool = False) -> list[torch.Tensor]:
    """Return the output and every gradient."""
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = module(x)
    (y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


def pair(**options) -> tuple[LoraLinear, LoraLinear]:
    usual = layer(**options)
    fused = copy.deepcopy(usual)
    assert fuse_adapters(fused) == 1
    return usual, fused


@pytest.fixture
def calls(monkeypatch):
    """The calls of peft's own forward."""
    found, forward = [], LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, *a, **k: found.append(self) or forward(self, *a, **k))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (2, 7), (2, 3, 4), (0, 5)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_equal_pefts(bias, shape, device, calls):
    usual, fused = pair(bias=bias, device=device)
    x = torch.randn(*shape, E, dtype=torch.float64, device=device)
    expected, done = outcome(usual, x), len(calls)
    torch.testing.assert_close(outcome(fused, x), expected, rtol=1e-12, atol=1e-12)
    assert done == len(calls) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_under_bfloat16_autocast_it_is_closer_to_the_exact_result_than_peft(device):
    x = torch.randn(64, E, device=device, dtype=torch.bfloat16)
    exact = layer(device=device, dtype=torch.bfloat16).to(torch.float64)  # values that bfloat16 can represent
    expected = outcome(exact, x.double())
    errors = []
    for module in pair(device=device, dtype=torch.bfloat16):
        for part in (module.lora_A, module.lora_B):
            part.float()
        found = outcome(module, x, autocast=True)
        assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)])
    pefts, fused = errors
    assert all(found <= 1.05 * reference for found, reference in zip(fused, pefts, strict=True)), errors
    assert fused[0] < pefts[0]


def test_a_frozen_matrix_gets_no_gradient():
    _, fused = pair()
    fused.lora_A["default"].weight.requires_grad_(False)
    fused(torch.randn(4, E, dtype=torch.float64)).sum().backward()
    assert fused.lora_A["default"].weight.grad is None and fused.base_layer.weight.grad is None
    assert fused.lora_B["default"].weight.grad is not None


def test_a_trained_base_layer_gets_its_gradients():
    usual, fused = pair(bias=True)
    for module in (usual, fused):
        module.base_layer.requires_grad_(True)
    x = torch.randn(6, E, dtype=torch.float64)
    torch.testing.assert_close(outcome(fused, x), outcome(usual, x), rtol=1e-12, atol=1e-12)
    assert fused.base_layer.bias.grad is not None


class Gathering(nn.Module):
    """A layer whose weight is there only while its forward runs, as FSDP1 makes it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(layer.weight.new_empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.lora_A.update({"default": Gathering(module.lora_A["default"])}),
        lambda module: module.enable_adapters(False),
        lambda module: module.merge(),
        lambda module: (
            module.update_layer("second", R, 4, config=peft.LoraConfig(r=R))
            or module.set_adapter(["default", "second"])
        ),
        lambda module: module.lora_A["default"].register_forward_hook(lambda *_: None),
        lambda module: module.lora_dropout["default"].register_forward_hook(lambda *_: None),
    ],
    ids=["wrapped", "off", "merged", "two adapters", "hook", "hook of dropout"],
)
def test_pefts_own_code_runs_where_it_does_more(change, calls):
    usual, fused = pair()
    for module in (usual, fused):
        change(module)
    x = torch.randn(6, E, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(fused(x), usual(x))
    assert len(calls) == 2


def test_a_global_hook_sees_the_layers_inside():
    usual, fused = pair()
    x, seen = torch.randn(6, E, dtype=torch.float64), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        usual(x)
        expected = seen.copy()
        seen.clear()
        fused(x)
    finally:
        hook.remove()
    assert seen == expected and "Identity" in seen


@pytest.mark.parametrize("trained_base", [False, True])
def test_gradients_refuse_to_be_differentiated_again(trained_base):
    """A penalty on gradients would lose what passes through x A^T, which the backward keeps as a number."""
    _, fused = pair()
    fused.base_layer.requires_grad_(trained_base)
    x = torch.randn(6, E, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(fused(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.square().sum().backward()


def test_the_bias_of_an_adapter_is_added():
    """A LoRA layer with lora_bias adds a bias inside B, which the fused kernel has no term for."""
    torch.manual_seed(0)
    base = nn.Linear(E, F, dtype=torch.float64).requires_grad_(False)
    made = LoraLinear(base, "default", peft.LoraConfig(r=R, lora_bias=True), r=R, lora_alpha=6)
    made.cast_input_dtype_enabled = False
    b = made.lora_B["default"]
    nn.init.normal_(b.weight), nn.init.normal_(b.bias)
    assert fuse_adapters(made) == 1
    x = torch.randn(5, E, dtype=torch.float64)
    low = x @ made.lora_A["default"].weight.t()
    expected = base(x) + 6 / R * (low @ b.weight.t() + b.bias)
    torch.testing.assert_close(made(x), expected, rtol=1e-12, atol=1e-12)


def test_a_float32_input_under_autocast_is_multiplied_in_the_dtype_of_autocast():
    """As in peft: the output, the frozen product and the low-rank one are bfloat16."""
    usual, fused = pair(dtype=torch.float32)
    x = torch.randn(6, E)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, expected = fused(x), usual(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_a_head_whose_adapter_is_off_has_the_loss_of_its_base():
    """The reference of a preference is the model with its adapters switched off."""
    model, ids = tiny_models.make("llama"), torch.randint(3, 90, (2, 12))
    expected = model(input_ids=ids, labels=ids).loss.item()
    patch(model)
    method = MethodOptions(type="lora", lora_r=4, lora_target_modules=["lm_head"])
    adapted = apply_method(model, method, seed=1, fused=True)
    randomise(adapted)
    assert adapted(input_ids=ids, labels=ids).loss.item() != pytest.approx(expected, rel=1e-3)
    before = loss_counts(adapted).fused
    with adapted.disable_adapter():
        assert adapted(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-5)
    assert loss_counts(adapted).fused == before + 1  # without logits


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_a_model_trains_as_with_plain_peft(family, changes):
    found = []
    for fused in (False, True):
        model = tiny_models.make(family).double()
        patch(model)
        adapted = apply_method(model, MethodOptions(type="lora", lora_r=4, **changes), seed=1, fused=fused).train()
        adapted.double()
        randomise(adapted)
        loss = adapted(**tiny_models.batch(), use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in adapted.parameters() if p.requires_grad)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [True, "offload", "offload_gate", "recompute"], ids=str)
def test_checkpointing_offload_and_recompute_keep_the_gradients(kind, device):
    found = []
    for way in (None, kind):
        model = tiny_models.make("llama").to(device).train()
        patch(model, recompute=way == "recompute")
        if way not in (None, "recompute"):
            checkpoint_layers(model, way)
        adapted = apply_method(model, MethodOptions(type="lora", lora_r=4), seed=1, fused=True).to(device)
        randomise(adapted)
        assert sum(isinstance(module, FusedLora) for module in adapted.modules()) == 14
        adapted(**tiny_models.batch(device=device), use_cache=False).loss.backward()
        found.append([p.grad for p in adapted.parameters() if p.requires_grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=2e-6)


def test_merging_a_fused_adapter_keeps_the_logits():
    model = tiny_models.make("llama")
    patch(model)
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=4), fused=True).eval()
    randomise(adapted)
    ids = tiny_models.batch()["input_ids"]
    with torch.no_grad():
        before = adapted(input_ids=ids).logits
        torch.testing.assert_close(adapted.merge_and_unload()(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts the matrix products that read a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight.data_ptr()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.found += "mm" in str(function) and any(t.data_ptr() == self.weight for t in tensors)
        return function(*args, **(kwargs or {}))


def test_the_last_projection_of_a_checkpointed_layer_does_not_run_again():
    """Its output is not read in the backward, and what is read has been kept before it is computed."""
    adapted = tiny_models.make("llama")
    adapted = apply_method(adapted, MethodOptions(type="lora", lora_r=R, lora_target_modules="all-linear"))
    fuse_adapters(adapted)
    checkpoint_layers(adapted.base_model.model)
    adapted.train()
    layer = adapted.base_model.model.model.layers[0]
    ids = torch.randint(3, 100, (1, 12))
    for module, products in ((layer.mlp.down_proj, 2), (layer.mlp.up_proj, 3)):  # forward, backward; forward again
        with Products(module.base_layer.weight) as counted:
            adapted(input_ids=ids, labels=ids).loss.backward()
        assert counted.found == products


@pytest.mark.parametrize("value", [False, True])
def test_kernels_lora_fuses_every_adapter_of_a_run(value, tmp_path):
    recipe = bundled("quickstart/stories260k.yaml")
    changes = [f"kernels.lora={value}", "method.type=lora", f"checkpoint.output_dir={tmp_path}", "train.max_steps=3"]
    job = plan_for(load_recipe(recipe, overrides=changes))
    found = {line.kernel: line.applied for line in job.plan.kernels}
    assert found.get("lora_linear") == (35 if value else None)
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    assert sum(isinstance(module, FusedLora) for module in model.modules()) == (35 if value else 0)


QLORA_UNDER_FSDP2 = {"method.type": "qlora", "method.bnb_4bit_quant_storage": "bfloat16", "parallel.strategy": "fsdp"}


@pytest.mark.parametrize(
    ("changes", "arch", "processes", "fused"),
    [
        ({}, "sm90", 1, True),
        ({"method.type": "qlora"}, "sm90", 1, True),
        ({}, "sm90", 2, True),
        ({"parallel.strategy": "fsdp"}, "sm90", 2, True),
        ({"parallel.strategy": "deepspeed_zero2"}, "sm90", 2, False),
        ({"parallel.cp_size": 2, "parallel.strategy": "fsdp"}, "sm90", 2, False),
        ({"method.type": "qlora"}, "sm90", 2, False),
        (QLORA_UNDER_FSDP2, "sm90", 2, True),
        (QLORA_UNDER_FSDP2, "sm80", 2, False),
        ({}, "sm80", 1, False),
        ({"train.torch_compile": True}, "sm90", 1, False),
        ({"method.type": "full"}, "sm90", 1, False),
        ({"method.load_in_8bit": True}, "sm90", 1, False),
        ({"method.lora_dropout": 0.1}, "sm90", 1, False),
        ({"kernels.lora": False}, "sm90", 1, False),
        ({"kernels.lora": True}, "sm80", 2, True),
    ],
)
def test_auto_fuses_where_it_was_measured_to_be_faster(changes, arch, processes, fused):
    overrides = [f"{key}={value}" for key, value in {"method.type": "lora", **changes}.items()]
    recipe = load_recipe(bundled("quickstart/stories260k.yaml"), overrides=overrides)
    machine = dataclasses.replace(this_machine(), arch=arch, world_size=processes)
    assert fuses_lora(recipe, machine) is fused


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"method.type": "qlora"}, True),
        ({"method.type": "full"}, False),
        ({"method.lora_dropout": 0.1}, True),
        ({"method.use_dora": True}, False),  # those layers save a copy of their input
        ({"train.gradient_checkpointing": True}, False),
        ({"train.gradient_checkpointing": True, "train.gradient_checkpointing_layers": 2}, True),
        ({"train.fp8": True}, False),
        ({"kernels.recompute": False}, False),
        ({"kernels.recompute": "norms"}, "norms"),
    ],
)
def test_auto_recomputes_the_inputs_of_fused_layers(changes, expected):
    overrides = [f"{key}={value}" for key, value in {"method.type": "lora", **changes}.items()]
    recipe = load_recipe(bundled("quickstart/stories260k.yaml"), overrides=overrides)
    assert recomputes(recipe, fused_lora=True) == expected
    assert recomputes(recipe, fused_lora=False) == (expected if "kernels.recompute" in changes else False)


def test_an_adapter_starts_from_the_runs_seed(tmp_path):
    def first_weight(seed: int) -> torch.Tensor:
        job = plan_run(tmp_path, **{"method.type": "lora", "train.seed": seed})
        model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
        return next(p for name, p in model.named_parameters() if "lora_A" in name)

    assert first_weight(1).equal(first_weight(1)) and not first_weight(1).equal(first_weight(2))


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter)
