"""The only place that prints. People's output goes to stdout, or to stderr where stdout is for a machine (`--json`)."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ligertune.errors import UserError
    from ligertune.planning.memory.fit import Fit
    from ligertune.planning.plan import KernelLine, Plan
    from ligertune.report import Report, Throughput


class _Output:
    """Where people's output goes: stdout, or stderr beside a report for a machine."""

    def __init__(self) -> None:
        self.go_to(stderr=False)

    def go_to(self, *, stderr: bool) -> None:
        stream = sys.stderr if stderr else sys.stdout
        # a file has no width, and rich would take it for a window of 80 columns
        width = None if stream.isatty() or "COLUMNS" in os.environ else 160
        self.console = Console(stderr=stderr, highlight=False, soft_wrap=True, width=width)


OUTPUT = _Output()

# a step's high points in words, by StepPhase.name
WHEN = {
    "frozen model": "while the frozen model is computed",
    "loss": "while the loss is computed",
    "backward": "as the backward begins",
    "run again": "as the backward reaches the checkpointed layers",
    "first layer": "as the backward reaches the first layer",
    "gradients": "as the backward ends",
    "step": "in the optimizer's step",
}


def people_on_stderr(json_wanted: bool) -> None:
    """With `--json`, stdout carries one JSON report and nothing else."""
    OUTPUT.go_to(stderr=json_wanted)


def text(message: str = "") -> None:
    """A line for people, as it is (no markup)."""
    OUTPUT.console.print(Text(message))


def note(message: str) -> None:
    """A line beside what the command gives, on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(message, style="dim"))


def document(content: str) -> None:
    """A whole document on stdout, byte for byte: YAML, JSON, generated text."""
    sys.stdout.write(content if content.endswith("\n") else content + "\n")
    sys.stdout.flush()


def json_report(content: dict) -> None:
    """One machine-readable report on stdout."""
    document(json.dumps(content, indent=1, default=str, ensure_ascii=False))


def error(problem: UserError) -> None:
    """The sentence, on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), str(problem)))


