"""Inputs of the losses of a linear layer: the layer, checks of shapes and dtypes, rows to compute, schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ligertune_kernels.autocast import autocast_dtype
from ligertune_kernels.launcher import chip_of, runs_triton
from ligertune_kernels.ops.losses._schedule import Schedule, free_bytes, schedule_of
from ligertune_kernels.ops.losses.labelled_rows import PendingRows, can_skip_rows, take_rows

SLOT_ROWS_TORCH = 256  # the torch row pass makes several fp32 copies of a slot
MIN_QUERY_BYTES = 1 << 28  # querying free memory takes 30 µs on the host


@dataclass(frozen=True)
class Head:
    """A linear layer: x Wᵀ + b + s (x Aᵀ) Bᵀ, with an optional bias and low-rank (LoRA) term."""

    weight: torch.Tensor  # (V, E)
    bias: torch.Tensor | None = None  # (V,)
    lora_a: torch.Tensor | None = None  # (R, E)
    lora_b: torch.Tensor | None = None  # (V, R)
    lora_scale: float = 1.0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.bias, self.lora_a, self.lora_b

    def columns(self, first: int, last: int) -> Head:
        """Return the layer of the outputs in [first, last)."""
        if (first, last) == (0, len(self.weight)):
            return self
        bias, lora_b = (None if t is None else t[first:last] for t in (self.bias, self.lora_b))
        return Head(self.weight[first:last], bias, self.lora_a, lora_b, self.lora_scale)

    def low_rank(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return s X Aᵀ (N, R) of rows (N, E)."""
        return None if self.lora_a is None else self.lora_scale * torch.mm(rows, self.lora_a.t())

    def write_logits(self, rows: torch.Tensor, low_rank: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the logits (N, V) of rows (N, E) and their `low_rank` into out."""
        # The low-rank product comes first: the large one then adds to it without another pass over the logits.
        a, b = (rows, self.weight) if low_rank is None else (low_rank, self.lora_b)
        if self.bias is None:
            torch.mm(a, b.t(), out=out)
        else:
            torch.addmm(self.bias, a, b.t(), out=out)
        if low_rank is not None:
            torch.addmm(out, rows, self.weight.t(), out=out)

    def reference_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of hidden (..., E), differentiable."""
        logits = F.linear(hidden, self.weight, self.bias)
        if self.lora_a is None:
            return logits
        return logits + self.lora_scale * F.linear(F.linear(hidden, self.lora_a), self.lora_b)


def check_linear(
    op: str,
    hidden: torch.Tensor,  # (..., E)
    head: Head,
    labels: torch.Tensor | None,  # (...)
    model: str = "",
) -> tuple[torch.Tensor, Head]:
    """Return hidden and head in one dtype: that of autocast, or the one they share.

    Raises ValueError if shapes or dtypes do not fit. model is a prefix of the names in messages: "student_".
    """
    weight, bias, lora_a, lora_b = head.tensors
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: {model}hidden is {tuple(hidden.shape)} and {model}weight {tuple(weight.shape)}: "
            "expected weight (V, E) with hidden's last size E"
        )
    if labels is not None and labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: labels are {tuple(labels.shape)}; expected {tuple(hidden.shape[:-1])} "
            "for this hidden (one label for each row)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: {model}bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    if (lora_a is None) != (lora_b is None):
        raise ValueError(f"{op}: a low-rank term is lora_a and lora_b; expected both or none")
    if lora_a is not None and (lora_a.shape[1], lora_b.shape) != (weight.shape[1], (weight.shape[0], lora_a.shape[0])):
        raise ValueError(
            f"{op}: lora_a is {tuple(lora_a.shape)} and lora_b {tuple(lora_b.shape)}; "
            f"expected (R, {weight.shape[1]}) and ({weight.shape[0]}, R)"
        )
    dtype = autocast_dtype(hidden.device)
    if dtype is not None:
        return hidden.to(dtype), Head(*(None if t is None else t.to(dtype) for t in head.tensors), head.lora_scale)
    for t in head.tensors:
        if t is not None and t.dtype != hidden.dtype:
            raise ValueError(f"{op}: {model}hidden is {hidden.dtype} and a parameter {t.dtype}: expected the same")
    return hidden, head


def rows_to_take(
    hidden: torch.Tensor,  # (..., E)
    labels: torch.Tensor,  # (...)
    index: torch.Tensor | None,  # (M,)
    ignore_index: int,
    *,
    skip_ignored: bool = True,
    vocab_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rows (M, E), their labels (M,) on the same device, and their index among all rows; None if all.

    Without an index, rows without a label are looked for as `can_skip_rows` says, unless skip_ignored is False.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = labels.reshape(-1)
    if index is None and skip_ignored and can_skip_rows(flat, rows.numel() * vocab_size):
        index = PendingRows(flat, ignore_index=ignore_index).wait()
    if index is None or len(index) == len(flat):
        return rows.contiguous(), flat.to(rows.device, non_blocking=True).contiguous(), None
    if index.device == flat.device:
        flat = flat[index].to(rows.device, non_blocking=True)
        index = index.to(rows.device, non_blocking=True)
    else:
        index = index.to(rows.device, non_blocking=True)
        flat = flat.to(rows.device, non_blocking=True)[index]
    return take_rows(rows, index), flat, index


def empty_loss(rows: torch.Tensor, head: Head) -> torch.Tensor:
    """Return 0, in at least fp32, with zero gradients for rows and parameters."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return sum(t[:0].sum(dtype=wide) for t in (rows, *head.tensors) if t is not None)


def choose_schedule(
    rows: torch.Tensor,  # (N, E)
    weight: torch.Tensor,  # (V, E)
    chunk_bytes: int,
    needs: tuple[bool, bool] | None = None,
) -> Schedule:
    """Return `schedule_of` these tensors. Free memory is queried only if the schedule needs much of it.

    needs: whether rows and weight need a gradient; None: as autograd says.
    """
    chip = chip_of(rows.device)
    needs_dx, needs_dw = needs or (torch.is_grad_enabled() and t.requires_grad for t in (rows, weight))
    sizes = (len(rows), weight.shape[1], weight.shape[0], rows.dtype)
    options = {
        "needs_dx": needs_dx,
        "needs_dw": needs_dw,
        "chunk_bytes": chunk_bytes,
        "slot_rows": max_slot_rows(rows),
        # torch adds a product of bf16 to fp32 without casting the factors before. On CPUs a cast costs little.
        "wide_products": chip is None or (chip.vendor != "amd" and not torch.compiler.is_compiling()),
    }
    schedule = schedule_of(*sizes, **options)
    if schedule.flushes and schedule.plan == "fast" and schedule.extra_bytes >= MIN_QUERY_BYTES:
        return schedule_of(*sizes, **options, free_bytes=free_bytes(rows.device))
    return schedule


def max_slot_rows(rows: torch.Tensor) -> int | None:
    """Return the most rows per matrix product; None: the default of the kernels."""
    return None if runs_triton(rows) else SLOT_ROWS_TORCH
