"""Asynchronous copies from a GPU to the host: of values, and of the number of rows that have a label.

The loss computes only the rows that have a label. Their number is a size of the matrix products, which the host has to
know when it launches them. Asking at the loss would make it wait for the whole forward. So the GPU finds the rows when
the forward begins: at the loss their number has arrived as soon as the GPU has begun this forward, and the GPU still
has the forward to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from ligertune_kernels.ops.losses.labelled_rows import PendingRows
from ligertune_kernels.ops.losses.tiles import MIN_PRODUCTS
from torch import Tensor, nn

DEVICES = ("cuda",)  # labels on a CPU are looked at by `linear_cross_entropy` itself


class HostCopy:
    """An asynchronous copy of device values to the host, without the synchronisation of `.item()`.

    A synchronisation in each step leaves a GPU idle until the host has launched the first kernels of the next step.
    `read` waits for the values as they were when the copy was made, not for work launched later.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._host = values.detach().clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
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


class RowSearch:
    """The rows that have a label, found while the forward runs."""

    def __init__(self, labels: Tensor, *, ignore_index: int, shift: int) -> None:
        """Launch the search in labels (..., T). The options are those of `labelled_rows`."""
        self._labels = labels
        self._version = labels._version
        self._options = {"ignore_index": ignore_index, "shift": shift}
        self._pending = PendingRows(labels, **self._options)

    def rows(self, labels: Tensor | None, **options: int) -> Tensor | None:
        """Return `labelled_rows` of `labels`, on their device; None if these or the options are other ones.

        None also if the labels were written to since. It waits for the search, not for the forward.
        """
        if labels is not self._labels or labels._version != self._version or options != self._options:
            return None
        return self._pending.wait()


def search_rows(
    head: nn.Module, labels: Any, shift_labels: Any, known_rows: Any, ignore_index: int = -100
) -> RowSearch | None:
    """Begin to look for the rows with a label on a GPU, if skipping the others can pay; None otherwise.

    labels: those of the tokens; shift_labels: those of the next tokens, or None; known_rows: the index of rows with a
    label that the batch holds already, or None.
    """
    labels, shift = (labels, 1) if shift_labels is None else (shift_labels, 0)
    if torch.compiler.is_compiling() or known_rows is not None or type(labels) is not Tensor:
        return None
    if labels.device.type not in DEVICES or labels.is_inference():  # the latter have no version to compare
        return None
    if labels.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    size = getattr(head, "in_features", 0) * getattr(head, "out_features", 0)
    return RowSearch(labels, ignore_index=ignore_index, shift=shift) if labels.numel() * size >= MIN_PRODUCTS else None
