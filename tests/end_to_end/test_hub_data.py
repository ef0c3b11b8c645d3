"""Data sets of a hub, which `datasets` downloads or streams over HTTP from a server of the test."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

import pytest
from command_line import Done, run, train_command
from hub_server import Hub, serving

NAME = "some/set"
RUN = {
    "data.datasets.0.path": NAME,
    "data.datasets.0.split": "test",
    "data.datasets.0.columns": "{instruction: question}",
    "data.datasets.0.max_samples": "null",
    "data.val_split": 0,
    "train.max_steps": 2,
    "checkpoint.output_dir": "run",
}

READ_ALL = """
from ligertune.data.rows.sources import RecordStream
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions
read = 0
try:
    for _ in RecordStream(DatasetOptions(path="some/set", split="test")):
        read += 1
except UserError as error:
    print(read, error.exit_code, error)
"""


@pytest.fixture
def rows(quickstart) -> list[bytes]:
    """The quickstart's records with `instruction` renamed to `question`."""
    records = [json.loads(line) for line in (quickstart / "dolly_short.jsonl").read_bytes().splitlines()]
    return [json.dumps({"question": r.pop("instruction"), **r}).encode() + b"\n" for r in records]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`with serve(files) as hub:` serve them to processes that start inside the block."""

    @contextlib.contextmanager
    def open_hub(files: dict[str, bytes]) -> Iterator[Hub]:
        with serving(NAME, files) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
            yield hub

    return open_hub


@pytest.fixture
def train(serve, tmp_path):
    """train(files, **settings): the finished command in a new process and the bytes that the hub sent."""

    def call(files: dict[str, bytes], **settings) -> tuple[Done, int]:
        with serve(files) as hub:
            done = run(train_command("--json", **{**RUN, **settings}), cwd=tmp_path)
        return done, hub.bytes_sent

    return call


def test_a_data_set_is_downloaded_once_and_trained_on(train, rows):
    content = b"".join(rows)
    done, sent = train({"data/test.jsonl": content})
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert sent == len(content)


def test_a_stream_downloads_less_than_half_of_a_large_data_set(train, rows):
    content = b"".join(rows) * (150_000_000 // sum(map(len, rows)))  # `datasets` requests 10 MB at a time
    done, sent = train({"data/test.jsonl": content}, **{"data.streaming": "true"})
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert 0 < sent < len(content) / 2


def test_an_invalid_row_of_a_hub_data_set_is_named(serve, rows, tmp_path):
    """The invalid row lies behind the part that `datasets` reads first, so the run has begun by then."""
    valid = b"".join(rows) * (12_000_000 // sum(map(len, rows)))
    with serve({"data/test.jsonl": valid + b'{"question": \n'}):
        done = run([sys.executable, "-c", READ_ALL], cwd=tmp_path)
    assert done.code == 0, done.err
    read, exit_code, said = done.out.split(" ", 2)
    assert 0 < int(read) <= valid.count(b"\n")
    assert exit_code == "1"
    assert said.startswith(f"some/set:test:{int(read) + 1}: the hub does not give this row: ")


def test_a_missing_split_is_refused_with_one_sentence(train, rows):
    done, _ = train({"data/test.jsonl": b"".join(rows)}, **{"data.datasets.0.split": "train"})
    assert done.code == 2
    assert "some/set is neither a file or folder here nor a data set that the hub gives" in done.err
    assert "Traceback" not in done.err
