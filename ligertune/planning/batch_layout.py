"""Batches: sizes of micro-batch and accumulation; packed, padding-free or padded rows; totals of the data."""

from __future__ import annotations

from dataclasses import dataclass

from ligertune.errors import UserError
from ligertune.planning.memory.model_shape import ModalityFacts
from ligertune.planning.options import BatchLayoutOptions, DataOptions, RowKind
from ligertune.planning.time.open_settings import with_usual_values
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import MAX_ROWS_OF_A_STEP, TrainSpec


@dataclass(frozen=True)
class Batching:
    """Sizes of a step: global_batch_size = micro_batch_size * accumulation * row_ranks."""

    micro_batch_size: int
    accumulation: int
    world_size: int
    eval_batch_size: int
    cp_size: int = 1  # context-parallel ranks, which share each row

    @property
    def row_ranks(self) -> int:
        """Number of ranks that read different rows."""
        return self.world_size // self.cp_size

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.row_ranks


def choose_batching(recipe: Recipe, world_size: int) -> Batching:
    """Return the sizes of a step of a recipe without open settings.

    Raises UserError if they do not divide `global_batch_size`.
    """
    micro = _number(recipe.train.per_device_train_batch_size)
    wanted = recipe.train.global_batch_size
    row_ranks = world_size // recipe.parallel.cp_size
    accumulation = _number(recipe.train.gradient_accumulation_steps or 1)
    if wanted is not None:
        accumulation, rest = divmod(wanted, micro * row_ranks)
        if rest or accumulation == 0:
            raise UserError(
                f"train.global_batch_size: {wanted} is not a multiple of per_device_train_batch_size x processes "
                f"= {micro} x {row_ranks} = {micro * row_ranks}.",
                hint=f"Write a multiple of {micro * row_ranks}, or another train.per_device_train_batch_size.",
            )
    if micro * accumulation * row_ranks > MAX_ROWS_OF_A_STEP:
        raise UserError(
            "train.per_device_train_batch_size x gradient_accumulation_steps x processes = "
            f"{micro} x {accumulation} x {row_ranks} is {micro * accumulation * row_ranks:,} rows in a step, and the "
            f"most are {MAX_ROWS_OF_A_STEP:,}.",
            hint="Lower them, or write train.global_batch_size.",
        )
    eval_batch_size = recipe.eval.per_device_eval_batch_size
    return Batching(micro, accumulation, world_size, eval_batch_size, recipe.parallel.cp_size)


def _number(value: int | str) -> int:
    assert isinstance(value, int)  # `planning.time.open_settings` has replaced auto
    return value


def trial_batching(recipe: Recipe, world_size: int, micro_batch_size: int) -> Batching:
    """Return the sizes of a step with this micro-batch, which may not divide `global_batch_size`."""
    train = recipe.train
    row_ranks = max(1, world_size // recipe.parallel.cp_size)
    accumulation = _number(train.gradient_accumulation_steps or 1)
    if train.global_batch_size is not None:
        accumulation = max(1, train.global_batch_size // (micro_batch_size * row_ranks))
    return Batching(
        micro_batch_size, accumulation, world_size, recipe.eval.per_device_eval_batch_size, recipe.parallel.cp_size
    )


@dataclass(frozen=True)
class Rows:
    """Rows of an epoch: packs of examples, or single examples that are shuffled or grouped by length."""

    kind: RowKind
    count: int  # rows per epoch; 0 if streamed
    length: int  # token slots of a pack, and the longest allowed example: of a pair, both sequences
    multiple_of: int  # the tokens of a batch are padded to a multiple
    fill: float | None  # real tokens / slots over all packs
    streamed: bool = False
    documents: int = 1  # sequences of an example: 2 for pairs
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
class BatchShape:
    """Token slots of a micro-batch: padded (B, T), or flattened (1, sum T). Those of pairs have 2 rows each."""

    rows: int  # B
    row_length: int  # T
    labels: int | None = None  # None: by the share of labels in the data

    @property
    def tokens(self) -> int:
        return self.rows * self.row_length


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
    squared_lengths: int = 0  # sum of squared lengths of the documents
    most_trained: int = 0  # most labels of an example
    image_share: float = 0.0  # share of image tokens in the example that has the largest


@dataclass(frozen=True)
class StatisticsOptions:
    """What the statistics of a data set depend on."""

    layout: BatchLayoutOptions
    train: TrainSpec
    batching: Batching

    @staticmethod
    def of(recipe: Recipe, *, processes: int, packing: bool | None = None) -> StatisticsOptions:
        """Return those of a recipe. Open settings have their usual values, since no model is built.

        packing: as resolved for the model; None: the recipe's.
        """
        usual = with_usual_values(recipe, max(1, processes // recipe.parallel.cp_size))
        batching = choose_batching(usual, processes)
        return StatisticsOptions(BatchLayoutOptions.of(recipe, packing=packing), recipe.train, batching)


def choose_packing(
    data: DataOptions, modality: ModalityFacts, why_not_packed: str | None
) -> tuple[bool, tuple[str, ...]]:
    """Resolve `data.packing`: off for a model that packed rows would change, with a note that says so.

    A recipe that sets it for such a model raises UserError. why_not_packed: why the documents of a row
    would influence each other in this model.
    """
    if data.packing is False:
        return False, ()
    if modality.packs_exactly:
        if why_not_packed is None:
            return True, ()
        why = why_not_packed
        off = f"packing is off: {why}"
    else:
        why = f"in {modality.family} the documents of a packed row would attend to each other's {modality.inputs}"
        off = f"packing is off: it is not exact for {modality.family}"
    if data.packing is True:
        raise UserError(f"data.packing: {why}.", hint="Write data.packing: false, or leave it out.")
    return False, (off,)


def padding_free_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return a note if `data.padding_free` has no effect because rows are packed."""
    if recipe.data.packing and recipe.data.padding_free is True:
        return ("data.padding_free has no effect here: packed rows (data.packing) have no padding",)
    return ()
