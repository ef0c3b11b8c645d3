"""Gated MLPs of real families and of other shapes: what is recognised, what is refused, and the same numbers."""

import copy
import functools
import importlib
import time
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ligertune.patching.mlps.deferred_activation import KernelProduct, ProductSpec, RecomputedProduct
from ligertune.patching.mlps.kernel_mlps import KernelMLP, RecomputedMLP
from ligertune.patching.mlps.recognise_mlps import GatedSpec, gate_of, is_mlp, recognise_mlp
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.patch import patch
from ligertune.patching.probe import NotNeeded, Refusal

HIDDEN, WIDTH = 16, 24
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN, intermediate_size=WIDTH, shared_intermediate_size=WIDTH, dim_ff=WIDTH, ffn_dim=2 * WIDTH,
    hidden_act="silu", hidden_activation="gelu_pytorch_tanh", activation="swish", activation_function="gelu_new",
    mlp_bias=True, mlp_dropout=0.0, dropout_rate=0.1, residual_dropout=0.1, resid_pdrop=0.1, swiglu_limit=1.5,
    swiglu_alpha=1.702, dense_intermediate_size=WIDTH, mlp_multipliers=(0.6, 0.3), num_mem_blocks=1, adapter_rank=2,
    add_bias_linear=False, hybrid_layer_ids=[3, 5], block_auto_adjust_ff_dim=False,
    activation_sparsity_pattern=(0.5, 0), rms_norm_eps=1e-6,
)  # fmt: skip
SPARSE = SimpleNamespace(**{**vars(CONFIG), "intermediate_size": (WIDTH, WIDTH)})
FC = {"inputs": ("fc1",), "output": "fc2"}
SILU, TANH = ("swiglu", "none"), ("geglu", "tanh")

# (class of transformers, its arguments) -> the spec
FAMILIES = {
    ("phi3.Phi3MLP", ()): GatedSpec(*SILU, packed=True),
    ("lfm2.Lfm2MLP", ()): GatedSpec(*SILU, packed=False, inputs=("w1", "w3"), output="w2"),
    ("modernbert_decoder.ModernBertDecoderMLP", ()): GatedSpec(*TANH, packed=True, inputs=("Wi",), output="Wo"),
    ("moshi.MoshiGatingMLP", ()): GatedSpec(*SILU, packed=True, **FC),
    ("moonshine.MoonshineDecoderMLP", ("silu",)): GatedSpec(*SILU, packed=True, options=(("up_first", True),), **FC),
    ("granitemoehybrid.GraniteMoeHybridMLP", ()): GatedSpec(
        *SILU, packed=True, inputs=("input_linear",), output="output_linear"
    ),
    ("cpmant.CpmAntDenseGatedACT", ()): GatedSpec("geglu", "none", packed=False, inputs=("w_0", "w_1"), output=None),
    ("falcon_h1.FalconH1MLP", ()): GatedSpec(
        *SILU, packed=False, options=(("alpha", 0.6), ("scale", 0.6)), output_scale=0.3
    ),
    ("minimax_m3_vl.MiniMaxM3VLDenseMLP", ()): GatedSpec(
        *SILU, packed=True, options=(("alpha", 1.702), ("limit", 1.5), ("up_offset", 1.0))
    ),
    ("deepseek_v4.DeepseekV4MLP", ()): GatedSpec(*SILU, packed=False, options=(("limit", 1.5),)),
    ("gemma3n.Gemma3nTextMLP", ("sparse", 1)): GatedSpec(*TANH, packed=False),
    ("gemma3n.Gemma3nTextMLP", ("sparse", 0)): ProductSpec(*TANH, "act_fn"),
    ("zamba2.Zamba2MLP", (2, 0)): ProductSpec(*SILU, "act_fn"),
    ("phi4_multimodal.Phi4MultimodalAudioMLP", ()): ProductSpec(*SILU, "act_fn"),
    ("seed_oss.SeedOssMLP", ()): ProductSpec(*SILU, "act_fn"),  # a dropout behind it
    ("t5gemma.T5GemmaMLP", ()): ProductSpec(*TANH, "act_fn"),  # a dropout of the product
    ("dory.DoryMLP", ()): ProductSpec(*SILU, "act_fn"),
    ("inkling.InklingMLP", ()): ProductSpec(*SILU, "act_fn"),
    ("bitnet.BitNetMLP", ()): ProductSpec("reglu", "none", "act_fn", squared=True),
}