def table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Two columns: what, and its value."""
    grid = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    OUTPUT.console.print(grid)


def plan(plan: Plan) -> None:
    """The plan, before anything is trained."""
    batching, schedule, data = plan.batching, plan.schedule, plan.data
    dropped = ", ".join(f"{count} {reason}" for reason, count in data.dropped.items()) or "none"
    place = "in host memory for each device" if plan.parallel.cpu_offload else "on each device"
    sharing = "processes" if batching.cp_size == 1 else f"groups of {batching.cp_size} processes"
    rows = [
        ("model", f"{plan.model_family}, {count(plan.n_parameters)} parameters, {count(plan.n_trainable)} trained"),
        ("device", f"{plan.machine.name} ({plan.machine.arch}) x {batching.world_size}, {strategy(plan)}"),
        ("dtype", dtype(plan)),
        ("attention", plan.attn_implementation + (f" ({plan.attn_why})" if plan.attn_why else "")),
        ("kernels", kernels(plan.kernels, plan.kernels_backend)),
        ("data", dataset(plan)),
        ("dropped rows", dropped),
        ("batch", f"{batching.micro_batch_size} x {batching.accumulation} accumulated x {batching.row_ranks} "
                  f"{sharing} = {batching.global_batch_size} {counted(plan)}"),
        ("steps", f"{schedule.total_steps} ({schedule.warmup_steps} of them warm-up), {schedule.type}, "
                  f"learning rate {schedule.learning_rate:g}"),
        ("states", f"{size(plan.bytes.total)} {place} for weights, gradients and {plan.optimizer.name}"),
        ("peak memory", predicted(plan)),
        ("output", str(plan.output_dir)),
    ]  # fmt: skip
    if data.eval_examples:
        rows.insert(6, ("evaluation", f"{data.eval_examples} examples"))
    table("Plan", rows)
    for line in plan.kernels:
        if line.left:
            text(f"  left alone: {line.left} x {line.kernel}: {line.note}")
    for note in plan.notes:
        text(f"  note: {note}")


def strategy(plan: Plan) -> str:
    """How processes share the model, and why, in words."""
    return plan.strategy + (f" ({plan.strategy_why})" if plan.strategy_why else "")


def predicted(plan: Plan) -> str:
    """The peak that is expected on a device, in words."""
    if plan.peak is None:
        from ligertune.planning.memory.activation_policy import why_not_predicted

        return f"not predicted: {why_not_predicted(plan.build.task)}"
    return f"{size(plan.peak.total)} expected of {size(plan.machine.memory_bytes)} on each device"


def memory(plan: Plan, fits: Iterable[Fit] | None) -> None:
    """The expected peak by kind, and what would fit."""
    if plan.peak is not None:
        text()
        rows = [(kind, size(n_bytes)) for kind, n_bytes in plan.peak.parts().items()]
        table(f"Memory of each device, at its highest {WHEN[plan.peak.phase.name]}", rows)
    for fit in fits or ():
        how = "with checkpointing" if fit.checkpointing else "without checkpointing"
        text(f"  {how}: {fit.micro_batch_size} rows of the recipe's length, or one of {fit.row_length} tokens, "
             f"in {size(plan.machine.memory_bytes)}")  # fmt: skip


def dataset(plan: Plan) -> str:
    """What there is to train on, in words."""
    data = plan.data
    if plan.rows.streamed:
        return f"streamed while training, template {data.template}"
    share = 100 * data.trained_tokens / max(1, data.tokens)
    return f"{data.examples} examples, {data.tokens} tokens, {share:.1f} % trained, template {data.template}"


def counted(plan: Plan) -> str:
    """What a batch counts, in words."""
    rows = plan.rows
    if rows.packed and not rows.streamed:
        return f"rows of {rows.length} tokens a step; {rows.count} rows, {100 * rows.fill:.2f} % filled"
    words = [f"rows of {rows.length} tokens a step" if rows.packed else "examples a step"]
    words += ["grouped by length"] if rows.kind == "grouped" else []
    words += ["padding-free"] if rows.padding_free else []
    return ", ".join([*words, "streamed"] if rows.streamed else words)


def dtype(plan: Plan) -> str:
    """What the weights are, in words."""
    if plan.precision.autocast == "fp16":
        return "float16 (mixed: float32 weights, scaled loss)"
    return plan.precision.weights


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says what takes its time: a live line on a terminal, a plain one elsewhere."""
    if OUTPUT.console.is_terminal:
        with OUTPUT.console.status(Text(what)):
            yield
        return
    text(what)
    yield


def begins(words: str) -> None:
    """What takes a while."""
    OUTPUT.console.print(words)


