"""One data set, from its files, or from the cache, to labelled examples in a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.data.blocks import Block
from ligertune.data.cache import Writer, cache_home, kept
from ligertune.data.fingerprint import data_key
from ligertune.data.row_pipeline import RowPath, Tally
from ligertune.data.rows.conversation import REASONS
from ligertune.data.rows.formats import check_columns, recognise
from ligertune.data.rows.image_rows import ImagePlaces
from ligertune.data.rows.sources import Record, RecordStream, shown_path
from ligertune.data.workers import blocks_of, count_processes
from ligertune.errors import UserError
from ligertune.hardware import is_first_on_node, ranks_on_node

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.vision.reader import ImageReader

# (data set, rows done, share of them all): called as the rows are done
Progress = Callable[[str, int, float], None]
_FIRST = 5000  # records whose columns say what format all have; only so many are held in memory


@dataclass(frozen=True)
class LoadedSet:
    """The examples of one data set, and what was counted on the way."""

    path: str
    format: str
    template: str
    block: Block
    tally: Tally
    cached: bool


def load(
    spec: DatasetOptions,
    data: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress | None = None,
    images: ImageReader | None = None,
) -> LoadedSet:
    """The cache's examples if it has them, else the files', which the cache then keeps."""
    check_columns(spec.columns)
    key = data_key(spec, data, tokenizer, images) if data.cache else None
    making = Making(spec, data, tokenizer, progress, ranks=1 if key else ranks_on_node(), images=images)
    if key is None:
        block = Block.joined(list(making.blocks()))
        about = making.about()
    else:
        try:
            entry = kept(key, making.write, first=is_first_on_node())
        except OSError as error:
            raise UserError(
                f"The cache of prepared data, {cache_home()}, cannot be used: {error.strerror or error}.",
                hint="Name another folder in the environment variable LIGERTUNE_CACHE, or write data.cache: false.",
                exit_code=1,
            ) from error
        block, about = entry.block, entry.about
    loaded = LoadedSet(block=block, cached=not making.done, **{**about, "tally": _tally(about["tally"])})
    if not len(block):
        raise _nothing_left(loaded)
    if loaded.cached:
        _check_pictures(block.pictures)
    return loaded


def image_places(data: DataOptions, images: ImageReader | None) -> ImagePlaces | None:
    """What puts images into rows; images that a data set holds as bytes become files beside the cache."""
    return None if images is None else ImagePlaces(images, data.image_dir, cache_home().with_name("images"))


def _check_pictures(pictures: Sequence[str]) -> None:
    """Complains now, and not in the middle of training, of pictures that went away since their rows were prepared."""
    for path in pictures:
        if not Path(path).is_file():
            raise UserError(
                f"{path}: this image was there when the data was prepared, and is gone.",
                hint="Put it back, or write data.cache: false to prepare the data again.",
            )


class Making:
    """The way from the files to blocks, gone once and only if it must be."""

    def __init__(
        self,
        spec: DatasetOptions,
        data: DataOptions,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress | None,
        *,
        ranks: int,
        images: ImageReader | None = None,
    ) -> None:
        self.done = False
        self._spec, self._data, self._tokenizer = spec, data, tokenizer
        self._show = progress or (lambda path, done, share: None)
        self._processes = max(1, count_processes(data.num_proc) // ranks)
        self._images = images
        self._path = shown_path(Path(spec.path))
        self._tally = Tally()

    def blocks(self) -> Iterator[Block]:
        """The examples, some at a time."""
        stream = RecordStream(self._spec, sample=_FIRST, download=True)
        records = iter(stream)
        first = list(islice(records, _FIRST))
        if not first:
            raise UserError(f"{self._spec.path} holds no records.")
        rows = self._rows(first)
        for block, tally in blocks_of(rows, chain(first, records), processes=self._processes):
            self._tally.add(tally)
            self._show(self._path, self._tally.rows_read, stream.share)
            yield block
        self._show(self._path, self._tally.rows_read, 1.0)
        self.done = True

    def write(self, writer: Writer) -> dict[str, Any]:
        for block in self.blocks():
            writer.add(block)
        return self.about()

    def about(self) -> dict[str, Any]:
        """What is to be said of the blocks, once they are made; it can be written as JSON."""
        return {"path": self._path, "format": self._format, "template": self._template, "tally": vars(self._tally)}

    def _rows(self, first: list[Record]) -> RowPath:
        format = recognise(self._spec.format, {column for record in first for column in record.row}, self._path)
        rows = RowPath(self._spec, self._data, format, self._tokenizer, image_places(self._data, self._images))
        self._format, self._template = format.name, rows.template.name
        return rows


def _tally(counts: dict[str, Any]) -> Tally:
    """As it was before it was written: counters are counters again."""
    counters = {field.name for field in fields(Tally) if field.default_factory is Counter}
    return Tally(**{name: Counter(value) if name in counters else value for name, value in counts.items()})


def _nothing_left(loaded: LoadedSet) -> UserError:
    """The complaint for a data set of which every row was dropped."""
    reason, source = next(iter(loaded.tally.first_dropped.items()))
    counts = ", ".join(f"{count} {reason}" for reason, count in loaded.tally.dropped.most_common())
    untrained = set(loaded.tally.dropped) == {"no trained token"}
    what = "0 % of its tokens would be trained" if untrained else "no row can be used"
    return UserError(
        f"{loaded.path}: {what}: all {loaded.tally.rows_read} are dropped ({counts}), the first at {source}.",
        hint=f"{reason}: {REASONS[reason]}.",
    )
