"""Folders in the layouts of the hub and of save_to_disk: which files are data, and which split they belong to."""

import json
from pathlib import Path

import datasets
import pytest
from support.data.row_files import write_rows

from ligertune.data.rows.data_folders import Choice
from ligertune.data.rows.sources import RecordStream, find_files, unread_note
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions


@pytest.fixture
def folder(tmp_path):
    """folder(names...): a folder with these files; each holds its name."""

    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
            write_rows(tmp_path / "set" / name, [{"text": name}])
        return tmp_path / "set"

    return make


def texts(path: Path, **spec) -> list[str]:
    return [record.row["text"] for record in RecordStream(DatasetOptions(path=str(path), **spec))]


# files of a folder -> those of each split
LAYOUTS = {
    ("train.jsonl", "test.jsonl", "README.md", "LICENSE", "dataset_infos.json"):
        {"train": ["train.jsonl"], "test": ["test.jsonl"]},
    ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"):
        {"train": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
         "test": ["data/test-00000-of-00001.jsonl"]},
    ("train/a.jsonl", "train/b.jsonl", "dev/a.jsonl", ".cache/c.jsonl", "train/.hidden.jsonl"):
        {"train": ["train/a.jsonl", "train/b.jsonl"], "validation": ["dev/a.jsonl"], "dev": ["dev/a.jsonl"]},
    ("data/train_sft-00000-of-00001-abc123.jsonl", "data/train_prefs-00000-of-00001.jsonl"):
        {"train_sft": ["data/train_sft-00000-of-00001-abc123.jsonl"],
         "train_prefs": ["data/train_prefs-00000-of-00001.jsonl"]},
    ("my-set_training.2.jsonl", "my-set_eval.jsonl"):
        {"train": ["my-set_training.2.jsonl"], "test": ["my-set_eval.jsonl"]},
    ("math.jsonl", "latest.jsonl", "retrained.jsonl"): {"train": ["latest.jsonl", "math.jsonl", "retrained.jsonl"]},
    ("part-00000-of-00002.jsonl", "part-00001-of-00002.jsonl", "__pycache__/train.jsonl"):
        {"train": ["part-00000-of-00002.jsonl", "part-00001-of-00002.jsonl"]},
    ("test.jsonl",): {"train": ["test.jsonl"], "test": ["test.jsonl"]},
    ("datasheet.md", "notes.txt", "data/a.jsonl"): {"train": ["data/a.jsonl"]},
    ("deep/er/data/a.jsonl",): {"train": ["deep/er/data/a.jsonl"]},
}  # fmt: skip


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_the_split_chooses_the_files(names, folder):
    place = folder(*names)
    for split, expected in LAYOUTS[names].items():
        assert texts(place, split=split) == expected


@pytest.mark.parametrize(
    ("names", "split", "says"),
    [
        (("test.jsonl", "valid.jsonl"), "train", "has no split train; it has test, validation"),
        (("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"), "train", "test_sft, train_sft"),
        (("train.jsonl", "test.jsonl"), "validation", "has no split validation; it has test, train"),
        (("train.jsonl", "test.jsonl"), "train[:10%]", r"has no split train\[:10%\]; it has test, train"),
        (("train.jsonl", "more.jsonl"), "train", r"belong to a split \(train\), and more\.jsonl to none"),
        (("a.jsonl", "b.jsonl"), "test", "tell no splits apart"),
        (("README.md", "dataset_info.json", ".a.jsonl"), "train", "holds no data file"),
        (("train/a.jsonl", "train/b.csv", "test/c.txt"), "train", r"several types \(\.csv, \.jsonl\)"),
    ],
)
def test_a_folder_whose_split_is_not_clear_is_refused(names, split, says, folder):
    with pytest.raises(UserError, match=says) as error:
        find_files(str(folder(*names)), Choice(split))
    assert error.value.exit_code == 2


@pytest.mark.parametrize("given", [{"split": "test"}, {"data_dir": "a"}, {"data_files": ["b"]}], ids=str)
def test_a_plain_file_has_no_parts(given, folder):
    with pytest.raises(UserError, match=f"`{next(iter(given))}` chooses among the parts of a folder"):
        texts(folder("train.jsonl") / "train.jsonl", **given)


