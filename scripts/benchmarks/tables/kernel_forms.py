"""Forms of the norms, gated activations and RoPE that single families of models use: the table of kernel_forms.py.

A form is a way to call an op, and the same computation in plain torch. Its floor counts the bytes that it must move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ligertune_kernels
import torch
from torch.nn import functional as F

from ligertune.bench.accuracy import as_tuple
from ligertune.bench.case import Case, OpBenchmark, Outputs, Tensors, Work, providers_of

EPS = 1e-6
LIMIT = 1.5  # of clamped gates; that of models, 7 to 10, would clamp nothing in random numbers
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B
LATENT_HEADS, CONTENT_DIM, ROTARY_DIM, LATENT_DIM = 128, 128, 64, 512  # DeepSeek-V3

Inputs = Callable[[Case, torch.device], Tensors]


@dataclass(frozen=True)
class Form:
    """One form of an op.

    args: its tensors, which the op takes in this order. options: the op's arguments that are not at their defaults.
    plain: the form as models compute it in torch, and in float64 the reference. call: how the op is called with the
    tensors and options, if not directly.
    """

    op: str
    name: str
    args: tuple[str, ...]
    options: dict[str, object]
    plain: Callable[..., Outputs]
    call: Callable[..., Outputs] | None = None
    inputs: Inputs | None = None

    @property
    def label(self) -> str:
        return f"{self.op}: {self.name}"


# ---- norms: x and gate (N, E), weight and bias (E,)


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Return x / rms(x) in at least fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def _deepseek_norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS).to(x.dtype)


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (_rms(x) * (1.0 + weight.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)


def t5_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * _rms(x).to(weight.dtype)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _torchs_rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _kimi_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (weight.to(wide) * _rms(x) * torch.sigmoid(gate.to(wide))).to(x.dtype)


def _gated_without_weight(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (_rms(x).to(x.dtype) * F.silu(gate.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)


def _mamba_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, group_size: int = 0, rounds_once: bool = False
) -> torch.Tensor:
    """Return weight · norm(x · silu(gate)), the norm of all columns or of groups of them."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) * F.silu(gate.to(wide))
    h = _rms(h.unflatten(-1, (-1, group_size))).flatten(-2) if group_size else _rms(h)
    return (weight.to(wide) * h).to(x.dtype) if rounds_once else weight * h.to(x.dtype)


def _norm_inputs(form: Form, case: Case, device: torch.device) -> Tensors:
    make = {"dtype": case.dtype, "device": device}
    centre = 0.0 if form.options.get("offset") else 1.0
    made: dict[str, Callable[[], torch.Tensor]] = {
        "x": lambda: torch.randn(case.sizes, **make),
        "gate": lambda: torch.randn(case.sizes, **make),
        "weight": lambda: centre + 0.1 * torch.randn(case.sizes[1], **make),
        "bias": lambda: 0.1 * torch.randn(case.sizes[1], **make),
    }
    return tuple(made[name]().requires_grad_() for name in form.args)


# ---- gated activations: gate and up (N, F), packed (N, 2F)


def _halves_swapped(act: Callable[[torch.Tensor], torch.Tensor], packed: torch.Tensor) -> torch.Tensor:
    up, gate = packed.chunk(2, dim=-1)
    return act(gate) * up


def _halves(act: Callable[[torch.Tensor], torch.Tensor], packed: torch.Tensor) -> torch.Tensor:
    gate, up = packed.chunk(2, dim=-1)
    return act(gate) * up


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


def _gpt_oss(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1.0) * (gate * torch.sigmoid(1.702 * gate))


GELU_TANH = partial(F.gelu, approximate="tanh")


def _mlp_inputs(form: Form, case: Case, device: torch.device) -> Tensors:
    (n_rows, width), make = case.sizes, {"dtype": case.dtype, "device": device, "requires_grad": True}
    return tuple(torch.randn(n_rows, width * (1 + (name == "packed")), **make) for name in form.args)


# ---- RoPE: q (1, H, T, D) and k (1, K, T, D) as views of projections, tables (1, T, .)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _llama(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos[:, None] + _rotate_half(x) * sin[:, None]


