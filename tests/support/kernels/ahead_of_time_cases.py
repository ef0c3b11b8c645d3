"""Cases of the ahead-of-time test: every op, forward and backward, over dtypes and sizes, on meta tensors.

A size stands for a way of launching: a whole row in registers, a row in sweeps, a ragged last block, more tiles than
processors. Numbers of rows are not specialised, so one stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import ligertune_kernels as kernels
import torch
from ligertune_kernels.launcher import chip_of
from ligertune_kernels.ops.losses.labelled_rows import find_rows
from torch import Tensor

from support.kernels.pretend_gpu import TARGETS, Compiled, compile_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 4096
Part = Literal["fast", "slow"]


@dataclass(frozen=True)
class Case:
    """A call on tensors of these shapes, which all get a gradient, and on constants."""

    call: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = BF16
    constants: tuple[torch.Tensor, ...] = ()
    backward: bool = True
    early: Container[str] = tuple(TARGETS)  # chips of the fast part

    def run(self, *, inference: bool) -> None:
        """Run without a gradient, if asked to or if there is no backward; then forward and backward."""
        leaves = [meta(*shape, dtype=self.dtype) for shape in self.shapes]
        if inference or not self.backward:
            with torch.no_grad():
                self.call(*leaves, *self.constants)
        if not self.backward:
            return
        leaves = [leaf.requires_grad_() for leaf in leaves]
        outputs = self.call(*leaves, *self.constants)
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


# One chip of each vendor. The slow part compiles every case for all chips.
FIRST = ("sm90", "gfx942")


def on_the_first(*cases: Case, early: Container[str] = FIRST) -> list[Case]:
    return [replace(case, early=early) for case in cases]


later = partial(on_the_first, early=())  # cases of the slow part alone: more sizes that launch as another case does


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def labels(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


# Row widths: the most common, the longest row that a backward holds whole, a swept row; then others.
WIDTHS = ((4096, FP16), (16384, BF16), (32768, FP32))
MORE_WIDTHS = ((4096, BF16),)
OTHER_WIDTHS = ((128, BF16), (8192, BF16))
VOCABULARIES = ((128256, BF16), (32000, FP16), (50257, FP32), (256000, BF16))
EVERY_TERM = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}


def _rows(op: str, n_rows: int, n_columns: int, more: tuple[tuple[int, torch.dtype], ...] = MORE_WIDTHS) -> list[Case]:
    """Return cases of an op on n_rows tensors (N, E) and n_columns tensors (E,)."""

    def case(width: int, dtype: torch.dtype) -> Case:
        return Case(getattr(kernels, op), ((ROWS, width),) * n_rows + ((width,),) * n_columns, dtype)

    everywhere, first, others = ([case(*size) for size in sizes] for sizes in (WIDTHS, more, OTHER_WIDTHS))
    return [*everywhere, *on_the_first(*first), *later(*others)]


def _rms_norm() -> list[Case]:
    gemma = partial(kernels.rms_norm, offset=1.0, cast="gemma")
    # A long row that fills no block, and one that NVIDIA's backward cannot hold packed in fp16.
    more = (*MORE_WIDTHS, (16384, FP16), (4095, FP32))
    gemmas = [Case(gemma, ((ROWS, width), (width,))) for width in (3072, 12288)]
    without_weight = Case(kernels.rms_norm, ((ROWS, 128),))
    deepseek = Case(partial(kernels.rms_norm, cast="deepseek"), ((ROWS, 16384),))
    return [*_rows("rms_norm", 1, 1, more), *on_the_first(gemmas[0], without_weight), *later(gemmas[1], deepseek)]


def _gated_rms_norm() -> list[Case]:
    """Both orders of gate and norm: whole rows, groups, a backward in parts, a swept forward."""

    def case(width: int, dtype: torch.dtype, **options: object) -> Case:
        return Case(partial(kernels.gated_rms_norm, **options), ((ROWS, width), (ROWS, width), (width,)), dtype)

    qwen = {"norm_before_gate": True}
    kimi = {"activation": "sigmoid", "cast": "gemma"}
    mamba = {"norm_before_gate": False}
    everywhere = (case(4096, BF16, **qwen), case(4096, FP16, group_size=512, **mamba), case(4096, FP32, **mamba))
    first = (case(128, BF16, **qwen), case(8192, BF16, **mamba), case(32768, FP32, **mamba))
    others = (case(128, BF16, **kimi), case(4096, BF16, **mamba), case(4095, BF16, **qwen), case(16384, BF16, **kimi))
    return [*everywhere, *on_the_first(*first), *later(*others)]


def _group_norm() -> list[Case]:
    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return kernels.group_norm(x, 32, weight, bias)

    def case(channels: int, dtype: torch.dtype) -> Case:
        return Case(call, ((4, channels, 64, 64), (channels,), (channels,)), dtype)

    return [*(case(*size) for size in ((128, BF16), (96, FP32), (128, FP16))), *later(case(512, BF16))]


def _rope() -> list[Case]:
    """32 query heads and 8 key heads, as projections make them; latent attention's with one key head."""

    def latent() -> Case:
        table = meta(1, 512, 64, dtype=BF16)[..., :32]

        def call(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
            options = {"interleaved": True, "deinterleave": True, "rotary_dim": 64}
            alone, _ = kernels.apply_rope(q.transpose(1, 2), None, cos, sin, **options)
            return alone, *kernels.apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **options)

        return Case(call, ((1, 512, 32, 64), (1, 512, 1, 64)), BF16, (table, table))

    def case(dtype: torch.dtype, head_dim: int, rotary_dim: int | None = None, interleaved: bool = False) -> Case:
        table = meta(1, 512, rotary_dim or head_dim, dtype=dtype)

        def call(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
            return kernels.apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved)

        return Case(call, ((1, 512, 32, head_dim), (1, 512, 8, head_dim)), dtype, (table, table))

    more = (case(BF16, 128, interleaved=True), case(BF16, 128, rotary_dim=96), latent())
    return [case(BF16, 128), case(FP16, 64), case(FP32, 80), *on_the_first(*more), *later(case(BF16, 256))]


