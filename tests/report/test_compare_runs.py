"""`ligertune report`: the page and the numbers of several runs against their files, and the page served live."""

import html
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from support.command_line import environment, metrics, run_here
from support.quickstart_runs import ONE_ROW, TWO_LAYERS, train

from ligertune.launcher.run_lock import locked_folder
from ligertune.report.compare_runs import MAX_RUNS, read_runs, runs_page
from ligertune.report.live_page import listen_for_page
from ligertune.report.svg_chart import HEIGHT


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with the run `first`, and `second`: a copy with another learning rate and other losses."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, **{**TWO_LAYERS, **ONE_ROW, "eval.eval_on_start": True, "eval.sample_prompts": "[<b>Hello</b>]"})
    (folder / "run").rename(folder / "first")
    shutil.copytree(folder / "first", folder / "second")
    recipe = yaml.safe_load((folder / "second/resolved_recipe.yaml").read_text())
    recipe["train"]["learning_rate"] = 0.25
    recipe["data"]["datasets"][0]["weight"] = 3.0
    (folder / "second/resolved_recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [{**line, "loss": 2 * line["loss"]} if "loss" in line else line for line in metrics(folder / "second")]
    lines = [line for line in lines if "samples" not in line or line["step"] == 0]
    (folder / "second/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def lines_of(chart: str) -> list[tuple[str, str]]:
    """Return (colour, dash) of each line of a chart."""
    drawn = re.findall(r'<polyline[^>]*stroke:var\(--(\w+)\)"([^>]*)>', chart)
    return [(colour, (re.findall(r'dasharray="([\d ]+)"', rest) or [""])[0]) for colour, rest in drawn]


def charts_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<figure><h3>([^<]*)</h3>(.*?)</figure>", page, re.DOTALL))


def test_the_page_overlays_runs_and_says_which_settings_differ(trained):
    done = run_here("report", "first", "second", "--out", "page.html", "--json", cwd=trained)
    assert done.code == 0 and "train.learning_rate" in done.err and "0.25" in done.err, done.err
    found = json.loads(done.out)
    page = (trained / "page.html").read_text()
    assert found["page"] == "page.html" and [one["name"] for one in found["runs"]] == ["first", "second"]
    first, second = found["runs"]
    stored = json.loads((trained / "first/report.json").read_text())
    for name, key in (("loss", "loss_last"), ("eval_loss", "eval_loss"), ("tokens", "tokens"), ("steps", "steps"),
                      ("eval_loss_before_training", "eval_loss_before_training"), ("status", "status")):  # fmt: skip
        assert first[name] == stored[key], name
    assert first["tokens_per_second"] == stored["throughput"]["tokens_per_second"]
    assert second["loss"] == 2 * first["loss"] and f"<td>{second['loss']:.4f}</td>" in page
    differing = found["differing_settings"]
    rate = yaml.safe_load((trained / "first/resolved_recipe.yaml").read_text())["train"]["learning_rate"]
    assert differing.keys() == {"train.learning_rate", "data.datasets"}
    assert differing["train.learning_rate"] == {"first": rate, "second": 0.25}
    assert f"<th>train.learning_rate</th><td>{rate:g}</td><td>0.25</td>" in page.replace("<wbr>", "")
    assert "default-src 'none'" in page and not re.search(r"<script|<link|src=|@import|url\(|http-equiv=.refresh", page)


def test_each_chart_has_a_line_for_each_run_at_its_values(trained):
    charts = charts_of(runs_page(read_runs([trained / "first", trained / "second"])))
    assert list(charts) == ["Training loss", "Evaluation loss", "Throughput"]
    assert all(lines_of(chart) == [("blue", ""), ("red", "7 3")] for chart in charts.values())
    chart = charts["Training loss"]
    ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.,]+)<', chart)
    (y0, low), (y1, high) = ((float(y) - 4, float(value.replace(",", ""))) for y, value in (ticks[0], ticks[-1]))
    for name, points in zip(("first", "second"), re.findall(r'points="([^"]+)"', chart), strict=True):
        values = [low + (float(pair.split(",")[1]) - y0) / (y1 - y0) * (high - low) for pair in points.split()]
        logged = [line.get("loss", line.get("loss_before_training")) for line in metrics(trained / name)]
        assert values == pytest.approx([loss for loss in logged if loss is not None], abs=(high - low) / HEIGHT)


