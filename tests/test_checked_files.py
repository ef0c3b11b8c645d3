"""Files that another process wrote: bounded JSON, and values of the types that a dataclass names."""

import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from ligertune.files.checked_files import DamagedFileError, open_regular, parse_fields, read_fields, read_json_value


@dataclass(frozen=True)
class Record:
    name: str
    count: int = field(metadata={"range": (1, 100)})
    share: float
    parent: str | None = None
    is_last: bool = False
    kind: Literal["a", "b"] = "a"


RIGHT = {"name": "n", "count": 3, "share": 1, "unknown": []}


def test_a_record_is_read_with_its_types():
    found = parse_fields(Record, RIGHT)
    assert found == Record("n", 3, 1.0) and type(found.share) is float
    assert parse_fields(Record, {**RIGHT, "parent": "p", "is_last": True, "kind": "b"}) == Record(
        "n", 3, 1.0, "p", True, "b"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"name": 1}, {"name": None}, {"count": 0}, {"count": 101}, {"count": 3.0}, {"count": "3"}, {"count": True},
        {"count": 10**400}, {"share": float("nan")}, {"share": float("inf")}, {"share": 10**400}, {"share": "x"},
        {"share": True}, {"kind": "c"}, {"kind": []}, {"parent": 1}, {"parent": []}, {"is_last": 0},
        {"name": {"a": [1]}},
    ],
    ids=lambda change: str(change)[:30],
)  # fmt: skip
def test_a_value_of_another_type_or_range_is_damage(change):
    (name,) = change
    with pytest.raises(DamagedFileError, match=f"holds a wrong {name}: .{{1,40}}$"):
        parse_fields(Record, {**RIGHT, **change})


def test_missing_keys_and_other_values_are_damage():
    with pytest.raises(DamagedFileError, match="lacks count"):
        parse_fields(Record, {"name": "n", "share": 1.0})
    for values in ([], None, "text", 3):
        with pytest.raises(DamagedFileError, match="does not hold an object"):
            parse_fields(Record, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not a valid JSON file: Expecting value"),
        (b"\xff\xfe\xfd", "is not a valid JSON file"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested too deeply"),
        (b"1" * 5000, "is not a valid JSON file"),
        (b"[" + b" " * 2**20 + b"]", "has more than 1 MiB"),
    ],
    ids=["empty", "no UTF-8", "deep and cut", "deep", "5000 digits", "long"],
)
def test_a_damaged_file_says_why(text, words, tmp_path):
    path = tmp_path / "f.json"
    path.write_bytes(text)
    with pytest.raises(DamagedFileError, match=words):
        read_json_value(path, most=2**20)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            open_regular(path)
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            read_fields(Record, path)
    with pytest.raises(FileNotFoundError):
        read_fields(Record, tmp_path / "none")
