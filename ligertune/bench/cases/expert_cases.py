"""Benchmark of the experts of a mixture, with the shapes of published models.

Lower bound: the products of the pairs of token and expert, two in the forward and four in the backward, or reading the
weights and writing their gradients once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ligertune_kernels as kernels
import torch
from ligertune_kernels import ExpertLayout, GatedActivation
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from ligertune.bench.case import Case, OpBenchmark, Outputs, Provider, Tensors, Work, providers_of

# (X, K, E, F): Mixtral, Qwen3-30B-A3B, gpt-oss-20b, and 64 of the 256 experts of DeepSeek-V3, which fit in float64
MIXTRAL = (8, 2, 4096, 14336)
QWEN3 = (128, 8, 2048, 768)
GPT_OSS = (32, 4, 2880, 2880)
DEEPSEEK = (64, 8, 7168, 2048)
# the activation and the layout of gpt-oss
CLAMPED = {"activation": GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0), "layout": ExpertLayout(True, True)}


def _options(case: Case) -> dict[str, object]:
    return CLAMPED if case.sizes[1:] == GPT_OSS else {}


def _inputs(case: Case, device: torch.device) -> Tensors:
    """Return hidden states, indices, weights of the router, and the weights of the experts."""
    n, n_experts, top_k, width, inner = case.sizes
    hidden = torch.randn(n, width, dtype=case.dtype, device=device)
    scores, index = torch.randn(n, n_experts, device=device).topk(top_k)
    shapes: tuple[tuple[int, int, int], ...] = ((n_experts, 2 * inner, width), (n_experts, width, inner))
    if _options(case):
        shapes = tuple((x, columns, rows) for x, rows, columns in shapes)
    inputs = (width, inner)
    made = (
        torch.randn(shape, dtype=case.dtype, device=device) / size**0.5
        for shape, size in zip(shapes, inputs, strict=True)
    )
    weights = scores.softmax(-1).to(case.dtype)
    return hidden.requires_grad_(), index, weights.requires_grad_(), *(t.requires_grad_() for t in made)


def _work(case: Case) -> Work:
    n, n_experts, top_k, width, inner = (float(size) for size in case.sizes)
    weights = 3.0 * min(n_experts, n * top_k) * width * inner * case.dtype.itemsize
    product = 6.0 * n * top_k * width * inner
    return Work((weights, weights + 3.0 * n_experts * width * inner * case.dtype.itemsize), (product, 2.0 * product))


def _plain(case: Case, args: Tensors) -> Callable[..., Outputs]:
    return partial(kernels.experts_reference, **_options(case))


class _Experts(torch.nn.Module):
    """What transformers' implementations read of a module of experts."""

    has_gate = True
    has_bias = False
    _is_expert_parallel = False
    has_post_expert_norm = False

    def __init__(self, case: Case, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.num_experts = case.sizes[1]
        self.clamped = bool(_options(case))
        self.is_transposed = self.clamped
        self.is_concatenated = not self.clamped
        # Plain attributes, so that the gradients are those of the arguments.
        self.__dict__.update(gate_up_proj=gate_up, down_proj=down)

    def _apply_gate(self, both: Tensor) -> Tensor:
        if not self.clamped:
            gate, up = both.chunk(2, dim=-1)
            return F.silu(gate) * up
        gate = both[..., ::2].clamp(max=7.0)  # numbers of CLAMPED
        up = both[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)


def _transformers(case: Case, args: Tensors) -> Callable[[], Outputs]:
    hidden, index, weights, gate_up, down = args
    module = _Experts(case, gate_up, down)
    return lambda: grouped_mm_experts_forward(module, hidden, index, weights)


def _ours(case: Case, args: Tensors, **options: object) -> Callable[[], Outputs]:
    return lambda: kernels.experts(*args, **_options(case), **options)


EXPERTS = OpBenchmark(
    op="experts",
    dims=("N", "X", "K", "E", "F"),
    sizes=tuple((n, *shape) for shape in (MIXTRAL, QWEN3, GPT_OSS, DEEPSEEK) for n in (2048, 8192)),
    cpu_sizes=((16, 4, 2, 16, 24), (7, 8, 1, 32, 16)),
    args=("hidden", "index", "weights", "gate_up", "down"),
    inputs=_inputs,
    row_args=("hidden", "index", "weights"),
    work=_work,
    reference=_plain,
    providers=providers_of(
        Provider("ours", _ours),
        transformers=Provider("transformers", _transformers),
        triton=Provider("ours, triton", partial(_ours, products="triton")),
    ),
)
