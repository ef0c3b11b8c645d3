"""Several runs side by side: read from their folders, and written as one self-contained page or plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ligertune.errors import UserError, format_bytes, format_count, format_duration, plural
from ligertune.files.storage import mask_secrets, read_metrics, read_object
from ligertune.launcher.run_lock import check_not_in_use
from ligertune.recipe.read import load_recipe
from ligertune.report.run_page import logged_answers, loss_unit, model_title
from ligertune.report.svg_chart import Series, line_chart, render_template

RECIPE = "resolved_recipe.yaml"
# Line of run i: colour i of 6 and dash i of 4. The first four differ in both, and no two of MAX_RUNS in neither.
COLOURS = ("blue", "red", "green", "amber", "ink", "pink")  # variables of page_style.css.j2
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MAX_RUNS = len(COLOURS) * len(DASHES)
_NOT_COMPARED = ("checkpoint.output_dir", "checkpoint.overwrite", "checkpoint.resume_from_checkpoint", "version")
Rows = list[tuple[str, list[str]]]  # name, and a value for each run


@dataclass(frozen=True)
class RunFolder:
    """What the folder of a run holds.

    settings: of resolved_recipe.yaml. lines: of metrics.jsonl. report: report.json; None before the end of a run.
    is_running: a process holds the lock of the folder.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    lines: list[dict[str, Any]]
    report: dict[str, Any] | None
    is_running: bool

    @property
    def status(self) -> str:
        if self.is_running:
            return "running"
        return str(self.report.get("status", "not finished")) if self.report else "not finished"

    def last(self, key: str) -> Any:
        """Return the last logged value of a key after the first step; None without one."""
        return next((line[key] for line in reversed(self.lines) if line["step"] and line.get(key) is not None), None)

    def at_start(self, key: str) -> Any:
        """Return the value of a key before the first step; None without one."""
        return next((line[key] for line in self.lines if line["step"] == 0 and key in line), None)

    def results(self) -> dict[str, Any]:
        """Return the results as plain values; None for those that are unknown."""
        speed = (self.report or {}).get("throughput") or {}
        memory = (self.report or {}).get("peak_memory") or {}
        measures = sorted({name for line in self.lines for name in line if name.startswith("eval_")} - {"eval_loss"})
        return {
            "status": self.status,
            "steps": max((line["step"] for line in self.lines), default=0),
            "loss_before_training": self.at_start("loss_before_training"),
            "loss": self.last("loss"),
            "eval_loss_before_training": self.at_start("eval_loss"),
            "eval_loss": self.last("eval_loss"),
            **{name: self.last(name) for name in measures},
            "tokens_per_second": speed.get("tokens_per_second", self.last("tokens_per_second")),
            "mfu": speed.get("mfu"),
            "peak_memory": memory.get("allocated_run"),
            "tokens": sum(line.get("tokens", 0) for line in self.lines),
            "seconds": (self.report or {}).get("seconds"),
            "device": (self.report or {}).get("device"),
        }


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Read the folders of runs. Raises UserError for a folder without a run, one given twice, and too many."""
    if len(folders) > MAX_RUNS:
        raise UserError(f"RUN: {len(folders)} runs are given, and at most {MAX_RUNS} can be told apart in a chart.")
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"RUN: {folder} is not a folder.", hint="Name the output_dir of a run.")
        if not (folder / RECIPE).is_file():
            raise UserError(f"RUN: {folder} holds no run: there is no {RECIPE}.", hint="Name the output_dir of a run.")
    places = [folder.resolve() for folder in folders]
    twice = [str(folder) for folder, place in zip(folders, places, strict=True) if places.count(place) > 1]
    if twice:
        raise UserError(f"RUN: {twice[0]} is given twice.")
    names = Counter(place.name for place in places)
    return [
        RunFolder(
            name=place.name if names[place.name] == 1 else str(folder),
            folder=folder,
            settings=load_recipe(folder / RECIPE).model_dump(mode="json"),
            lines=read_metrics(folder / "metrics.jsonl"),
            report=read_object(folder / "report.json"),
            is_running=_is_in_use(folder),
        )
        for folder, place in zip(folders, places, strict=True)
    ]


def _is_in_use(folder: Path) -> bool:
    try:
        check_not_in_use(folder)
    except UserError:
        return True
    return False


def differing_settings(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Return key -> a value for each run, of the keys of the recipe that are not the same in all runs."""
    flat = [_flat(run.settings) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in _NOT_COMPARED)
    values = {key: [settings.get(key) for settings in flat] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def as_report(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the results of the runs, and the settings that differ, as plain values."""
    results = [{"name": run.name, "folder": str(run.folder), **run.results()} for run in runs]
    settings = differing_settings(runs)
    return {
        "runs": results,
        "differing_settings": {
            key: {run.name: value for run, value in zip(runs, values, strict=True)} for key, values in settings.items()
        },
    }


# ---- tables in words


def result_rows(runs: Sequence[RunFolder]) -> Rows:
    """Return (name, a value for each run) of the results that any run has."""
    results = [run.results() for run in runs]
    names = dict.fromkeys(name for found in results for name in found)
    rows = []
    for name in names:
        words = [_result_words(name, found.get(name)) for found in results]
        if any(words):
            rows.append((_RESULTS.get(name, name.replace("eval_", "evaluation: ")), words))
    return rows


_RESULTS = {
    "loss_before_training": "training loss before training",
    "loss": "training loss, last logged",
    "eval_loss_before_training": "evaluation loss before training",
    "eval_loss": "evaluation loss, last",
    "tokens_per_second": "tokens/s without padding",
    "mfu": "MFU",
    "peak_memory": "peak memory",
    "seconds": "time of the last part",
}


def _result_words(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "peak_memory":
        return format_bytes(value)
    if name == "seconds":
        return format_duration(value)
    if name == "mfu":
        return f"{100 * value:.1f} %"
    if name == "tokens":
        return format_count(value)
    if name in ("steps", "tokens_per_second"):
        return f"{value:,.0f}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def setting_rows(runs: Sequence[RunFolder]) -> Rows:
    """Return (key, a value for each run) of the settings that differ."""
    found = differing_settings(runs).items()
    return [(key, ["not set" if value is None else _setting_words(value) for value in values]) for key, values in found]


def _setting_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "\n".join(_setting_words(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_setting_words(one)}" for key, one in value.items() if one not in (None, {}, []))
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- the page


def runs_page(runs: Sequence[RunFolder], *, refresh: int | None = None) -> str:
    """Return the HTML page of runs. refresh: seconds after which it says that it is loaded again."""
    lines = [(COLOURS[i % len(COLOURS)], DASHES[(i + i // 12) % len(DASHES)]) for i in range(len(runs))]
    page = render_template(
        "ligertune.report",
        "runs_page.html.j2",
        title=runs[0].name if len(runs) == 1 else plural(len(runs), "run"),
        runs=[
            {"name": run.name, "title": model_title(run.settings), "status": run.status, "colour": colour, "dash": dash}
            for run, (colour, dash) in zip(runs, lines, strict=True)
        ],
        charts=_overlaid_charts(runs, lines),
        results=result_rows(runs),
        settings=setting_rows(runs),
        samples=_samples(runs),
        refresh=refresh,
    )
    return mask_secrets(page)


def _overlaid_charts(runs: Sequence[RunFolder], lines: Sequence[tuple[str, str]]) -> list[tuple[str, Markup]]:
    """Return (title, SVG) of each chart. Losses of different units are in different charts."""

    def chart(title: str, y_label: str, key: str, *, unit: str = "", **options: bool) -> tuple[str, Markup | None]:
        series = []
        for run, (colour, dash) in zip(runs, lines, strict=True):
            points = [(line["step"], line[key]) for line in run.lines if line.get(key) is not None]
            if key == "loss" and (first := run.at_start("loss_before_training")) is not None:
                points.insert(0, (0, first))
            if not unit or loss_unit(run.settings) == unit:
                series.append(Series(run.name, f"var(--{colour})", points, dots=key == "eval_loss", dash=dash))
        return title, line_chart(title, y_label, series, legend=False, **options)

    units = dict.fromkeys(loss_unit(run.settings) for run in runs)
    charts = [chart("Training loss", unit, "loss", unit=unit) for unit in units]
    charts += [chart("Evaluation loss", unit, "eval_loss", unit=unit) for unit in units]
    charts.append(chart("Throughput", "tokens/s without padding", "tokens_per_second", from_zero=True))
    return [(title, drawn) for title, drawn in charts if drawn is not None]


def _samples(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return each prompt with (run and moment, answer). Answers before training that are equal are shown once."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for run in runs:
        for sample in logged_answers(run.lines):
            answers = found.setdefault(sample["prompt"], {})
            for when, answer in sample["answers"]:
                answers.setdefault((when, answer), []).append(run.name)
    return [
        {
            "prompt": prompt,
            "answers": [(f"{_names(names, len(runs))}, {when}", answer) for (when, answer), names in answers.items()],
        }
        for prompt, answers in found.items()
    ]


def _names(names: list[str], count: int) -> str:
    """Return the runs that gave an answer: "a, b and 3 others". count: of all runs."""
    if len(names) == count > 2:
        return "all runs"
    others = len(names) - 2
    return ", ".join(names) if others < 2 else f"{', '.join(names[:2])} and {others} others"
