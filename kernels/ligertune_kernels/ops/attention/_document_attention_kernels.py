"""The kernels of document_attention: one forward, two backward. Each program has a tile of tokens of one head.

A tile of queries sees keys from where the document of its first begins to its own last token, whatever documents lie
between; a tile of keys is seen up to where the document of its last ends. Between blocks at the edges, where a mask is
needed, are those that all of the tile sees. Sums are taken in one order, so the same inputs give the same bits.
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import LOG2E, fp32
from ligertune_kernels.launcher import tl, triton
from ligertune_kernels.ops.losses._row_kernels import bounded

LEAST = tl.constexpr(-1.0e30)  # a maximum of nothing: finite, so that -inf less it is no NaN


@triton.jit
def _tile(ptr, first, token_stride, head, head_stride, n_tokens, head_dim, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
          EVEN: tl.constexpr, INSIDE: tl.constexpr = False):  # fmt: skip
    """(TOKENS, WIDTH) of a (T, H, D) tensor's head, zero beyond its tokens (unless all are INSIDE) and columns."""
    tokens, cols = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    ptrs = ptr + first.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    ptrs = ptrs + tokens * token_stride + cols
    if EVEN and INSIDE:
        return tl.load(ptrs)
    elif INSIDE:
        return tl.load(ptrs, mask=cols < head_dim, other=0.0)
    elif EVEN:
        return tl.load(ptrs, mask=first + tokens < n_tokens, other=0.0)
    else:
        return tl.load(ptrs, mask=(first + tokens < n_tokens) & (cols < head_dim), other=0.0)


