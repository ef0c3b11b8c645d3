"""Triton kernels of gated_delta_rule: four forward, three more backward. The mathematics: gated_delta_rule.py.

A row of tokens is cut into chunks of CHUNK tokens, which documents may begin and end within. A document's first token
takes nothing from the state: the state before it is multiplied by 0. So no kernel knows how many documents there are.

    prepare     chunk, value head                G, T, W, U, and 1 / |k|, 1 / |q|
    states      part of a row, value head        S before each chunk, and corrected values v̂ over U
    outputs     chunk, value head                out
    local       chunk, value head                dv̂ from the outputs of the same chunk
    gradients   part of a row, value head        dS after each chunk, and all of dv̂
    reads       chunk, key head                  dq, and the part of dk and dg that does not pass through T
    writes      chunk, key head                  dk, dv, dbeta, dg

The scans `states` and `gradients` go through the chunks one after another. To have more programs, a row is cut into
parts: the program of a part owns the documents that begin in it, and leaves the part with the last of them. A chunk at
the edge of two programs is computed by both, each for its tokens.

q, k (B, T, H, K) and v (B, T, X, V) have unit column stride, X value heads, GROUP = X / H. Tensors that kernels hand to
each other are contiguous. Products of keys are taken before they are divided by their lengths, which scale rows and
columns of a tile afterwards.

No product has the transpose of another product as its first factor: triton before 3.7.1 takes wrong registers for it
on Hopper GPUs. The transposed tile is computed by a product of its own.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import fp32
from ligertune_kernels.launcher import tl, triton

SUBCHUNK = tl.constexpr(16)  # the tile that is inverted row by row; products invert the rest
NORM_EPS = tl.constexpr(1e-6)  # of fla and transformers: 1 / sqrt(sum of squares + eps)


@triton.jit
def _load(ptr, first, n_tokens, token_stride, first_col, n_cols, CHUNK: tl.constexpr, COLS: tl.constexpr):
    """Load (CHUNK, COLS) of a matrix (n_tokens, n_cols) with unit column stride; zero outside."""
    rows = tl.arange(0, CHUNK)
    cols = first_col + tl.arange(0, COLS)
    ptrs = ptr + first.to(tl.int64) * token_stride  # offsets within a tile need 32 bits
    mask = (first + rows < n_tokens)[:, None] & (cols < n_cols)[None, :]
    return tl.load(ptrs + rows[:, None] * token_stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(ptr, tile, first, keep, token_stride, first_col, n_cols, CHUNK: tl.constexpr, COLS: tl.constexpr):
    """Store the rows of a tile that `keep` selects to a matrix (tokens, n_cols)."""
    cols = first_col + tl.arange(0, COLS)
    ptrs = ptr + first.to(tl.int64) * token_stride
    ptrs = ptrs + tl.arange(0, CHUNK)[:, None] * token_stride + cols[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=keep[:, None] & (cols < n_cols)[None, :])


@triton.jit
def _load_state(ptr, first_col, key_dim, value_dim, KEYS: tl.constexpr, COLS: tl.constexpr):
    """Load (KEYS, COLS) of a contiguous state (key_dim, value_dim); zero outside."""
    keys = tl.arange(0, KEYS)
    cols = first_col + tl.arange(0, COLS)
    mask = (keys < key_dim)[:, None] & (cols < value_dim)[None, :]
    return tl.load(ptr + keys[:, None] * value_dim + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store_state(ptr, tile, first_col, key_dim, value_dim, KEYS: tl.constexpr, COLS: tl.constexpr):
    keys = tl.arange(0, KEYS)
    cols = first_col + tl.arange(0, COLS)
    mask = (keys < key_dim)[:, None] & (cols < value_dim)[None, :]
    tl.store(ptr + keys[:, None] * value_dim + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_row(ptr, tokens, n_tokens, stride, other: tl.constexpr = 0.0):
    """Load one number for each token."""
    return tl.load(ptr + tokens.to(tl.int64) * stride, mask=tokens < n_tokens, other=other)


@triton.jit
def _load_logs(log_ptr, tokens, n_tokens, stride):
    """Load G of each token, and that of the last token after it: differences are then never positive."""
    return tl.load(log_ptr + tl.minimum(tokens, n_tokens - 1).to(tl.int64) * stride)


@triton.jit
def _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS: tl.constexpr):
    """Return the first token of each token's document; tokens after the last belong to its document."""
    if HAS_DOCUMENTS:
        return tl.load(starts_ptr + tl.minimum(tokens, n_tokens - 1))
    else:
        return tokens * 0


