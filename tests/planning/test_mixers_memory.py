"""The memory plan and the FLOPs of hybrid models, whose layers have a gated delta rule or attention."""

import inspect
import types
from dataclasses import fields, replace

import pytest
import torch
import transformers
from ligertune_kernels.ops.recurrence import package_functions
from ligertune_kernels.ops.recurrence.kda import kda_functions
from ligertune_kernels.ops.recurrence.ssd import mamba_functions
from support.models.tiny_families import tiny_family
from support.quickstart_runs import bare_recipe

from ligertune.hardware import Machine
from ligertune.models.mixers.decays import make_decays_float32
from ligertune.models.mixers.layer_parts import parts_of_layers
from ligertune.models.shape import read_shape, text_layers
from ligertune.models.trainable import apply_method
from ligertune.patching.mixers.kernel_mixers import KernelMixer
from ligertune.patching.norms import kernel_norms
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy, StepPhase, backward_bytes, layer_bytes
from ligertune.planning.memory.activation_policy import mixer_chunk
from ligertune.planning.memory.estimate import INPUT_BYTES, MemoryEstimate
from ligertune.planning.memory.mixer_shapes import DeltaRuleShape
from ligertune.planning.memory.model_shape import LayerShape, ModelShape
from ligertune.planning.memory.states import states_of
from ligertune.planning.options import MethodOptions

E, F, H, X, K, V = 64, 96, 2, 4, 16, 32
SIZES = {"vocab_size": 128, "hidden_size": E, "intermediate_size": F, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": H, "linear_num_value_heads": X,
         "linear_key_head_dim": K, "linear_value_head_dim": V, "linear_conv_kernel_dim": 4,
         "pad_token_id": 0}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
MIXER = DeltaRuleShape(H, X, K, V)
CHANNELS = 2 * H * K + X * V
TOKENS = 256


def hybrid(
    family: str,
    device: str = "meta",
    method: str = "full",
    lora_target_modules: list[str] | str = "all-linear",
    **sizes: object,
) -> transformers.PreTrainedModel:
    more = EXPERTS if family in ("qwen3_next", "qwen3_5_moe_text") else {}
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **more, **sizes})
    options = MethodOptions(type=method, lora_target_modules=lora_target_modules)
    with torch.device(device):
        return apply_method(transformers.AutoModelForCausalLM.from_config(config), options)


def shape_of(family: str = "qwen3_5_text", **sizes: object) -> ModelShape:
    return read_shape(hybrid(family, **sizes))


class _Kept(torch.autograd.Function):
    """A function that keeps its inputs, and a number per row of the first if it is a norm, as our kernels do."""

    @staticmethod
    def forward(ctx, function, is_norm, *tensors):
        ctx.save_for_backward(*tensors, *([tensors[0].new_empty(tensors[0].shape[:-1])] if is_norm else []))
        return function(*tensors)


def kept(function, *, is_norm=False):
    def run(*tensors, **options):
        return _Kept.apply(lambda *given: function(*given, **options), is_norm, *tensors)

    return run


@pytest.fixture
def kernels_keep(monkeypatch):
    """Let our ops keep on a CPU what their kernels keep."""
    modules = {"causal_conv1d": package_functions, "gated_delta_rule": package_functions, "ssd": mamba_functions,
               "kda": kda_functions}  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setattr(module, name, kept(getattr(module, name)))
    for name in ("rms_norm", "gated_rms_norm"):
        monkeypatch.setattr(kernel_norms, name, kept(getattr(kernel_norms, name), is_norm=True))


def saved_bytes(block: torch.nn.Module, **inputs: torch.Tensor | tuple[torch.Tensor, ...] | None) -> float:
    """Return the bytes per token that autograd saves in a mixer or an attention, without the block's inputs."""
    x = torch.randn(1, TOKENS, E, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in [x, *block.parameters(), *inputs.get("position_embeddings", ())]}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, **inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / TOKENS


def counted_bytes(layer: LayerShape, nothing: LayerShape, **policy: object) -> int:
    """Return the bytes per token by which a layer saves more than one without mixer or attention."""
    with_block, without = (layer_bytes(one, ActivationPolicy(**policy), 4, TOKENS) for one in (layer, nothing))
    return with_block - without