@triton.jit
def _put(ptr, tile, first, head, n_heads, n_tokens, head_dim, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Writes such a tile to a contiguous (T, H, D)."""
    tokens, cols = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    ptrs = ptr + (first.to(tl.int64) * n_heads + head) * head_dim + tokens * (n_heads * head_dim) + cols
    mask = (first + tokens < n_tokens) & (cols < head_dim)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _masked(scores, rows, cols, starts, WINDOW: tl.constexpr):
    """Scores of queries with the keys that they see, else -inf; starts: of the queries' documents.

    A finite number times a factor would be rounded here, and not where a product-sum takes both at once.
    """
    seen = (cols <= rows) & (cols >= starts)
    if WINDOW > 0:
        seen = seen & (cols > rows - WINDOW)
    return tl.where(seen, scores, float("-inf"))  # no global: torch.compile writes those down, and cannot write this


@triton.jit
def _scores(products, scale, cap, HAS_CAP: tl.constexpr):
    """Scores; what makes bits of them, 1 under a cap and else scale times log2(e); the cap's derivative."""
    if HAS_CAP:
        bits, slope = bounded(products, cap, scale, True)
        return bits, 1.0, slope
    else:
        return products, scale * LOG2E, 1.0


@triton.jit
def _blocks_of_keys(first, starts_ptr, n_tokens, ROWS: tl.constexpr, COLS: tl.constexpr, WINDOW: tl.constexpr):
    """Of a tile of queries: where its first masked block begins, how many there are in front of the others and in all;
    where the others begin and how many they are."""
    last = tl.minimum(first + ROWS, n_tokens) - 1
    begin, free = tl.load(starts_ptr + first), tl.load(starts_ptr + last)
    if WINDOW > 0:
        begin, free = tl.maximum(begin, first - WINDOW + 1), tl.maximum(free, last - WINDOW + 1)
    begin = begin // COLS * COLS
    free = tl.cdiv(free, COLS) * COLS  # keys from here on are in the document and window of every row
    diagonal = tl.maximum((first + 1) // COLS * COLS, free)  # from here on some are ahead of a row
    n_left = tl.cdiv(tl.minimum(free, last + 1) - begin, COLS)
    n_right = tl.maximum(tl.cdiv(last + 1 - diagonal, COLS), 0)
    return begin, n_left, n_left + n_right, diagonal, free, (diagonal - free) // COLS


@triton.jit
def _attend(
    q, weighted, total, most, rows, starts, k_ptr, v_ptr, first, head,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One block of keys added to the softmax-weighted sum of values (Milakov, Gimelshein, arXiv:1805.02867)."""
    k = _tile(k_ptr, first, k_token_stride, head, k_head_stride, n_tokens, head_dim, COLS, WIDTH, EVEN, not MASKED)
    scores, bits, _ = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, HAS_CAP)
    if MASKED:
        cols = first + tl.arange(0, COLS)[None, :]
        scores = _masked(scores, rows[:, None], cols, starts[:, None], WINDOW)
    most_now = tl.maximum(most, tl.max(scores, 1) * bits)
    weights = tl.exp2(scores * bits - most_now[:, None])
    shrunk = tl.exp2(most - most_now)
    v = _tile(v_ptr, first, v_token_stride, head, v_head_stride, n_tokens, head_dim, COLS, WIDTH, EVEN, not MASKED)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * shrunk[:, None], input_precision="ieee")
    return weighted, total * shrunk + tl.sum(weights, 1), most_now


@triton.jit(do_not_specialize=["n_tokens"])
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, out_ptr, lse_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, head_dim,
    n_tokens, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    scale, cap = fp32(scale), fp32(cap)
    # the last tiles of a long document have the most to do: they begin
    n_tiles = tl.num_programs(0) // HEADS
    first, head = (n_tiles - 1 - tl.program_id(0) // HEADS) * ROWS, tl.program_id(0) % HEADS
    rows = first + tl.arange(0, ROWS)
    starts = tl.load(starts_ptr + rows, mask=rows < n_tokens, other=0)
    q = _tile(q_ptr, first, q_token_stride, head, q_head_stride, n_tokens, head_dim, ROWS, WIDTH, EVEN)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    total, most = tl.zeros([ROWS], tl.float32), tl.full([ROWS], LEAST, tl.float32)
    begin, n_left, n_masked, diagonal, free, n_free = _blocks_of_keys(first, starts_ptr, n_tokens, ROWS, COLS, WINDOW)
    for i in range(n_free):
        weighted, total, most = _attend(
            q, weighted, total, most, rows, starts, k_ptr, v_ptr, free + i * COLS, head // GROUP,
            k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
            False, WINDOW, HAS_CAP, COLS, WIDTH, EVEN,
        )  # fmt: skip
    for i in range(n_masked):
        block = tl.where(i < n_left, begin + i * COLS, diagonal + (i - n_left) * COLS)
        weighted, total, most = _attend(
            q, weighted, total, most, rows, starts, k_ptr, v_ptr, block, head // GROUP,
            k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
            True, WINDOW, HAS_CAP, COLS, WIDTH, EVEN,
        )  # fmt: skip
    _put(out_ptr, weighted / total[:, None], first, head, HEADS, n_tokens, head_dim, ROWS, WIDTH)
    tl.store(lse_ptr + head.to(tl.int64) * n_tokens + rows, most + tl.log2(total), mask=rows < n_tokens)


@triton.jit
def _pull_back(
    q, grad, lse, delta, dq, rows, starts, k_ptr, v_ptr, first, head,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to the queries' gradient, without the scale."""
    k = _tile(k_ptr, first, k_token_stride, head, k_head_stride, n_tokens, head_dim, COLS, WIDTH, EVEN, not MASKED)
    v = _tile(v_ptr, first, v_token_stride, head, v_head_stride, n_tokens, head_dim, COLS, WIDTH, EVEN, not MASKED)
    scores, bits, slope = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, HAS_CAP)
    if MASKED:
        cols = first + tl.arange(0, COLS)[None, :]
        scores = _masked(scores, rows[:, None], cols, starts[:, None], WINDOW)
    weights = tl.exp2(scores * bits - lse[:, None])
    d_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
    d_scores = weights * (d_weights - delta[:, None]) * slope
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["n_tokens"])
def _attention_queries_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, head_dim,
    n_tokens, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The queries' gradient, and what the keys' needs: each row's sum of output times gradient."""
    scale, cap = fp32(scale), fp32(cap)
    n_tiles = tl.num_programs(0) // HEADS
    first, head = (n_tiles - 1 - tl.program_id(0) // HEADS) * ROWS, tl.program_id(0) % HEADS
    rows = first + tl.arange(0, ROWS)
    known = rows < n_tokens
    starts = tl.load(starts_ptr + rows, mask=known, other=0)
    q = _tile(q_ptr, first, q_token_stride, head, q_head_stride, n_tokens, head_dim, ROWS, WIDTH, EVEN)
    stride = HEADS * head_dim
    grad = _tile(grad_ptr, first, stride, head, head_dim, n_tokens, head_dim, ROWS, WIDTH, EVEN)
    out = _tile(out_ptr, first, stride, head, head_dim, n_tokens, head_dim, ROWS, WIDTH, EVEN)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    at = head.to(tl.int64) * n_tokens + rows
    tl.store(delta_ptr + at, delta, mask=known)
    lse = tl.load(lse_ptr + at, mask=known, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    begin, n_left, n_masked, diagonal, free, n_free = _blocks_of_keys(first, starts_ptr, n_tokens, ROWS, COLS, WINDOW)
    for i in range(n_free):
        dq = _pull_back(
            q, grad, lse, delta, dq, rows, starts, k_ptr, v_ptr, free + i * COLS, head // GROUP,
            k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
            False, WINDOW, HAS_CAP, COLS, WIDTH, EVEN,
        )  # fmt: skip
    for i in range(n_masked):
        block = tl.where(i < n_left, begin + i * COLS, diagonal + (i - n_left) * COLS)
        dq = _pull_back(
            q, grad, lse, delta, dq, rows, starts, k_ptr, v_ptr, block, head // GROUP,
            k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
            True, WINDOW, HAS_CAP, COLS, WIDTH, EVEN,
        )  # fmt: skip
    _put(dq_ptr, dq * scale, first, head, HEADS, n_tokens, head_dim, ROWS, WIDTH)


@triton.jit
def _of_rows(ptrs, rows, n_tokens, MASKED: tl.constexpr):
    return tl.load(ptrs, mask=rows < n_tokens, other=0.0) if MASKED else tl.load(ptrs)


@triton.jit
def _gather(
    k, v, dk, dv, cols, starts_ptr, q_ptr, grad_ptr, lse_ptr, delta_ptr, first, head,
    q_token_stride, q_head_stride, grad_token_stride, n_tokens, head_dim, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """What one block of queries adds to the gradients of keys (without the scale) and values."""
    rows = first + tl.arange(0, ROWS)
    at = head.to(tl.int64) * n_tokens + first + tl.arange(0, ROWS)
    q = _tile(q_ptr, first, q_token_stride, head, q_head_stride, n_tokens, head_dim, ROWS, WIDTH, EVEN, not MASKED)
    lse = _of_rows(lse_ptr + at, rows, n_tokens, MASKED)
    scores, bits, slope = _scores(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, cap, HAS_CAP)
    if MASKED:
        starts = tl.load(starts_ptr + rows, mask=rows < n_tokens, other=2147483647)
        scores = _masked(scores, rows[None, :], cols[:, None], starts[None, :], WINDOW)
    weights = tl.exp2(scores * bits - lse[None, :])
    grad = _tile(grad_ptr, first, grad_token_stride, head, head_dim, n_tokens, head_dim, ROWS, WIDTH, EVEN, not MASKED)
    dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
    delta = _of_rows(delta_ptr + at, rows, n_tokens, MASKED)
    d_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
    d_scores = weights * (d_weights - delta[None, :]) * slope
    return tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _next_block(block, head, begin, end):
    """The block, or where it is behind the last one the first of the next head: cheaper than to divide a counter."""
    over = block >= end
    return tl.where(over, begin, block), head + over.to(tl.int32)


@triton.jit(do_not_specialize=["n_tokens"])
def _attention_keys_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, ends_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, head_dim,
    n_tokens, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, over all query heads that share them."""
    scale, cap = fp32(scale), fp32(cap)
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    first, key_head = tl.program_id(0) // KEY_HEADS * COLS, tl.program_id(0) % KEY_HEADS
    cols = first + tl.arange(0, COLS)
    last = tl.minimum(first + COLS, n_tokens) - 1
    k = _tile(k_ptr, first, k_token_stride, key_head, k_head_stride, n_tokens, head_dim, COLS, WIDTH, EVEN)
    v = _tile(v_ptr, first, v_token_stride, key_head, v_head_stride, n_tokens, head_dim, COLS, WIDTH, EVEN)
    dk, dv = tl.zeros([COLS, WIDTH], tl.float32), tl.zeros([COLS, WIDTH], tl.float32)
    end, free_end = tl.load(ends_ptr + last), tl.load(ends_ptr + first)
    if WINDOW > 0:
        end, free_end = tl.minimum(end, last + WINDOW), tl.minimum(free_end, first + WINDOW)
    free = first + COLS  # queries from here on are behind every key
    n_free = tl.maximum(free_end - free, 0) // ROWS
    behind = free + n_free * ROWS  # from here on some are of other documents, or too far behind
    n_masked = tl.cdiv(tl.minimum(end, free) - first, ROWS) + tl.maximum(tl.cdiv(end - behind, ROWS), 0)
    block, head = free, key_head * GROUP
    for _ in range(GROUP * n_free):
        dk, dv = _gather(
            k, v, dk, dv, cols, starts_ptr, q_ptr, grad_ptr, lse_ptr, delta_ptr, block, head,
            q_token_stride, q_head_stride, HEADS * head_dim, n_tokens, head_dim, scale, cap,
            False, WINDOW, HAS_CAP, ROWS, WIDTH, EVEN,
        )  # fmt: skip
        block, head = _next_block(block + ROWS, head, free, behind)
    block, head = first, key_head * GROUP
    for _ in range(GROUP * n_masked):
        dk, dv = _gather(
            k, v, dk, dv, cols, starts_ptr, q_ptr, grad_ptr, lse_ptr, delta_ptr, block, head,
            q_token_stride, q_head_stride, HEADS * head_dim, n_tokens, head_dim, scale, cap,
            True, WINDOW, HAS_CAP, ROWS, WIDTH, EVEN,
        )  # fmt: skip
        block = tl.where(block + ROWS == free, behind, block + ROWS)
        block, head = _next_block(block, head, first, end)
    _put(dk_ptr, dk * scale, first, key_head, KEY_HEADS, n_tokens, head_dim, COLS, WIDTH)
    _put(dv_ptr, dv, first, key_head, KEY_HEADS, n_tokens, head_dim, COLS, WIDTH)
