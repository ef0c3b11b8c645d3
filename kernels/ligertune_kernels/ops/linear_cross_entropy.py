r"""Cross entropy of a linear layer's output, hidden X (N, E) and weight W (V, E), without ever holding logits (N, V).

    Z = X Wᵀ + b        loss_i and G = dloss/dZ as in row_pass.py        dX = G W        dW = Gᵀ X        db = sum_i G_i

The rows are taken in chunks. Of each chunk the logits are multiplied into one reused buffer (cuBLAS), one pass over
its rows turns them into G in place and yields the losses, and G is multiplied into dX. dW is added up only when the
buffer is full ("a flush"). So the gradients exist when the forward returns: 6 NEV operations, nothing is recomputed,
and a gradient nobody needs costs nothing (frozen weight: 4 NEV).

Chunks. A product of 1024 to 2048 rows runs at cuBLAS's best (780 TFLOP/s on an H100, 620 at 256 rows), so that many
go through together; the buffer holds several such slots, as many as chunk_bytes allow, because each further flush
reads and writes all of dW.

Rounding of dW. Two flushes in bf16 are as good as one product (error 2.1e-3 against 1.95e-3; 32 flushes 6.2e-3). More
than two are summed in fp32 and rounded once, which holds dW in fp32 for the while: a larger chunk_bytes avoids it.

Scale. The mean's 1/n is a scalar on the device and multiplies G in the pass, in fp32; nothing waits for the host. In
float16, p/n would vanish below 6e-8 and dW, undivided, could pass 65504. There the pass leaves 1/n out (and multiplies
by 256), dW is summed in fp32, and the backward applies upstream/(256 n) in fp32 at the end, where GradScaler's 65536
is already part of upstream. In the other dtypes the backward multiplies by upstream if that is not 1.

reduction="none" has one upstream value a row, which dW cannot be scaled by afterwards: its forward computes losses
only and its backward makes the chunks again with these values (8 NEV).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ligertune_kernels.launch import chip_of, runs_triton
from ligertune_kernels.ops.cross_entropy import SPENT, Reduction, check_reduction, cross_entropy_reference
from ligertune_kernels.ops.row_pass import Terms, row_pass, scaled, scales

CHUNK_BYTES = 1 << 30  # 4096 rows of a 128k vocabulary in bf16: 8192 tokens in two flushes
SLOT_ROWS = 2048
SLOT_ROWS_WITHOUT_DW = 1024
SLOT_ROWS_TORCH = 256  # the torch row pass makes several fp32 copies of a slot
ROW_MULTIPLE = 128  # of the height of cuBLAS's tiles


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, with all logits, differentiated by autograd."""
    logits = nn.functional.linear(hidden, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = cross_entropy_reference(
        logits.to(wide) * logit_scale, labels, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction if num_items_in_batch is None else "sum", softcap=softcap, z_loss=z_loss,
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    return loss / _denominator(labels, ignore_index, "mean", num_items_in_batch, wide)


@dataclass(frozen=True)
class Chunks:
    """How N rows are taken: `slot` rows through the products at a time, `buffer` rows between two flushes of dW."""

    slot: int
    buffer: int
    flushes: int


def chunks_of(n_rows: int, row_bytes: int, chunk_bytes: int, slot_rows: int, *, needs_dw: bool) -> Chunks:
    """Even parts that fit in chunk_bytes; one row is always taken, however long."""
    fitting = max(1, chunk_bytes // row_bytes)
    if fitting > ROW_MULTIPLE:
        fitting -= fitting % ROW_MULTIPLE
    if not needs_dw:
        slot = min(n_rows, fitting, slot_rows)
        return Chunks(slot, slot, 0)
    flushes = -(-n_rows // fitting)
    buffer = min(fitting, n_rows, _rounded_up(-(-n_rows // flushes)))
    slots = -(-buffer // slot_rows)
    return Chunks(min(buffer, _rounded_up(-(-buffer // slots))), buffer, -(-n_rows // buffer))


def _rounded_up(n_rows: int) -> int:
    return -(-n_rows // ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True)
class Gradients:
    """What the chunks gave; None where nobody asked."""

    losses: torch.Tensor  # (N,)
    d_hidden: torch.Tensor | None
    d_weight: torch.Tensor | None
    d_bias: torch.Tensor | None


def _run_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    terms: Terms,
    chunk_bytes: int,
    needs: tuple[bool, bool, bool] = (False, False, False),
    scale: torch.Tensor | None = None,
) -> Gradients:
    """Losses (N,) and the gradients of hidden (N, E), weight (V, E) and bias (V,) that are needed, times scale."""
    needs_dx, needs_dw, needs_db = needs
    (n_rows, _), vocab_size, dtype = hidden.shape, weight.shape[0], hidden.dtype
    chunks = chunks_of(
        n_rows, vocab_size * hidden.element_size(), chunk_bytes, _slot_rows(hidden, needs_dw), needs_dw=needs_dw
    )
    wide = torch.promote_types(dtype, torch.float32)
    buffer = hidden.new_empty((chunks.buffer, vocab_size))
    d_hidden = torch.empty_like(hidden) if needs_dx else None
    sums_wide = dtype is torch.float16 or (dtype is torch.bfloat16 and chunks.flushes > 2)
    d_weight = torch.empty(weight.shape, dtype=wide if sums_wide else dtype, device=weight.device) if needs_dw else None
    d_bias = torch.zeros(vocab_size, dtype=wide, device=weight.device) if needs_db else None
    losses = []
    for first in range(0, n_rows, chunks.buffer):
        last = min(first + chunks.buffer, n_rows)
        for start in range(first, last, chunks.slot):
            stop = min(start + chunks.slot, last)
            logits = buffer[start - first : stop - first]  # (slot, V); after the pass G
            _logits(hidden[start:stop], weight, bias, out=logits)
            gradient = logits if any(needs) else None
            slot_scale = scale[start:stop] if scale is not None and scale.dim() else scale
            losses.append(row_pass(logits, labels[start:stop], terms, gradient=gradient, scale=slot_scale))
            if needs_dx:
                torch.mm(logits, weight, out=d_hidden[start:stop])
            if needs_db:
                d_bias += logits.sum(0, dtype=wide)
        if needs_dw:
            _add_product(d_weight, buffer[: last - first].t(), hidden[first:last], beta=0 if first == 0 else 1)
    if needs_dw and dtype is not torch.float16:
        d_weight = d_weight.to(dtype)
    return Gradients(torch.cat(losses), d_hidden, d_weight, d_bias)


def _slot_rows(hidden: torch.Tensor, needs_dw: bool) -> int:
    if not runs_triton(hidden):
        return SLOT_ROWS_TORCH
    return SLOT_ROWS if needs_dw else SLOT_ROWS_WITHOUT_DW


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int) -> None:
    """total = beta · total + a b, with a total at least as wide as the factors."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
        return
    chip = chip_of(total.device)
    if chip is not None and chip.vendor == "nvidia" and total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over rows divided by `denominator`; gradients computed in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, denominator, terms, chunk_bytes):
        scale, ctx.afterwards = scales(denominator, hidden.dtype)
        needs = ctx.needs_input_grad[:3]
        done = _run_chunks(hidden, weight, labels, bias, terms, chunk_bytes, needs, scale)
        ctx.save_for_backward(done.d_hidden, done.d_weight, done.d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.spent = False
        return done.losses.sum() / denominator

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        if ctx.spent:
            raise RuntimeError(SPENT.format(op="linear_cross_entropy"))
        saved = ctx.saved_tensors
        ctx.spent = any(t is not None and runs_triton(t) for t in saved)
        factor = d_loss if ctx.afterwards is None else d_loss * ctx.afterwards
        gradients = (
            None if t is None else scaled(t, factor).to(dtype) for t, dtype in zip(saved, ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None, None


class _LinearCrossEntropyRows(torch.autograd.Function):
    """Every row's own loss; the backward makes the chunks again, scaled by the upstream gradient of each row."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, terms, chunk_bytes):
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.terms, ctx.chunk_bytes = terms, chunk_bytes
        return _run_chunks(hidden, weight, labels, bias, terms, chunk_bytes).losses

    @staticmethod
    @once_differentiable
    def backward(ctx, d_losses):
        hidden, weight, bias, labels = ctx.saved_tensors
        with _without_autocast(hidden.device):
            done = _run_chunks(
                hidden,
                weight,
                labels,
                bias,
                ctx.terms,
                ctx.chunk_bytes,
                ctx.needs_input_grad[:3],
                d_losses.contiguous(),
            )
        d_weight = None if done.d_weight is None else done.d_weight.to(weight.dtype)
        d_bias = None if done.d_bias is None else done.d_bias.to(bias.dtype)
        return done.d_hidden, d_weight, d_bias, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Cross entropy of hidden (..., E) times weight (V, E), plus bias (V,), against labels (...); in float32.

    Labels are aligned with hidden: already shifted. The logits are logit_scale times the product, then bounded by
    softcap, c·tanh(z/c); z_loss adds z_loss·lse² to each row. With num_items_in_batch, an int or a scalar tensor, the
    sum is divided by that instead of by the number of labels that are not ignored. Where all are ignored the loss is
    0 with zero gradients. A label that is neither a class nor ignore_index makes the loss and its gradients NaN.

    chunk_bytes bounds the buffer for logits. Under autocast hidden, weight and bias are cast to its dtype, as a
    linear layer's are. A second backward through the same "mean" or "sum" is refused where kernels run.
    """
    _check(hidden, weight, labels, bias, reduction, num_items_in_batch)
    if (dtype := _autocast_dtype(hidden.device)) is not None:
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not hidden.dtype == weight.dtype == (weight if bias is None else bias).dtype:
        raise ValueError(f"linear_cross_entropy: hidden is {hidden.dtype} and weight {weight.dtype}: expected the same")
    if hidden.numel() == 0:
        return linear_cross_entropy_reference(
            hidden, weight, labels, bias, reduction=reduction, num_items_in_batch=num_items_in_batch
        )
    terms = Terms(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]).contiguous(), labels.reshape(-1).contiguous()
    differentiable = (t for t in (hidden, weight, bias) if t is not None)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)
    with _without_autocast(hidden.device):
        if reduction == "none" and needs_grad:
            return _LinearCrossEntropyRows.apply(rows, weight, bias, flat, terms, chunk_bytes).view(labels.shape)
        if reduction == "none":
            return _run_chunks(rows, weight, flat, bias, terms, chunk_bytes).losses.view(labels.shape)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        denominator = _denominator(flat, ignore_index, reduction, num_items_in_batch, wide)
        if needs_grad:
            return _LinearCrossEntropy.apply(rows, weight, bias, flat, denominator, terms, chunk_bytes)
        return _run_chunks(rows, weight, flat, bias, terms, chunk_bytes).losses.sum() / denominator


def _denominator(
    labels: torch.Tensor,
    ignore_index: int,
    reduction: Reduction,
    num_items_in_batch: int | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the sum over rows is divided by, as a scalar on the device; never 0."""
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.detach().to(labels.device, dtype, non_blocking=True).reshape(()).clamp(min=1)
    if num_items_in_batch is not None or reduction == "sum":
        n = 1 if num_items_in_batch is None else max(1, num_items_in_batch)
        return torch.full((), n, dtype=dtype, device=labels.device)
    return (labels != ignore_index).sum().clamp(min=1).to(dtype)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast computes in on this device, None where it is off."""
    # a check of the type and not torch.amp.is_autocast_available, which torch.compile does not trace
    if device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    if _autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    num_items_in_batch: int | torch.Tensor | None,
) -> None:
    check_reduction("linear_cross_entropy", reduction)
    if reduction == "none" and num_items_in_batch is not None:
        raise ValueError("linear_cross_entropy: num_items_in_batch divides a sum; reduction='none' has none")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: "
            "expected weight (V, E) with hidden's last size E"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: labels are {tuple(labels.shape)}; expected {tuple(hidden.shape[:-1])} "
            "for this hidden (one label for each row)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its options fixed; the weight is the caller's, as it may be tied."""

    def __init__(
        self,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self.options = {
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "chunk_bytes": chunk_bytes,
        }

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias, num_items_in_batch=num_items_in_batch, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
