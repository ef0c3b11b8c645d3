r"""Gated delta rule: linear attention whose state forgets, and corrects what it holds for a key before it adds to it.

State S (K, V), decay α = exp(g), learning rate β, for each value head:

    S_t = α_t S_{t-1} + β_t k_t (v_t - α_t k_tᵀ S_{t-1})ᵀ        out_t = scale q_tᵀ S_t

In chunks of C tokens (WY form), with G_i the sum of the document's g in the chunk up to token i. D_ij = exp(G_i - G_j)
for j <= i in the same document, else 0. S is the state before the chunk, m_i = exp(G_i), or 0 for documents that begin
in the chunk:

    A_ij = β_i D_ij k_i·k_j for j < i          T = (I + A)^-1
    v̂    = T β (v - m k S)
    out  = scale (m q S + (D ∘ q kᵀ) v̂)         S ← s S + Σ_j r_j k_j v̂_jᵀ,  r_j = D_last,j,  s = m_last

Backward, from the last chunk to the first, dS being the gradient of the state after the chunk:

    dv̂ = scale (D ∘ q kᵀ)ᵀ dout + r k dS        dS ← s dS + scale (m q)ᵀ dout - (m k)ᵀ β y
    y  = Tᵀ dv̂        dv = β y        dA_ij = -y_i·v̂_j        dβ_i = y_i·(v_i - m_i k_iᵀ S) + Σ_j dA_ij A_ij / β_i
    dq = scale (m dout Sᵀ + (D ∘ dout v̂ᵀ) k)
    dk = scale (D ∘ dout v̂ᵀ)ᵀ q + r v̂ dSᵀ - β m y Sᵀ + (β D ∘ dA) k + (β D ∘ dA)ᵀ k
    dG = q·dq + k·(dk of a reading token) - k·(dk of a token that is read), and s S·dS + Σ r k·(dS v̂) for the last token
    dg = sum of dG over the token's document, from the token to the end of the chunk

Keys of unit length (l2_norm) and their gradients are computed inside. The state, sums and decays are fp32; factors of
products are rounded to the tensors' dtype. The backward keeps the inputs alone and computes T, v̂ and the states again:
per token and value head it takes 2 V + C numbers, 2 K V / C for the states, and 8 in fp32, while it runs.

Every document starts from a state of zeros. A scan over chunks runs in parts: documents that begin in different parts
of a row are computed at the same time. No atomics. Kernels: delta_kernels.py, delta_gradients.py and, for Hopper,
hopper_scans.py; tiles: tiles.py.
Source: Yang, Kautz and Hatamizadeh, arXiv:2412.06464; chunks: Yang et al., arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import autocast_dtype, no_double_backward, without_autocast
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, cached, chip_of
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence import delta_gradients, delta_kernels, tiles
from ligertune_kernels.ops.recurrence.hopper_scans import ScannedChunks, runs_hopper_scans, scan_gradients, scan_states
from ligertune_kernels.ops.recurrence.input_checks import check_documents, check_rule
from ligertune_kernels.ops.recurrence.tiles import PART, REFERENCE_CHUNK, DeltaTile

EPS = 1e-6  # of the norm of q and k


def gated_delta_rule_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gated_delta_rule` and `gated_delta_rule_with_states` in plain torch, in chunks."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = value.shape[2] // key.shape[2]
    n_tokens = query.shape[1]
    q, k = (t.to(wide).repeat_interleave(group, 2) for t in (query, key))
    if l2_norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q = q * query.shape[-1] ** -0.5
    starts = torch.zeros(n_tokens, dtype=torch.int32, device=query.device) if documents is None else documents.starts
    missing = -n_tokens % REFERENCE_CHUNK
    if missing:  # tokens of the last document that change nothing
        starts = torch.cat((starts, starts[-1:].expand(missing)))
    q, k, v, g, b = (_in_chunks(t.to(wide), missing) for t in (q, k, value, decay, beta))
    starts = starts.view(-1, REFERENCE_CHUNK)  # (N, C)
    firsts = torch.arange(len(starts), device=query.device) * REFERENCE_CHUNK

    seen = (starts[:, :, None] == starts[:, None, :]).tril()
    # added up from j to i: a difference of sums since the start of the chunk would lose digits where these are large
    spans = g[..., None].expand(*g.shape, REFERENCE_CHUNK).tril(-1).cumsum(-2)  # (B, X, N, C, C): of g after j up to i
    between = spans.masked_fill(~seen, float("-inf")).exp()
    logs = (seen.to(wide) @ g[..., None])[..., 0]  # (B, X, N, C)
    reads = logs.exp() * (starts < firsts.clamp(min=1)[:, None])
    to_state = between[..., -1, :]
    kept = reads[..., -1]
    identity = torch.eye(REFERENCE_CHUNK, dtype=wide, device=query.device)
    system = (b[..., None] * between * (k @ k.mT)).tril(-1) + identity
    u, w = (
        torch.linalg.solve_triangular(system, t, upper=False, unitriangular=True)
        for t in (b[..., None] * v, (b * reads)[..., None] * k)
    )
    weights = between * (q @ k.mT)
    q = q * reads[..., None]
    k = k * to_state[..., None]
    batch, heads, n_chunks, _, key_dim = k.shape
    state = u.new_zeros(batch, heads, key_dim, v.shape[-1]) if initial_state is None else initial_state.to(wide)
    out = []
    for i in range(n_chunks):
        corrected = u[:, :, i] - w[:, :, i] @ state
        out.append(q[:, :, i] @ state + weights[:, :, i] @ corrected)
        state = kept[:, :, i, None, None] * state + k[:, :, i].mT @ corrected
    joined = torch.cat(out, 2)[:, :, :n_tokens].transpose(1, 2)  # (B, T, X, V)
    return joined.to(query.dtype).contiguous(), state


def _in_chunks(t: torch.Tensor, missing: int) -> torch.Tensor:
    """(B, T, X, ...) -> (B, X, N, C, ...), with zeros for the missing tokens."""
    if missing:
        t = torch.cat((t, t.new_zeros(t.shape[0], missing, *t.shape[2:])), 1)
    return t.unflatten(1, (-1, REFERENCE_CHUNK)).movedim(3, 1)


class _Launch(NamedTuple):
    """A kernel with its constants, and the columns of its programs."""

    launcher: Launcher
    cols: int


class _Launches(NamedTuple):
    """The launches of all kernels."""

    chunk: int  # tokens
    prepare: _Launch
    states: _Launch
    outputs: _Launch
    local: _Launch
    gradients: _Launch
    values: _Launch
    queries: _Launch
    corrections: _Launch
    keys: _Launch
    products: _Launch


class _Shape(NamedTuple):
    """Key of the launches."""

    heads: int
    group: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    l2_norm: bool
    has_documents: bool = False
    has_initial: bool = False
    has_final: bool = False  # forward: the final state is asked for; backward: it has a gradient


@cached
def _launches(shape: _Shape, chip: Chip) -> _Launches:
    chosen = tiles.delta_tiles(max(shape.key_dim, shape.value_dim), shape.dtype.itemsize, chip)
    shared = {
        "HEADS": shape.heads, "GROUP": shape.group, "NORMED": shape.l2_norm, "HAS_DOCUMENTS": shape.has_documents,
        "CHUNK": chosen.chunk, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim,
        "KEYS": tiles.padded(shape.key_dim, chip), "DOT": "ieee",
    }  # fmt: skip
    values = tiles.padded(shape.value_dim, chip)

    def launch(kernel: Callable, tile: DeltaTile, **more: float | bool | str) -> _Launch:
        cols = min(tile.cols, values)
        sizes = {"COLS": cols, "num_warps": tile.warps, "num_stages": tile.stages}
        constants = shared | more | sizes | tiles.delta_options(chip)
        return _Launch(Launcher(kernel, constants), cols)

    scale = {"SCALE": shape.key_dim**-0.5}
    ends = {"HAS_INITIAL": shape.has_initial, "HAS_FINAL": shape.has_final}
    inverse = {"PRECISION": tiles.inverse_precision(shape.dtype.itemsize, chip)}
    return _Launches(
        chunk=chosen.chunk,
        prepare=launch(delta_kernels.prepare_kernel, chosen.prepare, **inverse),
        states=launch(delta_kernels.states_kernel, chosen.states, **ends),
        outputs=launch(delta_kernels.outputs_kernel, chosen.outputs, **scale),
        local=launch(delta_gradients.local_gradients_kernel, chosen.local, **scale),
        gradients=launch(delta_gradients.state_gradients_kernel, chosen.gradients, **ends),
        values=launch(delta_gradients.value_gradients_kernel, chosen.values),
        queries=launch(delta_gradients.query_gradients_kernel, chosen.queries, **scale),
        corrections=launch(delta_gradients.correction_gradients_kernel, chosen.corrections),
        keys=launch(delta_gradients.key_gradients_kernel, chosen.keys, **scale),
        products=launch(delta_gradients.product_gradients_kernel, chosen.products),
    )


class _Inputs(NamedTuple):
    """What autograd keeps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def of(*tensors: torch.Tensor | None) -> _Inputs:
        """Return the inputs. Where one of the last three is None, no kernel reads it, and the decays take its place."""
        return _Inputs(*(tensors[3] if t is None else t for t in tensors))

    def strides(self, *names: str) -> tuple[int, ...]:
        """Return strides of rows, tokens and heads, which Triton specialises on."""
        return tuple(stride for name in names for stride in getattr(self, name).stride()[:3])


