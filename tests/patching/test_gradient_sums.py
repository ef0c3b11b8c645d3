"""Gradients of a tensor that several layers read, added up in their products: autograd's sums, without its passes."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ligertune_kernels.ops.norms.rms_norm import rms_norm_reference
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.attention.sdpa import same_bits
from ligertune.models.fused_lora import fuse_adapters
from ligertune.models.trainable import apply_method
from ligertune.patching import gradient_sums
from ligertune.patching.gradient_sums import SHARING, SummingLinear, sum_in_products
from ligertune.patching.patch import patch, unpatch
from ligertune.planning.options import MethodOptions, RunOptions
from ligertune.recipe import load_recipe
from ligertune.train.model_builder import apply_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = tiny_models.batch(rows=2, length=12, device=DEVICE)
LAYERS, HIDDEN = 2, 64
# sums in products of one layer: two of q, k and v's input and one of gate and up's
SUMS = {"llama": 3, "qwen2": 3, "gemma2": 3, "qwen3": 3, "phi3": 0}


class Counted(TorchDispatchMode):
    """Counts additions of a gradient (..., HIDDEN), in passes of their own and in products, and copies of one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("add", "add_", "addmm_", "clone") and args[0].ndim >= 2 and args[0].shape[-1] == HIDDEN:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def however_few(monkeypatch):
    """Tensors of these tests are small."""
    monkeypatch.setattr(gradient_sums, "MANY", 1)


def pair(family: str = "llama", method: str = "full", dtype: torch.dtype = torch.float64, **how: object):
    """The same model, patched without and with sums in its products."""
    made = []
    for sums in (False, True):
        model = tiny_models.make(family).to(DEVICE, dtype)
        patch(model, gradient_sums=sums, **how)
        made.append(apply_method(model, MethodOptions(type=method)).train())
    with torch.no_grad():
        for name, p in made[0].named_parameters():
            if "lora_B" in name:  # zeros, of which A learns nothing
                p.normal_(std=0.1)
    made[1].load_state_dict(made[0].state_dict())
    return made


def train_once(model: nn.Module) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients, and how the backward added them up."""
    model.zero_grad()
    loss = model(**BATCH).loss
    with Counted() as counted, same_bits(DEVICE == "cuda"):
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, counted.seen


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and found
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_gradients_are_those_of_the_plain_model(family):
    """Biases, norms of heads, tied weights, routers that read the same tensor, packed projections."""
    wide = family != "mixtral"  # torch's grouped products take no float64
    plain, summing = pair(family, dtype=torch.float64 if wide else torch.float32)
    expected, before = train_once(plain)
    found, after = train_once(summing)
    assert furthest(found, expected) < (1e-12 if wide else 1e-5)
    if family in SUMS:
        assert after["addmm_"] - before["addmm_"] == LAYERS * SUMS[family]
        assert after["add"] + after["add_"] == before["add"] + before["add_"] - LAYERS * SUMS[family]
        assert after["clone"] == before["clone"]


@pytest.mark.parametrize("recompute", ["norms", True])
def test_inputs_that_are_made_again(recompute):
    plain, summing = pair(recompute=recompute)
    (expected, _), (found, counted) = map(train_once, (plain, summing))
    assert furthest(found, expected) < 1e-12 and counted["addmm_"] >= 3 * LAYERS
    read = []
    for layer in summing.model.layers:
        layer.input_layernorm.register_forward_hook(
            lambda module, given, output: read.append(StorageWeakRef(output.untyped_storage()))
        )
    loss = summing(**BATCH).loss
    assert loss.requires_grad and len(read) == LAYERS and all(storage.expired() for storage in read)


@pytest.mark.parametrize("kind", [True, "offload", "offload_gate", "offload_both"])
def test_layers_that_are_run_again(kind):
    """Of which the second run hands the same tensors on once more; gates that wait on the host are no such layers."""
    plain, summing = pair()
    checkpoint_layers(summing, kind)
    (expected, _), (found, counted) = map(train_once, (plain, summing))
    assert furthest(found, expected) < 1e-12
    assert counted["addmm_"] == LAYERS * (3 if kind in (True, "offload") else 2)


@pytest.mark.parametrize("fused", [False, True])
def test_adapters(fused):
    """Their frozen layers owe the input a gradient too, and they read it themselves."""
    plain, summing = pair(method="lora", dtype=torch.float32)
    if fused:
        assert fuse_adapters(summing) == 7 * LAYERS
    (expected, _), (found, counted) = map(train_once, (plain, summing))
    assert furthest(found, expected) < 1e-5
    assert fused or counted["addmm_"] >= 3 * LAYERS


def test_frozen_layers():
    for frozen in (("q_proj",), ("k_proj", "up_proj"), SHARING):
        found = []
        for model in pair():
            for name, p in model.named_parameters():
                p.requires_grad_(not any(part in name for part in frozen))
            found.append(train_once(model)[0])
        assert furthest(found[1], found[0]) < 1e-12


def test_several_backwards_of_one_forward():
    plain, summing = pair()
    expected, _ = train_once(plain)
    loss = summing(**BATCH).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert furthest({n: p.grad / 2 for n, p in summing.named_parameters()}, expected) < 1e-12
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(summing(**BATCH).loss, summing.lm_head.weight, create_graph=True)[0].sum().backward()


def test_layers_in_parts():
    """FSDP2 frees a layer's weights after its forward and gathers them for its backward."""
    plain, summing = pair(dtype=torch.float32)
    expected, _ = train_once(plain)
    store = dist.HashStore()
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", store=store, rank=0, world_size=1)
    try:
        for layer in (*summing.model.layers, summing):
            fully_shard(layer, reshard_after_forward=True)
        found, counted = train_once(summing)
    finally:
        dist.destroy_process_group()
    assert furthest({name: gradient.full_tensor() for name, gradient in found.items()}, expected) < 1e-5
    assert counted["addmm_"] == 3 * LAYERS


