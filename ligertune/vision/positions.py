"""Where tokens stand for a model that turns its queries and keys by time, height and width (M-RoPE of the Qwen family).

A text token has one place for all three. A picture's tokens share the time at which the picture begins and lie on its
grid from there; what follows goes on behind the longer side of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
