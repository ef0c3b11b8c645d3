"""The same rows give equal token ids and labels in every container.

The truth is the rows as Python values, which no file held. Where a container cannot hold a shape of rows, HOLDS_NOT
says why, so that a container that loses one more is noticed.
"""

import csv
import datetime
import gzip
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from ligertune.data.examples import Example, Preparation
from ligertune.data.row_pipeline import RowCounts, RowPipeline
from ligertune.data.rows import sources
from ligertune.data.rows.arrow_files import plain_rows
from ligertune.data.rows.sources import Record, RecordStream, class_names, find_files
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions

pytestmark = pytest.mark.corpus


def call(name: str, **arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"Do {name}.", "parameters": parameters}}


def asked(question: str, *answers: dict | str, **more: object) -> dict:
    turns = [a if isinstance(a, dict) else {"role": "assistant", "content": a} for a in answers]
    return {"messages": [{"role": "user", "content": question}, *turns], **more}


CALLS = [
    asked("Weather?", {"role": "assistant", "content": "", "tool_calls": [call("w", city="Oslo")]},
          {"role": "tool", "content": "3C"}, "It is 3C."),
    asked("Sum?", {"role": "assistant", "content": "", "tool_calls": [call("add", a=1, b=2, exact=True)]},
          {"role": "tool", "content": "3"}, "Three."),
    asked("Nothing?", "No call."),
]  # fmt: skip
# shape -> (rows of the task, the rows)
SHAPES: dict[str, tuple[str, list[dict]]] = {
    "alpaca": ("conversations", [{"instruction": "Add.", "input": "1 2", "output": "3"},
                                 {"instruction": "Say hi.", "input": "", "output": "Hi"}]),
    "messages": ("conversations", [asked("Hi", "Hello"), asked("Bye", "So long", )]),
    "unicode": ("conversations", [asked("Line\u2028sep \"q\" 🎈", "日本\n\ttab; a,b 'x'"), asked("é", "ß\\n")]),
    "system": ("conversations", [{"conversations": [{"from": "system", "value": "Be brief."},
                                                    {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
                                 {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B"},
                                                    {"from": "human", "value": "C?"}, {"from": "gpt", "value": "D"}]}]),
    "calls with other arguments": ("conversations", CALLS),
    "tools with other schemas": ("conversations", [
        asked("x", "y", tools=[tool("w", city={"type": "string"})]),
        asked("x", "y", tools=[tool("add", a={"type": "integer", "enum": [1, 2]}, b={"type": "integer"}), tool("t")]),
    ]),
    "arguments of other types": ("conversations", [
        asked("x", {"role": "assistant", "content": "", "tool_calls": [call("f", v=value)]})
        for value in (1, 2.5, "x", True, [1, "a"], {"k": []})
    ]),
    "nulls of the user": ("conversations", [
        asked("x", {"role": "assistant", "content": "", "tool_calls": [call("f", city=None, day="Monday")]}),
        asked("x", {"role": "assistant", "content": "", "tool_calls": [call("f", city="Oslo", day=None)]}),
    ]),
    "reasoning in some rows": ("conversations", [
        asked("x", {"role": "assistant", "content": "y", "reasoning_content": "because"}), asked("x", "z")]),
    "long": ("conversations", [asked("word " * 300, "answer " * 300)]),
    "weights of turns": ("conversations", [
        asked("x", {"role": "assistant", "content": "no", "weight": 0}, {"role": "user", "content": "again"},
              {"role": "assistant", "content": "yes", "weight": 1})]),
    "completion of text": ("conversations", [
        {"prompt": "1+1=", "completion": "2"}, {"prompt": "{x", "completion": "[1"}]),
    "completion of turns": ("conversations", [
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yo"}]}]),
    "raw text": ("conversations", [{"text": "Once upon a time."}, {"text": "{\"a\": 1}"}]),
    "pairs of texts": ("pairs", [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
                                 {"prompt": "Bye", "chosen": "So long", "rejected": "What"}]),
    "pairs of turns": ("pairs", [{"prompt": [{"role": "user", "content": "Hi"}],
                                  "chosen": [{"role": "assistant", "content": "Hello"}],
                                  "rejected": [{"role": "assistant", "content": "No"}]}]),
    "labelled answers": ("labelled", [{"prompt": "Hi", "completion": "Hello", "label": True},
                                      {"prompt": "Hi", "completion": "No", "label": False}]),
    "names of classes": ("texts", [{"text": "good film", "label": "yes"}, {"text": "a bad one", "label": "no"}]),
    "ids of classes": ("texts", [{"text": "good film", "label": 1}, {"text": "a bad one", "label": 0}]),
    "lists of classes": ("texts", [{"text": "good film", "label": ["a", "b"]}, {"text": "a bad one", "label": ["c"]}]),
    "numbers": ("texts", [{"text": "good film", "label": 0.75}, {"text": "a bad one", "label": -1.5}]),
}  # fmt: skip


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: list[dict], delimiter: str) -> bytes:
    """Return CSV with JSON text in the cells of lists and objects."""
    out = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, delimiter=delimiter)
    writer.writeheader()
    for row in rows:
        writer.writerow({name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()})
    return out.getvalue().encode()


def saved(path: Path, rows: list[dict]) -> None:
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(path)


def saved_with_splits(path: Path, rows: list[dict]) -> None:
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(path)


def arrow_stream(path: Path, rows: list[dict], compression: str | None = None) -> None:
    table = pa.Table.from_pylist(rows)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table)


def in_folder(write: Callable[[Path, list[dict]], object]) -> Callable[[Path, list[dict]], object]:
    """Write a file as the hub does: in a folder below, with a README, and another split beside it."""

    def call(path: Path, rows: list[dict]) -> None:
        (path / "data").mkdir(parents=True)
        (path / "README.md").write_text("about")
        write(path / "data" / "train-00000-of-00001.parquet", rows)
        write(path / "data" / "test-00000-of-00001.parquet", rows[:1])

    return call


def write_parquet(path: Path, rows: list[dict]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), path)