def _cohere(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos[:, None] + _rotate_pairs(x) * sin[:, None]


def _nanochat(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos[:, None] - _rotate_half(x) * sin[:, None]


def _partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    return torch.cat((_llama(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def _rope_gpt_oss(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    (first, second), cos, sin = x.chunk(2, dim=-1), cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _latent(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Reorder pairs to halves, then rotate: DeepSeek-V3."""
    x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return _llama(x, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def _llama4(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    return torch.view_as_real(torch.view_as_complex(pairs) * table[:, None]).flatten(-2).to(x.dtype)


def _both(rotate: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor) -> Tensors:
    return rotate(q, *tables), rotate(k, *tables)


def _q_alone(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: object) -> torch.Tensor:
    return ligertune_kernels.apply_rope(q, None, cos, sin, **options)[0]


def _opposite(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    return ligertune_kernels.apply_rope(q, k, cos, -sin)


def _complex_table(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, **options: object) -> Tensors:
    return ligertune_kernels.apply_rope(q, k, *torch.view_as_real(table).unbind(-1), **options)


def _rope_inputs(
    form: Form, case: Case, device: torch.device, *, columns: str = "halves", width: int = HEAD_DIM
) -> Tensors:
    """Return q and k, or q alone, and tables for `width` rotated columns.

    columns of the tables: "halves" and "pairs", one per column; "one per pair".
    """
    (n_tokens,), make = case.sizes, {"dtype": case.dtype, "device": device}
    heads = [{"q": HEADS, "k": KEY_VALUE_HEADS}[name] for name in form.args if name in ("q", "k")]
    rows = [torch.randn(1, n_tokens, n_heads, HEAD_DIM, **make).transpose(1, 2).requires_grad_() for n_heads in heads]
    angles = 6.0 * torch.rand(1, n_tokens, width // 2, device=device)
    if "table" in form.args:
        return *rows, torch.polar(torch.ones_like(angles), angles)
    if columns != "one per pair":
        angles = torch.cat((angles, angles), dim=-1) if columns == "halves" else angles.repeat_interleave(2, dim=-1)
    return *rows, angles.cos().to(case.dtype), angles.sin().to(case.dtype)


def _latent_inputs(form: Form, case: Case, device: torch.device) -> Tensors:
    """Return the rotary parts of q and of the one key head, and the first half of tables: latent attention."""
    (n_tokens,), make = case.sizes, {"dtype": case.dtype, "device": device}
    q = torch.randn(1, n_tokens, LATENT_HEADS, CONTENT_DIM + ROTARY_DIM, **make).transpose(1, 2)[..., CONTENT_DIM:]
    k = torch.randn(1, n_tokens, 1, LATENT_DIM + ROTARY_DIM, **make).transpose(1, 2)[..., LATENT_DIM:]
    angles = 6.0 * torch.rand(1, n_tokens, ROTARY_DIM // 2, device=device)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = (table.to(case.dtype)[..., : ROTARY_DIM // 2] for table in (angles.cos(), angles.sin()))
    return q.requires_grad_(), k.requires_grad_(), cos, sin


# ---- the table

X, XW, XWB, XG, XGW = ("x",), ("x", "weight"), ("x", "weight", "bias"), ("x", "gate"), ("x", "gate", "weight")
GU, PACKED = ("gate", "up"), ("packed",)
QK, Q, COMPLEX = ("q", "k", "cos", "sin"), ("q", "cos", "sin"), ("q", "k", "table")
GATE_FIRST, ONCE = {"norm_before_gate": False}, {"cast": "gemma"}
PAIRS, HALVED = {"interleaved": True}, {"interleaved": True, "deinterleave": True}
FORMS = (
    Form("rms_norm", "no weight (Gemma 4, Llama 4)", X, {"cast": "none"}, _torchs_rms_norm),
    Form("rms_norm", "no weight, rounded as DeepSeek-V4", X, {"cast": "deepseek"}, _deepseek_norm),
    Form("rms_norm", "1 + weight (Gemma)", XW, {"offset": 1.0, "cast": "gemma"}, _gemma_norm),
    Form("rms_norm", "rounded once (OLMo 2)", XW, ONCE, _torchs_rms_norm),
    Form("rms_norm", "rounded as T5", XW, {}, t5_norm),
    Form("layer_norm", "no bias (Cohere)", XW, {}, _layer_norm),
    Form("layer_norm", "no weight (OLMo)", X, {}, _layer_norm),
    Form("layer_norm", "1 + weight (Nemotron)", XWB, {"offset": 1.0}, lambda x, w, b: _layer_norm(x, w + 1.0, b)),
    Form("gated_rms_norm", "norm(x act(gate)) (Mamba 2)", XGW, GATE_FIRST, _mamba_norm),
    Form("gated_rms_norm", "norm(x act(gate)), 8 groups (Nemotron-H)", XGW, {**GATE_FIRST, "group_size": 512},
         partial(_mamba_norm, group_size=512)),
    Form("gated_rms_norm", "norm(x act(gate)), 8 groups, rounded once (Falcon-H1)", XGW,
         {**GATE_FIRST, **ONCE, "group_size": 512}, partial(_mamba_norm, group_size=512, rounds_once=True)),
    Form("gated_rms_norm", "sigmoid, rounded once (Kimi Linear)", XGW, {"activation": "sigmoid", **ONCE}, _kimi_norm),
    Form("gated_rms_norm", "no weight", XG, {}, _gated_without_weight),
    Form("swiglu", "packed (Phi-3)", PACKED, {}, partial(_halves, F.silu)),
    Form("swiglu", "packed, up first", PACKED, {"up_first": True}, partial(_halves_swapped, F.silu)),
    Form("swiglu", "clamped (DeepSeek-V4)", GU, {"limit": LIMIT}, _clamped),
    Form("swiglu", "clamped, alpha, 1 + up (gpt-oss)", GU,
         {"limit": LIMIT, "alpha": 1.702, "up_offset": 1.0}, _gpt_oss),
    Form("swiglu", "scaled (Falcon-H1)", GU, {"scale": 0.5}, lambda gate, up: 0.5 * (F.silu(gate) * up)),
    Form("geglu", "erf", GU, {"approximate": "none"}, lambda gate, up: F.gelu(gate) * up),
    Form("geglu", "packed, up first", PACKED, {"up_first": True}, partial(_halves_swapped, GELU_TANH)),
    Form("reglu", "squared (BitNet)", GU, {"squared": True}, lambda gate, up: F.relu(gate).square() * up),
    Form("reglu", "packed, up first", PACKED, {"up_first": True}, partial(_halves_swapped, F.relu)),
    Form("apply_rope", "q alone (Gemma 4)", Q, {}, _llama, _q_alone),
    Form("apply_rope", "interleaved (Cohere)", QK, PAIRS, partial(_both, _cohere),
         inputs=partial(_rope_inputs, columns="pairs")),
    Form("apply_rope", "latent attention (DeepSeek-V3)", QK, {**HALVED, "rotary_dim": ROTARY_DIM},
         partial(_both, _latent), inputs=_latent_inputs),
    Form("apply_rope", "complex table (Llama 4)", COMPLEX, {**PAIRS, "rotary_dim": HEAD_DIM}, partial(_both, _llama4),
         _complex_table),
    Form("apply_rope", "one column per pair (gpt-oss)", QK, {"rotary_dim": HEAD_DIM}, partial(_both, _rope_gpt_oss),
         inputs=partial(_rope_inputs, columns="one per pair")),
    Form("apply_rope", "opposite direction (nanochat)", QK, {}, partial(_both, _nanochat), _opposite),
    Form("apply_rope", "half of the columns (GLM-4.5)", QK, {"rotary_dim": HEAD_DIM // 2}, partial(_both, _partial),
         inputs=partial(_rope_inputs, width=HEAD_DIM // 2)),
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Sizes and inputs of the forms of some ops."""

    dims: tuple[str, ...]
    size: tuple[int, ...]
    small_size: tuple[int, ...]
    inputs: Callable[[Form, Case, torch.device], Tensors]
    backward_reads_rows: bool  # the rows that get a gradient; a rotation's backward needs the tables only


NORM = Kind(("N", "E"), (8192, 4096), (4, 4096), _norm_inputs, backward_reads_rows=True)
MLP = Kind(("N", "F"), (8192, 14336), (8, 300), _mlp_inputs, backward_reads_rows=True)
ROPE = Kind(("T",), (8192,), (16,), _rope_inputs, backward_reads_rows=False)
KINDS = {"rms_norm": NORM, "layer_norm": NORM, "gated_rms_norm": NORM,
         "swiglu": MLP, "geglu": MLP, "reglu": MLP, "apply_rope": ROPE}  # fmt: skip


def _bytes(tensors: Tensors) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def benchmark_of(form: Form) -> OpBenchmark:
    """Return the benchmark of a form. Its op is the form's label."""
    kind = KINDS[form.op]
    inputs = partial(form.inputs or kind.inputs, form)
    kernel = getattr(ligertune_kernels, form.op)
    takes_eps = {"eps": EPS} if kind is NORM else {}

    def work(case: Case) -> Work:
        """Count the arguments that are read and the results that are written, in each direction."""
        args = inputs(case, torch.device("meta"))
        outputs = _bytes(as_tuple(form.plain(*args)))
        gradients = _bytes(tuple(t for t in args if t.requires_grad))
        kept = _bytes(args) - (0.0 if kind.backward_reads_rows else gradients)
        return Work((_bytes(args) + outputs, outputs + kept + gradients))

    return OpBenchmark(
        op=form.label,
        dims=kind.dims,
        sizes=(kind.size,),
        cpu_sizes=(kind.small_size,),
        args=form.args,
        inputs=inputs,
        row_args=tuple(name for name in form.args if name in ("x", "gate", "up", "packed")),
        work=work,
        reference=lambda case, args: form.plain,
        providers=providers_of(partial(form.call or kernel, **takes_eps, **form.options), eager=form.plain),
    )
