"""Triton kernels of document_attention: one forward, two backward. Each program has a tile of tokens of one head.

The last two kernels stand before and after the backward for Hopper (hopper_kernels.py): one pass over dO, one over dq.
Such a launch computes HEADS of the ALL_HEADS heads of out, dO and dq. The fp32 sums have only those.

A tile of queries reads keys from the start of its first token's document to its own last token, across documents; a
tile of keys is read up to the end of its last token's document. Only blocks at the edges are masked; every pair in the
blocks between is visible. Sums are taken in one order, so that the same inputs give the same bits.

Scores are in bits (times log2(e)), for exp2. q, k, v are (T, H or K, D) with unit column stride, lse and delta (H, T).
"""

from __future__ import annotations

from ligertune_kernels.jit.device_functions import LOG2E, fp32, scale_and_cap
from ligertune_kernels.launcher import tl, triton

LOWEST = tl.constexpr(-1.0e30)  # first maximum of a row; finite, so that -inf minus it is not NaN


@triton.jit
def _load_tile(
    ptr, first, token_stride, head, head_stride, n_tokens, head_dim,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr, FULL_ROWS: tl.constexpr = False,
):  # fmt: skip
    """Load (TOKENS, WIDTH) of one head of a (T, H, D) tensor; zero past its tokens and columns.

    FULL_ROWS: all tokens exist; FITS: all WIDTH columns exist. Neither then needs a mask.
    """
    tokens = tl.arange(0, TOKENS)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    ptrs = ptr + first.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    ptrs = ptrs + tokens * token_stride + cols
    if FITS and FULL_ROWS:
        return tl.load(ptrs)
    elif FULL_ROWS:
        return tl.load(ptrs, mask=cols < head_dim, other=0.0)
    elif FITS:
        return tl.load(ptrs, mask=first + tokens < n_tokens, other=0.0)
    else:
        return tl.load(ptrs, mask=(first + tokens < n_tokens) & (cols < head_dim), other=0.0)


