"""Batch layout: packed, padding-free or padded rows, what a row and an epoch consist of, and totals of the data."""

from __future__ import annotations

from dataclasses import dataclass

from ligertune.errors import UserError
from ligertune.planning.micro_batch import Batching, choose_batching
from ligertune.planning.options import BatchLayoutOptions, RowKind
from ligertune.recipe import Recipe, TrainSpec


@dataclass(frozen=True)
class Rows:
    """Rows of an epoch: packs of examples, or single examples that are shuffled or grouped by length."""

    kind: RowKind
    count: int  # rows per epoch; 0 if streamed
    length: int  # token slots of a pack, and the longest allowed example: of a pair, both sequences
    multiple_of: int  # the tokens of a batch are padded to a multiple
    fill: float | None  # real tokens / slots over all packs
    streamed: bool = False
    documents: int = 1  # sequences of an example: 2 for preference pairs
    padding_free: bool = False  # the examples of a micro-batch are flattened into one row

    @property
    def packed(self) -> bool:
        return self.kind == "packed"

    @property
    def is_padding_free(self) -> bool:
        """Whether a micro-batch is one row of several documents, (1, T), and not a padded (B, T)."""
        return self.packed or self.padding_free

    @property
    def example_noun(self) -> str:
        """What reports call an example."""
        return "pair" if self.documents == 2 else "example"

    def longest_row(self, longest_document: int) -> int:
        """Return the token slots of the longest row: a pack, or the rows of an example."""
        longest = self.length if self.packed else min(self.length // self.documents, longest_document)
        return -(-longest // self.multiple_of) * self.multiple_of * (1 if self.packed else self.documents)


@dataclass(frozen=True)
class DataSummary:
    """Totals of the prepared data sets."""

    examples: int
    eval_examples: int
    tokens: int
    trained_tokens: int
    longest: int
    dropped: dict[str, int]
    truncated: int
    template: str
    fingerprint: str
    eval_tokens: int = 0
    image_share: float = 0.0  # share of image tokens in the example that has the largest


@dataclass(frozen=True)
class ModalityFacts:
    """What planning knows of the files that a model reads besides text. The defaults are those of a text model."""

    inputs: str = ""  # plural noun for messages, such as images
    model_kind: str = "language model"  # for messages
    family: str | None = None  # None: the model reads text only
    packs_exactly: bool = True  # packed rows compute exactly what single rows do

    @property
    def reads_text_only(self) -> bool:
        return self.family is None


@dataclass(frozen=True)
class StatisticsOptions:
    """What the statistics of a data set depend on."""

    layout: BatchLayoutOptions
    train: TrainSpec
    batching: Batching

    @staticmethod
    def of(recipe: Recipe, *, processes: int) -> StatisticsOptions:
        """Return those of a recipe. An `auto` micro-batch counts as the whole batch, since no model is built."""
        batching = choose_batching(recipe, processes, lambda micro, accumulates: True)
        return StatisticsOptions(BatchLayoutOptions.of(recipe), recipe.train, batching)


def resolve_packing(recipe: Recipe, modality: ModalityFacts) -> tuple[Recipe, tuple[str, ...]]:
    """Switch packing off for a model that packed rows would change, and return a note that says so.

    Packing is on by default; a recipe that sets it for such a model raises UserError.
    """
    if modality.packs_exactly or not recipe.data.packing:
        return recipe, ()
    if "packing" in recipe.data.model_fields_set:
        raise UserError(
            f"data.packing: in {modality.family} the documents of a packed row would attend to each other's "
            f"{modality.inputs}.",
            hint="Write data.packing: false, or leave it out.",
        )
    data = recipe.data.model_copy(update={"packing": False})
    return recipe.model_copy(update={"data": data}), (f"packing is off: it is not exact for {modality.family}",)


def padding_free_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return a note if `data.padding_free` has no effect because rows are packed."""
    if recipe.data.packing and recipe.data.padding_free is True:
        return ("data.padding_free has no effect here: packed rows (data.packing) have no padding",)
    return ()
