"""`ligertune compare` as a user runs it: parity, a sweep in which memory runs out, and a kernel that is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, environment, overrides

SHORT = ["--steps", "2", "--repeats", "1", "--json"]
SMALL = overrides(
    {"report.warmup_steps": 1, "train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 1}
)
LINE = "return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)"
ON_LINUX = [pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space as Linux does")]
ADDRESS_SPACE = 7 * 2**30  # torch takes 4 GiB of it before it has computed anything


def compare(cwd: Path, *arguments: str, before: str | None = None, limit: int | None = None):
    """`before`: a folder that stands before ours on the path; `limit`: bytes that each process may map."""
    paths = [*filter(None, [before]), environment()["PYTHONPATH"]]
    return subprocess.run(
        [sys.executable, "-m", "ligertune", "compare", *arguments],
        cwd=cwd,
        env={**environment(), "PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "1"},
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) if limit else None,
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_sides_run_and_their_losses_agree(tmp_path):
    done = compare(tmp_path, *SHORT, *SMALL, "--out", "report")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, theirs = found["points"][0]["sides"]
    assert (ours["name"], theirs["name"], found["points"][0]["reference"]) == ("with", "without", "without")
    assert ours["parity"]["same"] and ours["parity"]["worst"] > 0  # two computations, not one twice
    assert ours["tokens_per_second"]["mean"] > 0 and ours["peak_memory"]
    assert [step["seconds"] > 0 for step in ours["trials"][0]["steps"]] == [True] * 3
    assert {"compare.json", "compare.csv", "report.html"} <= {path.name for path in (tmp_path / "report").iterdir()}


@pytest.mark.parametrize(
    "vocabulary, limit",
    [
        pytest.param(100_000, ADDRESS_SPACE, id="cpu", marks=[pytest.mark.slow, *ON_LINUX]),
        pytest.param(8_000_000, None, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_a_sweep_goes_on_where_memory_runs_out(vocabulary, limit, tmp_path, quickstart):
    folder = tmp_path / "large"  # the logits of 48 rows: 6 GB, or on a GPU 246 GB
    shutil.copytree(quickstart / "stories260K", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))
    settings = {"model.model_name_or_path": folder, "model.init": "random", "data.max_length": 320}
    sweep = ["--sweep", "batch=48,1", "--without-liger", "--set", "report.warmup_steps=0"]
    done = compare(tmp_path, *SMALL, *sweep, *SHORT, *overrides(settings), limit=limit)
    assert done.returncode == 0, done.stderr
    large, small = json.loads(done.stdout)["points"]
    assert large["sides"][0]["failure"]["kind"] == "out of memory"
    assert small["sides"][0]["tokens_per_second"]["mean"] > 0
    assert "batch 48, repeat 1: Hugging Face: out of memory" in done.stderr


def test_a_kernel_scaled_by_a_hundredth_is_found_at_its_step(tmp_path):
    """The real package with one line of one kernel changed stands before ours on the path."""
    shutil.copytree(ROOT / "kernels" / "ligertune_kernels", tmp_path / "kernels" / "ligertune_kernels")
    kernel = tmp_path / "kernels" / "ligertune_kernels" / "ops" / "mlp" / "swiglu.py"
    source = kernel.read_text()
    assert source.count(LINE) == 1
    kernel.write_text(source.replace(LINE, LINE.replace("(F.silu", "(1.01 * F.silu")))
    done = compare(tmp_path, *SHORT, *SMALL, before=str(tmp_path / "kernels"))
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["points"][0]["sides"][0]["parity"]
    assert not found["same"] and found["failed_step"] == 1
    assert "does not train the same. Losses DIFFERENT" in done.stderr and "at step 1" in done.stderr


def test_a_folder_that_holds_a_comparison_is_refused(tmp_path):
    (tmp_path / "compare.json").write_text("{}")
    done = compare(tmp_path, "--out", ".")
    assert done.returncode == 2 and "already holds a comparison" in done.stderr
    assert (tmp_path / "compare.json").read_text() == "{}"
