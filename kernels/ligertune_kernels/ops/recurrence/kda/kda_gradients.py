"""Triton kernels of kda's backward, which run after products, factors and states of kernels.py, whose rules hold here.

    local       chunk, value head                  dv̂ from the outputs of the same chunk
    scan        part of a row, value head          dS after each chunk, and dv̂
    values      chunk, value head                  dv, y over dv̂, gradients of W and A, the part of dbeta of v
    readers     chunk, value head, key channels    gradients of unit queries and of unit keys that read, dbeta of k
    decays      chunk, value head, key channels    gradients of unit keys, dg
    keys        tokens, key head                   dq, dk, dbeta: sums over value heads, and through the lengths

`readers` and `decays` are two kernels because one of both would spill registers.
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
    visible_tokens_transposed,
)
from ligertune_kernels.ops.recurrence.delta_gradients import through_norm
from ligertune_kernels.ops.recurrence.kda.decay_levels import (
    factors_from_state,
    factors_of_state,
    factors_to_state,
    level_factors,
    level_pairs,
    split_decays,
)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_local_gradients_kernel(
    weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    d_out_ptr,  # (B, T, X, V)
    d_corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK)
    n_tokens, n_chunks,
    VALUE_HEADS: tl.constexpr, CHUNK: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write the part Wᵀ dout of dv̂."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    at_chunk = (batch * n_chunks + chunk) * VALUE_HEADS + value_head
    weights = load_tile(weights_ptr + at_chunk * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    d_out_row_ptr = d_out_ptr + (batch * n_tokens * VALUE_HEADS + value_head) * VALUE_DIM
    at_values = d_corrected_ptr + at_chunk * VALUE_DIM * CHUNK
    for col in range(0, VALUE_DIM, COLS):
        d_out = load_chunk(d_out_row_ptr, first, n_tokens, VALUE_HEADS * VALUE_DIM, col, VALUE_DIM, CHUNK, COLS)
        d_corrected = tl.dot(tl.trans(d_out), weights, input_precision=DOT)
        store_tile(at_values, d_corrected, True, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def kda_state_gradients_kernel(
    read_ptr, written_ptr, erased_ptr,  # (B, T / CHUNK, X, CHUNK, K)
    d_out_ptr,  # (B, T, X, V)
    kept_ptr,  # (B, T / CHUNK, X, K) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    d_final_ptr,  # (B, X, V, K)
    d_corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK): in, the local part of dv̂; out, all of it
    d_states_ptr,  # (B, T / CHUNK, X, V, K): of the state after each chunk
    d_initial_ptr,  # (B, X, V, K) fp32
    n_tokens, n_chunks, part_tokens,
    VALUE_HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Carry dS back through the chunks: dv̂ += r k dS, then dS = s dS + scale (m q)ᵀ dout + wᵀ dv̂. All transposed."""
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

    d_out_row_ptr = d_out_ptr + (batch * n_tokens * VALUE_HEADS + value_head) * VALUE_DIM
    rows = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEYS)
    at_state = (batch * VALUE_HEADS + value_head) * KEY_DIM * VALUE_DIM
    d_state = tl.zeros([COLS, KEYS], tl.float32)
    dtype = erased_ptr.dtype.element_ty
    one = identity(COLS, dtype)
    if HAS_FINAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_end == n_tokens:
            d_state += load_tile(d_final_ptr + at_state, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS).to(tl.float32)
    first_chunk = own_first // CHUNK
    end_chunk = tl.cdiv(own_end, CHUNK)
    at_chunk = (batch * n_chunks + end_chunk - 1) * VALUE_HEADS + value_head
    kept_ahead = tl.load(kept_ptr + at_chunk * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    for back in range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - back
        first = chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * VALUE_HEADS + value_head
        at_next = at_chunk - tl.where(chunk > 0, VALUE_HEADS, 0)
        kept = kept_ahead
        # the compiler does not load these ahead
        kept_ahead = tl.load(kept_ptr + at_next * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
        at_keys = at_chunk * CHUNK * KEY_DIM
        # `read` and `erased` are 0 for tokens of other programs, if the gradient is needed before the chunk
        read = load_tile(read_ptr + at_keys, 0, 0, CHUNK, KEY_DIM, CHUNK, KEYS)
        written = load_tile(written_ptr + at_keys, 0, 0, CHUNK, KEY_DIM, CHUNK, KEYS)
        erased = load_tile(erased_ptr + at_keys, 0, 0, CHUNK, KEY_DIM, CHUNK, KEYS)
        at_values = d_corrected_ptr + at_chunk * VALUE_DIM * CHUNK
        local = load_tile(at_values, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        d_out = load_chunk(d_out_row_ptr, first, n_tokens, VALUE_HEADS * VALUE_DIM, col, VALUE_DIM, CHUNK, COLS)
        if tl.minimum(first + CHUNK, n_tokens) <= own_end:  # else the chunk's last token belongs to another program
            at_states = d_states_ptr + at_chunk * KEY_DIM * VALUE_DIM
            store_tile(at_states, d_state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)
        # by a product: values loaded into registers would take those of the pipeline
        d_corrected = tl.dot(one, local, input_precision=DOT)
        d_corrected = tl.dot(d_state.to(dtype), tl.trans(written), d_corrected, input_precision=DOT)
        owned = is_owned(first + rows, own_first, own_end, n_tokens)[None, :]
        store_tile(at_values, d_corrected, owned, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=not HAS_DOCUMENTS)
        d_state = tl.dot(tl.trans(d_out), read, d_state * kept[None, :], input_precision=DOT)
        d_state = tl.dot(d_corrected.to(dtype), erased, d_state, input_precision=DOT)
    if HAS_INITIAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_first == 0:
            store_tile(d_initial_ptr + at_state, d_state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_value_gradients_kernel(
    v_ptr,  # (B, T, X, V)
    d_out_ptr,  # (B, T, X, V)
    beta_ptr,  # (B, T, X)
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK): v̂
    y_ptr,  # (B, T / CHUNK, X, V, CHUNK): in, dv̂; out, y
    dv_ptr,  # (B, T, X, V)
    d_beta_ptr,  # (B, T, X, PARTS) fp32: the first
    d_products_ptr, d_weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK): -y v̂ᵀ, scale dout v̂ᵀ; all pairs
    v_batch_stride, v_token_stride, v_head_stride,
    n_tokens, n_chunks,
    VALUE_HEADS: tl.constexpr, CHUNK: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    SCALE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write y = Tᵀ dv̂, dv = β y, the part y·v of dbeta, and the gradients of both products of queries and keys."""
    chunk = tl.program_id(0)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    stride = VALUE_HEADS * VALUE_DIM
    at_heads = batch * n_tokens * VALUE_HEADS + value_head
    at_chunk = (batch * n_chunks + chunk) * VALUE_HEADS + value_head
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, VALUE_HEADS).to(tl.float32)
    t = load_tile(t_ptr + at_chunk * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
    at_values = at_chunk * VALUE_DIM * CHUNK
    d_beta = tl.zeros([CHUNK], tl.float32)
    d_products = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_weights = tl.zeros([CHUNK, CHUNK], tl.float32)
    for col in range(0, VALUE_DIM, COLS):
        d_corrected = load_tile(y_ptr + at_values, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        corrected = load_tile(corrected_ptr + at_values, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        y = tl.dot(tl.trans(t), tl.trans(d_corrected), input_precision=DOT)
        v = load_chunk(v_row_ptr, first, n_tokens, v_token_stride, col, VALUE_DIM, CHUNK, COLS).to(tl.float32)
        d_beta += tl.sum(y * v, 1)
        at_dv = dv_ptr + at_heads * VALUE_DIM
        store_chunk(at_dv, y * beta[:, None], first, exists, stride, col, VALUE_DIM, CHUNK, COLS)
        y = y.to(t.dtype)
        store_tile(y_ptr + at_values, tl.trans(y), True, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=True)
        d_products = tl.dot(y, corrected, d_products, input_precision=DOT)
        d_out = load_chunk(d_out_ptr + at_heads * VALUE_DIM, first, n_tokens, stride, col, VALUE_DIM, CHUNK, COLS)
        d_weights = tl.dot(d_out, corrected, d_weights, input_precision=DOT)
    at_tile = at_chunk * CHUNK * CHUNK
    store_tile(d_products_ptr + at_tile, -d_products, True, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK, KEEP_ALL=True)
    store_tile(d_weights_ptr + at_tile, d_weights * SCALE, True, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK, KEEP_ALL=True)
    at_tokens = at_heads + tokens.to(tl.int64) * VALUE_HEADS
    tl.store(d_beta_ptr + at_tokens * PARTS, d_beta, mask=exists)


@triton.jit
def _load_units(
    ptr, first, n_tokens, token_stride, first_col, inverse_lengths, N_COLS: tl.constexpr, CHUNK: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Load columns (CHUNK, COLS) of the unit vectors of queries or keys, fp32."""
    tile = load_chunk(ptr, first, n_tokens, token_stride, first_col, N_COLS, CHUNK, COLS)
    return tile.to(tl.float32) * inverse_lengths[:, None]


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_reader_gradients_kernel(
    k_ptr,  # (B, T, H, K)
    decay_ptr,  # (B, T, X, K)
    d_out_ptr,  # (B, T, X, V)
    beta_ptr,  # (B, T, X)
    k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    y_ptr,  # (B, T / CHUNK, X, V, CHUNK)
    states_ptr,  # (B, T / CHUNK, X, V, K)
    d_products_ptr, d_weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    dq_ptr, dk_ptr,  # (B, T, X, K) fp32: of unit vectors that read
    d_beta_ptr,  # (B, T, X, PARTS) fp32: all but the first
    k_batch_stride, k_token_stride, k_head_stride, g_batch_stride, g_token_stride, g_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, SCALE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Differentiate what queries and keys read of the state and, by levels, of earlier keys: dq, β z and k·z."""
    chunk = tl.program_id(0) // (PARTS - 1)
    part = tl.program_id(0) % (PARTS - 1)
    col = part * COLS
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    tokens = first + rows
    exists = tokens < n_tokens
    at_heads = batch * n_tokens * value_heads + value_head
    at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
    stride = value_heads * VALUE_DIM
    dq = tl.zeros([CHUNK, COLS], tl.float32)
    z = tl.zeros([CHUNK, COLS], tl.float32)
    for v_col in range(0, VALUE_DIM, VALUES):
        d_out = load_chunk(d_out_ptr + at_heads * VALUE_DIM, first, n_tokens, stride, v_col, VALUE_DIM, CHUNK, VALUES)
        y = load_tile(y_ptr + at_chunk * VALUE_DIM * CHUNK, v_col, 0, VALUE_DIM, CHUNK, VALUES, CHUNK)
        at_state = states_ptr + at_chunk * KEY_DIM * VALUE_DIM
        state = load_tile(at_state, v_col, col, VALUE_DIM, KEY_DIM, VALUES, COLS)
        dq = tl.dot(d_out, state, dq, input_precision=DOT)
        z = tl.dot(tl.trans(y), state, z, input_precision=DOT)

    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    decay_row_ptr = decay_ptr + batch * g_batch_stride + value_head * g_head_stride
    decays = load_chunk(decay_row_ptr, first, n_tokens, g_token_stride, col, KEY_DIM, CHUNK, COLS)
    high, low = split_decays(decays, SPLIT)
    from_state = factors_from_state(high, low, starts, first, CHUNK, SPLIT)
    dq *= from_state * SCALE
    z *= -from_state
    k_norm = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    at_tile = at_chunk * CHUNK * CHUNK
    dtype = d_weights_ptr.dtype.element_ty
    first_seen = starts - first
    for level in range(LEVELS):
        factors = level_factors(high, low, level, CHUNK, SPLIT)
        pairs = level_pairs(first_seen, level, CHUNK)
        again = tl.minimum(level, 0)  # 0: see kda_products_kernel
        k = _load_units(k_row_ptr, first + again, n_tokens, k_token_stride, col, k_norm, KEY_DIM, CHUNK, COLS)
        k_decayed = (k * factors).to(dtype)
        d_weights = load_tile(d_weights_ptr + at_tile, again, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_weights = tl.where(pairs, d_weights, 0.0).to(dtype)
        dq += factors * tl.dot(d_weights, k_decayed, input_precision=DOT)
        d_products = load_tile(d_products_ptr + at_tile, again, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_products = tl.where(pairs, d_products, 0.0).to(dtype)
        z += factors * tl.dot(d_products, k_decayed, input_precision=DOT)

    k = _load_units(k_row_ptr, first, n_tokens, k_token_stride, col, k_norm, KEY_DIM, CHUNK, COLS)
    at_tokens = at_heads + tokens.to(tl.int64) * value_heads
    tl.store(d_beta_ptr + at_tokens * PARTS + 1 + part, tl.sum(k * z, 1), mask=exists)
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
    key_stride = value_heads * KEY_DIM
    store_chunk(dk_ptr + at_heads * KEY_DIM, z * beta[:, None], first, exists, key_stride, col, KEY_DIM, CHUNK, COLS)
    # a query reads its own key without a decay
    d_own = load_numbers(d_weights_ptr + at_tile, rows, CHUNK, CHUNK + 1).to(tl.float32)
    dq += d_own[:, None] * k
    store_chunk(dq_ptr + at_heads * KEY_DIM, dq, first, exists, key_stride, col, KEY_DIM, CHUNK, COLS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_decay_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    decay_ptr,  # (B, T, X, K)
    beta_ptr,  # (B, T, X)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK): v̂
    states_ptr, d_states_ptr,  # (B, T / CHUNK, X, V, K)
    d_products_ptr, d_weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    dq_ptr,  # (B, T, X, K) fp32: of unit queries
    dk_ptr,  # (B, T, X, K) fp32: in, of unit keys that read; out, of unit keys
    d_decay_ptr,  # (B, T, X, K)
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    g_batch_stride, g_token_stride, g_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Differentiate where the state and, by levels, later tokens read a key: write dk, and dg, which needs dq, too."""
    chunk = tl.program_id(0) // (PARTS - 1)
    col = tl.program_id(0) % (PARTS - 1) * COLS
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    at_heads = batch * n_tokens * value_heads + value_head
    at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
    x = tl.zeros([CHUNK, COLS], tl.float32)
    d_last = tl.zeros([COLS], tl.float32)  # S·dS
    for v_col in range(0, VALUE_DIM, VALUES):
        corrected = load_tile(corrected_ptr + at_chunk * VALUE_DIM * CHUNK, v_col, 0, VALUE_DIM, CHUNK, VALUES, CHUNK)
        at_state = at_chunk * KEY_DIM * VALUE_DIM
        state = load_tile(states_ptr + at_state, v_col, col, VALUE_DIM, KEY_DIM, VALUES, COLS)
        d_state = load_tile(d_states_ptr + at_state, v_col, col, VALUE_DIM, KEY_DIM, VALUES, COLS)
        x = tl.dot(tl.trans(corrected), d_state, x, input_precision=DOT)
        d_last += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 0)

    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    last_start = load_starts(starts_ptr, tl.minimum(first + CHUNK, n_tokens) - 1, n_tokens, HAS_DOCUMENTS)
    decay_row_ptr = decay_ptr + batch * g_batch_stride + value_head * g_head_stride
    decays = load_chunk(decay_row_ptr, first, n_tokens, g_token_stride, col, KEY_DIM, CHUNK, COLS)
    high, low = split_decays(decays, SPLIT)
    q_norm = inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    k_norm = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    units = _load_units(k_row_ptr, first, n_tokens, k_token_stride, col, k_norm, KEY_DIM, CHUNK, COLS)
    x *= factors_to_state(high, low, starts, last_start, CHUNK, SPLIT)
    d_last = d_last * factors_of_state(decays, last_start, first) + tl.sum(units * x, 0)

    at_tile = at_chunk * CHUNK * CHUNK
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
    dtype = d_weights_ptr.dtype.element_ty
    first_seen = starts - first
    for level in range(LEVELS):
        factors = level_factors(high, low, level, CHUNK, SPLIT)
        pairs = level_pairs(first_seen, level, CHUNK)
        again = tl.minimum(level, 0)  # 0: see kda_products_kernel
        q = _load_units(q_row_ptr, first + again, n_tokens, q_token_stride, col, q_norm, KEY_DIM, CHUNK, COLS)
        d_weights = load_tile(d_weights_ptr + at_tile, again, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_weights = tl.where(pairs, d_weights, 0.0).to(dtype)
        from_later = tl.dot(tl.trans(d_weights), (q * factors).to(dtype), input_precision=DOT)
        k = _load_units(k_row_ptr, first + again, n_tokens, k_token_stride, col, k_norm, KEY_DIM, CHUNK, COLS)
        k_decayed = (k * factors).to(dtype)
        d_products = load_tile(d_products_ptr + at_tile, again, 0, CHUNK, CHUNK, CHUNK, CHUNK).to(tl.float32)
        d_products = tl.where(pairs, d_products * beta[:, None], 0.0).to(dtype)
        from_later = tl.dot(tl.trans(d_products), k_decayed, from_later, input_precision=DOT)
        x += factors * from_later

    # a query reads its own key without a decay
    d_own = load_numbers(d_weights_ptr + at_tile, tokens - first, CHUNK, CHUNK + 1).to(tl.float32)
    unit_q = _load_units(q_row_ptr, first, n_tokens, q_token_stride, col, q_norm, KEY_DIM, CHUNK, COLS)
    x += d_own[:, None] * unit_q
    exists = tokens < n_tokens
    stride = value_heads * KEY_DIM
    at_keys = at_heads * KEY_DIM
    dk_reads = load_chunk(dk_ptr + at_keys, first, n_tokens, stride, col, KEY_DIM, CHUNK, COLS)
    dq = load_chunk(dq_ptr + at_keys, first, n_tokens, stride, col, KEY_DIM, CHUNK, COLS)
    unit_k = _load_units(k_row_ptr, first, n_tokens, k_token_stride, col, k_norm, KEY_DIM, CHUNK, COLS)
    # a decay is in the factor of each pair of a token before it, and itself or a token after it
    d_logs = unit_q * dq + unit_k * (dk_reads - x)
    store_chunk(dk_ptr + at_keys, dk_reads + x, first, exists, stride, col, KEY_DIM, CHUNK, COLS)
    later = tl.where(visible_tokens_transposed(starts, CHUNK), 1.0, 0.0)
    d_decay = tl.dot(later, d_logs, input_precision=PRECISION)
    d_decay += tl.where((starts == last_start)[:, None], d_last[None, :], 0.0)
    store_chunk(d_decay_ptr + at_keys, d_decay, first, exists, stride, col, KEY_DIM, CHUNK, COLS)


@triton.jit(do_not_specialize=["n_tokens"])
def kda_key_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    dq_of_units_ptr, dk_of_units_ptr,  # (B, T, X, K) fp32
    d_beta_parts_ptr,  # (B, T, X, PARTS) fp32
    dq_ptr, dk_ptr,  # (B, T, H, K)
    d_beta_ptr,  # (B, T, X)
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, TOKENS: tl.constexpr, KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dbeta: add up what value heads and parts of the channels have written."""
    first = tl.program_id(0) * TOKENS
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tokens = first + tl.arange(0, TOKENS)
    exists = tokens < n_tokens
    value_heads = HEADS * GROUP
    dq = tl.zeros([TOKENS, KEYS], tl.float32)
    dk = tl.zeros([TOKENS, KEYS], tl.float32)
    for member in range(GROUP):
        at_heads = batch * n_tokens * value_heads + head * GROUP + member
        stride = value_heads * KEY_DIM
        dq += load_chunk(dq_of_units_ptr + at_heads * KEY_DIM, first, n_tokens, stride, 0, KEY_DIM, TOKENS, KEYS)
        dk += load_chunk(dk_of_units_ptr + at_heads * KEY_DIM, first, n_tokens, stride, 0, KEY_DIM, TOKENS, KEYS)
        at_tokens = at_heads + tokens.to(tl.int64) * value_heads
        d_beta = tl.zeros([TOKENS], tl.float32)
        for part in tl.static_range(PARTS):
            d_beta += tl.load(d_beta_parts_ptr + at_tokens * PARTS + part, mask=exists, other=0.0)
        tl.store(d_beta_ptr + at_tokens, d_beta.to(d_beta_ptr.dtype.element_ty), mask=exists)
    if NORMED:
        q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
        k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, 0, KEY_DIM, TOKENS, KEYS).to(tl.float32)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, TOKENS, KEYS).to(tl.float32)
        dq = through_norm(dq, q, inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, TOKENS))
        dk = through_norm(dk, k, inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, TOKENS))
    at_keys = (batch * n_tokens * HEADS + head) * KEY_DIM
    store_chunk(dq_ptr + at_keys, dq, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, TOKENS, KEYS)
    store_chunk(dk_ptr + at_keys, dk, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, TOKENS, KEYS)
