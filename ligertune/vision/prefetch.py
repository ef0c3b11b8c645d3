"""Pictures are decoded and resized by threads while the device works on the batch before: Pillow and numpy let go of
Python's lock, and what a thread makes need not be sent to another process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from ligertune.vision.reader import ImageReader

_MOST_THREADS = 16


class PicturesAhead:
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
