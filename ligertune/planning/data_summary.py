"""What the plan says of prepared data: what a batch counts, and what the data sets came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ligertune.planning.plan import DataNumbers, Rows
from ligertune.recipe import Recipe

if TYPE_CHECKING:
    from ligertune.data.prepare import PreparedData
    from ligertune.vision.reader import ImageReader

COMPILED_LENGTHS = 8  # each is a graph to compile


def rows_of(recipe: Recipe, data: PreparedData, *, multiple_of: int, padding_free: bool = False) -> Rows:
    """What a batch of this run counts, and how it is laid out."""
    from ligertune.data.batching.packing import pack

    length, packs = recipe.data.max_length, None
    if data.streamed:
        kind = "packed" if recipe.data.packing else "shuffled"
        return Rows(
            kind,
            count=0,
            length=length,
            multiple_of=multiple_of,
            fill=None,
            streamed=True,
            padding_free=padding_free,
        )
    if recipe.data.packing:
        packs = pack(data.train.lengths, length)
    grouped = "grouped" if recipe.train.group_by_length else "shuffled"
    return Rows(
        kind=grouped if packs is None else "packed",
        count=len(data.train if packs is None else packs),
        length=length,
        multiple_of=multiple_of,
        fill=None if packs is None else packs.fill,
        padding_free=padding_free,
    )


def lengths_multiple_of(recipe: Recipe, multiple_of: int) -> int:
    """Of what a batch's tokens are a multiple. multiple_of: what its attention asks for.

    Compiled layers get packed rows of one length (`train.batcher` sees to the rest), and eight lengths of others at
    most: each is a graph to compile, and one for all takes many minutes to make on a GPU (torch 2.11). So do CUDA
    graphs, which are for one shape each.
    """
    if not recipe.train.few_shapes:
        return multiple_of
    step = recipe.data.max_length if recipe.data.packing else -(-recipe.data.max_length // COMPILED_LENGTHS)
    return -(-step // multiple_of) * multiple_of


def data_numbers(data: PreparedData, images: ImageReader | None = None) -> DataNumbers:
    """The plan's share of what the data report says. images: how the model sees, where it does."""
    report, counted = data.report, None if data.streamed else data.train
    return DataNumbers(
        examples=len(counted or ()),
        eval_examples=len(data.eval or ()),
        tokens=int(counted.lengths.sum()) if counted else 0,
        trained_tokens=int(counted.trained.sum()) if counted else 0,
        longest=data.train.stream.max_length
        if data.streamed
        else int(max(part.lengths.max() for part in (counted, data.eval) if part)),
        dropped=dict(report.dropped),
        truncated=report.truncated,
        template=data.template,
        fingerprint=data.train.fingerprint,
        image_share=images.largest_share(counted) if images is not None and counted else 0.0,
    )