CONTAINERS: dict[str, Callable[[Path, list[dict]], object]] = {
    "r.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "r.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "r.jsonl.zst": lambda path, rows: path.write_bytes(pa.compress(lines(rows), "zstd", asbytes=True)),
    "list.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "pretty.json": lambda path, rows: path.write_text("\n".join(json.dumps(row, indent=2) for row in rows)),
    "data.json": lambda path, rows: path.write_text(json.dumps({"version": "1.0", "data": rows}, indent=1)),
    "comma.csv": lambda path, rows: path.write_bytes(as_csv(rows, ",")),
    "semicolon.csv": lambda path, rows: path.write_bytes(as_csv(rows, ";")),
    "r.tsv": lambda path, rows: path.write_bytes(as_csv(rows, "\t")),
    "struct.parquet": write_parquet,
    "struct.parquet.zst": lambda path, rows: (
        write_parquet(path, rows),
        path.write_bytes(pa.compress(path.read_bytes(), "zstd", asbytes=True)),
    ),
    "folder": in_folder(write_parquet),
    "json.parquet": lambda path, rows: datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path),
    "save_to_disk": saved,
    "splits": saved_with_splits,
    "stream.arrow": arrow_stream,
    "r.feather": lambda path, rows: feather.write_feather(pa.Table.from_pylist(rows), path, compression="lz4"),
}
_STRUCTS = {"struct.parquet", "struct.parquet.zst", "folder", "stream.arrow", "r.feather"}
_CSV = {"comma.csv", "semicolon.csv", "r.tsv"}
HOLDS_NOT = {
    # Arrow's structs have one type per field, and null for a field that a row lacks
    **dict.fromkeys(((name, "arguments of other types") for name in _STRUCTS), pa.ArrowException),
    **dict.fromkeys(((name, "nulls of the user") for name in _STRUCTS), "differs"),
    # the text `["a", "b"]` of a cell is a name
    **dict.fromkeys(((name, "lists of classes") for name in _CSV), "differs"),
}


def examples(rows: str, spec: DatasetOptions, tokenizer, records: list[Record]) -> list[Example]:
    pipeline = RowPipeline(
        spec, Preparation(DataOptions(datasets=[spec], max_length=4096), tokenizer, rows=rows), records
    )
    counts = RowCounts()
    found = pipeline.examples(records, counts)
    assert not counts.dropped, counts.dropped
    return found


def content(found: list[Example]) -> list[tuple]:
    return [
        (one.input_ids.tolist(), one.labels.tolist(), one.first_length, one.desirable, one.targets) for one in found
    ]


