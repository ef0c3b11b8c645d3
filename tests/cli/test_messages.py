"""Notes and errors break between words, resuming says where it continues, and memory says what it counts."""

import json
import re

import pytest
from support.command_line import RECIPE, overrides, run_here
from support.quickstart_runs import ONE_ROW, TWO_LAYERS

from ligertune.cli.render import console
from ligertune.errors import UserError

PATH = "/data/" + "/".join(["a-folder-with-a-name"] * 5) + "/file.jsonl"  # longer than a line of 80
NOTE = (
    f"padding-free batches are off: tensors of model.layers[0].self_attn.q_proj.weight_scale_inv in {PATH} hold"
    " half-precision values, write `train.per_device_train_batch_size: 4` or leave kernels.attention: auto in place"
)
QUICK = {"data.datasets.0.max_samples": 40, "data.val_split": 0, "train.max_steps": 3, "checkpoint.save_steps": 1,
         "checkpoint.output_dir": "run", **ONE_ROW, **TWO_LAYERS}  # fmt: skip


def _print(kind: str) -> None:
    if kind == "error":
        console.error(UserError(NOTE))
    elif kind == "note":
        console.note(NOTE)
    else:
        console.people_on_stderr(True)
        console.sentence(f"note: {NOTE}", indent="  ")
        console.people_on_stderr(False)


@pytest.mark.parametrize("kind", ["error", "note", "sentence"])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_word_is_broken(width, kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    _print(kind)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err).splitlines()
    assert [word for line in lines for word in line.split()][-len(NOTE.split()) :] == NOTE.split()
    assert len(lines) > 1
    assert all(len(line) <= width or line.split() == [PATH] for line in lines)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("kind", ["error", "note", "sentence"])
def test_a_file_gets_one_line(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    _print(kind)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_resuming_says_where_it_continues_before_anything_is_loaded(tmp_path):
    assert run_here("train", RECIPE, *overrides({**QUICK, "train.max_steps": 2}), cwd=tmp_path).code == 0
    done = run_here("train", RECIPE, "--resume", *overrides(QUICK), cwd=tmp_path)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    place = "run/checkpoints/step-1"
    assert f"resume from step 1 ({place}); 2 of 3 steps remain" in said
    assert said.index("resume from step 1") < said.index("loading the model")
    again = run_here("train", RECIPE, "--resume", *overrides({**QUICK, "train.max_steps": 4}), cwd=tmp_path)
    assert "resume from step 2 (run/checkpoints/step-2); 2 of 4 steps remain" in " ".join(again.out.split())


def test_a_damaged_checkpoint_is_left_and_the_other_step_is_named(tmp_path):
    assert run_here("train", RECIPE, *overrides(QUICK), cwd=tmp_path).code == 0
    (tmp_path / "run" / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"damaged")
    done = run_here("train", RECIPE, "--resume", *overrides({**QUICK, "train.max_steps": 4}), cwd=tmp_path)
    assert done.code == 0, done.err
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    assert any("step-2 is damaged and left alone" in note for note in notes)
    assert "continued from step 1 (run/checkpoints/step-1) instead" in notes
    first = run_here("train", RECIPE, "--resume", "auto",
                     *overrides({**QUICK, "checkpoint.output_dir": "new", "train.max_steps": 1}),
                     cwd=tmp_path)  # fmt: skip
    assert "new holds no checkpoint: starts at step 0" in " ".join(first.out.split())


def test_a_cpu_plan_and_a_cpu_run_say_which_memory_they_mean(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # logged lines have fewer fields in 80 columns
    done = run_here("train", RECIPE, *overrides({**QUICK, "logging.logging_steps": 1}), cwd=tmp_path)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "MiB of tensors predicted, of" in said and "Python and torch themselves take more" in said
    logged = next(line for line in done.out.splitlines() if line.startswith("step 1/"))
    assert "  process " in logged and "  peak " not in logged
    assert "of host memory (the whole process, with Python and torch)" in said
    planned = run_here("plan", RECIPE, *overrides(QUICK), cwd=tmp_path)
    assert "Peak memory of tensors in each process, reached" in planned.out
    simulated = run_here("plan", RECIPE, "--memory", 80, *overrides(QUICK), cwd=tmp_path)
    assert "predicted of 80.00 GiB on each device" in " ".join(simulated.out.split())