@triton.jit
def _store_tile(ptr, tile, first, head, n_heads, n_tokens, head_dim, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a (TOKENS, WIDTH) tile to one head of a contiguous (T, H, D) tensor."""
    tokens = tl.arange(0, TOKENS)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    ptrs = ptr + (first.to(tl.int64) * n_heads + head) * head_dim + tokens * (n_heads * head_dim) + cols
    mask = (first + tokens < n_tokens) & (cols < head_dim)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mask_scores(scores, rows, cols, starts, WINDOW: tl.constexpr):
    """Set the scores of invisible keys to -inf. starts: first token of each query's document."""
    # A large finite score times the factor would round differently here than where exp2's argument is fused.
    visible = (cols <= rows) & (cols >= starts)
    if WINDOW > 0:
        visible = visible & (cols > rows - WINDOW)
    return tl.where(visible, scores, float("-inf"))  # no global constant: torch.compile cannot write out -inf


@triton.jit
def _scores(products, scale, cap, HAS_CAP: tl.constexpr):
    """Return scores, the factor that makes them bits, and the cap's derivative.

    With a cap the scores are bits already. Without, they stay raw products, so that exp2's argument fuses the factor.
    """
    if HAS_CAP:
        bits, slope = scale_and_cap(products, cap, scale, True)
        return bits, 1.0, slope
    else:
        return products, scale * LOG2E, 1.0


@triton.jit
def _key_blocks(first, starts_ptr, n_tokens, ROWS: tl.constexpr, COLS: tl.constexpr, WINDOW: tl.constexpr):
    """Return where a tile of queries finds its keys, in blocks of COLS.

    First masked block, number of masked blocks left of the free ones, number of all masked blocks; first masked block
    at the diagonal; first free block, number of free blocks.
    """
    last = tl.minimum(first + ROWS, n_tokens) - 1
    begin = tl.load(starts_ptr + first)
    free = tl.load(starts_ptr + last)
    if WINDOW > 0:
        begin = tl.maximum(begin, first - WINDOW + 1)
        free = tl.maximum(free, last - WINDOW + 1)
    begin = begin // COLS * COLS
    free = tl.cdiv(free, COLS) * COLS  # from here on keys are in the document and window of every row
    diagonal = tl.maximum((first + 1) // COLS * COLS, free)  # from here on some keys are after a row
    n_left = tl.cdiv(tl.minimum(free, last + 1) - begin, COLS)
    n_right = tl.maximum(tl.cdiv(last + 1 - diagonal, COLS), 0)
    return begin, n_left, n_left + n_right, diagonal, free, (diagonal - free) // COLS


@triton.jit
def _accumulate_output(
    q, weighted, total, row_max, rows, starts, k_ptr, v_ptr, first, head,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    FITS: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the online softmax (Milakov and Gimelshein, arXiv:1805.02867)."""
    k = _load_tile(k_ptr, first, k_token_stride, head, k_head_stride, n_tokens, head_dim, COLS, WIDTH, FITS, not MASKED)
    scores, bits, _ = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, HAS_CAP)
    if MASKED:
        cols = first + tl.arange(0, COLS)[None, :]
        scores = _mask_scores(scores, rows[:, None], cols, starts[:, None], WINDOW)
    new_max = tl.maximum(row_max, tl.max(scores, 1) * bits)
    weights = tl.exp2(scores * bits - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    v = _load_tile(v_ptr, first, v_token_stride, head, v_head_stride, n_tokens, head_dim, COLS, WIDTH, FITS, not MASKED)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * rescale[:, None], input_precision="ieee")
    return weighted, total * rescale + tl.sum(weights, 1), new_max


@triton.jit(do_not_specialize=["n_tokens"])
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, out_ptr, lse_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, head_dim,
    n_tokens, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """Write out = softmax(scores) v and lse, the log2-sum-exp2 of each row."""
    scale = fp32(scale)
    cap = fp32(cap)
    # Tiles late in a document read the longest: start with them, so that none is left running alone.
    n_tiles = tl.num_programs(0) // HEADS
    first = (n_tiles - 1 - tl.program_id(0) // HEADS) * ROWS
    head = tl.program_id(0) % HEADS
    rows = first + tl.arange(0, ROWS)
    starts = tl.load(starts_ptr + rows, mask=rows < n_tokens, other=0)
    q = _load_tile(q_ptr, first, q_token_stride, head, q_head_stride, n_tokens, head_dim, ROWS, WIDTH, FITS)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    begin, n_left, n_masked, diagonal, free, n_free = _key_blocks(first, starts_ptr, n_tokens, ROWS, COLS, WINDOW)
    for masked in tl.static_range(2):  # all free blocks, then all masked ones
        for i in range(n_masked if masked else n_free):
            at_edge = tl.where(i < n_left, begin + i * COLS, diagonal + (i - n_left) * COLS)
            block = at_edge if masked else free + i * COLS
            weighted, total, row_max = _accumulate_output(
                q, weighted, total, row_max, rows, starts, k_ptr, v_ptr, block, head // GROUP,
                k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
                masked, WINDOW, HAS_CAP, COLS, WIDTH, FITS,
            )  # fmt: skip
    _store_tile(out_ptr, weighted / total[:, None], first, head, HEADS, n_tokens, head_dim, ROWS, WIDTH)
    tl.store(lse_ptr + head.to(tl.int64) * n_tokens + rows, row_max + tl.log2(total), mask=rows < n_tokens)


@triton.jit
def _accumulate_dq(
    q, d_out, lse, delta, dq, rows, starts, k_ptr, v_ptr, first, head,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    FITS: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to dq, without the scale."""
    k = _load_tile(k_ptr, first, k_token_stride, head, k_head_stride, n_tokens, head_dim, COLS, WIDTH, FITS, not MASKED)
    v = _load_tile(v_ptr, first, v_token_stride, head, v_head_stride, n_tokens, head_dim, COLS, WIDTH, FITS, not MASKED)
    scores, bits, slope = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, HAS_CAP)
    if MASKED:
        cols = first + tl.arange(0, COLS)[None, :]
        scores = _mask_scores(scores, rows[:, None], cols, starts[:, None], WINDOW)
    weights = tl.exp2(scores * bits - lse[:, None])
    d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
    d_scores = weights * (d_weights - delta[:, None]) * slope
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["n_tokens"])
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, out_ptr, d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, head_dim,
    n_tokens, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr, HAS_D_LSE: tl.constexpr = False,
):  # fmt: skip
    """Write dq, and delta, each row's sum of out times its gradient, which dkdv needs too.

    HAS_D_LSE: delta holds the gradient of the row's lse, which is subtracted from that sum.
    """
    scale = fp32(scale)
    cap = fp32(cap)
    n_tiles = tl.num_programs(0) // HEADS
    first = (n_tiles - 1 - tl.program_id(0) // HEADS) * ROWS
    head = tl.program_id(0) % HEADS
    rows = first + tl.arange(0, ROWS)
    in_range = rows < n_tokens
    starts = tl.load(starts_ptr + rows, mask=in_range, other=0)
    q = _load_tile(q_ptr, first, q_token_stride, head, q_head_stride, n_tokens, head_dim, ROWS, WIDTH, FITS)
    stride = HEADS * head_dim
    d_out = _load_tile(d_out_ptr, first, stride, head, head_dim, n_tokens, head_dim, ROWS, WIDTH, FITS)
    out = _load_tile(out_ptr, first, stride, head, head_dim, n_tokens, head_dim, ROWS, WIDTH, FITS)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    row_offs = head.to(tl.int64) * n_tokens + rows
    if HAS_D_LSE:
        delta -= tl.load(delta_ptr + row_offs, mask=in_range, other=0.0)
    tl.store(delta_ptr + row_offs, delta, mask=in_range)
    lse = tl.load(lse_ptr + row_offs, mask=in_range, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    begin, n_left, n_masked, diagonal, free, n_free = _key_blocks(first, starts_ptr, n_tokens, ROWS, COLS, WINDOW)
    for masked in tl.static_range(2):  # all free blocks, then all masked ones
        for i in range(n_masked if masked else n_free):
            at_edge = tl.where(i < n_left, begin + i * COLS, diagonal + (i - n_left) * COLS)
            block = at_edge if masked else free + i * COLS
            dq = _accumulate_dq(
                q, d_out, lse, delta, dq, rows, starts, k_ptr, v_ptr, block, head // GROUP,
                k_token_stride, k_head_stride, v_token_stride, v_head_stride, n_tokens, head_dim, scale, cap,
                masked, WINDOW, HAS_CAP, COLS, WIDTH, FITS,
            )  # fmt: skip
    _store_tile(dq_ptr, dq * scale, first, head, HEADS, n_tokens, head_dim, ROWS, WIDTH)


@triton.jit
def _load_rows(ptrs, rows, n_tokens, MASKED: tl.constexpr):
    return tl.load(ptrs, mask=rows < n_tokens, other=0.0) if MASKED else tl.load(ptrs)


@triton.jit
def _accumulate_dkdv(
    k, v, dk, dv, cols, starts_ptr, q_ptr, d_out_ptr, lse_ptr, delta_ptr, first, head,
    q_token_stride, q_head_stride, d_out_stride, n_tokens, head_dim, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FITS: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to dk (without the scale) and dv."""
    rows = first + tl.arange(0, ROWS)
    row_offs = head.to(tl.int64) * n_tokens + first + tl.arange(0, ROWS)
    q = _load_tile(q_ptr, first, q_token_stride, head, q_head_stride, n_tokens, head_dim, ROWS, WIDTH, FITS, not MASKED)
    lse = _load_rows(lse_ptr + row_offs, rows, n_tokens, MASKED)
    scores, bits, slope = _scores(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, cap, HAS_CAP)
    if MASKED:
        starts = tl.load(starts_ptr + rows, mask=rows < n_tokens, other=2147483647)
        scores = _mask_scores(scores, rows[None, :], cols[:, None], starts[None, :], WINDOW)
    weights = tl.exp2(scores * bits - lse[None, :])
    d_out = _load_tile(
        d_out_ptr, first, d_out_stride, head, head_dim, n_tokens, head_dim, ROWS, WIDTH, FITS, not MASKED
    )
    dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision="ieee")
    delta = _load_rows(delta_ptr + row_offs, rows, n_tokens, MASKED)
    d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")
    d_scores = weights * (d_weights - delta[None, :]) * slope
    return tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _next_block(block, head, begin, end):
    """Return the block, or the first block of the next head past the end: cheaper than dividing a counter."""
    over = block >= end
    return tl.where(over, begin, block), head + over.to(tl.int32)


@triton.jit(do_not_specialize=["n_tokens"])
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, ends_ptr, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, head_dim,
    n_tokens, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv, summed over all query heads that share them."""
    scale = fp32(scale)
    cap = fp32(cap)
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    first = tl.program_id(0) // KEY_HEADS * COLS
    key_head = tl.program_id(0) % KEY_HEADS
    cols = first + tl.arange(0, COLS)
    last = tl.minimum(first + COLS, n_tokens) - 1
    k = _load_tile(k_ptr, first, k_token_stride, key_head, k_head_stride, n_tokens, head_dim, COLS, WIDTH, FITS)
    v = _load_tile(v_ptr, first, v_token_stride, key_head, v_head_stride, n_tokens, head_dim, COLS, WIDTH, FITS)
    dk = tl.zeros([COLS, WIDTH], tl.float32)
    dv = tl.zeros([COLS, WIDTH], tl.float32)
    end = tl.load(ends_ptr + last)
    free_end = tl.load(ends_ptr + first)
    if WINDOW > 0:
        end = tl.minimum(end, last + WINDOW)
        free_end = tl.minimum(free_end, first + WINDOW)
    free = first + COLS  # from here on queries are after every key
    n_free = tl.maximum(free_end - free, 0) // ROWS
    behind = free + n_free * ROWS  # from here on some queries are of other documents, or past the window
    n_masked = tl.cdiv(tl.minimum(end, free) - first, ROWS) + tl.maximum(tl.cdiv(end - behind, ROWS), 0)
    for masked in tl.static_range(2):
        block = first if masked else free
        head = key_head * GROUP
        for _ in range(GROUP * (n_masked if masked else n_free)):
            dk, dv = _accumulate_dkdv(
                k, v, dk, dv, cols, starts_ptr, q_ptr, d_out_ptr, lse_ptr, delta_ptr, block, head,
                q_token_stride, q_head_stride, HEADS * head_dim, n_tokens, head_dim, scale, cap,
                masked, WINDOW, HAS_CAP, ROWS, WIDTH, FITS,
            )  # fmt: skip
            if masked:
                block = tl.where(block + ROWS == free, behind, block + ROWS)
                block, head = _next_block(block, head, first, end)
            else:
                block, head = _next_block(block + ROWS, head, free, behind)
    _store_tile(dk_ptr, dk * scale, first, key_head, KEY_HEADS, n_tokens, head_dim, COLS, WIDTH)
    _store_tile(dv_ptr, dv, first, key_head, KEY_HEADS, n_tokens, head_dim, COLS, WIDTH)


@triton.jit(do_not_specialize=["n_tokens"])
def attention_delta_kernel(
    out_ptr, d_out_ptr, delta_ptr, sums_ptr, counters_ptr, n_tokens,
    ALL_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_SUMS: tl.constexpr, ROWS: tl.constexpr,
    HAS_D_LSE: tl.constexpr = False,
):  # fmt: skip
    """Write delta = sum_d dO out (H, padded tokens), and zeros to the sums of dq and the counters of turns, if any.

    HAS_D_LSE: delta holds the gradient of the row's lse, which is subtracted from that sum.
    """
    padded = tl.cdiv(n_tokens, 128) * 128
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = rows // HEADS
    heads = rows % HEADS
    mask = (tokens < n_tokens)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    places = (tokens * ALL_HEADS + heads)[:, None] * WIDTH + cols
    out = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * d_out, 1)
    delta_ptrs = delta_ptr + heads * padded + tokens
    if HAS_D_LSE:
        delta -= tl.load(delta_ptrs, mask=tokens < padded, other=0.0)
    tl.store(delta_ptrs, delta, mask=tokens < padded)
    if HAS_SUMS:
        places = rows[:, None] * WIDTH + cols
        tl.store(sums_ptr + places, tl.zeros([ROWS, WIDTH], tl.float32), mask=(tokens < padded)[:, None])
        first_of_block = (tokens % 64 == 0) & (tokens < padded)
        tl.store(counters_ptr + heads * (padded // 64) + tokens // 64, tl.zeros([ROWS], tl.int32), mask=first_of_block)


@triton.jit(do_not_specialize=["n_tokens"])
def attention_round_dq_kernel(
    sums_ptr, dq_ptr, n_tokens, scale,
    ALL_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dq (T, H, WIDTH) from the sums of the backward kernels, in the order of their `dq_places`."""
    padded = tl.cdiv(n_tokens, 128) * 128
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = (rows // HEADS)[:, None]
    heads = (rows % HEADS)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    if BLOCK == 128:  # two parts of 64 queries
        part = tokens % 128 // 64
        r = tokens % 64
        c = cols
        PART: tl.constexpr = 64 * WIDTH
    else:  # two parts of half of the columns
        part = cols // (WIDTH // 2)
        r = tokens % 64
        c = cols % (WIDTH // 2)
        PART: tl.constexpr = 64 * WIDTH // 2
    thread = r // 16 * 32 + r % 8 * 4 + c % 8 // 2
    places = ((c // 8 * 2 + r % 16 // 8) * 128 + thread) * 2 + c % 2
    places += (heads * padded + tokens // BLOCK * BLOCK) * WIDTH + part * PART
    places = tl.max_contiguous(tl.multiple_of(places, (2, 2)), (1, 2))
    mask = tokens < n_tokens
    dq = tl.load(sums_ptr + places, mask=mask) * scale
    places = (tokens * ALL_HEADS + heads) * WIDTH + cols
    tl.store(dq_ptr + places, dq.to(dq_ptr.dtype.element_ty), mask=mask)
