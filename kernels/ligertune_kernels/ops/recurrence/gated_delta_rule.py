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

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, cached, chip_of
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence import delta_gradients, delta_kernels, tiles
from ligertune_kernels.ops.recurrence.delta_frame import (
    ChunkTerms,
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    chunked_inputs,
    scan_chunks,
)
from ligertune_kernels.ops.recurrence.hopper_scans import ScannedChunks, runs_hopper_scans, scan_gradients, scan_states
from ligertune_kernels.ops.recurrence.tiles import REFERENCE_CHUNK, DeltaTile


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
    options = {"l2_norm": l2_norm, "documents": documents, "chunk": REFERENCE_CHUNK}
    x = chunked_inputs(query, key, value, decay, beta, **options)
    # added up from j to i: a difference of sums since the start of the chunk would lose digits where these are large
    spans = x.decay[..., None].expand(*x.decay.shape, REFERENCE_CHUNK).tril(-1).cumsum(-2)  # of g after j up to i
    between = spans.masked_fill(~x.seen, float("-inf")).exp()  # (B, X, N, C, C)
    logs = (x.seen.to(x.q.dtype) @ x.decay[..., None])[..., 0]
    reads = logs.exp() * x.reads_state  # (B, X, N, C)
    terms = ChunkTerms(
        products=between * (x.k @ x.k.mT),
        weights=between * (x.q @ x.k.mT),
        read=x.q * reads[..., None],
        erased=x.k * reads[..., None],
        written=x.k * between[..., -1, :, None],
        kept=reads[..., -1, None, None],
    )
    return scan_chunks(x, terms, initial_state)


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


@cached
def _launches(shape: DeltaShape, chip: Chip) -> _Launches:
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


def _prepare(x: DeltaInputs, shape: DeltaShape, chip: Chip, final_state: torch.Tensor) -> _Prepared:
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
    part = shape.part(n_tokens)
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
    x: DeltaInputs, made: _Prepared, shape: DeltaShape, d_out: torch.Tensor, d_final: torch.Tensor, d_read: torch.Tensor
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
    part = shape.part(n_tokens)
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
        x = DeltaInputs.of(*inputs)
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
        x = DeltaInputs.of(*ctx.saved_tensors)
        shape = ctx.shape
        chip = chip_of(x.q.device)
        batch, n_tokens, heads, _ = x.k.shape
        d_out = d_out.contiguous()
        # without a gradient of the final state, the kernel that computes this state again need not store it
        made = _prepare(x, shape._replace(has_final=False), chip, x.beta)
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


_RULE = DeltaRule("gated_delta_rule", _GatedDeltaRule, gated_delta_rule_reference, tiles.runs_delta_kernels)


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
    return _RULE.of_rows(query, key, value, decay, beta, l2_norm=l2_norm, documents=documents)


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
    return _RULE.with_states(query, key, value, decay, beta, l2_norm=l2_norm, initial_state=initial_state)
