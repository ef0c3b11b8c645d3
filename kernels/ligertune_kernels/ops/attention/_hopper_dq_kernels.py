"""Triton kernels before and after the backward of document_attention on Hopper: one pass over dO, one over dq.

A launch computes HEADS of the ALL_HEADS heads of out, dO and dq. The fp32 sums have only those.
"""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton


@triton.jit(do_not_specialize=["n_tokens"])
def attention_delta_kernel(
    out_ptr, d_out_ptr, delta_ptr, sums_ptr, counters_ptr, n_tokens,
    ALL_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_SUMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write delta = sum_d dO out (H, padded tokens), and zeros to the sums of dq and the counters of turns, if any."""
    padded = tl.cdiv(n_tokens, 128) * 128
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = rows // HEADS
    heads = rows % HEADS
    mask = (tokens < n_tokens)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    places = (tokens * ALL_HEADS + heads)[:, None] * WIDTH + cols
    out = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + heads * padded + tokens, tl.sum(out * d_out, 1), mask=tokens < padded)
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
