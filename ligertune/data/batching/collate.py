"""Examples to the tensors of one forward pass: padded to a rectangle, or packed one behind another."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ligertune_kernels import labelled_rows
from torch import Tensor

from ligertune.data.examples import Example
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.vision.inputs import Pixels, blank_ids, image_inputs

if TYPE_CHECKING:
    from ligertune.data.batching.context_parallel_rows import ContextParallelSplit
    from ligertune.data.batching.packing import Packs
    from ligertune.data.examples import Examples
    from ligertune.data.stream import StreamedExamples
    from ligertune.planning.plan import Plan
    from ligertune.vision.inputs import ImagePrefetcher
    from ligertune.vision.reader import ImageReader


def padded_length(longest: int, pad_to_multiple_of: int) -> int:
    """T of a batch whose longest example has `longest` tokens."""
    return -(-longest // pad_to_multiple_of) * pad_to_multiple_of


def collate(examples: Sequence[Example], *, pad_token_id: int, pad_to_multiple_of: int = 1) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `labels`: (B, T) int64, padded on the right to the longest of these examples."""
    longest = max(len(example.input_ids) for example in examples)
    shape = len(examples), padded_length(longest, pad_to_multiple_of)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = example.input_ids
        attention_mask[row, :length] = 1
        labels[row, :length] = example.labels
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in batch.items()}


@dataclass(frozen=True)
class StaticShapes:
    """What all packed batches of a run have in common, so that no graph (torch.compile's, CUDA's) meets a new size."""

    tokens: int  # T
    longest: int  # tokens of a document; one that is longer is said to be, which is another graph
    documents: int  # in a row; one with more gets room for twice as many, or more


def collate_packed(
    examples: Sequence[Example],
    *,
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    static_shapes: StaticShapes | None = None,
) -> dict[str, Any]:
    """Documents one behind another: `input_ids`, `labels`, `position_ids` (1, T) int64, and where each begins.

    A document's first label is ignored, or the last token of the one before would be trained to predict it. What fills
    T up to the multiple is a document of its own, untrained. Everything that attention needs is known here, on the CPU:
    `cu_seq_lens_*` (documents + 1,) int32, `max_length_*` and `document_lengths` as Python numbers, `document_places`
    (2, T) int32: where each token's document begins, and the place behind it. There is no mask.

    With `static_shapes` T and `max_length_*` are what it says, T is filled up by documents no longer than that, and
    `cu_seq_lens_*` ends in empty ones: attention is never told less than there is.
    """
    lengths = [len(example.input_ids) for example in examples]
    multiple = pad_to_multiple_of if static_shapes is None else static_shapes.tokens
    missing = padded_length(sum(lengths), multiple) - sum(lengths)
    longest = max([missing, *lengths] if static_shapes is None else [static_shapes.longest, *lengths])
    input_ids = np.concatenate([*(example.input_ids for example in examples), np.full(missing, pad_token_id)])
    labels = np.concatenate([*(example.labels for example in examples), np.full(missing, IGNORE_INDEX)])
    whole, rest = divmod(missing, longest)
    lengths += [longest] * whole + [rest] * (rest > 0)
    begins = np.cumsum([0, *lengths])
    labels[begins[:-1]] = IGNORE_INDEX
    places = np.repeat(np.stack((begins[:-1], begins[1:])), lengths, axis=1)
    position_ids = np.arange(begins[-1]) - places[0]
    empty = 0 if static_shapes is None else padded_length(len(lengths), static_shapes.documents) - len(lengths)
    cu_seq_lens = torch.from_numpy(np.pad(begins, (0, empty), mode="edge").astype(np.int32))
    rows = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    return {
        **{name: torch.from_numpy(row.astype(np.int64))[None] for name, row in rows.items()},
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
        "document_lengths": tuple(lengths),
        "document_places": torch.from_numpy(places.astype(np.int32)),
    }


# Few sizes of the head's products: cuBLAS and the allocator take their time over each that is new.
ROWS_MULTIPLE_OF = 128
HEAD_SIZES_PER_BATCH = (
    4  # of a batch's rows: as few sizes of the head's products where each is recorded as a CUDA graph
)
MAX_PINNED_BYTES = 16 << 20  # bytes of a tensor
SHORT_DOCUMENT = 16  # tokens; of a stream nobody knows how many documents a row will have: room for so short ones


