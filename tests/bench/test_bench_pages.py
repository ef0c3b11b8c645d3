"""Pages of scripts/bench: a page says what was measured where, from the rows of one run."""

import json
import sys
from argparse import ArgumentParser
from unittest import mock

import pytest
from support.script_modules import script_module

from ligertune.files.plots import new_figure

PAGE = {
    "page": "packed",
    "title": "Packed rows",
    "intro": "This page compares two sides.",
    "caveats": ["Weights are random."],
    "columns": [["side", "side", ""], ["tokens_per_second", "tokens/s", ",.0f"], ["peak_gib", "peak GiB", ".1f"]],
    "rows": [
        {"side": "ligertune", "ours": True, "tokens_per_second": 74200.4, "peak_gib": 17.84},
        {"side": "Hugging Face", "ours": False, "tokens_per_second": 47102.0, "peak_gib": None},
    ],
    "device": "NVIDIA H100 80GB HBM3",
    "count": 1,
    "versions": {"torch": "2.11.0"},
    "date": "2026-11-25",
    "commit": "1234567",
    "command": "scripts/bench packed --corpus FOLDER --sides with",
    "left_out": ["Without a row: liger-kernel (out of memory)."],
}


@pytest.fixture(scope="module")
def pages():
    return script_module("benchmarks.pages")


def run(pages, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", "packed", *map(str, arguments)])
    parser = ArgumentParser()
    parser.add_argument("--corpus")
    parser.add_argument("--sides")
    return pages.parse(parser)


def test_a_page_is_written_from_what_a_run_printed(pages, monkeypatch, tmp_path):
    chart = {"kind": "bars", "labels": ["side"], "values": {"tokens_per_second": "tokens/s", "peak_gib": "GiB"}}
    printed = ["repeat 1: ligertune", json.dumps(PAGE), json.dumps({**PAGE, "page": "drawn", "chart": chart})]
    (tmp_path / "out.txt").write_text("\n".join(printed), encoding="utf-8")
    with pytest.raises(SystemExit, match="0"):
        run(pages, monkeypatch, "--from", tmp_path / "out.txt", "--page", tmp_path / "docs")
    text = (tmp_path / "docs" / "packed_h100_202611.md").read_text(encoding="utf-8")
    assert "| ligertune | 74,200 | 17.8 |\n| Hugging Face | 47,102 |  |" in text
    assert (
        text.index("## Caveats\n- Weights are random.") < text.index("liger-kernel (out of memory)") < text.index("|")
    )
    assert "two sides. Measured on NVIDIA H100 80GB HBM3, 2026-11-25.\n" in text
    assert "| date, commit | 2026-11-25, 1234567 |" in text and "--sides with\n```" in text
    pytest.importorskip("matplotlib")
    assert "](drawn_h100_202611.png)" in (tmp_path / "docs" / "drawn_h100_202611.md").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "drawn_h100_202611.png").is_file()


def test_saved_output_without_a_page_is_refused(pages, monkeypatch, tmp_path, capsys):
    (tmp_path / "out.txt").write_text("failed\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        run(pages, monkeypatch, "--from", tmp_path / "out.txt", "--page", tmp_path)
    assert "out.txt starts with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "count", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 4, "4xh100"),
        ("NVIDIA A100-SXM4-80GB", 1, "a100"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx4090"),
        ("AMD Instinct MI300X", 1, "mi300x"),
        ("CPU", 1, "cpu"),
    ],
)
def test_the_file_is_named_after_the_device(pages, device, count, name):
    assert pages.Page(**{**PAGE, "device": device, "count": count}).file_name == f"packed_{name}_202611"


def test_the_command_of_a_page_has_no_local_paths(pages, monkeypatch):
    run(pages, monkeypatch, "--corpus", "/data/x", "--sides", "with", "--page=/tmp/pages", "--commit", "1234567")
    assert pages.command_line() == PAGE["command"]
    monkeypatch.setattr(sys, "argv", ["bench", "--site", "unsloth=/data/site"])
    assert pages.command_line() == "scripts/bench --site unsloth=SITE"


def test_the_kernels_page_names_the_rows_in_which_another_is_faster():
    shares = {"ligertune share": 80.0, "ligertune, lean share": None, "torch.compile share": 81.0}
    rows = [
        {"op": "`swiglu`", "size": "8x8", **shares, "liger-kernel share": 81.5},  # within 2 %
        {"op": "`jsd`", "size": "8x9", **shares, "liger-kernel share": 100.0},
        {"op": "`linear_jsd`", "size": "8", **shares, "ligertune, lean share": 50.0, "liger-kernel share": 55.0},
    ]
    ours, lean = script_module("benchmarks.ops.kernels").slower_rows(rows, ["torch.compile", "liger-kernel"])
    assert ours.endswith("slower than another column: `jsd` 8x9 (liger-kernel takes 20.0% less time).")
    assert lean.endswith("slower than liger-kernel: `linear_jsd` 8 (liger-kernel takes 9.1% less time).")


@pytest.fixture
def drawn(pages, tmp_path):
    """A function that draws the chart of a page, and returns its figure."""
    pytest.importorskip("matplotlib")
    charts = script_module("benchmarks.charts")

    def draw(chart: dict, rows: list[dict], columns: tuple = ()):
        figure = new_figure(8, 4)
        page = pages.Page(**{**PAGE, "chart": chart, "rows": rows, "columns": list(columns)})
        with mock.patch.object(charts, "new_figure", return_value=figure):
            charts.draw(page, tmp_path / "chart.png")
        return figure

    return draw


