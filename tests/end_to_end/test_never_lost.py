"""Damaged files, failed writes and non-finite losses: no checkpoint is lost, and one sentence says what happened."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from command_line import environment, losses, train_command
from quickstart_runs import RESUME, plan_run, saves, train, unfinished
from transformers import AutoModelForCausalLM

from ligertune.data.batching.collate import Batcher
from ligertune.errors import UserError
from ligertune.launcher.signals import StopRequest
from ligertune.run import run
from ligertune.tasks.objectives import objective_of
from ligertune.train.evaluate import evaluate

SETTINGS = {
    "train.max_steps": 6,
    **saves(2),
    "checkpoint.save_total_limit": 3,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of six steps without its report, as after a kill, and with checkpoints of the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("killed")
    train(folder, **SETTINGS)
    assert sorted(path.name for path in (unfinished(folder) / "checkpoints").iterdir()) == ["step-2", "step-4"]
    return folder


@pytest.fixture
def cut(killed, tmp_path):
    """A copy of the killed run, for the test to damage."""
    return shutil.copytree(killed, tmp_path / "cut")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(cut):
    expected = losses(cut / "run")
    flip_a_bit(cut / "run" / "checkpoints" / "step-4" / "optimizer.bin")
    partial = cut / "run" / "checkpoints" / ".step-6.partial"  # left by a kill during a save
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    said = []
    report = run(plan_run(cut, **SETTINGS, **RESUME), said.append)
    assert report.resumed_from == 2
    assert "step-4 is damaged and left alone: optimizer.bin is not what was written" in said[0]["note"]
    assert any("step-4 is damaged" in note for note in report.notes)
    assert losses(cut / "run") == expected
    assert not partial.exists()


def test_a_damaged_checkpoint_that_the_recipe_names_is_refused(cut):
    folder = cut / "run" / "checkpoints" / "step-4"
    cut_in_half(folder / "model.safetensors")
    named = {"checkpoint.resume_from_checkpoint": folder}
    with pytest.raises(UserError, match=r"step-4 is damaged: model\.safetensors has \d+ bytes instead of"):
        train(cut, **SETTINGS, **named)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"train.optim": "lion"}, "states of adamw_torch_fused"), ({"method.type": "lora"}, "trained by full")],
    ids=["optimizer", "method"],
)
def test_resuming_with_another_optimizer_or_method_is_refused(change, words, cut):
    with pytest.raises(UserError, match=words):
        train(cut, **{**SETTINGS, **RESUME, **change})


@pytest.mark.slow
def test_resuming_galore_at_another_rank_is_refused(tmp_path):
    galore = {**SETTINGS, "train.optim": "galore_adamw", "train.galore.rank": 8}
    train(tmp_path, **galore)
    unfinished(tmp_path)
    with pytest.raises(UserError, match=r"galore_adamw at train\.galore\.rank: 8; this recipe's optimizer is .* 4"):
        train(tmp_path, **{**galore, **RESUME, "train.galore.rank": 4})


def test_a_failed_save_keeps_the_checkpoint_before(cut):
    """A limit on the size of a file stands for a full disk."""
    shutil.rmtree(cut / "run" / "checkpoints" / "step-4")
    shutil.rmtree(cut / "run" / "model")
    recipe, limit = (
        cut / "run" / "resolved_recipe.yaml",
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (300_000,)),
    )
    command = train_command("--resume", recipe=recipe, **{"checkpoint.output_dir": "run"})
    limited = subprocess.run(
        command, cwd=cut, env=environment(), capture_output=True, text=True, check=False, preexec_fn=limit
    )
    assert limited.returncode == 1, limited.stderr[-2000:]
    assert "Traceback" not in limited.stderr
    assert "The checkpoint of step 4 could not be written" in limited.stderr
    assert "The newest complete one is run/checkpoints/step-2" in limited.stderr
    assert [path.name for path in (cut / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder has to be")
    with pytest.raises(UserError, match=r"cannot be written to"):
        train(tmp_path, **RESUME)


@pytest.mark.parametrize(
    "logging_steps", [1, pytest.param(5, marks=pytest.mark.slow)], ids=["logged at once", "found at the save"]
)
def test_a_nan_loss_ends_the_run_saves_its_batch_and_no_checkpoint(logging_steps, tmp_path):
    job = plan_run(tmp_path, **{**SETTINGS, "logging.logging_steps": logging_steps})
    diverging = replace(job.plan.schedule, learning_rate=1e30, type="constant")  # no weight is usable after one step
    job = replace(job, plan=replace(job.plan, schedule=diverging))
    with pytest.raises(UserError, match=r"is not a number\. Its batch is in") as caught:
        run(job, lambda line: None)
    assert caught.value.exit_code == 1
    (path,) = (tmp_path / "run").glob("bad_batch-step-*.json")
    bad = json.loads(path.read_text())
    assert bad["step"] == 2
    example = bad["micro_batches"][0][0][0]
    assert "dolly_short.jsonl:" in example["source"]
    assert len(example["input_ids"]) == len(example["labels"])
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_an_evaluation_stops_at_a_signal_and_returns_none(quickstart, tmp_path):
    with StopRequest() as stop:
        stop.hold()
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == "SIGTERM"
        job = plan_run(tmp_path)
        batcher = Batcher(
            job.data.eval, packed=False, multiple_of=16, pad_token_id=0, index_labels=False, device=torch.device("cpu")
        )
        model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K")
        objective = objective_of(job.plan, model)
        assert evaluate(job.plan, Accelerator(cpu=True), model, batcher, objective, stop) is None