# ---- one tensor and its readers


@pytest.fixture
def readers() -> nn.ModuleDict:
    torch.manual_seed(0)
    made = nn.ModuleDict({name: nn.Linear(8, 6, bias=name == "q_proj").double() for name in ("q_proj", "k_proj")})
    assert sum_in_products(made) == sum_in_products(copy.deepcopy(made)) + 2 == 2
    return made


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, dtype=torch.float64).requires_grad_()


def plain_gradient(readers: nn.ModuleDict, x: Tensor, loss) -> Tensor:
    unpatch(readers)
    try:
        return torch.autograd.grad(loss(x), x)[0]
    finally:
        sum_in_products(readers)


READINGS = {
    "before": lambda y, q, k: (y**2).sum() + q(y).sin().sum() + k(y).cos().sum(),
    "between": lambda y, q, k: q(y).sin().sum() + (y**2).sum() + (k(y) ** 2).sum(),
    "after": lambda y, q, k: q(y).sin().sum() + (k(y) ** 2).sum() + (y**3).sum(),
    "twice": lambda y, q, k: q(y).sin().sum() + (q(y) ** 2).sum() + k(y).sum(),
    "only": lambda y, q, k: q(y).sin().sum(),
    "its output unused": lambda y, q, k: (q(y), (k(y) ** 2).sum() + (y**3).sum())[1],
    "in a view": lambda y, q, k: q(y).sin().sum() + (k(y.transpose(0, 1)) ** 2).sum() + k(y).sum(),
}


@pytest.mark.parametrize("reading", READINGS)
def test_others_read_it_too(reading, readers, x):
    def loss(x: Tensor) -> Tensor:
        return READINGS[reading](x.tanh() * 2, readers["q_proj"], readers["k_proj"])

    found = torch.autograd.grad(loss(x), x)[0]
    torch.testing.assert_close(found, plain_gradient(readers, x, loss), rtol=1e-12, atol=1e-12)


def test_a_gradient_that_others_hold_is_not_written_over(readers, x):
    """An addition gives both of its terms the same tensor; what is behind the older one reads it last."""
    other = torch.zeros_like(x).requires_grad_()
    older = other * 2
    y = x.exp()
    product = readers["q_proj"](y)
    (((y + older) * 3).sum() + product.sum()).backward()
    torch.testing.assert_close(other.grad, torch.full_like(other, 6.0), rtol=0, atol=0)


def test_what_kept_it_before_and_after_still_may(readers, x):
    y = x.exp()  # keeps what it gave
    version, kept = y._version, y**2
    product = readers["q_proj"](y)
    assert y._version == version and product._version == 0 and not product._is_view()
    (kept.sum() + product.sum() + (y**2).sum()).backward()


