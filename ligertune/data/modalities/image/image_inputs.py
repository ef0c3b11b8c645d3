"""Image inputs of a batch: pixels, M-RoPE positions, token types and cross-attention masks.

A batch without images gets one blank image after an example's last token. No trained token attends to it, but the
vision tower runs and its gradients are zeros: in a run of several ranks all must take part in reducing them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ligertune.data.modalities.image.image_settings import ImageSettings
from ligertune.data.modalities.modality import FileInputs

Grid = tuple[int, int]  # height and width of an image in tokens


def image_inputs(
    settings: ImageSettings,
    input_ids: Tensor,
    images: Sequence[Sequence[FileInputs]],
    document_lengths: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return the pixels of a batch and what the model needs to place them.

    input_ids (B, T); images of each example, in order. Packed rows are (1, T) with `document_lengths`; position_ids are
    then (4, 1, T), text positions first, in which transformers' mask functions find the documents.
    """
    family = settings.family
    is_image = (input_ids == settings.token_id).numpy()
    shown = [image for example in images for image in example]
    if family.layout == "tiles":
        return _tile_inputs(settings, input_ids, images) if shown else {}
    inputs = {name: torch.cat([image[name] for image in shown]) for name in shown[0]} if shown else {}
    if family.positions == "sections":
        grids = [[_grid_of(image, settings.merge) for image in example] for example in images]
        inputs["position_ids"] = _position_ids(is_image, grids, document_lengths)
    if family.token_types:
        inputs["token_type_ids"] = torch.from_numpy(is_image.astype(np.int64))
    return inputs


def _grid_of(image: FileInputs, merge: int) -> Grid:
    height, width = (image["image_grid_thw"][0, 1:] // merge).tolist()
    return height, width


def _position_ids(is_image: np.ndarray, grids: list[list[Grid]], document_lengths: Sequence[int] | None) -> Tensor:
    if document_lengths is None:
        return torch.from_numpy(np.stack([section_positions(*row) for row in zip(is_image, grids, strict=True)], 1))
    # Positions begin anew in each document, as they would in a row of its own.
    ends = np.cumsum(document_lengths)
    grids += [[]] * (len(document_lengths) - len(grids))  # padding at the end of the row
    positions = []
    for start, end, shown in zip(ends - np.array(document_lengths), ends, grids, strict=True):
        sections = section_positions(is_image[0, start:end], shown)
        positions.append(np.concatenate([np.arange(end - start)[None], sections]))
    return torch.from_numpy(np.concatenate(positions, axis=1))[:, None]


def _tile_inputs(
    settings: ImageSettings, input_ids: Tensor, images: Sequence[Sequence[FileInputs]]
) -> dict[str, Tensor]:
    """Return pixel_values (B, M, tiles, 3, h, w) and masks; every example has the same number M of images.

    A token attends to the images before it, from its own group on, as in transformers' processor. Images whose tokens
    are adjacent form a group.
    """
    counts = {len(example) for example in images}
    if len(counts) > 1:
        raise ValueError(f"examples of {sorted(counts)} images in one batch: {settings.family.name} takes one number")
    rows = [{name: torch.cat([image[name] for image in example], dim=1) for name in example[0]} for example in images]
    inputs = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    n_tiles = inputs["aspect_ratio_mask"].sum(-1)  # (B, M)
    mask = torch.zeros(*input_ids.shape, *inputs["aspect_ratio_mask"].shape[1:], dtype=torch.int64)
    for row, ids in enumerate(input_ids.tolist()):
        starts = [index for index, token in enumerate(ids) if token == settings.token_id]
        ends = [*starts[1:], len(ids)]
        # backwards, because a group ends where its last image's span does
        for number in reversed(range(len(starts))):
            if number + 1 < len(starts) and ends[number] == starts[number] + 1:  # adjacent: one group
                ends[number] = ends[number + 1]
            mask[row, starts[number] : ends[number], number, : n_tiles[row, number]] = 1
    return {**inputs, "cross_attention_mask": mask}


def section_positions(is_image: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
    """Return M-RoPE positions (3, T) int64: time, height, width (Qwen2-VL, Wang et al. 2024).

    is_image (T,) bool; grids: (height, width) in tokens of each image, in order. Raises ValueError if they differ.
    """
    places = np.empty((3, len(is_image)), dtype=np.int64)
    tokens = np.flatnonzero(is_image)
    sizes = [height * width for height, width in grids]
    if sum(sizes) != len(tokens):
        raise ValueError(f"images of {sizes} tokens, but {len(tokens)} image tokens in the text")
    starts = tokens[np.cumsum([0, *sizes])[:-1]].tolist()
    done = 0
    place = 0
    for start, (height, width) in zip(starts, grids, strict=True):
        places[:, done:start] = np.arange(place, place + start - done)
        place += start - done
        end = start + height * width
        places[0, start:end] = place
        places[1, start:end] = place + np.repeat(np.arange(height), width)
        places[2, start:end] = place + np.tile(np.arange(width), height)
        done = end
        # text goes on after the larger side, as in transformers' get_rope_index
        place = place + max(height, width)
    places[:, done:] = np.arange(place, place + len(is_image) - done)
    return places
