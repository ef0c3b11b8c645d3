"""Arrays in .npy files: read without trust in their headers, and written without holding them in memory.

`np.load` allocates what a header claims, and `np.lib.format.open_memmap` maps a file whose blocks the disk may not
have: a write to such a page ends the process with SIGBUS. Here a header is compared with the expected shape and the
size of the file before anything is mapped, and rows are written with plain writes, which report a full disk.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ligertune.errors import message_of
from ligertune.files.checked_files import DamagedFileError, open_regular

CHECKED_ROWS = 1 << 14  # rows of a check of all values: 16 MB of log-probabilities at K = 256


def map_array(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Memory-map an array of this dtype and shape. Raises DamagedFileError for any other file, and OSError."""
    with open_regular(path) as file:
        found_shape, is_fortran, found = _read_header(file)
        start = file.tell()
        size = file.seek(0, 2)
    if found != np.dtype(dtype) or is_fortran:
        raise DamagedFileError(f"holds {str(found)[:40]} values, and must hold {np.dtype(dtype)} ones, row by row")
    if found_shape != shape:
        raise DamagedFileError(f"holds an array of shape {str(list(found_shape))[:80]} instead of {list(shape)}")
    needed = start + math.prod(shape) * found.itemsize
    if size != needed:
        raise DamagedFileError(f"has {size:,} bytes instead of {needed:,}")
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype=found, mode="r", offset=start, shape=shape)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return (shape, whether columns are stored one after another, dtype). Raises DamagedFileError."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            raise ValueError(f"version {version[0]}.{version[1]} of the format")
        return readers[version](file)
    except OSError:
        raise
    except Exception as error:  # numpy tokenizes the header and evaluates it as a Python literal
        reason = message_of(error)[:80]
        raise DamagedFileError(f"is not a .npy file: {reason}") from None


class RowWriter:
    """Writes the rows of an array (count, columns) to a new .npy file, in any order."""

    def __init__(self, file: BinaryIO, dtype: type[np.generic], count: int, columns: int) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (count, columns)}
        np.lib.format.write_array_header_1_0(file, header)
        self._start = file.tell()
        self._row_bytes = columns * self._dtype.itemsize

    def write(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Write rows at these indices. Raises OSError on a full disk, at the latest when the file is closed."""
        breaks = np.flatnonzero(np.diff(places) != 1) + 1  # places of an example follow each other
        for part, values in zip(np.split(places, breaks), np.split(rows, breaks), strict=True):
            if not len(part):  # of no rows, `split` makes one empty part
                continue
            self._file.seek(self._start + int(part[0]) * self._row_bytes)
            self._file.write(np.ascontiguousarray(values, self._dtype).tobytes())
