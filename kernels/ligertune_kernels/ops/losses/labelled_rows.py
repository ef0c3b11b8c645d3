"""Rows that have a label; the losses of a linear layer compute only these.

Their number M is a size of the matrix products, which the host has to know when it launches them.

    labelled_rows    finds the rows on the host, while a batch is made
    PendingRows      finds them on the device of the labels, and copies M to the host; `wait` waits for this copy alone

On a GPU one program finds the rows in two sweeps over the labels: it counts them, then it writes each row that is taken
to its place, the number of taken rows before it. So the order is that of the rows, and the same in every run. The
products cost 6 M E V operations instead of 6 N E V. The wait leaves the GPU idle for the time that the host takes to
launch the next kernel, some ten microseconds, if the labels are the last that it had to compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ligertune_kernels.autograd import no_double_backward
from ligertune_kernels.chips import launch_options
from ligertune_kernels.launcher import chip_of, on_device, runs_triton, tl, triton
from ligertune_kernels.ops.losses.tiles import MIN_PRODUCTS, MULTIPLE_OF, SEARCH_BLOCK


def labelled_rows(
    labels: torch.Tensor,  # (..., T), on the CPU
    *,
    ignore_index: int = -100,
    shift: int | Sequence[int] = 0,
    multiple_of: int = MULTIPLE_OF,
) -> torch.Tensor:  # (M,)
    """Return the rows, as indices into the flattened labels, that linear_cross_entropy has to compute.

    shift: labels are those of the tokens themselves, as in a batch, and row t predicts label t + shift of its sequence.
    With several shifts, one for each head, a row is returned if it predicts any label. Rows without a label fill M up
    to a multiple where there are enough rows. Raises ValueError if the labels are not on the CPU.
    """
    if labels.device.type != "cpu":
        raise ValueError(f"labelled_rows: labels are on {labels.device}; expected the CPU, or the host would wait")
    trained = labels != ignore_index
    shifts = (shift,) if isinstance(shift, int) else tuple(shift)
    ahead = [torch.nn.functional.pad(trained[..., s:], (0, min(s, labels.shape[-1]))) for s in shifts]
    has_label = torch.stack(ahead).any(0).reshape(-1)
    rows = has_label.nonzero().squeeze(1)
    missing = -len(rows) % multiple_of
    if missing and len(rows):
        rows = torch.cat([rows, (~has_label).nonzero().squeeze(1)[:missing]]).sort().values
    return rows


def find_rows_reference(
    labels: torch.Tensor,  # (..., T)
    *,
    ignore_index: int = -100,
    shift: int = 0,
    multiple_of: int = MULTIPLE_OF,
) -> tuple[torch.Tensor, torch.Tensor]:  # (N,) int64, (1,) int64
    """Return memory that begins with `labelled_rows`, and their number, in plain torch on the labels' device."""
    trained = (labels != ignore_index)[..., shift:]
    has_label = torch.nn.functional.pad(trained, (0, min(shift, labels.shape[-1]))).reshape(-1)
    rows = torch.arange(len(has_label), device=labels.device)
    n_labelled = has_label.sum()
    missing = (-n_labelled % multiple_of).minimum(len(rows) - n_labelled)
    before = has_label.cumsum(0) - has_label.long()  # rows with a label before each row
    taken = has_label | (rows - before < missing)
    places = torch.where(taken, before + (rows - before).minimum(missing), len(rows))
    found = rows.new_zeros(len(rows) + 1).scatter_(0, places, rows)
    return found[:-1], (n_labelled + missing).view(1)


