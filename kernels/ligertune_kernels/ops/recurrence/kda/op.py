r"""Kimi's delta attention (KDA): the gated delta rule with a decay for each key channel.

State S (K, V), decays exp(g_t) (K,), learning rate β, for each value head:

    S_t = (I - β_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ        out_t = scale q_tᵀ S_t

In chunks of C tokens (WY form). D_ijc = exp(g_{j+1} + ... + g_i)_c for j <= i in the same document, else 0. S is the
state before the chunk, m_i = exp(g_1 + ... + g_i) (K,), or 0 for documents that begin in the chunk:

    A_ij = β_i Σ_c k_ic k_jc D_ijc for j < i          T = (I + A)^-1        W_ij = scale Σ_c q_ic k_jc D_ijc for j <= i
    u    = T β v          w = -T β (m ∘ k)            v̂ = u + w S
    out  = scale (m ∘ q) S + W v̂                      S ← diag(s) S + (r ∘ k)ᵀ v̂,  r_j = D_last,j,  s = m_last

Backward, from the last chunk to the first, dS being the gradient of the state after the chunk:

    dv̂ = Wᵀ dout + (r ∘ k) dS        dS ← diag(s) dS + scale (m ∘ q)ᵀ dout + wᵀ dv̂
    y  = Tᵀ dv̂        dv = β y        dA_ij = -y_i·v̂_j        dW_ij = dout_i·v̂_j
    dq_ic = scale (m ∘ dout Sᵀ + Σ_j dW_ij k_jc D_ijc)
    z_ic  = -m ∘ y Sᵀ + Σ_j dA_ij k_jc D_ijc                     a key that reads, without β: dβ_i = y_i·v_i + k_i·z_i
    x_jc  = r ∘ v̂ dSᵀ + Σ_i (scale dW_ij q_ic + β_i dA_ij k_ic) D_ijc            a key that is read:  dk = β z + x
    dG    = q ∘ dq + k ∘ (β z - x), without the terms of j = i
    dg    = sum of dG over the token's document, from the token to the end of the chunk; for the document of the last
            token also s S·dS + Σ_j k_j ∘ r_j ∘ (v̂ dSᵀ)_j, channel by channel

D stands inside of sums over channels. decay_levels.py turns them into products whose exponents are sums of decays and
never positive: nothing overflows, whatever the decays.

Keys of unit length (l2_norm) and their gradients are computed inside. The state, sums and decays are fp32; factors of
products are rounded to the tensors' dtype. The backward keeps the inputs alone and computes all else again: per token
and value head it takes 3 K + 2 V + 4 C numbers, 2 K V / C for the states, and 2 K in fp32, while it runs.

Every document starts from a state of zeros. A scan over chunks runs in parts, as that of the gated delta rule. No
atomics. Kernels: kernels.py, kda_gradients.py; tiles: tiles.py.
Source: Kimi Linear, arXiv:2510.26692; chunks: Yang et al., arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import Launcher, cached, chip_of
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence.delta_frame import (
    ChunkTerms,
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    chunked_inputs,
    scan_chunks,
)
from ligertune_kernels.ops.recurrence.kda import kda_gradients, kernels, tiles
from ligertune_kernels.ops.recurrence.kda.tiles import REFERENCE_CHUNK
from ligertune_kernels.ops.recurrence.tiles import delta_options, inverse_precision, padded


def kda_reference(
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
    """Compute `kda` and `kda_with_states` in plain torch, in chunks."""
    options = {"l2_norm": l2_norm, "documents": documents, "chunk": REFERENCE_CHUNK}
    x = chunked_inputs(query, key, value, decay, beta, **options)
    later = torch.ones(REFERENCE_CHUNK, REFERENCE_CHUNK, dtype=torch.bool, device=query.device).tril(-1)
    # added up from j to i: a difference of sums since the start of the chunk would lose digits where these are large
    spans = x.decay[..., :, None, :].masked_fill(~later[..., None], 0).cumsum(-3)  # of g after j up to i
    between = spans.masked_fill(~x.seen[..., None], float("-inf")).exp()  # (B, X, N, C, C, K)
    reads = (x.seen.to(x.q.dtype) @ x.decay).exp() * x.reads_state[..., None]  # (B, X, N, C, K)
    decayed = between * x.k[..., None, :, :]
    terms = ChunkTerms(
        products=(decayed @ x.k[..., None])[..., 0],
        weights=(decayed @ x.q[..., None])[..., 0],
        read=x.q * reads,
        erased=x.k * reads,
        written=decayed[..., -1, :, :],
        kept=reads[..., -1, :, None],
    )
    return scan_chunks(x, terms, initial_state)


class _Launches(NamedTuple):
    """The launches of all kernels."""

    chunk: int  # tokens
    key_tokens: int  # of a program of `keys`
    state_cols: int  # columns of v of a program of `states`
    scan_cols: int  # of `scan`
    parts: int  # of the gradient of beta: that of v, and those of the programs of `readers`
    products: Launcher
    factors: Launcher
    states: Launcher
    outputs: Launcher
    local: Launcher
    scan: Launcher
    values: Launcher
    readers: Launcher
    decays: Launcher
    keys: Launcher


class _Constants(NamedTuple):
    """Constants that several kernels take."""

    scan: dict[str, int | bool | str]  # kernels of a scan over chunks
    by_chunk: dict[str, int | str]  # kernels of one chunk and value head without decays
    by_level: dict[str, int | bool | str]  # kernels of one chunk and value head with decays

    @staticmethod
    def of(shape: DeltaShape, chunk: int, chip: Chip) -> _Constants:
        """Return the constants for chunks of so many tokens."""
        sizes = {"CHUNK": chunk, "VALUE_DIM": shape.value_dim, "DOT": "ieee"}
        by_chunk = sizes | {"VALUE_HEADS": shape.heads * shape.group}
        scan = by_chunk | {
            "HAS_DOCUMENTS": shape.has_documents, "HAS_INITIAL": shape.has_initial, "HAS_FINAL": shape.has_final,
            "KEY_DIM": shape.key_dim, "KEYS": padded(shape.key_dim, chip),
        }  # fmt: skip
        by_level = sizes | {
            "HEADS": shape.heads, "GROUP": shape.group, "NORMED": shape.l2_norm, "HAS_DOCUMENTS": shape.has_documents,
            "LEVELS": chunk.bit_length() - 1, "KEY_DIM": shape.key_dim, "SPLIT": shape.dtype.itemsize == 2,
        }  # fmt: skip
        return _Constants(scan, by_chunk, by_level)


def _launcher(
    kernel: Callable, tile: tiles.KdaTile | tiles.ChannelTile, chip: Chip, *constants: dict[str, object], **more: object
) -> Launcher:
    options = {"num_warps": tile.warps, "num_stages": tile.stages} | delta_options(chip)
    for shared in constants:
        options |= shared
    return Launcher(kernel, options | more)


@cached
def _launches(shape: DeltaShape, chip: Chip) -> _Launches:
    chosen = tiles.kda_tiles(max(shape.key_dim, shape.value_dim), shape.dtype.itemsize, chip)
    of = _Constants.of(shape, chosen.chunk, chip)
    keys = padded(shape.key_dim, chip)
    values = padded(shape.value_dim, chip)
    channels = min(chosen.readers.cols, keys)
    parts = 1 + -(-shape.key_dim // channels)
    precision = {"PRECISION": inverse_precision(shape.dtype.itemsize, chip)}
    scale = {"SCALE": shape.key_dim**-0.5}
    of_parts = {"COLS": channels, "VALUES": min(chosen.readers.values, values), "PARTS": parts}
    heads = {name: of.by_level[name] for name in ("HEADS", "GROUP", "NORMED", "KEY_DIM")}

    def launch(kernel: Callable, tile: tiles.KdaTile, *constants: dict[str, object], width: int = values) -> Launcher:
        return _launcher(kernel, tile, chip, *constants, COLS=min(tile.cols, width))

    return _Launches(
        chunk=chosen.chunk,
        key_tokens=chosen.keys.cols,
        state_cols=min(chosen.states.cols, values),
        scan_cols=min(chosen.scan.cols, values),
        parts=parts,
        products=launch(kernels.kda_products_kernel, chosen.products, of.by_level, precision, scale, width=keys),
        factors=launch(kernels.kda_factors_kernel, chosen.factors, of.by_level, scale, width=max(keys, values)),
        states=launch(kernels.kda_states_kernel, chosen.states, of.scan),
        outputs=launch(
            kernels.kda_outputs_kernel, chosen.outputs, of.by_chunk, {"KEY_DIM": shape.key_dim, "KEYS": keys}
        ),
        local=launch(kda_gradients.kda_local_gradients_kernel, chosen.local, of.by_chunk),
        scan=launch(kda_gradients.kda_state_gradients_kernel, chosen.scan, of.scan),
        values=launch(
            kda_gradients.kda_value_gradients_kernel, chosen.values, of.by_chunk, scale, {"PARTS": parts}
        ),
        readers=_launcher(
            kda_gradients.kda_reader_gradients_kernel, chosen.readers, chip, of.by_level, of_parts, scale
        ),
        decays=_launcher(
            kda_gradients.kda_decay_gradients_kernel, chosen.decays, chip, of.by_level, of_parts, precision
        ),
        keys=_launcher(
            kda_gradients.kda_key_gradients_kernel, chosen.keys, chip, heads, KEYS=keys, PARTS=parts,
            TOKENS=chosen.keys.cols,
        ),
    )  # fmt: skip


class _Prepared(NamedTuple):
    """What the first three kernels have written."""

    t: torch.Tensor  # (B, N, X, C, C)
    weights: torch.Tensor  # (B, N, X, C, C)
    q_norm: torch.Tensor  # (B, T, H) fp32: 1 / |q|
    k_norm: torch.Tensor  # (B, T, H) fp32: 1 / |k|
    read: torch.Tensor  # (B, N, X, C, K): scale m q
    written: torch.Tensor  # (B, N, X, C, K): r k
    erased: torch.Tensor  # (B, N, X, C, K): w
    kept: torch.Tensor  # (B, N, X, K) fp32: s
    corrected: torch.Tensor  # (B, N, X, V, C): v̂
    states: torch.Tensor  # (B, N, X, V, K)


def _prepare(x: DeltaInputs, shape: DeltaShape, chip: Chip, final_state: torch.Tensor) -> _Prepared:
    batch, n_tokens, heads, key_dim = x.k.shape
    value_heads, value_dim = x.v.shape[2:]
    launches = _launches(shape, chip)
    chunk = launches.chunk
    n_chunks = -(-n_tokens // chunk)
    places = (batch, n_chunks, value_heads)
    t, weights = (x.q.new_empty((*places, chunk, chunk)) for _ in range(2))
    of_norms = (batch, n_tokens, heads) if shape.l2_norm else (0,)
    q_norm, k_norm = (torch.empty(of_norms, dtype=torch.float32, device=x.q.device) for _ in range(2))
    launches.products(
        (n_chunks, value_heads, batch),
        (x.q, x.k, x.decay, x.beta, x.starts, t, weights, q_norm, k_norm),
        x.strides("q", "k", "decay"), n_tokens, n_chunks,
    )  # fmt: skip
    read, written, erased = (x.q.new_empty((*places, chunk, key_dim)) for _ in range(3))
    corrected = x.q.new_empty((*places, value_dim, chunk))
    kept = q_norm.new_empty((*places, key_dim))
    launches.factors(
        (n_chunks, value_heads, batch),
        (x.q, x.k, x.decay, x.v, x.beta, q_norm, k_norm, x.starts, t, read, written, erased, corrected, kept),
        x.strides("q", "k", "decay", "v"), n_tokens, n_chunks,
    )  # fmt: skip
    states = x.q.new_empty((*places, value_dim, key_dim))
    part = shape.part(n_tokens)
    launches.states(
        (-(-value_dim // launches.state_cols), value_heads, batch * -(-n_tokens // part)),
        (erased, written, kept, x.starts, x.ends, x.initial_state, states, final_state, corrected),
        (), n_tokens, n_chunks, part,
    )  # fmt: skip
    return _Prepared(t, weights, q_norm, k_norm, read, written, erased, kept, corrected, states)


def _scan_back(
    x: DeltaInputs, made: _Prepared, shape: DeltaShape, d_out: torch.Tensor, d_final: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dv̂, dS after each chunk and the gradient of the initial state."""
    launches = _launches(shape, chip_of(x.q.device))
    batch, n_tokens = x.q.shape[:2]
    n_chunks = made.states.shape[1]
    value_heads, value_dim = x.v.shape[2:]
    d_corrected = torch.empty_like(made.corrected)
    launches.local(
        (n_chunks, value_heads, batch), (made.weights, d_out, d_corrected), (), n_tokens, n_chunks
    )  # fmt: skip
    d_states = torch.empty_like(made.states)
    d_initial = torch.empty(
        x.initial_state.shape if shape.has_initial else (0,), dtype=torch.float32, device=d_out.device
    )
    d_final = d_final.contiguous() if shape.has_final else d_out
    part = shape.part(n_tokens)
    launches.scan(
        (-(-value_dim // launches.scan_cols), value_heads, batch * -(-n_tokens // part)),
        (made.read, made.written, made.erased, d_out, made.kept, x.starts, x.ends, d_final, d_corrected, d_states,
         d_initial),
        (), n_tokens, n_chunks, part,
    )  # fmt: skip
    return d_corrected, d_states, d_initial if shape.has_initial else None


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shape, *inputs):
        x = DeltaInputs.of(*inputs)
        chip = chip_of(x.q.device)
        batch, n_tokens, value_heads, value_dim = x.v.shape
        final_state = torch.empty(
            (batch, value_heads, value_dim, shape.key_dim) if shape.has_final else (0,),
            dtype=torch.float32, device=x.q.device,
        )  # fmt: skip
        made = _prepare(x, shape, chip, final_state)
        out = x.q.new_empty(x.v.shape)
        n_chunks = made.states.shape[1]
        _launches(shape, chip).outputs(
            (n_chunks, value_heads, batch),
            (made.read, made.weights, made.corrected, made.states, out), (), n_tokens, n_chunks,
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
        batch, n_tokens, heads, key_dim = x.k.shape
        value_heads = x.v.shape[2]
        d_out = d_out.contiguous()
        # without a gradient of the final state, the kernel that computes this state again need not store it
        made = _prepare(x, shape._replace(has_final=False), chip, x.beta)
        launches = _launches(shape, chip)
        n_chunks = made.states.shape[1]
        y, d_states, d_initial = _scan_back(x, made, shape, d_out, d_final)
        dv = x.v.new_empty(x.v.shape)
        d_beta_parts = made.kept.new_empty((batch, n_tokens, value_heads, launches.parts))
        d_products, d_weights = (torch.empty_like(made.t) for _ in range(2))
        launches.values(
            (n_chunks, value_heads, batch),
            (x.v, d_out, x.beta, made.t, made.corrected, y, dv, d_beta_parts, d_products, d_weights),
            x.strides("v"), n_tokens, n_chunks,
        )  # fmt: skip
        of_keys = (batch, n_tokens, value_heads, key_dim)
        dq_of_units, dk_of_units = (made.kept.new_empty(of_keys) for _ in range(2))
        d_decay = x.decay.new_empty(x.decay.shape)
        launches.readers(
            (n_chunks * (launches.parts - 1), value_heads, batch),
            (x.k, x.decay, d_out, x.beta, made.k_norm, x.starts, y, made.states, d_products, d_weights, dq_of_units,
             dk_of_units, d_beta_parts),
            x.strides("k", "decay"), n_tokens, n_chunks,
        )  # fmt: skip
        launches.decays(
            (n_chunks * (launches.parts - 1), value_heads, batch),
            (x.q, x.k, x.decay, x.beta, made.q_norm, made.k_norm, x.starts, made.corrected, made.states, d_states,
             d_products, d_weights, dq_of_units, dk_of_units, d_decay),
            x.strides("q", "k", "decay"), n_tokens, n_chunks,
        )  # fmt: skip
        dq = x.q.new_empty(x.q.shape)
        dk = x.k.new_empty(x.k.shape)
        d_beta = x.beta.new_empty(x.beta.shape)
        launches.keys(
            (-(-n_tokens // launches.key_tokens), heads, batch),
            (x.q, x.k, made.q_norm, made.k_norm, dq_of_units, dk_of_units, d_beta_parts, dq, dk, d_beta),
            x.strides("q", "k"), n_tokens,
        )  # fmt: skip
        return None, dq, dk, dv, d_decay, d_beta, d_initial, None, None


_RULE = DeltaRule("kda", _Kda, kda_reference, tiles.runs_kda_kernels, decays_of_channels=True)


def kda(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V), H divides X: neighbouring value heads share a key head
    decay: torch.Tensor,  # (B, T, X, K): logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    *,
    l2_norm: bool = False,
    documents: Documents | None = None,
) -> torch.Tensor:  # (B, T, X, V) contiguous
    """Compute Kimi's delta attention of each row, from a state of zeros. Deterministic.

    l2_norm: first scale each query and each key to an L2 norm of 1. documents: of a packed row (B = 1); each starts
    from a state of zeros. Under autocast query, key and value are converted to its dtype. The reference runs for heads
    wider than 256, and wider than 128 in float32, except on CDNA.

    Raises ValueError on mismatched shapes, dtypes or devices, TypeError for what is no tensor.
    """
    return _RULE.of_rows(query, key, value, decay, beta, l2_norm=l2_norm, documents=documents)


def kda_with_states(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    decay: torch.Tensor,  # (B, T, X, K)
    beta: torch.Tensor,  # (B, T, X)
    *,
    l2_norm: bool = False,
    initial_state: torch.Tensor | None = None,  # (B, X, K, V)
) -> tuple[torch.Tensor, torch.Tensor]:  # (B, T, X, V) contiguous; (B, X, K, V) float32
    """Compute `kda` from a state, or zeros, and the state after the last token; both have gradients."""
    return _RULE.with_states(query, key, value, decay, beta, l2_norm=l2_norm, initial_state=initial_state)
