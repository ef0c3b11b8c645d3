"""Triton kernels of gated_delta_rule's backward. Names, shapes and rules: delta_kernels.py."""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.recurrence.chunks import (
    decay_between,
    decay_between_transposed,
    decay_from_state,
    decay_to_state,
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
    visible_tokens,
)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def local_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    d_out_ptr,  # (B, T, X, V)
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    d_corrected_ptr,  # (B, T / CHUNK, X, V, CHUNK)
    d_read_ptr,  # (B, T, X, V): scale m / |q| dout, what the state gets for q
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Write the part of dv̂ that comes from outputs of the same chunk: dv̂_j = scale Σ_i D_ij (q_i·k_j) dout_i.

    Write also what the gradient of the state gets for each query.
    """
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
    k_scale = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    q_scale = inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK) * SCALE
    from_state = q_scale * decay_from_state(logs, starts, first)
    weights = tl.dot(q, tl.trans(k), input_precision=DOT) * q_scale[:, None] * k_scale[None, :]
    weights = (weights * decay_between(logs, starts, CHUNK)).to(q.dtype)
    stride = value_heads * VALUE_DIM
    at_values = at_heads * VALUE_DIM
    d_corrected_ptr += ((batch * n_chunks + chunk) * value_heads + value_head) * VALUE_DIM * CHUNK
    for col in range(0, VALUE_DIM, COLS):
        d_out = load_chunk(d_out_ptr + at_values, first, n_tokens, stride, col, VALUE_DIM, CHUNK, COLS)
        d_read = d_out.to(tl.float32) * from_state[:, None]
        store_chunk(d_read_ptr + at_values, d_read, first, exists, stride, col, VALUE_DIM, CHUNK, COLS)
        d_corrected = tl.dot(tl.trans(d_out), weights, input_precision=DOT)
        store_tile(d_corrected_ptr, d_corrected, True, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def state_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    t_ptr,  # (B, T / CHUNK, X, CHUNK, CHUNK)
    d_read_ptr,  # (B, T, X, V)
    factors_ptr,  # (B, T / CHUNK, X, 4, CHUNK) fp32
    kept_ptr,  # (B, T / CHUNK, X) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    d_final_ptr,  # (B, X, V, K)
    y_ptr,  # (B, T / CHUNK, X, V, CHUNK): in, the local part of dv̂
    d_states_ptr,  # (B, T / CHUNK, X, V, K): of the state after each chunk
    d_initial_ptr,  # (B, X, V, K) fp32
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks, part_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Carry dS back through the chunks: dv̂ += r k dS, y = Tᵀ dv̂, then dS = s dS + scale (m q)ᵀ dout - (m k)ᵀ β y.

    All of it transposed, as in states_kernel.
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

    at_heads = batch * n_tokens * value_heads + value_head
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    d_read_row_ptr = d_read_ptr + at_heads * VALUE_DIM
    rows = tl.arange(0, CHUNK)
    stride = value_heads * VALUE_DIM
    at_state = (batch * value_heads + value_head) * KEY_DIM * VALUE_DIM
    d_state = tl.zeros([COLS, KEYS], tl.float32)
    one = identity(COLS, k_ptr.dtype.element_ty)
    if HAS_FINAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_end == n_tokens:
            d_state += load_tile(d_final_ptr + at_state, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS).to(tl.float32)
    first_chunk = own_first // CHUNK
    end_chunk = tl.cdiv(own_end, CHUNK)
    at_chunk = (batch * n_chunks + end_chunk - 1) * value_heads + value_head
    to_state_ahead = tl.load(factors_ptr + at_chunk * 4 * CHUNK + rows)
    kept_ahead = tl.load(kept_ptr + at_chunk)
    for back in range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - back
        first = chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
        at_next = at_chunk - tl.where(chunk > 0, value_heads, 0)
        to_state = to_state_ahead
        kept = kept_ahead
        # the compiler does not load these ahead
        to_state_ahead = tl.load(factors_ptr + at_next * 4 * CHUNK + rows)
        kept_ahead = tl.load(kept_ptr + at_next)
        # this and d_read are 0 for tokens of other programs, if the gradient is needed before the chunk
        from_state = tl.load(factors_ptr + (at_chunk * 4 + 2) * CHUNK + rows)
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        t = tl.load(t_ptr + at_chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
        at_values = y_ptr + at_chunk * VALUE_DIM * CHUNK
        local = load_tile(at_values, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        d_read = load_chunk(d_read_row_ptr, first, n_tokens, stride, col, VALUE_DIM, CHUNK, COLS)
        if tl.minimum(first + CHUNK, n_tokens) <= own_end:  # else the chunk's last token belongs to another program
            at_states = d_states_ptr + at_chunk * KEY_DIM * VALUE_DIM
            store_tile(at_states, d_state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)
        # by a product: values loaded into registers would take those of the pipeline
        local = tl.dot(one, local, input_precision=DOT)
        d_corrected = tl.dot(d_state.to(k.dtype), tl.trans(k), input_precision=DOT) * to_state[None, :] + local
        y = tl.dot(d_corrected.to(k.dtype), t, input_precision=DOT)
        owned = is_owned(first + rows, own_first, own_end, n_tokens)[None, :]
        store_tile(at_values, y, owned, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK, KEEP_ALL=not HAS_DOCUMENTS)
        d_state = tl.dot(tl.trans(d_read), q, d_state * kept, input_precision=DOT)
        d_state = tl.dot((y * from_state[None, :]).to(k.dtype), k, d_state, input_precision=DOT)
    if HAS_INITIAL:  # noqa: SIM102  # a constant alone removes the branch
        if own_first == 0:
            store_tile(d_initial_ptr + at_state, d_state, True, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS, KEEP_ALL=True)


@triton.jit
def through_norm(grad, x, inverse_norm):
    """Return the gradient of x, given that of its unit vector x / |x|."""
    x = x.to(tl.float32)
    along = tl.sum(grad * x, 1) * inverse_norm * inverse_norm
    return inverse_norm[:, None] * (grad - x * along[:, None])


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def query_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T / CHUNK, X, CHUNK, V): v̂
    d_out_ptr,  # (B, T, X, V)
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    kept_ptr,  # (B, T / CHUNK, X) fp32
    starts_ptr,  # (T,) int32
    states_ptr, d_states_ptr,  # (B, T / CHUNK, X, V, K)
    dq_ptr,  # (B, T, H, K)
    d_log_ptr,  # (B, T, X) fp32: the part of the gradient of G
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Write dq = scale (m dout Sᵀ + (D ∘ dout v̂ᵀ) k).

    G of a token that reads has the gradient q·dq, and that of the last token also s S·dS.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    stride = value_heads * VALUE_DIM
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    q_scale = inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    k_scale = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    dq = tl.zeros([CHUNK, KEYS], tl.float32)
    for member in range(GROUP):
        value_head = head * GROUP + member
        at_heads = batch * n_tokens * value_heads + value_head
        at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
        dq_new = tl.zeros([CHUNK, KEYS], tl.float32)
        d_weights = tl.zeros([CHUNK, CHUNK], tl.float32)
        carried = 0.0  # S·dS
        for col in range(0, VALUE_DIM, COLS):
            d_out = load_chunk(d_out_ptr + at_heads * VALUE_DIM, first, n_tokens, stride, col, VALUE_DIM, CHUNK, COLS)
            v = load_tile(corrected_ptr + at_chunk * CHUNK * VALUE_DIM, 0, col, CHUNK, VALUE_DIM, CHUNK, COLS)
            state = load_tile(states_ptr + at_chunk * KEY_DIM * VALUE_DIM, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS)
            d_state = load_tile(d_states_ptr + at_chunk * KEY_DIM * VALUE_DIM, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS)
            d_weights = tl.dot(d_out, tl.trans(v), d_weights, input_precision=DOT)
            dq_new = tl.dot(d_out, state, dq_new, input_precision=DOT)
            carried += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
        starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
        logs = load_numbers(log_ptr + at_heads, tokens, n_tokens, value_heads)
        dq_new *= (SCALE * decay_from_state(logs, starts, first))[:, None]
        d_weights *= decay_between(logs, starts, CHUNK) * (SCALE * k_scale)[None, :]  # k enters as it is
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        dq_new = tl.dot(d_weights.to(k.dtype), k, dq_new, input_precision=DOT)
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        d_logs = tl.sum(q.to(tl.float32) * dq_new, 1) * q_scale
        kept = tl.load(kept_ptr + at_chunk)
        d_logs += tl.where(tokens == tl.minimum(first + CHUNK, n_tokens) - 1, kept * carried, 0.0)
        tl.store(d_log_ptr + at_heads + tokens.to(tl.int64) * value_heads, d_logs, mask=exists)
        dq += dq_new
    if NORMED:
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        dq = through_norm(dq, q, q_scale)
    at_keys = (batch * n_tokens * HEADS + head) * KEY_DIM
    store_chunk(dq_ptr + at_keys, dq, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def value_gradients_kernel(
    v_ptr,  # (B, T, X, V)
    y_ptr,  # (B, T / CHUNK, X, V, CHUNK)
    beta_ptr,  # (B, T, X)
    dv_ptr,  # (B, T, X, V)
    d_beta_ptr,  # (B, T, X) fp32: the part of v
    v_batch_stride, v_token_stride, v_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Write dv = β y, and the part y·v of dbeta."""
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    value_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    stride = value_heads * VALUE_DIM
    at_heads = batch * n_tokens * value_heads + value_head
    at_values = at_heads * VALUE_DIM
    beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
    v_row_ptr = v_ptr + batch * v_batch_stride + value_head * v_head_stride
    y_ptr += ((batch * n_chunks + chunk) * value_heads + value_head) * VALUE_DIM * CHUNK
    d_beta = tl.zeros([CHUNK], tl.float32)
    for col in range(0, VALUE_DIM, COLS):
        y = tl.trans(load_tile(y_ptr, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)).to(tl.float32)
        v = load_chunk(v_row_ptr, first, n_tokens, v_token_stride, col, VALUE_DIM, CHUNK, COLS).to(tl.float32)
        d_beta += tl.sum(y * v, 1)
        store_chunk(dv_ptr + at_values, y * beta[:, None], first, exists, stride, col, VALUE_DIM, CHUNK, COLS)
    tl.store(d_beta_ptr + at_heads + tokens.to(tl.int64) * value_heads, d_beta, mask=exists)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def correction_gradients_kernel(
    k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T / CHUNK, X, CHUNK, V): v̂
    y_ptr,  # (B, T / CHUNK, X, V, CHUNK)
    beta_ptr,  # (B, T, X)
    log_ptr,  # (B, T, X) fp32
    k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    states_ptr,  # (B, T / CHUNK, X, V, K)
    dk_ptr,  # (B, T, H, K) fp32: of the unit vector of a key that reads
    partial_d_beta_ptr,  # (B, T, X) fp32
    d_beta_ptr,  # (B, T, X)
    d_log_ptr,  # (B, T, X) fp32: in, the part of q; out, that of k, too
    k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Differentiate v̂ = T β (v - m kᵀ S) where a key reads: write dbeta, and add up dk and the gradient of G."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    k_scale = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    N_STEPS: tl.constexpr = (VALUE_DIM + COLS - 1) // COLS
    dk = tl.zeros([CHUNK, KEYS], tl.float32)
    dk_new = tl.zeros([CHUNK, KEYS], tl.float32)
    d_products = tl.zeros([CHUNK, CHUNK], tl.float32)
    # one loop over value heads and their columns, so that what the next needs is loaded ahead
    for step in range(0, GROUP * N_STEPS):
        col = step % N_STEPS * COLS
        value_head = head * GROUP + step // N_STEPS
        at_heads = batch * n_tokens * value_heads + value_head
        at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
        y = tl.trans(load_tile(y_ptr + at_chunk * VALUE_DIM * CHUNK, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK))
        v = load_tile(corrected_ptr + at_chunk * CHUNK * VALUE_DIM, 0, col, CHUNK, VALUE_DIM, CHUNK, COLS)
        state = load_tile(states_ptr + at_chunk * KEY_DIM * VALUE_DIM, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS)
        d_products = tl.dot(y, tl.trans(v), d_products, input_precision=DOT)
        dk_new = tl.dot(y, state, dk_new, input_precision=DOT)
        if step % N_STEPS == N_STEPS - 1:
            starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
            logs = load_numbers(log_ptr + at_heads, tokens, n_tokens, value_heads)
            # without the factor beta, which is differentiated, too
            dk_new *= -decay_from_state(logs, starts, first)[:, None]
            d_products *= -decay_between(logs, starts, CHUNK, STRICT=True) * k_scale[None, :]
            k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
            dk_new = tl.dot(d_products.to(k.dtype), k, dk_new, input_precision=DOT)
            reads = tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale
            at_tokens = at_heads + tokens.to(tl.int64) * value_heads
            d_beta = tl.load(partial_d_beta_ptr + at_tokens, mask=exists, other=0.0) + reads
            tl.store(d_beta_ptr + at_tokens, d_beta.to(d_beta_ptr.dtype.element_ty), mask=exists)
            beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
            d_logs = tl.load(d_log_ptr + at_tokens, mask=exists, other=0.0) + beta * reads
            tl.store(d_log_ptr + at_tokens, d_logs, mask=exists)
            dk += dk_new * beta[:, None]
            dk_new = tl.zeros([CHUNK, KEYS], tl.float32)
            d_products = tl.zeros([CHUNK, CHUNK], tl.float32)
    at_keys = (batch * n_tokens * HEADS + head) * KEY_DIM
    store_chunk(dk_ptr + at_keys, dk, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def key_gradients_kernel(
    q_ptr, k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T / CHUNK, X, CHUNK, V): v̂
    d_out_ptr,  # (B, T, X, V)
    log_ptr,  # (B, T, X) fp32
    q_norm_ptr, k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    d_states_ptr,  # (B, T / CHUNK, X, V, K)
    dk_ptr,  # (B, T, H, K) fp32: in, of keys that read; out, also where queries and the state read them
    d_log_ptr,  # (B, T, X) fp32: in and out as dk
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Add to dk what keys get where queries and the state after the chunk read them: scale (D ∘ dout v̂ᵀ)ᵀ q + r v̂ dSᵀ.

    G of a token that is read has the gradient -k·dk, and that of the last token all that the state got from the chunk.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    last = tl.minimum(first + CHUNK, n_tokens) - 1
    stride = value_heads * VALUE_DIM
    q_row_ptr = q_ptr + batch * q_batch_stride + head * q_head_stride
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    q_scale = inverse_lengths(q_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    k_scale = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    dk = tl.zeros([CHUNK, KEYS], tl.float32)
    for member in range(GROUP):
        value_head = head * GROUP + member
        at_heads = batch * n_tokens * value_heads + value_head
        at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
        dk_new = tl.zeros([CHUNK, KEYS], tl.float32)
        d_weights = tl.zeros([CHUNK, CHUNK], tl.float32)  # transposed
        for col in range(0, VALUE_DIM, COLS):
            d_out = load_chunk(d_out_ptr + at_heads * VALUE_DIM, first, n_tokens, stride, col, VALUE_DIM, CHUNK, COLS)
            v = load_tile(corrected_ptr + at_chunk * CHUNK * VALUE_DIM, 0, col, CHUNK, VALUE_DIM, CHUNK, COLS)
            d_state = load_tile(d_states_ptr + at_chunk * KEY_DIM * VALUE_DIM, col, 0, VALUE_DIM, KEY_DIM, COLS, KEYS)
            d_weights = tl.dot(v, tl.trans(d_out), d_weights, input_precision=DOT)
            dk_new = tl.dot(v, d_state, dk_new, input_precision=DOT)
        starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
        logs = load_numbers(log_ptr + at_heads, tokens, n_tokens, value_heads)
        last_log = tl.load(log_ptr + at_heads + last.to(tl.int64) * value_heads)
        to_state, _ = decay_to_state(logs, starts, last_log, starts_ptr, first, last, HAS_DOCUMENTS)
        dk_new *= to_state[:, None]
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        d_last = tl.sum(tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale)
        d_weights *= decay_between_transposed(logs, starts, CHUNK) * (SCALE * q_scale)[None, :]
        q = load_chunk(q_row_ptr, first, n_tokens, q_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        dk_new = tl.dot(d_weights.to(q.dtype), q, dk_new, input_precision=DOT)
        k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
        at_tokens = at_heads + tokens.to(tl.int64) * value_heads
        d_logs = tl.load(d_log_ptr + at_tokens, mask=exists, other=0.0)
        d_logs -= tl.sum(k.to(tl.float32) * dk_new, 1) * k_scale
        d_logs += tl.where(tokens == last, d_last, 0.0)
        tl.store(d_log_ptr + at_tokens, d_logs, mask=exists)
        dk += dk_new
    at_keys = (batch * n_tokens * HEADS + head) * KEY_DIM
    dk += load_chunk(dk_ptr + at_keys, first, n_tokens, HEADS * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)
    store_chunk(dk_ptr + at_keys, dk, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def product_gradients_kernel(
    k_ptr,  # (B, T, H, K)
    corrected_ptr,  # (B, T / CHUNK, X, CHUNK, V): v̂
    y_ptr,  # (B, T / CHUNK, X, V, CHUNK)
    beta_ptr,  # (B, T, X)
    log_ptr,  # (B, T, X) fp32
    k_norm_ptr,  # (B, T, H) fp32
    starts_ptr,  # (T,) int32
    partial_dk_ptr,  # (B, T, H, K) fp32: of all but keys that later keys read
    d_log_ptr,  # (B, T, X) fp32
    dk_ptr,  # (B, T, H, K)
    d_decay_ptr,  # (B, T, X)
    k_batch_stride, k_token_stride, k_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Write dk and dg: add what keys get where later keys of the chunk read them, (β D ∘ dA)ᵀ k."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    value_heads = HEADS * GROUP
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    exists = tokens < n_tokens
    k_row_ptr = k_ptr + batch * k_batch_stride + head * k_head_stride
    k_scale = inverse_lengths(k_norm_ptr, batch, head, tokens, n_tokens, HEADS, NORMED, CHUNK)
    k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
    products = tl.dot(k, tl.trans(k), input_precision=DOT) * k_scale[:, None]
    N_STEPS: tl.constexpr = (VALUE_DIM + COLS - 1) // COLS
    sums = tl.zeros([CHUNK, CHUNK], tl.float32)  # of d_products over value heads, which share k
    d_products = tl.zeros([CHUNK, CHUNK], tl.float32)  # transposed
    # one loop over value heads and their columns, so that what the next needs is loaded ahead
    for step in range(0, GROUP * N_STEPS):
        col = step % N_STEPS * COLS
        value_head = head * GROUP + step // N_STEPS
        at_heads = batch * n_tokens * value_heads + value_head
        at_chunk = (batch * n_chunks + chunk) * value_heads + value_head
        y = load_tile(y_ptr + at_chunk * VALUE_DIM * CHUNK, col, 0, VALUE_DIM, CHUNK, COLS, CHUNK)
        v = load_tile(corrected_ptr + at_chunk * CHUNK * VALUE_DIM, 0, col, CHUNK, VALUE_DIM, CHUNK, COLS)
        d_products = tl.dot(v, y, d_products, input_precision=DOT)
        if step % N_STEPS == N_STEPS - 1:
            starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
            logs = load_numbers(log_ptr + at_heads, tokens, n_tokens, value_heads)
            beta = load_numbers(beta_ptr + at_heads, tokens, n_tokens, value_heads).to(tl.float32)
            decay = decay_between_transposed(logs, starts, CHUNK, STRICT=True)
            d_products *= -decay * (beta * k_scale)[None, :]
            at_tokens = at_heads + tokens.to(tl.int64) * value_heads
            d_logs = tl.load(d_log_ptr + at_tokens, mask=exists, other=0.0)
            d_logs -= tl.sum(d_products * products, 1)  # k·dk
            tl.store(d_log_ptr + at_tokens, d_logs, mask=exists)
            sums += d_products
            d_products = tl.zeros([CHUNK, CHUNK], tl.float32)
    at_keys = (batch * n_tokens * HEADS + head) * KEY_DIM
    k = load_chunk(k_row_ptr, first, n_tokens, k_token_stride, 0, KEY_DIM, CHUNK, KEYS)
    dk = tl.dot(sums.to(k.dtype), k, input_precision=DOT)
    dk += load_chunk(partial_dk_ptr + at_keys, first, n_tokens, HEADS * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)
    if NORMED:
        dk = through_norm(dk, k, k_scale)
    store_chunk(dk_ptr + at_keys, dk, first, exists, HEADS * KEY_DIM, 0, KEY_DIM, CHUNK, KEYS)
    tl.debug_barrier()  # other threads have written d_logs
    for member in range(GROUP):  # a loop of its own: its masks would take the other loop's registers
        at_tokens = batch * n_tokens * value_heads + head * GROUP + member + tokens.to(tl.int64) * value_heads
        starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
        d_logs = tl.load(d_log_ptr + at_tokens, mask=exists, other=0.0)
        # G of a token sums its decay and those of the tokens that it sees
        d_decay = tl.sum(tl.where(visible_tokens(starts, CHUNK), d_logs[:, None], 0.0), 0)
        tl.store(d_decay_ptr + at_tokens, d_decay.to(d_decay_ptr.dtype.element_ty), mask=exists)