@triton.jit
def _visible(starts, CHUNK: tl.constexpr):
    """Return which earlier tokens [of the second axis] of a chunk each token sees, itself included."""
    rows = tl.arange(0, CHUNK)
    return (rows[:, None] >= rows[None, :]) & (starts[:, None] == starts[None, :])


@triton.jit
def _decay_between(logs, starts, CHUNK: tl.constexpr):
    """Return D_ij = exp(G_i - G_j) for the tokens j that i sees, else 0."""
    # masked before exp: differences of later tokens are positive and may overflow
    return tl.exp(tl.where(_visible(starts, CHUNK), logs[:, None] - logs[None, :], float("-inf")))


@triton.jit
def _decay_between_transposed(logs, starts, CHUNK: tl.constexpr):
    """Return D_ji with j, the token that is seen, on the first axis."""
    rows = tl.arange(0, CHUNK)
    seen = (rows[:, None] <= rows[None, :]) & (starts[:, None] == starts[None, :])
    return tl.exp(tl.where(seen, logs[None, :] - logs[:, None], float("-inf")))


@triton.jit
def _decay_from_state(logs, starts, first):
    """Return exp(G_i), the factor of the state before the chunk; 0 for documents that begin in the chunk."""
    return tl.where(starts < tl.maximum(first, 1), tl.exp(logs), 0.0)


