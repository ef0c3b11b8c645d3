"""The report of a run against the data, the base model and the files that the run wrote."""

import hashlib
import html
import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
import torch
from support.quickstart_runs import RESUME, plan_run, saves, train, unfinished
from transformers import AutoModelForCausalLM

from ligertune.cli.render.run_report import next_step, show_report
from ligertune.data.batching.order import DataOrder
from ligertune.errors import format_bytes, format_count, format_rate
from ligertune.models.save import write_prompt
from ligertune.report import loss_unit, model_title
from ligertune.report.make_report import command_line, git_commit
from ligertune.report.svg_chart import tick_labels, ticks
from ligertune.run import run

# One epoch of 36 examples in nine steps. Lines are logged at 4, 8 and 9, checkpoints are written at 3 and 6.
EPOCH = {"train.num_train_epochs": 1, "logging.logging_steps": 4, "model.dtype": "float32", **saves(3)}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that was killed after step 6 and continued: (folder, its plan and data, report of the second part)."""
    folder = tmp_path_factory.mktemp("resumed")
    train(folder, **EPOCH)
    unfinished(folder)
    report = train(folder, **EPOCH, **RESUME)
    assert report.resumed_from == 6
    return folder / "run", plan_run(folder, **EPOCH, **RESUME, **{"checkpoint.output_dir": folder / "other"}), report


@pytest.fixture(scope="module")
def lines(resumed) -> list[dict]:
    return [json.loads(line) for line in (resumed[0] / "metrics.jsonl").read_text().splitlines()]


def test_token_totals_include_the_steps_before_a_resume_and_those_that_no_line_contains(resumed, lines):
    """The steps 5 and 6 were logged at step 8, a line that the resumed run dropped."""
    _, job, report = resumed
    rows = [job.data.train[i] for i in range(len(job.data.train))]
    assert report.tokens == sum(len(row.input_ids) for row in rows)
    assert report.trained_tokens == sum(int((row.labels[1:] != -100).sum()) for row in rows)
    assert report.tokens > sum(line.get("tokens", 0) for line in lines)


def test_the_loss_before_training_is_the_base_models_on_the_first_batch(resumed, quickstart):
    _, job, report = resumed
    plan, examples = job.plan, job.data.train
    whole, grouped = len(examples), plan.rows.kind == "grouped"
    order = DataOrder(
        examples.lengths, total_rows=whole, seed=plan.build.seed, batching=plan.batching, packs=None, grouped=grouped
    )
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K").eval()
    total, count = 0.0, 0
    for (index,) in order.step(0):
        row = examples[index]
        ids, labels = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.labels).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
        count += int((labels[1:] != -100).sum())
    assert report.loss_before_training == pytest.approx(total / count, rel=1e-4)
    assert report.loss_before_training != report.loss_first


def test_a_fused_loss_that_ran_is_reported(resumed):
    report = resumed[2]
    assert report.losses["fused"] >= report.steps - report.resumed_from  # evaluations count, too
    assert (report.losses["materialised"], report.losses["elsewhere"]) == ({}, 0)
    assert {line.kernel: line.applied for line in report.kernels}["linear_cross_entropy"] == 1


@pytest.mark.filterwarnings("ignore:the loss is computed from materialised logits")
def test_a_fused_loss_that_was_planned_but_did_not_run_is_a_warning_after_the_first_step(tmp_path, capsys):
    def observe(model):
        model.lm_head.register_forward_hook(lambda module, args, output: output)

    lines = []
    report = run(plan_run(tmp_path, **{"train.max_steps": 2}), lines.append, change=observe)
    reason = "the output head is observed: it has a forward hook"
    assert lines[0]["step"] == 1 and lines[0]["note"].startswith("linear_cross_entropy was planned but did not run")
    assert reason in lines[0]["note"] and lines[0]["note"] in report.notes
    assert report.losses["fused"] == 0 and sum(report.losses["materialised"].values()) == 5  # and the evaluation
    found = {line.kernel: line for line in report.kernels}["linear_cross_entropy"]
    assert (found.applied, found.left) == (0, 1) and reason in found.note
    show_report(report)
    printed = "".join(capsys.readouterr())  # on standard error if an earlier command printed JSON
    assert "5 from logits" in printed and "linear_cross_entropy" not in printed


@pytest.mark.parametrize(("template", "prompt"), [("raw", "first words"), ("chat", "Give three tips")])
def test_the_command_after_a_run_continues_a_text_or_asks(template, prompt, resumed, tmp_path, capsys):
    write_prompt(tmp_path, {"prompt_template": template, "system_prompt": None})
    next_step(replace(resumed[2], model_path=str(tmp_path)), [], launched=False)
    assert prompt in "".join(capsys.readouterr())


def test_a_loss_that_was_logged_once_is_printed_once(resumed, capsys):
    report = resumed[2]
    once = replace(report, loss_first=report.loss_last)
    for one, arrows in ((report, 1), (once, 0)):
        show_report(one)
        (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if line.startswith("training loss")]
        assert line.count("->") == arrows and f"{report.loss_last:.4f}" in line
        assert str(one).count("->") == arrows


def test_every_line_has_a_time_in_utc_within_the_run(resumed, lines):
    report = resumed[2]
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    assert times == sorted(times) and all(time.utcoffset() == timedelta(0) for time in times)
    started, ended = map(datetime.fromisoformat, (report.started, report.ended))
    assert [line["step"] for line, time in zip(lines, times, strict=True) if time < started] == [0, 4]
    assert times[-1] <= ended and (ended - started).total_seconds() == pytest.approx(report.seconds, abs=0.5)


def test_the_report_names_host_and_recipe_hash(resumed):
    folder = resumed[0]
    stored = json.loads((folder / "report.json").read_text())
    assert stored["host"] == socket.gethostname()
    assert stored["recipe_sha256"] == hashlib.sha256((folder / "resolved_recipe.yaml").read_bytes()).hexdigest()


def test_the_page_shows_the_numbers_of_the_run_and_fetches_nothing(resumed, lines):
    folder, _, report = resumed
    page = (folder / "report.html").read_text()
    evaluation = next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)
    shown = ("stories260K, full fine-tuning", f"{report.loss_before_training:.3f} before training", "9 of 9 steps",
             f"{evaluation:.4f}", f"{report.tokens:,} ({report.trained_tokens:,} trained)", report.host,
             report.recipe_sha256, "short_rows.jsonl", "36 for training, 4 for evaluation")  # fmt: skip
    assert not [words for words in shown if words not in page]
    assert "default-src 'none'" in page and not re.search(r"<script|<link|src=|@import|url\(", page)
    parts = [float(width) for width in re.findall(r'style="width:([\d.]+)%', page)]
    assert sum(parts) == pytest.approx(100, abs=0.1) and len(parts) > 4
    assert html.escape((folder / "resolved_recipe.yaml").read_text(), quote=False) in html.unescape(page)


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2 of #rrggbb or #rgb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_of_the_page_has_a_light_and_a_dark_value_that_can_be_seen(resumed):
    page = (resumed[0] / "report.html").read_text()
    style = page.split("<style>")[1].split("</style>")[0]
    rules = re.findall(r":root \{([^}]*)\}", style)
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+);", rule)) for rule in rules)
    assert "@media screen and (prefers-color-scheme: dark) { :root" in style and "color-scheme: light dark" in rules[0]
    assert light.keys() == dark.keys() == set(re.findall(r"var\(--([\w-]+)", page)) | {"pink", "ink", "red"}
    without = re.sub(r"var\([^)]*\)|:root \{[^}]*\}|&#\d+", "", page)
    assert not re.findall(r"[:\"]\s*#[0-9a-f]{3,6}\b", without)
    for values in (light, dark):
        least = {"text": 7, "dim": 4.5, **dict.fromkeys(("blue", "red", "green", "violet", "amber", "pink", "ink"), 3)}
        for name, ratio in least.items():
            one, other = sorted((luminance(values[name]), luminance(values["page"])))
            assert (other + 0.05) / (one + 0.05) >= ratio, name


def test_charts_place_their_points_by_the_ticks(resumed, lines):
    """The y of each point, read back by the labels of the ticks, is its value."""
    page = (resumed[0] / "report.html").read_text()
    for title, key in (("Learning rate", "learning_rate"), ("Throughput", "tokens_per_second")):
        chart = page.split(f"<h3>{title}</h3>")[1].split("</svg>")[0]
        ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.,e-]+)<', chart)
        (y0, low), (y1, high) = ((float(y) - 4, float(value.replace(",", ""))) for y, value in (ticks[0], ticks[-1]))
        assert low < high and y1 < y0  # larger values are higher
        places = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]+)"', chart)[1].split()]
        values = [low + (y - y0) / (y1 - y0) * (high - low) for y in places]
        assert values == pytest.approx([line[key] for line in lines if key in line], abs=0.005 * high)


def test_a_shortened_count_has_three_digits():
    numbers = (999, 6400, 12345, 999_960, 260_032, 8.03e9)
    assert [format_count(number) for number in numbers] == ["999", "6.40k", "12.3k", "1.00M", "260k", "8.03B"]


def test_few_bytes_are_not_zero_mebibytes():
    assert [format_bytes(number) for number in (40_000, 600_000, 3 << 29)] == ["39.1 KiB", "0.6 MiB", "1.50 GiB"]


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 9, True, ["0", "2", "4", "6", "8", "10"]),
        (1, 3, True, ["1", "2", "3"]),  # no fractional steps
        (3.1, 4.4, False, ["3.0", "3.5", "4.0", "4.5"]),
        (0, 2e-5, False, ["0", "5e-06", "1e-05", "1.5e-05", "2e-05"]),
        (5, 5, True, ["5", "6"]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, whole, expected):
    found = ticks(low, high, whole=whole)
    assert tick_labels(found) == expected and found[0] <= low and high <= found[-1] * (1 + 1e-9)


def test_a_page_says_what_was_trained_and_in_which_unit_its_losses_are():
    settings = {"task": "sft", "method": {"type": "qlora"}, "model": {"model_name_or_path": "Qwen/Qwen2.5-0.5B"}}
    assert (model_title(settings), loss_unit(settings)) == ("Qwen/Qwen2.5-0.5B, QLoRA", "nats per trained token")
    medusa = {**settings, "task": "medusa", "medusa": {"stage": 1}, "model": {"model_name_or_path": "/models/tiny"}}
    assert model_title(medusa) == "tiny, Medusa heads" and "sum over the heads" in loss_unit(medusa)
    pairs = {**settings, "task": "dpo", "preference": {"loss_type": "ipo"}}
    assert model_title(pairs) == "Qwen/Qwen2.5-0.5B, preferences (ipo), QLoRA" and loss_unit(pairs) == "mean over pairs"
    assert loss_unit({**pairs, "preference": {"loss_type": "kto"}}) == "mean over answers"
    distilled = {**settings, "task": "distill", "distill": {"teacher": "/models/large"}}
    assert model_title(distilled) == "Qwen/Qwen2.5-0.5B, distilled from large, QLoRA"


def test_a_rate_has_three_digits_or_more():
    assert [format_rate(rate) for rate in (12345.6, 57.123, 6.2, 0.857)] == ["12,346", "57.1", "6.20", "0.857"]


def test_the_command_is_quoted_for_a_shell(monkeypatch):
    typed = ["train", "my recipe.yaml", "--set", "data.datasets=[{path: a b}]"]
    for program, name in (("/opt/env/bin/ligertune", "ligertune"), ("/lib/ligertune/__main__.py", "ligertune"),
                          ("my train.py", "my train.py")):  # fmt: skip
        monkeypatch.setattr(sys, "argv", [program, *typed])
        assert shlex.split(command_line()) == [name, *typed]


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert git_commit() is None  # no commit yet
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    log = (tmp_path / ".git" / "logs" / "HEAD").read_text()
    assert git_commit() == log.split()[1]
    monkeypatch.setenv("PATH", "")  # git is not installed
    assert git_commit() is None
