"""Triton kernels of kda: four forward, and the three of them that the backward runs again.

    products    chunk, value head                  T, weights W, and 1 / |k|, 1 / |q|
    factors     chunk, value head                  decayed queries and keys, w = -T β m k, u = T β v
    states      part of a row, value head          S before each chunk, and v̂ over u
    outputs     chunk, value head                  out

Chunks, parts of a row, documents and the transposed states are those of the gated delta rule: delta_kernels.py. With a
decay per channel the scan has no factors of tokens: all decays but those of the state are inside of w, and of the keys.
Decays between tokens: decay_levels.py.

q, k (B, T, H, K), decay (B, T, X, K) and v (B, T, X, V) have unit column stride, X value heads, GROUP = X / H. Tensors
that kernels hand to each other are contiguous.
"""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.recurrence.chunks import (
    identity,
    inverse_lengths,
    is_owned,
    load_chunk,
    load_numbers,
    load_starts,
    load_tile,
    owned_tokens,
    part_of_row,
    store_chunk,
    store_tile,
)
from ligertune_kernels.ops.recurrence.delta_kernels import NORM_EPS, unit_triangular_inverse
from ligertune_kernels.ops.recurrence.kda.decay_levels import (
    factors_from_state,
    factors_of_state,
    factors_to_state,
    level_factors,
    level_pairs,
    split_decays,
)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_products_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    decay_ptr,  # (B, T, X, K)
    beta_ptr,  # (B, T, X)
    starts_ptr,  # (T,) int32
    t_ptr, weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32: 1 / |q|, 1 / |k|
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    g_batch_stride, g_token_stride, g_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write W_ij = scale q_i·k_j and T = (I + β k_i·k_j)^-1, both decayed from j to i, by levels."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    tokens = first + rows
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    decay_row_ptr = decay_ptr + batch * g_batch_stride + value_head * g_head_stride
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    own = tl.zeros([CHUNK], tl.float32)  # q_i·k_i
    q_squares = tl.zeros([CHUNK], tl.float32)
    k_squares = tl.zeros([CHUNK], tl.float32)
    for own_col in range(0, KEY_DIM, COLS):  # a loop of its own: its tiles would take registers of the other's
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, own_col, KEY_DIM, CHUNK, COLS).to(tl.float32)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, own_col, KEY_DIM, CHUNK, COLS).to(tl.float32)
        own += tl.sum(q * k, 1)
        if NORMED:
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
    weights = tl.zeros([CHUNK, CHUNK], tl.float32)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for col in range(0, KEY_DIM, COLS):
        decays = load_chunk(decay_row_ptr, first, n_tokens, g_token_stride, col, KEY_DIM, CHUNK, COLS)
        high, low = split_decays(decays, SPLIT)
        for level in range(LEVELS):
            factors = level_factors(high, low, level, CHUNK, SPLIT)
            pairs = level_pairs(starts - first, level, CHUNK)
            # the compiler cannot know that this is 0: it would load the tiles once, and keep them in registers
            again = tl.minimum(level, 0)
            k = load_chunk(k_row_ptr, first + again, n_tokens, k_token_stride, col, KEY_DIM, CHUNK, COLS)
            k_decayed = (k.to(tl.float32) * factors).to(k.dtype)
            products += tl.where(pairs, tl.dot(k_decayed, tl.trans(k_decayed), input_precision=DOT), 0.0)
            q = load_chunk(q_row_ptr, first + again, n_tokens, q_token_stride, col, KEY_DIM, CHUNK, COLS)
            q_decayed = (q.to(tl.float32) * factors).to(q.dtype)
            weights += tl.where(pairs, tl.dot(q_decayed, tl.trans(k_decayed), input_precision=DOT), 0.0)

    q_scale = tl.full([CHUNK], SCALE, tl.float32)
    k_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        q_norm = tl.rsqrt(q_squares + NORM_EPS)
        q_scale *= q_norm
        k_scale = tl.rsqrt(k_squares + NORM_EPS)
        if value_head % GROUP == 0:  # else another program writes them
            at_norms = batch * n_tokens * HEADS + head + tokens.to(tl.int64) * HEADS
            tl.store(q_norm_ptr + at_norms, q_norm, mask=tokens < n_tokens)
            tl.store(k_norm_ptr + at_norms, k_scale, mask=tokens < n_tokens)
    weights = tl.where(rows[:, None] == rows[None, :], own[:, None], weights)
    weights *= q_scale[:, None] * k_scale[None, :]
    at_tile = ((batch * n_chunks + chunk) * value_heads + value_head) * CHUNK * CHUNK
    store_tile(weights_ptr + at_tile, weights, True, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK, KEEP_ALL=True)
    beta = load_numbers(beta_ptr + batch * n_tokens * value_heads + value_head, tokens, n_tokens, value_heads)
    products *= (beta.to(tl.float32) * k_scale)[:, None] * k_scale[None, :]
    t = unit_triangular_inverse(products, CHUNK, PRECISION)
    store_tile(t_ptr + at_tile, t, True, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_factors_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    decay_ptr,  # (B, T, X, K)
    v_ptr,  # (B, T, X, V)
    beta_ptr,  # (B, T, X)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    read_ptr,  # (B, T / CHUNK, X, CHUNK, K): scale m q, what reads the state
    written_ptr,  # (B, T / CHUNK, X, CHUNK, K): r k, what is written to it
    erased_ptr,  # (B, T / CHUNK, X, CHUNK, K): w = -T β m k
    corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK): u = T β v
    kept_ptr,  # (B, T / CHUNK, X, K) fp32: s
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    g_batch_stride, g_token_stride, g_head_stride, v_batch_stride, v_token_stride, v_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr,
    SPLIT: tl.constexpr, SCALE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write what the scan over chunks and the outputs read of queries, keys and values."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    last_start = load_starts(starts_ptr, tl.minimum(first + CHUNK, n_tokens) - 1, n_tokens, HAS_DOCUMENTS)
    beta = load_numbers(beta_ptr + batch * n_tokens * value_heads + value_head, tokens, n_tokens, value_heads)
    beta = beta.to(tl.float32)
    q_scale = inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK) * SCALE
    k_scale = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
    t = load_tile(t_ptr + at_chunk * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    decay_row_ptr = decay_ptr + batch * g_batch_stride + value_head * g_head_stride
    at_keys = at_chunk * CHUNK * KEY_DIM
    for col in range(0, KEY_DIM, COLS):
        decays = load_chunk(decay_row_ptr, first, n_tokens, g_token_stride, col, KEY_DIM, CHUNK, COLS)
        high, low = split_decays(decays, SPLIT)
        cols = col + tl.arange(0, COLS)
        kept = factors_of_state(decays, last_start, first)
        tl.store(kept_ptr + at_chunk * KEY_DIM + cols, kept, mask=cols < KEY_DIM)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, col, KEY_DIM, CHUNK, COLS).to(tl.float32)
        k *= k_scale[:, None]
        written = k * factors_to_state(high, low, starts, last_start, CHUNK, SPLIT)
        store_tile(written_ptr + at_keys, written, True, 0, col, CHUNK, KEY_DIM, CHUNK, COLS, KEEP_ALL=True)
        from_state = factors_from_state(high, low, starts, first, CHUNK, SPLIT)
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, col, KEY_DIM, CHUNK, COLS).to(tl.float32)
        read = q * q_scale[:, None] * from_state
        store_tile(read_ptr + at_keys, read, True, 0, col, CHUNK, KEY_DIM, CHUNK, COLS, KEEP_ALL=True)
        erased = -tl.dot(t, (k * beta[:, None] * from_state).to(t.dtype), input_precision=DOT)
        store_tile(erased_ptr + at_keys, erased, True, 0, col, CHUNK, KEY_DIM, CHUNK, COLS, KEEP_ALL=True)
    v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
    for v_col in range(0, VALUE_DIM, COLS):
        v = load_chunk(v_row_ptr, first, n_tokens, v_token_stride, v_col, VALUE_DIM, CHUNK, COLS).to(tl.float32)
        u = tl.dot(t, (v * beta[:, None]).to(t.dtype), input_precision=DOT)
        at_values = corrected_ptr + at_chunk * VALUE_DIM * CHUNK
        store_tile(at_values, tl.trans(u), True, v_col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def kda_states_kernel(
    erased_ptr, written_ptr,  # (B, T / CHUNK, X, CHUNK, K)
    kept_ptr,  # (B, T / CHUNK, X, K) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    initial_ptr,  # (B, X, V, K)
    states_ptr,  # (B, T / CHUNK, X, V, K)
    final_ptr,  # (B, X, V, K) fp32
    corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK): in, u; out, v̂
    n_tokens, n_chunks, part_tokens,
    VALUE_HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Carry the state through the chunks: v̂ = u + w S, then S = s S + Σ_j r_j k_j v̂_jᵀ. All of it transposed."""
    col = tl.program_id(0) * COLS
    value_head = tl.program_id(1).to(tl.int64)
    part = (tl.program_id(2) % tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    batch = (tl.program_id(2) // tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    own_first = 0
    own_end = n_tokens
    if HAS_DOCUMENTS:
        begin, last = part_of_row(part, part_tokens, n_tokens)
        first_end = tl.load(ends_ptr + begin)
        last_end = tl.load(ends_ptr + last)
        start = tl.load(starts_ptr + begin)
        own_first, own_end = owned_tokens(begin, last, start, first_end, last_end, n_tokens)

    rows = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEYS)
    at_state = (batch * VALUE_HEADS + value_head) * KEY_DIM * VALUE_DIM
    state = tl.zeros([COLS, KEYS], tl.float32)
    dtype = erased_ptr.dtype.element_ty
    one = identity(COLS, dtype)
    if HAS_INITIAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_first == 0:
            state += load_tile(initial_ptr + at_state, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS).to(tl.float32)
    # a program without documents begins behind the last chunk
    at_chunk = (batch * n_chunks + tl.minimum(own_first // CHUNK, n_chunks - 1)) * VALUE_HEADS + value_head
    kept_ahead = tl.load(kept_ptr + at_chunk * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    for chunk in range(own_first // CHUNK, tl.cdiv(own_end, CHUNK)):
        first = chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * VALUE_HEADS + value_head
        at_next = at_chunk + tl.where(chunk + 1 < n_chunks, VALUE_HEADS, 0)
        kept = kept_ahead
        # the compiler does not load these ahead
        kept_ahead = tl.load(kept_ptr + at_next * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
        erased = load_tile(erased_ptr + at_chunk * CHUNK * KEY_DIM, 0, 0, CHUNK, KEY_DIM, CHUNK, KEYS)
        written = load_tile(written_ptr + at_chunk * CHUNK * KEY_DIM, 0, 0, CHUNK, KEY_DIM, CHUNK, KEYS)
        at_values = corrected_ptr + at_chunk * VALUE_DIM * CHUNK
        values = load_tile(at_values, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        if first >= own_first:  # else a document of another program flows into the chunk
            at_states = states_ptr + at_chunk * KEY_DIM * VALUE_DIM
            store_tile(at_states, state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)
        # by a product: values loaded into registers would take those of the pipeline
        corrected = tl.dot(one, values, input_precision=DOT)
        corrected = tl.dot(state.to(dtype), tl.trans(erased), corrected, input_precision=DOT)
        owned = is_owned(first + rows, own_first, own_end, n_tokens)[None, :]
        store_tile(at_values, corrected, owned, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=not HAS_DOCUMENTS)
        state = tl.dot(corrected.to(dtype), written, state * kept[None, :], input_precision=DOT)
    if HAS_FINAL:  # noqa: SIM102  # a constant alone removes the branch
        if (own_end == n_tokens) & (own_first < own_end):
            store_tile(final_ptr + at_state, state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_outputs_kernel(
    read_ptr,  # (B, T / CHUNK, X, CHUNK, K)
    weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK): v̂
    states_ptr,  # (B, T / CHUNK, X, V, K)
    out_ptr,  # (B, T, X, V)
    n_tokens, n_chunks,
    VALUE_HEADS: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write out = scale m q S + W v̂."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    exists = first + tl.arange(0, CHUNK) < n_tokens
    at_chunk = (batch * n_chunks + chunk) * VALUE_HEADS + value_head
    q = load_tile(read_ptr + at_chunk * CHUNK * KEY_DIM, 0, 0, CHUNK, KEY_DIM, CHUNK, KEYS)
    weights = load_tile(weights_ptr + at_chunk * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    out_row_ptr = out_ptr + (batch * n_tokens * VALUE_HEADS + value_head) * VALUE_DIM
    for col in range(0, VALUE_DIM, COLS):
        state = load_tile(states_ptr + at_chunk * KEY_DIM * VALUE_DIM, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS)
        v = load_tile(corrected_ptr + at_chunk * VALUE_DIM * CHUNK, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        out = tl.dot(q, tl.trans(state), input_precision=DOT)
        out = tl.dot(weights, tl.trans(v), out, input_precision=DOT)
        store_chunk(out_row_ptr, out, first, exists, VALUE_HEADS * VALUE_DIM, col, VALUE_DIM, CHUNK, COLS)
