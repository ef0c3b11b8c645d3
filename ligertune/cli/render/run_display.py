"""Live display of a run: a spinner for each phase, a bar for each data set, a progress bar of the steps, logged lines.

The live part is drawn on a terminal only, by a thread of rich. Logged lines stay above it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from ligertune.cli.render.console import OUTPUT, sentence, text
from ligertune.errors import format_bytes, format_count, format_duration, printable
from ligertune.progress import Display

REFRESHES = 5  # drawings per second
PATH = 24  # characters of a data set's path
# Each is shown if the terminal has at least this many columns.
BAR_OF_DATA = 70
ELAPSED = 70
RATE = 90


class LineStyle(NamedTuple):
    """Style of a logged line."""

    separator: str
    short: bool  # short labels
    decimals: int  # of the loss


STYLES = (LineStyle("  ", False, 4), LineStyle("  ", True, 4), LineStyle(" ", True, 3))  # widest first


class RemainingTime:
    """Remaining time of a run, from the mean duration of its steps.

    It begins after the first step, in which kernels are compiled, and again after `warmup_steps`. Evaluations and
    checkpoints are part of the mean, because more of them follow. rich's estimate uses the last 30
    seconds only: with steps of 2 s and an evaluation of 30 s after every tenth step it shows 300 s when 750 s are left,
    and this class 653 s.
    """

    def __init__(self, total_steps: int, warmup_steps: int) -> None:
        self.total_steps = total_steps
        self._warmup_steps = warmup_steps
        self._seen = 0
        self._first = self._last = (0, 0.0)  # (step, seconds)
        self.step_seconds: float | None = None

    def step(self, step: int, now: float) -> None:
        """Count a finished step."""
        self._seen += 1
        self._last = step, now
        if self._seen in (1, self._warmup_steps):
            self._first = self._last
        elif self._seen > 1:
            self.step_seconds = (now - self._first[1]) / (step - self._first[0])

    def seconds(self, now: float) -> float | None:
        """Return the remaining seconds; None before the second step."""
        step, then = self._last
        if self.step_seconds is None:
            return 0.0 if step == self.total_steps else None
        return max(0.0, self.step_seconds * (self.total_steps - step) - (now - then))


class _Words(ProgressColumn):
    """A column of one word that is never cropped or wrapped."""

    def __init__(self, words: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._words = words

    def render(self, task: Task) -> Text:
        remaining = task.fields.get("remaining")
        eta = remaining.seconds(time.perf_counter()) if remaining else task.time_remaining
        rate = remaining.step_seconds if remaining else None
        words = self._words.format(
            task=task,
            eta="-:--" if eta is None else format_duration(eta),
            elapsed=format_duration(task.elapsed or 0),
            rate="" if not rate else f"{rate:.2f} s/step" if rate > 0.5 else f"{1 / rate:.1f} steps/s",
        )
        return Text(printable(words.rstrip(), one_line=True))


class RunDisplay(Progress, Display):
    """What a command does, while it does it. enabled: False shows nothing, for ranks other than the first."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._is_live = enabled and OUTPUT.console.is_terminal
        super().__init__(
            console=OUTPUT.console, transient=True, disable=not self._is_live, refresh_per_second=REFRESHES
        )
        self._phase: TaskID | None = None
        self._bar: TaskID | None = None
        self._remaining: RemainingTime | None = None
        self._data_sets: dict[str, TaskID] = {}
        self._style = 0
        bar = BarColumn(bar_width=None)
        self._kinds = {
            "phase": ((0, SpinnerColumn()), (0, _Words("{task.description} {elapsed}"))),
            "data": (
                (0, _Words("preparing {task.description}  ETA {eta}")),
                (BAR_OF_DATA, bar),
                (0, _Words("{task.fields[rows]:,} rows")),
            ),
            "steps": (
                (0, _Words("step {task.completed:.0f}/{task.total:.0f}  ETA {eta}")),
                (0, bar),
                (0, _Words("{task.percentage:3.0f} %")),
                (ELAPSED, _Words("after {elapsed}")),
                (RATE, _Words("{rate}")),
                (0, TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))),
            ),
        }

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return one table per bar, with the columns for which the terminal has room."""
        for task in self.tasks:
            kind = task.fields["kind"]
            self.columns = tuple(column for width, column in self._kinds[kind] if self.console.width >= width)
            self.expand = kind != "phase"
            table = self.make_tasks_table([task])
            if self.expand:
                table.width = self.console.width - 2  # room for the ^C that a terminal writes, which is then wiped
            yield table

    def begins(self, name: str, seconds: float = 0.0) -> None:
        """Show a phase: before the first step a separate line, then words at the end of the progress bar."""
        if not self._is_live:
            if self._enabled and self._bar is None:
                text(f"{name} ... {seconds:.0f} s" if seconds else f"{name} ...")
        elif self._bar is not None:
            self.update(self._bar, description=printable(name, one_line=True))
        elif not seconds:  # a reminder of the same phase: the spinner shows the time
            self._end_phase()
            self._phase = self.add_task(name, total=None, kind="phase")

    def data(self, path: str, rows: int, share: float) -> None:
        """Show how far the data set at `path` is prepared: rows read so far, and their share of the file."""
        if not self._is_live:
            return
        if path not in self._data_sets:
            name = path if len(path) <= PATH else f"…{path[1 - PATH :]}"
            self._data_sets[path] = self.add_task(name, total=1.0, rows=0, kind="data")
        self.update(self._data_sets[path], completed=share, rows=rows)

    def planned(self, total_steps: int, warmup_steps: int) -> None:
        """Note how many steps the run has, and in how many of them it warms up."""
        self._remaining = RemainingTime(total_steps, warmup_steps)
        while self._data_sets:
            self.remove_task(self._data_sets.popitem()[1])

    def step(self, step: int) -> None:
        """Move the progress bar, which takes the place of the phase. Called after each step; it draws nothing."""
        assert self._remaining is not None  # `planned` comes before the first step
        self._remaining.step(step, time.perf_counter())
        if self._bar is None:
            self._end_phase()
            total = self._remaining.total_steps
            self._bar = self.add_task("", total=total, kind="steps", remaining=self._remaining)
        self.update(self._bar, completed=step, description="")

    def line(self, line: dict[str, Any]) -> None:
        """Print a line of metrics.jsonl above the bar."""
        if "note" in line:
            sentence(f"note: {line['note']}")
        elif "samples" in line:
            for one in line["samples"]:
                text(f"  {one['prompt']!r} -> {one['answer']!r}")
        else:
            text(self._logged(line))

    def _logged(self, line: dict[str, Any]) -> str:
        """Return the numbers of a line, in the widest style that fits; an evaluation has that of the line above it."""
        assert self._remaining is not None  # `planned` comes before the first line
        total = self._remaining.total_steps
        left = self._remaining.seconds(time.perf_counter())
        if "loss" in line:
            lengths = [len(style.separator.join(_fields(line, total, style))) for style in STYLES]
            self._style = next((i for i, length in enumerate(lengths) if length <= self.console.width), -1)
        style = STYLES[self._style]
        fields = _fields(line, total, style)
        if not self._is_live and left is not None and "loss" in line:
            fields.append(f"left {format_duration(left)}")
        while len(style.separator.join(fields)) > self.console.width and len(fields) > 1:
            fields.pop()
        return style.separator.join(fields)

    def _end_phase(self) -> None:
        if self._phase is not None:
            self.remove_task(self._phase)
        self._phase = None


def _fields(line: dict[str, Any], total: int, style: LineStyle) -> list[str]:
    """Return the parts of a logged line, each as wide in every line of a run."""
    step = f"{line['step']:>{len(str(total))}}/{total}"
    short = style.short
    step = step if short else f"step {step}"
    loss = line.get("loss", line.get("eval_loss"))
    fields = [step, f"loss {loss:{style.decimals + 3}.{style.decimals}f}"]
    found = (line.get(f"{kind}{name}") for name in ("rewards/accuracies", "accuracy") for kind in ("", "eval_"))
    accuracy = next((value for value in found if value is not None), None)
    if accuracy is not None:
        fields.append(f"{'acc' if short else 'accuracy'} {accuracy:.2f}")
    if "eval_loss" in line:
        return [*fields, "on the evaluation data"]
    norm = line["grad_norm"]
    memory = line["peak_memory"]["allocated_run"]
    if norm is not None:
        fields.append(f"norm {norm:5.2f}" if short else f"grad norm {norm:6.2f}")
    rate = line["learning_rate"]
    speed = f"{format_count(line['tokens_per_second']):>5}"
    if short:
        return [*fields, f"lr {rate:.1e}", f"{speed} tok/s", f"{memory / 2**30:4.1f}G"]
    # on a CPU it is the memory of the process, not that of tensors
    what = "peak" if line["peak_memory"]["kind"] == "device" else "process"
    return [*fields, f"lr {rate:.2e}", f"{speed} tokens/s", f"{what} {format_bytes(memory):>9}"]
