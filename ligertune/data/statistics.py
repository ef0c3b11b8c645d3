"""What the examples of a recipe come to in training: rows, padding, steps and tokens, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.batching.packing import pack
from ligertune.planning.plan import choose_batching, make_schedule

if TYPE_CHECKING:
    from ligertune.recipe import Recipe


@dataclass(frozen=True)
class Outlook:
    """One pass over the data, and the run. A fill is real tokens over slots: 1 - fill is padding."""

    packed: bool
    padding_free: bool  # asked for: what `auto` takes depends on the device
    rows: int  # of an epoch: packs, or examples
    fill: float  # of the rows as this recipe makes them
    fill_packed: float
    fill_grouped: float  # examples of about one length in a batch, padded to its longest
    fill_shuffled: float  # any examples in a batch, padded to its longest
    fill_to_max_length: float  # each example padded to data.max_length
    processes: int
    rows_per_step: int
    steps: int
    steps_per_epoch: float
    tokens_per_step: float
    tokens: int  # of the run
    trained_tokens: int


def outlook(recipe: Recipe, lengths: np.ndarray, trained: np.ndarray, *, processes: int) -> Outlook:
    """lengths, trained: tokens of each example, and those of them that are trained."""
    # what `auto` will take is not known before the model is: here, the whole batch at once
    batching, max_length = choose_batching(recipe, processes, lambda micro, accumulates: True), recipe.data.max_length
    packs = pack(lengths, max_length)
    size = batching.micro_batch_size
    fills = {
        "packed": packs.fill,
        "grouped": _padded_fill(np.sort(lengths), size),
        "shuffled": _padded_fill(np.random.default_rng(recipe.train.seed).permutation(lengths), size),
    }
    kind = "packed" if recipe.data.packing else "grouped" if recipe.train.group_by_length else "shuffled"
    rows = len(packs) if kind == "packed" else len(lengths)
    padding_free = kind != "packed" and recipe.data.padding_free is True
    schedule = make_schedule(recipe, rows=rows, global_batch_size=batching.global_batch_size)
    # a run of epochs ends with them; one of steps may end anywhere
    whole = schedule.total_steps * batching.global_batch_size / rows
    epochs = whole if recipe.train.max_steps else round(recipe.train.num_train_epochs * rows) / rows
    return Outlook(
        packed=kind == "packed",
        padding_free=padding_free,
        rows=rows,
        fill=1.0 if padding_free else fills[kind],
        fill_packed=fills["packed"],
        fill_grouped=fills["grouped"],
        fill_shuffled=fills["shuffled"],
        fill_to_max_length=float(lengths.mean()) / max_length,
        processes=processes,
        rows_per_step=batching.global_batch_size,
        steps=schedule.total_steps,
        steps_per_epoch=rows / batching.global_batch_size,
        tokens_per_step=float(lengths.sum()) / rows * batching.global_batch_size,
        tokens=round(float(lengths.sum()) * epochs),
        trained_tokens=round(float(trained.sum()) * epochs),
    )


def _padded_fill(lengths: np.ndarray, size: int) -> float:
    """Real tokens over slots, if each `size` lengths in a row are padded to their longest."""
    starts = np.arange(0, len(lengths), size)
    members = np.diff(np.append(starts, len(lengths)))
    return float(lengths.sum() / (np.maximum.reduceat(lengths, starts) * members).sum())
