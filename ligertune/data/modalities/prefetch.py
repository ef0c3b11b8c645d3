"""Prefetching: threads read the files of the next batches while the device computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ligertune.data.modalities.modality import FileInputs, ModalityReader
from ligertune.hardware import usable_cores

MAX_THREADS = 16  # per process; each GPU has a process of its own


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