class _Prepared(NamedTuple):
    """Results of the first two kernels."""

    logs: torch.Tensor  # (B, T, X) fp32: G
    factors: torch.Tensor  # (B, N, X, 4, C) fp32: of tokens in the scans
    kept: torch.Tensor  # (B, N, X) fp32: s
    t: torch.Tensor  # (B, N, X, C, C)
    corrected: torch.Tensor  # (B, N, X, C, V): v̂
    q_norm: torch.Tensor  # (B, T, H) fp32: 1 / |q|
    k_norm: torch.Tensor  # (B, T, H) fp32: 1 / |k|
    states: torch.Tensor  # (B, N, X, V, K)


def _part(shape: _Shape, n_tokens: int) -> int:
    """Return the tokens of a part of a row, in which a program of a scan looks for its documents."""
    return min(PART, n_tokens) if shape.has_documents else n_tokens


def _prepare(x: _Inputs, shape: _Shape, chip: Chip, final_state: torch.Tensor) -> _Prepared:
    batch, n_tokens, heads, key_dim = x.k.shape
    value_heads, value_dim = x.v.shape[2:]
    launches = _launches(shape, chip)
    chunk = launches.chunk
    n_chunks = -(-n_tokens // chunk)
    logs = torch.empty(x.decay.shape, dtype=torch.float32, device=x.q.device)
    factors = logs.new_empty((batch, n_chunks, value_heads, 4, chunk))
    kept = logs.new_empty((batch, n_chunks, value_heads))
    t = x.q.new_empty((batch, n_chunks, value_heads, chunk, chunk))
    corrected = x.q.new_empty((batch, n_chunks, value_heads, chunk, value_dim))
    of_norms = (batch, n_tokens, heads) if shape.l2_norm else (0,)
    q_norm, k_norm = (torch.empty(of_norms, dtype=torch.float32, device=x.q.device) for _ in range(2))
    states = x.q.new_empty((batch, n_chunks, value_heads, value_dim, key_dim))
    launches.prepare.launcher(
        (n_chunks, value_heads, batch),
        (x.q, x.k, x.decay, x.beta, x.starts, logs, factors, kept, t, q_norm, k_norm),
        x.strides("q", "k"), n_tokens, n_chunks,
    )  # fmt: skip
    part = _part(shape, n_tokens)
    if not (shape.has_initial or shape.has_final) and runs_hopper_scans(chip, x.k, x.v):
        chunks = ScannedChunks(t, factors, kept, x.starts, x.ends, part, shape.has_documents)
        scan_states(x.k, x.v, chunks, states, corrected)
        return _Prepared(logs, factors, kept, t, corrected, q_norm, k_norm, states)
    columns = -(-value_dim // launches.states.cols)
    launches.states.launcher(
        (columns, value_heads, batch * -(-n_tokens // part)),
        (x.k, x.v, t, factors, kept, x.starts, x.ends, x.initial_state, states, final_state, corrected),
        x.strides("k", "v"), n_tokens, n_chunks, part,
    )  # fmt: skip
    return _Prepared(logs, factors, kept, t, corrected, q_norm, k_norm, states)


def _scan_back(
    x: _Inputs, made: _Prepared, shape: _Shape, d_out: torch.Tensor, d_final: torch.Tensor, d_read: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return y, dS after each chunk and the gradient of the initial state, which come from later tokens.

    d_read (B, T, X, V): memory for what the gradient of the state gets for each query.
    """
    chip = chip_of(x.q.device)
    launches = _launches(shape, chip)
    n_tokens = x.q.shape[1]
    batch, n_chunks, value_heads, chunk, value_dim = made.corrected.shape
    norms = made.logs, made.q_norm, made.k_norm
    y = made.corrected.new_empty((batch, n_chunks, value_heads, value_dim, chunk))
    launches.local.launcher(
        (n_chunks, value_heads, batch),
        (x.q, x.k, d_out, *norms, x.starts, y, d_read), x.strides("q", "k"), n_tokens, n_chunks,
    )  # fmt: skip
    d_states = torch.empty_like(made.states)
    d_initial = torch.empty(
        x.initial_state.shape if shape.has_initial else (0,), dtype=torch.float32, device=d_out.device
    )
    d_final = d_final.contiguous() if shape.has_final else d_out
    part = _part(shape, n_tokens)
    if not (shape.has_initial or shape.has_final) and runs_hopper_scans(chip, x.q, x.k, d_read):
        chunks = ScannedChunks(made.t, made.factors, made.kept, x.starts, x.ends, part, shape.has_documents)
        scan_gradients(x.q, x.k, d_read, chunks, y, d_states)
        return y, d_states, None
    columns = -(-value_dim // launches.gradients.cols)
    launches.gradients.launcher(
        (columns, value_heads, batch * -(-n_tokens // part)),
        (x.q, x.k, made.t, d_read, made.factors, made.kept, x.starts, x.ends, d_final, y, d_states, d_initial),
        x.strides("q", "k"), n_tokens, n_chunks, part,
    )  # fmt: skip
    return y, d_states, d_initial if shape.has_initial else None


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shape, *inputs):
        x = _Inputs.of(*inputs)
        chip = chip_of(x.q.device)
        batch, n_tokens, value_heads, value_dim = x.v.shape
        final_state = x.decay.new_empty(
            (batch, value_heads, value_dim, shape.key_dim) if shape.has_final else (0,), dtype=torch.float32
        )
        made = _prepare(x, shape, chip, final_state)
        out = x.q.new_empty(x.v.shape)
        n_chunks = made.states.shape[1]
        _launches(shape, chip).outputs.launcher(
            (n_chunks, value_heads, batch),
            (x.q, x.k, made.corrected, made.logs, made.q_norm, made.k_norm, x.starts, made.states, out),
            x.strides("q", "k"), n_tokens, n_chunks,
        )  # fmt: skip
        ctx.save_for_backward(*inputs)
        ctx.shape = shape
        if not shape.has_final:
            ctx.mark_non_differentiable(final_state)
        return out, final_state

    @staticmethod
    @no_double_backward
    def backward(ctx, d_out, d_final):
        x = _Inputs.of(*ctx.saved_tensors)
        shape = ctx.shape
        chip = chip_of(x.q.device)
        batch, n_tokens, heads, _ = x.k.shape
        d_out = d_out.contiguous()
        # without a gradient of the final state, the kernel that computes this state again need not store it
        made = _prepare(x, shape._replace(has_final=False), chip, x.decay)
        launches = _launches(shape, chip)
        n_chunks = made.states.shape[1]
        chunks_of_keys = (n_chunks, heads, batch)
        norms = made.logs, made.q_norm, made.k_norm

        dv = x.v.new_empty(x.v.shape)
        y, d_states, d_initial = _scan_back(x, made, shape, d_out, d_final, d_read=dv)
        partial_d_beta = torch.empty_like(made.logs)
        launches.values.launcher(
            (n_chunks, x.v.shape[2], batch),
            (x.v, y, x.beta, dv, partial_d_beta), x.strides("v"), n_tokens, n_chunks,
        )  # fmt: skip
        dq = x.q.new_empty(x.q.shape)
        d_logs = torch.empty_like(made.logs)
        launches.queries.launcher(
            chunks_of_keys,
            (x.q, x.k, made.corrected, d_out, *norms, made.kept, x.starts, made.states, d_states, dq, d_logs),
            x.strides("q", "k"), n_tokens, n_chunks,
        )  # fmt: skip
        d_beta = x.beta.new_empty(x.beta.shape)
        partial_dk = torch.empty(x.k.shape, dtype=torch.float32, device=d_out.device)
        launches.corrections.launcher(
            chunks_of_keys,
            (x.k, made.corrected, y, x.beta, made.logs, made.k_norm, x.starts, made.states, partial_dk,
             partial_d_beta, d_beta, d_logs),
            x.strides("k"), n_tokens, n_chunks,
        )  # fmt: skip
        launches.keys.launcher(
            chunks_of_keys,
            (x.q, x.k, made.corrected, d_out, *norms, x.starts, d_states, partial_dk, d_logs),
            x.strides("q", "k"), n_tokens, n_chunks,
        )  # fmt: skip
        dk = x.k.new_empty(x.k.shape)
        d_decay = x.decay.new_empty(x.decay.shape)
        launches.products.launcher(
            chunks_of_keys,
            (x.k, made.corrected, y, x.beta, made.logs, made.k_norm, x.starts, partial_dk, d_logs, dk, d_decay),
            x.strides("k"), n_tokens, n_chunks,
        )  # fmt: skip
        return None, dq, dk, dv, d_decay, d_beta, d_initial, None, None


def gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V), H divides X: neighbouring value heads share a key head
    decay: torch.Tensor,  # (B, T, X): logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    *,
    l2_norm: bool = False,
    documents: Documents | None = None,
) -> torch.Tensor:  # (B, T, X, V) contiguous
    """Compute the gated delta rule of each row, from a state of zeros. Deterministic.

    l2_norm: first scale each query and each key to an L2 norm of 1. documents: of a packed row (B = 1); each starts
    from a state of zeros. Under autocast query, key and value are converted to its dtype. The reference runs for heads
    wider than 256, and wider than 128 in float32, except on CDNA.

    Raises ValueError on mismatched shapes, dtypes or devices, TypeError for what is no tensor.
    """
    check_rule("gated_delta_rule", query, key, value, decay, beta)
    check_documents("gated_delta_rule", documents, value)
    if value.numel() == 0:
        return value * _zero(query, key, decay, beta).to(value.dtype)
    query, key, value = autocast(query, key, value)
    if not tiles.runs_delta_kernels(query, max(key.shape[-1], value.shape[-1])):
        with without_autocast(query.device):
            return gated_delta_rule_reference(query, key, value, decay, beta, l2_norm=l2_norm, documents=documents)[0]
    shape = _shape(key, value, l2_norm)._replace(has_documents=documents is not None)
    decay = decay.contiguous()
    starts, ends = (None, None) if documents is None else (places.contiguous() for places in documents[:2])
    out, _ = _GatedDeltaRule.apply(shape, *_rows(query, key, value), decay, beta.contiguous(), None, starts, ends)
    return out


def gated_delta_rule_with_states(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    decay: torch.Tensor,  # (B, T, X)
    beta: torch.Tensor,  # (B, T, X)
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,  # (B, X, K, V)
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, T, X, V) contiguous; (B, X, K, V) float32
    """Compute `gated_delta_rule` from a state, or zeros, and the state after the last token; both have gradients."""
    check_rule("gated_delta_rule", query, key, value, decay, beta, initial_state)
    batch, _, value_heads, value_dim = value.shape
    if value.numel() == 0:
        zero = _zero(query, key, value, decay, beta)
        dtype = torch.promote_types(value.dtype, torch.float32)
        state = value.new_zeros((batch, value_heads, key.shape[-1], value_dim), dtype=dtype)
        state = state if initial_state is None else initial_state.to(dtype)
        return value * zero.to(value.dtype), state + zero.to(dtype)
    query, key, value = autocast(query, key, value)
    if not tiles.runs_delta_kernels(query, max(key.shape[-1], value_dim)):
        with without_autocast(query.device):
            return gated_delta_rule_reference(
                query, key, value, decay, beta, l2_norm=l2_norm, initial_state=initial_state
            )
    shape = _shape(key, value, l2_norm)._replace(has_initial=initial_state is not None, has_final=True)
    decay = decay.contiguous()
    initial = None if initial_state is None else initial_state.mT.contiguous()
    inputs = *_rows(query, key, value), decay, beta.contiguous(), initial
    out, final_state = _GatedDeltaRule.apply(shape, *inputs, None, None)
    return out, final_state.mT.contiguous()


def _zero(*tensors: torch.Tensor) -> torch.Tensor:
    """Return 0, the sum of tensors without elements, with gradients for all of them."""
    return sum(t.sum() for t in tensors)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors in the dtype of autocast, where it is on."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None or tensors[0].dtype is torch.float64:
        return tensors
    return tuple(t.to(dtype) for t in tensors)


def _shape(key: torch.Tensor, value: torch.Tensor, l2_norm: bool) -> _Shape:
    heads, key_dim = key.shape[2:]
    value_heads, value_dim = value.shape[2:]
    return _Shape(heads, value_heads // heads, key_dim, value_dim, key.dtype, l2_norm)


def _rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors with unit column stride."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)
