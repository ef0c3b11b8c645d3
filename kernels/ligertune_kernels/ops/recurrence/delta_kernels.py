"""Triton kernels of gated_delta_rule: three forward, seven backward. The mathematics: gated_delta_rule.py.

A row of tokens is cut into chunks of CHUNK tokens, which documents may begin and end within. A document's first token
takes nothing from the state: the state before it is multiplied by 0. So no kernel knows how many documents there are.

    prepare     chunk, value head                G, T, W, U, and 1 / |k|, 1 / |q|
    states      part of a row, value head        S before each chunk, and corrected values v̂ over U
    outputs     chunk, value head                out
    local       chunk, value head                dv̂ from the outputs of the same chunk
    gradients   part of a row, value head        dS after each chunk, and all of dv̂
    values      chunk, value head                y, dv, and the part of dbeta of v
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
    load_chunk,
    load_numbers,
    load_starts,
    load_state,
    owned_tokens,
    part_of_row,
    store_chunk,
    store_state,
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
def _inverse(strict, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
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
    v_ptr,  # (B, T, X, V)
    decay_ptr, beta_ptr,  # (B, T, X)
    starts_ptr,  # (T,) int32
    log_ptr,  # (B, T, X) fp32: G
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    w_ptr,  # (B, T, X, K)
    u_ptr,  # (B, T, X, V)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32: 1 / |q|, 1 / |k|
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    v_batch_stride, v_token_stride, v_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    KEEPS_T: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
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
    # sums over the document alone: those over the chunk would round by the decays of other documents
    logs = tl.sum(tl.where(visible_tokens(starts, CHUNK), decays[None, :], 0.0), 1)
    tl.store(log_ptr + at_heads + tokens.to(tl.int64) * value_heads, logs, mask=exists)
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)

    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_squares = tl.zeros([CHUNK], tl.float32)
    for col in tl.static_range(0, KEY_DIM, COLS):
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

    products *= (key_scale * beta)[:, None] * key_scale[None, :]
    t = _inverse(products * decay_between(logs, starts, CHUNK, STRICT=True), CHUNK, PRECISION)
    t = t.to(k_ptr.dtype.element_ty)
    if KEEPS_T:
        at_tile = ((batch * n_chunks + chunk) * value_heads + value_head) * CHUNK * CHUNK
        rows = tl.arange(0, CHUNK)
        tl.store(t_ptr + at_tile + rows[:, None] * CHUNK + rows[None, :], t)

    from_state = key_scale * beta * decay_from_state(logs, starts, first)
    w_row_ptr = w_ptr + at_heads * KEY_DIM
    for col in tl.static_range(0, KEY_DIM, COLS):
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, col, KEY_DIM, CHUNK, COLS).to(tl.float32)
        w = tl.dot(t, (k * from_state[:, None]).to(t.dtype), input_precision=DOT)
        store_chunk(w_row_ptr, w, first, exists, value_heads * KEY_DIM, col, KEY_DIM, CHUNK, COLS)
    v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
    u_row_ptr = u_ptr + at_heads * VALUE_DIM
    for col in range(0, VALUE_DIM, COLS):
        v = load_chunk(v_row_ptr, first, n_tokens, v_token_stride, col, VALUE_DIM, CHUNK, COLS).to(tl.float32)
        u = tl.dot(t, (v * beta[:, None]).to(t.dtype), input_precision=DOT)
        store_chunk(u_row_ptr, u, first, exists, value_heads * VALUE_DIM, col, VALUE_DIM, CHUNK, COLS)


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
    k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks, part_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Carry the state through the chunks: v̂ = U - W S, then S = s S + Σ r_j k_j v̂_jᵀ."""
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
        own_first, own_end = owned_tokens(begin, last, tl.load(starts_ptr + begin), first_end, last_end)

    at_heads = batch * n_tokens * value_heads + value_head
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    w_row_ptr = w_ptr + at_heads * KEY_DIM
    u_row_ptr = u_ptr + at_heads * VALUE_DIM
    at_state = (batch * value_heads + value_head) * KEY_DIM * VALUE_DIM
    state = tl.zeros([KEYS, COLS], tl.float32)
    if HAS_INITIAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_first == 0:
            state += load_state(initial_ptr + at_state, col, KEY_DIM, VALUE_DIM, KEYS, COLS).to(tl.float32)
    for chunk in range(own_first // CHUNK, tl.cdiv(own_end, CHUNK)):
        first = chunk * CHUNK
        tokens = first + tl.arange(0, CHUNK)
        owned = (tokens >= own_first) & (tokens < own_end)
        if first >= own_first:  # else a document of another program flows into the chunk
            at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * KEY_DIM * VALUE_DIM
            store_state(states_ptr + at_chunk, state, col, KEY_DIM, VALUE_DIM, KEYS, COLS)
        w = load_chunk(w_row_ptr, first, n_tokens, value_heads * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)
        u = load_chunk(u_row_ptr, first, n_tokens, value_heads * VALUE_DIM, col, VALUE_DIM, CHUNK, COLS).to(tl.float32)
        corrected = u - tl.dot(w, state.to(w.dtype), input_precision=DOT)
        store_chunk(u_row_ptr, corrected, first, owned, value_heads * VALUE_DIM, col, VALUE_DIM, CHUNK, COLS)
        logs = load_numbers(log_ptr + at_heads, tokens, n_tokens, value_heads)
        starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
        to_state, kept = decay_to_state(
            logs, starts, log_ptr + at_heads, starts_ptr, first, n_tokens, value_heads, HAS_DOCUMENTS, CHUNK
        )
        if NORMED:
            to_state *= load_numbers(k_norm_ptr + batch * n_tokens * HEADS + head, tokens, n_tokens, HEADS)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        added = (corrected * tl.where(owned, to_state, 0.0)[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), added, state * kept, input_precision=DOT)
    if HAS_FINAL:  # noqa: SIM102  # a constant alone removes the branch
        if (own_end == n_tokens) & (own_first < own_end):
            store_state(final_ptr + at_state, state, col, KEY_DIM, VALUE_DIM, KEYS, COLS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def outputs_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T, X, V): v̂
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    states_ptr,  # (B, T / CHUNK, X, K, V)
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
    at_chunk = ((batch * n_chunks + chunk) * value_heads + value_head) * KEY_DIM * VALUE_DIM
    for col in range(0, VALUE_DIM, COLS):
        state = load_state(states_ptr + at_chunk, col, KEY_DIM, VALUE_DIM, KEYS, COLS)
        v = load_chunk(corrected_ptr + at_heads * VALUE_DIM, first, n_tokens, stride, col, VALUE_DIM, CHUNK, COLS)
        out = tl.dot(q, state, input_precision=DOT) * from_state[:, None]
        out = tl.dot(weights, v, out, input_precision=DOT)
        store_chunk(out_ptr + at_heads * VALUE_DIM, out, first, exists, stride, col, VALUE_DIM, CHUNK, COLS)
