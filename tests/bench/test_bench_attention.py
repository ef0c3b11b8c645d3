"""scripts/bench attention: equal results of its sides, the fastest other side of a row, and why rows are missing."""

import json
import subprocess
import sys

import pytest
from support.command_line import ROOT
from support.script_modules import script_module


@pytest.fixture
def script():
    return script_module("benchmarks.ops.attention")


def options_of(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", "attention", *arguments])
    return script.parse()


def timed(side, length, ms, width=64):
    speeds = {f"{name}_{unit}": ms for name in ("forward", "backward", "both") for unit in ("ms", "tflops")}
    return {"side": side, "width": width, "documents": 2, "length": length, "differs": 1e-3, **speeds}


def test_sides_have_the_same_results_and_ours_the_errors_of_bfloat16(script, monkeypatch):
    options = options_of(script, monkeypatch, "--small", "--only", "16", "--sides", "ligertune,short,sdpa,flash,cudnn")
    points = list(script.measure(options))
    rows = [point for point in points if "both_ms" in point]
    assert [(row["side"], row["length"]) for row in rows] == [
        (side, length)
        for length in (10, 40)
        for side in ("ligertune", "ligertune, kernels of short documents", "SDPA", "SDPA, flash")
    ]
    assert all(row["differs"] < 0.01 and row["backward_ms"] > 0 for row in rows)
    errors = [point for point in points if point.get("of", "").startswith("ligertune")]
    assert len(errors) == 2 and all(point["same"] and max(point["errors"]) < 0.01 for point in errors)
    assert {point["side"] for point in points if "length" in point and "failed" in point} == {"SDPA, cuDNN"}


def test_no_side_starts_after_the_budget_and_the_page_names_it(script, monkeypatch):
    options = options_of(script, monkeypatch, "--small", "--only", "16,3x10", "--sides", "sdpa,fa3", "--budget", "0")
    points = [point for point in script.measure(options) if "of" not in point]
    assert script.left_out(points, None) == [
        "Without a row: FlashAttention-3 (flash_attn_interface is not installed).",
        "Without a row: SDPA: heads of 16, 3 x 10 (the 0 s of --budget were spent).",
    ]


def test_ours_is_compared_with_the_fastest_other_side_of_its_row(script):
    names = ("torch varlen", "ligertune", "SDPA")
    points = [timed(name, 512, ms) for name, ms in zip(names, (3.0, 2.0, 4.0), strict=True)]
    points += [timed(name, 4096, ms) for name, ms in zip(names, (5.0, 4.0, 3.0), strict=True)]
    rows = script.rows_of(points)
    assert [row["side"] for row in rows] == ["ligertune", "SDPA", "torch varlen"] * 2
    assert [(row.get("fastest"), row.get("times")) for row in rows if row["ours"]] == [
        ("torch varlen", 1.5),
        ("SDPA", 0.75),
    ]
    said = script.speed_remarks(rows)
    assert "0.75 to 1.50 times" in said[0] and said[1].endswith("on: 2 x 4,096 with heads of 64 (0.75, SDPA).")


def test_modes_are_compared_with_their_like(script):
    """Deterministic sides with each other, and what `auto` may run without determinism with the fastest."""
    names = ("ligertune", "ligertune, full_determinism: false", "FlashAttention-4", "FlashAttention-4, deterministic")
    points = [timed(name, 4096, ms) for name, ms in zip(names, (4.0, 3.1, 3.0, 5.0), strict=True)]
    points += [timed(name, 512, ms) for name, ms in (("ligertune", 2.0), ("FlashAttention-4", 3.0))]
    said = script.speed_remarks(script.rows_of(points))
    assert "0.75 to 1.50 times" in said[0] and "2 x 4,096 with heads of 64 (0.75, FlashAttention-4)" in said[1]
    assert said[2] == ("ligertune is 1.25 to 1.25 times, in the median 1.25 times as fast as FlashAttention-4 in its "
                       "deterministic mode.")  # fmt: skip
    assert "in 1 of the 2 rows. All rows are then 0.97 to 1.50 times" in said[3]


def test_errors_are_compared_with_those_of_flash_attention(script):
    found = [{"of": name, "width": 64, "lengths": (700, 1), "errors": errors, "same": name != "torch varlen"}
             for name, errors in (("ligertune", [1e-3, 2e-3, 3e-3, 1e-3]), ("torch varlen", [2e-3] * 4))]  # fmt: skip
    (said,) = script.error_remarks(found)
    assert said.endswith("different bits. ligertune: at most 1.500 times those of torch varlen.")


def test_joined_runs_keep_comparisons_whole_and_name_missing_rows(script):
    """A newer run of a shape replaces all rows of it, also of sides that it did not have."""

    def page(points: list[dict], **more) -> dict:
        rows = script.rows_of(points)
        return {"rows": rows, "columns": [], "caveats": ["C"], "remarks": ["Relative errors: 1"], "command": "run",
                "left_out": ["Without a row: SDPA (the 9 s of --budget were spent)."],
                "chart": {"values": {f"tflops_{row['width']}": "" for row in rows}}, **more}  # fmt: skip

    older = page(
        [timed(name, 512, 3.0, width) for name in ("ligertune", "SDPA", "torch varlen") for width in (64, 256)]
    )
    newer = page([timed(name, 512, ms, 256) for name, ms in (("ligertune", 2.0), ("SDPA", 4.0))], command="again")
    found = script.join_runs([older, newer])
    assert [(row["width"], row["side"]) for row in found["rows"]] == [
        (64, "ligertune"), (64, "SDPA"), (64, "torch varlen"), (256, "ligertune"), (256, "SDPA"),
    ]  # fmt: skip
    assert found["left_out"] == ["Without a row: torch varlen: heads of 256, 2 x 512 (not run)."]
    assert "1.00 to 2.00 times" in found["remarks"][0] and found["remarks"][-1] == "Relative errors: 1"
    assert list(found["chart"]["values"]) == ["tflops_64", "tflops_256"] and found["command"] == "run; again"


@pytest.mark.slow
def test_the_small_run_has_a_page_and_a_chart(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, ROOT / "scripts" / "bench", "attention", "--small", "--page", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page": '))
    assert {row["side"] for row in page["rows"]} >= {"ligertune", "SDPA"} and len(page["left_out"]) >= 4
    assert list(tmp_path.glob("attention_small_cpu_*.png"))
