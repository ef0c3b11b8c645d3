"""Sides of the benchmark of recurrences: inputs in the shapes of published models, and who computes with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_IN_TORCH = 8192  # tokens: its loop over chunks takes a second for more, and 5 GiB
DOCUMENT = 300  # tokens of a packed document: about that of an Alpaca record
CHUNK = 128  # tokens of a chunk of Mamba 2 elsewhere, as Nemotron-H configures
# heads of keys and values and their widths; channels and taps; heads, width, groups, width of the state; heads, width
SHAPES = {
    "gated_delta_rule": (16, 32, 128, 128),
    "causal_conv1d": (8192, 4),
    "ssd": (128, 64, 8, 128),
    "kda": (32, 128),
}
SMALL = {"gated_delta_rule": (1, 2, 16, 16), "causal_conv1d": (64, 4), "ssd": (4, 16, 2, 16), "kda": (2, 16)}


@dataclass(frozen=True)
class Case:
    op: str
    tokens: int
    leaves: tuple
    d_out: object


def case_of(op: str, tokens: int, device: str, *, small: bool) -> Case:
    import torch

    torch.manual_seed(0)
    make = Maker(tokens, device, torch.float32 if small else torch.bfloat16)
    sizes = (SMALL if small else SHAPES)[op]
    leaves, d_out = INPUTS[op](make, *sizes)
    return Case(op, tokens, tuple(t.requires_grad_() for t in leaves), d_out)


@dataclass(frozen=True)
class Maker:
    """Make random tensors (1, T, ...)."""

    tokens: int
    device: str
    dtype: object

    def __call__(self, *shape: int):
        import torch

        return torch.randn(1, self.tokens, *shape, device=self.device, dtype=self.dtype)

    def uniform(self, *shape: int):
        import torch

        return torch.rand(1, self.tokens, *shape, device=self.device)


def conv_inputs(make: Maker, channels: int, taps: int) -> tuple:
    import torch

    weight = torch.randn(channels, taps, device=make.device, dtype=make.dtype)
    return (make(channels), weight), make(channels)


def delta_inputs(make: Maker, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> tuple:
    """Decays are as slow as a trained model's slowest heads, so that states matter."""
    decay = -0.1 * make.uniform(value_heads)
    beta = make.uniform(value_heads).to(make.dtype)
    query, key = (make(key_heads, key_dim) for _ in range(2))
    return (query, key, make(value_heads, value_dim), decay, beta), make(value_heads, value_dim)


def kda_inputs(make: Maker, heads: int, width: int) -> tuple:
    decay = -0.1 * make.uniform(heads, width)
    beta = make.uniform(heads).to(make.dtype)
    query, key, value, d_out = (make(heads, width) for _ in range(4))
    return (query, key, value, decay, beta), d_out


def ssd_inputs(make: Maker, heads: int, head_dim: int, groups: int, state_dim: int) -> tuple:
    import torch

    A = -torch.linspace(1, 16, heads, device=make.device)
    # steps of time around 0.01, as of a trained model
    dt_bias = torch.full((heads,), -4.6, device=make.device)
    D = torch.ones(heads, device=make.device)
    B, C = (make(groups, state_dim) for _ in range(2))
    return (make(heads, head_dim), make(heads), A, B, C, D, dt_bias), make(heads, head_dim)


INPUTS = {"gated_delta_rule": delta_inputs, "causal_conv1d": conv_inputs, "ssd": ssd_inputs, "kda": kda_inputs}


def packed_documents(tokens: int, device):
    import torch
    from ligertune_kernels import Documents

    places = torch.arange(tokens, device=device, dtype=torch.int32)
    starts = places // DOCUMENT * DOCUMENT
    return Documents(starts, (starts + DOCUMENT).clamp(max=tokens))


def our_delta(case: Case) -> Callable:
    from ligertune_kernels import gated_delta_rule

    return lambda *tensors: gated_delta_rule(*tensors, l2_norm=True)


def our_delta_packed(case: Case) -> Callable:
    from ligertune_kernels import gated_delta_rule

    documents = packed_documents(case.tokens, case.d_out.device)
    return lambda *tensors: gated_delta_rule(*tensors, l2_norm=True, documents=documents)