class Progress:
    """The state of a run: one live line on a terminal, plain lines elsewhere."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if OUTPUT.console.is_terminal:
            self._live = Live(console=OUTPUT.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.__exit__(*exc)

    def begins(self, words: str) -> None:
        """What is done before the first step."""
        if self._live:
            self._live.update(Text(words))
        else:
            begins(words)

    def show(self, line: dict) -> None:
        """A logged line of metrics.jsonl."""
        shown = Text(self._words(line))
        if self._live and "loss" in line:
            self._live.update(shown)
        else:
            OUTPUT.console.print(shown)

    def _words(self, line: dict) -> str:
        if "note" in line:
            return f"note: {line['note']}"
        if "samples" in line:
            return "\n".join(f"  {one['prompt']!r} -> {one['answer']!r}" for one in line["samples"])
        if "eval_loss" in line:
            return f"step {line['step']:>6}/{self._total}  evaluation loss {line['eval_loss']:.4f}"
        peak = line["peak_memory"]
        norm = "" if line["grad_norm"] is None else f"  grad norm {line['grad_norm']:.2f}"
        return (
            f"step {line['step']:>6}/{self._total}  loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}{norm}  "
            f"{count(line['tokens_per_second'])} tokens/s  peak {size(max(peak.values()))}  "
            f"left {duration(line['remaining_seconds'])}"
        )


def report(report: Report) -> None:
    """The end of a run."""
    speed, done = report.throughput, report.status == "completed"
    resumed = f", resumed at {report.resumed_from}" if report.resumed_from else ""
    rows = [
        ("status", report.status + (f" by {report.stopped_by}" if report.stopped_by else "")),
        ("steps", f"{report.steps} of {report.total_steps}" + resumed),
        ("loss", "none logged" if report.loss_first is None else f"{report.loss_first:.4f} -> {report.loss_last:.4f}"),
    ]  # fmt: skip
    if report.eval_loss is not None:
        rows.append(("evaluation loss", f"{report.eval_loss:.4f}"))
    if report.seconds_to_first_step:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.seconds_to_first_step.items())
        rows.append(("first step after", f"{sum(report.seconds_to_first_step.values()):.1f} s: {parts}"))
    if speed:
        excluded = speed.warmup_steps_excluded
        left_out = f"first {excluded} steps left out" if excluded else "warm-up included"
        rows += [
            ("tokens/s", f"{speed.tokens_per_second:,.0f} real ({speed.trained_tokens_per_second:,.0f} trained), "
                         f"{speed.padded_tokens_per_second:,.0f} with padding, which is "
                         f"{100 * speed.padding_share:.1f} % ({speed.steps} steps, {left_out})"),
            *_images(speed),
            ("MFU", _mfu(speed)),
        ]  # fmt: skip
    rows += [
        ("peak memory", peak_memory(report.peak_memory)),
        ("kernels applied", kernels(report.kernels, report.kernels_backend)),
        ("device", f"{report.device} x {report.world_size}, {report.strategy}, {report.dtype}"),
        ("time", duration(report.seconds)),
        ("model", report.model_path or f"not written: {'save_model is false' if done else 'the run is not finished'}"),
    ]
    text()
    table("Report", rows)


def _mfu(speed: Throughput) -> str:
    if speed.images_per_second is not None:
        return "not measured of models that see"
    return "unknown peak of this device or dtype" if speed.mfu is None else f"{100 * speed.mfu:.1f} %"


def _images(speed: Throughput) -> list[tuple[str, str]]:
    if speed.images_per_second is None:
        return []
    return [("images/s", f"{speed.images_per_second:,.1f} ({speed.image_tokens_per_second:,.0f} of the tokens/s)")]


def next_step(report: Report, recipe_path: str) -> None:
    """The exact command to type after a run."""
    if report.model_path:
        model = shlex.quote(report.model_path)
        heads = " --medusa" if Path(report.model_path).name == "medusa" else ""
        text(f"\nGenerate from it:  {command()} generate {model} 'Give three tips for staying healthy.'{heads}")
    elif report.status == "interrupted":
        text(f"\nContinue it:  {command()} train {shlex.quote(recipe_path)} --resume")


def command() -> str:
    """How to call this ligertune from the shell that called it: its environment may not be on the PATH."""
    found, own = shutil.which("ligertune"), Path(sys.executable).with_name("ligertune")
    if found and Path(found).parent == own.parent:
        return "ligertune"
    here = Path.cwd()
    if own.exists():
        return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))
    return f"{shlex.quote(sys.executable)} -m ligertune"


def kernels(lines: Iterable[KernelLine], backend: str) -> str:
    """Which kernels run, on how many modules, and on what."""
    applied = [f"{line.kernel} x {line.applied}" for line in lines if line.applied]
    how = "Triton" if backend == "triton" else "PyTorch reference"
    return f"{', '.join(applied)} ({how})" if applied else "none"


def peak_memory(peak: dict[str, int]) -> str:
    """Device peaks where there are any; else what the process held of the host's memory."""
    if "resident_run" in peak:
        return f"{size(peak['resident_run'])} of host memory (whole process)"
    return (
        f"{size(peak['allocated_steady'])} allocated, {size(peak['reserved_steady'])} reserved after warm-up; "
        f"{size(peak['allocated_run'])} allocated over the whole run"
    )


def count(number: float) -> str:
    """12345678 -> 12.3M."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"


def size(n_bytes: float) -> str:
    """Bytes in GiB or MiB."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def now() -> str:
    """For headers of saved reports."""
    return time.strftime("%Y-%m-%d %H:%M")


def columns(title: str, header: list[str], rows: list[list[Any]]) -> None:
    """A table with a header; the first column is a name, the others numbers."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(header):
        grid.add_column(Text(name), justify="right" if i else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    OUTPUT.console.print(grid)


def status(words: str) -> Status:
    """A line on a terminal while something is done, nothing elsewhere; `update` changes its words."""
    return OUTPUT.console.status(Text(words))
