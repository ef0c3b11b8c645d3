"""report.html: one self-contained page about a run, with charts, memory, data, recipe and where it comes from."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ligertune.errors import format_bytes, format_count, format_duration, plural
from ligertune.files.plots import draw_curves
from ligertune.files.storage import mask_secrets, model_name, read_metrics, write_json, write_text
from ligertune.planning.feature_spec import MeasureChart, feature_of
from ligertune.report.evaluation_results import PAGE, evaluation_section
from ligertune.report.make_report import Report
from ligertune.report.svg_chart import Series, line_chart, render_template

if TYPE_CHECKING:
    from ligertune.planning.plan import Plan

# variables of page_style.css.j2, which has a light and a dark value of each
BLUE = "var(--blue)"
RED = "var(--red)"
GREEN = "var(--green)"
VIOLET = "var(--violet)"
AMBER = "var(--amber)"
# MemoryPeak.parts() -> words and colour
MEMORY_KINDS = {
    "weights": ("weights", BLUE),
    "optimizer": ("optimizer states", "var(--sky)"),
    "frozen_model": ("frozen model", RED),
    "gradients": ("gradients", VIOLET),
    "activations": ("activations", GREEN),
    "loss": ("loss", AMBER),
    "working": ("temporary", "var(--grey)"),
}
Rows = list[tuple[str, str]]


def write_run_report(plan: Plan, report: Report) -> None:
    """Write curves.png, report.html and report.json into output_dir. Only the main rank calls it."""
    draw_curves(plan.output_dir, title=model_title(plan.settings), loss_unit=loss_unit(plan.settings))
    write_page(plan, report)
    write_json(plan.output_dir / "report.json", report.as_dict())  # last: with it the run is finished


def write_page(plan: Plan, report: Report) -> Path:
    """Write report.html into output_dir. Only the main rank calls it, after the last line of metrics.jsonl."""
    lines = read_metrics(plan.output_dir / "metrics.jsonl")
    evaluations = [line for line in lines if "eval_loss" in line]
    page = render_template(
        "ligertune.report",
        "run_page.html.j2",
        title=model_title(plan.settings),
        status=_status(report),
        cards=_cards(report),
        notes=report.notes,
        charts=_charts(lines, plan.settings),
        memory=_memory(plan, report),
        data=_data(plan, report),
        evaluations=_evaluations(evaluations),
        samples=logged_answers(lines),
        measured=[] if report.measured is None else feature_of(report.task).result_tables(report.measured),
        later_evaluations=evaluation_section(plan.output_dir),
        setup=_setup(plan, report),
        origin=_origin(report),
        recipe=plan.recipe_text,
    )
    path = plan.output_dir / PAGE
    write_text(path, mask_secrets(page))
    return path


def model_title(settings: dict[str, Any]) -> str:
    """Return the model's hub id or folder name, and the method: "stories260K, full fine-tuning"."""
    method = settings["method"]["type"]
    words = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA", "freeze": "frozen layers"}[method]
    words = feature_of(settings["task"]).title(settings, words)
    return f"{model_name(settings['model']['model_name_or_path'])}, {words}"


def loss_unit(settings: dict[str, Any]) -> str:
    """Return the unit of the losses of a run, for the axis of a chart."""
    return feature_of(settings["task"]).loss_unit(settings)


def batch_words(plan: Plan) -> str:
    """Return the global batch: "8 rows of 512 tokens per step (4 x 2 accumulated x 1 process)"."""
    batching = plan.batching
    rows = plan.rows
    what = plural(batching.global_batch_size, "row" if rows.packed else rows.example_noun)
    length = f"of {'' if rows.packed else 'up to '}{rows.length:,} tokens per step"
    processes = plural(batching.row_ranks, "process", "processes")
    parts = f"{batching.micro_batch_size} x {batching.accumulation} accumulated x {processes}"
    return f"{what} {length} ({parts})"