@pytest.fixture(scope="module")
def truth(corpus):
    """shape -> what the rows give as Python values, with their tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizers" / "qwen2.5")
    found = {}
    for shape, (task, rows) in SHAPES.items():
        records = [Record(row, f"memory:{number}") for number, row in enumerate(rows, start=1)]
        found[shape] = content(examples(task, DatasetOptions(path="memory"), tokenizer, records))
        assert len(found[shape]) == len(rows)
    return tokenizer, found


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_examples_of_the_rows(container, truth, tmp_path):
    tokenizer, expected = truth
    compared = 0
    for number, (shape, (task, rows)) in enumerate(SHAPES.items()):
        path = tmp_path / str(number) / container
        path.parent.mkdir()
        wrong = HOLDS_NOT.get((container, shape))
        if wrong is pa.ArrowException:
            with pytest.raises(wrong):
                CONTAINERS[container](path, rows)
            continue
        CONTAINERS[container](path, rows)
        spec = DatasetOptions(path=str(path))
        found = content(examples(task, spec, tokenizer, list(RecordStream(spec))))
        assert (found != expected[shape]) if wrong else (found == expected[shape]), shape
        compared += wrong is None
    assert compared >= 18


@pytest.mark.parametrize("download", [True, False], ids=["downloaded", "streamed"])
def test_rows_of_the_hub_are_those_of_files(download, truth, tmp_path, monkeypatch):
    """The loader of `datasets` reads files of this machine, as it reads those that it downloads."""
    tokenizer, expected = truth
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for shape in ("calls with other arguments", "tools with other schemas", "pairs of turns", "ids of classes",
                  "arguments of other types"):  # fmt: skip
        task, rows = SHAPES[shape]
        path = tmp_path / f"{len(shape)}.parquet"
        datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
        made = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=not download)
        monkeypatch.setattr(sources, "hub_rows", lambda *_, made=made, **__: made)
        spec = DatasetOptions(path="some/set")
        found = content(examples(task, spec, tokenizer, list(RecordStream(spec, download=download))))
        assert found == expected[shape], shape


def test_arrows_logical_types_are_the_values_that_json_holds():
    table = pa.table(
        {
            "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": [1, null]}', None])),
            "category": pa.array(["x", "y"]).dictionary_encode(),
            "view": pa.array(["long", "text"], pa.string_view()),
            "large": pa.array([["a"], None], pa.large_list(pa.large_string())),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "time": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5), None], pa.timestamp("us", "UTC")),
            "date": pa.array([datetime.date(2026, 1, 2), None]),
            "took": pa.array([datetime.timedelta(seconds=90), None]),
            "price": pa.array([Decimal("1.50"), Decimal("2.00")]),
            "bytes": pa.array([b"ab", b""]),
            "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
            "struct": pa.array([{"a": 1, "b": {"c": None}}, {"a": None, "b": None}]),
            "half": pa.array([0.5, 2.0]).cast(pa.float16()),
            "null": pa.nulls(2),
        }
    )
    first, second = plain_rows(table)
    assert first == {
        "json": {"a": [1, None]}, "category": "x", "view": "long", "large": ["a"], "map": {"k": 1},
        "time": "2026-01-02T03:04:05+00:00", "date": "2026-01-02", "took": 90.0, "price": 1.5, "bytes": b"ab",
        "fixed": [1, 2], "struct": {"a": 1, "b": {}}, "half": 0.5, "null": None,
    }  # fmt: skip
    assert second == {
        "json": None, "category": "y", "view": "text", "large": None, "map": {}, "time": None, "date": None,
        "took": None, "price": 2, "bytes": b"", "fixed": [3, 4], "struct": {}, "half": 2.0, "null": None,
    }  # fmt: skip
    json.dumps({name: value for name, value in first.items() if name != "bytes"})


def test_fixed_arrays_of_datasets_are_lists():
    features = datasets.Features(
        {"grid": datasets.Array2D((2, 2), "int64"), "tag": datasets.ClassLabel(names=["n", "y"])}
    )
    made = datasets.Dataset.from_dict({"grid": [[[1, 2], [3, 4]]], "tag": [1]}, features=features)
    (row,) = plain_rows(made.with_format("arrow")[:])
    assert row == {"grid": [[1, 2], [3, 4]], "tag": 1}


@pytest.mark.parametrize("name", ["r.parquet", "r.arrow", "r.parquet.gz"])
def test_the_names_of_a_class_label_are_read_from_every_arrow_container(name, tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    made = datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
    path = tmp_path / name
    if name == "r.arrow":
        made.save_to_disk(tmp_path / "saved")
        path = tmp_path / "saved"
    else:
        made.to_parquet(path)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert class_names(DatasetOptions(path=str(path)), "label") == ("no", "yes")


LAYOUTS = {
    "splits by file": (["train.jsonl", "test.jsonl", "README.md"], "train", ["train.jsonl"]),
    "the split that is asked for": (["train.jsonl", "dev.jsonl"], "validation", ["dev.jsonl"]),
    "splits by folder": (["train/a.csv", "train/b.csv", "val/c.csv"], "train", ["train/a.csv", "train/b.csv"]),
    "shards": (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], "train",
               ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
    "no split": (["b.jsonl", "a.jsonl", ".hidden.jsonl", "dataset_info.json"], "train", ["a.jsonl", "b.jsonl"]),
    "words in words": (["latest.jsonl", "constrained.jsonl"], "train", ["constrained.jsonl", "latest.jsonl"]),
    "a folder below": (["deep/er/a.jsonl.zst"], "train", ["deep/er/a.jsonl.zst"]),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_the_hubs_layout_gives_the_files_of_its_split(layout, tmp_path):
    names, split, expected = LAYOUTS[layout]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = find_files(DatasetOptions(path=str(tmp_path), split=split))
    assert [file.relative_to(tmp_path).as_posix() for file in found] == expected


REFUSED = {
    "no train": (["test.jsonl", "dev.jsonl"], {}, r"has no split `train`; it has test, validation\. .*split: test"),
    "another split": (["train.jsonl"], {"split": "test"}, "has no split `test`; it has train"),
    "a split of files without": (["a.jsonl"], {"split": "test"}, "say no split, and the recipe asks for `test`"),
    "a file of no split": (["train.jsonl", "extra.jsonl"], {}, "extra.jsonl, whose name says no split"),
    "two types": (["train.jsonl", "train.csv"], {}, r"several types \(.csv, .jsonl\)"),
    "no data": (["README.md"], {}, "holds no data file"),
    "a part by name": (["a.jsonl"], {"name": "en"}, "`name` chooses among the parts of a data set on the hub"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_whose_data_are_not_clear_is_refused(case, tmp_path):
    names, options, words = REFUSED[case]
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=words):
        find_files(DatasetOptions(path=str(tmp_path), **options))


def test_the_splits_of_a_saved_data_set_dict_are_chosen_by_name(tmp_path):
    saved_with_splits(tmp_path / "s", [{"text": "a"}, {"text": "b"}])
    spec = DatasetOptions(path=str(tmp_path / "s"), split="test")
    assert [record.row for record in RecordStream(spec)] == [{"text": "a"}]
    with pytest.raises(UserError, match="has no split `other`; it has train, test"):
        find_files(DatasetOptions(path=str(tmp_path / "s"), split="other"))
    (tmp_path / "s" / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow is missing, which state\.json lists"):
        find_files(DatasetOptions(path=str(tmp_path / "s")))
    (tmp_path / "s" / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    with pytest.raises(UserError, match="does not list the names of splits"):
        find_files(DatasetOptions(path=str(tmp_path / "s")))


DAMAGED = {
    "cut.parquet": (lambda data: data[:-30], "not a valid parquet file"),
    "cut.arrow": (lambda data: data[: len(data) // 2], "not a valid Arrow file"),
    "garbage.feather": (lambda data: b"\xff" * 200, "not a valid Arrow file"),
    "empty.arrow": (lambda data: b"", "not a valid Arrow file"),
    "empty.parquet": (lambda data: b"", "not a valid parquet file"),
    "cut.jsonl.zst": (
        lambda data: pa.compress(b'{"a": 1}\n' * 999, "zstd", asbytes=True)[:-4],
        "not a valid zstd file",
    ),
    "not.jsonl.zst": (lambda data: b'{"a": 1}\n', "not a valid zstd file"),
    "wrong.parquet": (lambda data: b'{"a": 1}\n', "not a valid parquet file"),
    "wrong.jsonl": (lambda data: data, "not UTF-8"),
    "deep.json": (lambda data: b'{"a":\n' + b"[" * 200_000, "not JSON"),
    "open.json": (lambda data: b'{"version": 1,\n"data": [\n{"a": 1},\n', "cut off"),
    "comma.json": (lambda data: b'{"version": 1\n"data": []}', "no comma between two keys"),
    "two.json": (lambda data: b'{"version": 1,\n"data": [{"a": 1}]}\n{"b": 1}', "text after the end of the object"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_container_is_one_sentence_with_its_place(name, tmp_path):
    harm, words = DAMAGED[name]
    whole = tmp_path / "whole"
    if "arrow" in name or "feather" in name:
        arrow_stream(whole, [{"text": "word " * 20}] * 50)
    else:
        write_parquet(whole, [{"text": "word " * 20}] * 50)
    (tmp_path / name).write_bytes(harm(whole.read_bytes()))
    with pytest.raises(UserError, match=words) as caught:
        list(RecordStream(DatasetOptions(path=str(tmp_path / name))))
    assert f"{name}:" in str(caught.value) and caught.value.exit_code == 2


def test_a_single_record_on_several_lines_keeps_its_lists(tmp_path):
    """Only an object that names its list `data`, `rows` or the like is a whole data set."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for text in (json.dumps(row), json.dumps(row, indent=1)):
        (tmp_path / "r.json").write_text(text)
        assert [record.row for record in RecordStream(DatasetOptions(path=str(tmp_path / "r.json")))] == [row]


def test_records_of_a_whole_data_set_have_their_lines(tmp_path):
    (tmp_path / "r.json").write_text('{"version": "1.0",\n"data": [{"a": 1},\n {"a": 2}\n], "more": {"b": [1]}}\n')
    found = [(record.row, record.source) for record in RecordStream(DatasetOptions(path=str(tmp_path / "r.json")))]
    assert found == [({"a": 1}, f"{tmp_path / 'r.json'}:2"), ({"a": 2}, f"{tmp_path / 'r.json'}:3")]
