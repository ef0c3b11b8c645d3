"""Layers for `kernels.kernelize` and transformers' `use_kernels=True`: they replace the forward of a model's module.

A layer has no state. Its annotations name what it reads of the module that it is put on. Names of transformers' layers:
RMSNorm, RMSNormZeroCentered, RMSNormGated, rotary_pos_emb. The MLPs and experts have none in transformers' models; give
them one with `kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")`.
"""

import inspect
from collections.abc import Callable

import torch
from torch import nn

from .activations import activation_of
from .experts_forward import experts_forward
from .ops.attention.rope import apply_rope
from .ops.mlp.gated_mlp import geglu, swiglu
from .ops.norms.gated_rms_norm import gated_rms_norm
from .ops.norms.rms_norm import rms_norm
from .ops.recurrence import package_functions
from .ops.recurrence.kda import kda_functions
from .ops.recurrence.ssd import mamba_functions


class RMSNorm(nn.Module):
    """weight · x̂ with x̂ rounded to the dtype of x first: Llama, Qwen, Mistral and 130 others."""

    can_torch_compile = True
    weight: torch.Tensor  # (E,)
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # (..., E)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class RMSNormRoundedOnce(nn.Module):
    """weight · x̂ in fp32, rounded once: OLMo 2 and 3, FlexOlmo, gpt-oss, Nemotron-H, DeepSeek-V4."""

    can_torch_compile = True
    weight: torch.Tensor  # (E,)
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # (..., E)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, cast="gemma")


class RMSNormZeroCentered(nn.Module):
    """(1 + weight) · x̂ in fp32, rounded once: Qwen3.5, Qwen3-Next, Gemma 1 to 3."""

    can_torch_compile = True
    weight: torch.Tensor  # (E,)
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., E)
        return rms_norm(x, self.weight, self.eps, offset=1.0, cast="gemma")


class RMSNormGated(nn.Module):
    """weight · x̂ · act(gate): Qwen3.5, Qwen3-Next, OLMo hybrid."""

    can_torch_compile = True
    weight: torch.Tensor  # (E,)
    variance_epsilon: float
    activation: str  # silu or sigmoid

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # (..., E)
        return gated_rms_norm(
            hidden_states, gate, self.weight, self.variance_epsilon, activation=self.activation, norm_before_gate=True
        )


class RotaryPosEmb(nn.Module):
    """Rotate q and k in one launch; the backward rotates the gradients back. cos and sin get no gradient.

    cos and sin have a column for each column of a head, or one for each pair (gpt-oss). Results have the dtypes of q
    and k.
    """

    can_torch_compile = True

    def forward(
        self,
        q: torch.Tensor,  # (B, H, T, D); with unsqueeze_dim=2 (B, T, H, D)
        k: torch.Tensor,  # (B, K, T, D); with unsqueeze_dim=2 (B, T, K, D)
        cos: torch.Tensor,  # (B or 1, T, D or D/2)
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if unsqueeze_dim == 1:
            return apply_rope(q, k, cos, sin, rotary_dim=q.shape[-1])
        if unsqueeze_dim != 2:
            raise ValueError(f"RotaryPosEmb: unsqueeze_dim is {unsqueeze_dim}; expected 1 or 2")
        q, k = apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim=q.shape[-1])
        return q.transpose(1, 2), k.transpose(1, 2)


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) · up(x)): Llama, Qwen, Mistral and others. Raises ValueError for another activation."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., E)
        activation_of(self, ("silu",))
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLUMLP(nn.Module):
    """down(gelu(gate(x)) · up(x)), with erf or tanh as the module's activation: Gemma. ValueError for another."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., E)
        approximate = "tanh" if activation_of(self, ("gelu_tanh", "gelu_erf")) == "gelu_tanh" else "none"
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate=approximate))


class Experts(nn.Module):
    """All experts of a mixture in grouped products, as `experts_forward`."""

    can_torch_compile = True
    gate_up_proj: torch.Tensor  # (X, 2F, E)
    down_proj: torch.Tensor  # (X, E, F)

    def forward(
        self,
        hidden_states: torch.Tensor,  # (N, E)
        top_k_index: torch.Tensor,  # (N, K)
        top_k_weights: torch.Tensor,  # (N, K)
    ) -> torch.Tensor:  # (N, E)
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


def _function_layer(function: Callable, parameters: str, *, others: bool = True) -> type[nn.Module]:
    """Return a layer that calls a function of a hybrid model's mixer. transformers looks it up under its name.

    parameters: names of the positional ones. `kernels` compares their number and kinds with those of the function that
    the layer replaces. others: the function takes more by name.
    """
    names = parameters.split()

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return function(**dict(zip(names, args, strict=False)), **kwargs)

    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    kinds += [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)] * others
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    members = {"forward": forward, "can_torch_compile": True, "__doc__": function.__doc__, "__module__": __name__}
    return type(function.__name__, (nn.Module,), members)


_RULE = "initial_state output_final_state use_qk_l2norm_in_kernel"
causal_conv1d_fn = _function_layer(package_functions.causal_conv1d_fn, "x weight bias activation")
causal_conv1d_update = _function_layer(
    package_functions.causal_conv1d_update, "x conv_state weight bias activation", others=False
)
chunk_gated_delta_rule = _function_layer(
    package_functions.chunk_gated_delta_rule,
    f"query key value g beta chunk_size {_RULE}",  # the kernels choose the chunk's size
)
fused_recurrent_gated_delta_rule = _function_layer(
    package_functions.fused_recurrent_gated_delta_rule, f"query key value g beta {_RULE}"
)
mamba_chunk_scan_combined = _function_layer(
    mamba_functions.mamba_chunk_scan_combined,
    "x dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states",
)
mamba_split_conv1d_scan_combined = _function_layer(
    mamba_functions.mamba_split_conv1d_scan_combined,
    "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit return_final_states activation "
    "rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate",
)
selective_state_update = _function_layer(
    mamba_functions.selective_state_update, "state x dt A B C D dt_bias dt_softplus z"
)
chunk_kda = _function_layer(kda_functions.chunk_kda, f"query key value g beta chunk_size {_RULE}")
fused_recurrent_kda = _function_layer(kda_functions.fused_recurrent_kda, f"query key value g beta {_RULE}")