def _attention() -> list[Case]:
    """8 query heads and 2 key heads; a head width of each tile table, a padded width; a window and a cap.

    Long documents have kernels of their own on sm90.
    """

    def case(
        head_dim: int, dtype: torch.dtype, n_tokens: int = 1000, count: int | None = None, **terms: object
    ) -> Case:
        places = meta(n_tokens, dtype=torch.int32)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return kernels.document_attention(q, k, v, kernels.Documents(places, places, count), **terms)

        return Case(call, ((n_tokens, 8, head_dim), *(((n_tokens, 2, head_dim),) * 2)), dtype)

    capped = {"window": 512, "softcap": 50.0}
    more = on_the_first(case(64, FP16), case(256, BF16), case(48, FP32), case(128, BF16, **capped))
    long = [case(width, BF16, 4000, count=1) for width in (64, 128, 256)]
    long += [case(width, FP16, 4000, count=1, **capped) for width in (64, 128, 256)]
    others = [case(width, dtype, **capped) for width in (64, 256) for dtype in (BF16, FP16)]
    others = later(case(96, FP16), case(16, BF16), case(128, FP16, **capped), *others)
    return [case(128, BF16), case(64, FP16), *more, *on_the_first(*long, early=("sm90",)), *others]


def _causal_conv1d() -> list[Case]:
    """Channels of Qwen3.5-4B, as projections make them; a row of documents; fewer taps, and more."""

    def case(channels: int, dtype: torch.dtype, taps: int = 4, packed: bool = True) -> Case:
        places = meta(ROWS, dtype=torch.int32)
        documents = kernels.Documents(places, places) if packed else None

        def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            options = {"activation": "silu" if packed else None, "documents": documents}
            return kernels.causal_conv1d(x.transpose(1, 2), weight, bias, **options)

        return Case(call, ((1, ROWS, channels), (channels, taps), (channels,)), dtype)

    return [
        case(8192, BF16),
        *on_the_first(case(8192, FP16, packed=False), case(1000, FP32, taps=2)),
        case(2048, BF16, taps=7),
    ]