def _evaluations(lines: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table of evaluations: names of the columns, and then a row for each. No rows without evaluations."""
    if not lines:
        return []
    found = dict.fromkeys(name for line in lines for name in line if name.startswith("eval_") and name != "eval_loss")
    measures = list(found)
    rows = []
    for line in lines:
        values = (line.get(name) for name in measures)
        words = ("" if value is None else f"{value:.4f}" for value in values)
        step = f"{line['step']:,}" if line["step"] else "before training"
        rows.append((step, f"{line['eval_loss']:.4f}", *words))
    return [("step", "loss", *(name.removeprefix("eval_") for name in measures)), *rows]


def logged_answers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each prompt of `eval.sample_prompts` with (when, answer) before training and in the last evaluation."""
    answered = [line for line in lines if "samples" in line]
    before = [line for line in answered if line["step"] == 0][:1]
    after = [line for line in answered if line["step"] > 0][-1:]
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (*before, *after):
        when = f"after step {line['step']:,}" if line["step"] else "before training"
        for sample in line["samples"]:
            found.setdefault(sample["prompt"], []).append((when, sample["answer"]))
    return [{"prompt": prompt, "answers": answers} for prompt, answers in found.items()]


def _status(report: Report) -> str:
    words = report.status + (f" by {report.stopped_by}" if report.stopped_by else "")
    resumed = f", resumed at step {report.resumed_from:,}" if report.resumed_from else ""
    return f"{words}: {report.steps:,} of {plural(report.total_steps, 'step')}{resumed}"


def _cards(report: Report) -> list[dict[str, str]]:
    """Return the headline numbers: name, value, and a line below."""
    cards = []
    speed = report.throughput
    if report.loss_last is not None:
        before = report.loss_before_training
        below = "" if before is None else f"{before:.3f} before training"
        cards.append(("training loss", f"{report.loss_last:.3f}", below))
    if report.eval_loss is not None:
        before = report.eval_loss_before_training
        below = "last evaluation" if before is None else f"{before:.3f} before training"
        cards.append(("evaluation loss", f"{report.eval_loss:.3f}", below))
    if speed is not None:
        padding = f"{100 * speed.padding_share:.1f} % padding"
        mfu = "" if speed.mfu is None else f", MFU {100 * speed.mfu:.1f} %"
        cards.append(("tokens/s", f"{speed.tokens_per_second:,.0f}", f"without padding; {padding}{mfu}"))
    kind = "device memory" if report.peak_memory["kind"] == "device" else "host memory of the process"
    cards.append(("peak memory", format_bytes(report.peak_memory["allocated_run"]), kind))
    cards.append(("tokens", format_count(report.tokens), f"{format_count(report.trained_tokens)} trained"))
    cards.append(("time", format_duration(report.seconds), "this part of the run" if report.resumed_from else ""))
    return [dict(zip(("name", "value", "below"), card, strict=True)) for card in cards]


def _charts(lines: list[dict[str, Any]], settings: dict[str, Any]) -> list[tuple[str, Markup]]:
    """Return (title, SVG) of each chart that has values."""

    def points(key: str) -> list[tuple[int, float]]:
        return [(line["step"], line[key]) for line in lines if line.get(key) is not None]

    losses = [Series("training", BLUE, [*points("loss_before_training"), *points("loss")])]
    losses.append(Series("evaluation", RED, points("eval_loss"), dots=True))

    def measured(chart: MeasureChart) -> Markup | None:
        evaluated = points(f"eval_{chart.measure}")
        series = [Series("training", BLUE, points(chart.measure)), Series("evaluation", RED, evaluated, dots=True)]
        return line_chart(chart.title, chart.unit, series)

    charts = {
        "Loss": line_chart("Loss", loss_unit(settings), losses),
        **{chart.title: measured(chart) for chart in feature_of(settings["task"]).charts},
        "Learning rate": _single("Learning rate", "learning rate", VIOLET, points("learning_rate")),
        "Gradient norm": _single("Gradient norm", "L2 norm before clipping", AMBER, points("grad_norm")),
        "Throughput": _single("Throughput", "tokens/s without padding", GREEN, points("tokens_per_second")),
    }
    return [(title, chart) for title, chart in charts.items() if chart is not None]


def _single(title: str, y_label: str, colour: str, points: list[tuple[int, float]]) -> Markup | None:
    return line_chart(title, y_label, [Series(title, colour, points)], from_zero=True)


def _memory(plan: Plan, report: Report) -> dict[str, Any]:
    """Return the predicted parts with their share of the longest bar, and the measured peak."""
    measured = report.peak_memory
    peak = plan.peak
    on_device = measured["kind"] == "device"
    longest = max(peak.total if peak else 1, measured["allocated_run"] if on_device else 1)
    parts = [
        {"words": words, "colour": colour, "size": format_bytes(size), "percent": round(100 * size / longest, 2)}
        for kind, (words, colour) in MEMORY_KINDS.items()
        if peak and (size := peak.parts()[kind])
    ]
    return {
        "parts": parts,
        "predicted": format_bytes(peak.total) if peak else "",
        "measured": format_bytes(measured["allocated_run"]),
        "on_device": on_device,
        "percent": round(100 * measured["allocated_run"] / longest, 2),
        "reserved": format_bytes(measured["reserved_run"]) if on_device else "",
    }


def _data(plan: Plan, report: Report) -> Rows:
    data = plan.data
    settings = plan.settings["data"]
    sources = ", ".join(model_name(entry["path"]) for entry in settings["datasets"])
    rows = [("sources", sources), ("prompt template", data.template)]
    if plan.rows.streamed:
        rows.append(("examples", "streamed: they are not counted before training"))
    else:
        share = 100 * data.trained_tokens / max(1, data.tokens)
        noun = plan.rows.example_noun
        rows += [
            (f"{noun}s", f"{data.examples:,} for training, {data.eval_examples:,} for evaluation"),
            ("tokens of an epoch", f"{data.tokens:,}, {share:.1f} % trained"),
            (f"longest {'sequence' if noun == 'pair' else noun}", plural(data.longest, "token")),
            ("truncated", plural(data.truncated, noun)),
        ]
        rows += [(f"dropped: {reason}", plural(count, "row")) for reason, count in data.dropped.items()]
        rows += [] if data.dropped else [("dropped", "none")]
    padding = 1 - report.tokens / max(1, report.padded_tokens)
    rows += [
        ("tokens of the run", f"{report.tokens:,} ({report.trained_tokens:,} trained)"),
        ("padding", f"{100 * padding:.1f} % of the computed token slots"),
    ]
    return rows


def _setup(plan: Plan, report: Report) -> Rows:
    schedule = plan.schedule
    kernels = ", ".join(f"{line.kernel} x {line.applied}" for line in report.kernels if line.applied)
    how = "Triton" if report.kernels_backend == "triton" else "PyTorch references, because the device runs no Triton"
    active = "" if report.n_active is None else f"{report.n_active:,} active, "
    return [
        ("model", f"{report.model_family}, {report.n_parameters:,} parameters, {active}{report.n_trainable:,} trained"),
        ("device", f"{report.device} x {report.world_size}, {report.strategy}, {report.dtype}"),
        ("batch", batch_words(plan)),
        ("schedule", f"{plan.optimizer.name}, {schedule.type}, learning rate {schedule.learning_rate:g}, "
                     f"{plural(schedule.warmup_steps, 'warm-up step')}"),
        ("attention", plan.attn_implementation),
        ("kernels", f"{kernels} ({how})" if kernels else "none"),
        ("model files", report.model_path or "not written"),
    ]  # fmt: skip


def _origin(report: Report) -> Rows:
    return [
        ("started", _date(report.started)),
        ("ended", _date(report.ended)),
        ("host", report.host),
        ("command", report.command),
        ("git commit", report.git_commit or "not in a git checkout"),
        ("recipe (SHA-256)", report.recipe_sha256),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    ]


def _date(stamp: str) -> str:
    return f"{datetime.fromisoformat(stamp):%Y-%m-%d %H:%M:%S} UTC"