def test_data_dir_and_data_files_choose_among_the_files_of_a_folder(folder):
    place = folder("en/train.jsonl", "en/test.jsonl", "de/one.jsonl", "de/two.jsonl", "other.csv")
    assert texts(place, data_dir="en") == ["en/train.jsonl"]
    assert texts(place, data_dir="en", split="test") == ["en/test.jsonl"]
    assert texts(place, data_files=["en/test.jsonl", "de/*.jsonl"]) == ["de/one.jsonl", "de/two.jsonl", "en/test.jsonl"]
    assert texts(place, data_dir="de", data_files=["t*"]) == ["de/two.jsonl"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data_dir": "fr"}, "`data_dir` is fr, which is no folder in it"),
        ({"data_dir": "../set"}, "`data_dir` names '../set', which is no path inside the folder"),
        ({"data_files": ["none*"]}, r"`data_files` names none\*, and no data file matches it"),
        ({"data_files": ["/etc/passwd"]}, "`data_files` names '/etc/passwd', which is no path inside the folder"),
        ({"data_files": ["a.jsonl"], "split": "test"}, "`data_files` and `split` both choose files"),
        ({"data_files": ["a.jsonl"], "name": "en"}, "`data_files` and `name` both choose files"),
        ({"revision": "v1"}, "`revision` chooses a version of a data set on the hub"),
    ],
    ids=str,
)
def test_a_choice_that_fits_no_file_is_refused(given, says, folder):
    with pytest.raises(UserError, match=says) as error:
        texts(folder("a.jsonl"), **given)
    assert error.value.exit_code == 2


def texts_in(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    return folder


def test_txt_and_markdown_files_of_a_folder_are_read_together(tmp_path):
    place = texts_in(tmp_path, ("b.txt", "a.md", "README.md", "LICENSE.md"))
    assert texts(place) == ["a.md\n", "b.txt\n"]
    assert unread_note(DatasetOptions(path=str(place))) == ""
    texts_in(place, ("tables/b.txt",))
    (place / "tables/prices.jsonl").write_text('{"text": "of a table"}\n')  # not a layout of the hub
    assert texts(place) == ["a.md\n", "b.txt\n"]
    (place / "rows.jsonl").write_text('{"text": "a row"}\n')  # texts next to rows are notes on them
    assert texts(place) == ["a row"]
    assert "not read: 1 .jsonl." in unread_note(DatasetOptions(path=str(place)))  # that of the table


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (("a.txt", "scan.pdf", "letter.docx", "old.docx", "photo.jpg", "more/b.md"), "2 .docx, 1 .md, 1 .pdf"),
        (("a.jsonl", "scan.pdf", "more/b.jsonl", ".git/c.jsonl"), "1 .jsonl"),
        (("train.txt", "test.txt", "more/b.txt"), ""),  # the other files are of other splits
    ],
)
def test_a_note_names_the_files_of_a_folder_that_are_not_read(names, counted, tmp_path):
    note = unread_note(DatasetOptions(path=str(texts_in(tmp_path, names))))
    assert f"not read: {counted}." in note if counted else note == ""


@pytest.fixture
def saved(tmp_path) -> Path:
    """A DatasetDict that save_to_disk wrote, with two shards, and a file that `map` left behind."""
    train, test = (
        datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(4)]}) for name in ("train", "test")
    )
    datasets.DatasetDict(train=train, test_prefs=test).save_to_disk(
        tmp_path / "saved", num_shards={"train": 2, "test_prefs": 1}
    )
    (tmp_path / "saved" / "train" / "cache-0123.arrow").write_bytes(b"left behind")
    return tmp_path / "saved"


def test_a_saved_data_set_is_read_in_its_order(saved):
    assert texts(saved) == texts(saved / "train") == [f"train {n}" for n in range(4)]
    assert texts(saved, split="test_prefs") == texts(saved / "test_prefs") == [f"test {n}" for n in range(4)]
    with pytest.raises(UserError, match="has no split test; it has test_prefs, train"):
        texts(saved, split="test")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("train/state.json", "[", r"state\.json:1: no list `_data_files`"),
        ("train/state.json", "[" * 100_000, r"state\.json:1: no list `_data_files`"),
        ("train/state.json", json.dumps({"_data_files": [{"filename": "../../d.arrow"}]}), "is no name of a file"),
        ("train/state.json", json.dumps({"_data_files": [{"filename": "gone.arrow"}]}), r"gone\.arrow: this file"),
        ("train/state.json", json.dumps({"_data_files": [7]}), "None is no name of a file"),
        ("dataset_dict.json", json.dumps({"splits": ["../train"]}), "is no name of a file"),
        ("dataset_dict.json", json.dumps({"splits": ["nowhere"]}), r"state\.json cannot be read"),
        ("dataset_dict.json", json.dumps({"splits": []}), r"dataset_dict\.json:1: no list `splits`"),
    ],
)
def test_a_damaged_saved_data_set_is_one_sentence(file, text, says, saved):
    (saved / file).write_text(text)
    with pytest.raises(UserError, match=says) as error:
        texts(saved)
    assert error.value.exit_code == 2