def test_answers_of_base_and_runs_stand_side_by_side_and_equal_ones_once(trained):
    page = html.unescape(runs_page(read_runs([trained / "first", trained / "second"])))
    before, after = (line["samples"][0]["answer"] for line in metrics(trained / "first") if "samples" in line)
    section = page.split("Sample answers")[1]
    assert section.count("<h3><b>Hello</b></h3>") == 1
    assert re.findall("<p class=dim>([^<]*)</p><pre>([^<]*)</pre>", section) == [
        ("first, second, before training", before), ("first, after step 3", after),
    ]  # fmt: skip


def test_no_two_of_many_runs_have_the_same_colour_and_dash(trained, tmp_path):
    folders = [tmp_path / f"run{i}" for i in range(MAX_RUNS)]
    for folder in folders:
        folder.mkdir()
        for name in ("resolved_recipe.yaml", "metrics.jsonl"):
            shutil.copy(trained / "first" / name, folder / name)
    page = runs_page(read_runs(folders))
    drawn = lines_of(charts_of(page)["Throughput"])
    assert len(drawn) == len(set(drawn)) == MAX_RUNS
    assert all(len({line[part] for line in drawn[:4]}) == 4 for part in (0, 1))
    legend = re.findall(r'<line x1="1" [^>]*var\(--(\w+)\)" stroke-width="2.6"(?: stroke-dasharray="([^"]*)")?', page)
    assert legend == drawn and "All settings are equal." in page
    assert "all runs, before training" in page and "not finished" in page
    refused = run_here("report", *folders, tmp_path / "one-more", cwd=tmp_path)
    assert refused.code == 2 and f"at most {MAX_RUNS}" in refused.err and not (tmp_path / "runs.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "RUN: nowhere is not a folder."),
        (["."], "RUN: . holds no run: there is no resolved_recipe.yaml."),
        (["first", "../{name}/first"], "RUN: first is given twice."),
        (["first", "--out", "missing/page.html"], "--out: missing/page.html is in a folder that does not exist."),
        (["first", "--watch", "--out", "page.html"], "--watch and --out"),
        (["first", "--port", "0"], "--port is of --watch"),
    ],
)
def test_wrong_arguments_are_one_sentence(trained, arguments, message):
    done = run_here("report", *(one.format(name=trained.name) for one in arguments), cwd=trained)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done.err


def fetch(url: str, **headers: str) -> tuple[int, str, str | None]:
    """Return status, text and the header Refresh of a URL."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode(), answer.headers["Refresh"]
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read().decode(), problem.headers["Refresh"]


def test_a_port_in_use_is_one_sentence(trained):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_here("report", "first", "--watch", "--port", port, cwd=trained)
    assert done.code == 2 and f"--port: {port} is in use." in done.err, done.err


def test_the_page_is_made_anew_for_each_request_and_for_this_machine_only(trained, tmp_path):
    run = tmp_path / "live"
    shutil.copytree(trained / "first", run)
    server = listen_for_page(0, [run])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        assert server.url.startswith("http://127.0.0.1:")
        status, page, refresh = fetch(server.url)
        assert (status, refresh) == (200, "30") and "completed" in page and "9.8765" not in page
        with locked_folder(run), (run / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": 4, "loss": 9.8765}) + "\n")
            lines.flush()
            status, page, refresh = fetch(server.url)
        assert (status, refresh) == (200, "5") and "9.8765" in page and "running" in page
        assert fetch(server.url, Host="example.org")[0] == 403 and fetch(f"{server.url}report.json")[0] == 404
        (run / "resolved_recipe.yaml").unlink()
        status, text, refresh = fetch(server.url)
        assert (status, refresh) == (500, "5") and "holds no run" in text
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_ctrl_c_ends_the_server(trained):
    command = [sys.executable, "-m", "ligertune", "report", "first", "--watch", "--port", "0", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=trained, env=environment(), **pipes) as server:
        try:
            address = json.loads("".join(server.stdout.readline() for _ in range(3)))["address"]
            assert fetch(address)[0] == 200
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=30) == 130
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()
