"""Triton kernels of ssd: three forward, which the backward runs again. The others: ssd_gradients.py. Formulas: op.py.

A row of tokens is cut into chunks of CHUNK tokens, which documents may begin and end within. A document's first token
takes nothing from the state: the state before it is multiplied by 0. So no kernel knows how many documents there are.

    prepare    chunk, some heads or a group         dt', G and factors of tokens; or C Bᵀ
    scan       part of a row, head, tile of S       S before each chunk; in the backward dS after each chunk
    outputs    chunk, head                          y; in the backward dy and dz from the gated outputs' gradient

The scan goes through the chunks one after another. To have more programs, a row is cut into parts: the program of a
part owns the documents that begin in it, and leaves the part with the last of them.

x, z (B, T, H, P) and B, C (B, T, G, N) have unit column stride; GROUP = H / G heads share B and C. A state is kept as
(N, P), the transpose of the public one: so that B and C are first factors as they lie in memory. Tensors that kernels
hand to each other are contiguous. A program's number names first the head, then the chunk: neighbouring programs read
the same B and C.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import silu, silu_grad
from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.recurrence.chunks import (
    load_chunk,
    load_starts,
    load_tile,
    owned_tokens,
    part_of_row,
    store_chunk,
    store_tile,
)

N_FACTORS = tl.constexpr(4)  # of a token: dt', G, w, m
# e^-40 is 10^-17: what a token decays by more than that adds nothing in fp32, but its digits are lost to sums of G
LARGEST_DECAY = tl.constexpr(40.0)
LINEAR_ABOVE = tl.constexpr(20.0)  # of torch's softplus


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact to fp32 for small results, too; x above 20, as torch."""
    e = tl.exp(tl.minimum(x, LINEAR_ABOVE))
    rounded = 1.0 + e
    # the error of the logarithm's argument cancels in the quotient
    is_one = rounded == 1.0
    log1p = tl.where(is_one, e, tl.log(rounded) * (e / tl.where(is_one, 1.0, rounded - 1.0)))
    return tl.where(x > LINEAR_ABOVE, x, log1p)


