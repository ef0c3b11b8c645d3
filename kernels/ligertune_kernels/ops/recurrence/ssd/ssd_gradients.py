"""Triton kernels of ssd's backward. Names, shapes and rules: kernels.py; the mathematics: op.py.

    inputs     chunk, head                          dx, and the chunk's part of dD
    products   chunk, part of a group               d(C Bᵀ), and what dt and the decays get within the chunk
    keys       chunk, part of a group, columns of N dC, or dB, and what dt and the decays get by the state
    steps      chunk, head                          ddt, and the chunk's parts of dA and of dt_bias' gradient

The heads of a group share C and B, whose gradients are sums over them: a program adds the heads of a part of the group,
in order, and torch adds the parts.
"""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.recurrence.chunks import (
    decay_to_state,
    load_chunk,
    load_numbers,
    load_starts,
    load_tile,
    store_chunk,
    store_tile,
)
from ligertune_kernels.ops.recurrence.ssd.kernels import (
    LINEAR_ABOVE,
    N_FACTORS,
    load_begins,
    load_skips,
    seen_decays,
    seen_decays_transposed,
    time_steps,
)


@triton.jit
def load_raw_steps(dt_ptr, dt_bias_ptr, tokens, n_tokens, token_stride, HAS_BIAS: tl.constexpr):
    """Load dt + dt_bias of a head, whose numbers the pointers point to."""
    raw = load_numbers(dt_ptr, tokens, n_tokens, token_stride).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(dt_bias_ptr).to(tl.float32)
    return raw


@triton.jit
def load_transposed(ptr, SIZE: tl.constexpr):
    """Load the transpose of a contiguous matrix (SIZE, SIZE)."""
    places = tl.arange(0, SIZE)
    return tl.load(ptr + places[:, None] + places[None, :] * SIZE)


