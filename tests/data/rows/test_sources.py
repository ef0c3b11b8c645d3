"""Data files of every type are read record by record with their source; broken ones are one-sentence errors."""

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from ligertune.data.rows import data_files, file_readers
from ligertune.data.rows.sources import Record, RecordStream, find_files
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions

ROWS = [
    {"instruction": "a\u2028b", "output": 'x, "y"\nz'},  # characters that might split lines, cells and strings
    {"instruction": "é", "output": "你好"},
    {"instruction": "c", "output": "d"},
]
ZST = pyarrow.compress(b'{"a": 1}\n' * 99, codec="zstd", asbytes=True)


def write(path: Path, rows: list[dict]) -> Path:
    kind, content = Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix, io.BytesIO()
    if kind == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), content)
    elif kind == ".csv":
        quoted = (",".join('"' + value.replace('"', '""') + '"' for value in row.values()) for row in rows)
        content.write("\n".join(["instruction,output", *quoted]).encode())
    elif kind == ".json":
        content.write(json.dumps(rows, ensure_ascii=False, indent=2).encode())
    else:
        content.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    packed = content.getvalue()
    if path.suffix == ".gz":
        packed = gzip.compress(packed)
    if path.suffix == ".zst":
        packed = pyarrow.compress(packed, codec="zstd", asbytes=True)
    path.write_bytes(packed)
    return path


def read(path: Path, **spec) -> list[Record]:
    return list(RecordStream(DatasetOptions(path=str(path), **spec)))


LINES = {".json": [2, 6, 10], ".jsonl": [1, 2, 3], ".csv": [2, 4, 5], ".parquet": [1, 2, 3]}


@pytest.mark.parametrize("ending", LINES)
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_every_type_gives_the_same_rows_with_the_lines_they_begin_on(tmp_path, ending, compression):
    path = write(tmp_path / f"rows{ending}{compression}", ROWS)
    records = read(path)
    assert [record.row for record in records] == ROWS
    assert [record.source for record in records] == [f"{path}:{line}" for line in LINES[ending]]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'{"a": 1}\n\n \t\n{"a": 2}', "rows.json"),
        (b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n', "rows.jsonl"),
        (b'[{"a": 1},\r\n {"a": 2}]\n', "rows.jsonl"),
        (b'\xef\xbb\xbf \n [ {"a": 1} , {"a": 2} ] \n', "rows.json"),
        (b'{\n "a": 1\n}\n{\n "a": 2\n}\n', "rows.json"),
        (b'\xef\xbb\xbf\r\n{\r\n"a":\r\n1}\r\n{"a": 2}', "rows.jsonl"),
        (b'{"a": 1}{"a": 2}', "rows.json"),
        (b'{"version": "1.0",\n"data": [{"a": 1},\n{"a": 2}]}', "rows.json"),
        (b'{"data": [{"a": 1}, {"a": 2}], "tags": ["x"], "about": {"n": [{}]}}\n', "rows.json"),
        (b'{"rows":\n[\n{"a": 1},\n{"a": 2}\n]\n}\n\n', "rows.jsonl"),
    ],
    ids=[
        "blank lines",
        "BOM and CRLF",
        "list",
        "BOM and list",
        "objects",
        "objects and CRLF",
        "objects in a line",
        "object with a list",
        "object in a line",
        "object over lines",
    ],
)
def test_the_form_of_json_is_recognised_by_the_content(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    assert [record.row for record in read(tmp_path / name)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}]},
        {"conversation": [{"human": "a", "assistant": "b"}]},
        {"dialog": [{"speaker": "user", "text": "a"}], "id": 1},
        {"query": "q", "answers": [{"name": "f", "arguments": {}}], "tools": [{"name": "f"}]},
        {"instruction": "i", "output": "o", "sources": [{"title": "t"}]},
        {"data": []},
    ],
    ids=lambda row: next(iter(row)),
)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_with_one_row_holds_that_row_and_not_the_items_of_its_list(tmp_path, row, indent):
    (tmp_path / "r.json").write_text(json.dumps(row, indent=indent))
    assert [record.row for record in read(tmp_path / "r.json")] == [row]


