"""Triton kernels of kda's backward, which run after products, factors and states of kernels.py, whose rules hold here.

    local       chunk, value head                  dv̂ from the outputs of the same chunk
    scan        part of a row, value head          dS after each chunk, and dv̂
    values      chunk, value head                  dv, y over dv̂, gradients of the weights and of A, the part of dbeta of v
    channels    chunk, value head, key channels    gradients of unit queries and keys, dg, the part of dbeta of k
    keys        tokens, key head                   dq, dk, dbeta: sums over value heads, and through the lengths
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
    for back in range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - back
        first = chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * VALUE_HEADS + value_head
        kept = tl.load(kept_ptr + at_chunk * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
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


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def kda_channel_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    decay_ptr,  # (B, T, X, K)
    d_out_ptr,  # (B, T, X, V)
    beta_ptr,  # (B, T, X)
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    corrected_ptr, y_ptr,  # (B, T / CHUNK, X, V, CHUNK): v̂, y
    states_ptr, d_states_ptr,  # (B, T / CHUNK, X, V, K)
    d_products_ptr, d_weights_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    dq_ptr, dk_ptr,  # (B, T, X, K) fp32: of unit vectors
    d_decay_ptr,  # (B, T, X, K)
    d_beta_ptr,  # (B, T, X, PARTS) fp32: all but the first
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    g_batch_stride, g_token_stride, g_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of some channels, first those by way of the states, then those within the chunk by levels."""
    chunk = tl.program_id(0) // (PARTS - 1)
    part = tl.program_id(0) % (PARTS - 1)
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = value_head // GROUP
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    col = part * COLS
    rows = tl.arange(0, CHUNK)
    tokens = first + rows
    exists = tokens < n_tokens
    at_heads = batch * n_tokens * value_heads + value_head
    at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
    dq = tl.zeros([CHUNK, COLS], tl.float32)
    dk_reads = tl.zeros([CHUNK, COLS], tl.float32)  # of keys that read, without the factor beta
    dk_read = tl.zeros([CHUNK, COLS], tl.float32)  # of keys that are read
    d_last = tl.zeros([COLS], tl.float32)  # S·dS
    for v_col in range(0, VALUE_DIM, VALUES):
        stride = value_heads * VALUE_DIM
        d_out = load_chunk(d_out_ptr + at_heads * VALUE_DIM, first, n_tokens, stride, v_col, VALUE_DIM, CHUNK, VALUES)
        at_values = at_chunk * VALUE_DIM * CHUNK
        corrected = load_tile(corrected_ptr + at_values, v_col, 0, VALUE_DIM, CHUNK, VALUES, CHUNK)
        y = load_tile(y_ptr + at_values, v_col, 0, VALUE_DIM, CHUNK, VALUES, CHUNK)
        at_state = at_chunk * KEY_DIM * VALUE_DIM
        state = load_tile(states_ptr + at_state, v_col, col, VALUE_DIM, KEY_DIM, VALUES, COLS)
        d_state = load_tile(d_states_ptr + at_state, v_col, col, VALUE_DIM, KEY_DIM, VALUES, COLS)
        dq = tl.dot(d_out, state, dq, input_precision=DOT)
        dk_reads = tl.dot(tl.trans(y), state, dk_reads, input_precision=DOT)
        dk_read = tl.dot(tl.trans(corrected), d_state, dk_read, input_precision=DOT)
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
    q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, col, KEY_DIM, CHUNK, COLS).to(tl.float32)
    k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, col, KEY_DIM, CHUNK, COLS).to(tl.float32)
    q *= q_norm[:, None]
    k *= k_norm[:, None]
    from_state = factors_from_state(high, low, starts, first, CHUNK, SPLIT)
    dq *= from_state * SCALE
    dk_reads *= -from_state
    dk_read *= factors_to_state(high, low, starts, last_start, CHUNK, SPLIT)
    d_last = d_last * factors_of_state(decays, last_start, first) + tl.sum(k * dk_read, 0)

    at_tile = at_chunk * CHUNK * CHUNK
    same_document = starts[:, None] == starts[None, :]
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
    dtype = d_out_ptr.dtype.element_ty
    for level in range(LEVELS):
        factors = level_factors(high, low, level, CHUNK, SPLIT)
        pairs = level_pairs(level, CHUNK) & same_document
        q_decayed = (q * factors).to(dtype)
        k_decayed = (k * factors).to(dtype)
        d_weights = load_tile(d_weights_ptr + at_tile, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_weights = tl.where(pairs, d_weights, 0.0).to(dtype)
        d_products = load_tile(d_products_ptr + at_tile, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_products = tl.where(pairs, d_products, 0.0).to(dtype)
        dq += factors * tl.dot(d_weights, k_decayed, input_precision=DOT)
        dk_reads += factors * tl.dot(d_products, k_decayed, input_precision=DOT)
        d_products = (d_products.to(tl.float32) * beta[:, None]).to(dtype)
        from_later = tl.dot(tl.trans(d_weights), q_decayed, input_precision=DOT)
        from_later = tl.dot(tl.trans(d_products), k_decayed, from_later, input_precision=DOT)
        dk_read += factors * from_later

    at_tokens = at_heads + tokens.to(tl.int64) * value_heads
    tl.store(d_beta_ptr + at_tokens * PARTS + 1 + part, tl.sum(k * dk_reads, 1), mask=exists)
    dk_reads *= beta[:, None]
    # a decay is in the factor of each pair of a token before it, and itself or a token after it
    d_logs = q * dq + k * (dk_reads - dk_read)
    seen = tl.where(visible_tokens_transposed(starts, CHUNK), 1.0, 0.0)
    d_decay = tl.dot(seen, d_logs, input_precision=PRECISION)
    d_decay += tl.where((starts == last_start)[:, None], d_last[None, :], 0.0)
    stride_of_keys = value_heads * KEY_DIM
    at_keys = at_heads * KEY_DIM
    store_chunk(d_decay_ptr + at_keys, d_decay, first, exists, stride_of_keys, col, KEY_DIM, CHUNK, COLS)
    # a token reads itself without a decay
    d_own = load_numbers(d_weights_ptr + at_tile, rows, CHUNK, CHUNK + 1).to(tl.float32)[:, None]
    store_chunk(dq_ptr + at_keys, dq + d_own * k, first, exists, stride_of_keys, col, KEY_DIM, CHUNK, COLS)
    dk = dk_reads + dk_read + d_own * q
    store_chunk(dk_ptr + at_keys, dk, first, exists, stride_of_keys, col, KEY_DIM, CHUNK, COLS)


@triton.jit
def _through_length(grad, x, inverse_length):
    """Return the gradient of vectors x, given that of x / |x|."""
    along = tl.sum(grad * x, 1) * inverse_length * inverse_length
    return inverse_length[:, None] * (grad - x * along[:, None])


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
        dq = _through_length(dq, q, inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, TOKENS))
        dk = _through_length(dk, k, inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, TOKENS))
    at_keys = (batch * n_tokens * HEADS + head) * KEY_DIM
    store_chunk(dq_ptr + at_keys, dq, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, TOKENS, KEYS)
    store_chunk(dk_ptr + at_keys, dk, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, TOKENS, KEYS)
