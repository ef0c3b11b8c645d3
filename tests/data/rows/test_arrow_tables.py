"""Values of parquet files, arrow files and hub data sets are what their logical types say, as plain Python values."""

import datetime
import decimal
import json
import uuid

import datasets
import pyarrow
import pytest
from pyarrow import ipc, parquet

from ligertune.data.rows import arrow_tables
from ligertune.data.rows.sources import RecordStream, class_names
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions

UTC = datetime.timezone.utc
UUID = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")
JSON = ['{"a":1}', '"x"', None]
TEXTS = ["a", "b", None, "a"]
# name -> (column, its values)
COLUMNS = {
    "json": (pyarrow.array(['{"a":[1,null]}', "7", None, "null"], pyarrow.json_()), [{"a": [1, None]}, 7, None, None]),
    "list of json": (pyarrow.ListArray.from_arrays([0, 1, None, 1, 3], pyarrow.array(JSON, pyarrow.json_())),
                     [[{"a": 1}], [], None, ["x", None]]),
    "category": (pyarrow.array(TEXTS).dictionary_encode(), TEXTS),
    "large text": (pyarrow.array(TEXTS, pyarrow.large_string()), TEXTS),
    "text view": (pyarrow.array(TEXTS, pyarrow.string_view()), TEXTS),
    "large list": (pyarrow.array([[1], [], None, [2]], pyarrow.large_list(pyarrow.int8())), [[1], [], None, [2]]),
    "list of fixed size": (pyarrow.array([[1], None], pyarrow.list_(pyarrow.int8(), 1)).take([0, 1, 0, 1]),
                           [[1], None, [1], None]),
    "struct": (pyarrow.array([{"a": 1}, {"b": {"c": "x"}}, None, {"a": None, "b": {"d": [None, 1]}}]),
               [{"a": 1}, {"b": {"c": "x"}}, None, {"b": {"d": [None, 1]}}]),
    "list of structs": (pyarrow.array([[{"a": 1}, None, {"b": 2}], [], None, [{"a": None}]]),
                        [[{"a": 1}, None, {"b": 2}], [], None, [{}]]),
    "map": (pyarrow.array([[("k", 1), ("l", None)], [], None, [("m", 2)]], pyarrow.map_("string", "int8")),
            [{"k": 1, "l": None}, {}, None, {"m": 2}]),
    "timestamp": (pyarrow.array([datetime.datetime(2024, 5, 1, 10, 30), None, None, datetime.datetime(1969, 1, 1)]),
                  ["2024-05-01T10:30:00", None, None, "1969-01-01T00:00:00"]),
    "timestamp with zone": (pyarrow.array([datetime.datetime(2024, 5, 1, tzinfo=UTC)] * 4),
                            ["2024-05-01T00:00:00+00:00"] * 4),
    "date": (pyarrow.array([datetime.date(2024, 5, 1), None, None, None]), ["2024-05-01", None, None, None]),
    "time": (pyarrow.array([datetime.time(10, 30), None, None, None]), ["10:30:00", None, None, None]),
    "duration": (pyarrow.array([datetime.timedelta(minutes=1.5)] * 4), [90.0] * 4),
    "decimal": (pyarrow.array([decimal.Decimal("1.50"), None, None, decimal.Decimal("2.00")]), [1.5, None, None, 2.0]),
    "half": (pyarrow.array([0.5, None, None, 2.0], pyarrow.float16()), [0.5, None, None, 2.0]),
    "uuid": (pyarrow.array([UUID.bytes] * 4, pyarrow.uuid()), [str(UUID)] * 4),
    "bytes": (pyarrow.array([b"\xff", None, b"", b"a"]), [b"\xff", None, b"", b"a"]),
}  # fmt: skip
TABLE = pyarrow.table({name: column for name, (column, _) in COLUMNS.items()})


def read(path, **spec) -> list[dict]:
    return [record.row for record in RecordStream(DatasetOptions(path=str(path), **spec))]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_values_are_those_of_the_logical_types(ending, tmp_path):
    path = tmp_path / f"d.{ending}"
    if ending == "parquet":
        parquet.write_table(TABLE, path)
    else:
        with ipc.new_file(path, TABLE.schema) as writer:
            writer.write_table(TABLE)
    rows = read(path)
    for name, (_, values) in COLUMNS.items():
        assert [row[name] for row in rows] == values, name
    json.dumps([{name: value for name, value in row.items() if name != "bytes"} for row in rows])


