"""Files of a run: an output replaces what is there and never writes through a link; damaged lines are left out."""

import errno
import json
import os
import resource
import shutil
import socket
from pathlib import Path

import pytest

from ligertune.errors import UserError
from ligertune.files.storage import (
    MetricsFile,
    check_replaceable,
    damaged_lines,
    new_folder,
    open_to_append,
    put_in_place,
    read_metrics,
    remove,
    write_bytes,
    write_json,
    write_text,
    writing,
)


def test_a_link_is_replaced_and_its_target_is_left_alone(tmp_path):
    target, output = tmp_path / "target", tmp_path / "out" / "report.html"
    output.parent.mkdir()
    target.write_text("mine")
    output.symlink_to(target)
    write_text(output, "new ü")
    assert (target.read_text(), output.read_text("utf-8"), output.is_symlink()) == ("mine", "new ü", False)
    output.unlink()
    output.symlink_to(tmp_path / "none")  # a dangling link makes no file where it points to
    write_json(output, {"a": 1})
    assert json.loads(output.read_text()) == {"a": 1} and not (tmp_path / "none").exists()
    output.unlink()
    os.link(target, output)
    write_bytes(output, b"other")
    assert (target.read_text(), output.read_bytes()) == ("mine", b"other")
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


SPECIAL = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": make_socket,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /proc/self/fd/1": lambda path: path.symlink_to("/proc/self/fd/1"),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_what_is_no_file_is_refused_in_one_sentence(what, tmp_path):
    path = tmp_path / "o"
    SPECIAL[what](path)
    for write in (lambda: write_text(path, "x"), lambda: write_json(path, {}), lambda: check_replaceable(path)):
        with pytest.raises(UserError, match=f"/o is {what}, and nothing is written there") as refused:
            write()
        assert refused.value.exit_code == 2
    assert [one.name for one in tmp_path.iterdir()] == ["o"]


def test_a_folder_replaces_a_link_to_a_folder(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("mine")
    (tmp_path / "model").symlink_to(tmp_path / "outside")
    (tmp_path / ".model.partial").symlink_to(tmp_path / "outside")
    with new_folder(tmp_path / "model") as partial:
        (partial / "weights").write_text("w")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["weights"]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["mine"]
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    put_in_place(tmp_path / "model", tmp_path / "dangling")
    assert (tmp_path / "dangling" / "weights").is_file() and not (tmp_path / "none").exists()
    remove(tmp_path / "none")  # that there is none is no error


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_a_folder_that_is_not_finished_leaves_nothing(stop, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "earlier").touch()
    with pytest.raises((KeyboardInterrupt, OSError)), new_folder(tmp_path / "model") as partial:
        (partial / "weights").write_text("w")
        raise stop
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "earlier"]


