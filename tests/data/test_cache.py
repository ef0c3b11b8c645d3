"""Cache of prepared data: keyed by content, complete or absent, and made once by any number of processes."""

import json
import multiprocessing
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import datasets
import numpy as np
import pytest
from support.data.row_files import flip_a_bit, write_rows
from transformers import AutoTokenizer

from ligertune.data.cache import CacheWriter, cache_home, load_or_make
from ligertune.errors import UserError

ROWS = [{"instruction": f"Say {n}.", "output": f"{n} " * (n % 9 + 1)} for n in range(60)]
ROWS.append({"instruction": "No.", "output": ""})


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    return cache_home()


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def entries(home: Path) -> list[Path]:
    return sorted(path for path in home.iterdir() if path.is_dir())


def is_cached(prepared) -> bool:
    return prepared.report.sets[0].cached


def test_a_cached_data_set_equals_a_fresh_one(home, rows, prepared):
    uncached = prepared(rows, cache=False)
    assert not home.exists()
    first, second = prepared(rows), prepared(rows)
    assert (is_cached(first), is_cached(second)) == (False, True)
    assert second.train.fingerprint == first.train.fingerprint
    assert [one.source for one in second.train] == [one.source for one in first.train]
    assert second.report.dropped == first.report.dropped == {"empty answer": 1}
    assert isinstance(second.train[0].input_ids.base, np.memmap)
    assert uncached.train.fingerprint == second.train.fingerprint
    assert {**vars(second.report), "sets": ()} == {**vars(uncached.report), "sets": ()}


IN_KEY = (
    {"train_on": "all"}, {"max_length": 2000}, {"on_overlength": "truncate"}, {"prompt_template": "chat"},
    {"system_prompt": "Be brief."}, {"dataset": {"max_samples": 50}}, {"dataset": {"on_bad_row": "repair"}},
)  # fmt: skip
NOT_IN_KEY = ({}, {"val_split": 0.2}, {"num_proc": 2}, {"packing": False}, {"seed": 5})


def test_the_settings_that_change_examples_change_the_key(home, rows, prepared, monkeypatch):
    prepared(rows)
    for settings in (*IN_KEY, *NOT_IN_KEY):
        assert is_cached(prepared(rows, **settings)) == (settings in NOT_IN_KEY), settings
    for name in ("version", "_own_code"):
        monkeypatch.setattr(f"ligertune.data.cache.{name}", lambda *named: "another")
        assert not is_cached(prepared(rows)), name


def test_a_changed_byte_a_tokenizer_and_a_template_change_the_key(home, rows, prepared, quickstart, tmp_path):
    prepared(rows, prompt_template="chat")
    other = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    assert is_cached(prepared(rows, prompt_template="chat", tokenizer=other))
    other.chat_template += "!"
    assert not is_cached(prepared(rows, prompt_template="chat", tokenizer=other))
    longer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    longer.add_tokens(["Say"])
    assert not is_cached(prepared(rows, prompt_template="chat", tokenizer=longer))
    file = tmp_path / "t.jinja"
    for text, expected in (("a", False), ("a", True), ("b", False)):
        file.write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}" + text)
        assert is_cached(prepared(rows, prompt_template=str(file))) is expected
    write_rows(rows, [*ROWS[:-1], {"instruction": "No!", "output": ""}])
    assert not is_cached(prepared(rows, prompt_template="chat"))


def test_the_files_of_a_split_decide_whether_a_folder_is_cached(home, prepared, tmp_path):
    folder = tmp_path / "set"
    for split in ("train", "test"):
        datasets.Dataset.from_list(ROWS[:3]).save_to_disk(folder / split)
    assert not is_cached(prepared(folder)) and is_cached(prepared(folder))
    datasets.Dataset.from_list(ROWS[:5]).save_to_disk(folder / "test")
    assert is_cached(prepared(folder))
    assert len(prepared(folder, dataset={"split": "test"}).train) == 5
    datasets.Dataset.from_list(ROWS[3:7]).save_to_disk(folder / "train")
    changed = prepared(folder)
    assert not is_cached(changed) and len(changed.train) == 4


