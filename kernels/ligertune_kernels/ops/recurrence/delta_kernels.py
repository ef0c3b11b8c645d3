"""Triton kernels of gated_delta_rule: three forward, seven backward. The mathematics: gated_delta_rule.py.

A row of tokens is cut into chunks of CHUNK tokens, which documents may begin and end within. A document's first token
takes nothing from the state: the state before it is multiplied by 0. So no kernel knows how many documents there are.

    prepare     chunk, value head                G, factors of tokens, T, and 1 / |k|, 1 / |q|
    states      part of a row, value head        S before each chunk, and corrected values v̂
    outputs     chunk, value head                out
    local       chunk, value head                dv̂ from the outputs of the same chunk, and what they add to dS
    gradients   part of a row, value head        dS after each chunk, and y over dv̂
    values      chunk, value head                dv, and the part of dbeta of v
    queries     chunk, key head                  dq, and the part of dg of tokens that read by q
    corrections chunk, key head                  dbeta, and the part of dk and dg of tokens that read by k
    keys        chunk, key head                  the part of dk and dg of tokens that queries and the state read
    products    chunk, key head                  dk, dg

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

from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.recurrence.chunks import (
    decay_between,
    decay_from_state,
    decay_to_state,
    identity,
    is_owned,
    load_chunk,
    load_numbers,
    load_starts,
    load_tile,
    owned_tokens,
    part_of_row,
    store_chunk,
    store_tile,
    visible_tokens,
)

SUBCHUNK = tl.constexpr(16)  # the tile that is inverted row by row; products invert the rest
NORM_EPS = tl.constexpr(1e-6)  # of fla and transformers: 1 / sqrt(sum of squares + eps)


@triton.jit
def _identity():
    places = tl.arange(0, SUBCHUNK)
    return tl.where(places[:, None] == places[None, :], 1.0, 0.0)[None, :, :]


@triton.jit
def _between_blocks(tiles, SIZE: tl.constexpr):
    """Return the part of lower triangular tiles (TILES, SUBCHUNK, SUBCHUNK) that joins neighbouring blocks of SIZE."""
    block = tl.arange(0, SUBCHUNK) // SIZE
    joined = (block[:, None] // 2 == block[None, :] // 2) & (block[:, None] != block[None, :])
    return tl.where(joined[None, :, :], tiles, 0.0)


@triton.jit
def unit_triangular_inverse(strict, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + L)^-1 for a strictly lower triangular L (CHUNK, CHUNK), fp32.

    Blocks on the diagonal are joined in pairs, from one token to SUBCHUNK: with B the part of L between the two, the
    inverse X of both becomes X - X B X. With M = X (L without these tiles), whose fourth power is 0 for four tiles, the
    inverse is (I - M) (I + M²) X. A product over all powers of L would be cheaper and cancels: with equal keys its
    terms reach 10^18.
    """
    TILES: tl.constexpr = CHUNK // SUBCHUNK
    rows = tl.arange(0, CHUNK)
    diagonal = (rows[:, None] // SUBCHUNK) == (rows[None, :] // SUBCHUNK)
    tiled = tl.reshape(tl.where(diagonal, strict, 0.0), (TILES, SUBCHUNK, TILES, SUBCHUNK))
    tiles = tl.sum(tiled, 2)  # (TILES, SUBCHUNK, SUBCHUNK)
    inverse = _identity() - _between_blocks(tiles, 1)
    for doubling in tl.static_range(1, 4):
        between = tl.dot(inverse, _between_blocks(tiles, 2**doubling), input_precision=PRECISION)
        inverse -= tl.dot(between, inverse, input_precision=PRECISION)
    spread = tl.broadcast_to(inverse[:, :, None, :], (TILES, SUBCHUNK, TILES, SUBCHUNK))
    x = tl.where(diagonal, tl.reshape(spread, (CHUNK, CHUNK)), 0.0)
    m = tl.dot(x, tl.where(diagonal, 0.0, strict), input_precision=PRECISION)
    squared = tl.dot(m, m, input_precision=PRECISION)
    y = x + tl.dot(squared, x, input_precision=PRECISION)
    return y - tl.dot(m, y, input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def prepare_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    decay_ptr, beta_ptr,  # (B, T, X)
    starts_ptr,  # (T,) int32
    log_ptr,  # (B, T, X) fp32: G
    factors_ptr,  # (B, T / CHUNK, X, 4, CHUNK) fp32: r / |k|, -m / |k|, -β m / |k|, β
    kept_ptr,  # (B, T / CHUNK, X) fp32: s
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32: 1 / |q|, 1 / |k|
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
    COLS: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
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
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)

    at_heads = batch * n_tokens * value_heads + value_head
    decays = load_numbers(decay_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
    decays = tl.where(exists, decays, 0.0)
    # sums over the document alone: those over the chunk would round by the decays of other documents
    logs = tl.sum(tl.where(visible_tokens(starts, CHUNK), decays[None, :], 0.0), 1)
    tl.store(log_ptr + at_heads + tokens.to(tl.int64) * value_heads, logs, mask=exists)
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)

    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_squares = tl.zeros([CHUNK], tl.float32)
    for col in range(0, KEY_DIM, COLS):
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, col, KEY_DIM, CHUNK, COLS)
        products = tl.dot(k, tl.trans(k), products, input_precision=DOT)
        if NORMED:
            k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
    key_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        key_scale = tl.rsqrt(k_squares + NORM_EPS)
        if value_head % GROUP == 0:  # else another program writes them
            at_norms = batch * n_tokens * HEADS + head + tokens.to(tl.int64) * HEADS
            tl.store(k_norm_ptr + at_norms, key_scale, mask=exists)
            q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
            q_squares = tl.zeros([CHUNK], tl.float32)
            for q_col in range(0, KEY_DIM, COLS):  # a loop: its loads would take the registers of others
                q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, q_col, KEY_DIM, CHUNK, COLS).to(tl.float32)
                q_squares += tl.sum(q * q, 1)
            tl.store(q_norm_ptr + at_norms, tl.rsqrt(q_squares + NORM_EPS), mask=exists)

    last = tl.minimum(first + CHUNK, n_tokens) - 1
    last_log = tl.sum(tl.where(tokens == last, logs, 0.0))
    to_state, kept = decay_to_state(logs, starts, last_log, starts_ptr, first, last, HAS_DOCUMENTS)
    rows = tl.arange(0, CHUNK)
    at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
    from_state = decay_from_state(logs, starts, first) * key_scale
    factors_ptr += at_chunk * 4 * CHUNK + rows
    tl.store(factors_ptr, to_state * key_scale)
    tl.store(factors_ptr + CHUNK, -from_state)
    tl.store(factors_ptr + 2 * CHUNK, -from_state * beta)
    tl.store(factors_ptr + 3 * CHUNK, beta)
    tl.store(kept_ptr + at_chunk, kept)

    products *= (key_scale * beta)[:, None] * key_scale[None, :]
    t = unit_triangular_inverse(products * decay_between(logs, starts, CHUNK, STRICT=True), CHUNK, PRECISION)
    tl.store(t_ptr + at_chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :], t.to(t_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def states_kernel(
    k_ptr,  # (B, T, H, K)
    v_ptr,  # (B, T, X, V)
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    factors_ptr,  # (B, T / CHUNK, X, 4, CHUNK) fp32
    kept_ptr,  # (B, T / CHUNK, X) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    initial_ptr,  # (B, X, V, K)
    states_ptr,  # (B, T / CHUNK, X, V, K)
    final_ptr,  # (B, X, V, K) fp32
    corrected_ptr,  # (B, T / CHUNK, X, CHUNK, V): v̂
    k_batch_stride, k_token_stride, k_head_stride, v_batch_stride, v_token_stride, v_head_stride,
    n_tokens, n_chunks, part_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Carry the state through the chunks: v̂ = T β (v - m k S), then S = s S + Σ r_j k_j v̂_jᵀ. All of it transposed.

    So factors that a product has just computed stay in registers.
    """
    col = tl.program_id(0) * COLS
    value_head = tl.program_id(1).to(tl.int64)
    part = (tl.program_id(2) % tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    batch = (tl.program_id(2) // tl.cdiv(n_tokens, part_tokens)).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    own_first = 0
    own_end = n_tokens
    if HAS_DOCUMENTS:
        begin, last = part_of_row(part, part_tokens, n_tokens)
        first_end = tl.load(ends_ptr + begin)
        last_end = tl.load(ends_ptr + last)
        start = tl.load(starts_ptr + begin)
        own_first, own_end = owned_tokens(begin, last, start, first_end, last_end, n_tokens)

    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
    rows = tl.arange(0, CHUNK)
    at_state = (batch * value_heads + value_head) * KEY_DIM * VALUE_DIM
    state = tl.zeros([COLS, KEYS], tl.float32)
    one = identity(COLS, k_ptr.dtype.element_ty)
    if HAS_INITIAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_first == 0:
            state += load_tile(initial_ptr + at_state, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS).to(tl.float32)
    # a program without documents begins behind the last chunk
    at_chunk = (batch * n_chunks + tl.minimum(own_first // CHUNK, n_chunks - 1)) * value_heads + value_head
    from_state_ahead = tl.load(factors_ptr + (at_chunk * 4 + 1) * CHUNK + rows)
    kept_ahead = tl.load(kept_ptr + at_chunk)
    for chunk in range(own_first // CHUNK, tl.cdiv(own_end, CHUNK)):
        first = chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
        at_next = at_chunk + tl.where(chunk + 1 < n_chunks, value_heads, 0)
        from_state = from_state_ahead
        kept = kept_ahead
        # the compiler does not load these ahead
        from_state_ahead = tl.load(factors_ptr + (at_next * 4 + 1) * CHUNK + rows)
        kept_ahead = tl.load(kept_ptr + at_next)
        to_state = tl.load(factors_ptr + at_chunk * 4 * CHUNK + rows)  # 0 for tokens of later documents
        beta = tl.load(factors_ptr + (at_chunk * 4 + 3) * CHUNK + rows)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        v = load_chunk(v_row_ptr, first, n_tokens, v_token_stride, col, VALUE_DIM, CHUNK, COLS)
        t = tl.load(t_ptr + at_chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
        if first >= own_first:  # else a document of another program flows into the chunk
            at_states = states_ptr + at_chunk * KEY_DIM * VALUE_DIM
            store_tile(at_states, state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)
        # by products: values loaded into registers would take those of the pipeline
        values = tl.dot(one, tl.trans(v), input_precision=DOT)
        errors = tl.dot(state.to(k.dtype), tl.trans(k), input_precision=DOT) * from_state[None, :] + values
        errors = (errors * beta[None, :]).to(k.dtype)
        corrected = tl.dot(errors, tl.trans(t), input_precision=DOT)
        owned = is_owned(first + rows, own_first, own_end, n_tokens)[:, None]
        stored = tl.trans(corrected.to(k.dtype))
        at_values = corrected_ptr + at_chunk * CHUNK * VALUE_DIM
        store_tile(at_values, stored, owned, 0, col, CHUNK, VALUE_DIM, CHUNK, COLS, KEEP_ALL=not HAS_DOCUMENTS)
        added = (corrected * to_state[None, :]).to(k.dtype)
        state = tl.dot(added, k, state * kept, input_precision=DOT)
    if HAS_FINAL:  # noqa: SIM102  # a constant alone removes the branch
        if (own_end == n_tokens) & (own_first < own_end):
            store_tile(final_ptr + at_state, state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def outputs_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T / CHUNK, X, CHUNK, V): v̂
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    states_ptr,  # (B, T / CHUNK, X, V, K)
    out_ptr,  # (B, T, X, V)
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Write out_i = scale (exp(G_i) q_iᵀ S + Σ_j D_ij (q_i·k_j) v̂_j)."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    at_heads = batch * n_tokens * value_heads + value_head
    logs = load_numbers(log_ptr + at_heads, tokens, n_tokens, value_heads)

    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, 0, KEY_DIM, CHUNK, KEYS)
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
    row_scale = tl.full([CHUNK], 1.0, tl.float32) * SCALE
    col_scale = tl.full([CHUNK], 1.0, tl.float32)
    if NORMED:
        at_norms = batch * n_tokens * HEADS + head
        row_scale *= load_numbers(q_norm_ptr + at_norms, tokens, n_tokens, HEADS)
        col_scale = load_numbers(k_norm_ptr + at_norms, tokens, n_tokens, HEADS)
    weights = tl.dot(q, tl.trans(k), input_precision=DOT) * row_scale[:, None] * col_scale[None, :]
    weights = (weights * decay_between(logs, starts, CHUNK)).to(q.dtype)
    from_state = row_scale * decay_from_state(logs, starts, first)
    stride = value_heads * VALUE_DIM
    at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
    for col in range(0, VALUE_DIM, COLS):
        state = load_tile(states_ptr + at_chunk * KEY_DIM * VALUE_DIM, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS)
        v = load_tile(corrected_ptr + at_chunk * CHUNK * VALUE_DIM, 0, col, CHUNK, VALUE_DIM, CHUNK, COLS)
        out = tl.dot(q, tl.trans(state), input_precision=DOT) * from_state[:, None]
        out = tl.dot(weights, v, out, input_precision=DOT)
        store_chunk(out_ptr + at_heads * VALUE_DIM, out, first, exists, stride, col, VALUE_DIM, CHUNK, COLS)
