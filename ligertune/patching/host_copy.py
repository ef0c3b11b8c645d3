"""Asynchronous copies from a GPU to the host: of values, and of labels for the loss.

The loss computes only the rows that have a label. Their number is a size of the matrix products, which the host has to
know when it launches them. Asking at the loss would make it wait for the whole forward. So the copy is queued when the
forward begins: at the loss it has arrived as soon as the GPU has begun this forward, and the GPU still has the forward
to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from ligertune_kernels import labelled_rows
from torch import Tensor, nn

DEVICES = ("cuda",)  # labels on a CPU are looked at by `linear_cross_entropy` itself
# Below this product of rows, vocabulary and hidden size the loss takes less than about 1 ms on an H100.
MIN_PRODUCTS = 1 << 36


class HostCopy:
    """An asynchronous copy of device values to the host, without the synchronisation of `.item()`.

    A synchronisation in each step leaves a GPU idle until the host has launched the first kernels of the next step.
    `read` waits for the values as they were when the copy was made, not for work launched later.
    """

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.device.type != "cuda":
            self._host = values.detach().clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Return whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Return the values on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class LabelCopy:
    """Labels (..., T) on the host, once they have arrived."""

    def __init__(self, labels: Tensor) -> None:
        self._labels, self._version, self._copy = labels, labels._version, HostCopy(labels)

    def rows(self, labels: Tensor | None, *, ignore_index: int, shift: int) -> Tensor | None:
        """Return `labelled_rows` of `labels`; None if these are other ones, or were written to since.

        It waits for the copy, not for the forward.
        """
        if labels is not self._labels or labels._version != self._version:
            return None
        rows = labelled_rows(self._copy.read(), ignore_index=ignore_index, shift=shift)
        # From pageable memory the copy to the device would wait.
        return rows.pin_memory() if labels.device.type == "cuda" else rows


def copy_labels(head: nn.Module, labels: Any, known_rows: Any) -> LabelCopy | None:
    """Begin to copy labels on a GPU, if skipping rows can pay; None otherwise.

    known_rows: the index of rows with a label that the batch holds already, or None.
    """
    if torch.compiler.is_compiling() or known_rows is not None or type(labels) is not Tensor:
        return None
    if labels.device.type not in DEVICES or labels.is_inference():
        return None
    if labels.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    size = getattr(head, "in_features", 0) * getattr(head, "out_features", 0)
    return LabelCopy(labels) if labels.numel() * size >= MIN_PRODUCTS else None
