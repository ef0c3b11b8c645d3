"""Data sets that come from a hub: read over HTTP by `datasets` itself, whole or while they come."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

import pytest
from command_line import overrides, run
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
    """The quickstart's records, of which one column has another name."""
    records = [json.loads(line) for line in (quickstart / "dolly_short.jsonl").read_bytes().splitlines()]
    return [json.dumps({"question": r.pop("instruction"), **r}).encode() + b"\n" for r in records]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`with serve(files) as hub:`: processes that are started inside find the hub there."""

    @contextlib.contextmanager
    def open_hub(files: dict[str, bytes]) -> Iterator[Hub]:
        with serving(NAME, files) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
            yield hub

    return open_hub


@pytest.fixture
def train(ligertune, recipe, serve):
    def call(files: dict[str, bytes], **settings):
        with serve(files) as hub:
            done = ligertune("train", recipe, *overrides({**RUN, **settings}), "--json")
        return done, hub.bytes_sent

    return call


def test_a_set_is_downloaded_and_trained_on(train, rows):
    content = b"".join(rows)
    done, sent = train({"data/test.jsonl": content})
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert sent == len(content)


def test_a_stream_takes_no_more_than_it_needs(train, rows):
    content = b"".join(rows) * (150_000_000 // sum(map(len, rows)))  # `datasets` asks for 10 MB at a time
    done, sent = train({"data/test.jsonl": content}, **{"data.streaming": "true"})
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert 0 < sent < len(content) / 2


def test_a_row_that_the_hub_gives_broken_is_named(serve, rows, tmp_path):
    """Behind what `datasets` reads first, so that the run has begun by then."""
    sound = b"".join(rows) * (12_000_000 // sum(map(len, rows)))
    with serve({"data/test.jsonl": sound + b'{"question": \n'}):
        done = run([sys.executable, "-c", READ_ALL], cwd=tmp_path)
    assert done.code == 0, done.err
    read, exit_code, said = done.out.split(" ", 2)
    assert 0 < int(read) <= sound.count(b"\n")
    assert exit_code == "1"
    assert said.startswith(f"some/set:test:{int(read) + 1}: the hub does not give this row: ")


def test_a_split_that_is_not_there_is_one_sentence(train, rows):
    done, _ = train({"data/test.jsonl": b"".join(rows)}, **{"data.datasets.0.split": "train"})
    assert done.code == 2
    assert "some/set is neither a file or folder here nor a data set that the hub gives" in done.err
    assert "Traceback" not in done.err