def test_data_of_a_template_with_a_date_is_cached_for_a_day(home, rows, prepared, monkeypatch, tmp_path):
    import datetime

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return cls(2100, 1, 1)

    file = tmp_path / "dated.jinja"
    file.write_text("{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    prepared(rows, prompt_template=str(file))
    assert is_cached(prepared(rows, prompt_template=str(file)))
    monkeypatch.setattr(datetime, "date", Tomorrow)
    assert not is_cached(prepared(rows, prompt_template=str(file)))


def change_about(meta: Path) -> None:
    """Change what is reported about the rows, which the arrays' hashes do not contain."""
    values = json.loads(meta.read_text())
    values["about"]["counts"] = {"rows_read": "many"}
    meta.write_text(json.dumps(values))


DAMAGE = {
    "flipped bit": lambda entry: flip_a_bit(entry / "input_ids"),
    "flipped bit of the lengths": lambda entry: flip_a_bit(entry / "lengths"),
    "cut off": lambda entry: os.truncate(entry / "labels", 8),
    "missing file": lambda entry: (entry / "line_of").unlink(),
    "missing meta": lambda entry: (entry / "meta.json").unlink(),
    "meta cut off": lambda entry: os.truncate(entry / "meta.json", 40),
    "empty meta": lambda entry: (entry / "meta.json").write_text("{}"),
    "a list as meta": lambda entry: (entry / "meta.json").write_text("[]"),
    "deep meta": lambda entry: (entry / "meta.json").write_text("[" * 100_000),
    "changed meta": lambda entry: change_about(entry / "meta.json"),
    "a pipe as meta": lambda entry: ((entry / "meta.json").unlink(), os.mkfifo(entry / "meta.json")),
    "a pipe as lengths": lambda entry: ((entry / "lengths").unlink(), os.mkfifo(entry / "lengths")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_replaced(damage, home, rows, prepared):
    before = prepared(rows).train.fingerprint
    (entry,) = entries(home)
    DAMAGE[damage](entry)
    again = prepared(rows)
    assert (is_cached(again), again.train.fingerprint) == (False, before)
    assert is_cached(prepared(rows)) and entries(home) == [entry]


def test_an_entry_that_another_host_made_meanwhile_stays(home, monkeypatch):
    """Some NFS mounts grant the lock to each host: two make an entry at once, and neither removes the other's."""
    monkeypatch.setattr("ligertune.data.cache.FileLock", lambda path: nullcontext())

    def make(writer: CacheWriter) -> dict:
        load_or_make("key", lambda writer: {"made": "there"})
        return {"made": "here"}

    assert load_or_make("key", make).about == {"made": "there"}
    assert [path.name for path in home.iterdir()] == ["key"]


def test_an_error_leaves_no_entry_and_an_unwritable_folder_is_named(home, rows, prepared):
    with pytest.raises(UserError, match="empty answer"):
        prepared(rows, dataset={"on_bad_row": "error"})
    assert entries(home) == []
    shutil.rmtree(home)
    home.write_text("a file")
    with pytest.raises(UserError, match=r"LIGERTUNE_CACHE, or write data\.cache: false"):
        prepared(rows)
    assert prepared(rows, cache=False).report.examples == 60


def start(prepared, rows: Path, **environment: str):
    """Prepare `rows` in a forked process; return the process and the pipe of its result."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def work() -> None:
        os.environ.update(environment)
        data = prepared(rows, num_proc=1)
        sender.send((is_cached(data), data.train.fingerprint))

    process = fork.Process(target=work, daemon=True)
    process.start()
    return process, receiver


def result_of(receiver) -> tuple[bool, str]:
    assert receiver.poll(120)
    return receiver.recv()


def test_one_of_several_processes_makes_the_entry(home, tmp_path, prepared):
    big = write_rows(tmp_path / "big.jsonl", ROWS * 60)  # takes long enough for the processes to overlap
    started = [start(prepared, big) for _ in range(3)]
    found = [result_of(receiver) for _, receiver in started]
    assert sorted(cached for cached, _ in found) == [False, True, True]
    assert len({fingerprint for _, fingerprint in found}) == 1 == len(entries(home))


def test_the_first_rank_of_a_node_makes_the_entry(home, rows, prepared):
    home.mkdir(parents=True)
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    process, second = start(prepared, rows, RANK="1", LOCAL_RANK="1", **ranks)
    time.sleep(1.0)
    assert process.is_alive() and not entries(home)  # it waits
    _, first = start(prepared, rows, RANK="0", LOCAL_RANK="0", **ranks)
    made, read = result_of(first), result_of(second)
    assert (made[0], read[0]) == (False, True) and made[1] == read[1]


def test_a_killed_writer_leaves_no_entry(home, tmp_path, prepared):
    big = write_rows(tmp_path / "big.jsonl", ROWS * 400)
    process, _ = start(prepared, big)
    while not (home.is_dir() and list(home.glob(".writing-*/input_ids"))):
        time.sleep(0.01)
        assert process.is_alive()
    process.kill()
    process.join()
    assert [path.name[0] for path in entries(home)] == ["."]  # temporary, not an entry
    assert not is_cached(prepared(write_rows(big, ROWS)))


def test_folders_of_killed_writers_are_removed_after_a_day(home, rows, prepared):
    old, recent = home / ".writing-old", home / ".writing-recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    prepared(rows)
    assert not old.exists() and recent.exists()
