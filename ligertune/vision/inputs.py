"""The pictures of a batch as the model takes them, beside its tokens.

Where a batch shows no picture, a blank one is put behind an example's last token: nothing that is trained sees it, and
the tower still runs and gets its gradients (zeros), which every rank must, or the others wait for it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ligertune.vision.reader import ImageReader

Pixels = dict[str, Tensor]


def image_inputs(
    reader: ImageReader,
    input_ids: Tensor,
    pictures: Sequence[Sequence[Pixels]],
    document_lengths: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Pixels, and what the model needs to place them.

    input_ids: (B, T); pictures: of each example, in order. Packed rows are (1, T) with `document_lengths`; positions
    are then (4, 1, T), the first row those of the text alone, by which transformers' masks find the documents.
    """
    family = reader.family
    is_image = (input_ids == reader.token_id).numpy()
    shown = [picture for example in pictures for picture in example]
    if family.layout == "tiles":
        return _tiles(reader, input_ids, pictures) if shown else {}
    inputs = reader.joined(shown) if shown else {}
    if family.positions == "sections":
        inputs["position_ids"] = _positions(reader, is_image, pictures, document_lengths)
    if family.token_types:
        inputs["token_type_ids"] = torch.from_numpy(is_image.astype(np.int64))
    return inputs


def _positions(
    reader: ImageReader,
    is_image: np.ndarray,
    pictures: Sequence[Sequence[Pixels]],
    document_lengths: Sequence[int] | None,
) -> Tensor:
    grids = [[_grid(picture, reader.merge) for picture in example] for example in pictures]
    if document_lengths is None:
        return torch.from_numpy(np.stack([section_positions(*row) for row in zip(is_image, grids, strict=True)], 1))
    ends = np.cumsum(document_lengths)
    grids += [[]] * (len(document_lengths) - len(grids))  # what fills the row up
    places = []
    for start, end, shown in zip(ends - np.array(document_lengths), ends, grids, strict=True):
        sections = section_positions(is_image[0, start:end], shown)
        places.append(np.concatenate([np.arange(end - start)[None], sections]))
    return torch.from_numpy(np.concatenate(places, axis=1))[:, None]


def _grid(picture: Pixels, merge: int) -> tuple[int, int]:
    _, height, width = picture["image_grid_thw"][0].tolist()
    return height // merge, width // merge


def _tiles(reader: ImageReader, input_ids: Tensor, pictures: Sequence[Sequence[Pixels]]) -> dict[str, Tensor]:
    """pixel_values (B, N, tiles, 3, h, w) and masks; every example has the same number N of pictures.

    A token sees the pictures that stand before it up to the next group of them, as transformers' processor has it.
    """
    counts = {len(example) for example in pictures}
    if len(counts) > 1:
        raise ValueError(f"examples of {sorted(counts)} pictures in one batch: {reader.family.name} takes one number")
    rows = [{name: torch.cat([p[name] for p in example], dim=1) for name in example[0]} for example in pictures]
    inputs = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    n_tiles = inputs["aspect_ratio_mask"].sum(-1)  # (B, N)
    mask = torch.zeros(*input_ids.shape, *inputs["aspect_ratio_mask"].shape[1:], dtype=torch.int64)
    for row, ids in enumerate(input_ids.tolist()):
        places = [place for place, token in enumerate(ids) if token == reader.token_id]
        ends = [*places[1:], len(ids)]
        for number in reversed(range(len(places))):
            if number + 1 < len(places) and ends[number] == places[number] + 1:  # side by side: seen together
                ends[number] = ends[number + 1]
            mask[row, places[number] : ends[number], number, : n_tiles[row, number]] = 1
    return {**inputs, "cross_attention_mask": mask}


def blank_ids(reader: ImageReader) -> np.ndarray:
    """The tokens of a blank picture: (n,) int32."""
    return np.full(reader.blank_tokens, reader.token_id, dtype=np.int32)


def section_positions(is_image: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """(3, T) int64. is_image: (T,) bool; grids: (height, width) in tokens of each picture, in their order."""
    places = np.empty((3, len(is_image)), dtype=np.int64)
    starts = _run_starts(is_image, grids)
    done, place = 0, 0
    for start, (height, width) in zip(starts, grids, strict=True):
        places[:, done:start] = np.arange(place, place + start - done)
        place += start - done
        end = start + height * width
        places[0, start:end] = place
        places[1, start:end] = place + np.repeat(np.arange(height), width)
        places[2, start:end] = place + np.tile(np.arange(width), height)
        done, place = end, place + max(height, width)
    places[:, done:] = np.arange(place, place + len(is_image) - done)
    return places


def _run_starts(is_image: np.ndarray, grids: Sequence[tuple[int, int]]) -> list[int]:
    """Where each picture's tokens begin; they must be as many as its grid has."""
    tokens = np.flatnonzero(is_image)
    sizes = [height * width for height, width in grids]
    if sum(sizes) != len(tokens):
        raise ValueError(f"pictures of {sizes} tokens, and {len(tokens)} tokens stand for pictures")
    first = np.cumsum([0, *sizes[:-1]]) if sizes else []
    starts = [int(tokens[index]) for index in first]
    for start, size in zip(starts, sizes, strict=True):
        if not is_image[start : start + size].all():
            raise ValueError(f"the {size} tokens of a picture at {start} are not one behind the other")
    return starts


_MOST_THREADS = 16


class ImagePrefetcher:
    """Pixels by file, made when they are expected and let go when they are taken."""

    def __init__(self, reader: ImageReader) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._reader = reader
        self._threads = ThreadPoolExecutor(min(cores, _MOST_THREADS), thread_name_prefix="pictures")
        self._made: dict[str, Future[dict[str, Tensor]]] = {}
        self._wanted: Counter[str] = Counter()

    def expect(self, paths: Iterable[str]) -> None:
        """Begins to make these, each as often as it will be taken."""
        for path in paths:
            self._wanted[path] += 1
            if path not in self._made:
                self._made[path] = self._threads.submit(self._reader.pixels, path)

    def take(self, path: str) -> dict[str, Tensor]:
        """The pixels of a file, expected or not."""
        if path not in self._made:
            return self._reader.pixels(path)
        self._wanted[path] -= 1
        made = self._made[path] if self._wanted[path] > 0 else self._made.pop(path)
        return made.result()