@triton.jit
def sum_of_tiles(ptrs, stride, SIZE: tl.constexpr, N_TILES: tl.constexpr):
    """Load numbers of N_TILES rows and add them in order."""
    total = tl.zeros([SIZE], tl.float32)
    for _ in range(0, N_TILES):
        total += tl.load(ptrs)
        ptrs += stride
    return total


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def ssd_input_gradients_kernel(
    x_ptr,  # (B, T, H, P)
    b_ptr,  # (B, T, G, N)
    d_ptr,  # (H,) or (H, P)
    dy_ptr,  # (B, T, H, P)
    products_ptr,  # (B, T / CHUNK, G, CHUNK, CHUNK)
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32
    starts_ptr,  # (T,) int32
    d_states_ptr,  # (B, T / CHUNK, H, N, P): after each chunk
    dx_ptr,  # (B, T, H, P)
    partial_ptr,  # (B, T / CHUNK, H), or (B, T / CHUNK, H, P) if D_COLUMNS, fp32: of dD
    x_batch_stride, x_token_stride, x_head_stride, b_batch_stride, b_token_stride, b_group_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_D: tl.constexpr,
    D_COLUMNS: tl.constexpr, CHUNK: tl.constexpr, STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_COLS: tl.constexpr, HEAD_COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write dx_j = dt_j Σ_i D_ij (C_i·B_j) dy_i + w_j dSᵀ B_j + D dy_j, and the part of dD."""
    chunk = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    group = head // GROUP
    first = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    exists = first + rows < n_tokens
    begins = load_begins(starts_ptr, first, rows, n_tokens, HAS_DOCUMENTS)
    at_chunk = (batch * n_chunks + chunk) * HEADS + head
    factors_ptr += at_chunk * N_FACTORS * CHUNK + rows
    steps = tl.load(factors_ptr)
    logs = tl.load(factors_ptr + CHUNK)
    to_state = tl.load(factors_ptr + 2 * CHUNK)

    at_products = products_ptr + ((batch * n_chunks + chunk) * (HEADS // GROUP) + group) * CHUNK * CHUNK
    products = load_transposed(at_products, CHUNK)
    weights = products.to(tl.float32) * seen_decays_transposed(logs, begins, rows, HAS_DOCUMENTS) * steps[:, None]
    weights = weights.to(products.dtype)
    x_row_ptr = x_ptr + batch * x_batch_stride + head * x_head_stride
    b_row_ptr = b_ptr + batch * b_batch_stride + group * b_group_stride
    at_out = (batch * n_tokens * HEADS + head) * HEAD_DIM
    stride = HEADS * HEAD_DIM
    d_states_ptr += at_chunk * STATE_DIM * HEAD_DIM
    d_skip = 0.0
    for col in range(0, HEAD_DIM, HEAD_COLS):
        dx = tl.zeros([CHUNK, HEAD_COLS], tl.float32)
        for key in range(0, STATE_DIM, STATE_COLS):
            b = load_chunk(b_row_ptr, first, n_tokens, b_token_stride, key, STATE_DIM, CHUNK, STATE_COLS)
            d_state = load_tile(d_states_ptr, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS)
            dx = tl.dot(b, d_state, dx, input_precision=DOT)
        dy = load_chunk(dy_ptr + at_out, first, n_tokens, stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
        dx = tl.dot(weights, dy, dx * to_state[:, None], input_precision=DOT)
        if HAS_D:
            dx += dy.to(tl.float32) * load_skips(d_ptr, head, col, D_COLUMNS, HEAD_DIM, HEAD_COLS)
            x = load_chunk(x_row_ptr, first, n_tokens, x_token_stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
            d_skips = tl.sum(x.to(tl.float32) * dy.to(tl.float32), 0)
            if D_COLUMNS:
                cols = col + tl.arange(0, HEAD_COLS)
                tl.store(partial_ptr + at_chunk * HEAD_DIM + cols, d_skips, mask=cols < HEAD_DIM)
            else:
                d_skip += tl.sum(d_skips)
        store_chunk(dx_ptr + at_out, dx, first, exists, stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
    if HAS_D and not D_COLUMNS:
        tl.store(partial_ptr + at_chunk, d_skip)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def ssd_product_gradients_kernel(
    x_ptr,  # (B, T, H, P)
    dy_ptr,  # (B, T, H, P)
    products_ptr,  # (B, T / CHUNK, G, CHUNK, CHUNK)
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32
    starts_ptr,  # (T,) int32
    d_products_ptr,  # (B, T / CHUNK, G, PARTS, CHUNK, CHUNK)
    rows_ptr,  # (B, T / CHUNK, H, 2, CHUNK) fp32: Σ_j dt_j F_ij without F_ii, and F_ii
    cols_ptr,  # (CHUNK / ROWS, B, T / CHUNK, H, CHUNK) fp32: Σ_i F_ij without F_jj, of the rows of a program
    x_batch_stride, x_token_stride, x_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write rows of d(C_i·B_j) = Σ over heads D_ij dt_j dy_i·x_j.

    With F_ij = D_ij (C_i·B_j) (dy_i·x_j), dt_j gets Σ_i F_ij, and G_i - G_j gets dt_j F_ij. The difference of a token
    and itself is left out: it is 0 whatever G is, and would cancel.
    """
    PART: tl.constexpr = (GROUP + PARTS - 1) // PARTS
    GROUPS: tl.constexpr = HEADS // GROUP
    N_STEPS: tl.constexpr = (HEAD_DIM + HEAD_COLS - 1) // HEAD_COLS
    chunk = tl.program_id(0) // (GROUPS * PARTS)
    group = (tl.program_id(0) // PARTS % GROUPS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    first_row = tl.program_id(1) * ROWS
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    rows = first_row + tl.arange(0, ROWS)
    cols = tl.arange(0, CHUNK)
    at_group = (batch * n_chunks + chunk) * GROUPS + group
    at_tile = tl.program_id(1).to(tl.int64) * tl.num_programs(2) * n_chunks * HEADS
    stride = HEADS * HEAD_DIM
    is_same = rows[:, None] == cols[None, :]
    sums = tl.zeros([ROWS, CHUNK], tl.float32)
    pairs = tl.zeros([ROWS, CHUNK], tl.float32)  # dy_i·x_j
    # one loop over heads and their columns, so that what the next needs is loaded ahead
    for step in range(0, tl.minimum(PART, GROUP - part * PART) * N_STEPS):
        col = step % N_STEPS * HEAD_COLS
        head = group * GROUP + part * PART + step // N_STEPS
        x_row_ptr = x_ptr + batch * x_batch_stride + head * x_head_stride
        at_out = (batch * n_tokens * HEADS + head) * HEAD_DIM
        dy = load_chunk(dy_ptr + at_out, first + first_row, n_tokens, stride, col, HEAD_DIM, ROWS, HEAD_COLS)
        x = load_chunk(x_row_ptr, first, n_tokens, x_token_stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
        at_chunk = (batch * n_chunks + chunk) * HEADS + head
        head_factors_ptr = factors_ptr + at_chunk * N_FACTORS * CHUNK
        # loaded before the product, so that nothing waits for them after it
        steps = tl.load(head_factors_ptr + cols)
        logs = tl.load(head_factors_ptr + CHUNK + cols)
        row_logs = tl.load(head_factors_ptr + CHUNK + rows)
        pairs = tl.dot(dy, tl.trans(x), pairs, input_precision=DOT)
        if step % N_STEPS == N_STEPS - 1:
            begins = load_begins(starts_ptr, first, rows, n_tokens, HAS_DOCUMENTS)
            pairs *= seen_decays(row_logs, begins, rows, logs, cols, HAS_DOCUMENTS)
            sums += pairs * steps[None, :]
            products = load_tile(products_ptr + at_group * CHUNK * CHUNK, first_row, 0, CHUNK, CHUNK, ROWS, CHUNK)
            pairs *= products.to(tl.float32)
            tl.store(rows_ptr + (at_chunk * 2 + 1) * CHUNK + rows, tl.sum(tl.where(is_same, pairs, 0.0), 1))
            pairs = tl.where(is_same, 0.0, pairs)
            tl.store(cols_ptr + (at_tile + at_chunk) * CHUNK + cols, tl.sum(pairs, 0))
            tl.store(rows_ptr + at_chunk * 2 * CHUNK + rows, tl.sum(pairs * steps[None, :], 1))
            pairs = tl.zeros([ROWS, CHUNK], tl.float32)
    at_sums = d_products_ptr + (at_group * PARTS + part) * CHUNK * CHUNK
    store_tile(at_sums, sums, True, first_row, 0, CHUNK, CHUNK, ROWS, CHUNK, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def ssd_key_gradients_kernel(
    keys_ptr, others_ptr,  # (B, T, G, N): C and B; B and C if WRITES
    values_ptr,  # (B, T, H, P): dy; x if WRITES
    d_products_ptr,  # (B, T / CHUNK, G, PARTS, CHUNK, CHUNK)
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32
    states_ptr,  # (B, T / CHUNK, H, N, P): S before each chunk; dS after it if WRITES
    before_ptr,  # (B, T / CHUNK, H, N, P): S, if WRITES
    d_keys_ptr,  # (PARTS, B, T, G, N): dC; dB if WRITES
    products_ptr,  # (N / STATE_COLS, B, T / CHUNK, H, CHUNK) fp32: m_i C_iᵀ S dy_i; B_jᵀ dS x_j if WRITES
    carried_ptr,  # (N / STATE_COLS, B, T / CHUNK, H) fp32: S·dS, if WRITES
    keys_batch_stride, keys_token_stride, keys_group_stride,
    others_batch_stride, others_token_stride, others_group_stride,
    values_batch_stride, values_token_stride, values_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, WRITES: tl.constexpr, CHUNK: tl.constexpr,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_COLS: tl.constexpr, HEAD_COLS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Write columns of dC_i = Σ over heads m_i S dy_i + Σ_j d(C_i·B_j) B_j, or of dB_j = Σ w_j dS x_j + Σ_i d(...) C_i.

    C reads the state before the chunk; B writes to the one after it (WRITES).
    """
    PART: tl.constexpr = (GROUP + PARTS - 1) // PARTS
    GROUPS: tl.constexpr = HEADS // GROUP
    chunk = tl.program_id(0) // (GROUPS * PARTS)
    group = (tl.program_id(0) // PARTS % GROUPS).to(tl.int64)
    part = (tl.program_id(0) % PARTS).to(tl.int64)
    key = tl.program_id(1) * STATE_COLS
    batch = tl.program_id(2).to(tl.int64)
    batches = tl.num_programs(2)
    first = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    at_group = (batch * n_chunks + chunk) * GROUPS + group
    key_row_ptr = keys_ptr + batch * keys_batch_stride + group * keys_group_stride
    other_row_ptr = others_ptr + batch * others_batch_stride + group * others_group_stride
    N_STEPS: tl.constexpr = (HEAD_DIM + HEAD_COLS - 1) // HEAD_COLS

    at_products = d_products_ptr + (at_group * PARTS + part) * CHUNK * CHUNK
    if WRITES:
        d_products = load_transposed(at_products, CHUNK)
    else:
        d_products = load_tile(at_products, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    others = load_chunk(other_row_ptr, first, n_tokens, others_token_stride, key, STATE_DIM, CHUNK, STATE_COLS)
    d_keys = tl.dot(d_products, others, input_precision=DOT)
    keys = load_chunk(key_row_ptr, first, n_tokens, keys_token_stride, key, STATE_DIM, CHUNK, STATE_COLS)
    FACTOR: tl.constexpr = 2 if WRITES else 3
    by_state = tl.zeros([CHUNK, STATE_COLS], tl.float32)
    carried = 0.0
    # one loop over heads and their columns, so that what the next needs is loaded ahead
    for step in range(0, tl.minimum(PART, GROUP - part.to(tl.int32) * PART) * N_STEPS):
        col = step % N_STEPS * HEAD_COLS
        head = group * GROUP + part * PART + step // N_STEPS
        at_chunk = (batch * n_chunks + chunk) * HEADS + head
        at_state = at_chunk * STATE_DIM * HEAD_DIM
        row_ptr = values_ptr + batch * values_batch_stride + head * values_head_stride
        values = load_chunk(row_ptr, first, n_tokens, values_token_stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
        state = load_tile(states_ptr + at_state, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS)
        # loaded before the product, so that nothing waits for them after it
        factors = tl.load(factors_ptr + (at_chunk * N_FACTORS + FACTOR) * CHUNK + rows)
        if WRITES:
            before = load_tile(before_ptr + at_state, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS)
        by_state = tl.dot(values, tl.trans(state), by_state, input_precision=DOT)
        if WRITES:
            carried += tl.sum(before.to(tl.float32) * state.to(tl.float32))
        if step % N_STEPS == N_STEPS - 1:
            products = tl.sum(by_state * keys.to(tl.float32), 1)
            at_sum = (tl.program_id(1).to(tl.int64) * batches * n_chunks + batch * n_chunks + chunk) * HEADS + head
            if WRITES:
                tl.store(products_ptr + at_sum * CHUNK + rows, products)
                tl.store(carried_ptr + at_sum, carried)
            else:
                tl.store(products_ptr + at_sum * CHUNK + rows, products * factors)
            d_keys += by_state * factors[:, None]
            by_state = tl.zeros([CHUNK, STATE_COLS], tl.float32)
            carried = 0.0
    at_keys = (((part * batches + batch) * n_tokens) * GROUPS + group) * STATE_DIM
    exists = first + rows < n_tokens
    store_chunk(d_keys_ptr + at_keys, d_keys, first, exists, GROUPS * STATE_DIM, key, STATE_DIM, CHUNK, STATE_COLS)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def ssd_step_gradients_kernel(
    dt_ptr,  # (B, T, H)
    dt_bias_ptr, a_ptr,  # (H,)
    starts_ptr,  # (T,) int32
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32
    kept_ptr,  # (B, T / CHUNK, H) fp32
    rows_ptr,  # (B, T / CHUNK, H, 2, CHUNK) fp32
    cols_ptr,  # (ROW_TILES, B, T / CHUNK, H, CHUNK) fp32
    reads_ptr, writes_ptr,  # (KEY_TILES, B, T / CHUNK, H, CHUNK) fp32
    carried_ptr,  # (KEY_TILES, B, T / CHUNK, H) fp32
    d_dt_ptr,  # (B, T, H)
    partial_ptr,  # (2, B, T / CHUNK, H) fp32: of dA and of dt_bias' gradient
    dt_batch_stride, dt_token_stride, dt_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    FLOORED: tl.constexpr, CAPPED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, KEY_TILES: tl.constexpr,
    ROW_TILES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ddt, and the chunk's parts of dA and of dt_bias' gradient.

    A token's decay dt' A reaches all that is read over it: where a token from it on reads, the state that earlier
    tokens wrote to, and the state before the chunk. Only the differences within the chunk cancel.
    """
    chunk = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    batches = tl.num_programs(1)
    first = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    tokens = first + rows
    exists = tokens < n_tokens
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    at_chunk = (batch * n_chunks + chunk) * HEADS + head
    tile_stride = batches.to(tl.int64) * n_chunks * HEADS
    reads_ptr += at_chunk * CHUNK
    writes_ptr += at_chunk * CHUNK
    factors_ptr += at_chunk * N_FACTORS * CHUNK
    rows_ptr += at_chunk * 2 * CHUNK
    cols_ptr += at_chunk * CHUNK
    d_decays = tl.zeros([CHUNK], tl.float32)
    # a few tokens at a time, whose masks take few registers
    for block in range(0, CHUNK, BLOCK):
        others = block + tl.arange(0, BLOCK)
        read = sum_of_tiles(reads_ptr + others, tile_stride * CHUNK, BLOCK, KEY_TILES)
        read += tl.load(rows_ptr + others)
        read -= tl.load(factors_ptr + others) * sum_of_tiles(cols_ptr + others, tile_stride * CHUNK, BLOCK, ROW_TILES)
        written = sum_of_tiles(writes_ptr + others, tile_stride * CHUNK, BLOCK, KEY_TILES)
        written *= tl.load(factors_ptr + 2 * CHUNK + others)
        reached = tl.where(rows[:, None] <= others[None, :], read[None, :], written[None, :])
        if HAS_DOCUMENTS:
            others_starts = load_starts(starts_ptr, first + others, n_tokens, HAS_DOCUMENTS)
            reached = tl.where(starts[:, None] == others_starts[None, :], reached, 0.0)
        d_decays += tl.sum(reached, 1)
    # the state before the chunk goes through tokens of one document alone, or of none
    for tile in range(0, KEY_TILES):
        d_decays += tl.load(kept_ptr + at_chunk) * tl.load(carried_ptr + tile_stride * tile + at_chunk)

    steps = tl.load(factors_ptr + rows)
    logs = tl.load(factors_ptr + CHUNK + rows)
    last = tl.minimum(first + CHUNK, n_tokens) - 1
    last_log = tl.load(factors_ptr + CHUNK + last - first)
    to_state, _ = decay_to_state(logs, starts, last_log, starts_ptr, first, last, HAS_DOCUMENTS)
    d_steps = tl.load(rows_ptr + CHUNK + rows) + sum_of_tiles(cols_ptr + rows, tile_stride * CHUNK, CHUNK, ROW_TILES)
    d_steps += d_decays * tl.load(a_ptr + head).to(tl.float32)
    d_steps += to_state * sum_of_tiles(writes_ptr + rows, tile_stride * CHUNK, CHUNK, KEY_TILES)
    dt_row_ptr = dt_ptr + batch * dt_batch_stride + head * dt_head_stride
    raw = load_raw_steps(dt_row_ptr, dt_bias_ptr + head, tokens, n_tokens, dt_token_stride, HAS_BIAS)
    unlimited = time_steps(raw, SOFTPLUS, False, False, LOW, HIGH)
    d_raw = tl.where(exists, d_steps, 0.0)
    if FLOORED:
        d_raw = tl.where(unlimited >= LOW, d_raw, 0.0)
    if CAPPED:
        d_raw = tl.where(unlimited <= HIGH, d_raw, 0.0)
    if SOFTPLUS:
        d_raw *= tl.where(raw > LINEAR_ABOVE, 1.0, tl.sigmoid(raw))
    d_dt_ptr += (batch * n_tokens * HEADS + head) + tokens.to(tl.int64) * HEADS
    tl.store(d_dt_ptr, d_raw.to(d_dt_ptr.dtype.element_ty), mask=exists)
    tl.store(partial_ptr + at_chunk, tl.sum(tl.where(exists, steps * d_decays, 0.0)))
    tl.store(partial_ptr + tile_stride + at_chunk, tl.sum(d_raw))