def torch_delta(case: Case) -> Callable:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    function = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def call(query, key, value, decay, beta):
        group = value.shape[2] // key.shape[2]
        query, key = (t.repeat_interleave(group, 2) for t in (query, key))  # as the model does
        return function(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def fla_delta(case: Case) -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call(query, key, value, decay, beta):
        return chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def our_conv(case: Case) -> Callable:
    from ligertune_kernels import causal_conv1d

    return lambda x, weight: causal_conv1d(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)


def our_conv_packed(case: Case) -> Callable:
    from ligertune_kernels import causal_conv1d

    documents = packed_documents(case.tokens, case.d_out.device)

    def call(x, weight):
        return causal_conv1d(x.transpose(1, 2), weight, activation="silu", documents=documents).transpose(1, 2)

    return call


def torch_conv(case: Case) -> Callable:
    from torch.nn import functional

    def call(x, weight):
        z = functional.conv1d(x.transpose(1, 2), weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))
        return functional.silu(z[..., : x.shape[1]]).transpose(1, 2)

    return call


def fla_conv(case: Case) -> Callable:
    from fla.modules.convolution import causal_conv1d

    return lambda x, weight: causal_conv1d(x, weight, activation="silu")[0]


def package_conv(case: Case) -> Callable:
    """It takes a tensor (B, C, T) whose channels lie side by side, and is slower for others."""
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight: causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)


def copied(case: Case) -> Callable:
    import torch

    class Copy(torch.autograd.Function):
        """Read and write one tensor forward; read two and write one backward."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x.clone()

        @staticmethod
        def backward(ctx, d_out):
            x, weight = ctx.saved_tensors
            return torch.add(x, d_out), torch.zeros_like(weight)

    return Copy.apply


def our_ssd(case: Case, documents=None) -> Callable:
    from ligertune_kernels import ssd

    def call(x, dt, A, B, C, D, dt_bias):
        return ssd(x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, documents=documents)

    return call


def our_ssd_packed(case: Case) -> Callable:
    return our_ssd(case, packed_documents(case.tokens, case.d_out.device))


def torch_ssd(case: Case) -> Callable:
    from transformers.models.nemotron_h import modeling_nemotron_h

    function = inspect.unwrap(modeling_nemotron_h.mamba2_chunk_scan)

    def call(x, dt, A, B, C, D, dt_bias):
        return function(x, dt, A, B, C, CHUNK, D=D, dt_bias=dt_bias, dt_softplus=True).to(x.dtype)

    return call


def package_ssd(case: Case) -> Callable:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def call(x, dt, A, B, C, D, dt_bias):
        return mamba_chunk_scan_combined(x, dt, A, B, C, CHUNK, D=D, dt_bias=dt_bias, dt_softplus=True)

    return call


def our_kda(case: Case, documents=None) -> Callable:
    from ligertune_kernels import kda

    return lambda *tensors: kda(*tensors, l2_norm=True, documents=documents)


def our_kda_packed(case: Case) -> Callable:
    return our_kda(case, packed_documents(case.tokens, case.d_out.device))


def torch_kda(case: Case) -> Callable:
    from transformers.models.kimi_linear import modeling_kimi_linear

    function = inspect.unwrap(modeling_kimi_linear.chunk_kimi_delta_attention)

    def call(query, key, value, decay, beta):
        return function(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def fla_kda(case: Case) -> Callable:
    from fla.ops.kda import chunk_kda

    def call(query, key, value, decay, beta):
        return chunk_kda(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def compiled(make: Callable) -> Callable:
    def made(case: Case) -> Callable:
        import torch

        return torch.compile(make(case), dynamic=False)

    return made


# by op: name of a side -> its function for a case. Sides that compile for long come last.
SIDES = {
    "gated_delta_rule": {
        "ligertune": our_delta,
        "packed": our_delta_packed,
        "transformers": torch_delta,
        "fla": fla_delta,
        "compiled": compiled(torch_delta),
    },
    "causal_conv1d": {
        "ligertune": our_conv,
        "packed": our_conv_packed,
        "copy": copied,
        "transformers": torch_conv,
        "fla": fla_conv,
        "causal_conv1d": package_conv,
        "compiled": compiled(torch_conv),
    },
    "ssd": {
        "ligertune": our_ssd,
        "packed": our_ssd_packed,
        "transformers": torch_ssd,
        "mamba_ssm": package_ssd,
        "compiled": compiled(torch_ssd),
    },
    "kda": {
        "ligertune": our_kda,
        "packed": our_kda_packed,
        "transformers": torch_kda,
        "fla": fla_kda,
        "compiled": compiled(torch_kda),
    },
}