def test_json_that_only_datasets_knows_of_is_parsed(tmp_path):
    """Another writer may have kept the features of `datasets`, but not the type of the column."""
    features = {"a": {"feature": {"_type": "Json"}, "_type": "List"}, "b": [{"c": {"_type": "Json"}}]}
    table = pyarrow.table({"a": [['{"x": 1}']], "b": [[{"c": "[1]"}]], "text": ['{"x": 1}']})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet") == [{"a": [{"x": 1}], "b": [{"c": [1]}], "text": '{"x": 1}'}]


def test_a_logical_type_that_only_parquet_has_is_read(tmp_path):
    """Writers other than pyarrow do not store an arrow schema."""
    table = pyarrow.table({"a": pyarrow.array(['{"x": null}'], pyarrow.json_())})
    parquet.write_table(table, tmp_path / "d.parquet", store_schema=False)
    assert read(tmp_path / "d.parquet") == [{"a": {"x": None}}]


def test_columns_of_a_list_of_json_hold_messages_and_tools(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
           "tools": [{"name": "f", "parameters": {"n": None}}]}  # fmt: skip
    kind = datasets.List(datasets.Json())
    table = datasets.Dataset.from_list([row], features=datasets.Features(messages=kind, tools=kind))
    table.to_parquet(tmp_path / "d.parquet")
    table.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "d.parquet") == read(tmp_path / "saved") == [row]


def test_json_that_is_none_is_an_error_with_its_row(tmp_path):
    storage = pyarrow.array(["{}", '{"a"', "{}"])
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), storage)
    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "a": column}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"d\.parquet:2: the column `a` holds a value that is not JSON"):
        read(tmp_path / "d.parquet")


def test_names_of_classes_are_found_in_every_container(tmp_path):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"]))
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
    table.to_parquet(tmp_path / "d.parquet")
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "d.parquet", tmp_path / "saved"):
        assert class_names(DatasetOptions(path=str(path)), "label") == ("bad", "good")
        assert read(path) == [{"text": "a", "label": 1}]


@pytest.fixture
def content(tmp_path) -> dict[str, bytes]:
    """The bytes of a table in each format."""
    table = pyarrow.table({"text": [f"text {n}" for n in range(5000)]})
    parquet.write_table(table, tmp_path / "d.parquet")
    for name, new in (("file", ipc.new_file), ("stream", ipc.new_stream)):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    return {name: (tmp_path / name).read_bytes() for name in ("d.parquet", "file", "stream")}


@pytest.mark.parametrize("kind", ["d.parquet", "file", "stream"])
def test_a_file_that_is_cut_off_is_refused_wherever_it_is_cut(kind, content, tmp_path):
    whole = content[kind]
    path = tmp_path / ("cut.parquet" if kind == "d.parquet" else "cut.arrow")
    path.write_bytes(whole)
    assert len(read(path)) == 5000
    for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 500, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=rf"{path.name}:\d+: (not a valid|the arrow file is cut off)") as error:
            read(path)
        assert error.value.exit_code == 2


def test_a_stream_that_is_cut_between_two_batches_is_refused(content, tmp_path):
    """Arrow reads it as a stream that ends there: only the missing end mark tells."""
    table = pyarrow.table({"text": ["a"] * 100})
    with ipc.new_stream(tmp_path / "first.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "cut.arrow").write_bytes((tmp_path / "first.arrow").read_bytes()[:-8])
    assert len(ipc.open_stream((tmp_path / "cut.arrow").read_bytes()).read_all()) == 100
    with pytest.raises(UserError, match="cut off"):
        read(tmp_path / "cut.arrow")


def test_a_table_that_decompresses_to_too_much_is_refused(content, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "MAX_PASSED", 10_000)
    for name, kind in (("d.parquet.zst", "d.parquet"), ("d.arrow.zst", "file")):
        (tmp_path / name).write_bytes(pyarrow.compress(content[kind], codec="zstd", asbytes=True))
        with pytest.raises(UserError, match="more than 10,000 bytes when decompressed"):
            read(tmp_path / name)


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    with ipc.new_file(tmp_path / "d.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="two columns have the name `text`"):
        read(tmp_path / "d.arrow")