def _causal_conv1d_step() -> list[Case]:
    x, state, weight = meta(8, 8192, 1), meta(8, 8192, 4), meta(8192, 4)
    call = partial(kernels.causal_conv1d_step, x, state, weight, activation="silu")
    return [Case(call, (), BF16, backward=False)]


def _gated_delta_rule() -> list[Case]:
    """Two value heads per key head, as in Qwen3.5; each width of the table of tiles; states in and out."""

    def case(width: int, dtype: torch.dtype, *, packed: bool = True) -> Case:
        places = meta(ROWS, dtype=torch.int32)

        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor) -> object:
            given = (query, key, value, beta.float(), beta)
            if packed:
                documents = kernels.Documents(places, places)
                return kernels.gated_delta_rule(*given, l2_norm=True, documents=documents)
            state = meta(1, 8, width, width, dtype=FP32).requires_grad_()
            return kernels.gated_delta_rule_with_states(*given, initial_state=state)

        heads = ((1, ROWS, 4, width), (1, ROWS, 4, width), (1, ROWS, 8, width))
        return Case(call, (*heads, (1, ROWS, 8)), dtype)

    more = on_the_first(case(64, FP16, packed=False), case(128, FP32))
    return [
        case(128, BF16),
        *more,
        *later(case(256, BF16), case(128, BF16, packed=False), case(256, FP32), case(96, FP16)),
    ]


def _gated_delta_rule_step() -> list[Case]:
    shapes = ((8, 1, 16, 128), (8, 1, 16, 128), (8, 1, 32, 128), (8, 1, 32), (8, 1, 32))
    state = meta(8, 32, 128, 128, dtype=FP32)
    call = partial(kernels.gated_delta_rule_step, *(meta(*shape) for shape in shapes), initial_state=state)
    return [Case(call, (), BF16, backward=False)]


def _ssd() -> list[Case]:
    """Heads of Nemotron-H, as its convolution leaves them; states in and out; widths of Falcon-H1; padded widths."""

    def case(head_dim: int, state_dim: int, dtype: torch.dtype, *, packed: bool = True) -> Case:
        heads, groups = 16, 2 if packed else 1
        sizes = (heads * head_dim, groups * state_dim, groups * state_dim)
        places = meta(ROWS, dtype=torch.int32)

        def call(joined: torch.Tensor, dt: torch.Tensor, z: torch.Tensor) -> object:
            x, b, c = joined.split(sizes, -1)
            x = x.unflatten(-1, (heads, head_dim))
            b, c = (t.unflatten(-1, (groups, state_dim)) for t in (b, c))
            of_heads = [meta(heads, dtype=FP32).requires_grad_() for _ in range(2)]
            given = (x, dt, of_heads[0], b, c)
            if packed:
                documents = kernels.Documents(places, places)
                return kernels.ssd(*given, of_heads[0], None, of_heads[1], dt_softplus=True, documents=documents)
            state = meta(1, heads, head_dim, state_dim, dtype=FP32).requires_grad_()
            skip = meta(heads, head_dim, dtype=FP32).requires_grad_()
            return kernels.ssd_with_states(*given, skip, z, dt_limit=(0.01, 0.1), initial_state=state)

        return Case(call, ((1, ROWS, sum(sizes)), (1, ROWS, heads), (1, ROWS, heads, head_dim)), dtype)

    more = on_the_first(case(64, 128, FP16, packed=False), case(64, 128, FP32))
    others = later(
        case(128, 256, BF16), case(64, 128, BF16, packed=False), case(128, 256, BF16, packed=False),
        case(256, 256, FP32, packed=False), case(80, 96, FP16), case(16, 16, BF16),
    )  # fmt: skip
    return [case(64, 128, BF16), *more, *others]