@triton.jit
def _decay_to_state(
    logs, starts, log_ptr, starts_ptr, first, n_tokens, stride, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Return the factors of the chunk's tokens, and of the state before it, in the state after it."""
    last = tl.minimum(first + CHUNK, n_tokens) - 1
    last_log = tl.load(log_ptr + last.to(tl.int64) * stride)
    last_start = _starts(starts_ptr, last, n_tokens, HAS_DOCUMENTS)
    tokens = tl.where(starts == last_start, tl.exp(last_log - logs), 0.0)
    state = tl.where(last_start < tl.maximum(first, 1), tl.exp(last_log), 0.0)
    return tokens, state


@triton.jit
def _inverse(strict, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + L)^-1 for a strictly lower triangular L (CHUNK, CHUNK), fp32.

    Diagonal tiles X are inverted row by row, as forward substitution does. With M = X (L without these tiles), whose
    fourth power is 0 for four tiles, the inverse is (I - M) (I + M²) X. A product over all powers of L would be cheaper
    and cancels: with equal keys its terms reach 10^18.
    """
    TILES: tl.constexpr = CHUNK // SUBCHUNK
    rows = tl.arange(0, CHUNK)
    diagonal = (rows[:, None] // SUBCHUNK) == (rows[None, :] // SUBCHUNK)
    tiled = tl.reshape(tl.where(diagonal, strict, 0.0), (TILES, SUBCHUNK, TILES, SUBCHUNK))
    tiles = tl.sum(tiled, 2)  # (TILES, SUBCHUNK, SUBCHUNK)
    places = tl.arange(0, SUBCHUNK)
    inverse = tl.zeros([TILES, SUBCHUNK, SUBCHUNK], tl.float32)
    inverse += tl.where(places[:, None] == places[None, :], 1.0, 0.0)[None, :, :]
    for i in range(1, SUBCHUNK):
        is_row = (places == i)[None, :, None]
        factors = tl.sum(tl.where(is_row, tiles, 0.0), 1)  # (TILES, SUBCHUNK): row i of each tile
        row = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - row[:, None, :], inverse)
    spread = tl.broadcast_to(inverse[:, :, None, :], (TILES, SUBCHUNK, TILES, SUBCHUNK))
    x = tl.where(diagonal, tl.reshape(spread, (CHUNK, CHUNK)), 0.0)
    m = tl.dot(x, tl.where(diagonal, 0.0, strict), input_precision=PRECISION)
    squared = tl.dot(m, m, input_precision=PRECISION)
    y = x + tl.dot(squared, x, input_precision=PRECISION)
    return y - tl.dot(m, y, input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def prepare_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    v_ptr,  # (B, T, X, V)
    decay_ptr, beta_ptr,  # (B, T, X)
    starts_ptr,  # (T,) int32
    log_ptr,  # (B, T, X) fp32: G
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    w_ptr,  # (B, T, X, K)
    u_ptr,  # (B, T, X, V)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32: 1 / |q|, 1 / |k|
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    v_batch_stride, v_token_stride, v_head_stride, key_dim, value_dim,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    KEEPS_T: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write what a chunk computes without the state."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)

    at_heads = batch * n_tokens * value_heads + value_head
    logs = tl.cumsum(_load_row(decay_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32), 0)
    tl.store(log_ptr + at_heads + tokens.to(tl.int64) * value_heads, logs, mask=exists)
    beta = _load_row(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)

    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_squares = tl.zeros([CHUNK], tl.float32)
    q_squares = tl.zeros([CHUNK], tl.float32)
    for col in tl.static_range(0, KEYS, COLS):
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, col, key_dim, CHUNK, COLS)
        products = tl.dot(k, tl.trans(k), products, input_precision=DOT)
        if NORMED:
            k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
            q = _load(q_row_ptr, first, n_tokens, q_token_stride, col, key_dim, CHUNK, COLS).to(tl.float32)
            q_squares += tl.sum(q * q, 1)
    key_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        key_scale = tl.rsqrt(k_squares + NORM_EPS)
        at_norms = batch * n_tokens * HEADS + head + tokens.to(tl.int64) * HEADS
        owns_norms = exists & (value_head % GROUP == 0)
        tl.store(k_norm_ptr + at_norms, key_scale, mask=owns_norms)
        tl.store(q_norm_ptr + at_norms, tl.rsqrt(q_squares + NORM_EPS), mask=owns_norms)

    rows = tl.arange(0, CHUNK)
    scaled = products * (key_scale * beta)[:, None] * key_scale[None, :] * _decay_between(logs, starts, CHUNK)
    t = _inverse(tl.where(rows[:, None] > rows[None, :], scaled, 0.0), CHUNK, PRECISION)
    t = t.to(k_ptr.dtype.element_ty)
    if KEEPS_T:
        at_tile = ((batch * n_chunks + chunk) * value_heads + value_head) * CHUNK * CHUNK
        tl.store(t_ptr + at_tile + rows[:, None] * CHUNK + rows[None, :], t)

    from_state = key_scale * beta * _decay_from_state(logs, starts, first)
    w_row_ptr = w_ptr + at_heads * key_dim
    for col in tl.static_range(0, KEYS, COLS):
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, col, key_dim, CHUNK, COLS).to(tl.float32)
        w = tl.dot(t, (k * from_state[:, None]).to(t.dtype), input_precision=DOT)
        _store(w_row_ptr, w, first, exists, value_heads * key_dim, col, key_dim, CHUNK, COLS)
    v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
    u_row_ptr = u_ptr + at_heads * value_dim
    for col in range(0, VALUES, COLS):
        v = _load(v_row_ptr, first, n_tokens, v_token_stride, col, value_dim, CHUNK, COLS).to(tl.float32)
        u = tl.dot(t, (v * beta[:, None]).to(t.dtype), input_precision=DOT)
        _store(u_row_ptr, u, first, exists, value_heads * value_dim, col, value_dim, CHUNK, COLS)


@triton.jit
def _owned_tokens(starts_ptr, ends_ptr, part, part_tokens, n_tokens, HAS_DOCUMENTS: tl.constexpr):
    """Return the first token, and the one after the last, of the documents that begin in a part; equal if none do."""
    if HAS_DOCUMENTS:
        begin = (part * part_tokens).to(tl.int32)
        last = tl.minimum(begin + part_tokens, n_tokens) - 1
        begins_here = tl.load(starts_ptr + begin) == begin
        first = tl.where(begins_here, begin, tl.load(ends_ptr + begin))
        end = tl.where(first <= last, tl.load(ends_ptr + last), first)
        return first, end
    else:
        return 0, n_tokens


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def states_kernel(
    k_ptr,  # (B, T, H, K)
    w_ptr,  # (B, T, X, K)
    u_ptr,  # (B, T, X, V): v̂ is written over it
    log_ptr,  # (B, T, X) fp32
    k_norm_ptr,  # (B, T, H) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    initial_ptr,  # (B, X, K, V)
    states_ptr,  # (B, T / CHUNK, X, K, V)
    final_ptr,  # (B, X, K, V) fp32
    k_batch_stride, k_token_stride, k_head_stride, key_dim, value_dim,
    n_tokens, n_chunks, part_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Carry the state through the chunks: v̂ = U - W S, then S = s S + Σ r_j k_j v̂_jᵀ."""
    col = tl.program_id(0) * COLS
    value_head = tl.program_id(1).to(tl.int64)
    part = (tl.program_id(2) % tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    batch = (tl.program_id(2) // tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    own_first, own_end = _owned_tokens(starts_ptr, ends_ptr, part, part_tokens, n_tokens, HAS_DOCUMENTS)

    at_heads = batch * n_tokens * value_heads + value_head
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    w_row_ptr = w_ptr + at_heads * key_dim
    u_row_ptr = u_ptr + at_heads * value_dim
    at_state = (batch * value_heads + value_head) * key_dim * value_dim
    state = tl.zeros([KEYS, COLS], tl.float32)
    if HAS_INITIAL:
        if own_first == 0:
            state += _load_state(initial_ptr + at_state, col, key_dim, value_dim, KEYS, COLS).to(tl.float32)
    for chunk in range(own_first // CHUNK, tl.cdiv(own_end, CHUNK)):
        first = chunk * CHUNK
        tokens = first + tl.arange(0, CHUNK)
        owned = (tokens >= own_first) & (tokens < own_end)
        if first >= own_first:  # else a document of another program flows into the chunk
            at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * key_dim * value_dim
            _store_state(states_ptr + at_chunk, state, col, key_dim, value_dim, KEYS, COLS)
        w = _load(w_row_ptr, first, n_tokens, value_heads * key_dim, 0, key_dim, CHUNK, KEYS)
        u = _load(u_row_ptr, first, n_tokens, value_heads * value_dim, col, value_dim, CHUNK, COLS).to(tl.float32)
        corrected = u - tl.dot(w, state.to(w.dtype), input_precision=DOT)
        _store(u_row_ptr, corrected, first, owned, value_heads * value_dim, col, value_dim, CHUNK, COLS)
        logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
        starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
        to_state, kept = _decay_to_state(
            logs, starts, log_ptr + at_heads, starts_ptr, first, n_tokens, value_heads, HAS_DOCUMENTS, CHUNK
        )
        if NORMED:
            to_state *= _load_row(k_norm_ptr + batch * n_tokens * HEADS + head, tokens, n_tokens, HEADS)
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        added = (corrected * tl.where(owned, to_state, 0.0)[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), added, state * kept, input_precision=DOT)
    if HAS_FINAL:
        if (own_end == n_tokens) & (own_first < own_end):
            _store_state(final_ptr + at_state, state, col, key_dim, value_dim, KEYS, COLS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "scale"])
def outputs_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T, X, V): v̂
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    states_ptr,  # (B, T / CHUNK, X, K, V)
    out_ptr,  # (B, T, X, V)
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, key_dim, value_dim,
    n_tokens, n_chunks, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write out_i = scale (exp(G_i) q_iᵀ S + Σ_j D_ij (q_i·k_j) v̂_j)."""
    scale = fp32(scale)
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    at_heads = batch * n_tokens * value_heads + value_head
    logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)

    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    q = _load(q_row_ptr, first, n_tokens, q_token_stride, 0, key_dim, CHUNK, KEYS)
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
    row_scale = tl.full([CHUNK], 1.0, tl.float32) * scale
    col_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        at_norms = batch * n_tokens * HEADS + head
        row_scale *= _load_row(q_norm_ptr + at_norms, tokens, n_tokens, HEADS)
        col_scale = _load_row(k_norm_ptr + at_norms, tokens, n_tokens, HEADS)
    weights = tl.dot(q, tl.trans(k), input_precision=DOT) * row_scale[:, None] * col_scale[None, :]
    weights = (weights * _decay_between(logs, starts, CHUNK)).to(q.dtype)
    from_state = row_scale * _decay_from_state(logs, starts, first)
    stride = value_heads * value_dim
    at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * key_dim * value_dim
    for col in range(0, VALUES, COLS):
        state = _load_state(states_ptr + at_chunk, col, key_dim, value_dim, KEYS, COLS)
        v = _load(corrected_ptr + at_heads * value_dim, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
        out = tl.dot(q, state, input_precision=DOT) * from_state[:, None]
        out = tl.dot(weights, v, out, input_precision=DOT)
        _store(out_ptr + at_heads * value_dim, out, first, exists, stride, col, value_dim, CHUNK, COLS)


@triton.jit(do_not_specialize=["n_tokens", "scale"])
def local_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    d_out_ptr,  # (B, T, X, V)
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    d_corrected_ptr,  # (B, T, X, V)
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, key_dim, value_dim,
    n_tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write the part of dv̂ that comes from outputs of the same chunk: dv̂_j = scale Σ_i D_ij (q_i·k_j) dout_i."""
    scale = fp32(scale)
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    at_heads = batch * n_tokens * value_heads + value_head
    logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    q = _load(q_row_ptr, first, n_tokens, q_token_stride, 0, key_dim, CHUNK, KEYS)
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
    weights = tl.dot(k, tl.trans(q), input_precision=DOT) * scale
    if NORMED:
        at_norms = batch * n_tokens * HEADS + head
        weights *= _load_row(k_norm_ptr + at_norms, tokens, n_tokens, HEADS)[:, None]
        weights *= _load_row(q_norm_ptr + at_norms, tokens, n_tokens, HEADS)[None, :]
    weights = (weights * _decay_between_transposed(logs, starts, CHUNK)).to(q.dtype)
    stride = value_heads * value_dim
    for col in range(0, VALUES, COLS):
        d_out = _load(d_out_ptr + at_heads * value_dim, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
        d_corrected = tl.dot(weights, d_out, input_precision=DOT)
        _store(d_corrected_ptr + at_heads * value_dim, d_corrected, first, exists, stride, col, value_dim, CHUNK, COLS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens", "scale"])
def state_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    w_ptr,  # (B, T, X, K)
    d_out_ptr,  # (B, T, X, V)
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    d_final_ptr,  # (B, X, K, V)
    d_corrected_ptr,  # (B, T, X, V): in, the local part; out, all
    d_states_ptr,  # (B, T / CHUNK, X, K, V): of the state after each chunk
    d_initial_ptr,  # (B, X, K, V) fp32
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, key_dim, value_dim,
    n_tokens, n_chunks, part_tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Carry dS back through the chunks: dv̂_j += r_j dSᵀ k_j, then dS = s dS + Σ_i exp(G_i) q_i dout_iᵀ - Wᵀ dv̂."""
    scale = fp32(scale)
    col = tl.program_id(0) * COLS
    value_head = tl.program_id(1).to(tl.int64)
    part = (tl.program_id(2) % tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    batch = (tl.program_id(2) // tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    own_first, own_end = _owned_tokens(starts_ptr, ends_ptr, part, part_tokens, n_tokens, HAS_DOCUMENTS)

    at_heads = batch * n_tokens * value_heads + value_head
    at_norms = batch * n_tokens * HEADS + head
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    w_row_ptr = w_ptr + at_heads * key_dim
    d_out_row_ptr = d_out_ptr + at_heads * value_dim
    d_corrected_row_ptr = d_corrected_ptr + at_heads * value_dim
    stride = value_heads * value_dim
    at_state = (batch * value_heads + value_head) * key_dim * value_dim
    d_state = tl.zeros([KEYS, COLS], tl.float32)
    if HAS_FINAL:
        if own_end == n_tokens:
            d_state += _load_state(d_final_ptr + at_state, col, key_dim, value_dim, KEYS, COLS).to(tl.float32)
    first_chunk = own_first // CHUNK
    end_chunk = tl.cdiv(own_end, CHUNK)
    for back in range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - back
        first = chunk * CHUNK
        tokens = first + tl.arange(0, CHUNK)
        owned = (tokens >= own_first) & (tokens < own_end)
        if tl.minimum(first + CHUNK, n_tokens) <= own_end:  # else the chunk's last token belongs to another program
            at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * key_dim * value_dim
            _store_state(d_states_ptr + at_chunk, d_state, col, key_dim, value_dim, KEYS, COLS)
        logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
        starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
        to_state, kept = _decay_to_state(
            logs, starts, log_ptr + at_heads, starts_ptr, first, n_tokens, value_heads, HAS_DOCUMENTS, CHUNK
        )
        from_state = tl.where(owned, scale * _decay_from_state(logs, starts, first), 0.0)
        if NORMED:
            to_state *= _load_row(k_norm_ptr + at_norms, tokens, n_tokens, HEADS)
            from_state *= _load_row(q_norm_ptr + at_norms, tokens, n_tokens, HEADS)
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        local = _load(d_corrected_row_ptr, first, n_tokens, stride, col, value_dim, CHUNK, COLS).to(tl.float32)
        d_corrected = local + tl.dot(k, d_state.to(k.dtype), input_precision=DOT) * to_state[:, None]
        d_corrected = tl.where(owned[:, None], d_corrected, 0.0)
        _store(d_corrected_row_ptr, d_corrected, first, owned, stride, col, value_dim, CHUNK, COLS)
        q = _load(q_row_ptr, first, n_tokens, q_token_stride, 0, key_dim, CHUNK, KEYS)
        d_out = _load(d_out_row_ptr, first, n_tokens, stride, col, value_dim, CHUNK, COLS).to(tl.float32)
        w = _load(w_row_ptr, first, n_tokens, value_heads * key_dim, 0, key_dim, CHUNK, KEYS)
        d_read = (d_out * from_state[:, None]).to(q.dtype)
        d_state = tl.dot(tl.trans(q), d_read, d_state * kept, input_precision=DOT)
        d_state -= tl.dot(tl.trans(w), d_corrected.to(w.dtype), input_precision=DOT)
    if HAS_INITIAL:
        if own_first == 0:
            _store_state(d_initial_ptr + at_state, d_state, col, key_dim, value_dim, KEYS, COLS)


@triton.jit
def _through_norm(grad, x, inverse_norm):
    """Return the gradient of x, given that of its unit vector x / |x|."""
    x = x.to(tl.float32)
    along = tl.sum(grad * x, 1) * inverse_norm * inverse_norm
    return inverse_norm[:, None] * (grad - x * along[:, None])


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "scale"])
def read_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    corrected_ptr, d_out_ptr,  # (B, T, X, V)
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    states_ptr, d_states_ptr,  # (B, T / CHUNK, X, K, V)
    dq_ptr,  # (B, T, H, K)
    dk_ptr,  # (B, T, H, K) fp32: of the unit vectors, without what passes through T
    d_log_ptr,  # (B, T, X) fp32: of G, without what passes through T
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, key_dim, value_dim,
    n_tokens, n_chunks, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Differentiate the outputs and the state after the chunk, given v̂, by q, k and G.

    A token's G has one effect where the token reads, as q does, and the opposite one where it is read, as k is. So the
    products of q and k with their gradients are the gradients of G, to which the last token adds that of the state.
    """
    scale = fp32(scale)
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    stride = value_heads * value_dim
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    q_scale = tl.full([CHUNK], 1.0, tl.float32)
    k_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        at_norms = batch * n_tokens * HEADS + head
        q_scale = _load_row(q_norm_ptr + at_norms, tokens, n_tokens, HEADS)
        k_scale = _load_row(k_norm_ptr + at_norms, tokens, n_tokens, HEADS)
    last = tl.minimum(first + CHUNK, n_tokens) - 1
    at_keys = (batch * n_tokens * HEADS + head) * key_dim
    # first dq, then dk, and q and k loaded again where they are used: so few tiles at a time fit into registers
    dq = tl.zeros([CHUNK, KEYS], tl.float32)
    for member in range(GROUP):
        value_head = head * GROUP + member
        at_heads = batch * n_tokens * value_heads + value_head
        at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * key_dim * value_dim
        logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
        d_weights = tl.zeros([CHUNK, CHUNK], tl.float32)
        dq_new = tl.zeros([CHUNK, KEYS], tl.float32)
        for col in range(0, VALUES, COLS):
            d_out = _load(d_out_ptr + at_heads * value_dim, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            v = _load(corrected_ptr + at_heads * value_dim, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            state = _load_state(states_ptr + at_chunk, col, key_dim, value_dim, KEYS, COLS)
            d_weights = tl.dot(d_out, tl.trans(v), d_weights, input_precision=DOT)
            dq_new = tl.dot(d_out, tl.trans(state), dq_new, input_precision=DOT)
        dq_new *= (scale * _decay_from_state(logs, starts, first))[:, None]
        d_weights *= _decay_between(logs, starts, CHUNK) * (scale * k_scale)[None, :]  # k enters as it is
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        dq_new = tl.dot(d_weights.to(k.dtype), k, dq_new, input_precision=DOT)
        q = _load(q_row_ptr, first, n_tokens, q_token_stride, 0, key_dim, CHUNK, KEYS)
        d_logs = tl.sum(q.to(tl.float32) * dq_new, 1) * q_scale
        tl.store(d_log_ptr + at_heads + tokens.to(tl.int64) * value_heads, d_logs, mask=exists)
        dq += dq_new
    if NORMED:
        q = _load(q_row_ptr, first, n_tokens, q_token_stride, 0, key_dim, CHUNK, KEYS)
        dq = _through_norm(dq, q, q_scale)
    _store(dq_ptr + at_keys, dq, first, exists, HEADS * key_dim, 0, key_dim, CHUNK, KEYS)

    tl.debug_barrier()  # d_logs are read by other threads than those that stored them
    dk = tl.zeros([CHUNK, KEYS], tl.float32)
    for member in range(GROUP):
        value_head = head * GROUP + member
        at_heads = batch * n_tokens * value_heads + value_head
        at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * key_dim * value_dim
        logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
        to_state, kept = _decay_to_state(
            logs, starts, log_ptr + at_heads, starts_ptr, first, n_tokens, value_heads, HAS_DOCUMENTS, CHUNK
        )
        d_weights = tl.zeros([CHUNK, CHUNK], tl.float32)  # transposed
        dk_new = tl.zeros([CHUNK, KEYS], tl.float32)
        carried = 0.0  # state · d_state
        for col in range(0, VALUES, COLS):
            d_out = _load(d_out_ptr + at_heads * value_dim, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            v = _load(corrected_ptr + at_heads * value_dim, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            d_state = _load_state(d_states_ptr + at_chunk, col, key_dim, value_dim, KEYS, COLS)
            state = _load_state(states_ptr + at_chunk, col, key_dim, value_dim, KEYS, COLS)
            carried += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
            d_weights = tl.dot(v, tl.trans(d_out), d_weights, input_precision=DOT)
            dk_new = tl.dot(v, tl.trans(d_state), dk_new, input_precision=DOT)
        dk_new *= to_state[:, None]
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        d_last = kept * carried + tl.sum(tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale)
        d_weights *= _decay_between_transposed(logs, starts, CHUNK) * (scale * q_scale)[None, :]
        q = _load(q_row_ptr, first, n_tokens, q_token_stride, 0, key_dim, CHUNK, KEYS)
        dk_new = tl.dot(d_weights.to(q.dtype), q, dk_new, input_precision=DOT)
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        d_logs = _load_row(d_log_ptr + at_heads, tokens, n_tokens, value_heads)
        d_logs -= tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale
        d_logs += tl.where(tokens == last, d_last, 0.0)
        tl.store(d_log_ptr + at_heads + tokens.to(tl.int64) * value_heads, d_logs, mask=exists)
        dk += dk_new
    _store(dk_ptr + at_keys, dk, first, exists, HEADS * key_dim, 0, key_dim, CHUNK, KEYS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def write_gradients_kernel(
    k_ptr,  # (B, T, H, K)
    v_ptr, corrected_ptr, d_corrected_ptr,  # (B, T, X, V)
    beta_ptr,  # (B, T, X)
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    log_ptr,  # (B, T, X) fp32
    k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    states_ptr,  # (B, T / CHUNK, X, K, V)
    partial_dk_ptr,  # (B, T, H, K) fp32
    d_log_ptr,  # (B, T, X) fp32
    dk_ptr,  # (B, T, H, K)
    dv_ptr,  # (B, T, X, V)
    d_beta_ptr, d_decay_ptr,  # (B, T, X)
    k_batch_stride, k_token_stride, k_head_stride, v_batch_stride, v_token_stride, v_head_stride, key_dim, value_dim,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Differentiate v̂ = T β (v - exp(G) kᵀ S) by k, v, beta and G; add what the outputs gave.

    With y = dv̂ through Tᵀ, dv = β y, and the gradient of A is -y v̂ᵀ: no gradient of T is needed.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    tokens = first + rows
    exists = tokens < n_tokens
    starts = _starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    stride = value_heads * value_dim
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    k_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        k_scale = _load_row(k_norm_ptr + batch * n_tokens * HEADS + head, tokens, n_tokens, HEADS)
    at_keys = (batch * n_tokens * HEADS + head) * key_dim
    dk = _load(partial_dk_ptr + at_keys, first, n_tokens, HEADS * key_dim, 0, key_dim, CHUNK, KEYS)
    for member in range(GROUP):
        value_head = head * GROUP + member
        at_heads = batch * n_tokens * value_heads + value_head
        at_values = at_heads * value_dim
        at_tile = (batch * n_chunks + chunk) * value_heads + value_head
        at_tokens = at_heads + tokens.to(tl.int64) * value_heads
        logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
        beta = _load_row(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
        t = tl.load(t_ptr + at_tile * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
        d_products = tl.zeros([CHUNK, CHUNK], tl.float32)
        dk_new = tl.zeros([CHUNK, KEYS], tl.float32)
        d_beta = tl.zeros([CHUNK], tl.float32)
        for col in range(0, VALUES, COLS):
            d_corrected = _load(d_corrected_ptr + at_values, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            y = tl.dot(tl.trans(t), d_corrected, input_precision=DOT)
            v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
            v = _load(v_row_ptr, first, n_tokens, v_token_stride, col, value_dim, CHUNK, COLS).to(tl.float32)
            d_beta += tl.sum(y * v, 1)
            _store(dv_ptr + at_values, y * beta[:, None], first, exists, stride, col, value_dim, CHUNK, COLS)
            corrected = _load(corrected_ptr + at_values, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            state = _load_state(states_ptr + at_tile * key_dim * value_dim, col, key_dim, value_dim, KEYS, COLS)
            y = y.to(corrected.dtype)
            d_products = tl.dot(y, tl.trans(corrected), d_products, input_precision=DOT)
            dk_new = tl.dot(y, tl.trans(state), dk_new, input_precision=DOT)
        # as the reading token: without the factor beta, which is differentiated, too
        dk_new *= -_decay_from_state(logs, starts, first)[:, None]
        decay = tl.where(rows[:, None] > rows[None, :], _decay_between(logs, starts, CHUNK), 0.0)
        d_products *= -decay * k_scale[None, :]
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        dk_new = tl.dot(d_products.to(k.dtype), k, dk_new, input_precision=DOT)
        reads = tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale
        tl.store(d_beta_ptr + at_tokens, (d_beta + reads).to(d_beta_ptr.dtype.element_ty), mask=exists)
        d_logs = tl.load(d_log_ptr + at_tokens, mask=exists, other=0.0) + beta * reads
        tl.store(d_log_ptr + at_tokens, d_logs, mask=exists)
        dk += dk_new * beta[:, None]

    tl.debug_barrier()  # d_logs are read by other threads than those that stored them
    for member in range(GROUP):
        value_head = head * GROUP + member
        at_heads = batch * n_tokens * value_heads + value_head
        at_values = at_heads * value_dim
        at_tile = (batch * n_chunks + chunk) * value_heads + value_head
        at_tokens = at_heads + tokens.to(tl.int64) * value_heads
        logs = _load_logs(log_ptr + at_heads, tokens, n_tokens, value_heads)
        beta = _load_row(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
        t = tl.load(t_ptr + at_tile * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
        d_products = tl.zeros([CHUNK, CHUNK], tl.float32)  # transposed
        for col in range(0, VALUES, COLS):
            d_corrected = _load(d_corrected_ptr + at_values, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            y = tl.dot(tl.trans(t), d_corrected, input_precision=DOT)
            corrected = _load(corrected_ptr + at_values, first, n_tokens, stride, col, value_dim, CHUNK, COLS)
            d_products = tl.dot(corrected, tl.trans(y.to(corrected.dtype)), d_products, input_precision=DOT)
        decay = tl.where(rows[:, None] < rows[None, :], _decay_between_transposed(logs, starts, CHUNK), 0.0)
        d_products *= -decay * (beta * k_scale)[None, :]
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        dk_new = tl.dot(d_products.to(k.dtype), k, input_precision=DOT)
        d_logs = tl.load(d_log_ptr + at_tokens, mask=exists, other=0.0)
        d_logs -= tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale
        # G of a token sums the decays of the earlier tokens that it sees; those of other documents cancel
        d_decay = tl.sum(tl.where(_visible(starts, CHUNK), d_logs[:, None], 0.0), 0)
        tl.store(d_decay_ptr + at_tokens, d_decay.to(d_decay_ptr.dtype.element_ty), mask=exists)
        dk += dk_new
    if NORMED:
        k = _load(k_row_ptr, first, n_tokens, k_token_stride, 0, key_dim, CHUNK, KEYS)
        dk = _through_norm(dk, k, k_scale)
    _store(dk_ptr + at_keys, dk, first, exists, HEADS * key_dim, 0, key_dim, CHUNK, KEYS)