@triton.jit(do_not_specialize=["n_rows", "length", "shift", "ignore_index"])
def find_rows_kernel(
    labels_ptr, rows_ptr, count_ptr, n_rows, length, shift, ignore_index,
    MULTIPLE_OF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the rows that are taken, in order, and their number. One program."""
    offs = tl.arange(0, BLOCK)
    n_labelled = 0
    for start in range(0, n_rows, BLOCK):
        rows = start + offs
        inside = (rows < n_rows) & (rows % length + shift < length)
        labels = tl.load(labels_ptr + rows + shift, mask=inside, other=0)
        n_labelled += tl.sum((inside & (labels != ignore_index)).to(tl.int32), axis=0)
    missing = (MULTIPLE_OF - n_labelled % MULTIPLE_OF) % MULTIPLE_OF
    missing = tl.minimum(missing, n_rows - n_labelled)
    n_before = 0
    for start in range(0, n_rows, BLOCK):
        rows = start + offs
        inside = (rows < n_rows) & (rows % length + shift < length)
        labels = tl.load(labels_ptr + rows + shift, mask=inside, other=0)
        has_label = inside & (labels != ignore_index)
        ones = has_label.to(tl.int32)
        before = n_before + tl.cumsum(ones, axis=0) - ones  # rows with a label before each row
        filling = ~has_label & (rows < n_rows) & (rows - before < missing)
        places = before + tl.minimum(rows - before, missing)
        tl.store(rows_ptr + places, rows.to(tl.int64), mask=has_label | filling)
        n_before += tl.sum(ones, axis=0)
    tl.store(count_ptr, (n_labelled + missing).to(tl.int64))


def find_rows(
    labels: torch.Tensor,  # (..., T)
    *,
    ignore_index: int = -100,
    shift: int = 0,
    multiple_of: int = MULTIPLE_OF,
) -> tuple[torch.Tensor, torch.Tensor]:  # (N,) int64, (1,) int64
    """Return memory that begins with `labelled_rows`, and their number, on the labels' device. Deterministic."""
    if labels.numel() == 0 or not runs_triton(labels):
        return find_rows_reference(labels, ignore_index=ignore_index, shift=shift, multiple_of=multiple_of)
    labels = labels.contiguous()
    rows, count = (labels.new_empty(size, dtype=torch.int64) for size in (labels.numel(), 1))
    with on_device(labels):
        find_rows_kernel[(1,)](
            labels, rows, count, len(rows), labels.shape[-1], shift, ignore_index,
            MULTIPLE_OF=multiple_of, BLOCK=SEARCH_BLOCK, **launch_options(SEARCH_BLOCK, chip_of(labels.device)),
        )  # fmt: skip
    return rows, count


class PendingRows:
    """`labelled_rows` of labels on any device, found there. `wait` waits for their number alone."""

    def __init__(
        self,
        labels: torch.Tensor,  # (..., T)
        *,
        ignore_index: int = -100,
        shift: int = 0,
        multiple_of: int = MULTIPLE_OF,
    ) -> None:
        """Launch the search; the host does not wait. The arguments are those of `labelled_rows`, with one shift."""
        options = {"ignore_index": ignore_index, "shift": shift, "multiple_of": multiple_of}
        self._rows, self._count = find_rows(labels.detach(), **options)
        self._arrived = None
        if labels.is_cuda:
            host = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._count = host.copy_(self._count, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(labels.device))

    def wait(self) -> torch.Tensor:  # (M,) int64
        """Return the rows, on the labels' device, as soon as the GPU has found them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._rows[: int(self._count)]


def can_skip_rows(labels: torch.Tensor, n_products: int) -> bool:
    """Return whether to look for rows with a label: on a CPU always, on a GPU where it pays and is possible.

    n_products: rows times vocabulary times hidden size. torch.compile and a CUDA graph need sizes that do not depend on
    values.
    """
    if torch.compiler.is_compiling() or labels.device.type not in ("cpu", "cuda"):
        return False
    if labels.device.type == "cpu":
        return True
    return n_products >= MIN_PRODUCTS and not torch.cuda.is_current_stream_capturing()


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, rows):
        ctx.save_for_backward(rows)
        ctx.shape = t.shape
        return t.index_select(0, rows)

    @staticmethod
    @no_double_backward
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None


def take_rows(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return t[rows] of distinct rows. The backward copies the gradient, where indexing would accumulate it."""
    return _TakeRows.apply(t, rows)


def scatter_rows(values: torch.Tensor, rows: torch.Tensor, n: int) -> torch.Tensor:
    """Return values (M, ...) at their rows of (n, ...), with zeros elsewhere."""
    return values.new_zeros(n, *values.shape[1:]).index_copy(0, rows, values)


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