def test_a_layer_of_nemotron_h_has_one_part():
    model = tiny_family("causal", "nemotron_h")
    parts = parts_of_layers(text_layers(model))
    assert model.config.layers_block_type == ["linear_attention", "moe", "full_attention", "mlp"]
    assert [part.mixer is not None for part in parts] == [True, False, False, False]
    assert [part.attention for part in parts] == [False, False, True, False]
    assert [part.mlp for part in parts] == [False, True, False, True]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_saved_bytes_of_a_mixer(family, method, kernels_keep):
    model = hybrid(family, "cpu", method)
    patch(model, lora=False)  # fused adapters save copies of A and B, too, which the tokens share
    mixer = text_layers(model)[0].linear_attn
    ((layer, _),) = read_shape(model).other_layers
    adapters = sum(4 * p.shape[0] for name, p in mixer.named_parameters() if ".lora_A." in name)
    assert saved_bytes(mixer) == pytest.approx(adapters + counted_bytes(layer, replace(layer, mixer=None)), rel=0.01)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_saved_bytes_of_a_convolution(method, kernels_keep):
    model = hybrid("lfm2", "cpu", method, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)
    patch(model, lora=False)
    mixer = text_layers(model)[0].conv
    shape = read_shape(model)
    ((layer, number),) = shape.other_layers
    assert (number, layer.heads, layer.mlp, shape.linear_layers, shape.recurrence) == (2, 0, F, 2, 0)
    adapters = sum(4 * p.shape[0] for name, p in mixer.named_parameters() if ".lora_A." in name)
    assert saved_bytes(mixer) == pytest.approx(adapters + counted_bytes(layer, replace(layer, mixer=None)), rel=0.01)


