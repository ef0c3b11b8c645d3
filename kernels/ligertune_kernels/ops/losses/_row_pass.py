r"""Row pass: losses of logits (N, V) and their gradient, with class weights, label smoothing, a soft cap and a z-loss.

For a row x (V,) with label y, class weights w (1 by default), smoothing ε, cap c, logit scale s and z-loss weight ζ:

    z = c tanh(s x / c), or s x without a cap        lse = log sum exp z        p = exp(z - lse)
    loss = (1 - ε) w_y (lse - z_y) + ε/V sum_j w_j (lse - z_j) + ζ lse²
    dloss/dx_j = s (1 - (z_j/c)²) · [ p_j ((1 - ε) w_y + ε/V sum w + 2 ζ lse) - ε/V w_j - (1 - ε) w_y [j = y] ]

A row whose label is ignore_index has loss 0 and gradient 0. A row whose label is no class has NaN in both and reads
nothing out of bounds. The arithmetic is fp32, or float64 in the torch form for float64 logits.

`row_pass` takes whole rows, `slab_pass` some columns of rows whose lse is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ligertune_kernels.chips import MAX_THREADS, Chip, launch_options
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, triton
from ligertune_kernels.ops.losses._row_kernels import row_kernel, slab_kernel

VECTOR = 8  # neighbouring columns of one lane: 16 bytes of bf16
MIN_COLS = 128  # of a tile
# Bytes of a long row per step of the sweeps. Twice as many, with half of the threads and twice the registers per
# thread, reach 89 % of the bandwidth where this reaches 80 % (8192 x 128256, H100); on CDNA they spill.
BLOCK_BYTES = 16384


class TailLimits(NamedTuple):
    """How much of a row a program holds in registers."""

    max_bytes: int
    cols_per_thread: int


PLAIN_16_BIT = TailLimits(65536, cols_per_thread=64)  # two programs then share a processor
WITH_TERMS = TailLimits(16384, cols_per_thread=8)  # fp32 or options take registers: more spills (sm80-120, gfx90a-1201)


@dataclass(frozen=True)
class LossOptions:
    """Terms of cross entropy beyond labels and class weights."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0

    @property
    def numbers(self) -> tuple[int, float, float, float, float]:
        """The options in the order of the kernels' arguments."""
        return self.ignore_index, self.label_smoothing, self.softcap or 0.0, self.logit_scale, self.z_loss

    def flags(self, has_weight: bool) -> dict[str, bool]:
        """Return the kernels' constants that leave out unused terms. has_weight: there are class weights."""
        has_smoothing = self.label_smoothing != 0.0
        has_softcap = self.softcap is not None
        return {"HAS_WEIGHT": has_weight, "HAS_SMOOTHING": has_smoothing, "HAS_SOFTCAP": has_softcap}


@dataclass(frozen=True)
class Tiling:
    """How a program reads a row: `swept` columns in blocks, twice, and the `tail`, which stays in registers."""

    swept: int
    block: int
    tail: int
    num_warps: int
    programs: int


