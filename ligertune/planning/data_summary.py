"""What the plan says of prepared data: what a batch counts, and what the data sets came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ligertune.errors import UserError
from ligertune.planning.micro_batch import Batching, choose_batching
from ligertune.planning.plan import DataNumbers, Rows
from ligertune.recipe import Recipe

if TYPE_CHECKING:
    from ligertune.data.prepare import PreparedData
    from ligertune.vision.reader import ImageReader

COMPILED_LENGTHS = 8  # each is a graph to compile


def resolve_packing(recipe: Recipe, *, family: str | None, packs_exactly: bool) -> tuple[Recipe, tuple[str, ...]]:
    """Switch packing off for a model that packed rows would change, and return a note that says so.

    `family` names the vision-language family, if the model is of one. Packing is on by default; a recipe that sets it
    for such a model raises UserError.
    """
    if packs_exactly or not recipe.data.packing:
        return recipe, ()
    if "packing" in recipe.data.model_fields_set:
        raise UserError(
            f"data.packing: documents of a row would see each other's images in {family}.",
            hint="Write data.packing: false, or leave it out.",
        )
    data = recipe.data.model_copy(update={"packing": False})
    return recipe.model_copy(update={"data": data}), (f"packing is off: it is not exact for {family}",)


def without_padding_free(recipe: Recipe) -> Recipe:
    """Return the recipe with padded batches."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"padding_free": False})})


def padding_free_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return a note if `data.padding_free` has no effect because rows are packed."""
    if recipe.data.packing and recipe.data.padding_free is True:
        return ("data.padding_free says nothing here: packed rows (data.packing) have no padding",)
    return ()


@dataclass(frozen=True)
class StatisticsOptions:
    """What the statistics of a data set need to know of the run."""

    kind: Literal["packed", "grouped", "shuffled"]
    padding_free: bool
    max_length: int
    num_train_epochs: float | None
    max_steps: int | None
    seed: int
    batching: Batching

    @staticmethod
    def of(recipe: Recipe, *, processes: int) -> StatisticsOptions:
        """Copy the values out of a recipe. An `auto` micro-batch counts as the whole batch, since no model is built."""
        data, train = recipe.data, recipe.train
        return StatisticsOptions(
            kind="packed" if data.packing else "grouped" if train.group_by_length else "shuffled",
            padding_free=data.padding_free is True,
            max_length=data.max_length,
            num_train_epochs=train.num_train_epochs,
            max_steps=train.max_steps,
            seed=train.seed,
            batching=choose_batching(recipe, processes, lambda micro, accumulates: True),
        )


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
