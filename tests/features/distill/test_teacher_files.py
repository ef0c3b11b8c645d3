"""Damaged folders of a teacher's log-probabilities, and disks and places that cannot hold one: one sentence each."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.command_line import RECIPE, overrides, run_here
from support.quickstart_runs import SHORT
from support.tasks.distill_runs import TEACHER, distill_settings

K, VOCABULARY = 4, 512
SETTINGS = {**SHORT, **distill_settings(TEACHER), "distill.loss": "forward_kl", "distill.top_k": K}
SETTINGS |= {"train.num_train_epochs": "null", "checkpoint.output_dir": "run"}


def distill(cwd: Path, *arguments: object, **changes: object):
    return run_here("distill", RECIPE, *arguments, *overrides({**SETTINGS, **changes}), cwd=cwd)


def sentence(done, code: int = 2) -> str:
    errors = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert done.code == code and len(errors) == 1 and "Traceback" not in done.err, done.err[-3000:]
    return errors[0]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    done = distill(folder, "--write", "teacher")
    assert done.code == 0, done.err
    assert sorted(path.name for path in folder.iterdir()) == ["teacher"]
    return folder / "teacher"


def describe(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        values = {**json.loads((folder / "teacher.json").read_text()), **changes}
        (folder / "teacher.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return change


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def array(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Path], object]:
    """Change the values in place, or save what `change` returns."""

    def damage(folder: Path) -> None:
        values = np.load(folder / name)
        changed = change(values)
        np.save(folder / name, values if changed is None else changed)

    return damage


def entry(value: float) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[3, 1] = value

    return change


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def special(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def header(text: str) -> bytes:
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


CLAIMS = "{'descr': '<i4', 'fortran_order': False, 'shape': %s}"
IDS, LOG_PROBS, JSON = "train_ids.npy", "train_log_probs.npy", "teacher.json"
DAMAGED = {
    "ids are cut": (cut(IDS, 1000), f"{IDS} has 1,000 bytes instead of"),
    "the header is cut": (cut(IDS, 20), f"{IDS} is not a .npy file"),
    "ids are empty": (cut(IDS, 0), f"{IDS} is not a .npy file"),
    "ids are missing": (special(IDS, lambda path: None), f"{IDS} cannot be read: No such file"),
    "evaluation ids are missing": (special("eval_ids.npy", lambda path: None), "eval_ids.npy cannot be read"),
    "ids are a link to /dev/zero": (special(IDS, lambda path: path.symlink_to("/dev/zero")), "is not a regular file"),
    "ids are a pipe": (special(IDS, os.mkfifo), f"{IDS} is not a regular file"),
    "ids are a folder": (special(IDS, Path.mkdir), f"{IDS} is not a regular file"),
    "log-probabilities are garbage": (replaced(LOG_PROBS, b"garbage" * 99), f"{LOG_PROBS} is not a .npy file"),
    "an object array": (array(IDS, lambda v: v.astype(object)), "holds object values"),
    "ids of 64 bits": (array(IDS, lambda v: v.astype(np.int64)), "holds int64 values, and must hold int32"),
    "big endian": (array(IDS, lambda v: v.astype(">i4")), "holds >i4 values"),
    "columns first": (array(LOG_PROBS, np.asfortranarray), "and must hold float32 ones, row by row"),
    "another K": (array(IDS, lambda v: v[:, :2].copy()), "holds an array of shape"),
    "one dimension": (array(IDS, np.ravel), "holds an array of shape"),
    "a row less": (array(LOG_PROBS, lambda v: v[:-1]), "holds an array of shape"),
    "10^15 rows": (replaced(IDS, header(CLAIMS % "(1000000000000000, 4)")), "holds an array of shape"),
    "negative rows": (replaced(IDS, header(CLAIMS % "(-1, 4)")), f"{IDS}"),
    "rows are a text": (replaced(IDS, header(CLAIMS % "'many'")), f"{IDS} is not a .npy file"),
    "a deep header": (replaced(IDS, header("(" * 110)), f"{IDS} is not a .npy file"),
    "an id beyond the vocabulary": (array(IDS, entry(VOCABULARY)), f"not in its vocabulary of {VOCABULARY}"),
    "a negative id": (array(IDS, entry(-1)), "not in its vocabulary"),
    "an id twice": (array(IDS, lambda v: np.put(v, [0, 1], 7)), "holds a token twice"),
    "NaN": (array(LOG_PROBS, entry(np.nan)), "log-probabilities that are not finite"),
    "minus infinity": (array("eval_log_probs.npy", entry(-np.inf)), "log-probabilities that are not finite"),
    "a positive log-probability": (array(LOG_PROBS, entry(0.5)), "whose sum is more than 1"),
    "probabilities of 2": (array(LOG_PROBS, lambda v: v.fill(np.log(0.5))), "whose sum is more than 1"),
    "vocab_size is a text": (describe(vocab_size="x"), f"{JSON} holds a wrong vocab_size"),
    "vocab_size has 400 digits": (describe(vocab_size=10**400), f"{JSON} holds a wrong vocab_size"),
    "vocab_size is smaller than K": (describe(vocab_size=3), "names 4 tokens of a vocabulary of 3"),
    "no temperature": (describe(temperature=...), f"{JSON} lacks temperature"),
    "temperature is NaN": (describe(temperature=float("nan")), f"{JSON} holds a wrong temperature"),
    "top_k is 0": (describe(top_k=0), f"{JSON} holds a wrong top_k"),
    "top_k is another": (describe(top_k=5), "holds an array of shape"),
    "teacher is a list": (describe(teacher=[]), f"{JSON} holds a wrong teacher"),
    "other data": (describe(train="abc"), "it was written for other data"),
    "100,000 brackets": (replaced(JSON, b"[" * 100_000), f"{JSON} is not a valid JSON file"),
    "a list": (replaced(JSON, b"[]"), f"{JSON} does not hold an object"),
    "no text": (replaced(JSON, b"\xff\x00"), f"{JSON} is not a valid JSON file"),
    "the description is a pipe": (special(JSON, os.mkfifo), f"{JSON} is not a regular file"),
    "no description": (special(JSON, lambda path: None), "holds no complete log-probabilities"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_folder_is_refused_before_anything_is_written(what, good, tmp_path):
    damage, words = DAMAGED[what]
    shutil.copytree(good, tmp_path / "teacher")
    damage(tmp_path / "teacher")
    said = sentence(distill(tmp_path, **{"distill.teacher_file": "teacher"}))
    assert said.startswith(f"Error: distill.teacher_file: {tmp_path}/teacher") and words in said
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(tmp_path):
    """A limit on the size of a file stands for a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, unlimited[1]))
    try:
        done = distill(tmp_path, "--write", "teacher")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "The log-probabilities could not be written: File too large." in sentence(done, code=1)
    assert "--resume" not in done.err and not list(tmp_path.iterdir())


