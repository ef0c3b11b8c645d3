"""Device functions of chunked recurrences: tiles of a chunk's tokens, its documents and its decays."""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton


@triton.jit
def load_chunk(
    ptr, first, n_tokens, token_stride, first_col, N_COLS: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr
):
    """Load (CHUNK, COLS) of a matrix (n_tokens, N_COLS) with unit column stride; zero outside."""
    rows = tl.arange(0, CHUNK)
    cols = first_col + tl.arange(0, COLS)
    ptrs = ptr + first.to(tl.int64) * token_stride  # offsets within a tile need 32 bits
    mask = (first + rows < n_tokens)[:, None]
    if N_COLS % COLS != 0:
        mask = mask & (cols < N_COLS)[None, :]
    return tl.load(ptrs + rows[:, None] * token_stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_chunk(
    ptr, tile, first, keep, token_stride, first_col, N_COLS: tl.constexpr, CHUNK: tl.constexpr, COLS: tl.constexpr
):
    """Store the rows of a tile that `keep` selects to a matrix (tokens, N_COLS)."""
    cols = first_col + tl.arange(0, COLS)
    ptrs = ptr + first.to(tl.int64) * token_stride
    ptrs = ptrs + tl.arange(0, CHUNK)[:, None] * token_stride + cols[None, :]
    mask = keep[:, None]
    if N_COLS % COLS != 0:
        mask = mask & (cols < N_COLS)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile(
    ptr, first_row, first_col, N_ROWS: tl.constexpr, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Return pointers to (ROWS, COLS) of a contiguous matrix (N_ROWS, N_COLS), and which of them are inside."""
    rows = first_row + tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, COLS)
    return ptr + rows[:, None] * N_COLS + cols[None, :], (rows < N_ROWS)[:, None] & (cols < N_COLS)[None, :]


@triton.jit
def load_tile(
    ptr, first_row, first_col, N_ROWS: tl.constexpr, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Load (ROWS, COLS) of a contiguous matrix (N_ROWS, N_COLS); zero outside."""
    ptrs, inside = _tile(ptr, first_row, first_col, N_ROWS, N_COLS, ROWS, COLS)
    if N_ROWS % ROWS == 0 and N_COLS % COLS == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_tile(
    ptr, tile, keep, first_row, first_col, N_ROWS: tl.constexpr, N_COLS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, KEEP_ALL: tl.constexpr = False,
):  # fmt: skip
    """Store the numbers of a tile that `keep` selects, or all."""
    ptrs, inside = _tile(ptr, first_row, first_col, N_ROWS, N_COLS, ROWS, COLS)
    tile = tile.to(ptr.dtype.element_ty)
    if not KEEP_ALL:
        tl.store(ptrs, tile, mask=inside & keep)
    elif N_ROWS % ROWS == 0 and N_COLS % COLS == 0:
        tl.store(ptrs, tile)
    else:
        tl.store(ptrs, tile, mask=inside)


@triton.jit
def identity(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the first factor of a product that adds a tile in shared memory: fewer registers than loading it takes."""
    places = tl.arange(0, SIZE)
    return tl.where(places[:, None] == places[None, :], 1.0, 0.0).to(DTYPE)


@triton.jit
def load_numbers(ptr, tokens, n_tokens, stride):
    """Load one number for each token, and that of the last token for those after it, whose tiles are zero."""
    # no masks, which registers would hold; differences of G are never positive
    return tl.load(ptr + tl.minimum(tokens, n_tokens - 1).to(tl.int64) * stride)


@triton.jit
def inverse_lengths(
    norm_ptr, batch, head, tokens, n_tokens, HEADS: tl.constexpr, NORMED: tl.constexpr, CHUNK: tl.constexpr
):
    """Load 1 / |q| or 1 / |k| of each token; 1 if their lengths are not divided out."""
    if NORMED:
        return load_numbers(norm_ptr + batch * n_tokens * HEADS + head, tokens, n_tokens, HEADS)
    else:
        return tl.full([CHUNK], 1.0, tl.float32)


@triton.jit
def load_starts(starts_ptr, tokens, n_tokens, HAS_DOCUMENTS: tl.constexpr):
    """Return the first token of each token's document; tokens after the last belong to its document."""
    if HAS_DOCUMENTS:
        return tl.load(starts_ptr + tl.minimum(tokens, n_tokens - 1))
    else:
        return tokens * 0


@triton.jit
def visible_tokens(starts, CHUNK: tl.constexpr, STRICT: tl.constexpr = False):
    """Return which earlier tokens [of the second axis] of a chunk each token sees; itself, too, unless STRICT."""
    rows = tl.arange(0, CHUNK)
    earlier = (rows[:, None] > rows[None, :]) if STRICT else (rows[:, None] >= rows[None, :])
    return earlier & (starts[:, None] == starts[None, :])


@triton.jit
def visible_tokens_transposed(starts, CHUNK: tl.constexpr, STRICT: tl.constexpr = False):
    """Return which later tokens [of the second axis] of a chunk see each token."""
    rows = tl.arange(0, CHUNK)
    later = (rows[:, None] < rows[None, :]) if STRICT else (rows[:, None] <= rows[None, :])
    return later & (starts[:, None] == starts[None, :])


@triton.jit
def decay_between(logs, starts, CHUNK: tl.constexpr, STRICT: tl.constexpr = False):
    """Return D_ij = exp(G_i - G_j) for the tokens j that i sees, else 0."""
    seen = visible_tokens(starts, CHUNK, STRICT)
    # masked before exp: differences of later tokens are positive and may overflow
    return tl.exp(tl.where(seen, logs[:, None] - logs[None, :], float("-inf")))


@triton.jit
def decay_between_transposed(logs, starts, CHUNK: tl.constexpr, STRICT: tl.constexpr = False):
    """Return D_ji with j, the token that is seen, on the first axis."""
    seen = visible_tokens_transposed(starts, CHUNK, STRICT)
    return tl.exp(tl.where(seen, logs[None, :] - logs[:, None], float("-inf")))


@triton.jit
def decay_from_state(logs, starts, first):
    """Return exp(G_i), the factor of the state before the chunk; 0 for documents that begin in the chunk."""
    return tl.where(starts < tl.maximum(first, 1), tl.exp(logs), 0.0)


@triton.jit
def decay_to_state(logs, starts, last_log, starts_ptr, first, last, HAS_DOCUMENTS: tl.constexpr):
    """Return the factors of the chunk's tokens, and of the state before it, in the state after its last token."""
    last_start = load_starts(starts_ptr, last, last + 1, HAS_DOCUMENTS)
    tokens = tl.exp(tl.where(starts == last_start, last_log - logs, float("-inf")))
    state = tl.where(last_start < tl.maximum(first, 1), tl.exp(last_log), 0.0)
    return tokens, state


@triton.jit
def part_of_row(part, part_tokens, n_tokens):
    """Return the first and the last token of a part."""
    begin = (part * part_tokens).to(tl.int32)
    return begin, tl.minimum(begin + part_tokens, n_tokens) - 1


@triton.jit
def is_owned(tokens, own_first, own_end, n_tokens):
    """Return which tokens a program owns. Those after the row's last one belong to its document."""
    return (tokens >= own_first) & ((tokens < own_end) | (own_end == n_tokens))


@triton.jit
def owned_tokens(begin, last, start, first_end, last_end, n_tokens):
    """Return the first token, and the one after the last, of the documents that begin in a part; equal if none do.

    start, first_end: of the document of the part's first token; last_end: of that of its last. torch.compile would take
    tensors for changed whose pointers a function like this gets. Both results lie in the row, whatever the documents.
    """
    inside = tl.minimum(tl.maximum(first_end, begin), n_tokens)
    first = tl.where(start == begin, begin, inside)
    return first, tl.where(first <= last, tl.minimum(tl.maximum(last_end, last + 1), n_tokens), first)