def static_shapes_of(plan: Plan, packs: Packs | None) -> StaticShapes | None:
    """What all batches of packed rows have in common where each shape is a graph, so that one serves all; else None.

    packs: the rows; None where they come from a stream.
    """
    if not (plan.build.execution.few_shapes and plan.rows.packed):
        return None
    rows, longest = plan.batching.micro_batch_size, min(plan.rows.length, plan.data.longest)
    tokens = rows * plan.rows.multiple_of
    each = plan.rows.length // SHORT_DOCUMENT if packs is None else packs.most_documents
    return StaticShapes(tokens, longest, documents=rows * each + -(-tokens // longest))


def rows_multiple_of(plan: Plan) -> int:
    """To a multiple of what the rows that meet the output head are filled up."""
    if not plan.build.execution.cuda_graphs:
        return ROWS_MULTIPLE_OF
    share = plan.batching.micro_batch_size * plan.data_options.max_length // HEAD_SIZES_PER_BATCH
    return padded_length(max(share, 1), ROWS_MULTIPLE_OF)


@dataclass(frozen=True)
class Batcher:
    """Makes micro batches of `examples`. T is a multiple of `multiple_of`.

    With `index_labels` a batch says which rows predict a label, for a loss that is computed in the head; `label_shifts`
    is how far ahead they look.
    """

    examples: Examples | StreamedExamples
    packed: bool
    multiple_of: int
    pad_token_id: int
    index_labels: bool
    device: torch.device
    label_shifts: tuple[int, ...] = (1,)
    rows_multiple_of: int = ROWS_MULTIPLE_OF
    images: ImageReader | None = None  # of a model that sees
    ahead: ImagePrefetcher | None = None
    context_parallel: ContextParallelSplit | None = None  # where each rank of several computes a part of a row
    static_shapes: StaticShapes | None = None  # of packed rows, where layers are compiled

    def expect(self, batches: Sequence[Sequence[np.ndarray]]) -> None:
        """Begins to read the images of micro batches that will be asked for."""
        if self.ahead is not None:
            self.ahead.expect(path for rows in batches for index in self._indices(rows) for path in self._paths(index))

    def __call__(self, rows: Sequence[np.ndarray]) -> dict[str, Any]:
        """Rows of example indices -> input_ids and labels (B, T) padded on the right, or (1, T) packed.

        There is no attention mask. Padding stands behind every real token, where causal attention does not look, and
        without a mask the flash kernels stay available; packed documents are kept apart by where they begin. A rank
        without rows gets an example of which nothing is trained, so that all ranks make the same collective calls.
        """
        idle = len(rows) == 0
        examples = [self.examples[i] for i in self._indices(rows)]
        pictures = [[self._pixels(path) for path in example.images] for example in examples]
        if self.images is not None and not any(pictures) and self.images.family.layout != "tiles":
            examples, pictures = self._with_blank(examples)
        make = functools.partial(collate_packed, static_shapes=self.static_shapes) if self.packed else collate
        batch = make(examples, pad_token_id=self.pad_token_id, pad_to_multiple_of=self.multiple_of)
        batch.pop("attention_mask", None)
        if self.images is not None:
            batch |= image_inputs(self.images, batch["input_ids"], pictures, batch.get("document_lengths"))
        if idle:
            batch["labels"].fill_(-100)
        if self.context_parallel is not None:
            batch = self.context_parallel.cut(batch)
        if self.index_labels:
            shifted = "shift_labels" in batch
            batch["labelled_rows"] = labelled_rows(
                batch["shift_labels" if shifted else "labels"],
                shift=0 if shifted else self.label_shifts,
                multiple_of=self.rows_multiple_of,
            )
        return {
            name: self._on_device(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }

    def _on_device(self, value: torch.Tensor) -> torch.Tensor:
        """From pinned memory: a copy from any other waits until the device has done what it was asked before.

        Pixels may wait: pinned memory is kept, and a host that runs ahead would pin those of many batches.
        """
        if self.device.type == "cuda" and value.nbytes <= MAX_PINNED_BYTES:
            value = value.pin_memory()
        return value.to(self.device, non_blocking=True)

    def image_tokens(self, indices: np.ndarray) -> int:
        """Tokens of these examples that stand for images."""
        if self.images is None:
            return 0
        return sum(int((self.examples[i].input_ids == self.images.token_id).sum()) for i in indices.tolist())

    def _indices(self, rows: Sequence[np.ndarray]) -> list[int]:
        return np.concatenate(rows).tolist() if len(rows) else [0]

    def _paths(self, index: int) -> tuple[str, ...]:
        return self.examples[index].images

    def _pixels(self, path: str) -> Pixels:
        return self.images.pixels(path) if self.ahead is None else self.ahead.take(path)

    def _with_blank(self, examples: list[Example]) -> tuple[list[Example], list[list[Pixels]]]:
        """A blank picture behind the shortest example, or as a document of its own: seen by nothing that is trained."""
        ids = blank_ids(self.images)
        blank = Example(ids, np.full(len(ids), IGNORE_INDEX, dtype=np.int32), "")
        pictures: list[list[Pixels]] = [[] for _ in examples]
        if self.packed:
            return [*examples, blank], [*pictures, [self.images.blank()]]
        shortest = min(range(len(examples)), key=lambda place: len(examples[place].input_ids))
        longer = [np.concatenate([examples[shortest][part], blank[part]]) for part in (0, 1)]
        examples[shortest] = Example(*longer, examples[shortest].source)
        pictures[shortest] = [self.images.blank()]
        return examples, pictures

    def slots(self, rows: Sequence[np.ndarray]) -> int:
        """Tokens that the forward pass over these rows computes, padding included."""
        lengths = [self.examples.lengths[row] for row in rows]
        if self.packed:
            multiple_of = self.multiple_of if self.static_shapes is None else self.static_shapes.tokens
            return padded_length(int(sum(length.sum() for length in lengths)), multiple_of)
        return len(rows) * padded_length(int(max(length.max() for length in lengths)), self.multiple_of)