def test_writing_over_it_is_noticed(readers, x):
    y = x * 2
    product = readers["q_proj"](y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_who_waits_for_its_gradient_gets_all_of_it(readers, x):
    def loss(x: Tensor, seen: list[Tensor], how: str) -> Tensor:
        y = x.tanh()
        if how == "hook":
            y.register_hook(seen.append)
        elif how == "retained":
            y.retain_grad()
            seen.append(y)
        return readers["q_proj"](y).sin().sum() + readers["k_proj"](y).sum()

    loss(x, seen := [], "hook").backward()
    expected = plain_gradient(readers, x, lambda x: loss(x, [], "")) / (1 - x.detach().tanh() ** 2)
    torch.testing.assert_close(seen[0], expected)
    loss(x, seen := [], "retained").backward()
    torch.testing.assert_close(seen[0].grad, expected)


def is_handed_on(y: Tensor, layer: nn.Module) -> bool:
    before = y.grad_fn
    layer(y)
    return y.grad_fn is not before


def test_what_is_handed_on(readers, x, monkeypatch):
    layer = readers["q_proj"]
    assert is_handed_on(x * 2, layer)
    assert not is_handed_on(x, layer)  # a leaf: its gradient is somebody's
    assert not is_handed_on((x * 2).transpose(0, 1), layer)
    assert not is_handed_on((x * 2).view(6, 8), layer)
    with torch.no_grad():
        assert not is_handed_on(x * 2, layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_handed_on(x * 2, layer)
    monkeypatch.setattr(gradient_sums, "MANY", 2 * 3 * 8 + 1)
    assert not is_handed_on(x * 2, layer)


def test_the_recipe_says_where(tmp_path):
    def summing(changes: str) -> int:
        path = tmp_path / "recipe.yaml"
        path.write_text(
            f"model: {{model_name_or_path: m}}\ndata: {{datasets: [{{path: d}}]}}\n{changes}\n"
            f"checkpoint: {{output_dir: {tmp_path}}}\n"
        )
        model = tiny_models.make("llama")
        apply_kernels(RunOptions.of(load_recipe(path)).build, model)
        return sum(isinstance(module, SummingLinear) for module in model.modules())

    assert summing("") == 5 * LAYERS
    assert summing("kernels: {gradient_sums: false}") == summing("kernels: {enabled: false}") == 0
    assert summing("train: {torch_compile: true}") == summing("train: {fp8: true}") == 0
    model = tiny_models.make("llama")
    patch(model)
    assert not any(isinstance(module, SummingLinear) for module in model.modules())  # whoever asks for gradients


@pytest.mark.gpu
def test_a_layer_of_a_large_model(monkeypatch):
    """In bfloat16, against float64: rounded three times where autograd rounds five."""
    monkeypatch.setattr(gradient_sums, "MANY", 1 << 24)
    torch.manual_seed(0)
    plain = nn.ModuleDict({name: nn.Linear(4096, 1024, bias=False) for name in SHARING[:3]}).to("cuda", torch.bfloat16)
    summing = copy.deepcopy(plain)
    assert sum_in_products(summing) == 3
    x = torch.randn(1, 4096, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    owed = [torch.randn(1, 4096, 1024, device="cuda", dtype=torch.bfloat16) for _ in plain]

    def gradients(layers: nn.ModuleDict, x: Tensor, owed: list[Tensor]) -> tuple[Tensor, ...]:
        y = rms_norm_reference(x, torch.ones_like(x[0, 0]))
        given = [layer(y) for layer in layers.values()]
        assert ("HandOn" in y.grad_fn.name()) == (layers is summing)
        return torch.autograd.grad(given, [x, *(layer.weight for layer in layers.values())], owed)

    wide = x.detach().double().requires_grad_()
    exact = gradients(copy.deepcopy(plain).double(), wide, [t.double() for t in owed])
    expected, found = gradients(plain, x, owed), gradients(summing, x, owed)
    errors = [[float((a - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)] for got in (expected, found)]
    assert errors[1][0] < 1.01 * errors[0][0] and errors[1][1:] == pytest.approx(errors[0][1:], rel=1e-3)