def test_a_disk_without_space_is_refused_before_the_teacher_is_loaded(tmp_path, monkeypatch):
    # calling it would be a TypeError
    monkeypatch.setattr("ligertune.features.distill.teacher_files.load_teacher", None)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    said = sentence(distill(tmp_path, "--write", "teacher"))
    assert "--write: " in said and "1.0 KiB free" in said and not list(tmp_path.iterdir())


def test_a_stream_is_refused_because_its_tokens_are_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr("ligertune.features.distill.teacher_files.load_teacher", None)
    changes = {"data.streaming": "true", "data.val_split": 0}
    said = sentence(distill(tmp_path, "--write", "teacher", **changes))
    assert "--write: data.streaming" in said and not list(tmp_path.iterdir())


def test_places_that_cannot_hold_the_folder_are_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, words in (
        ("file", "--write: file is a file, and not a folder."),
        ("file/below", "--write: file/below cannot be made: "),
        ("pipe", "--write: pipe is a named pipe"),
        ("dangling", "--write: dangling is a link to"),
        ("loop/below", "--write: loop/below cannot be made: "),
        ("", "--write: '.' is not the name of a new folder."),
        ("..", "--write: '..' is not the name of a new folder."),
        ("x" * 300, "--write: xxxxxxxxxxxxxxxxxxxx... has more than 255 bytes."),
        ("a/" * 3000, "cannot be"),
        ("/proc/none/teacher", "--write: /proc/none"),
    ):
        assert words in sentence(distill(tmp_path, "--write", place)), place
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "none").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe", "dangling", "loop"}
