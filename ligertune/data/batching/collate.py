"""Collate examples to the tensors of one forward pass: padded (B, T), or packed without padding (1, sum T)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ligertune_kernels import labelled_rows
from torch import Tensor

from ligertune.data.batching.context_parallel import ContextParallelSplit
from ligertune.data.examples import Example
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.hardware import usable_cores

if TYPE_CHECKING:
    from ligertune.data.batching.packing import Packs
    from ligertune.data.examples import Examples
    from ligertune.data.modalities.modality import FileInputs, ModalityReader
    from ligertune.data.stream import StreamedExamples
    from ligertune.planning.plan import Plan

# called with (all examples, indices of those in the batch, the batch)
MoreFields = Callable[["Examples | StreamedExamples", list[int], dict[str, Any]], dict[str, Any]]

# Few sizes of the output head's products: cuBLAS and the allocator need time for each new one.
ROWS_MULTIPLE_OF = 128
HEAD_SIZES_PER_BATCH = 4  # sizes of the head's products where each one is recorded as a CUDA graph
MAX_PINNED_BYTES = 16 << 20  # of one tensor
MAX_THREADS = 16  # that read files, in each process; there is one process for each GPU
SHORT_DOCUMENT = 16  # tokens; the rows of a stream are not known ahead, so they get room for documents this short


@dataclass(frozen=True)
class StaticShapes:
    """Sizes that all packed batches of a run share, so that one graph (torch.compile's or CUDA's) serves all."""

    tokens: int  # T
    longest: int  # tokens of the longest document; a longer one has its own length, and needs another graph
    documents: int  # of a batch; the room for documents is a multiple of this


def padded_length(longest: int, pad_to_multiple_of: int) -> int:
    """Round a length up to a multiple."""
    return -(-longest // pad_to_multiple_of) * pad_to_multiple_of


def collate(examples: Sequence[Example], *, pad_token_id: int, pad_to_multiple_of: int = 1) -> dict[str, Tensor]:
    """Return `input_ids` and `labels`: (B, T) int64, padded on the right to the longest example."""
    longest = max(len(example.input_ids) for example in examples)
    shape = len(examples), padded_length(longest, pad_to_multiple_of)
    batch = {"input_ids": np.full(shape, pad_token_id, np.int64), "labels": np.full(shape, IGNORE_INDEX, np.int64)}
    for row, example in enumerate(examples):
        for name, array in batch.items():
            array[row, : len(example.input_ids)] = getattr(example, name)
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def collate_packed(
    examples: Sequence[Example],
    *,
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    static_shapes: StaticShapes | None = None,
) -> dict[str, Any]:
    """Concatenate documents: `input_ids`, `labels`, `position_ids` (1, T) int64, and the documents' bounds.

    The first label of a document is ignored, because the last token of the previous one would be trained to predict it.
    Padding to the multiple is an untrained document at the end. Attention needs no mask and no synchronisation with the
    device: `cu_seq_lens_*` are (documents + 1,) int32, `max_length_*` and `document_lengths` Python numbers, and
    `document_places` (2, T) int32 the begin and end of each token's document. `seq_idx` (1, T) int32 numbers the
    documents: some mixers of transformers give their convolution nothing else.

    With `static_shapes` T and `max_length_*` are fixed, the padding is split into documents of at most that length, and
    `cu_seq_lens_*` ends in empty documents. Both are larger where a batch needs more.
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
        "seq_idx": torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))[None],
    }


