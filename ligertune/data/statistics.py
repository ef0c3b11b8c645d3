"""Data statistics before training: rows, padding, steps and tokens of a run, and the totals that the plan records."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.data.batching.packing import pack
from ligertune.planning.batch_layout import DataSummary, Rows, StatisticsOptions
from ligertune.planning.optimization import FEW_STEPS, total_steps

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.data.modalities.modality import ModalityReader
    from ligertune.data.prepare import PreparedData
    from ligertune.planning.options import BatchLayoutOptions

MAX_SAMPLE = 1000  # examples whose files' tokens are counted: an estimate for the plan, and each one is read from disk


def epoch_rows(layout: BatchLayoutOptions, data: PreparedData, *, multiple_of: int, padding_free: bool) -> Rows:
    """Return the rows of an epoch. multiple_of: what the attention requires of a batch's length."""
    documents = data.train.documents_per_example
    kind = layout.kind
    length = layout.max_length * documents
    count = 0
    fill = None
    layout = replace(layout, max_length=length) if kind == "packed" else layout
    train = data.examples_in_memory
    if train is None:  # a stream cannot be grouped by length
        kind = "packed" if kind == "packed" else "shuffled"
    elif kind == "packed":
        packs = pack(train.lengths, length)
        count = len(packs)
        fill = packs.fill
    else:
        count = len(train)
    return Rows(
        kind=kind,
        count=count,
        length=length,
        documents=documents,
        multiple_of=layout.length_multiple(multiple_of),
        fill=fill,
        streamed=data.streamed,
        padding_free=padding_free,
    )


def summarize_data(data: PreparedData, reader: ModalityReader | None = None) -> DataSummary:
    """Return the totals of prepared data. reader: of files; None for a text model."""
    counted = data.examples_in_memory
    stream = data.stream
    longest = [part.longest_documents.max() for part in (counted, data.eval) if part]
    return DataSummary(
        examples=len(counted or ()),
        eval_examples=len(data.eval or ()),
        tokens=int(counted.lengths.sum()) if counted else 0,
        trained_tokens=int(counted.trained.sum()) if counted else 0,
        longest=int(max(longest)) if stream is None else stream.max_length,
        dropped=dict(data.report.dropped),
        truncated=data.report.truncated,
        template=data.template,
        fingerprint=data.train.fingerprint,
        eval_tokens=int(data.eval.lengths.sum()) if data.eval else 0,
        squared_lengths=int((counted.lengths.astype(np.int64) ** 2).sum()) if counted else 0,
        most_trained=int(counted.trained.max()) if counted else 0,
        image_share=largest_file_share(counted, reader.token_id) if reader is not None and counted else 0.0,
    )


def largest_file_share(examples: Examples, token_id: int) -> float:
    """Return the largest share of files' tokens in an example, among about MAX_SAMPLE examples with files."""
    with_files = np.flatnonzero(examples.n_media)
    chosen = with_files[:: -(-len(with_files) // MAX_SAMPLE) or 1].tolist()
    return max((float((examples[i].input_ids == token_id).mean()) for i in chosen), default=0.0)


def data_statistics(
    lengths: np.ndarray,
    trained: np.ndarray,
    options: StatisticsOptions,
    *,
    longest: np.ndarray | None = None,
    documents: int = 1,
) -> dict[str, Any]:
    """Return numbers of an epoch and of the run. A fill is tokens / slots: 1 - fill is the share of padding.

    lengths, trained: (N,) tokens and trained tokens of each example. Of pairs, `longest` is the length of the longer
    sequence of each, and `documents` is 2.
    """
    batching = options.batching
    layout = options.layout
    train = options.train
    kind = layout.kind
    max_length = layout.max_length * documents
    packs = pack(lengths, max_length)
    longest = lengths if longest is None else longest
    tokens = int(lengths.sum())
    shuffled = np.random.default_rng(train.seed).permutation(longest)
    slots = {
        name: _padded_slots(order, batching.micro_batch_size) * documents
        for name, order in (("grouped", np.sort(longest)), ("shuffled", shuffled))
    }
    # batches of similar lengths, and shuffled batches, each padded to its longest sequence
    fills = {"packed": packs.fill, **{name: tokens / count for name, count in slots.items()}}
    rows = len(packs) if kind == "packed" else len(lengths)
    # as the recipe has it: what `auto` selects depends on the device
    padding_free = kind != "packed" and layout.padding_free is True
    steps = total_steps(rows, batching.global_batch_size, epochs=train.num_train_epochs, max_steps=train.max_steps)
    # a run of epochs stops exactly at the end of the last one, a run of max_steps anywhere
    whole = steps * batching.global_batch_size / rows
    epochs = whole if train.num_train_epochs is None or train.max_steps else round(train.num_train_epochs * rows) / rows
    # all rows of a run of epochs may be fewer than a full batch
    rows_per_step = min(batching.global_batch_size, max(1, round(epochs * rows)))
    return {
        "packed": kind == "packed",
        "padding_free": padding_free,
        "rows": rows,  # of an epoch: packs, or examples
        "fill": 1.0 if padding_free else fills[kind],  # of the rows that this recipe trains on
        **{f"fill_{name}": fill for name, fill in fills.items()},
        "fill_to_max_length": float(lengths.mean()) / max_length,  # each example padded to data.max_length
        "processes": batching.world_size,
        "rows_per_step": rows_per_step,
        "steps": steps,
        "few_steps": steps < FEW_STEPS and not train.max_steps,
        "steps_per_epoch": rows / rows_per_step,
        "tokens_per_step": float(lengths.sum()) / rows * rows_per_step,
        "tokens": round(tokens * epochs),  # of the run
        "trained_tokens": round(float(trained.sum()) * epochs),
    }


def _padded_slots(lengths: np.ndarray, size: int) -> int:
    """Return the slots of all batches if each `size` consecutive lengths are padded to their longest."""
    starts = np.arange(0, len(lengths), size)
    members = np.diff(np.append(starts, len(lengths)))
    return int((np.maximum.reduceat(lengths, starts) * members).sum())