def test_no_two_series_of_a_chart_look_the_same(drawn):
    charts = script_module("benchmarks.charts")
    styles = [charts.series_style(number) for number in range(charts.MAX_SERIES)]
    assert len({(colour, marker) for colour, marker, _ in styles}) == charts.MAX_SERIES
    assert len({(colour, line) for colour, _, line in styles}) == charts.MAX_SERIES
    assert len({marker for _, marker, _ in styles[:14]}) == 14  # printed in grey
    with pytest.raises(ValueError, match="at most 28 series"):
        charts.series_style(charts.MAX_SERIES)
    names = [f"side {i}" for i in range(10)]
    rows = [{"side": name, "x": x, "y": i + x} for i, name in enumerate(names) for x in (1, 2)]
    lines = {"kind": "lines", "x": ["x", "tokens"], "colour": "side", "values": {"y": "ms"}}
    panel = drawn(lines, rows).axes[0]
    assert len({(line.get_color(), line.get_marker()) for line in panel.lines}) == 10
    dots = {"kind": "dots", "labels": ["op"], "values": {name: name for name in names}, "axis": "ms"}
    panel = drawn(dots, [{"op": "a", **{name: i for i, name in enumerate(names)}}]).axes[0]
    assert panel.get_legend_handles_labels()[1] == names  # none is left out
    curves = {"kind": "curves", "curves": {name: [1.0 + i, 2.0] for i, name in enumerate(names)}}
    panel = drawn(curves, []).axes[0]
    assert len({(line.get_color(), line.get_linestyle()) for line in panel.lines}) == 10


def test_ticks_have_no_exponent_and_values_above_the_limit_are_drawn_at_it(drawn):
    chart = {"kind": "dots", "labels": ["op"], "values": {"tokens": "trained"}, "axis": "tokens"}
    panel = drawn(chart, [{"op": "a", "tokens": 1_300_000}, {"op": "b", "tokens": 2.5}]).axes[0]
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert "1,000,000" in labels and not any("e" in label for label in labels)
    chart = {"kind": "bars", "labels": ["op"], "values": {"share": "share, %"}, "limit": 100}
    rows = [{"op": "a", "share": 104.2}, {"op": "b", "share": 61.0}, {"op": "c", "share": None}]
    panel = drawn(chart, rows, (["share", "share", ".1f"],)).axes[0]
    assert [bar.get_width() for bar in panel.patches] == [100, 61.0]
    assert [text.get_text() for text in panel.texts] == ["over 100", "61.0", "not known"]
    assert rows[0]["share"] == 104.2  # the table has what was measured


BARS = {"kind": "bars", "labels": ["side"], "group": "about",
        "values": {"tokens_per_second": "tokens/s without padding (more is better)",
                   "peak_gib": "peak memory per GPU, GiB (less is better)"}}  # fmt: skip


def rows_of(about: str, *sides: str) -> list[dict]:
    return [{"about": about, "side": side, "ours": side.startswith("ligertune"), "tokens_per_second": 67435.0,
             "peak_gib": 139.3} for side in sides]  # fmt: skip


def names_and_headings(figure):
    first = figure.axes[0]
    return [label.get_text() for label in first.get_yticklabels()], [
        text.get_text() for text in first.texts if text.get_fontweight() == "bold"
    ]


def test_bars_of_one_setting_stand_below_its_name(drawn):
    long = "LoRA Llama-3-8B, 2 x 4,096, 4 accumulated, checkpointing"
    rows = rows_of("full", "ligertune", "unsloth") + rows_of(long, "ligertune, offload")
    figure = drawn(BARS, rows, PAGE["columns"])
    names = ["ligertune", "unsloth", "ligertune, offload"]
    assert names_and_headings(figure) == (names, ["full", long])
    assert figure.axes[0].get_yticks().tolist() == [1, 2, 4]
    # each row has a setting of its own
    figure = drawn(BARS, rows_of("16 rows", "ligertune") + rows_of("32 records", "Hugging Face"), PAGE["columns"])
    assert names_and_headings(figure) == (["ligertune, 16 rows", "Hugging Face, 32 records"], [])
    figure = drawn(BARS, rows_of("", "ligertune", "Hugging Face"), PAGE["columns"])
    assert names_and_headings(figure) == (["ligertune", "Hugging Face"], [])


def test_no_text_of_a_bar_chart_lies_on_another(drawn):
    about = "QLoRA Llama-3-8B, 1 x 4,096, 4 accumulated, checkpointing"
    rows = rows_of(about, "ligertune", "Hugging Face + torch.compile + liger-kernel") + rows_of("full", "ligertune")
    figure = drawn(BARS, rows, PAGE["columns"])
    figure.draw_without_rendering()  # places in the figure's pixels, where those of the file are 160 an inch
    texts = [panel.xaxis.label for panel in figure.axes] + [text for panel in figure.axes for text in panel.texts]
    texts += figure.axes[0].get_yticklabels()
    for panel in figure.axes:  # a tick above the limits is not drawn
        texts += [tick.label1 for tick in panel.xaxis.get_major_ticks() if tick.get_loc() <= panel.get_xlim()[1]]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) > 15
    on_another = [
        (name, other) for i, (name, box) in enumerate(boxes) for other, place in boxes[:i] if box.overlaps(place)
    ]
    assert on_another == []
    for panel in figure.axes:
        ends = [text.get_window_extent().x1 for text in panel.texts if text.get_fontweight() != "bold"]
        assert max(ends) < panel.get_window_extent().x1


def test_bars_of_ligertune_are_darker_than_others_in_grey(drawn):
    figure = drawn(BARS, rows_of("", "ligertune", "Hugging Face"), PAGE["columns"])
    ours, other = [
        0.299 * red + 0.587 * green + 0.114 * blue
        for red, green, blue, _ in (bar.get_facecolor() for bar in figure.axes[0].patches)
    ]
    assert other - ours > 0.25