def made(path, arguments):
    """Return a module of a family, with weights that are no special numbers."""
    module, name = path.split(".")
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    config, arguments = (SPARSE, arguments[1:]) if arguments[:1] == ("sparse",) else (CONFIG, arguments)
    if module == "bitnet":
        config = SimpleNamespace(**{**vars(CONFIG), "hidden_act": "relu2"})
    return random(cls(config, *arguments))


def random(module):
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def assert_same_layer(module, *more):
    """Compare outputs and gradients with those of the patched module, with and without recomputation."""
    spec = recognise_mlp(module)
    mixins = (KernelProduct, RecomputedProduct) if isinstance(spec, ProductSpec) else (KernelMLP, RecomputedMLP)
    x = torch.randn(2, 3, HIDDEN, requires_grad=True)

    def run(layer):
        torch.manual_seed(0)  # of dropouts
        y = layer(x, *more)
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)

    expected = run(module)
    for mixin in mixins:
        patched = copy.deepcopy(module)
        patch_module(patched, mixin, spec)
        torch.testing.assert_close(run(patched), expected, rtol=1e-4, atol=1e-4)
        unpatch_module(patched)
        torch.testing.assert_close(run(patched), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("path", "arguments"), FAMILIES, ids=str)
def test_mlps_of_families_are_recognised_and_compute_the_same(path, arguments):
    pytest.importorskip(f"transformers.models.{path.split('.')[0]}", reason="an older transformers")
    module = made(path, arguments)
    assert is_mlp(module)
    assert recognise_mlp(module) == FAMILIES[path, arguments]
    assert_same_layer(module, *([5] if "Zamba2" in path else []))


class Split(nn.Module):
    """Gate, up and down under names that say nothing; subclasses differ in their forward."""

    def __init__(self, bias=True, **attributes):
        super().__init__()
        self.c = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.a, self.b = (nn.Linear(HIDDEN, WIDTH, bias=bias) for _ in range(2))
        for name, value in attributes.items():
            setattr(self, name, value)


