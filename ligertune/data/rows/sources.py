"""Record sources: the files, folders, globs or Hugging Face hub data set that a recipe names.

The source of a hub record is `path:split:row`, with rows from 1. The parts of a folder are in data_folders.py.
A slice of a split, `train[:90%]`, has the rows that `datasets` gives it: of files here too.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.data.rows.arrow_tables import TableRows, arrow_schema
from ligertune.data.rows.data_files import MAX_RECORD_BYTES, DataFile, Record, display_path, n_bytes_of
from ligertune.data.rows.data_folders import ALL, DEFAULT_SPLIT, Choice, files_in, no_configurations, unread_files
from ligertune.data.rows.file_readers import file_type, read_records, reader_of
from ligertune.data.rows.row_kind import check_columns
from ligertune.data.shapes.column_names import check_columns_exist, renamed_row
from ligertune.data.shapes.message_trees import TREE_COLUMNS, assemble_trees
from ligertune.errors import UserError, message_of
from ligertune.files.hub import why_unreachable

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ligertune.planning.options import DatasetOptions

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_UNKNOWN_SIZE = 10_000  # rows that a hub data set of unknown size is expected to have left
_HUB_ROWS_AT_ONCE = 100  # fewer than of a file: they are held in memory, and may be images


@dataclass
class RecordStream:
    """The first `max_samples` records of a data set in file order, with columns renamed by `columns`.

    sample: a rename must name a column of one of the first `sample` records. download: store a hub data set on this
    machine, instead of streaming it. max_bytes: records of more have no columns, and count as too large.
    """

    spec: DatasetOptions
    max_bytes: int = MAX_RECORD_BYTES
    sample: int = 100
    download: bool = False
    _read: int = 0
    _files: list[DataFile] = field(default_factory=list)

    def __iter__(self) -> Iterator[Record]:
        records: Iterator[Record] = islice(self._all(), self.spec.max_samples)
        if self.spec.columns:
            check_columns(self.spec.columns)
            first = list(islice(records, self.sample))
            check_columns_exist(self.spec.columns, [record.row for record in first], self.spec.path)
            records = (
                record._replace(row=renamed_row(record.row, self.spec.columns))
                for part in (first, records)
                for record in part
            )
        if self.spec.format in ("auto", "oasst"):
            records = _with_trees(records)
        self._read = 0
        for self._read, record in enumerate(records, start=1):
            yield record

    @property
    def share(self) -> float:
        """The share of the data set that was read, from 0 to 1. It is a guess for a hub data set of unknown size."""
        if self.spec.max_samples is not None:
            return self._read / self.spec.max_samples
        if self._files:
            return sum(file.share * file.size for file in self._files) / sum(file.size for file in self._files)
        return self._read / (self._read + _UNKNOWN_SIZE)

    def _all(self) -> Iterator[Record]:
        paths = files_of(self.spec)
        if not paths:
            yield from _read_hub(self.spec, self.max_bytes, download=self.download)
        rows = _rows_of_slice(self.spec, paths, self.max_bytes)
        self._files = [DataFile(path, self.max_bytes) for path in paths]
        records = chain.from_iterable(map(read_records, self._files))
        yield from records if rows is None else islice(records, rows.start, rows.stop)


def _rows_of_slice(spec: DatasetOptions, paths: list[Path], max_bytes: int) -> range | None:
    """Return the rows of a slice of files here; None for all of them. Percentages need a first pass, which counts."""
    if not paths or "[" not in spec.split:
        return None
    import datasets

    number = sum(1 for path in paths for _ in read_records(DataFile(path, max_bytes)))
    try:
        (found,) = datasets.ReadInstruction.from_spec(spec.split).to_absolute({_split_name(spec.split): number})
        if found.from_ >= found.to:
            raise ValueError("no row is left")
    except (AssertionError, ValueError) as error:
        raise UserError(
            f"{spec.path}: `split` is {spec.split:.200}, and the data set has {number:,} rows.",
            hint="Write one slice of them, for instance train[:90%] or train[100:200].",
        ) from error
    return range(found.from_, found.to)


def _split_name(split: str) -> str:
    """Return "train" for "train[:90%]"."""
    return split.partition("[")[0]


def _with_trees(records: Iterator[Record]) -> Iterator[Record]:
    """Return the records with message trees assembled, if the first record that is not too large has their columns."""
    head = []
    row: dict[str, Any] = {}
    while not row and (record := next(records, None)):
        head.append(record)
        row = record.row
    records = chain(head, records)
    return assemble_trees(records, row) if TREE_COLUMNS & row.keys() else records


def files_of(spec: DatasetOptions) -> list[Path]:
    """Return the data files that a data set names, sorted; none if it is one on the hub. Raises UserError."""
    choice = Choice(_split_name(spec.split), spec.name, spec.data_dir, spec.data_files)
    return find_files(spec.path, choice, revision=spec.revision)


def unread_note(spec: DatasetOptions) -> str:
    """Return a sentence on the files of a folder that are not read although they may be meant; else an empty text."""
    folder = Path(spec.path).expanduser()
    if not folder.is_dir() or spec.data_dir or spec.data_files or spec.name:
        return ""
    counts = unread_files(folder, files_of(spec))
    if not counts:
        return ""
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return (
        f"{display_path(folder)}: files in this folder that are not read: {listed}. Data files of one type are read, "
        "or .txt and .md files, of the topmost level that has any."
    )


def find_files(path: str, choice: Choice = ALL, *, revision: str | None = None) -> list[Path]:
    """Return the data files that `path` names, sorted, or none if it can only be the id of a data set on the hub.

    Raises UserError if nothing matches, if files that are no folder should have parts, if files here should have a
    revision, or if a folder holds files of several types.
    """
    found = _files_here(path, choice)
    if found and revision is not None:
        raise UserError(
            f"{path} is on this machine: `revision` chooses a version of a data set on the hub.", hint="Leave it out."
        )
    return found


def _files_here(path: str, choice: Choice) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        return files_in(place, choice)
    found = [place] if place.is_file() else []
    if not found and glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(str(place), recursive=True) if os.path.isfile(name))
        if not found:
            raise UserError(f"No file matches {path}.")
    if found and choice.name is not None:
        raise no_configurations(path)
    for key, is_given in (
        ("split", choice.split != DEFAULT_SPLIT),
        ("data_dir", choice.data_dir is not None),
        ("data_files", choice.data_files),
    ):
        if found and is_given:
            raise UserError(
                f"{path} is on this machine: `{key}` chooses among the parts of a folder, or of a data set on the hub.",
                hint="Leave it out and name the file you want in `path`.",
            )
    if found or (_HUB_ID.fullmatch(path) and reader_of(place) is None):
        return found
    raise UserError(f"No such file or folder: {path}.")


def _read_hub(spec: DatasetOptions, max_bytes: int, *, download: bool) -> Iterator[Record]:
    import datasets
    import pyarrow

    tables = hub_rows(spec, download=download).with_format("arrow").iter(_HUB_ROWS_AT_ONCE)
    number = 0
    try:
        for table in tables:
            for row in TableRows(table.schema).of(table):
                number += 1
                n_bytes = n_bytes_of(row)
                is_large = n_bytes > max_bytes
                yield Record({} if is_large else row, f"{spec.path}:{spec.split}:{number}", n_bytes * is_large)
    except (OSError, ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        reason = message_of(error).rstrip(".")
        raise UserError(
            f"{spec.path}:{spec.split}:{number + 1}: the hub does not return this row: {reason}.",
            hint="Check the network, and resume.",
            exit_code=1,
        ) from error


def hub_rows(spec: DatasetOptions, *, download: bool) -> Dataset | IterableDataset:
    """Return the rows of a hub data set, stored on this machine (`download`) or streamed, with images not decoded."""
    import datasets

    if not datasets.config.HF_HUB_OFFLINE and why_unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # it copies huggingface_hub's value when it is imported
    try:
        rows = datasets.load_dataset(
            spec.path,
            spec.name,
            data_dir=spec.data_dir,
            data_files=list(spec.data_files) or None,
            revision=spec.revision,
            split=spec.split,
            streaming=not download and "[" not in spec.split,  # `datasets` streams no slices
        )
        return without_decoding(rows)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        given = [key for key in ("data_dir", "data_files", "revision") if getattr(spec, key)]
        raise UserError(
            f"{spec.path} is neither a file or folder here nor a data set on the hub: {message_of(error).rstrip('.')}.",
            hint=f"Check the path, the network{''.join(f', `{key}`' for key in given)}, `name` and `split`.",
        ) from error


def class_names(spec: DatasetOptions, column: str) -> tuple[str, ...]:
    """Return the names of a ClassLabel column of `datasets`, on the hub or in a parquet or arrow file; else none."""
    files = files_of(spec)
    name = spec.columns.get(column, column)
    if not files:
        return _names_of_classes(hub_rows(spec, download=True).features, name)
    if file_type(files[0]) not in (".parquet", ".arrow", ".feather"):
        return ()
    import datasets

    found = {}
    for file in files:
        features = datasets.Features.from_arrow_schema(arrow_schema(DataFile(file)))
        found[_names_of_classes(features, name)] = file
    first, *others = found
    if others:
        raise UserError(
            f"{found[others[0]].name}: the names of `{name}` ({', '.join(others[0]) or 'none'}) are not those of "
            f"{found[first].name} ({', '.join(first) or 'none'}).",
            hint="Name the files as separate data sets: their ids are then read by name.",
        )
    return first


def _names_of_classes(features: Any, label: str) -> tuple[str, ...]:
    """Return the names of a ClassLabel feature of `datasets`, or of a list of them; empty for another feature."""
    feature = (features or {}).get(label)
    feature = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else feature)
    return tuple(getattr(feature, "names", None) or ())


def without_decoding(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Return the rows with images as {bytes, path}: they are decoded when a batch needs them, not when it is read."""
    import datasets

    for name, feature in (rows.features or {}).items():
        inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else feature)
        if isinstance(inner, datasets.Image):
            undecoded = datasets.Image(decode=False)
            rows = rows.cast_column(name, undecoded if inner is feature else datasets.Sequence(undecoded))
    return rows