NAMES = ("good.jsonl", "held.jsonl", "more/train.jsonl", "more/test.jsonl", "notes.jsonl")
DEFAULT = "- config_name: default\n  data_files: "
TWO = "- {config_name: a, data_files: good.jsonl}\n- {config_name: b, data_files: [held.jsonl, notes.jsonl]%s}\n"


def card(folder: Path, configs: str) -> Path:
    """Write a README.md as the hub has it."""
    front = f"license: mit\ndate: 2024-01-01\nconfigs:\n{configs}size_categories:\n- n<1K\n"
    (folder / "README.md").write_text(f"---\n{front}---\n# A data set\n")
    return folder


# configs of README.md -> the files of a split and name
CARDS = [
    (DEFAULT + "[{split: train, path: good.jsonl}, {split: test, path: held.jsonl}]\n", {}, ["good.jsonl"]),
    (DEFAULT + "[{split: train, path: good.jsonl}, {split: test, path: held.jsonl}]\n", {"split": "test"},
     ["held.jsonl"]),
    (DEFAULT + "\n  - split: train\n    path:\n    - good.jsonl\n    - more/tr*\n", {},
     ["good.jsonl", "more/train.jsonl"]),
    (DEFAULT + "good.jsonl\n", {}, ["good.jsonl"]),
    (DEFAULT + "['more/*']\n", {}, ["more/test.jsonl", "more/train.jsonl"]),
    (DEFAULT + "'more/**'\n", {}, ["more/test.jsonl", "more/train.jsonl"]),
    (TWO % "", {"name": "b"}, ["held.jsonl", "notes.jsonl"]),
    (TWO % ", default: true", {}, ["held.jsonl", "notes.jsonl"]),
]  # fmt: skip


@pytest.mark.parametrize(("configs", "spec", "expected"), CARDS)
def test_configs_of_the_card_choose_the_files_as_datasets_does(configs, spec, expected, folder, tmp_path):
    place = card(folder(*NAMES), configs)
    assert sorted(texts(place, **spec)) == expected
    rows = datasets.load_dataset(str(place), spec.get("name"), split=spec.get("split", "train"), cache_dir=tmp_path)
    assert sorted(rows["text"]) == expected


@pytest.mark.parametrize(
    ("configs", "spec", "says"),
    [
        (TWO % "", {}, "no one default configuration; they are a, b"),
        (TWO % "", {"name": "c"}, "no configuration c; they are a, b"),
        (DEFAULT + "[{split: train, path: good.jsonl}]\n", {"split": "test"}, "has no split test; it has train"),
        (DEFAULT + "../other.jsonl\n", {}, "no path inside the folder"),
        (DEFAULT + "/etc/passwd\n", {}, "no path inside the folder"),
        (DEFAULT + "'**/**/*.jsonl'\n", {}, "no path inside the folder"),
        (DEFAULT + "https://example.org/a.jsonl\n", {}, "no path inside the folder"),
        ("- {config_name: x, data_dir: more}\n", {}, "has `data_dir`"),
        (DEFAULT + "gone.jsonl\n", {}, "names gone.jsonl, and no data file matches"),
        (DEFAULT + "{train: good.jsonl}\n", {}, "`data_files` that are no path"),
        (
            DEFAULT + "[{split: a, path: good.jsonl}, {split: a, path: held.jsonl}]\n",
            {},
            "`data_files` that are no path",
        ),
        (DEFAULT + "[]\n", {}, "`data_files` that are no path"),
        (DEFAULT + "{\n", {}, "not valid YAML"),
        ("- data_files: good.jsonl\n", {}, "no list of entries with a `config_name`"),
        ("- &a [1]\n- [*a, *a]\n", {}, "no list of entries with a `config_name`"),
    ],
)
def test_unknown_configs_of_a_card_are_refused(configs, spec, says, folder):
    with pytest.raises(UserError, match=says):
        texts(card(folder(*NAMES), configs), **spec)
