r"""The pass over the rows of logits that cross_entropy and linear_cross_entropy share.

Of a row x (V,) with label y, class weights w (all 1 by default), smoothing ε, cap c and z-loss weight ζ:

    z = c tanh(s x / c), or s x without a cap        lse = log sum exp z        p = exp(z - lse)
    loss = (1 - ε) w_y (lse - z_y) + ε/V sum_j w_j (lse - z_j) + ζ lse²
    dloss/dx_j = s (1 - (z_j/c)²) · [ p_j ((1 - ε) w_y + ε/V sum w + 2 ζ lse) - ε/V w_j - (1 - ε) w_y [j = y] ]

A row whose label is ignore_index has loss 0 and gradient 0; one whose label is no class has NaN for both and reads
nothing out of bounds. All arithmetic is fp32 (float64 in the torch form for float64 logits).

`row_pass` takes whole rows, `slab_pass` some columns of rows whose lse is known. The kernels are in row_kernels.py;
`tiling` says how a program goes through a row and how many rows are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ligertune_kernels.chips import MAX_THREADS, Chip, launch_options
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.losses._row_kernels import row_kernel, slab_kernel

VECTOR = 8  # neighbouring columns of one lane: 16 bytes of bf16
SHORTEST = 128  # columns of a tile
# Of a long row taken at once by the sweeps. Twice as much, by half the threads a program may have, with twice the
# registers each, reaches 89 % of the bandwidth where this reaches 80 % (8192 x 128256, H100); on CDNA it spills.
BLOCK_BYTES = 16384
# Of a row held in registers. Without a cap, smoothing or weights 64 columns of 16 bits a thread are two programs on a
# processor; with them, and in fp32, more than this spills (compiled for sm80-sm120, gfx90a-gfx1201).
TAIL_BYTES = 65536
TAIL_BYTES_WITH_TERMS = 16384
COLUMNS_OF_A_THREAD = 64
COLUMNS_OF_A_THREAD_WITH_TERMS = 8
SCALE_BLOCK = 4096
SCALE_PROGRAMS = 16  # a processor, at most: with a factor of one all that is to be paid is their start
HINTS = True  # tells the L2 cache to keep what is swept once, and not what is swept twice

# float16 holds nothing below 6e-8: p/n of a large vocabulary and batch would vanish. Its gradients are therefore not
# divided by n in the pass but multiplied by this, and by 1/(256 n) once the upstream gradient (GradScaler's 65536)
# is there too. 256 (p - 1) W overflows for no weight under 128.
HALF_SCALE = 256.0


@dataclass(frozen=True)
class Terms:
    """What a row's loss is made of."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class Tiling:
    """How a program takes a row: `swept` columns block by block, twice, and the tail, which it holds meanwhile."""

    swept: int
    block: int
    tail: int
    num_warps: int
    programs: int


