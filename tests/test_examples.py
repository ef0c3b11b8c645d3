"""The scripts of docs/examples train, and the kernels give the losses of plain torch."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.command_line import ROOT, environment

EXAMPLES = ROOT / "docs" / "examples"
TOLERANCE = 2e-2 if torch.cuda.is_available() else 2e-4  # bfloat16; float32, and losses logged with 4 digits

Run = Callable[..., dict]


@pytest.fixture
def run(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an example in this process on the quickstart's model and data, and return its global variables."""

    def run(name: str, *options: str) -> dict:
        model, data = quickstart / "stories260K", quickstart / "dolly_short.jsonl"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, str(model), str(data), *options])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("hf_trainer.py", "transformers"),
        pytest.param("trl_sft.py", "trl", marks=pytest.mark.slow),
        pytest.param("lightning_trainer.py", "lightning", marks=pytest.mark.slow),
        pytest.param("pytorch_loop.py", "torch", marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_as_without_the_kernels(run, name, package, capsys):
    pytest.importorskip(package)
    patched = run(name, "--steps", "6")["losses"]
    assert "kernel='swiglu', applied=5" in capsys.readouterr().out
    plain = run(name, "--steps", "6", "--plain")["losses"]
    assert "kernel=" not in capsys.readouterr().out
    assert len(patched) == 6 and sum(patched[-2:]) / 2 < patched[0] - 0.3
    assert patched == pytest.approx(plain, abs=TOLERANCE)


def test_the_composed_decoder_gives_the_loss_of_transformers_and_learns(run):
    found = run("compose_model.py", "6")
    assert found["losses"][0] == pytest.approx(found["expected"], abs=TOLERANCE)
    assert len(found["losses"]) == 6 and found["losses"][-1] < found["losses"][0] - 0.3


def test_one_kernel_gives_the_loss_and_gradients_of_torch(run):
    assert max(run("one_kernel.py", "--rows", "20")["differences"]) < TOLERANCE


@pytest.mark.parametrize("name", ["own_loop.py", "own_task.py", pytest.param("sweep.py", marks=pytest.mark.slow)])
def test_the_examples_of_the_python_page_train(name, monkeypatch, capsys):
    """Two steps of the quickstart's recipe each; the lengths that the page promises hold."""
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= {"own_loop.py": 80, "own_task.py": 100}.get(name, 80)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--steps", "2"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert {"own_loop.py": "step 2: loss", "own_task.py": "run completed: step 2 of 2", "sweep.py": "lowest with"}[
        name
    ] in said


@pytest.fixture
def sample_and_train(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the loop of rejection sampling in this process, and return the rates of right answers."""

    def run(*options: str) -> dict:
        arguments = [str(quickstart / "stories260K"), "--folder", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", ["rejection_sampling.py", *arguments])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return runpy.run_path(str(EXAMPLES / "rejection_sampling.py"), run_name="__main__")["result"]
        finally:
            torch.set_num_threads(threads)

    return run


@pytest.mark.slow
def test_sampling_and_training_raises_the_rate_of_right_answers_to_held_out_problems(sample_and_train):
    found = sample_and_train("--steps", "25", "40")
    assert found["kept"] > 100 and found["after"] >= found["before"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_sampling_raises_the_rate_with_other_seeds_and_on_pairs(seed, method, sample_and_train):
    found = sample_and_train("--seed", seed, "--method", method)
    assert found["after"] >= found["before"] + 0.1


def run_cell(source: str, variables: dict, folder: Path) -> str:
    """Run a cell of a notebook as Jupyter does; return what it printed. Lines with `!` are commands of the shell."""
    printed = []
    for part in re.split(r"^(!(?:.*\\\n)*.*)$", source, flags=re.MULTILINE):
        if part.startswith("!"):
            line = re.sub(r"{(\w+)}", lambda match: shlex.quote(str(variables[match[1]])), part[1:])
            line = re.sub(r"\bligertune (?=\w)", lambda _: f"{shlex.quote(sys.executable)} -m ligertune ", line)
            done = subprocess.run(line, shell=True, cwd=folder, env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            printed.append(done.stdout)
        elif part.strip():
            exec(compile(part, "cell", "exec"), variables)
    return "".join(printed)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    variables: dict = {}
    printed = [run_cell("".join(cell["source"]), variables, tmp_path) for cell in cells if cell["cell_type"] == "code"]
    assert "[[The capital of " in printed[3] and "peak memory" in printed[4]
    assert variables["losses"][-1] < 0.5 * variables["losses"][0]
    assert "The capital of Peru is" in printed[7] and "The capital of Japan is" in printed[8]
    assert re.search(r"exported model .* yes", printed[9]) and (tmp_path / "exported" / "model.safetensors").is_file()
