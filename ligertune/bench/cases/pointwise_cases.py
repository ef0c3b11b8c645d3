"""Subjects: rope, gated activations, embedding, and the product of 8-bit by 2-bit integers."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ligertune.bench.case import Case, Provider, Subject, Tensors, Work, compiled, function, ours
from ligertune.bench.cases import eager as huggingface

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B's
VOCAB_SIZE = 128256


def _as_made(t: torch.Tensor) -> torch.Tensor:
    """A leaf's memory as a projection would hand it over: no leaf and no view, so that an op may write over it."""
    return torch.ops.aten._unsafe_view(t, t.shape)


def _rope_in_place(kernels, case: Case, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    return kernels.apply_rope(_as_made(q), _as_made(k), cos, sin, inplace=True, inplace_backward=True)


def _rope_inputs(case: Case, device: torch.device) -> Tensors:
    """q and k as projections leave them: (B, T, H, D) in memory, seen as (B, H, T, D)."""
    (n_tokens,) = case.sizes
    q, k = (
        torch.randn(1, n_tokens, heads, HEAD_DIM, dtype=case.dtype, device=device).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_VALUE_HEADS)
    )
    angles = torch.rand(1, n_tokens, HEAD_DIM // 2, device=device) * 6.0
    angles = torch.cat((angles, angles), dim=-1)
    return q, k, angles.cos().to(case.dtype), angles.sin().to(case.dtype)


def _rope_work(case: Case) -> Work:
    moved = 2.0 * case.sizes[0] * (HEADS + KEY_VALUE_HEADS) * HEAD_DIM * case.dtype.itemsize
    return Work((moved, moved))


ROPE_EAGER = function("eager", huggingface.rope)
ROPE = Subject(
    op="apply_rope",
    dims=("T",),
    axis="T",
    sizes=tuple((n_tokens,) for n_tokens in (1024, 2048, 4096, 8192, 16384)),
    small=((16,), (64,)),
    args=("q", "k", "cos", "sin"),
    inputs=_rope_inputs,
    rows=(),
    work=_rope_work,
    plain=lambda case, args: huggingface.rope,
    providers=(
        ours("ours", lambda kernels, case, q, k, cos, sin: kernels.apply_rope(q, k, cos, sin)),
        ours("ours, in place", _rope_in_place, overwrites=True),
        ROPE_EAGER,
        compiled(ROPE_EAGER),
    ),
)


def _two_rows(case: Case, device: torch.device) -> Tensors:
    return tuple(torch.randn(case.sizes, dtype=case.dtype, device=device, requires_grad=True) for _ in range(2))


def _gated_in_place(op: str):
    """Its backward writes over gate and up."""
    return lambda kernels, case, gate, up: getattr(kernels, op)(_as_made(gate), _as_made(up), inplace=True)


def _gated_work(case: Case) -> Work:
    one = float(case.sizes[0] * case.sizes[1] * case.dtype.itemsize)
    return Work((3.0 * one, 5.0 * one))


SWIGLU_EAGER = function("eager", huggingface.gated("silu"))
SWIGLU = Subject(
    op="swiglu",
    dims=("N", "F"),
    axis="N",
    sizes=tuple((n, 14336) for n in (1024, 2048, 4096, 8192, 16384)),
    small=((8, 300), (64, 300)),
    args=("gate", "up"),
    inputs=_two_rows,
    rows=("gate", "up"),
    work=_gated_work,
    plain=lambda case, args: lambda gate, up: F.silu(gate) * up,
    providers=(
        ours("ours", lambda kernels, case, gate, up: kernels.swiglu(gate, up)),
        ours("ours, in place", _gated_in_place("swiglu"), overwrites=True),
        SWIGLU_EAGER,
        compiled(SWIGLU_EAGER),
    ),
)

GEGLU_EAGER = function("eager", huggingface.gated("gelu_pytorch_tanh"))
GEGLU = Subject(
    op="geglu",
    dims=("N", "F"),
    axis="N",
    sizes=tuple((n, 24576) for n in (1024, 2048, 4096, 8192)),
    small=((8, 300), (64, 300)),
    args=("gate", "up"),
    inputs=_two_rows,
    rows=("gate", "up"),
    work=_gated_work,
    plain=lambda case, args: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    providers=(
        ours("ours", lambda kernels, case, gate, up: kernels.geglu(gate, up)),
        ours("ours, in place", _gated_in_place("geglu"), overwrites=True),
        GEGLU_EAGER,
        compiled(GEGLU_EAGER),
    ),
)


def _embedding_inputs(case: Case, device: torch.device) -> Tensors:
    n_tokens, width, vocab_size = case.sizes
    weight = torch.randn(vocab_size, width, dtype=case.dtype, device=device, requires_grad=True)
    return torch.randint(vocab_size, (n_tokens,), device=device), weight


def _embedding_work(case: Case) -> Work:
    n_tokens, width, vocab_size = (float(size) for size in case.sizes)
    rows, table = n_tokens * width * case.dtype.itemsize, vocab_size * width * case.dtype.itemsize
    return Work((2.0 * rows, rows + table))


EMBEDDING_TORCH = function("torch", F.embedding)
EMBEDDING = Subject(
    op="embedding",
    dims=("N", "E", "V"),
    axis="N",
    sizes=tuple((n, 4096, VOCAB_SIZE) for n in (2048, 8192, 16384)),
    small=((64, 32, 100),),
    args=("ids", "weight"),
    inputs=_embedding_inputs,
    rows=("ids",),
    work=_embedding_work,
    plain=lambda case, args: F.embedding,
    providers=(
        ours("ours", lambda kernels, case, ids, weight: kernels.embedding(ids, weight)),
        EMBEDDING_TORCH,
        compiled(EMBEDDING_TORCH),
    ),
)


def _ternary_inputs(case: Case, device: torch.device) -> Tensors:
    """Activations (M, K) of int8 and weights (N, K) of -1, 0 and 1, as int8."""
    m, n, k = case.sizes
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    return x, torch.randint(-1, 2, (n, k), dtype=torch.int8, device=device)


def _ternary_work(case: Case) -> Work:
    m, n, k = (float(size) for size in case.sizes)
    return Work((m * k + k * n / 4.0 + 4.0 * m * n, 0.0), (2.0 * m * n * k, 0.0))


def _integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What one does without an op for it: the weights as floats, unpacked beforehand."""
    return x.to(weight.dtype) @ weight.t()


def _eager_ternary(case: Case, args: Tensors):
    x, weight = args
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    wide = weight.to(dtype)
    return lambda: _integer_product(x, wide)


def _our_ternary(case: Case, args: Tensors):
    import ligertune_kernels

    x, weight = args
    packed = ligertune_kernels.pack_int2(weight)
    return lambda: ligertune_kernels.int2_int8_matmul(x, packed)


TERNARY_EAGER = Provider("torch", _eager_ternary)
TERNARY = Subject(
    op="int2_int8_matmul",
    dims=("M", "N", "K"),
    axis="M",
    sizes=tuple((m, 4096, 4096) for m in (1, 64, 1024, 4096)),
    small=((4, 32, 64),),
    args=("x", "weight"),
    inputs=_ternary_inputs,
    rows=("x",),
    work=_ternary_work,
    plain=lambda case, args: lambda x, weight: x.double() @ weight.double().t(),
    providers=(Provider("ours", _our_ternary), TERNARY_EAGER, compiled(TERNARY_EAGER)),
    dtype=torch.int8,
    modes=("forward",),
)