@triton.jit
def time_steps(
    raw, SOFTPLUS: tl.constexpr, FLOORED: tl.constexpr, CAPPED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """Return dt', given dt + dt_bias."""
    steps = raw
    if SOFTPLUS:
        steps = softplus(raw)
    if FLOORED:
        steps = tl.maximum(steps, LOW)
    if CAPPED:
        steps = tl.minimum(steps, HIGH)
    return steps


@triton.jit
def load_begins(starts_ptr, first, rows, n_tokens, HAS_DOCUMENTS: tl.constexpr):
    """Return the place in the chunk at which each token's document begins; 0 or less for one from before the chunk."""
    if HAS_DOCUMENTS:
        return load_starts(starts_ptr, first + rows, n_tokens, HAS_DOCUMENTS) - first
    else:
        return rows * 0


@triton.jit
def seen_decays(row_logs, begins, rows, logs, cols, HAS_DOCUMENTS: tl.constexpr):
    """Return D_ij = exp(G_i - G_j) for the tokens j that i sees, else 0: from its document's begin to itself.

    rows, cols: places in the chunk, as begins.
    """
    seen = rows[:, None] >= cols[None, :]
    if HAS_DOCUMENTS:  # one number of a row: begins of columns, too, would take registers
        seen = seen & (begins[:, None] <= cols[None, :])
    # masked before exp: differences of later tokens are positive and may overflow
    return tl.exp(tl.where(seen, row_logs[:, None] - logs[None, :], float("-inf")))


@triton.jit
def seen_decays_transposed(logs, begins, rows, HAS_DOCUMENTS: tl.constexpr):
    """Return D_ij with j, the token that is seen, on the first axis."""
    seen = rows[:, None] <= rows[None, :]
    if HAS_DOCUMENTS:
        seen = seen & (rows[:, None] >= begins[None, :])
    return tl.exp(tl.where(seen, logs[None, :] - logs[:, None], float("-inf")))


@triton.jit
def write_factors(
    dt_ptr, dt_bias_ptr, a_ptr, starts_ptr, factors_ptr, kept_ptr, first, heads, n_tokens, token_stride, head_stride,
    HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    FLOORED: tl.constexpr, CAPPED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, TILE_HEADS: tl.constexpr,
):  # fmt: skip
    """Write dt', G, w, m and s of a chunk and some heads. dt, factors and kept: those of the row, and of the chunk."""
    rows = tl.arange(0, CHUNK)
    tokens = first + rows
    is_head = heads < HEADS
    a = tl.load(a_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    bias = tl.zeros([TILE_HEADS], tl.float32)
    if HAS_BIAS:
        bias += tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    head_ptrs = dt_ptr + heads.to(tl.int64) * head_stride
    starts = load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS)
    begins = load_begins(starts_ptr, first, rows, n_tokens, HAS_DOCUMENTS)
    logs = tl.zeros([CHUNK, TILE_HEADS], tl.float32)
    # a few tokens at a time: both factors of a product in fp32 are in registers
    for block in range(0, CHUNK, BLOCK):
        places = block + tl.arange(0, BLOCK)
        ptrs = head_ptrs[None, :] + tl.minimum(first + places, n_tokens - 1).to(tl.int64)[:, None] * token_stride
        some = tl.load(ptrs, mask=is_head[None, :], other=0.0).to(tl.float32) + bias[None, :]
        some = time_steps(some, SOFTPLUS, FLOORED, CAPPED, LOW, HIGH)
        # finite, so that a decay of another document becomes 0 and leaves the bits of these sums
        decays = tl.minimum(tl.maximum(some * a[None, :], -LARGEST_DECAY), LARGEST_DECAY)
        decays = tl.where((first + places < n_tokens)[:, None], decays, 0.0)
        seen = rows[:, None] >= places[None, :]
        if HAS_DOCUMENTS:
            seen = seen & (begins[:, None] <= places[None, :])
        logs = tl.dot(tl.where(seen, 1.0, 0.0), decays, logs, input_precision="ieee")

    ptrs = head_ptrs[None, :] + tl.minimum(tokens, n_tokens - 1).to(tl.int64)[:, None] * token_stride
    raw = tl.load(ptrs, mask=is_head[None, :], other=0.0).to(tl.float32) + bias[None, :]
    steps = time_steps(raw, SOFTPLUS, FLOORED, CAPPED, LOW, HIGH)
    steps = tl.where((tokens < n_tokens)[:, None], steps, 0.0)
    last = tl.minimum(first + CHUNK, n_tokens) - 1
    last_log = tl.sum(tl.where((tokens == last)[:, None], logs, 0.0), 0)
    last_start = load_starts(starts_ptr, last, last + 1, HAS_DOCUMENTS)
    # masked before exp, as everywhere
    to_state = tl.exp(tl.where((starts == last_start)[:, None], last_log[None, :] - logs, float("-inf")))
    from_state = tl.where((starts < tl.maximum(first, 1))[:, None], tl.exp(logs), 0.0)
    kept = tl.where(last_start < tl.maximum(first, 1), tl.exp(last_log), 0.0)
    tl.store(kept_ptr + heads, kept, mask=is_head)
    ptrs = factors_ptr + heads[None, :] * (N_FACTORS * CHUNK) + rows[:, None]
    tl.store(ptrs, steps, mask=is_head[None, :])
    tl.store(ptrs + CHUNK, logs, mask=is_head[None, :])
    tl.store(ptrs + 2 * CHUNK, to_state * steps, mask=is_head[None, :])
    tl.store(ptrs + 3 * CHUNK, from_state, mask=is_head[None, :])


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def ssd_prepare_kernel(
    b_ptr, c_ptr,  # (B, T, G, N)
    dt_ptr,  # (B, T, H)
    dt_bias_ptr, a_ptr,  # (H,)
    starts_ptr,  # (T,) int32
    products_ptr,  # (B, T / CHUNK, G, CHUNK, CHUNK): C Bᵀ
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32: dt', G, w = r dt', m
    kept_ptr,  # (B, T / CHUNK, H) fp32: s
    b_batch_stride, b_token_stride, b_group_stride, c_batch_stride, c_token_stride, c_group_stride,
    dt_batch_stride, dt_token_stride, dt_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, FLOORED: tl.constexpr, CAPPED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, TILE_HEADS: tl.constexpr, STATE_DIM: tl.constexpr,
    STATE_COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write what a chunk computes without the state: the factors of some heads, or the products of a group."""
    HEAD_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    GROUPS: tl.constexpr = HEADS // GROUP
    chunk = tl.program_id(0) // (HEAD_TILES + GROUPS)
    member = tl.program_id(0) % (HEAD_TILES + GROUPS)
    batch = tl.program_id(1).to(tl.int64)
    first = chunk * CHUNK
    at_chunk = batch * n_chunks + chunk
    if member < HEAD_TILES:
        heads = member * TILE_HEADS + tl.arange(0, TILE_HEADS)
        write_factors(
            dt_ptr + batch * dt_batch_stride, dt_bias_ptr, a_ptr, starts_ptr,
            factors_ptr + at_chunk * HEADS * N_FACTORS * CHUNK, kept_ptr + at_chunk * HEADS, first, heads, n_tokens,
            dt_token_stride, dt_head_stride, HEADS, HAS_DOCUMENTS, HAS_BIAS, SOFTPLUS, FLOORED, CAPPED, LOW, HIGH,
            CHUNK, BLOCK, TILE_HEADS,
        )  # fmt: skip
    else:
        group = (member - HEAD_TILES).to(tl.int64)
        b_row_ptr = b_ptr + batch * b_batch_stride + group * b_group_stride
        c_row_ptr = c_ptr + batch * c_batch_stride + group * c_group_stride
        products = tl.zeros([CHUNK, CHUNK], tl.float32)
        for col in range(0, STATE_DIM, STATE_COLS):
            c = load_chunk(c_row_ptr, first, n_tokens, c_token_stride, col, STATE_DIM, CHUNK, STATE_COLS)
            b = load_chunk(b_row_ptr, first, n_tokens, b_token_stride, col, STATE_DIM, CHUNK, STATE_COLS)
            products = tl.dot(c, tl.trans(b), products, input_precision=DOT)
        at_products = products_ptr + (at_chunk * GROUPS + group) * CHUNK * CHUNK
        store_tile(at_products, products, True, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks", "part_tokens"])
def ssd_scan_kernel(
    keys_ptr,  # (B, T, G, N): B; C if BACK
    values_ptr,  # (B, T, H, P): x; dy if BACK
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32
    kept_ptr,  # (B, T / CHUNK, H) fp32
    starts_ptr, ends_ptr,  # (T,) int32
    begin_ptr,  # (B, H, N, P): the initial state; the gradient of the final one if BACK
    states_ptr,  # (B, T / CHUNK, H, N, P): before each chunk; gradients after each chunk if BACK
    end_ptr,  # (B, H, N, P) fp32: the final state; the gradient of the initial one if BACK
    keys_batch_stride, keys_token_stride, keys_group_stride,
    values_batch_stride, values_token_stride, values_head_stride,
    n_tokens, n_chunks, part_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_BEGIN: tl.constexpr,
    HAS_END: tl.constexpr, BACK: tl.constexpr, CHUNK: tl.constexpr, STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_COLS: tl.constexpr, HEAD_COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Carry a tile of the state through the chunks: S = s S + Σ w_j B_j x_jᵀ; back: dS = s dS + Σ m_i C_i dy_iᵀ.

    HAS_BEGIN and HAS_END: of rows without documents.
    """
    HEAD_TILES: tl.constexpr = (HEAD_DIM + HEAD_COLS - 1) // HEAD_COLS
    col = tl.program_id(0) % HEAD_TILES * HEAD_COLS
    key = tl.program_id(0) // HEAD_TILES * STATE_COLS
    head = tl.program_id(1).to(tl.int64)
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

    key_row_ptr = keys_ptr + batch * keys_batch_stride + head // GROUP * keys_group_stride
    value_row_ptr = values_ptr + batch * values_batch_stride + head * values_head_stride
    rows = tl.arange(0, CHUNK)
    at_state = (batch * HEADS + head) * STATE_DIM * HEAD_DIM
    state = tl.zeros([STATE_COLS, HEAD_COLS], tl.float32)
    if HAS_BEGIN:
        state += load_tile(begin_ptr + at_state, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS).to(tl.float32)
    FACTOR: tl.constexpr = 3 if BACK else 2
    first_chunk = own_first // CHUNK
    end_chunk = tl.cdiv(own_end, CHUNK)
    # a program without documents begins behind the last chunk
    chunk_ahead = end_chunk - 1 if BACK else tl.minimum(first_chunk, n_chunks - 1)
    at_ahead = (batch * n_chunks + chunk_ahead) * HEADS + head
    factors_ahead = tl.load(factors_ptr + (at_ahead * N_FACTORS + FACTOR) * CHUNK + rows)
    kept_ahead = tl.load(kept_ptr + at_ahead)
    for step in range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if BACK else first_chunk + step
        first = chunk * CHUNK
        at_chunk = (batch * n_chunks + chunk) * HEADS + head
        if BACK:
            at_next = at_chunk - tl.where(chunk > 0, HEADS, 0)
            stores = tl.minimum(first + CHUNK, n_tokens) <= own_end  # else the last token is another program's
        else:
            at_next = at_chunk + tl.where(chunk + 1 < n_chunks, HEADS, 0)
            stores = first >= own_first  # else a document of another program flows into the chunk
        factors = factors_ahead  # 0 for tokens of other programs, if the state is needed after the chunk
        kept = kept_ahead
        # the compiler does not load these ahead
        factors_ahead = tl.load(factors_ptr + (at_next * N_FACTORS + FACTOR) * CHUNK + rows)
        kept_ahead = tl.load(kept_ptr + at_next)
        keys = load_chunk(key_row_ptr, first, n_tokens, keys_token_stride, key, STATE_DIM, CHUNK, STATE_COLS)
        values = load_chunk(value_row_ptr, first, n_tokens, values_token_stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
        if stores:
            at_states = states_ptr + at_chunk * STATE_DIM * HEAD_DIM
            store_tile(at_states, state, True, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS, KEEP_ALL=True)
        values = (values.to(tl.float32) * factors[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), values, state * kept, input_precision=DOT)
    if HAS_END:
        store_tile(end_ptr + at_state, state, True, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS, KEEP_ALL=True)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def ssd_outputs_kernel(
    x_ptr,  # (B, T, H, P)
    c_ptr,  # (B, T, G, N)
    z_ptr,  # (B, T, H, P)
    d_ptr,  # (H,) or (H, P)
    products_ptr,  # (B, T / CHUNK, G, CHUNK, CHUNK)
    factors_ptr,  # (B, T / CHUNK, H, 4, CHUNK) fp32
    starts_ptr,  # (T,) int32
    states_ptr,  # (B, T / CHUNK, H, N, P)
    d_out_ptr,  # (B, T, H, P), if BACK
    out_ptr,  # (B, T, H, P): the outputs; dy if BACK
    dz_ptr,  # (B, T, H, P), if BACK
    x_batch_stride, x_token_stride, x_head_stride, c_batch_stride, c_token_stride, c_group_stride,
    z_batch_stride, z_token_stride, z_head_stride,
    n_tokens, n_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_D: tl.constexpr,
    D_COLUMNS: tl.constexpr, HAS_Z: tl.constexpr, BACK: tl.constexpr, CHUNK: tl.constexpr, STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_COLS: tl.constexpr, HEAD_COLS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write y_i = m_i C_iᵀ S + Σ_j D_ij (C_i·B_j) dt_j x_j + D x_i, times silu(z_i)."""
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
    from_state = tl.load(factors_ptr + 3 * CHUNK)

    at_products = products_ptr + ((batch * n_chunks + chunk) * (HEADS // GROUP) + group) * CHUNK * CHUNK
    products = load_tile(at_products, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    weights = products.to(tl.float32) * seen_decays(logs, begins, rows, logs, rows, HAS_DOCUMENTS) * steps[None, :]
    weights = weights.to(products.dtype)
    x_row_ptr = x_ptr + batch * x_batch_stride + head * x_head_stride
    c_row_ptr = c_ptr + batch * c_batch_stride + group * c_group_stride
    z_row_ptr = z_ptr + batch * z_batch_stride + head * z_head_stride
    at_out = (batch * n_tokens * HEADS + head) * HEAD_DIM
    stride = HEADS * HEAD_DIM
    states_ptr += at_chunk * STATE_DIM * HEAD_DIM
    for col in range(0, HEAD_DIM, HEAD_COLS):
        out = tl.zeros([CHUNK, HEAD_COLS], tl.float32)
        for key in range(0, STATE_DIM, STATE_COLS):
            c = load_chunk(c_row_ptr, first, n_tokens, c_token_stride, key, STATE_DIM, CHUNK, STATE_COLS)
            state = load_tile(states_ptr, key, col, STATE_DIM, HEAD_DIM, STATE_COLS, HEAD_COLS)
            out = tl.dot(c, state, out, input_precision=DOT)
        x = load_chunk(x_row_ptr, first, n_tokens, x_token_stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
        out = tl.dot(weights, x, out * from_state[:, None], input_precision=DOT)
        if HAS_D:
            out += x.to(tl.float32) * load_skips(d_ptr, head, col, D_COLUMNS, HEAD_DIM, HEAD_COLS)
        if HAS_Z:
            z = load_chunk(z_row_ptr, first, n_tokens, z_token_stride, col, HEAD_DIM, CHUNK, HEAD_COLS).to(tl.float32)
            if BACK:
                d_out = load_chunk(d_out_ptr + at_out, first, n_tokens, stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
                d_out = d_out.to(tl.float32)
                dz = d_out * out * silu_grad(z)
                store_chunk(dz_ptr + at_out, dz, first, exists, stride, col, HEAD_DIM, CHUNK, HEAD_COLS)
                out = d_out * silu(z)
            else:
                out *= silu(z)
        store_chunk(out_ptr + at_out, out, first, exists, stride, col, HEAD_DIM, CHUNK, HEAD_COLS)


@triton.jit
def load_skips(d_ptr, head, first_col, D_COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLS: tl.constexpr):
    """Load D of a head's columns (1, HEAD_COLS) fp32: one for all of them, or one for each."""
    if D_COLUMNS:
        cols = first_col + tl.arange(0, HEAD_COLS)
        return tl.load(d_ptr + head * HEAD_DIM + cols, mask=cols < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.full([1, HEAD_COLS], 1.0, tl.float32) * tl.load(d_ptr + head).to(tl.float32)
