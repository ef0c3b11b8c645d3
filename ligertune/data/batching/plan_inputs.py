"""Plan inputs from prepared data: the rows of an epoch, and the totals that the plan and the report show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ligertune.data.batching.packing import pack
from ligertune.data.prepare import PreparedData
from ligertune.planning.batch_layout import Rows
from ligertune.planning.options import BatchLayoutOptions
from ligertune.planning.plan import DataSummary

if TYPE_CHECKING:
    from ligertune.vision.reader import ImageReader


def epoch_rows(layout: BatchLayoutOptions, data: PreparedData, *, multiple_of: int, padding_free: bool) -> Rows:
    """Return the rows of an epoch. multiple_of: what the attention requires of a batch's length."""
    kind, max_length = layout.kind, layout.max_length
    if data.streamed:  # the examples are not counted, and cannot be grouped by length
        kind, count, fill = "packed" if kind == "packed" else "shuffled", 0, None
    elif kind == "packed":
        packs = pack(data.train.lengths, max_length)
        count, fill = len(packs), packs.fill
    else:
        count, fill = len(data.train), None
    return Rows(
        kind=kind,
        count=count,
        length=max_length,
        multiple_of=layout.length_multiple(multiple_of),
        fill=fill,
        streamed=data.streamed,
        padding_free=padding_free,
    )


def summarize_data(data: PreparedData, images: ImageReader | None = None) -> DataSummary:
    """Return the totals of prepared data. `images`: the image reader of a vision-language model."""
    report, counted = data.report, None if data.streamed else data.train
    longest = (
        data.train.stream.max_length
        if data.streamed
        else int(max(part.lengths.max() for part in (counted, data.eval) if part))
    )
    return DataSummary(
        examples=len(counted or ()),
        eval_examples=len(data.eval or ()),
        tokens=int(counted.lengths.sum()) if counted else 0,
        trained_tokens=int(counted.trained.sum()) if counted else 0,
        longest=longest,
        dropped=dict(report.dropped),
        truncated=report.truncated,
        template=data.template,
        fingerprint=data.train.fingerprint,
        image_share=images.largest_share(counted) if images is not None and counted else 0.0,
    )
