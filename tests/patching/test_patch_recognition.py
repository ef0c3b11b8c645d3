"""Layers recognised in each family; code that only looks similar is left alone."""

import copy
import functools

import pytest
import torch
from ligertune_kernels.ops.moe.experts import ExpertLayout, GatedActivation
from support.models import tiny_models
from support.same_training import assert_same_training
from torch import nn
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm

from ligertune.patching.experts.recognise_experts import ExpertsSpec, recognise_experts
from ligertune.patching.mlps.recognise_mlps import GatedSpec, recognise_mlp
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.norms.kernel_norms import KernelNorm, RecomputedNorm
from ligertune.patching.norms.recognise_norms import LayerNormSpec, NormSpec, recognise_norm
from ligertune.patching.norms.recognise_norms import recognise as recognise_any_norm
from ligertune.patching.patch import patch
from ligertune.patching.probe import Refusal
from ligertune.patching.rope.kernel_rope import recognise_rope

LLAMA_NORM = NormSpec("llama", 0.0, "variance_epsilon")
GEMMA_NORM = NormSpec("gemma", 1.0, "eps")

# pairing of columns, columns of cos
ROTATIONS = {"half": ("half", "column"), "pairs": ("pairs", "column"), "pairs_from_halves": ("pairs", "first half")}

# family -> (norm and how many, gated MLP, rotation): pinned, so that a match lost to a new transformers is noticed
EXPECTED = {
    "llama": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=False), "half"),
    "llama_tied": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=False), "half"),
    "mistral": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=False), "half"),
    "qwen2": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=False), "half"),
    "qwen3": (LLAMA_NORM, 9, GatedSpec("swiglu", "none", packed=False), "half"),
    "gemma": (GEMMA_NORM, 5, GatedSpec("geglu", "tanh", packed=False), "half"),
    "gemma2": (GEMMA_NORM, 9, GatedSpec("geglu", "tanh", packed=False), "half"),
    "phi3": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=True), "half"),
    "phi3_partial": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=True), "half"),
    "mixtral": (LLAMA_NORM, 5, ExpertsSpec(GatedActivation("silu"), ExpertLayout()), "half"),
    "granite": (LLAMA_NORM, 5, GatedSpec("swiglu", "none", packed=False), "half"),
    "olmo2": (NormSpec("gemma", 0.0, "variance_epsilon"), 9, GatedSpec("swiglu", "none", packed=False), "half"),
    "glm4": (LLAMA_NORM, 9, GatedSpec("swiglu", "none", packed=True), "pairs_from_halves"),
    "cohere2": (LayerNormSpec(0.0, "variance_epsilon"), 3, GatedSpec("swiglu", "none", packed=False), "pairs"),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_each_family_is_recognised_as_expected(family):
    norm, n_norms, gated, layout = EXPECTED[family]
    model = tiny_models.make(family)
    layer = model.model.layers[0]
    ((name, rotation),) = recognise_rope(layer.self_attn).functions
    assert (name, rotation.pairing, rotation.table) == ("apply_rotary_pos_emb", *ROTATIONS[layout])
    recognise = recognise_experts if family == "mixtral" else recognise_mlp
    assert recognise(layer.mlp.experts if family == "mixtral" else layer.mlp) == gated
    assert recognise_any_norm(model.model.norm) == norm
    rows = {row.kernel: (row.applied, row.left) for row in patch(model).rows}
    assert rows == {
        "apply_rope": (2, 0),
        norm.kernel: (n_norms, 0),
        gated.kernel: (2, 0),
        "linear_cross_entropy": (1, 0),
    }


class ScaledNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.01


class SettingScaledNorm(LlamaRMSNorm):
    """Its scale, a setting of the instance, decides whether it is the plain norm."""

    def __init__(self, width, scale):
        super().__init__(width)
        self.scale = scale

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.scale


class BiasedNorm(LlamaRMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))


def late_eps(self, x):
    """Add eps outside the root, where 1e-6 would hardly change the result."""
    wide = x.float()
    return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)).to(x.dtype)


def rounded_once(self, x):
    """Round bf16 once, after the weight; fp32 weights give an fp32 result, unlike any kernel."""
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return (self.weight.float() * wide).to(self.weight.dtype)


def with_gate(self, hidden_states, gate=None):
    return LlamaRMSNorm.forward(self, hidden_states)


def norm(forward):
    return type("OtherNorm", (LlamaRMSNorm,), {"forward": forward})(16)


OTHER_NORMS = {
    "scaled": ScaledNorm(16),
    "bias": BiasedNorm(16),
    "late eps": norm(late_eps),
    "gate": norm(with_gate),
    "layer norm": nn.LayerNorm(16),
    "layer norm without weight": nn.LayerNorm(16, elementwise_affine=False),
}