def _ssd_step() -> list[Case]:
    state, x, dt = meta(8, 128, 64, 128, dtype=FP32), meta(8, 128, 64), meta(8, 128)
    b, c = meta(8, 8, 128), meta(8, 8, 128)
    a, skip, bias = (meta(128, dtype=FP32) for _ in range(3))
    call = partial(kernels.ssd_step, state, x, dt, a, b, c, skip, x, bias, dt_softplus=True)
    return [Case(call, (), BF16, backward=False)]


def _kda() -> list[Case]:
    """One value head per key head, as in Kimi Linear, and two; each width of the table of tiles; states in and out."""

    def case(width: int, dtype: torch.dtype, *, packed: bool = True, group: int = 1) -> Case:
        places = meta(ROWS, dtype=torch.int32)

        def call(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> object:
            given = (query, key, value, decay.float(), beta)
            if packed:
                return kernels.kda(*given, l2_norm=True, documents=kernels.Documents(places, places))
            state = meta(1, 4, width, width, dtype=FP32).requires_grad_()
            return kernels.kda_with_states(*given, initial_state=state)

        heads = ((1, ROWS, 4 // group, width),) * 2
        return Case(call, (*heads, (1, ROWS, 4, width), (1, ROWS, 4, width), (1, ROWS, 4)), dtype)

    more = on_the_first(case(64, FP16, packed=False, group=2), case(128, FP32))
    return [
        case(128, BF16),
        *more,
        *later(case(256, BF16), case(128, BF16, packed=False), case(256, FP32), case(96, FP16)),
    ]


def _kda_step() -> list[Case]:
    shapes = (*((8, 1, 32, 128),) * 4, (8, 1, 32))
    call = partial(
        kernels.kda_step, *(meta(*shape) for shape in shapes), initial_state=meta(8, 32, 128, 128, dtype=FP32)
    )
    return [Case(call, (), BF16, backward=False)]


def _gated(call: Callable[..., object], *others: Callable[..., object]) -> list[Case]:
    """The most common form of an op in each dtype; other activations on the first chips only."""
    sizes = ((14336, BF16), (1001, FP16), (11008, FP32))

    def cases(form: Callable[..., object]) -> list[Case]:
        return [Case(form, ((ROWS, width),) * 2, dtype) for width, dtype in sizes]

    more = on_the_first(*(case for other in others for case in cases(other)))
    return [*cases(call), *more, Case(call, ((ROWS, 2 * 14336),))]


def _experts() -> list[Case]:
    """Both kinds of products; few and many rows per expert; layouts, biases and LoRA."""

    def case(
        sizes: tuple[int, ...], dtype: torch.dtype = BF16, rank: int = 0, clamped: bool = False, **options: object
    ):
        n, x, k, e, f = sizes
        layout = kernels.ExpertLayout(transposed=clamped, interleaved=clamped)
        shapes = ((n, e), (n, k), *(((x, e, 2 * f), (x, f, e)) if clamped else ((x, 2 * f, e), (x, e, f))))
        shapes += ((x, 2 * f), (x, e)) if clamped else ()
        shapes += ((x, rank, e), (x, 2 * f, rank), (x, rank, f), (x, e, rank)) if rank else ()
        form = kernels.GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0) if clamped else kernels.GatedActivation()

        def call(hidden: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            loras = (None, None)
            if rank:
                *parameters, a1, b1, a2, b2 = parameters
                loras = (kernels.ExpertLora(a1, b1), kernels.ExpertLora(a2, b2))
            biases = parameters[2:] or (None, None)
            projections = map(kernels.ExpertProjection, parameters[:2], biases, loras)
            index = meta(n, k, dtype=torch.int64)
            return kernels.experts(hidden, index, weights, *projections, activation=form, layout=layout, **options)

        return Case(call, shapes, dtype)

    qwen3, odd, oss = (4096, 128, 8, 2048, 768), (64, 8, 2, 100, 52), (4096, 32, 4, 2880, 2880)
    more = on_the_first(
        case(qwen3, FP16, rank=16), case(oss, FP32, clamped=True), case(odd, products="triton"), case(odd, FP16),
    )  # fmt: skip
    return [case(qwen3, products="triton", rank=16), case(oss, clamped=True), case(odd, FP32), *more]


def _embedding() -> list[Case]:
    def call(weight: torch.Tensor) -> torch.Tensor:
        return kernels.embedding(labels(2, ROWS), weight)

    sizes = ((4096, BF16), (1001, FP16), (4096, FP32), (8192, BF16))
    cases = [Case(call, ((1000, width),), dtype) for width, dtype in sizes]
    return [*cases[:3], *on_the_first(cases[3])]


def _int2_int8() -> list[Case]:
    """One case per tile: one row, some, many, and many unaligned rows."""

    def case(n_rows: int, n_cols: int, n_inner: int, scaled: bool) -> Case:
        x, weight = meta(n_rows, n_inner, dtype=torch.int8), meta(n_cols, n_inner // 4, dtype=torch.uint8)
        scales = {"x_scale": meta(n_rows, dtype=FP32), "weight_scale": meta(n_cols, dtype=FP32)} if scaled else {}
        call = partial(kernels.int2_int8_matmul, **scales)
        return Case(call, (), torch.int8, (x, weight), backward=False)

    cases = [case(1, 4096, 4096, False), case(64, 4096, 4096, False), case(ROWS, 4096, 4096, True)]
    if chip_of(torch.device("meta")).vendor == "nvidia":  # elsewhere the case before does not unpack first either
        cases += on_the_first(case(ROWS, 4095, 4096, False))
    return [*cases, case(ROWS, 4095, 4100, True)]


def _dequantize_nf4() -> list[Case]:
    def case(shape: tuple[int, ...], dtype: torch.dtype, *, double_quant: bool = True) -> Case:
        nf4 = kernels.quantize_nf4(meta(*shape, dtype=dtype), double_quant=double_quant)
        return Case(lambda: kernels.dequantize_nf4(nf4, shape, dtype), (), dtype, backward=False)

    single = case((8, 4096, 512), BF16, double_quant=False)
    return [case((8, 4096, 512), BF16), *on_the_first(case((8, 7, 9), FP32), single)]


def _dequantize_mxfp4() -> list[Case]:
    def case(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
        groups = (*shape[:2], shape[2] // 32)
        stored = kernels.Mxfp4(meta(*groups, 16, dtype=torch.uint8), meta(*groups, dtype=torch.uint8))
        return Case(lambda: kernels.dequantize_mxfp4(stored, shape, dtype), (), dtype, backward=False)

    return [case((8, 4096, 512), BF16), *on_the_first(case((8, 7, 32), FP32))]


def _dequantize_float8_blocks() -> list[Case]:
    def case(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
        scales = meta(shape[0], -(-shape[1] // 128), -(-shape[2] // 128), dtype=FP32)
        stored = kernels.Float8Blocks(meta(*shape, dtype=torch.float8_e4m3fn), scales)
        return Case(lambda: kernels.dequantize_float8_blocks(stored, shape, dtype), (), dtype, backward=False)

    return [case((8, 4096, 512), BF16), *on_the_first(case((8, 7, 33), FP32))]


def _quantize_float8() -> list[Case]:
    """Both copies, as activations have them, and the copy by rows alone, of frozen weights' products."""

    def case(dtype: torch.dtype, x_dtype: torch.dtype, *, amax: bool, columns: bool) -> Case:
        x, scale, maxima = meta(ROWS, 4096, dtype=x_dtype), meta(dtype=FP32), meta(1024, dtype=FP32)
        options = {"dtype": dtype, "columns": columns, "amax": maxima if amax else None}
        return Case(lambda: kernels.quantize_float8(x, scale, **options), (), x_dtype, backward=False)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return [
        case(e4m3, BF16, amax=True, columns=True),
        case(e5m2, BF16, amax=True, columns=True),
        *on_the_first(case(e4m3, BF16, amax=False, columns=False), case(e4m3, FP32, amax=True, columns=True)),
    ]


def _swiglu_float8() -> list[Case]:
    def case(dtype: torch.dtype, width: int, *, amax: bool, columns: bool) -> Case:
        dy, gate, up = (meta(ROWS, width, dtype=dtype) for _ in range(3))
        scale, maxima = meta(dtype=FP32), meta(1024, dtype=FP32) if amax else None

        def call() -> None:
            kernels.swiglu_float8(gate, up, scale, amax=maxima)
            both = (maxima, maxima) if amax else None
            kernels.swiglu_float8_backward(dy, gate, up, scale, scale, scale, amax=both, columns=columns)

        return Case(call, (), dtype, backward=False)

    return [
        case(BF16, 14336, amax=True, columns=True),
        *on_the_first(case(BF16, 14336, amax=False, columns=False), case(FP32, 4100, amax=True, columns=True)),
    ]


def _cross_entropy() -> list[Case]:
    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = meta(logits.shape[-1], dtype=FP32)
        return kernels.cross_entropy(logits, labels, weight=weight, label_smoothing=0.1, reduction="none")

    def case(vocab: int, dtype: torch.dtype, call: Callable[..., object] = kernels.cross_entropy) -> Case:
        return Case(call, ((512, vocab),), dtype, (labels(512),))

    more = on_the_first(case(128256, BF16, partial(kernels.cross_entropy, **EVERY_TERM)), case(50257, FP32, weighted))
    return [*(case(*each) for each in VOCABULARIES[:3]), *more, *later(case(256000, BF16))]


def _linear_cross_entropy() -> list[Case]:
    """Default memory; lean, which computes logits twice, the second time by columns; columns in dW's memory.

    AMD has no schedule with columns in dW's memory: the default and a lean schedule stand for these there.
    """
    lean, on_amd = {"chunk_bytes": 1 << 26}, chip_of(torch.device("meta")).vendor == "amd"
    in_groups = kernels.Schedule("fast", slot=4096, buffer=8192, flushes=1, slab=768, groups=3)
    keeping = kernels.Schedule("lean", slot=256, buffer=256, flushes=1, slab=2048, groups=3, kept=768)
    in_groups, keeping = (None, replace(keeping, groups=0, kept=0)) if on_amd else (in_groups, keeping)

    def case(vocab: int, dtype: torch.dtype, **options: object) -> Case:
        call = partial(kernels.linear_cross_entropy, **options)
        return Case(call, ((8192, 512), (vocab, 512)), dtype, (labels(8192),))

    first = on_the_first(
        case(128256, BF16, **EVERY_TERM), case(50257, FP32, **EVERY_TERM, **lean),
        case(128256, BF16, schedule=keeping), case(50257, FP32, **EVERY_TERM, schedule=in_groups),
    )  # fmt: skip
    cases = [case(*each) for each in VOCABULARIES[:3]]
    cases += [case(128256, BF16, **lean), case(128256, BF16, schedule=in_groups)]
    cases += [Case(partial(find_rows, shift=1), (), constants=(labels(8, 1024),), backward=False)]
    return [*cases, *first, *later(case(256000, BF16))]


def _multi_head() -> list[Case]:
    call = partial(kernels.multi_head_linear_cross_entropy, coefficients=(1.0, 0.8, 0.6))
    return [
        Case(call, ((3, 2048, 512), weight), dtype, (labels(3, 2048),))
        for weight, dtype in (((128256, 512), BF16), ((3, 32000, 512), FP32))
    ]


def _token_statistics() -> list[Case]:
    plain = kernels.linear_token_statistics
    capped = partial(plain, softcap=30.0)
    sizes = ((plain, 128256, BF16), (capped, 50257, FP16), (plain, 32000, FP32))
    return [
        Case(call, ((2048, 512), (vocab, 512)), dtype, (labels(2048),), backward=False) for call, vocab, dtype in sizes
    ]


def _log_probs() -> list[Case]:
    """A frozen layer with statistics, whose dX is multiplied in the backward, and a trained one."""

    def case(vocab: int, dtype: torch.dtype, *, frozen: bool, statistics: bool = False) -> Case:
        def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            weight = weight.detach() if frozen else weight
            return kernels.linear_log_probs(hidden, weight, labels(2048), statistics=statistics).logprob

        return Case(call, ((2048, 512), (vocab, 512)), dtype)

    measured = case(128256, BF16, frozen=True, statistics=True)
    return [measured, *on_the_first(case(128256, BF16, frozen=False), case(32000, FP16, frozen=True))]


def _kl_div() -> list[Case]:
    elements = partial(kernels.kl_div, log_target=True, reduction="none")
    return [
        *(Case(kernels.kl_div, ((512, vocab),) * 2, dtype) for vocab, dtype in VOCABULARIES[:3]),
        Case(elements, ((512, 32000),) * 2),
    ]


def _jsd() -> list[Case]:
    def case(beta: float, vocab: int, dtype: torch.dtype) -> Case:
        teacher = meta(512, vocab, dtype=dtype)
        return Case(partial(kernels.jsd, beta=beta), ((512, vocab),), dtype, (teacher,))

    one_sided = (case(0.0, 128256, BF16), case(1.0, 128256, FP32))
    return [*(case(0.5, *size) for size in VOCABULARIES[:3]), *on_the_first(*one_sided)]


def _linear_jsd() -> list[Case]:
    def teacher(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return meta(2048, 512, dtype=dtype), meta(vocab, 512, dtype=dtype)

    return [
        Case(kernels.linear_jsd, ((2048, 256), (vocab, 256)), dtype, teacher(vocab, dtype))
        for vocab, dtype in ((128256, BF16), (32000, FP32))
    ]


def _adamw() -> list[Case]:
    def call(*tensors: torch.Tensor, scale: torch.Tensor | None) -> None:
        options = kernels.AdamWOptions(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        kernels.adamw_step(*tensors, options, step=3, grad_scale=scale)

    return [
        Case(partial(call, scale=scale), ((4096, 512),) * 4, dtype, backward=False)
        for scale in (None, meta(dtype=FP32))
        for dtype in (BF16, FP32)
    ]


def _seeded_dropout() -> list[Case]:
    seed = meta(dtype=torch.int64)

    def call(x: torch.Tensor, *added: torch.Tensor) -> None:
        kernels.seeded_dropout(x, seed, 0.1, stream=1, add_to=added[0] if added else None)

    return [Case(call, ((4096, 512),) * count, dtype, backward=False) for count in (1, 2) for dtype in (BF16, FP32)]


def _own_keys() -> list[Case]:
    """Grouped heads as in Llama 3, all heads of their own, an odd group, wide heads."""

    def case(dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> Case:
        def call(query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
            return kernels.merge_own_keys(query, out, lse.float(), own[:2], own[2:])

        wide, narrow = (ROWS, heads, head_dim), (ROWS, key_heads, head_dim)
        return Case(call, (wide, wide, wide[:2], *[narrow] * 4), dtype)

    more = (case(FP16, 32, 32, 64), case(FP32, 32, 8, 128), case(BF16, 14, 2, 80), case(BF16, 16, 1, 256))
    return [case(BF16, 32, 8, 128), *on_the_first(*more)]


def _decode_attention() -> list[Case]:
    """Grouped heads as in Llama 3, a soft cap, widths of keys and of values that differ, more heads than a tile has."""

    def case(dtype: torch.dtype, key_dim: int, value_dim: int, heads: int = 32, softcap: float = 0.0) -> Case:
        places = meta(16, dtype=torch.int32)

        def call(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
            kernels.decode_attention(query, keys, values, places, places, scale=0.125, softcap=softcap)

        return Case(call, ((16, heads, key_dim), (16, 8, 512, key_dim), (16, 8, 512, value_dim)), dtype, backward=False)

    more = (case(FP16, 64, 64), case(FP32, 128, 128), case(BF16, 80, 80, softcap=50.0), case(BF16, 256, 256, heads=136))
    return [case(BF16, 128, 128), *on_the_first(*more), *later(case(BF16, 192, 128))]


def _sample_tokens() -> list[Case]:
    keys = meta(16, 2, dtype=torch.int32)
    least = meta(16, dtype=FP32)

    def case(dtype: torch.dtype, temperature: float, least: torch.Tensor | None) -> Case:
        call = partial(kernels.sample_tokens, keys=keys, temperature=temperature, least=least)
        return Case(call, ((16, 128256),), dtype, backward=False)

    return [case(BF16, 0.7, None), *on_the_first(case(FP32, 0.7, least), case(BF16, 0.0, None))]


# op -> cases, made on demand: names of the package are imported at first use.
CASES: dict[str, Callable[[], list[Case]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": lambda: _rows("add_rms_norm", 2, 1),
    "gated_rms_norm": _gated_rms_norm,
    # an odd width, for kernels that all norms share
    "layer_norm": lambda: _rows("layer_norm", 1, 2, (*MORE_WIDTHS, (8191, FP32))),
    "group_norm": _group_norm,
    "apply_rope": _rope,
    "document_attention": _attention,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_step": _causal_conv1d_step,
    "gated_delta_rule": _gated_delta_rule,
    "gated_delta_rule_step": _gated_delta_rule_step,
    "ssd": _ssd,
    "ssd_step": _ssd_step,
    "kda": _kda,
    "kda_step": _kda_step,
    "swiglu": lambda: _gated(kernels.swiglu, partial(kernels.swiglu, alpha=1.702, limit=7.0, up_offset=1.0, scale=0.5)),
    "reglu": lambda: _gated(kernels.reglu, partial(kernels.reglu, squared=True)),
    "geglu": lambda: _gated(kernels.geglu, partial(kernels.geglu, approximate="none")),
    "experts": _experts,
    "embedding": _embedding,
    "dequantize_nf4": _dequantize_nf4,
    "dequantize_mxfp4": _dequantize_mxfp4,
    "dequantize_float8_blocks": _dequantize_float8_blocks,
    "quantize_float8": _quantize_float8,
    "swiglu_float8": _swiglu_float8,
    "int2_int8_matmul": _int2_int8,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "multi_head_linear_cross_entropy": _multi_head,
    "linear_log_probs": _log_probs,
    "linear_token_statistics": _token_statistics,
    "kl_div": _kl_div,
    "jsd": _jsd,
    "linear_jsd": _linear_jsd,
    "adamw_step": _adamw,
    "seeded_dropout": _seeded_dropout,
    "merge_own_keys": _own_keys,
    "decode_attention": _decode_attention,
    "sample_tokens": _sample_tokens,
}


def compile_op(op: str, arch: str, part: Part) -> list[Compiled]:
    """Compile an op, in a worker. The slow part has all cases, with inference in each dtype.

    In the fast one a size of each op stands for inference, which keeps less than training, on those of FIRST.
    """

    def run() -> None:
        inferred = set()
        for case in CASES[op]():
            if part == "slow" or arch in case.early:
                kind = op if part == "fast" else case.dtype
                case.run(inference=kind not in inferred and (part == "slow" or arch in FIRST))
                inferred.add(kind)

    return compile_for(TARGETS[arch], run)