def tiling(
    n_rows: int, n_cols: int, element_size: int, chip: Chip, *, plain: bool, rest_cols: int | None = None
) -> Tiling:
    """Rows that fit are held whole, and as many at once as there are threads for; of longer ones the last columns are.

    Long rows go one to a processor, so that what is read a second time is in the L2 cache still. Of rows whose first
    columns lie elsewhere, no more is held than the rest_cols others.
    """
    most_warps = MAX_THREADS // chip.warp_size
    plain &= element_size == 2
    most = (TAIL_BYTES if plain else TAIL_BYTES_WITH_TERMS) // element_size
    if rest_cols is not None:
        most = min(most // 2, 1 << (rest_cols.bit_length() - 1))  # half, as finding columns takes registers
    elif n_cols <= most:
        tail = max(SHORTEST, triton.next_power_of_2(n_cols))
        columns = COLUMNS_OF_A_THREAD if plain else COLUMNS_OF_A_THREAD_WITH_TERMS
        num_warps = min(most_warps, max(4, tail // (columns * chip.warp_size)))
        return Tiling(0, SHORTEST, tail, num_warps, min(n_rows, chip.processors * 2 * most_warps // num_warps))
    halves = chip.warp_size == 32
    block = min(most, BLOCK_BYTES * (2 if halves and plain else 1) // element_size)
    swept = triton.cdiv(n_cols - most, block) * block
    num_warps = most_warps // 2 if halves else most_warps
    if rest_cols is not None:  # few columns would lie in several warps, all of which write them to shared memory
        num_warps = min(num_warps, max(1, block // (VECTOR * chip.warp_size)))
    return Tiling(swept, block, most, num_warps, min(n_rows, chip.processors))


def row_pass(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    *,
    weight: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lead: torch.Tensor | None = None,
) -> torch.Tensor:
    """The losses (N,) of logits (N, V) and labels (N,); their gradient, times scale (one or N), goes into `gradient`.

    gradient (N, V) may be the logits themselves. scale is a tensor, since the host is not to wait for its value. What
    `slab_pass` needs of each row that is not ignored goes into lse (N, 2): the largest z, and by how much lse exceeds
    that. With lead (K, N, S) the first K S columns of the rows lie there, in K groups, and logits hold the rest; the
    gradient is then written over both.
    """
    if not runs_triton(logits):
        if lead is None:
            return _row_pass_torch(logits, labels, terms, weight, gradient, scale, lse)
        return _in_groups_torch(logits, labels, terms, weight, scale, lse, lead)
    n_rows, n_cols = logits.shape
    assert logits.stride(1) == 1 and labels.is_contiguous()
    in_lead, group_cols, group_jump = 0, 0, 0
    if lead is not None:
        assert gradient is logits and lead.stride(2) == 1 and lead.stride(1) == lead.shape[2]
        group_cols, group_jump = lead.shape[2], lead.stride(0) - lead.shape[2]
        in_lead = lead.shape[0] * group_cols
        n_cols += in_lead
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    chip = chip_of(logits.device)
    plain = weight is None and not terms.label_smoothing and terms.softcap is None
    rest_cols = None if lead is None else logits.shape[1]
    tiles = tiling(n_rows, n_cols, logits.element_size(), chip, plain=plain, rest_cols=rest_cols)
    needs_grad = gradient is not None
    scale_stride = 1 if needs_grad and scale.dim() else 0
    if lead is None:  # not another argument: torch.compile takes it for written to, and would keep what it held before
        lead = losses.new_empty(1)
    # A flag keeps the kernel off the other arguments it has no use for; any tensor fills their place.
    with on_device(logits):
        row_kernel[(tiles.programs,)](
            logits, labels, losses if weight is None else weight.contiguous(), losses, losses if lse is None else lse,
            gradient if needs_grad else logits, scale if needs_grad else losses, lead,
            logits.stride(0), gradient.stride(0) if needs_grad else 0, scale_stride, n_rows, n_cols, tiles.swept,
            in_lead, group_cols, group_jump,
            terms.ignore_index, terms.label_smoothing, terms.softcap or 0.0, terms.logit_scale, terms.z_loss,
            HAS_WEIGHT=weight is not None, HAS_SMOOTHING=terms.label_smoothing != 0.0,
            HAS_SOFTCAP=terms.softcap is not None, SAVES_LSE=lse is not None, NEEDS_GRAD=needs_grad,
            SWEEPS=tiles.swept > 0, GROUPED=in_lead > 0, TAIL_LANES=tiles.tail // VECTOR,
            LANES=tiles.block // VECTOR, VECTOR=VECTOR, HINTS=HINTS,
            **{**launch_options(tiles.block, chip), "num_warps": tiles.num_warps},
        )  # fmt: skip
    return losses


def slab_pass(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    *,
    first_col: int,
    vocab_size: int,
    lse: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> None:
    """Turns logits (N, S), the columns from first_col on, into their gradient times scale. weight is of all classes."""
    weight_sum = lse if weight is None else weight.sum(dtype=torch.float32)
    if not runs_triton(logits):
        _slab_pass_torch(logits, labels, terms, first_col, vocab_size, lse, scale, weight)
        return
    if weight is None and terms.label_smoothing:
        weight_sum = torch.full((), vocab_size, dtype=torch.float32, device=logits.device)
    n_rows, n_cols = logits.shape
    block, chip = max(SHORTEST, triton.next_power_of_2(n_cols)), chip_of(logits.device)
    with on_device(logits):
        slab_kernel[(n_rows,)](
            logits, labels, lse if weight is None else weight.contiguous(), lse, scale, weight_sum,
            logits.stride(0), 1 if scale.dim() else 0, n_rows, n_cols, first_col, vocab_size,
            terms.ignore_index, terms.label_smoothing, terms.softcap or 0.0, terms.logit_scale, terms.z_loss,
            HAS_WEIGHT=weight is not None, HAS_SMOOTHING=terms.label_smoothing != 0.0,
            HAS_SOFTCAP=terms.softcap is not None, LANES=block // VECTOR, VECTOR=VECTOR, **launch_options(block, chip),
        )  # fmt: skip


def _row_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    weight: torch.Tensor | None,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> torch.Tensor:
    z, slope = _bounded_torch(logits, terms)
    n_cols = z.shape[1]
    lse = z.logsumexp(dim=-1, keepdim=True)
    labels = labels.long().unsqueeze(1)
    ignored, is_class = labels == terms.ignore_index, (labels >= 0) & (labels < n_cols)
    index = labels.clamp(0, n_cols - 1)
    share = z.new_full((1, 1), 1.0 - terms.label_smoothing)
    if weight is not None:
        share = share * weight.to(z.dtype)[index]
    loss = share * (lse - z.gather(1, index)) + terms.z_loss * lse.square()
    softmax_share = share + 2.0 * terms.z_loss * lse
    smooth = 0.0
    if terms.label_smoothing:
        smooth = terms.label_smoothing / n_cols * (torch.ones_like(z[:1]) if weight is None else weight.to(z.dtype))
        loss = loss + (smooth * (lse - z)).sum(dim=-1, keepdim=True)
        softmax_share = softmax_share + smooth.sum()
    if lse_out is not None:
        top = z.amax(dim=-1, keepdim=True)
        lse_out.copy_(torch.cat([top, (z - top).logsumexp(dim=-1, keepdim=True)], dim=1))
    if gradient is not None:
        dz = softmax_share * z.softmax(dim=-1) - smooth
        dz.scatter_add_(1, index, -share.expand_as(index))
        dz *= slope * (scale.unsqueeze(1) if scale.dim() else scale)
        gradient.copy_(dz.masked_fill_(~is_class, torch.nan).masked_fill_(ignored, 0.0))
    return loss.masked_fill(~is_class, torch.nan).masked_fill(ignored, 0.0).squeeze(1)


def _in_groups_torch(
    rest: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    lse: torch.Tensor | None,
    lead: torch.Tensor,
) -> torch.Tensor:
    whole = torch.cat([*lead, rest], dim=1)
    losses = _row_pass_torch(whole, labels, terms, weight, whole, scale, lse)
    in_lead = whole.shape[1] - rest.shape[1]
    for group, gradient in zip(lead, whole[:, :in_lead].split(lead.shape[2], dim=1), strict=True):
        group.copy_(gradient)
    rest.copy_(whole[:, in_lead:])
    return losses


def _slab_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Terms,
    first_col: int,
    vocab_size: int,
    lse: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
) -> None:
    z, slope = _bounded_torch(logits, terms)
    n_cols = z.shape[1]
    (top, log_sum), labels = lse.split(1, dim=1), labels.long().unsqueeze(1)
    ignored, is_class = labels == terms.ignore_index, (labels >= 0) & (labels < vocab_size)
    weight = z.new_ones(vocab_size) if weight is None else weight.to(z.dtype)
    share = (1.0 - terms.label_smoothing) * weight[labels.clamp(0, vocab_size - 1)]
    smooth = terms.label_smoothing / vocab_size * weight
    softmax_share = share + 2.0 * terms.z_loss * (top + log_sum) + smooth.sum()
    dz = softmax_share * torch.exp((z - top) - log_sum) - smooth[first_col : first_col + n_cols]
    here = labels - first_col
    inside = (here >= 0) & (here < n_cols)
    dz.scatter_add_(1, here.clamp(0, n_cols - 1), torch.where(inside, -share, 0.0))
    dz *= slope * (scale.unsqueeze(1) if scale.dim() else scale)
    logits.copy_(dz.masked_fill_(~is_class, torch.nan).masked_fill_(ignored, 0.0))


def _bounded_torch(logits: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor | float]:
    """z and dz/dx, at least fp32 wide."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * terms.logit_scale
    if terms.softcap is None:
        return z, terms.logit_scale
    t = torch.tanh(z / terms.softcap)
    return terms.softcap * t, terms.logit_scale * (1.0 - t.square())


def scales(denominator: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """1/denominator (one or N), parted into a factor for the pass and one for afterwards, of gradients in dtype."""
    if dtype is torch.float16:
        least = denominator.abs().min()
        return HALF_SCALE * (least / denominator), 1.0 / (HALF_SCALE * least)
    return 1.0 / denominator, None


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
            tl.store(x_ptr + offs, (x * factor).to(x_ptr.dtype.element_ty), mask=offs < n)


def scaled(t: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """t · factor: in t's own memory where kernels run (a factor of one then costs one launch), else a new tensor.

    The factor stays on the device: it is read there, so nothing waits for it.
    """
    if not runs_triton(t):
        return t * factor.to(t.dtype)
    chip = chip_of(t.device)
    programs = min(triton.cdiv(t.numel(), SCALE_BLOCK), SCALE_PROGRAMS * chip.processors)
    with on_device(t):
        _scale_kernel[(programs,)](t, factor, t.numel(), BLOCK=SCALE_BLOCK, **launch_options(SCALE_BLOCK, chip))
    return t
