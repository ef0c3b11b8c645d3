"""Benchmarks of RoPE, gated activations, embedding, the product with a 2-bit weight, and the AdamW step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ligertune_kernels as kernels
import torch
from ligertune_kernels.ops.float8.swiglu_float8 import swiglu_float8_backward_reference
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ligertune.bench.case import (
    Case,
    OpBenchmark,
    Outputs,
    Provider,
    Tensors,
    Work,
    elementwise_work,
    function,
    providers_of,
)

# Heads of Llama-3-8B.
HEADS = 32
KEY_VALUE_HEADS = 8
HEAD_DIM = 128


def _as_projected(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a leaf's memory that is neither leaf nor view, like a projection: ops may overwrite it."""
    return torch.ops.aten._unsafe_view(t, t.shape)


def _rope_inputs(case: Case, device: torch.device) -> Tensors:
    """Return q and k as views (B, H, T, D) of (B, T, H, D), as projections make them, and cos and sin."""
    (n_tokens,) = case.sizes
    q, k = (
        torch.randn(1, n_tokens, heads, HEAD_DIM, dtype=case.dtype, device=device).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_VALUE_HEADS)
    )
    angles = torch.rand(1, n_tokens, HEAD_DIM // 2, device=device) * 6.0
    angles = torch.cat((angles, angles), dim=-1)
    return q, k, angles.cos().to(case.dtype), angles.sin().to(case.dtype)


ROPE = OpBenchmark(
    op="apply_rope",
    dims=("T",),
    sizes=tuple((n_tokens,) for n_tokens in (1024, 2048, 4096, 8192, 16384)),
    cpu_sizes=((16,), (64,)),
    args=("q", "k", "cos", "sin"),
    inputs=_rope_inputs,
    # One row of q and k per token is read and written.
    work=elementwise_work(*(2 * (HEADS + KEY_VALUE_HEADS) * HEAD_DIM,) * 2),
    reference=lambda case, args: apply_rotary_pos_emb,
    providers=providers_of(kernels.apply_rope, eager=apply_rotary_pos_emb),
)


def _gated(op: str, activation: str, width: int, rows: tuple[int, ...]) -> OpBenchmark:
    """Return the benchmark of act(gate) · up, as between the projections of Llama's or Gemma's MLP."""
    kernel = getattr(kernels, op)
    act = ACT2FN[activation]

    def inputs(case: Case, device: torch.device) -> Tensors:
        return tuple(torch.randn(case.sizes, dtype=case.dtype, device=device, requires_grad=True) for _ in range(2))

    def in_place(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return kernel(_as_projected(gate), _as_projected(up), inplace=True)

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return act(gate) * up

    return OpBenchmark(
        op=op,
        dims=("N", "F"),
        sizes=tuple((n, width) for n in rows),
        cpu_sizes=((8, 300), (64, 300)),
        args=("gate", "up"),
        inputs=inputs,
        row_args=("gate", "up"),
        work=elementwise_work(3, 5),
        reference=lambda case, args: plain,
        providers=providers_of(kernel, in_place=in_place, eager=plain),
    )


GATED = (
    _gated("swiglu", "silu", 14336, (1024, 2048, 4096, 8192, 16384)),
    _gated("geglu", "gelu_pytorch_tanh", 24576, (1024, 2048, 4096, 8192)),
    _gated("reglu", "relu", 6912, (8192, 16384)),
)


def _embedding_inputs(case: Case, device: torch.device) -> Tensors:
    n_tokens, width, vocab_size = case.sizes
    weight = torch.randn(vocab_size, width, dtype=case.dtype, device=device, requires_grad=True)
    return torch.randint(vocab_size, (n_tokens,), device=device), weight


def _embedding_work(case: Case) -> Work:
    n_tokens, width, vocab_size = (float(size) for size in case.sizes)
    rows = n_tokens * width * case.dtype.itemsize
    table = vocab_size * width * case.dtype.itemsize
    return Work((2.0 * rows, rows + table))


EMBEDDING = OpBenchmark(
    op="embedding",
    dims=("N", "E", "V"),
    sizes=tuple((n, 4096, 128256) for n in (2048, 8192, 16384)),
    cpu_sizes=((64, 32, 100),),
    args=("ids", "weight"),
    inputs=_embedding_inputs,
    row_args=("ids",),
    work=_embedding_work,
    reference=lambda case, args: F.embedding,
    providers=providers_of(kernels.embedding, torch=F.embedding),
)


def _int2_inputs(case: Case, device: torch.device) -> Tensors:
    """Return int8 activations (M, K) and a ternary weight (N, K): -1, 0 and 1 as int8."""
    m, n, k = case.sizes
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    return x, torch.randint(-1, 2, (n, k), dtype=torch.int8, device=device)


def _int2_work(case: Case) -> Work:
    m, n, k = (float(size) for size in case.sizes)
    return Work((m * k + k * n / 4.0 + 4.0 * m * n, 0.0), (2.0 * m * n * k, 0.0))


def _float_matmul(case: Case, args: Tensors) -> Callable[[], Outputs]:
    """Multiply floats, with the weight unpacked beforehand: the way without an op for it."""
    x, weight = args
    wide = weight.to(torch.bfloat16 if x.device.type == "cuda" else torch.float32)
    return lambda: x.to(wide.dtype) @ wide.t()


def _our_int2_matmul(case: Case, args: Tensors) -> Callable[[], Outputs]:
    x, weight = args
    packed = kernels.pack_int2(weight)
    return lambda: kernels.int2_int8_matmul(x, packed)


INT2_MATMUL = OpBenchmark(
    op="int2_int8_matmul",
    dims=("M", "N", "K"),
    sizes=tuple((m, 4096, 4096) for m in (1, 64, 1024, 4096)),
    cpu_sizes=((4, 32, 64),),
    args=("x", "weight"),
    inputs=_int2_inputs,
    row_args=("x",),
    work=_int2_work,
    reference=lambda case, args: lambda x, weight: x.double() @ weight.double().t(),
    providers=providers_of(Provider("ours", _our_int2_matmul), torch=Provider("torch", _float_matmul)),
    dtype=torch.int8,
    modes=("forward",),
)


def _nf4_inputs(case: Case, device: torch.device) -> Tensors:
    return kernels.quantize_nf4(torch.randn(case.sizes, dtype=case.dtype, device=device)).tensors


def _nf4_work(case: Case) -> Work:
    return Work((kernels.nf4_bytes(case.sizes) + case.tensor_bytes(), 0.0))


def _dequantized(case: Case, args: Tensors) -> Callable[..., torch.Tensor]:
    def reference(*parts: torch.Tensor) -> torch.Tensor:
        return kernels.dequantize_nf4_reference(kernels.Nf4(*parts), (len(parts[0]), *case.sizes[1:]), torch.float64)

    return reference


def _our_dequantize(case: Case, args: Tensors) -> Callable[[], Outputs]:
    return lambda: kernels.dequantize_nf4(kernels.Nf4(*args), case.sizes, case.dtype)


def _eager_dequantize(case: Case, args: Tensors) -> Callable[[], Outputs]:
    return lambda: kernels.dequantize_nf4_reference(kernels.Nf4(*args), case.sizes, case.dtype)


DEQUANTIZE_NF4 = OpBenchmark(
    op="dequantize_nf4",
    dims=("X", "F", "E"),
    sizes=((8, 28672, 4096), (128, 1536, 2048), (32, 5760, 2880)),  # gate and up of Mixtral, Qwen3-30B-A3B, gpt-oss-20b
    cpu_sizes=((2, 8, 24), (3, 96, 160)),
    args=kernels.Nf4._fields[:4],
    inputs=_nf4_inputs,
    row_args=kernels.Nf4._fields[:4],
    work=_nf4_work,
    reference=_dequantized,
    # torch.compile unrolls the reference's loop over experts, which takes minutes
    providers=(Provider("ours", _our_dequantize), Provider("eager", _eager_dequantize)),
    modes=("forward",),
)


def _mxfp4_inputs(case: Case, device: torch.device) -> Tensors:
    return kernels.quantize_mxfp4(torch.randn(case.sizes, dtype=case.dtype, device=device)).tensors


def _mxfp4_work(case: Case) -> Work:
    return Work((math.prod(case.sizes) * 17 // 32 + case.tensor_bytes(), 0.0))


DEQUANTIZE_MXFP4 = OpBenchmark(
    op="dequantize_mxfp4",
    dims=("X", "F", "E"),
    sizes=((32, 5760, 2880), (128, 1536, 2048)),  # gate and up of gpt-oss-20b and of Qwen3-30B-A3B
    cpu_sizes=((2, 8, 32), (3, 96, 160)),
    args=kernels.Mxfp4._fields,
    inputs=_mxfp4_inputs,
    row_args=kernels.Mxfp4._fields,
    work=_mxfp4_work,
    reference=lambda case, args: lambda *parts: kernels.Mxfp4(*parts).dequantize(_shape(case, parts), torch.float64),
    providers=(
        Provider("ours", lambda case, args: lambda: kernels.Mxfp4(*args).dequantize(case.sizes, case.dtype)),
        Provider(
            "eager",
            lambda case, args: lambda: kernels.dequantize_mxfp4_reference(kernels.Mxfp4(*args), case.sizes, case.dtype),
        ),
    ),
    modes=("forward",),
)


def _shape(case: Case, parts: Tensors) -> tuple[int, ...]:
    """Return the shape of the experts whose bytes are given: float64 results of many are joined from parts."""
    return len(parts[0]), *case.sizes[1:]


def _float8_blocks_inputs(case: Case, device: torch.device) -> Tensors:
    return kernels.quantize_float8_blocks(torch.randn(case.sizes, dtype=case.dtype, device=device)).tensors


DEQUANTIZE_FLOAT8_BLOCKS = OpBenchmark(
    op="dequantize_float8_blocks",
    dims=("X", "F", "E"),
    sizes=((1, 12288, 4096), (128, 1536, 2048)),  # a linear layer of Qwen3-8B; gate and up of Qwen3-30B-A3B
    cpu_sizes=((2, 8, 24), (3, 96, 160)),
    args=kernels.Float8Blocks._fields[:2],
    inputs=_float8_blocks_inputs,
    row_args=kernels.Float8Blocks._fields[:2],
    work=lambda case: Work((math.prod(case.sizes) + case.tensor_bytes(), 0.0)),
    reference=lambda case, args: (
        lambda *parts: kernels.Float8Blocks(*parts).dequantize(_shape(case, parts), torch.float64)
    ),
    providers=(
        Provider("ours", lambda case, args: lambda: kernels.Float8Blocks(*args).dequantize(case.sizes, case.dtype)),
        Provider(
            "eager",
            lambda case, args: (
                lambda: kernels.dequantize_float8_blocks_reference(kernels.Float8Blocks(*args), case.sizes, case.dtype)
            ),
        ),
    ),
    modes=("forward",),
)


def _float8_inputs(case: Case, device: torch.device) -> Tensors:
    return torch.randn(case.sizes, dtype=case.dtype, device=device), torch.tensor(37.0, device=device)


def _rows_first(columns: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return a copy by columns (C, N rounded up) as (N, C): float64 results of many rows are joined from parts."""
    return columns.t()[:n_rows]


def _both_copies(quantize: Callable[..., kernels.Float8Copies]) -> Callable[..., Tensors]:
    """Return a function of x and the scale that returns the copies by rows and by columns, each (N, C)."""

    def call(x: torch.Tensor, scale: torch.Tensor) -> Tensors:
        copies = quantize(x, scale)
        return copies.rows, _rows_first(copies.columns, len(x))

    return call


_EAGER_QUANTIZE = _both_copies(kernels.quantize_float8_reference)


def _float8_truth(x: torch.Tensor, scale: torch.Tensor) -> Tensors:
    """Return the copies as torch rounds float32 values, which hold the inputs of every dtype exactly."""
    return tuple(copy.double() for copy in _EAGER_QUANTIZE(x.float(), scale.float()))


QUANTIZE_FLOAT8 = OpBenchmark(
    op="quantize_float8",
    dims=("N", "C"),
    sizes=((8192, 4096), (8192, 14336), (16384, 14336)),
    cpu_sizes=((16, 32), (30, 48)),
    args=("x", "scale"),
    inputs=_float8_inputs,
    row_args=("x",),
    work=lambda case: Work((case.tensor_bytes() + 2 * math.prod(case.sizes), 0.0)),
    reference=lambda case, args: _float8_truth,
    providers=providers_of(_both_copies(kernels.quantize_float8), eager=_EAGER_QUANTIZE),
    modes=("forward",),
)


def _swiglu_float8_inputs(case: Case, device: torch.device) -> Tensors:
    matrices = (torch.randn(case.sizes, dtype=case.dtype, device=device) for _ in range(3))
    return *matrices, *(torch.tensor(scale, device=device) for scale in (8.0, 1000.0, 1000.0))


def _both_directions(
    forward: Callable[..., torch.Tensor], backward: Callable[..., tuple[Any, Any, Any]]
) -> Callable[..., Outputs]:
    """Return a function of dy, gate, up and the scales that returns all float8 copies, rows first.

    backward: returns the copies of both gradients, and that of y by columns.
    """

    def call(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *scales: torch.Tensor) -> Outputs:
        y = forward(gate, up, scales[0])
        d_gate, d_up, y_columns = backward(dy, gate, up, *scales)
        by_columns = (_rows_first(columns, len(gate)) for columns in (d_gate.columns, d_up.columns, y_columns))
        return y, d_gate.rows, d_up.rows, *by_columns

    return call


def _separate_forward(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return kernels.quantize_float8(kernels.swiglu(gate, up), scale, columns=False).rows


def _separate_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *scales: torch.Tensor
) -> tuple[Any, Any, Any]:
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    y = kernels.swiglu(*leaves)
    y.backward(dy)
    d_gate, d_up = (
        kernels.quantize_float8(leaf.grad, scale, dtype=torch.float8_e5m2)
        for leaf, scale in zip(leaves, scales[1:], strict=True)
    )
    return d_gate, d_up, kernels.quantize_float8(y.detach(), scales[0], rows=False).columns


_EAGER_SWIGLU_FLOAT8 = _both_directions(kernels.swiglu_float8_reference, swiglu_float8_backward_reference)


def _swiglu_float8_truth(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the copies as torch rounds them, first to bfloat16, which holds the inputs exactly."""
    matrices = (t.to(torch.bfloat16) for t in args[:3])
    scales = (t.float() for t in args[3:])
    return tuple(copy.double() for copy in _EAGER_SWIGLU_FLOAT8(*matrices, *scales))


SWIGLU_FLOAT8 = OpBenchmark(
    op="swiglu_float8",
    dims=("N", "F"),
    sizes=((4096, 14336), (8192, 14336)),
    cpu_sizes=((16, 32), (30, 48)),
    args=("dy", "gate", "up", "scale", "gate_scale", "up_scale"),
    inputs=_swiglu_float8_inputs,
    row_args=("dy", "gate", "up"),
    # Both directions: gate and up are read twice, dy once; six float8 matrices are written.
    work=lambda case: Work((5 * case.tensor_bytes() + 6 * math.prod(case.sizes), 0.0)),
    reference=lambda case, args: _swiglu_float8_truth,
    providers=(
        function("ours", _both_directions(kernels.swiglu_float8, kernels.swiglu_float8_backward)),
        function("ours, separate ops", _both_directions(_separate_forward, _separate_backward)),
        function("eager", _EAGER_SWIGLU_FLOAT8),
    ),
    dtype=torch.bfloat16,
    modes=("forward",),
)


ADAMW_OPTIONS = kernels.AdamWOptions(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
ADAMW_ARGS = ("param", "grad", "exp_avg", "exp_avg_sq")


def _adamw_inputs(case: Case, device: torch.device) -> Tensors:
    made = [torch.randn(case.sizes, dtype=case.dtype, device=device) for _ in range(4)]
    return *made[:3], made[3].abs() + 0.1  # exp_avg_sq is a mean of squares


def _adamw(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Return the new weight and overwrite nothing."""
    stepped = param.clone()
    kernels.adamw_step_reference(stepped, grad, exp_avg.clone(), exp_avg_sq.clone(), ADAMW_OPTIONS, step=3)
    return stepped


def _our_adamw(param: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    kernels.adamw_step(param, *others, ADAMW_OPTIONS, step=3)
    return param


ADAMW_STEP = OpBenchmark(
    op="adamw_step",
    dims=("N", "E"),
    sizes=((4096, 4096), (14336, 4096), (128256, 4096)),
    cpu_sizes=((16, 8), (64, 24)),
    args=ADAMW_ARGS,
    inputs=_adamw_inputs,
    row_args=ADAMW_ARGS,
    work=elementwise_work(7, 0),  # four tensors are read and three written
    reference=lambda case, args: _adamw,
    providers=providers_of(function("ours", _our_adamw, overwrites=True), eager=_adamw),
    modes=("forward",),
)


def _dropout_inputs(case: Case, device: torch.device) -> Tensors:
    return torch.randn(case.sizes, dtype=case.dtype, device=device), torch.tensor(2**40 + 7, device=device)


SEEDED_DROPOUT = OpBenchmark(
    op="seeded_dropout",
    dims=("N", "E"),
    sizes=((8192, 4096), (8192, 14336)),
    cpu_sizes=((16, 8), (64, 24)),
    args=("x", "seed"),
    inputs=_dropout_inputs,
    work=elementwise_work(2, 0),  # no row_args: the numbers depend on an element's place in the whole
    reference=lambda case, args: partial(kernels.seeded_dropout_reference, p=0.1),
    # torch's dropout draws other elements, so it cannot be compared
    providers=providers_of(
        partial(kernels.seeded_dropout, p=0.1), eager=partial(kernels.seeded_dropout_reference, p=0.1)
    ),
    modes=("forward",),
)