def row_tiling(
    n_rows: int, n_cols: int, element_size: int, chip: Chip, *, plain: bool, rest_cols: int | None = None
) -> Tiling:
    """Return the tiling of the row kernel.

    Rows that fit are held whole, as many at once as there are threads. Longer rows run one per processor, so that the
    second sweep still finds them in the L2 cache. plain: no cap, smoothing or class weights. rest_cols: the columns
    that do not lie in groups; no more than these are held.
    """
    max_warps = MAX_THREADS // chip.warp_size
    plain &= element_size == 2
    limits = PLAIN_16_BIT if plain else WITH_TERMS
    tail = limits.max_bytes // element_size
    if rest_cols is not None:
        tail = min(tail // 2, 1 << (rest_cols.bit_length() - 1))  # half: addresses of grouped columns take registers
    elif n_cols <= tail:
        tail = max(MIN_COLS, triton.next_power_of_2(n_cols))
        num_warps = min(max_warps, max(4, tail // (limits.cols_per_thread * chip.warp_size)))
        return Tiling(0, MIN_COLS, tail, num_warps, min(n_rows, chip.processors * 2 * max_warps // num_warps))
    halves = chip.warp_size == 32
    block = min(tail, BLOCK_BYTES * (2 if halves and plain else 1) // element_size)
    swept = triton.cdiv(n_cols - tail, block) * block
    num_warps = max_warps // 2 if halves else max_warps
    if rest_cols is not None:  # a few columns would be held by several warps, and all of them would write
        num_warps = min(num_warps, max(1, block // (VECTOR * chip.warp_size)))
    return Tiling(swept, block, tail, num_warps, min(n_rows, chip.processors))


def row_pass(
    logits: torch.Tensor,  # (N, V)
    labels: torch.Tensor,  # (N,)
    options: LossOptions,
    *,
    weight: torch.Tensor | None = None,  # (V,)
    gradient: torch.Tensor | None = None,  # (N, V), may be the logits
    scale: torch.Tensor | None = None,  # () or (N,)
    lse: torch.Tensor | None = None,  # (N, 2)
    lead: torch.Tensor | None = None,  # (K, N, S)
) -> torch.Tensor:  # (N,)
    """Return the losses of rows; write their gradient times scale into `gradient`.

    lse receives what `slab_pass` needs of each row that is not ignored: the largest z, and lse minus that. With lead
    the first K S columns of the rows lie there, in K groups, and logits hold the others; both are overwritten with
    their gradient. scale is a tensor, because the host must not wait for its value.
    """
    if not runs_triton(logits):
        if lead is None:
            return _row_pass_torch(logits, labels, options, weight, gradient, scale, lse)
        return _grouped_pass_torch(logits, labels, options, weight, scale, lse, lead)
    n_rows, n_cols = logits.shape
    assert logits.stride(1) == 1 and labels.is_contiguous()
    in_lead = 0
    group_cols = 0
    group_jump = 0
    if lead is not None:
        assert gradient is logits and lead.stride(2) == 1 and lead.stride(1) == lead.shape[2]
        group_cols = lead.shape[2]
        group_jump = lead.stride(0) - lead.shape[2]
        in_lead = lead.shape[0] * group_cols
        n_cols += in_lead
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    chip = chip_of(logits.device)
    plain = weight is None and not options.label_smoothing and options.softcap is None
    rest_cols = None if lead is None else logits.shape[1]
    tiles = row_tiling(n_rows, n_cols, logits.element_size(), chip, plain=plain, rest_cols=rest_cols)
    needs_grad = gradient is not None
    scale_stride = 1 if needs_grad and scale.dim() else 0
    constants = row_constants(tiles, chip, saves_lse=lse is not None, needs_grad=needs_grad, grouped=in_lead > 0)
    if lead is None:  # not `losses`: torch.compile takes lead for an output, and would preserve what it held before
        lead = losses.new_empty(1)
    # Flags keep the kernel from reading unused arguments; any tensor takes their place.
    with on_device(logits):
        row_kernel[(tiles.programs,)](
            logits, labels, losses if weight is None else weight.contiguous(), losses, losses if lse is None else lse,
            gradient if needs_grad else logits, scale if needs_grad else losses, lead,
            logits.stride(0), gradient.stride(0) if needs_grad else 0, scale_stride, n_rows, n_cols, tiles.swept,
            in_lead, group_cols, group_jump, *options.numbers, **options.flags(weight is not None), **constants,
        )  # fmt: skip
    return losses


def row_constants(
    tiles: Tiling, chip: Chip, *, saves_lse: bool, needs_grad: bool, grouped: bool
) -> dict[str, int | bool]:
    """Return the constants of `row_kernel` that do not depend on the options of the loss."""
    return {
        **launch_options(tiles.block, chip),
        "num_warps": tiles.num_warps,
        "SAVES_LSE": saves_lse,
        "NEEDS_GRAD": needs_grad,
        "SWEEPS": tiles.swept > 0,
        "GROUPED": grouped,
        "TAIL_LANES": tiles.tail // VECTOR,
        "LANES": tiles.block // VECTOR,
        "VECTOR": VECTOR,
    }


def slab_pass(
    logits: torch.Tensor,  # (N, S)
    labels: torch.Tensor,  # (N,)
    options: LossOptions,
    *,
    first_col: int,
    vocab_size: int,
    lse: torch.Tensor,  # (N, 2), from row_pass
    scale: torch.Tensor,  # () or (N,)
    weight: torch.Tensor | None = None,  # (V,), of all classes
) -> None:
    """Overwrite logits, which are the columns from first_col on, with their gradient times scale."""
    if not runs_triton(logits):
        _slab_pass_torch(logits, labels, options, first_col, vocab_size, lse, scale, weight)
        return
    weight_sum = lse if weight is None else weight.sum(dtype=torch.float32)
    if weight is None and options.label_smoothing:
        weight_sum = torch.full((), vocab_size, dtype=torch.float32, device=logits.device)
    n_rows, n_cols = logits.shape
    block = max(MIN_COLS, triton.next_power_of_2(n_cols))
    chip = chip_of(logits.device)
    with on_device(logits):
        slab_kernel[(n_rows,)](
            logits, labels, lse if weight is None else weight.contiguous(), lse, scale, weight_sum,
            logits.stride(0), 1 if scale.dim() else 0, n_rows, n_cols, first_col, vocab_size, *options.numbers,
            **options.flags(weight is not None), LANES=block // VECTOR, VECTOR=VECTOR, **launch_options(block, chip),
        )  # fmt: skip


def capped_logits(logits: torch.Tensor, options: LossOptions) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return z and dz/dx of logits x, at least fp32."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.softcap is None:
        return z, options.logit_scale
    t = torch.tanh(z / options.softcap)
    return options.softcap * t, options.logit_scale * (1.0 - t.square())


def _row_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    weight: torch.Tensor | None,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> torch.Tensor:
    z, slope = capped_logits(logits, options)
    n_cols = z.shape[1]
    lse = z.logsumexp(dim=-1, keepdim=True)
    index = labels.long().unsqueeze(1).clamp(0, n_cols - 1)
    share = z.new_full((1, 1), 1.0 - options.label_smoothing)
    if weight is not None:
        share = share * weight.to(z.dtype)[index]
    loss = share * (lse - z.gather(1, index)) + options.z_loss * lse.square()
    softmax_share = share + 2.0 * options.z_loss * lse
    smooth = 0.0
    if options.label_smoothing:
        smooth = options.label_smoothing / n_cols * (torch.ones_like(z[:1]) if weight is None else weight.to(z.dtype))
        loss = loss + (smooth * (lse - z)).sum(dim=-1, keepdim=True)
        softmax_share = softmax_share + smooth.sum()
    if lse_out is not None:
        top = z.amax(dim=-1, keepdim=True)
        lse_out.copy_(torch.cat([top, (z - top).logsumexp(dim=-1, keepdim=True)], dim=1))
    if gradient is not None:
        dz = softmax_share * z.softmax(dim=-1) - smooth
        dz.scatter_add_(1, index, -share.expand_as(index))
        dz *= slope * (scale.unsqueeze(1) if scale.dim() else scale)
        gradient.copy_(_masked(dz, labels, n_cols, options))
    return _masked(loss, labels, n_cols, options).squeeze(1)


def _masked(values: torch.Tensor, labels: torch.Tensor, n_classes: int, options: LossOptions) -> torch.Tensor:
    """Set the rows of values (N, ...) to NaN where the label is no class, to 0 where it is ignored; in place."""
    labels = labels.unsqueeze(1)
    values.masked_fill_((labels < 0) | (labels >= n_classes), torch.nan)
    return values.masked_fill_(labels == options.ignore_index, 0.0)


def _grouped_pass_torch(
    rest: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    lse: torch.Tensor | None,
    lead: torch.Tensor,
) -> torch.Tensor:
    whole = torch.cat([*lead, rest], dim=1)
    losses = _row_pass_torch(whole, labels, options, weight, whole, scale, lse)
    widths = [lead.shape[2]] * len(lead) + [rest.shape[1]]
    for part, gradient in zip((*lead, rest), whole.split(widths, dim=1), strict=True):
        part.copy_(gradient)
    return losses


def _slab_pass_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: LossOptions,
    first_col: int,
    vocab_size: int,
    lse: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
) -> None:
    z, slope = capped_logits(logits, options)
    n_cols = z.shape[1]
    (top, log_sum), index = lse.split(1, dim=1), labels.long().unsqueeze(1)
    weight = z.new_ones(vocab_size) if weight is None else weight.to(z.dtype)
    share = (1.0 - options.label_smoothing) * weight[index.clamp(0, vocab_size - 1)]
    smooth = options.label_smoothing / vocab_size * weight
    softmax_share = share + 2.0 * options.z_loss * (top + log_sum) + smooth.sum()
    dz = softmax_share * torch.exp((z - top) - log_sum) - smooth[first_col : first_col + n_cols]
    index = index - first_col
    inside = (index >= 0) & (index < n_cols)
    dz.scatter_add_(1, index.clamp(0, n_cols - 1), torch.where(inside, -share, 0.0))
    dz *= slope * (scale.unsqueeze(1) if scale.dim() else scale)
    logits.copy_(_masked(dz, labels, vocab_size, options))