@pytest.fixture
def small_disk():
    """A limit on the size of a file stands for a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_a_full_disk_is_one_sentence_and_keeps_the_earlier_file(tmp_path, small_disk):
    path = tmp_path / "report.json"
    write_text(path, "earlier")
    with pytest.raises(UserError, match=r"The report could not be written: File too large\.") as refused, \
            writing("The report", trains=False):  # fmt: skip
        write_text(path, "x" * 2000)
    assert refused.value.exit_code == 1 and "--resume" not in refused.value.hint
    assert path.read_text() == "earlier" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "source").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    (tmp_path / "source" / "large").write_bytes(bytes(2000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    with pytest.raises(UserError, match="File too large"), writing("The export"):
        shutil.copytree(tmp_path / "source", tmp_path / "copy")  # it raises a list of errors, without their numbers


# ---- metrics.jsonl

GOOD = [{"step": step, "loss": 2.0, "tokens": 10} for step in (1, 2, 3)]
DAMAGED = {
    "an infinite speed": '{"step": 2, "tokens_per_second": Infinity}',
    "a loss beyond float32": '{"step": 2, "loss": 1e300}',
    "a negative step": '{"step": -5, "loss": 1.0}',
    "a step of 400 digits": f'{{"step": {10**400}, "loss": 1.0}}',
    "a huge step": f'{{"step": {2**62}, "loss": 1.0}}',
    "a step that goes back": '{"step": 1, "eval_loss": 1.0}',
    "a step twice": '{"step": 2, "loss": 1.0}',
    "tokens of 400 digits": f'{{"step": 2, "loss": 1.0, "tokens": {10**400}}}',
    "a loss of 400 digits": f'{{"step": 2, "eval_loss": {10**400}}}',
    "negative tokens": '{"step": 2, "eval_loss": 1.0, "tokens": -1}',
    "samples are an object": '{"step": 2, "samples": {"prompt": "p"}}',
    "a sample is a text": '{"step": 2, "samples": ["p"]}',
    "a sample without an answer": '{"step": 2, "samples": [{"prompt": "p"}]}',
    "a list as a measure": '{"step": 2, "eval_accuracy": [1.0]}',
    "an object as a measure": '{"step": 2, "rewards/margins": {"a": 1}}',
    "a text as a measure": '{"step": 2, "eval_f1_macro": "high"}',
    "a measure of 400 digits": f'{{"step": 2, "accuracy": {10**400}}}',
    "a list as peak memory": '{"step": 2, "peak_memory": []}',
    "a number as a note": '{"step": 2, "note": 1}',
    "a loss that is no number": '{"step": 2, "eval_loss": NaN}',
    "an infinite loss": '{"step": 2, "eval_loss": 1e999}',
    "a truth value as a step": '{"step": true}',
    "10 MB": f'{{"step": 2, "note": "{"x" * 10_000_000}"}}',
    "deep": '{"step": 2, "note": ' + "[" * 100_000,
    "deep and whole": '{"step": 2, "a": ' + "[" * 500 + "]" * 500 + "}",
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_line_is_left_out_and_the_lines_around_it_are_not(what, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [*map(json.dumps, GOOD[:2]), DAMAGED[what], json.dumps(GOOD[2]), '{"step": 4, "lo']
    path.write_text("\n".join(lines))
    assert read_metrics(path) == GOOD
    assert damaged_lines(path) == [(3, 2)]
    file = MetricsFile(path, enabled=True)
    file.begin(after=2)
    file.write({"step": 3, "eval_loss": 1.0})
    assert read_metrics(path) == [*GOOD[:2], {"step": 3, "eval_loss": 1.0}]


def test_lines_that_a_run_writes_are_right(tmp_path):
    lines = [
        {"step": 0, "eval_loss": 3.0, "eval_accuracy": 0.5, "time": "2026-11-25T03:58:11.042+00:00"},
        {"step": 0, "loss_before_training": 3.0},
        {"step": 1, "loss": 2, "grad_norm": float("inf"), "epoch": None, "peak_memory": {"kind": "host"}},
        {"step": 2, "loss": 1.5, "grad_norm": None, "rewards/margins": -0.5},
        {"step": 2, "eval_loss": 1.0},
        {"step": 2, "samples": [{"prompt": "p", "answer": ""}]},
        {"step": 2, "note": "resumed"},
        {"step": 2, "note": "twice"},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(path) == lines and not damaged_lines(path)


@pytest.mark.parametrize("what", SPECIAL)
def test_lines_are_not_appended_to_what_is_no_file(what, tmp_path):
    """A pipe without a reader would be waited for."""
    SPECIAL[what](tmp_path / "o")
    with pytest.raises(OSError):
        open_to_append(tmp_path / "o")


def test_metrics_replace_a_link_and_lines_never_follow_one(tmp_path):
    target, path = tmp_path / "target", tmp_path / "metrics.jsonl"
    target.write_text('{"step": 1}\n')
    path.symlink_to(target)
    file = MetricsFile(path, enabled=True)
    file.begin(after=0)
    file.write({"step": 1, "loss": 1.0})
    assert target.read_text() == '{"step": 1}\n' and read_metrics(path) == [{"step": 1, "loss": 1.0}]
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(OSError):
        file.write({"step": 2, "loss": 1.0})
    assert target.read_text() == '{"step": 1}\n'


def test_a_file_of_metrics_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole
    with pytest.raises(UserError, match=r"metrics\.jsonl has 1024\.00 GiB, and at most 1\.00 GiB are read"):
        read_metrics(path)
