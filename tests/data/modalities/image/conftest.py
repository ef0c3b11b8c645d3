"""Small saved models of every vision family, and fixtures that prepare rows with images for them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL import Image
from support.data.image_batches import image_row
from support.models import tiny_vlms
from transformers import AutoTokenizer

from ligertune.data.prepare import PreparedData, prepare
from ligertune.planning.options import DataOptions, DatasetOptions


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """The saved model of a family."""
    return cache(lambda family: tiny_vlms.save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def reader_of(folder_of) -> Callable:
    return cache(lambda family: tiny_vlms.reader_of(folder_of(family)))


@pytest.fixture(scope="session")
def tokenizer_of(folder_of) -> Callable:
    return cache(lambda family: AutoTokenizer.from_pretrained(folder_of(family)))


@pytest.fixture(scope="session")
def image_paths(tmp_path_factory) -> dict[str, Path]:
    """Three images of different sizes, none a multiple of a patch."""
    folder = tmp_path_factory.mktemp("images")
    sizes = {"red": (100, 60), "blue": (57, 140), "green": (64, 64)}
    for colour, size in sizes.items():
        Image.new("RGB", size, colour).save(folder / f"{colour}.png")
    return {colour: folder / f"{colour}.png" for colour in sizes}


@pytest.fixture
def prepared_for(reader_of, tokenizer_of, tmp_path) -> Callable[..., PreparedData]:
    """prepared_for(family, rows, dataset={...}, **data section); rows: a path, or records to write to rows.json."""

    def of(family: str, rows, *, dataset: dict | None = None, has_reader: bool = True, **data) -> PreparedData:
        path = rows if isinstance(rows, Path) else tmp_path / "rows.json"
        if path is not rows:
            path.write_text(json.dumps(rows), encoding="utf-8")
        sets = [DatasetOptions(path=str(path), **(dataset or {}))]
        spec = DataOptions(datasets=sets, **{"cache": False, "num_proc": 1, **data})
        return prepare(spec, tokenizer_of(family), seed=0, reader=reader_of(family) if has_reader else None)

    return of


@pytest.fixture
def four_rows(prepared_for, image_paths) -> Callable[[str], PreparedData]:
    """Of a family: one image, an image of another shape, two separate images, text only."""
    rows = [
        image_row("<image>\nWhat is this?", "Yes. It is a red square.", image_paths["red"]),
        image_row("Who are they? <image>", "a system", image_paths["blue"]),
        image_row("<image> and <image> in 2015?", "They are a system", image_paths["green"], image_paths["red"]),
        image_row("What is the value of 38?", "It is 2015."),
    ]
    return lambda family: prepared_for(family, rows)