def static_shapes_of(plan: Plan, packs: Packs | None) -> StaticShapes | None:
    """Return the sizes of packed batches if each new shape would be compiled or recorded; else None.

    packs: the rows of an epoch; None for a stream.
    """
    if not (plan.layout.few_shapes and plan.rows.packed):
        return None
    rows = plan.batching.micro_batch_size
    longest = min(plan.rows.length, plan.data.longest)
    tokens = rows * plan.rows.multiple_of
    each = plan.rows.length // SHORT_DOCUMENT if packs is None else packs.most_documents * plan.rows.documents
    # the padding of a row is split into documents, too, of at most `longest` tokens
    return StaticShapes(tokens, longest, documents=rows * each + -(-tokens // longest))


def rows_multiple_of(plan: Plan) -> int:
    """Return the multiple to which the number of rows (tokens) that enter the output head is padded."""
    if not plan.build.execution.cuda_graphs:
        return ROWS_MULTIPLE_OF
    share = plan.batching.micro_batch_size * plan.rows.length // HEAD_SIZES_PER_BATCH
    return padded_length(max(share, 1), ROWS_MULTIPLE_OF)


class FilePrefetcher:
    """Compute the model inputs of expected files in threads; release them when they are taken."""

    def __init__(self, reader: ModalityReader) -> None:
        self._reader = reader
        self._threads = ThreadPoolExecutor(min(usable_cores(), MAX_THREADS), thread_name_prefix="files")
        self._made: dict[str, Future[FileInputs]] = {}
        self._wanted: Counter[str] = Counter()

    def expect(self, paths: Iterable[str]) -> None:
        """Start computing these; a path is listed as often as it will be taken."""
        for path in paths:
            self._wanted[path] += 1
            if path not in self._made:
                self._made[path] = self._threads.submit(self._reader.read, path)

    def take(self, path: str) -> FileInputs:
        """Return the inputs of a file, expected or not."""
        if path not in self._made:
            return self._reader.read(path)
        self._wanted[path] -= 1
        # the last use releases the inputs, which are large
        made = self._made[path] if self._wanted[path] > 0 else self._made.pop(path)
        return made.result()


@dataclass(frozen=True)
class Batcher:
    """Makes micro-batches of `examples` on `device`. T is a multiple of `multiple_of`."""

    examples: Examples | StreamedExamples
    packed: bool
    multiple_of: int
    pad_token_id: int
    index_labels: bool  # add `labelled_rows`, the rows that predict a label, for a loss computed in the output head
    device: torch.device
    label_shifts: tuple[int, ...] = (1,)  # how many tokens ahead the labels of a row are
    more_fields: MoreFields | None = None  # Task.batch_fields
    rows_multiple_of: int = ROWS_MULTIPLE_OF
    reader: ModalityReader | None = None  # None for a text model
    prefetcher: FilePrefetcher | None = None
    context_parallel: ContextParallelSplit | None = None
    static_shapes: StaticShapes | None = None  # of packed rows

    def prefetch(self, batches: Sequence[Sequence[np.ndarray]]) -> None:
        """Start to read the files of these micro-batches in the background."""
        if self.prefetcher is not None:
            indices = (index for rows in batches for index in _indices(rows))
            self.prefetcher.expect(path for index in indices for path in self.examples[index].media)

    def __call__(self, rows: Sequence[np.ndarray]) -> dict[str, Any]:
        """Return the batch of rows of example indices: padded on the right (B, T), or packed (1, T).

        There is no attention mask, so that flash attention is available. Padding comes after all real tokens, to which
        causal attention does not look ahead; packed documents are separated by their bounds. A rank without rows gets
        an untrained example, so that all ranks make the same collective calls. A pair is two documents, or
        two rows of a padded batch: 2i is the chosen sequence of pair i, and 2i + 1 the rejected one.
        """
        examples = [document for index in _indices(rows) for document in self.examples[index].documents()]
        files = [[self._inputs(path) for path in example.media] for example in examples]
        if self.reader is not None and not any(files) and self.reader.takes_blank:
            examples, files = self._with_blank(examples, self.reader)
        padding = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.multiple_of}
        if self.packed:
            batch = collate_packed(examples, **padding, static_shapes=self.static_shapes)
        else:
            batch = collate(examples, **padding)
        if self.reader is not None:
            batch |= self.reader.batch_inputs(batch["input_ids"], files, batch.get("document_lengths"))
        if not len(rows):
            batch["labels"].fill_(IGNORE_INDEX)
        if self.context_parallel is not None:
            batch = self.context_parallel.cut(batch)
        if self.index_labels:
            labels, shifts = ("shift_labels", 0) if "shift_labels" in batch else ("labels", self.label_shifts)
            batch["labelled_rows"] = labelled_rows(batch[labels], shift=shifts, multiple_of=self.rows_multiple_of)
        if self.more_fields is not None:
            batch |= self.more_fields(self.examples, _indices(rows), batch)
        return {name: self._on_device(value) if isinstance(value, Tensor) else value for name, value in batch.items()}

    def _on_device(self, value: Tensor) -> Tensor:
        """Copy from pinned memory: other copies wait until the device has finished its earlier work.

        Large tensors (those of files) may wait: pinned memory is not freed, and a host that runs ahead would pin many
        batches.
        """
        if self.device.type == "cuda" and value.nbytes <= MAX_PINNED_BYTES:
            value = value.pin_memory()
        return value.to(self.device, non_blocking=True)

    def _inputs(self, path: str) -> FileInputs:
        if self.prefetcher is not None:
            return self.prefetcher.take(path)
        assert self.reader is not None  # rows of a text model have no files
        return self.reader.read(path)

    def _with_blank(
        self, examples: list[Example], reader: ModalityReader
    ) -> tuple[list[Example], list[list[FileInputs]]]:
        """Add a blank file after the shortest example, or as a document: no trained token attends to it."""
        n_tokens = reader.fixed_tokens or 1
        ids, labels = (np.full(n_tokens, fill, dtype=np.int32) for fill in (reader.token_id, IGNORE_INDEX))
        blank = Example(ids, labels, "")
        files: list[list[FileInputs]] = [[] for _ in examples]
        if self.packed:
            return [*examples, blank], [*files, [reader.blank()]]
        shortest = min(range(len(examples)), key=lambda place: len(examples[place].input_ids))
        before = examples[shortest]
        examples[shortest] = Example(
            input_ids=np.concatenate([before.input_ids, blank.input_ids]),
            labels=np.concatenate([before.labels, blank.labels]),
            source=before.source,
        )
        files[shortest] = [reader.blank()]
        return examples, files

    def file_tokens(self, indices: np.ndarray) -> int:
        """Return how many tokens of these examples stand for files."""
        if self.reader is None:
            return 0
        return sum(int((self.examples[i].input_ids == self.reader.token_id).sum()) for i in indices.tolist())

    def padded_tokens(self, rows: Sequence[np.ndarray]) -> int:
        """Return how many tokens the forward pass of these rows computes, padding included."""
        if self.packed:
            multiple_of = self.multiple_of if self.static_shapes is None else self.static_shapes.tokens
            return padded_length(int(sum(self.examples.lengths[row].sum() for row in rows)), multiple_of)
        longest = max(int(self.examples.longest_documents[row].max()) for row in rows)
        return len(rows) * self.examples.documents_per_example * padded_length(longest, self.multiple_of)


def _indices(rows: Sequence[np.ndarray]) -> list[int]:
    return np.concatenate(rows).tolist() if len(rows) else [0]
