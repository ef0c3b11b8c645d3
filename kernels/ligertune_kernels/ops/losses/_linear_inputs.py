"""What the ops on a linear layer's output do before they start: check shapes, agree on a dtype, take rows, schedule."""

from __future__ import annotations

import torch

from ligertune_kernels.autocast import autocast_dtype
from ligertune_kernels.launcher import chip_of, runs_triton
from ligertune_kernels.ops.losses._schedule import Schedule, free_bytes, schedule_of
from ligertune_kernels.ops.losses.labelled_rows import labelled_rows, take_rows

SLOT_ROWS_TORCH = 256  # the torch row pass makes several fp32 copies of a slot
MUCH_MEMORY = 1 << 28  # asking what is free takes the host some 30 µs


def check_shapes(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
) -> None:
    """Hidden (..., E), weight (V, E), labels (...), bias (V,), lora_a (R, E) and lora_b (V, R) belong together."""
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: "
            "expected weight (V, E) with hidden's last size E"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: labels are {tuple(labels.shape)}; expected {tuple(hidden.shape[:-1])} "
            "for this hidden (one label for each row)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    if (lora_a is None) != (lora_b is None):
        raise ValueError(f"{op}: a low-rank term is lora_a and lora_b; expected both or none")
    if lora_a is not None and (lora_a.shape[1], lora_b.shape) != (weight.shape[1], (weight.shape[0], lora_a.shape[0])):
        raise ValueError(
            f"{op}: lora_a is {tuple(lora_a.shape)} and lora_b {tuple(lora_b.shape)}; "
            f"expected (R, {weight.shape[1]}) and ({weight.shape[0]}, R)"
        )


def rows_to_take(
    hidden: torch.Tensor, labels: torch.Tensor, index: torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows (M, E), their labels (M,) on the same device, and which they are of all; None if they are all."""
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if index is None and labels.device.type == "cpu" and not torch.compiler.is_compiling():
        index = labelled_rows(labels, ignore_index=ignore_index)
    if index is None or len(index) == len(flat):
        return rows.contiguous(), flat.to(rows.device, non_blocking=True).contiguous(), None
    if index.device == flat.device:
        flat = flat[index].to(rows.device, non_blocking=True)
        index = index.to(rows.device, non_blocking=True)
    else:
        index = index.to(rows.device, non_blocking=True)
        flat = flat.to(rows.device, non_blocking=True)[index]
    return take_rows(rows, index), flat, index


def chosen_schedule(rows: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> Schedule:
    """`schedule_of` for these tensors. Free memory is asked for only where the schedule needs much of it."""
    needs_grad = torch.is_grad_enabled()
    sizes = (len(rows), weight.shape[1], weight.shape[0], rows.dtype)
    options = {
        "needs_dx": needs_grad and rows.requires_grad,
        "needs_dw": needs_grad and weight.requires_grad,
        "chunk_bytes": chunk_bytes,
        "slot_rows": slot_rows_of(rows),
        "wide_products": adds_to_wide_sums(rows.device),
    }
    schedule = schedule_of(*sizes, **options)
    if schedule.flushes and schedule.plan == "fast" and schedule.extra_bytes >= MUCH_MEMORY:
        return schedule_of(*sizes, **options, free_bytes=free_bytes(rows.device))
    return schedule


def adds_to_wide_sums(device: torch.device) -> bool:
    """Whether torch adds a product of bf16 to sums in fp32 without casting the factors before. CPUs may cast."""
    chip = chip_of(device)
    return chip is None or (chip.vendor != "amd" and not torch.compiler.is_compiling())


def same_dtype(op: str, hidden: torch.Tensor, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All as autocast casts them; else they have one dtype already."""
    dtype = autocast_dtype(hidden.device)
    if dtype is not None:
        return [None if t is None else t.to(dtype) for t in (hidden, *parameters)]
    for t in parameters:
        if t is not None and t.dtype != hidden.dtype:
            raise ValueError(f"{op}: hidden is {hidden.dtype} and a parameter {t.dtype}: expected the same")
    return [hidden, *parameters]


def slot_rows_of(rows: torch.Tensor) -> int | None:
    """How many rows go through the products at a time; None: as many as suit the kernels."""
    return None if runs_triton(rows) else SLOT_ROWS_TORCH