def test_a_norm_that_differs_for_a_wider_weight_runs_its_own_forward_there():
    other = norm(rounded_once)
    spec = recognise_norm(other)
    assert spec == NormSpec("gemma", 0.0, "variance_epsilon", mixed=False)
    x = torch.randn(3, 16).bfloat16()
    expected = other(x)
    patch_module(other, KernelNorm, spec)
    assert expected.dtype == torch.float32
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_a_norm_that_differs_is_refused(name):
    assert isinstance(recognise_norm(OTHER_NORMS[name]), Refusal)


class WeightlessNorm(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class WeightlessLength(WeightlessNorm):
    """Divide by the length of the row, not by its root mean square."""

    def forward(self, x):
        return nn.functional.normalize(x.float(), dim=-1, eps=self.eps).type_as(x)


@pytest.mark.parametrize(
    "norm",
    [
        WeightlessNorm(),
        Gemma3nRMSNorm(16, with_scale=False),
        Gemma4RMSNorm(16, with_scale=False),
        Llama4TextL2Norm(),
        NanoChatRMSNorm(),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_norm_without_a_weight_is_recognised(norm):
    spec = recognise_norm(norm)
    assert spec == NormSpec("none", 0.0, "eps")
    x = torch.randn(3, 5, 24, requires_grad=True)
    expected = norm(x)
    for mixin in (KernelNorm, RecomputedNorm):
        patch_module(norm, mixin, spec)
        torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
        unpatch_module(norm)


def test_a_norm_without_a_weight_that_differs_is_refused():
    assert isinstance(recognise_norm(WeightlessLength()), Refusal)


def test_a_forward_replaced_in_the_class_is_probed_again(monkeypatch):
    """The results are cached by class: they must not outlive what the class computes."""

    class Norm(LlamaRMSNorm):
        pass

    class MLP(LlamaMLP):
        pass

    class Attention(LlamaAttention):
        pass

    config = tiny_models.config_of("llama")
    layers = (Norm(16), recognise_norm), (MLP(config), recognise_mlp), (Attention(config, 0), recognise_rope)
    assert not any(isinstance(recognise(layer), Refusal) for layer, recognise in layers)
    monkeypatch.setattr(Norm, "forward", late_eps)
    monkeypatch.setattr(MLP, "forward", added)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert all(isinstance(recognise(layer), Refusal) for layer, recognise in layers)
    monkeypatch.undo()
    assert not any(isinstance(recognise(layer), Refusal) for layer, recognise in layers)


def test_a_method_replaced_in_the_class_is_probed_again(monkeypatch):
    norm = Gemma3nRMSNorm(16)
    assert isinstance(recognise_norm(norm), NormSpec)
    monkeypatch.setattr(Gemma3nRMSNorm, "_norm", lambda self, x: 2.0 * x)
    assert isinstance(recognise_norm(norm), Refusal)


def test_a_model_patched_after_its_forwards_were_replaced_trains_as_before(monkeypatch):
    """Attentions and models are rebuilt from their class's forward, which may not be the one of an earlier model."""
    patch(tiny_models.make("llama"))
    halved = lambda self, *args, **kwargs: (0.5 * llama_attention(self, *args, **kwargs)[0], None)  # noqa: E731
    llama_attention, llama_model = LlamaAttention.forward, modeling_llama.LlamaForCausalLM.forward

    def cut(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return llama_model(self, input_ids[:, :9], attention_mask[:, :9], labels=labels[:, :9], **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", halved)
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", cut)
    plain = tiny_models.make("llama")
    patched = copy.deepcopy(plain)
    patch(patched)
    assert_same_training(patched, plain, tiny_models.batch())


def test_settings_of_the_instance_are_part_of_the_probe():
    assert recognise_norm(SettingScaledNorm(16, 1.0)) == LLAMA_NORM
    assert isinstance(recognise_norm(SettingScaledNorm(16, 1.01)), Refusal)  # its class was recognised a moment ago


class ClampedMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x))


def added(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def raising(self, x):
    return self.down_proj(self.table["gate"](x))


def mlp(cls, **changes):
    return cls(tiny_models.config_of("llama", **changes))


@pytest.mark.parametrize("forward", [ClampedMLP.forward, added, raising])
def test_an_mlp_that_differs_is_refused(forward):
    assert isinstance(recognise_mlp(mlp(type("OtherMLP", (LlamaMLP,), {"forward": forward}))), Refusal)


@pytest.mark.parametrize(
    ("activation", "kernel", "approximate"),
    [
        ("silu", "swiglu", "none"),
        ("swish", "swiglu", "none"),
        ("gelu", "geglu", "none"),
        ("gelu_python", "geglu", "none"),
        ("gelu_pytorch_tanh", "geglu", "tanh"),
        ("gelu_new", "geglu", "tanh"),
        ("relu", "reglu", "none"),
    ],
)
def test_activations_are_recognised_by_their_values(activation, kernel, approximate):
    assert recognise_mlp(mlp(LlamaMLP, hidden_act=activation)) == GatedSpec(kernel, approximate, packed=False)


@pytest.mark.parametrize("activation", ["tanh", "quick_gelu", "gelu_10", "relu6"])
def test_other_activations_are_refused(activation):
    assert isinstance(recognise_mlp(mlp(LlamaMLP, hidden_act=activation)), Refusal)


def test_layers_left_alone_are_reported():
    model = tiny_models.make("llama")
    layer = model.model.layers[0]
    layer.input_layernorm = ScaledNorm(64)
    layer.mlp = mlp(ClampedMLP)
    rows = {row.kernel: row for row in patch(model).rows}
    assert (rows["rms_norm"].applied, rows["rms_norm"].left) == (4, 1)
    assert rows["rms_norm"].note == "1 ScaledNorm: its numbers are not those of an RMS norm we have"
    assert (rows["swiglu"].applied, rows["swiglu"].left) == (1, 1)
    assert "ClampedMLP" in rows["swiglu"].note
    assert type(layer.input_layernorm) is ScaledNorm


def test_forward_replaced_on_the_instance_is_respected():
    model = tiny_models.make("llama")
    norm, attention = model.model.norm, model.model.layers[0].self_attn
    norm.forward, attention.forward = norm.forward, attention.forward  # as accelerate's hooks do
    rows = {row.kernel: row for row in patch(model).rows}
    assert (rows["rms_norm"].left, rows["apply_rope"].left) == (1, 1)
    assert "replaced on the instance" in rows["rms_norm"].note


CALLED = []


def logged(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        CALLED.append(type(self).__name__)
        return forward(self, *args, **kwargs)

    return wrapper


def looked_up(forward):
    forwards = {"forward": forward}

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forwards["forward"](self, *args, **kwargs)

    return wrapper


class LoggedNorm(LlamaRMSNorm):
    forward = logged(LlamaRMSNorm.forward)


class LoggedAttention(LlamaAttention):
    forward = logged(LlamaAttention.forward)


class LookedUpAttention(LlamaAttention):
    forward = looked_up(LlamaAttention.forward)


class NamedAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        return __name__, modeling_llama.apply_rotary_pos_emb(*args, **kwargs)


def test_decorators_of_an_attention_are_kept_around_the_rebuilt_forward():
    model = tiny_models.make("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = LoggedAttention
    rows = {row.kernel: row for row in patch(model).rows}
    assert (rows["apply_rope"].applied, rows["apply_rope"].left) == (2, 0)
    CALLED.clear()
    model(**tiny_models.batch())
    assert CALLED == ["LoggedAttention"] * 2


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(LookedUpAttention, "wrapped by a decorator that is not a plain function"), (NamedAttention, "reads __name__")],
)
def test_an_attention_that_cannot_be_rebuilt_is_left_with_the_reason(cls, reason):
    assert reason in recognise_rope(cls(tiny_models.config_of("llama"), 0)).reason


def test_a_decorated_norm_is_left_with_the_reason():
    model = tiny_models.make("llama")
    model.model.norm.__class__ = LoggedNorm
    rows = {row.kernel: row for row in patch(model).rows}
    assert rows["rms_norm"].note == "1 LoggedNorm: its forward is wrapped by a decorator"


def test_hidden_states_and_attentions_are_captured_as_before():
    """transformers finds the modules to capture from by their class."""
    options = {"output_hidden_states": True, "output_attentions": True}
    plain = tiny_models.make("llama", attn_implementation="eager")
    expected = plain(**tiny_models.batch(), **options)
    patch(plain)
    given = plain(**tiny_models.batch(), **options)
    assert len(given.hidden_states) == 3
    assert len(given.attentions) == 2
    for name in ("hidden_states", "attentions"):
        for one, other in zip(given[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_probing_leaves_the_random_state_and_gradients_alone():
    model = tiny_models.make("llama")
    model.model.norm = SettingScaledNorm(64, 0.123)  # not seen before, so it is probed now
    before = torch.get_rng_state()
    patch(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_the_meta_device_is_patched():
    with torch.device("meta"):
        model = tiny_models.transformers.AutoModelForCausalLM.from_config(tiny_models.config_of("llama"))
        report = patch(model)
    assert [row.applied for row in report.rows] == [2, 5, 2, 1]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
