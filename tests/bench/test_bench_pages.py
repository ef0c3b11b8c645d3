"""scripts/bench_pages.py: a page says what was measured where, from the rows of one run."""

import json
import sys
from argparse import ArgumentParser

import pytest
from command_line import ROOT
from script_modules import load_script

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
    "command": "scripts/bench_e2e --corpus FOLDER --only packed",
    "left_out": ["Without a row: liger-kernel (out of memory)."],
}


@pytest.fixture(scope="module")
def pages():
    return load_script("bench_pages.py")


def run(pages, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench_e2e", *map(str, arguments)])
    parser = ArgumentParser()
    parser.add_argument("--corpus")
    parser.add_argument("--only")
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
    assert "| date, commit | 2026-11-25, 1234567 |" in text and "--only packed\n```" in text
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
    run(pages, monkeypatch, "--corpus", "/data/x", "--only", "packed", "--page=/tmp/pages", "--commit", "1234567")
    assert pages.command_line() == PAGE["command"]


def test_the_kernels_page_names_the_rows_in_which_another_is_faster(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    shares = {"ligertune share": 80.0, "ligertune, lean share": None, "torch.compile share": 81.0}
    rows = [
        {"op": "`swiglu`", "size": "8x8", **shares, "liger-kernel share": 81.5},  # within 2 %
        {"op": "`jsd`", "size": "8x9", **shares, "liger-kernel share": 100.0},
        {"op": "`linear_jsd`", "size": "8", **shares, "ligertune, lean share": 50.0, "liger-kernel share": 55.0},
    ]
    ours, lean = load_script("bench_kernels").slower_rows(rows, ["torch.compile", "liger-kernel"])
    assert ours.endswith("slower than another column: `jsd` 8x9 (liger-kernel takes 20.0% less time).")
    assert lean.endswith("slower than liger-kernel: `linear_jsd` 8 (liger-kernel takes 9.1% less time).")


def test_the_preference_page_compares_with_trl_on_the_same_batch(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = load_script("bench_preference")
    numbers = {"step_ms": 1.0, "tokens_per_second": 100.0, "peak": 2 * script.GIB}
    theirs = {**numbers, "side": "trl", "batch": 4, "losses": [0.5, 0.4]}
    mine = {**numbers, "side": "ligertune", "batch": 4, "losses": [0.5, 0.404], "tokens_per_second": 300.0}
    alone = {**mine, "batch": 8}  # TRL ran out of memory
    assert {"times": 3.0, "memory": 1.0, "peak_gib": 2.0, "ours": True}.items() <= script.row_of(mine, theirs).items()
    assert "times" not in script.row_of(alone, None)
    said = script.remarks([mine, theirs, alone], {4: theirs}, {"ligertune": 16, "trl": 0}, "pairs")
    assert said[0] == "Largest relative difference of the first 2 losses, ligertune from TRL, batch 4: 1.0e-02."
    assert ": ligertune 16, TRL none. " in said[1] and len(said) == 2


@pytest.mark.slow
@pytest.mark.parametrize("table", ["dpo_full", "dpo_lora", "distill"])
def test_the_preference_script_has_trls_losses(table, monkeypatch, tmp_path, capsys):
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", ["bench_preference", "--small", "--only", table, "--out", str(tmp_path)])
    assert load_script("bench_preference").main() == 0
    (page,) = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"page": '))
    assert {"ligertune", "TRL", "TRL, ligertune kernels"} <= {row["side"] for row in page["rows"]}
    for row in page["rows"]:
        assert row["losses"] == pytest.approx(page["rows"][0]["losses"], rel=1e-4)


@pytest.mark.slow
def test_the_classification_script_has_the_losses_of_both_trainers(monkeypatch, tmp_path, capsys):
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", ["bench_classification", "--small", "--out", str(tmp_path)])
    assert load_script("bench_classification").main() == 0
    printed = capsys.readouterr().out.splitlines()
    pages = [json.loads(line) for line in printed if line.startswith('{"page": ')]
    assert [{row["side"] for row in page["rows"]} for page in pages] == [
        {"ligertune", name, f"{name}, ligertune kernels"} for name in ("Trainer", "RewardTrainer")
    ]
    assert all(row["loss_difference"] < 1e-4 for page in pages for row in page["rows"])
    assert [line.split()[0] for line in printed[-6:]] == ["classification"] * 3 + ["reward"] * 3