def test_records_of_an_object_have_their_lines_and_may_be_many(tmp_path):
    """3 MB of records: more than a record may have, and more than is read at once."""
    rows = [{"n": number, "text": "字" * 300} for number in range(3000)]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    for text, first_line in (
        (f'{{"about": "x",\n"data": [\n{lines}\n],\n"end": 1}}', 3),
        (f'{{"data": [{lines}]}}', 1),
    ):
        (tmp_path / "r.json").write_text(text)
        records = list(RecordStream(DatasetOptions(path=str(tmp_path / "r.json")), 2**16))
        assert [record.row for record in records] == rows
        assert records[-1].source.endswith(f":{first_line + 2999}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("r.csv", 'instruction;output\n"a;b";c, d\ne;"f\ng"\n'),
        ("r.csv", '\ufeffinstruction\toutput\r\na;b\tc, d\r\ne\t"f\ng"\r\n'),
        ("r.tsv", 'instruction\toutput\na;b\tc, d\ne\t"f\ng"\n'),
        ("r.csv", 'instruction,output\na;b,"c, d"\ne,"f\ng"\n'),
    ],
)
def test_the_delimiter_of_a_csv_is_found(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    assert [record.row for record in read(tmp_path / name)] == [
        {"instruction": "a;b", "output": "c, d"},
        {"instruction": "e", "output": "f\ng"},
    ]


def test_a_csv_of_one_column_with_commas_in_quotes_or_semicolons_is_read(tmp_path):
    (tmp_path / "r.csv").write_text('text\n"a, b; c"\nd; e\n')
    assert [record.row["text"] for record in read(tmp_path / "r.csv")] == ["a, b; c", "d; e"]


@pytest.mark.parametrize(
    ("name", "content", "line", "says"),
    [
        ("r.jsonl", b'{"a": 1}\n[1]\n', 2, "found a list"),
        ("r.jsonl", b'{"a": 1}\n\n"x"\n', 3, "found a text"),
        ("r.json", b'[{"a": 1},\n\n7]', 3, "found a number"),
        ("r.json", b"[null]", 1, "found null"),
        ("r.jsonl", b'{"a": 1}\n{"a": \n', 2, "not JSON"),
        ("r.jsonl", b'{"a": ' + b"9" * 5000 + b"}", 1, "not JSON"),
        ("r.json", b'[{"a": 1},\n{"a" 2}]', 2, "not JSON"),
        ("r.json", b'[{"a": 1}\n{"a": 2}]', 2, "no comma"),
        ("r.json", b'[{"a": 1},\n{"a": 2}', 2, "cut off"),
        ("r.json", b'[{"a": 1}]\nmore', 2, "after the end"),
        ("r.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', 2, "byte 0xff at offset 16 is not UTF-8"),
        ("r.csv", b"a,b\n1,2\n1,2,3\n", 3, "3 fields, but the header has 2"),
        ("r.csv", b'a,b\n1,"2\n', 2, "not CSV"),
        ("r.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], 1, "the gzip file is cut off"),
        ("r.jsonl.gz", b'{"a": 1}\n', 1, "not a valid gzip file"),
        ("r.json", "[{}]".encode("utf-16"), 1, "is not UTF-8. Save the file as UTF-8; it looks like UTF-16"),
        ("r.jsonl", b'{"a": "caf\xe9"}', 1, "is not UTF-8. Save the file as UTF-8; it looks like Windows-1252"),
        ("r.parquet", b"PAR1 not really", 1, "not a valid parquet file"),
        ("r.json", b'{"version": "1.0",\n"data": [{"a": 1},\n{"a" 2}]}', 3, "not JSON: expecting ':' delimiter"),
        ("r.json", b'{"version": "1.0",\n"data": [{"a": 1},\n{"a": 2}', 3, "the list is not closed"),
        ("r.json", b'{"version": "1.0",\n"data": [{"a": 1},\n7]}', 3, "found a number"),
        ("r.json", b'{"version": "1.0",\n"data": [{"a": 1}]\n"more": 1}', 3, "no comma between two members"),
        ("r.json", b'{\n"train": [{"a": 1}],\n"test": [{"a": 1}]}', 1, "several lists of records: train, test"),
        ("r.json", b'{\n"a": 1,\n"b" 2\n}', 3, "not JSON"),
        ("r.json", b'{\n"a": 1\n}\n{\n"a": 2,\n', 6, "not JSON"),
        ("r.json", b'{\n"a": 1\n},\n{\n"a": 2}', 3, "not JSON"),
        ("r.jsonl", b'{"a": 1,\n{"a": 2}\n{"a": 3}\n', 1, "not JSON"),
        ("r.jsonl", b'{"a": "x\n{"a": 2}\n', 1, "not JSON"),
        ("r.jsonl", b'{"a": 1}\n{"a": 2}\n{"a": [\n{"a": 4}\n', 3, "not JSON"),
        ("r.json", b'{"data":\n[{"a":' + b"[" * 100_000, 2, "maximum recursion depth"),
        ("r.jsonl", b'{"a":' * 100_000, 1, "maximum recursion depth"),
        ("r.jsonl.zst", ZST[:-9], 1, "the zst file is cut off"),
        ("r.jsonl.zst", b'{"a": 1}\n', 1, "not a valid zst file"),
        ("r.csv.zst", ZST[:9] + b"garbage" + ZST[16:], 1, "not a valid zst file"),
        ("r.jsonl", ZST, 1, "the content is Zstandard (.zst), and the name says .jsonl"),
        ("r.jsonl", gzip.compress(b"{}", mtime=0), 1, "the content is gzip (.gz)"),
        ("r.json", b'{"columns":["q","a"],"index":[0],"data":[["x","y"]]}', 1, "a table of pandas"),
        ("r.json", b'{"columns":["q","a"],\n"data":[]}', 1, "a table of pandas"),
        ("r.csv", b"PAR1", 1, "the content is parquet"),
        ("r.csv", b'{"a": 1, "b": 2}\n', 1, "the header is JSON. Name the file .jsonl"),
        ("r.csv", b"a;b\n1;2\n1;2;3\n1;2\n", 3, "3 fields, but the header has 2"),
        ("r.csv", b"a,a\n1,2\n", 1, "two columns have the name `a`"),
        ("r.arrow", b"", 1, "not a valid arrow file"),
        ("r.feather", b"garbage, and more of it", 1, "not a valid arrow file"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(tmp_path, name, content, line, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name)
    assert f"{name}:{line}: " in str(caught.value) and says in str(caught.value)


def test_a_folder_gives_its_data_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz"):
        write(tmp_path / name, [{"instruction": name, "output": "x"}])
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "LICENSE.txt").write_text("not data either")
    assert [record.row["instruction"] for record in read(tmp_path)] == ["a.jsonl.gz", "b.jsonl"]


def test_other_types_and_two_types_are_errors_and_a_glob_selects(tmp_path):
    (tmp_path / "r.orc").write_bytes(b"x")
    with pytest.raises(UserError, match="this kind of data file is unknown"):
        read(tmp_path / "r.orc")
    write(tmp_path / "a.jsonl", ROWS[:1])
    write(tmp_path / "b.csv", ROWS[1:])
    with pytest.raises(UserError, match=r"several types \(\.csv, \.jsonl\)"):
        read(tmp_path)
    assert len(read(tmp_path / "*.csv")) == 2


def test_missing_files_and_hub_ids_are_told_apart():
    for path in ("nowhere.jsonl", "./nowhere", "/no/where", "a/b/c", "nowhere/*.jsonl"):
        with pytest.raises(UserError, match=r"No (such )?file"):
            find_files(path)
    for path in ("tatsu-lab/alpaca", "imdb", "databricks/dolly-v1.5"):
        assert find_files(path) == []


@pytest.mark.parametrize("download", [True, False])
def test_an_unreachable_hub_is_one_sentence_and_name_and_split_choose_a_part(monkeypatch, download):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # so that nothing asks the hub
    with pytest.raises(UserError, match=r"no-such-org/no-such-set is neither a file or folder here nor a data set"):
        list(RecordStream(DatasetOptions(path="no-such-org/no-such-set"), download=download))
    asked = []
    found = datasets.Dataset.from_list([{"text": "a"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **more: asked.append((words, more)) or found)
    chosen = {"split": "test", "revision": "v2", "data_dir": "en", "data_files": ["*.csv"]}
    read_again = list(RecordStream(DatasetOptions(path="a/set", name="small", **chosen), download=download))
    assert read_again == [Record({"text": "a"}, "a/set:test:1")]
    assert asked == [(("a/set", "small"), {**chosen, "streaming": not download})]


def test_max_samples_stops_reading_and_a_csv_cell_may_be_longer_than_the_default_limit(tmp_path):
    (tmp_path / "r.csv").write_text("a\n" + "x" * 200_000)
    assert len(read(tmp_path / "r.csv")[0].row["a"]) == 200_000
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n{"a": 2}\nbroken')
    assert [record.row["a"] for record in read(tmp_path / "r.jsonl", max_samples=2)] == [1, 2]


@pytest.mark.parametrize("split", ["train[:90%]", "train[33%:66%]", "train[2:5]", "train[-3:]", "train[4:99]"])
def test_a_slice_of_a_file_or_folder_has_the_rows_that_datasets_gives_it(split, tmp_path):
    import datasets

    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"a": number} for number in range(7)]
    table = write(tmp_path / "train.parquet", rows)
    read_there = datasets.load_dataset("parquet", data_files=str(table), split=split, cache_dir=str(tmp_path / "cache"))
    expected = list(read_there["a"])
    for path in (write(folder / "train.jsonl", rows), folder, folder / "*.jsonl", table):
        assert [record.row["a"] for record in read(path, split=split)] == expected


@pytest.mark.parametrize("split", ["train[90%", "train[:120%]", "train[3:2]", "train[9:]", "train[:1]+train[2:]"])
def test_a_slice_without_rows_or_meaning_is_refused(split, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UserError, match=r"`split` is train\[.*the data set has 3 rows\. Write one slice"):
        read(path, split=split)


def test_columns_are_renamed_even_crosswise(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"question": "q", "output": "o", "instruction": "i"}])
    renamed = read(path, columns={"instruction": "output", "output": "question"})
    assert renamed[0].row == {"instruction": "o", "output": "q"}
    with pytest.raises(UserError, match=r"no column `reply`.*it has instruction, output, question"):
        read(path, columns={"output": "reply"})
    for hub_only in ({"split": "test"}, {"name": "main"}):
        with pytest.raises(UserError, match="on the hub"):
            read(path, **hub_only)


def test_a_text_file_is_one_document_and_a_long_one_several(tmp_path):
    (tmp_path / "r.txt").write_text("a\n\nb")
    assert read(tmp_path / "r.txt") == [Record({"text": "a\n\nb"}, f"{tmp_path}/r.txt:1")]
    (tmp_path / "r.txt").write_text("0123456789\n" * 100_000)
    first, second = read(tmp_path / "r.txt")
    assert len(first.row["text"]) == 1_048_586 and first.row["text"].endswith("9\n")  # past 2**20, at a line's end
    assert len(first.row["text"] + second.row["text"]) == 1_100_000
    assert second.source == f"{tmp_path}/r.txt:{1_048_586 // 11 + 1}"


def test_line_ends_of_windows_are_read_as_those_of_a_text(tmp_path):
    (tmp_path / "r.txt").write_bytes(b"\xef\xbb\xbfa\r\n\r\nb\rc\r\n")
    assert read(tmp_path / "r.txt") == [Record({"text": "a\n\nb\rc\n"}, f"{tmp_path}/r.txt:1")]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_longer_than_a_chunk(tmp_path, indent):
    """3 MiB with characters of three bytes, so that chunks end inside records and inside characters."""
    rows = [{"n": number, "text": "字\u2028" * (number % 7 * 60)} for number in range(3000)]
    (tmp_path / "r.json").write_text(json.dumps(rows, indent=indent, ensure_ascii=False))
    records = read(tmp_path / "r.json")
    assert [record.row for record in records] == rows
    assert records[-1].source.endswith(":1" if indent is None else f":{2999 * 4 + 2}")


def test_an_error_deep_in_a_list_has_its_line(tmp_path):
    rows = b",\n".join(b'{"text": "' + b"x" * 1000 + b'"}' for _ in range(3000))
    for flaw, says in ((b'{"text" 1}', "not JSON"), (b'{"text": "\xff"}', "byte 0xff at offset 3042011 is not UTF-8")):
        (tmp_path / "r.json").write_bytes(b"[" + rows + b",\n" + flaw + b"]")
        with pytest.raises(UserError, match=rf"r\.json:3001: {says}"):
            read(tmp_path / "r.json")


def test_the_share_read_grows_to_one(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz"):
        write(tmp_path / name, [{"instruction": "i" * 2000, "output": str(n)} for n in range(500)])
    stream = RecordStream(DatasetOptions(path=str(tmp_path / "*.jsonl*")))
    shares = [stream.share for _ in stream]
    assert len(shares) == 1000 and shares == sorted(shares) and shares[0] < 0.2 and stream.share == 1.0


LIMIT = 4000
TOO_LONG = {"text": 'b "\\ }],' * LIMIT, "more": [{"[": "]"}]}
LONG = [{"text": "a"}, TOO_LONG, {"text": "c" * (LIMIT - 100)}, {"text": "d"}]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("ending", [".json", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_record_with_too_many_bytes_is_passed_over(tmp_path, monkeypatch, ending, chunk):
    monkeypatch.setattr(file_readers, "CHUNK", chunk)
    monkeypatch.setattr(data_files, "CHUNK", chunk)
    path = write(tmp_path / f"rows{ending}", LONG)
    records = list(RecordStream(DatasetOptions(path=str(path)), LIMIT))
    rows = [{column: value for column, value in record.row.items() if value is not None} for record in records]
    assert rows == [LONG[0], {}, *LONG[2:]]
    assert [record.too_large > LIMIT for record in records] == [False, True, False, False]
    lines = {".json": [2, 5, 13, 16]}.get(ending, [1, 2, 3, 4])
    assert [record.source for record in records] == [f"{path}:{line}" for line in lines]


def test_a_line_of_text_with_too_many_bytes_is_passed_over(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("one\n" + "x" * LIMIT + "\ntwo\n")
    first, second = RecordStream(DatasetOptions(path=str(path)), LIMIT)
    assert first.too_large > LIMIT and second == Record({"text": "two\n"}, f"{path}:3")


@pytest.mark.parametrize(
    ("name", "says"), [("r.csv", "a line of 5,002 bytes"), ("q.csv", "field larger than field limit")]
)
def test_a_csv_row_with_too_many_bytes_is_an_error(tmp_path, name, says):
    """Where the next row begins is not known: a line break may be part of a quoted field."""
    (tmp_path / name).write_text("a,b\n1,2\n" + ("3," + "x" * 4999 if name == "r.csv" else '3,"' + "x\n" * 5000) + "\n")
    with pytest.raises(UserError, match=says) as error:
        list(RecordStream(DatasetOptions(path=str(tmp_path / name)), LIMIT))
    assert f"{name}:3: " in str(error.value)


def test_a_small_file_that_decompresses_to_one_long_line_needs_little_memory(tmp_path):
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"{" + bytes(2**25), compresslevel=1))
    tracemalloc.start()
    (record,) = RecordStream(DatasetOptions(path=str(path)), 2**18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.too_large == 2**25 + 1 and peak < 2**23


def test_a_small_zst_file_that_decompresses_to_one_long_line_needs_little_memory(tmp_path):
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(pyarrow.compress(b"{" + bytes(2**25), codec="zstd", asbytes=True))
    assert path.stat().st_size < 10_000
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    (record,) = RecordStream(DatasetOptions(path=str(path)), 2**18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.too_large == 2**25 + 1 and peak < 2**23
    assert pyarrow.total_allocated_bytes() - before < 2**23


@pytest.mark.parametrize("name", [pytest.param("r.jsonl.zst", marks=pytest.mark.slow), "r.json.zst", "r.json.gz"])
def test_a_file_that_decompresses_to_white_space_ends(tmp_path, monkeypatch, name):
    monkeypatch.setattr(data_files, "MAX_PASSED", 2**21)
    content = (b"[" if ".json." in name else b"") + b" \n" * 2**21
    packed = gzip.compress(content) if name.endswith(".gz") else pyarrow.compress(content, codec="zstd", asbytes=True)
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(UserError, match=r"a record of more than 2,097,152 bytes"):
        read(tmp_path / name)


def test_a_file_without_an_end_of_its_record_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MAX_PASSED", 10_000)
    (tmp_path / "r.jsonl").write_text("x" * 20_000)
    (tmp_path / "r.json").write_text('[{"a": "' + "x" * 20_000)
    for name in ("r.jsonl", "r.json"):
        with pytest.raises(UserError, match=f"{name}:1: a record of more than 10,000 bytes"):
            list(RecordStream(DatasetOptions(path=str(tmp_path / name)), LIMIT))


def test_text_of_a_parquet_file_that_is_not_utf_8_is_an_error(tmp_path):
    path = tmp_path / "r.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "Z!Q"]}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    assert content.count(b"Z!Q") >= 1
    path.write_bytes(content.replace(b"Z!Q", b"\xba!Q"))
    with pytest.raises(UserError, match=r"r\.parquet:1: not a valid parquet file: 'utf-8' codec can't decode"):
        read(path)