FAMILIES = {
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 4,
                   "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4,
                    "linear_head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32,
                    "num_experts_per_token": 2, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_of_other_recurrences(family, method, kernels_keep):
    model = hybrid(family, "cpu", method, **FAMILIES[family])
    patch(model, lora=False)
    mixer = next(module for module in model.modules() if isinstance(module, KernelMixer))
    shape = read_shape(model)
    layer = next(one for one in (shape.layer, *(one for one, _ in shape.other_layers)) if one.mixer is not None)
    adapters = sum(4 * p.shape[0] for name, p in mixer.named_parameters() if ".lora_A." in name)
    assert saved_bytes(mixer) == pytest.approx(adapters + counted_bytes(layer, replace(layer, mixer=None)), rel=0.02)


def test_saved_bytes_of_transformers_mixer():
    model = hybrid("qwen3_5_text", "cpu")
    ((layer, _),) = read_shape(model).other_layers
    counted = counted_bytes(layer, replace(layer, mixer=None), mixer_chunk=0, fused_norm=False)
    assert saved_bytes(text_layers(model)[0].linear_attn) == pytest.approx(counted, rel=0.01)


def test_queries_and_keys_that_a_model_repeats_are_saved_too():
    model = hybrid("qwen3_5_text")
    mixers = [layer.linear_attn for layer in text_layers(model)[:3]]
    usual = type(mixers[0])
    forward = inspect.unwrap(usual.forward)
    names = forward.__code__.co_names
    older = types.FunctionType(forward.__code__.replace(co_names=(*names, "repeat_interleave")), forward.__globals__)
    for mixer in mixers:
        mixer.__class__ = type("OlderMixer", (usual,), {"forward": older})
    ((repeated, _),) = read_shape(model).other_layers
    plain = replace(repeated, mixer=replace(repeated.mixer, repeats=False))
    assert counted_bytes(repeated, plain) == 4 * 2 * X * K
    assert counted_bytes(repeated, plain, mixer_chunk=0) == 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_saved_bytes_of_attention_with_a_gate(method, kernels_keep):
    model = hybrid("qwen3_5_text", "cpu", method)
    patch(model, lora=False)
    layer = read_shape(model).layer
    nothing = replace(layer, query=0, key=0, heads=0, gated=False, norms=2 * E)
    tables = torch.randn(1, TOKENS, 4), torch.randn(1, TOKENS, 4)
    attention = text_layers(model)[-1].self_attn
    adapters = sum(4 * p.shape[0] for name, p in attention.named_parameters() if ".lora_A." in name)
    # on a CPU the output of sdpa has heads before tokens, and is copied
    saved = saved_bytes(attention, position_embeddings=tables, attention_mask=None) - 4 * layer.query
    assert saved == pytest.approx(adapters + counted_bytes(layer, nothing), rel=0.02)


def test_adapters_outside_a_mixer_leave_its_inputs_unsaved():
    shape = read_shape(hybrid("qwen3_5_text", method="lora", lora_target_modules=["q_proj", "down_proj"]))
    ((layer, number),) = shape.other_layers
    assert (layer.attn_in, layer.attn_out, layer.adapters, number) == (False, False, 16, 3)
    assert (shape.layer.attn_in, shape.layer.attn_out) == (True, False)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_layers_of_a_hybrid_mixture_of_experts(family):
    shape = shape_of(family)
    ((layer, number),) = shape.other_layers
    assert (number, layer.mixer, layer.heads, layer.norms) == (3, MIXER, 0, 2 * E)
    assert layer.experts == shape.layer.experts and shape.layer.experts is not None
    assert shape.layer.mixer is None and shape.layer.gated
    model = hybrid(family).bfloat16()
    router = read_shape(model).layer.experts.router
    make_decays_float32(model)
    ((layer, _),) = read_shape(model).other_layers
    assert layer.experts.router == router  # it reads the norm's bfloat16 and no decay's float32
    dense = shape_of("qwen3_next", mlp_only_layers=[0])  # three kinds
    assert [(one.mixer is None, one.experts is None, number) for one, number in dense.other_layers] == [
        (False, False, 2), (False, True, 1),
    ]  # fmt: skip


def test_a_plan_counts_each_kind_of_layer_and_the_widest_backward():
    shape = shape_of()
    states = states_of(bare_recipe("full"), shape.parameters, "bfloat16")
    usual = MemoryEstimate(
        states, shape.layer, shape.head, ActivationPolicy(attention="varlen"),
        layers=4, itemsize=2, labelled=1.0, other_layers=shape.other_layers,
    )  # fmt: skip
    ((mixer, _),) = shape.other_layers
    attention, recurrent = (layer_bytes(one, usual.policy, 2, 4096) * 4096 for one in (shape.layer, mixer))

    def phase(name: str, estimate: MemoryEstimate) -> StepPhase:
        return next(p for p in estimate._phases(4096, 4096, accumulates=False, memory=None) if p.name == name)

    held = phase("loss", usual).activations - phase("loss", replace(usual, other_layers=())).activations
    assert held == 3 * (recurrent - attention)
    # the gradients of q, k, v, of the output and of its gate; two of V, T, and two states per 64 tokens; in float32
    # a partial dk, two lengths, and eight numbers per value head
    needs = 2 * (CHANNELS + 2 * X * V + X * (2 * V + 64 + 2 * K * V // 64)) + 4 * (H * K + 2 * H + 8 * X)
    freed = 2 * (3 * F + E)  # what the MLP saved
    working = backward_bytes(mixer, usual.policy, 2, 4096)
    assert working == 4096 * (2 * 2 * E + needs - freed)
    assert phase("first layer", usual).working == working + 4096 * INPUT_BYTES
    for policy in (replace(usual.policy, checkpointing=True), replace(usual.policy, tile=1024, checkpointing=True)):
        checkpointed = replace(usual, policy=policy)
        of_attention = replace(checkpointed, other_layers=())
        more = phase("first layer", checkpointed).total - phase("first layer", of_attention).total
        assert more > 4096 * needs / 2


@pytest.mark.parametrize(
    ("vendor", "arch", "itemsize", "chunk"),
    [("nvidia", "sm90", 2, 64), ("nvidia", "sm100", 2, 32), ("amd", "gfx942", 4, 32), ("cpu", "x86_64", 4, 64)],
)
def test_chunks_are_those_of_the_machines_tiles(vendor, arch, itemsize, chunk):
    facts = {field.name: None for field in fields(Machine)}
    machine = Machine(**{**facts, "vendor": vendor, "arch": arch})
    assert mixer_chunk(DeltaRuleShape(16, 32, 128, 128), itemsize, machine) == chunk
    wide = DeltaRuleShape(16, 32, 512, 128)
    assert mixer_chunk(wide, itemsize, machine) == (64 if vendor == "cpu" else 0)


def test_flops_of_recurrence_and_of_the_layers_with_attention():
    projections = E * (CHANNELS + 2 * X * V + 2 * X) + 4 * CHANNELS  # with the convolution's taps
    attention = E * (2 * 64 + 2 * 32 + 64)  # with the gate
    weights = 3 * projections + attention + 4 * 3 * E * F + 128 * E
    recurrence = 6 * X * K * V
    shape = shape_of()
    assert shape.flops(tokens=1, squared_lengths=0) == 6 * weights + 3 * 3 * recurrence
    assert shape.flops(tokens=0, squared_lengths=1) == 3 * 2 * 64  # one layer of four heads of 16
    frozen = replace(shape, in_front=2, linear_in_front=2, mixers_in_front=2)
    assert shape.flops(tokens=1, squared_lengths=1) - frozen.flops(tokens=1, squared_lengths=1) == 2 * 2 * recurrence
