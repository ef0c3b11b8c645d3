"""Where records come from: files, folders, globs and the hub.

On the hub the place of a record is the number of its row, from 1.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.data.rows.data_files import FILE_TYPES, DataFile, Record, display_path, file_type, read_file, reader_of
from ligertune.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ligertune.planning.options import DatasetOptions

__all__ = ["Record", "RecordStream", "display_path", "find_files", "read_file", "read_records"]

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SAMPLE = 100  # first records of a stream, whose columns are taken for those of all


def read_records(spec: DatasetOptions) -> list[Record]:
    """The first `max_samples` records of a data set, in the order of the source, columns renamed as `columns` says."""
    records = list(RecordStream(spec, sample=None, download=True))
    if not records:
        raise UserError(f"{spec.path} holds no records.")
    return records


@dataclass
class RecordStream:
    """The records that `read_records` gives, one by one. `share` is how much of them was read, as far as is known.

    A rename is held against the columns of the first `sample` records, or of all. `download`: a data set of the hub is
    stored on this machine first, and found there the next time.
    """

    spec: DatasetOptions
    sample: int | None = _SAMPLE
    download: bool = False
    _read: int = 0
    _files: list[DataFile] = field(default_factory=list)

    def __iter__(self) -> Iterator[Record]:
        records = islice(self._all(), self.spec.max_samples)
        if self.spec.columns:
            first = list(islice(records, self.sample))
            found = {column for record in first for column in record.row}
            records = (_renamed(record, self.spec) for part in (first, records) for record in part)
            _check_renames(self.spec, found) if first else None
        self._read = 0
        for record in records:
            self._read += 1
            yield record

    @property
    def share(self) -> float:
        if self.spec.max_samples is not None:
            return self._read / self.spec.max_samples
        if self._files:
            return sum(file.share * file.size for file in self._files) / sum(file.size for file in self._files)
        return self._read / (self._read + 10_000)  # the hub does not always say how many there are

    def _all(self) -> Iterator[Record]:
        paths = find_files(self.spec.path)
        if paths and (self.spec.name is not None or self.spec.split != "train"):
            raise UserError(
                f"{self.spec.path} is on this machine: `name` and `split` choose among the parts of a data set "
                "on the hub.",
                hint="Leave them out and name the file you want in `path`.",
            )
        if not paths:
            yield from _read_hub(self.spec, download=self.download)
        self._files = [DataFile(path) for path in paths]
        for file in self._files:
            yield from file.records()


def find_files(path: str) -> list[Path]:
    """The data files that `path` names, sorted; none if it can only be the id of a data set on the hub."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _files_in(place)
    if place.is_file():
        return [place]
    if glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(str(place), recursive=True) if os.path.isfile(name))
        if not found:
            raise UserError(f"No file matches {path}.")
        return found
    if _HUB_ID.fullmatch(path) and reader_of(place) is None:
        return []
    raise UserError(f"No such file or folder: {path}.")


def _files_in(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.is_file() and reader_of(file) is not None)
    files = [file for file in found if file_type(file) != ".txt"] or found  # a licence or a note beside the data
    if not files:
        raise UserError(f"{folder}: the folder holds no data file.", hint=f"Known: {FILE_TYPES}.")
    kinds = sorted({file_type(file) for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"{folder}: the folder holds files of several kinds ({', '.join(kinds)}).",
            hint=f"Choose one, for instance with {folder / ('*' + kinds[0])}.",
        )
    return files


def hub_fingerprint(spec: DatasetOptions) -> str:
    """What `datasets` names the content of a data set on the hub by."""
    return _hub_rows(spec, download=True)._fingerprint


def _read_hub(spec: DatasetOptions, *, download: bool) -> Iterator[Record]:
    import datasets

    rows, number = _hub_rows(spec, download=download), 0
    try:
        for row in rows:
            number += 1
            yield Record(row, f"{spec.path}:{spec.split}:{number}")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{spec.path}:{spec.split}:{number + 1}: the hub does not give this row: {_first_line(error)}.",
            hint="Check the network, and resume.",
            exit_code=1,
        ) from error


def _hub_rows(spec: DatasetOptions, *, download: bool) -> Dataset | IterableDataset:
    import datasets

    try:
        return without_decoding(datasets.load_dataset(spec.path, spec.name, split=spec.split, streaming=not download))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{spec.path} is neither a file or folder here nor a data set that the hub gives: {_first_line(error)}.",
            hint="Check the path, the network, `name` and `split`.",
        ) from error


def without_decoding(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """The rows with their images as {bytes, path}: they are decoded when a batch needs them, and not to be read."""
    import datasets

    for name, feature in (rows.features or {}).items():
        inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else feature)
        if isinstance(inner, datasets.Image):
            plain = datasets.Image(decode=False)
            rows = rows.cast_column(name, plain if inner is feature else datasets.Sequence(plain))
    return rows


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _check_renames(spec: DatasetOptions, found: set[str]) -> None:
    for theirs in spec.columns.values():
        if theirs not in found:
            raise UserError(
                f"{spec.path} has no column `{theirs}` (data.datasets[].columns); it has {', '.join(sorted(found))}."
            )


def _renamed(record: Record, spec: DatasetOptions) -> Record:
    theirs_of = spec.columns
    kept: dict[str, Any] = {column: value for column, value in record.row.items() if column not in theirs_of.values()}
    renamed = {ours: record.row[theirs] for ours, theirs in theirs_of.items() if theirs in record.row}
    return Record(kept | renamed, record.source)
