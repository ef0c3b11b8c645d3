"""The display of a run on terminals of several widths and in a pipe, as bytes that a terminal receives."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from support.command_line import RECIPE, overrides, run_here

from ligertune.cli.render import console
from ligertune.cli.render.run_display import RemainingTime, RunDisplay

TOTAL = 300
COLOUR, CURSOR = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def logged(step: int) -> dict:
    return {"step": step, "loss": 12.3456 / step, "grad_norm": 123.4 / step, "learning_rate": 1e-3,
            "tokens_per_second": 12345.0, "peak_memory": {"kind": "device", "allocated_run": 75 * 2**30}}  # fmt: skip


def work() -> None:
    """Show what a run shows: phases, a data set, steps, a logged line with its evaluation."""
    with RunDisplay() as display:
        display.begins("planning")
        display.data("some/folder/with/a/long/name/of/data.jsonl", 1234, 0.5)
        time.sleep(0.3)  # the display is drawn every 0.2 seconds
        display.planned(TOTAL, warmup_steps=5)
        display.begins("first step")
        for step in range(1, 41):
            time.sleep(0.01)
            display.step(step)
            if step % 10 == 0:
                display.line(logged(step))
        display.begins("evaluating")
        display.line({"step": 40, "eval_loss": 3.25})
        time.sleep(0.3)


def in_terminal(columns: int, function: Callable[[], None]) -> tuple[str, int]:
    """Call a function in a fork whose stdout and stderr are a terminal. Returns what it wrote and its exit code."""
    pid, master = pty.fork()
    if pid == 0:
        code = 1
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            os.environ.pop("COLUMNS", None)
            os.environ["TERM"] = "xterm-256color"
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            console.people_on_stderr(False)
            function()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(code)
    said = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux: the other side is closed
            part = b""
        if not part:
            break
        said += part
    os.close(master)
    return said.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_the_bar_fits_a_terminal_and_logged_lines_stay(columns):
    said, code = in_terminal(columns, work)
    assert code == 0, said
    drawn = [line for line in CURSOR.sub("\n", COLOUR.sub("", said)).split("\n") if line.strip()]
    assert max(map(len, drawn)) <= columns
    bars = [line for line in drawn if "/300  ETA " in line]
    assert len({line.split("/")[0] for line in bars}) > 1, "the bar does not move between logged lines"
    assert all(re.match(r"step \d+/300  ETA (\d+:\d\d|-:--) ", line) for line in bars)
    assert re.search(r"ETA \d+:\d\d .* 13 % .*evaluating", bars[-1])
    assert ("after" in bars[-1], "steps/s" in bars[-1]) == (columns >= 80, columns >= 160)
    history = [line for line in drawn if "loss" in line]
    assert len(history) == 5 and len({line.index("loss") for line in history}) == 1
    assert len(set(map(len, history[:4]))) == 1, "lines are not aligned"
    for words in ("norm", "lr 1.0", "12.3k tok", "75.0"):
        assert all(words in line for line in history[:4])
    assert history[4].rstrip().endswith("on the evaluation data")
    assert any("preparing …" in line and "1,234 rows" in line and "ETA" in line for line in drawn)
    assert any("planning" in line for line in drawn) and any("first step" in line for line in drawn)


def test_tables_of_a_terminal_wrap_and_have_no_trailing_blanks():
    def work() -> None:
        console.table("Plan", [("model", "tiny"), ("batch", "8 rows of 512 tokens per step, " * 3)])
        console.columns("Median of three repeats", ["side", "tokens/s"], [["with", "12,345"], ["without"]])

    said, code = in_terminal(60, work)
    lines = COLOUR.sub("", said).splitlines()
    assert code == 0 and max(map(len, lines)) <= 60
    assert (lines[:2], lines[4]) == (["Plan", "model  tiny"], "Median of three repeats")
    assert len(lines) == 8 and [line for line in lines if line != line.rstrip()] == []


def test_in_a_pipe_each_line_is_written_once_without_control_characters(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # workers of pytest-xdist have it from readline
    settings = {"train.max_steps": 3, "data.datasets.0.max_samples": 20, "logging.logging_steps": 1,
                "data.val_split": 0.1, "checkpoint.output_dir": "run"}  # fmt: skip
    done = run_here("train", RECIPE, *overrides(settings), cwd=tmp_path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.out)
    assert not [line for line in lines if line != line.rstrip()]
    assert lines[0] == "planning ..."
    assert len(set(filter(None, lines))) == len(list(filter(None, lines)))
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 0/3", "step 1/3", "step 2/3", "step 3/3", "step 3/3"]  # fmt: skip
    files = ["run/report.html", "run/report.json", *(["run/curves.png"] if find_spec("matplotlib") else [])]
    assert any(re.fullmatch(f"written +{', '.join(files)}", line) for line in lines)


def test_the_remaining_time_follows_the_mean_and_leaves_compilation_out():
    remaining = RemainingTime(104, warmup_steps=3)
    remaining.step(1, 100.0)  # compiled for 100 seconds
    assert remaining.seconds(100.0) is None
    for step, now in ((2, 110.0), (3, 120.0), (4, 121.0)):
        remaining.step(step, now)
    assert remaining.seconds(121.0) == 100  # of the steps after the warm-up
    remaining.step(5, 124.0)
    assert remaining.seconds(124.0) == 2 * 99 and remaining.seconds(134.0) == 2 * 99 - 10