class Packed(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(HIDDEN, 2 * WIDTH), nn.Linear(WIDTH, HIDDEN)
        for name, value in attributes.items():
            setattr(self, name, value)


def layer(base, forward, **attributes):
    return random(type("Layer", (base,), {"forward": forward})(**attributes))


def chatglm(self, x):
    halves = torch.chunk(self.dense_h_to_4h(x), 2, dim=-1)
    return self.dense_4h_to_h(F.silu(halves[0]) * halves[1])


def quick(self, x):
    gate = self.a(x)
    return self.c(gate * torch.sigmoid(self.beta * gate) * self.b(x))


ABC = {"inputs": ("a", "b"), "output": "c"}
DENSE = {"inputs": ("dense_h_to_4h",), "output": "dense_4h_to_h"}
OTHER_MLPS = {
    "functional": (Split, lambda self, x: self.c(F.silu(self.a(x)) * self.b(x)), {}, GatedSpec(*SILU, False, **ABC)),
    "exchanged": (
        Split, lambda self, x: self.c(self.a(x) * F.gelu(self.b(x))), {},
        GatedSpec("geglu", "none", False, ("b", "a"), "c"),
    ),
    "in a list": (
        Split, lambda self, x: self.c(self.acts[1](self.a(x)) * self.b(x)), {"acts": [nn.Identity(), nn.SiLU()]},
        GatedSpec(*SILU, False, **ABC),
    ),
    "in a dict": (
        Split, lambda self, x: self.c(self.acts["gate"](self.a(x)) * self.b(x)),
        {"acts": {"gate": functools.partial(F.gelu, approximate="tanh")}}, GatedSpec(*TANH, False, **ABC),
    ),
    "by name": (
        Split, lambda self, x: self.c(ACT2FN[self.config.hidden_act](self.a(x)) * self.b(x)),
        {"config": transformers.LlamaConfig(hidden_act="silu")}, GatedSpec(*SILU, False, **ABC),
    ),
    "chatglm": (Packed, chatglm, {}, GatedSpec(*SILU, True, **DENSE)),
    "quick": (Split, quick, {"beta": 1.702}, GatedSpec(*SILU, False, **ABC, options=(("alpha", 1.702),))),
    "relu": (
        Split, lambda self, x: self.c(F.relu(self.a(x)) * self.b(x)), {}, GatedSpec("reglu", "none", False, **ABC),
    ),
    "inactive dropout": (
        Split, lambda self, x: self.drop(self.c(F.silu(self.a(x)) * self.b(x))), {"drop": nn.Dropout(0.0)},
        GatedSpec(*SILU, False, **ABC),
    ),
    "dropout": (
        Split, lambda self, x: self.drop(self.c(self.act(self.a(x)) * self.b(x))),
        {"drop": nn.Dropout(0.5), "act": nn.SiLU()}, ProductSpec(*SILU, "act"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MLPS)
def test_mlps_of_other_shapes_are_recognised_and_compute_the_same(name):
    base, forward, attributes, spec = OTHER_MLPS[name]
    module = layer(base, forward, **attributes)
    assert is_mlp(module)
    assert recognise_mlp(module) == spec
    assert_same_layer(module)


def hidden_clamp(self, x):
    return self.c(F.silu(self.a(x)).clamp(max=9.0) * self.b(x))


def twice(self, x):
    return self.c(F.silu(self.a(x)) * self.b(x)) + 0 * self.a(x)[..., :HIDDEN]


OTHER = "it computes something else than down(act(gate(x)) * up(x))"
REFUSED = {
    "a clamp": (hidden_clamp, {}, OTHER),
    "a sum": (lambda self, x: self.c(F.silu(self.a(x)) + self.b(x)), {}, OTHER),
    "another function": (lambda self, x: self.c(torch.tanh(self.a(x)) * self.b(x)), {}, OTHER),
    "another activation": (
        lambda self, x: self.c(self.act(self.a(x)) * self.b(x)), {"act": nn.Tanh()},
        "its activation Tanh is neither SiLU nor GELU",
    ),
    "an activation that is not used": (
        lambda self, x: self.c(torch.tanh(self.a(x)) * self.b(x)), {"act": nn.SiLU()}, OTHER,
    ),
    "gate of another input": (lambda self, x: self.c(F.silu(self.a(2 * x)) * self.b(x)), {}, OTHER),
    "a residual": (lambda self, x: x + self.c(F.silu(self.a(x)) * self.b(x)), {}, "changes the result of its last"),
    "a projection called twice": (twice, {}, "does not call each of its projections once"),
    "a wider result": (lambda self, x: self.c(F.silu(self.a(x)) * self.b(x)).float(), {}, "another dtype"),
    "a dropout": (
        lambda self, x: F.dropout(self.c(F.silu(self.a(x)) * self.b(x)), 0.5, self.training), {}, "in training mode",
    ),
    "a norm": (
        lambda self, x: self.c(F.silu(self.a(self.norm(x))) * self.b(x)), {"norm": nn.LayerNorm(HIDDEN)},
        "it also computes with norm",
    ),
    "a parameter": (
        lambda self, x: self.c(F.silu(self.a(x) * self.factor) * self.b(x)), {"factor": nn.Parameter(torch.ones(1))},
        "it also computes with factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_mlp_that_computes_something_else_is_left_with_the_reason(name):
    forward, attributes, reason = REFUSED[name]
    module = layer(Split, forward, **attributes)
    refusal = recognise_mlp(module)
    assert is_mlp(module) and isinstance(refusal, Refusal)
    assert reason in refusal.reason


def test_activations_that_hold_different_numbers_are_told_apart():
    """Results are cached by what the members compute with."""

    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self._factor = torch.tensor(factor)

        def forward(self, x):
            return F.silu(x) * self._factor

    cls = type("Layer", (Split,), {"forward": lambda self, x: self.c(self.act(self.a(x)) * self.b(x))})
    assert isinstance(recognise_mlp(cls(act=nn.SiLU())), GatedSpec)
    assert isinstance(recognise_mlp(cls(act=Scaled(1.5))), Refusal)
    hooked, replaced = nn.SiLU(), nn.SiLU()
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    replaced.forward = lambda x: 2 * F.silu(x)
    assert not isinstance(recognise_mlp(cls(act=hooked)), GatedSpec)
    assert not isinstance(recognise_mlp(cls(act=replaced)), GatedSpec)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = Conv1D(WIDTH, HIDDEN), Conv1D(HIDDEN, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Attention(nn.Module):
    """Its sizes are those of a packed MLP."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN + 1)

    def forward(self, x, positions):
        return self.out(self.qkv(x)[..., :HIDDEN])


class Square(nn.Module):
    """Three projections of one size, as queries, keys and values have them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Projector(nn.Module):
    """Sizes that a packed MLP could have, too, with linear_1 as its down projection."""

    def __init__(self):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, 2 * HIDDEN)

    def forward(self, x):
        return self.linear_2(F.gelu(self.linear_1(x)))


class DownFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.both = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 2 * WIDTH)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def test_a_projector_is_no_mlp_and_the_order_of_the_projections_does_not_count():
    assert not is_mlp(Projector())
    assert is_mlp(DownFirst()) and recognise_mlp(DownFirst()) == GatedSpec(*SILU, True, ("both",), "down")


def test_an_mlp_without_a_gate_is_named_and_not_counted_as_left():
    plain = Plain()
    assert is_mlp(plain) and isinstance(recognise_mlp(plain), NotNeeded)
    assert not any(map(is_mlp, (Attention(), Square(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))))
    model = nn.ModuleList([plain, Plain(), layer(Split, hidden_clamp)])
    row = next(row for row in patch(model).rows if row.kernel == "swiglu")
    assert (row.applied, row.left) == (0, 1)
    assert row.note == f"1 Layer: {OTHER}; 2 Plain: not gated, so there is no product for a kernel"
    row = next(row for row in patch(model[:2]).rows if row.kernel == "swiglu")
    assert (row.applied, row.left) == (0, 0)
    assert row.note == "2 Plain: not gated, so there is no product for a kernel"


def test_projections_of_equal_size_are_recognised_by_their_forward():
    class Equal(Square):
        def forward(self, x):
            return self.v(F.silu(self.q(x)) * self.k(x))

    module = random(Equal())
    assert is_mlp(module)
    assert recognise_mlp(module) == GatedSpec(*SILU, False, ("q", "k"), "v")
    assert_same_layer(module)


def test_adapters_in_place_of_projections_are_called():
    module = layer(Split, lambda self, x: self.c(F.silu(self.a(x)) * self.b(x)))
    patch_module(module, KernelMLP, recognise_mlp(module))
    x = torch.randn(2, HIDDEN)
    before = module(x)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["a"], init_lora_weights=False), module)
    assert is_mlp(module)
    expected = module.c(F.silu(module.a(x)) * module.b(x))
    torch.testing.assert_close(module(x), expected)
    assert not torch.allclose(module(x), before)


def test_the_gate_of_an_mlp_is_found_whatever_it_is_called():
    module = layer(Split, lambda self, x: self.c(self.a(x) * F.silu(self.b(x))))
    assert gate_of(module) is module.b
    patch_module(module, KernelMLP, recognise_mlp(module))
    assert gate_of(module) is module.b
    assert gate_of(layer(Packed, chatglm)) is gate_of(Plain()) is gate_of(nn.Linear(2, 2)) is None


def test_a_call_with_a_keyword_or_an_empty_argument_is_the_same():
    module = made("moshi.MoshiGatingMLP", ())
    x = torch.randn(2, 3, HIDDEN)
    expected = module(x)
    patch_module(module, KernelMLP, recognise_mlp(module))
    for given in (module(x, None), module(x, layer_idx=None), module(hidden_states=x)):
        torch.testing.assert_close(given, expected)
    with pytest.raises(TypeError):
        module(x, 3)  # the model's own forward, whose fc1 is a plain layer


def test_a_model_of_8b_is_recognised_in_a_second():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        started = time.process_time()
        report = patch(model)
    assert time.process_time() - started < 1.5
    assert {row.kernel: row.applied for row in report.rows}.items() >= {"rms_norm": 65, "swiglu": 32}.items()
