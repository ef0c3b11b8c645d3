"""The memory plan and the FLOPs of hybrid models, whose layers have a gated delta rule or attention."""

from dataclasses import replace

import pytest
import torch
import transformers
from ligertune_kernels.ops.recurrence import package_functions
from support.quickstart_runs import bare_recipe

from ligertune.hardware import Machine
from ligertune.models.shape import read_shape, text_layers
from ligertune.models.trainable import apply_method
from ligertune.patching.norms import kernel_norms
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy, MicroBatch, backward_bytes, layer_bytes
from ligertune.planning.memory.activation_policy import delta_chunk
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.model_shape import MixerShape, ModelShape
from ligertune.planning.memory.states import states_of
from ligertune.planning.options import MethodOptions

E, F, H, X, K, V = 64, 96, 2, 4, 16, 32
SIZES = {"vocab_size": 128, "hidden_size": E, "intermediate_size": F, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": H, "linear_num_value_heads": X,
         "linear_key_head_dim": K, "linear_value_head_dim": V, "linear_conv_kernel_dim": 4, "pad_token_id": 0}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
MIXER = MixerShape(H, X, K, V)
CHANNELS = 2 * H * K + X * V
TOKENS = 256


def hybrid(family: str, device: str = "meta", method: str = "full", **sizes: object) -> transformers.PreTrainedModel:
    more = EXPERTS if family in ("qwen3_next", "qwen3_5_moe_text") else {}
    config = transformers.AutoConfig.for_model(family, **SIZES, **more, **sizes)
    with torch.device(device):
        return apply_method(transformers.AutoModelForCausalLM.from_config(config), MethodOptions(type=method))


def shape_of(family: str = "qwen3_5_text", **sizes: object) -> ModelShape:
    return read_shape(hybrid(family, **sizes))


class _Kept(torch.autograd.Function):
    """A function that keeps its inputs, and a float32 number per row of the first if it is a norm, as our kernels do."""

    @staticmethod
    def forward(ctx, function, is_norm, *tensors):
        ctx.save_for_backward(*tensors, *([tensors[0].new_empty(tensors[0].shape[:-1])] if is_norm else []))
        return function(*tensors)


def kept(function, *, is_norm=False):
    def run(*tensors, **options):
        tensors = [t for t in tensors if t is not None]
        return _Kept.apply(lambda *given: function(*given, **options), is_norm, *tensors)

    return run


@pytest.fixture
def kernels_keep(monkeypatch):
    """Let our ops keep on a CPU what their kernels keep."""
    for name in ("causal_conv1d", "gated_delta_rule"):
        monkeypatch.setattr(package_functions, name, kept(getattr(package_functions, name)))
    for name in ("rms_norm", "gated_rms_norm"):
        monkeypatch.setattr(kernel_norms, name, kept(getattr(kernel_norms, name), is_norm=True))


def saved_bytes(model: torch.nn.Module, **inputs: torch.Tensor) -> float:
    """Return the bytes per token that autograd saves in the layer's mixer or attention, without its input."""
    x = torch.randn(1, TOKENS, E, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in [x, *inputs.values(), *model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, **inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / TOKENS


def counted_bytes(model: transformers.PreTrainedModel, **policy: object) -> int:
    """Return the bytes per token of a mixer by the plan."""
    ((layer, _),) = read_shape(model).other_layers
    without = replace(layer, mixer=None)
    policies = ActivationPolicy(**policy)
    return layer_bytes(layer, policies, 4, TOKENS) - layer_bytes(without, policies, 4, TOKENS)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_saved_bytes_of_a_mixer(family, method, kernels_keep):
    model = hybrid(family, "cpu", method)
    patch(model)
    mixer = text_layers(model)[0].linear_attn
    adapters = 4 * read_shape(model).other_layers[0][0].adapters if method == "lora" else 0
    mlp_adapters = 0 if method == "full" else 4 * 8 * 3
    print(family, method, counted_bytes(model) + adapters, mlp_adapters, saved_bytes(mixer))
    assert saved_bytes(mixer) == pytest.approx(counted_bytes(model), rel=0.02)


def test_saved_bytes_of_transformers_mixer():
    model = hybrid("qwen3_5_text", "cpu")
    mixer = text_layers(model)[0].linear_attn
    counted = counted_bytes(model, delta_chunk=0, fused_norm=False)
    print(counted, saved_bytes(mixer))
    assert saved_bytes(mixer) == pytest.approx(counted, rel=0.02)


def test_saved_bytes_of_gated_attention(kernels_keep):
    model = hybrid("qwen3_5_text", "cpu")
    patch(model)
    layer = read_shape(model).layer
    nothing = replace(layer, query=0, key=0, gated=False, norms=2 * E, heads=0)
    counted = layer_bytes(layer, ActivationPolicy(), 4, TOKENS) - layer_bytes(nothing, ActivationPolicy(), 4, TOKENS)
    tables = {"position_embeddings": tuple(torch.randn(1, TOKENS, 4) for _ in range(2))}
    attention = text_layers(model)[-1].self_attn
    x = torch.randn(1, TOKENS, E)
    print(counted)
