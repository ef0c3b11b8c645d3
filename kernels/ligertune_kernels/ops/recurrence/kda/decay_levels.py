r"""Device functions of a chunk's decays per channel, whose exponents are never positive.

The decay between two tokens differs by channel, so it has to stand inside of the product over channels:

    q_i·k_j decayed = Σ_c q_ic k_jc exp(g_{j+1} + ... + g_i)_c

One factor for i and one for j need a token between them up to which, and from which on, the decays are added up. With
one such token for a whole chunk, one of the exponents is positive and overflows. So pairs of tokens are sorted into
levels. Level l cuts the chunk into blocks of 2^l tokens: it has the pairs with j in a block of even number and i in the
block after it, and each pair of tokens belongs to exactly one level. With `middle` the first token of the odd block,

    i, in the odd block    exponent g_middle + ... + g_i
    j, in the even block   exponent g_{j+1} + ... + g_{middle-1}

Each token has one exponent per level, which serves as row and as column. It is a sum of numbers that are at most 0, and
is not a difference of larger sums, so that it loses no digits.

Levels of the pairs of eight tokens:

    i \ j  0 1 2 3 4 5 6 7
    0
    1      0
    2      1 1
    3      1 1 0
    4      2 2 2 2
    5      2 2 2 2 0
    6      2 2 2 2 1 1
    7      2 2 2 2 1 1 0

Sums over tokens are products with a matrix of ones and zeros. Decays are split for them into two fp16 numbers, whose
sum has 22 bits; with fp32 tensors they stay whole.
"""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton

LEAST_DECAY = tl.constexpr(-1000.0)  # exp of it is 0 in fp32, and sums of a chunk stay finite


@triton.jit
def _limited(decays):
    """Return decays in fp32, at least LEAST_DECAY; NaN stays."""
    return tl.maximum(decays.to(tl.float32), LEAST_DECAY, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_decays(decays, SPLIT: tl.constexpr):
    """Return decays as two numbers of fp16; with SPLIT False as one of fp32, twice."""
    decays = _limited(decays)
    if SPLIT:
        high = decays.to(tl.float16)
        return high, (decays - high.to(tl.float32)).to(tl.float16)
    else:
        return decays, decays


@triton.jit
def _decays_between(lows, highs, high, low, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """Return exp of the sum of the decays (CHUNK, COLS) between two places, both included, of each token; fp32."""
    tokens = tl.arange(0, CHUNK)[None, :]
    ones = tl.where((tokens >= lows[:, None]) & (tokens <= highs[:, None]), 1.0, 0.0).to(high.dtype)
    sums = tl.dot(ones, high, input_precision="ieee")
    if SPLIT:
        sums = tl.dot(ones, low, sums, input_precision="ieee")
    return tl.exp(sums)


@triton.jit
def level_factors(high, low, level, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """Return the factors of all tokens (CHUNK, COLS) in the pairs of a level."""
    tokens = tl.arange(0, CHUNK)
    block = tokens >> level
    is_row = (block & 1) == 1
    lows = tl.where(is_row, block << level, tokens + 1)
    highs = tl.where(is_row, tokens, ((block + 1) << level) - 1)
    return _decays_between(lows, highs, high, low, CHUNK, SPLIT)


@triton.jit
def level_pairs(first_seen, level, CHUNK: tl.constexpr):
    """Return the pairs (row, column) of a level within documents. first_seen: of each row, its place in the chunk."""
    tokens = tl.arange(0, CHUNK)
    block = tokens >> level
    # an interval of columns for each row: it takes fewer registers than a comparison of two blocks and two documents
    lows = tl.where((block & 1) == 1, tl.maximum((block - 1) << level, first_seen), CHUNK)
    return (tokens[None, :] >= lows[:, None]) & (tokens[None, :] < (block << level)[:, None])


@triton.jit
def factors_from_state(high, low, starts, first, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """Return the factors of the state before the chunk for each token; 0 for documents that begin in the chunk."""
    tokens = tl.arange(0, CHUNK)
    factors = _decays_between(tokens * 0, tokens, high, low, CHUNK, SPLIT)
    return tl.where((starts < tl.maximum(first, 1))[:, None], factors, 0.0)


@triton.jit
def factors_to_state(high, low, starts, last_start, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """Return the factors of the tokens in the state after the chunk; 0 for documents that end in the chunk."""
    tokens = tl.arange(0, CHUNK)
    factors = _decays_between(tokens + 1, tokens * 0 + CHUNK, high, low, CHUNK, SPLIT)
    return tl.where((starts == last_start)[:, None], factors, 0.0)


@triton.jit
def factors_of_state(decays, last_start, first):
    """Return the factors (COLS,) of the state before the chunk in that after it. decays: as they are loaded."""
    sums = tl.sum(_limited(decays), 0)
    return tl.where(last_start < tl.maximum(first, 1), tl.exp(sums), 0.0)
