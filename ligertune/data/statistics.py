"""What the examples of a recipe come to in training: rows, padding, steps and tokens, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ligertune.data.batching.packing import pack
from ligertune.planning.batch_layout import StatisticsOptions
from ligertune.planning.optimization import total_steps


@dataclass(frozen=True)
class DataStatistics:
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


def data_statistics(lengths: np.ndarray, trained: np.ndarray, options: StatisticsOptions) -> DataStatistics:
    """lengths, trained: tokens of each example, and those of them that are trained."""
    batching, layout = options.batching, options.layout
    kind, max_length = layout.kind, layout.max_length
    packs = pack(lengths, max_length)
    size = batching.micro_batch_size
    fills = {
        "packed": packs.fill,
        "grouped": _padded_fill(np.sort(lengths), size),
        "shuffled": _padded_fill(np.random.default_rng(options.seed).permutation(lengths), size),
    }
    rows = len(packs) if kind == "packed" else len(lengths)
    padding_free = kind != "packed" and layout.padding_free is True
    steps = total_steps(rows, batching.global_batch_size, epochs=options.num_train_epochs, max_steps=options.max_steps)
    # A run of epochs ends with an epoch; a run of steps may end anywhere.
    whole = steps * batching.global_batch_size / rows
    epochs = whole if options.max_steps else round(options.num_train_epochs * rows) / rows
    return DataStatistics(
        packed=kind == "packed",
        padding_free=padding_free,
        rows=rows,
        fill=1.0 if padding_free else fills[kind],
        fill_packed=fills["packed"],
        fill_grouped=fills["grouped"],
        fill_shuffled=fills["shuffled"],
        fill_to_max_length=float(lengths.mean()) / max_length,
        processes=batching.world_size,
        rows_per_step=batching.global_batch_size,
        steps=steps,
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
