"""`ligertune compare` as a user runs it: equal losses, a sweep that runs out of memory, and a wrong kernel."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import ROOT, Done, environment, overrides

SHORT = ["--steps", "2", "--repeats", "1", "--json"]
SMALL = overrides(
    {"report.warmup_steps": 1, "train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 1}
)
LINE = "return (y if scale == 1.0 else y * scale).to(dtype)"
ON_LINUX = [pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space as Linux does")]
ADDRESS_SPACE = 7 * 2**30  # torch takes 4 GiB of it before it has computed anything


@pytest.fixture
def compare(ligertune, monkeypatch):
    """compare(*arguments, before): run the command, whose workers are new processes with `before` on Python's path."""

    def call(*arguments: str, before: Path | None = None) -> Done:
        paths = [*filter(None, [before]), environment()["PYTHONPATH"]]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        return ligertune("compare", *arguments)

    return call


@pytest.mark.slow
def test_both_sides_run_and_their_losses_agree(compare, tmp_path):
    done = compare(*SHORT, *SMALL, "--out", "report")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    patched, plain = found["points"][0]["sides"]
    assert (patched["name"], plain["name"], found["points"][0]["reference"]) == ("with", "without", "without")
    assert patched["parity"]["same"] and patched["parity"]["worst"] > 0  # two computations, not the same one twice
    assert patched["tokens_per_second"]["mean"] > 0 and patched["peak_memory"]
    assert [step["seconds"] > 0 for step in patched["trials"][0]["steps"]] == [True] * 3
    assert found["title"].startswith("stories260K, full fine-tuning, 1 row of 512 tokens per step (1 x 1 accumulated")
    assert found["reference_kernels"] and "the kernels run as their PyTorch references" in done.err
    assert " ratio" not in done.err and "standard error" not in (tmp_path / "report" / "report.html").read_text()
    assert {"compare.json", "compare.csv", "report.html"} <= {path.name for path in (tmp_path / "report").iterdir()}


@pytest.mark.parametrize(
    "vocabulary, limit",
    [
        pytest.param(100_000, ADDRESS_SPACE, id="cpu", marks=[pytest.mark.slow, *ON_LINUX]),
        pytest.param(4_000_000, None, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_a_sweep_continues_after_running_out_of_memory(vocabulary, limit, tmp_path, quickstart):
    folder = tmp_path / "large"  # the float32 logits of 48 rows: 6 GB, or on a GPU 246 GB
    shutil.copytree(quickstart / "stories260K", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))
    settings = {"model.model_name_or_path": folder, "model.init": "random", "data.max_length": 320}
    sweep = ["--sweep", "batch=48,1", "--without-liger", "--set", "report.warmup_steps=0"]
    done = subprocess.run(
        [sys.executable, "-m", "ligertune", "compare", *SMALL, *sweep, *SHORT, *overrides(settings)],
        cwd=tmp_path, env={**environment(), "MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True, check=False,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) if limit else None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    large, small = json.loads(done.stdout)["points"]
    assert large["sides"][0]["failure"]["kind"] == "out of memory"
    assert small["sides"][0]["tokens_per_second"]["mean"] > 0
    assert "batch 48, repeat 1: Hugging Face: out of memory" in done.stderr


@pytest.mark.slow
def test_a_kernel_that_is_one_percent_off_fails_at_its_step(compare, tmp_path):
    """A copy of the kernels with one changed line is put first on Python's path."""
    shutil.copytree(ROOT / "kernels" / "ligertune_kernels", tmp_path / "kernels" / "ligertune_kernels")
    kernel = tmp_path / "kernels" / "ligertune_kernels" / "ops" / "mlp" / "gated_mlp.py"
    source = kernel.read_text()
    assert source.count(LINE) == 1
    kernel.write_text(source.replace(LINE, LINE.replace("(y if", "(1.01 * y if")))
    done = compare(*SHORT, *SMALL, before=tmp_path / "kernels")
    assert done.code == 1, done.err
    found = json.loads(done.out)["points"][0]["sides"][0]["parity"]
    assert not found["same"] and found["failed_step"] == 1
    assert "does not train the same. Losses DIFFERENT" in done.err and "at step 1" in done.err


def test_a_folder_that_holds_a_comparison_is_refused(compare, tmp_path):
    (tmp_path / "compare.json").write_text("{}")
    done = compare("--out", ".")
    assert done.code == 2 and "already holds a comparison" in done.err
    assert (tmp_path / "compare.json").read_text() == "{}"
