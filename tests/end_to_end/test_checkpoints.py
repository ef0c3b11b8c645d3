"""Damaged files, failed writes, non-finite losses and asynchronous saves: no checkpoint is lost."""

import json
import math
import resource
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from support.command_line import RECIPE, losses, overrides, run_here, weights
from support.data.row_files import flip_a_bit
from support.quickstart_runs import RESUME, SHORT, TWO_LAYERS, plan_run, saves, train, unfinished
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ligertune.data.batching.collate import Batcher
from ligertune.errors import UserError
from ligertune.launcher.signals import StopRequest
from ligertune.planning.feature_spec import feature_of
from ligertune.run import run
from ligertune.training.checkpoint.checkpoint_files import Saver, begin, check_space, complete
from ligertune.training.checkpoint.checkpoint_record import CheckpointRecord, file_checksums
from ligertune.training.checkpoint.load_checkpoint import saved_progress
from ligertune.training.checks import FiniteLossCheck
from ligertune.training.evaluate import evaluate

SETTINGS = {**TWO_LAYERS, "train.max_steps": 6, **saves(2), "checkpoint.save_total_limit": 3}


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


def test_a_damaged_report_and_metrics_are_said_in_the_report(cut):
    (cut / "run" / "report.json").write_text("[]")
    with (cut / "run" / "metrics.jsonl").open("rb+") as file:
        lines = file.read().split(b"\n")
        file.seek(0)
        file.write(b"\n".join([*lines[:2], b"\xff", b"[1]", *lines[2:]]))
    report = train(cut, **SETTINGS, **RESUME)
    assert report.resumed_from == 4 and report.status == "completed"
    assert any("report.json is damaged and left alone" in note for note in report.notes)
    assert any("has 2 damaged lines, whose numbers are lost (lines 3, 4)" in note for note in report.notes)


@pytest.mark.parametrize("name", ["random_states_0.pkl", "optimizer.bin", "model.safetensors"])
def test_states_that_are_what_was_written_and_cannot_be_loaded_are_an_error(name, cut):
    """accelerate goes on without random states, with a line in a log that nobody sees."""
    folder = cut / "run" / "checkpoints" / "step-4"
    if name == "model.safetensors":
        save_file({"another": torch.zeros(2)}, folder / name)
    else:
        torch.save({"another": 1}, folder / name)
    plan = plan_run(cut, **SETTINGS, **RESUME).plan
    CheckpointRecord.of(plan, 4, file_checksums(folder)).write(folder, plan)
    with pytest.raises(UserError, match=r"step-4 cannot be loaded, although its files are those") as refused:
        train(cut, **SETTINGS, **RESUME)
    assert refused.value.exit_code == 2 and "Remove it to continue from the checkpoint before it" in refused.value.hint
    if name.startswith("random"):
        assert "random_states_0.pkl does not hold random states (KeyError)" in refused.value.message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("train.seed", 9, "was trained with train.seed: 42"), ("model", 96, "parameters, .*; this recipe's model is")],
)
def test_another_seed_or_width_is_refused(key, value, words, cut, quickstart):
    changes = {**SETTINGS, **RESUME, key: value}
    if key == "model":
        other = shutil.copytree(quickstart / "stories260K", cut / "wider")
        config = LlamaConfig.from_pretrained(other, intermediate_size=value)
        LlamaForCausalLM(config).save_pretrained(other)
        changes = {**SETTINGS, **RESUME, "model.model_name_or_path": other}
    with pytest.raises(UserError, match=words) as refused:
        train(cut, **changes)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("harm", ["bit", "end", "record"])
def test_a_damaged_checkpoint_is_not_exported(harm, cut):
    folder = cut / "run" / "checkpoints" / "step-4"
    path = folder / "model.safetensors"
    if harm == "bit":
        flip_a_bit(path)
    elif harm == "end":
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        (folder / "progress.json").write_text("null")
    done = run_here("export", "run", "--checkpoint", "step-4", "--out", "out", cwd=cut)
    assert done.code == 2 and "--checkpoint: run/checkpoints/step-4 is damaged: " in done.err, done.err
    assert not (cut / "out").exists()


def test_resuming_galore_at_another_rank_is_refused(tmp_path):
    eight, four = (plan_run(tmp_path, **{"train.optim": "galore_adamw", "train.galore.rank": r}).plan for r in (8, 4))
    complete(eight, 1, begin(Accelerator(cpu=True), eight, 1))
    with pytest.raises(UserError, match=r"galore_adamw at train\.galore\.rank: 8; this recipe's optimizer is .* 4"):
        saved_progress(tmp_path / "run" / "checkpoints" / "step-1", four)


def test_a_failed_save_keeps_the_checkpoint_before(cut):
    """A limit on the size of a file stands for a full disk."""
    shutil.rmtree(cut / "run" / "checkpoints" / "step-4")
    shutil.rmtree(cut / "run" / "model")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, unlimited[1]))
    try:
        with pytest.raises(
            UserError, match=r"of step 4 could not be written .* newest complete one is .*/step-2"
        ) as said:
            train(cut, **SETTINGS, **RESUME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert said.value.exit_code == 1
    assert [path.name for path in (cut / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder has to be")
    with pytest.raises(UserError, match=r"checkpoints is a file, and the run writes a folder there"):
        train(tmp_path, **RESUME)


def test_a_file_of_a_run_that_is_a_folder_is_one_sentence(cut):
    (cut / "run" / "metrics.jsonl").unlink()
    (cut / "run" / "metrics.jsonl").mkdir()
    changes = overrides({**SHORT, **SETTINGS, **RESUME, "checkpoint.output_dir": "run"})
    done = run_here("train", RECIPE, *changes, cwd=cut)
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert "metrics.jsonl is a folder, and nothing is written there" in done.err


def test_a_disk_without_space_for_the_checkpoints_and_the_model_is_refused(tmp_path, monkeypatch):
    plan = plan_run(tmp_path, **SETTINGS).plan  # keeps three checkpoints, and writes the fourth before it removes one
    needed = 4 * (plan.bytes.model + plan.bytes.saved_states) + plan.bytes.model
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed))
    check_space(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=r" has [1-9][\d.]* MiB free, and this run's saves need [1-9][\d.]* MiB \(4 x"):
        check_space(plan)


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
    assert "short_rows.jsonl:" in example["source"]
    assert len(example["input_ids"]) == len(example["labels"])
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    check = FiniteLossCheck(tmp_path, None, rank=0)
    for step, loss in enumerate((1.0, math.inf, math.nan), start=1):
        check.add(step, torch.tensor(loss), [])
    assert "The loss of step 2 is not a number" in str(check.error())


def evaluate_model(quickstart, tmp_path, stop: StopRequest, **config: float) -> float | None:
    job = plan_run(tmp_path)
    batcher = Batcher(
        job.data.eval, packed=False, multiple_of=16, pad_token_id=0, index_labels=False, device=torch.device("cpu")
    )
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", **config).train()
    found = evaluate(
        job.plan, Accelerator(cpu=True), model, batcher, feature_of(job.plan.build.task).task(job.plan, model), stop
    )
    return found and found.loss


def test_an_evaluation_stops_at_a_signal_and_returns_none(quickstart, tmp_path):
    with StopRequest() as stop:
        stop.hold()
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == "SIGTERM"
        assert evaluate_model(quickstart, tmp_path, stop) is None


def test_an_evaluation_runs_without_dropout(quickstart, tmp_path):
    expected, found = (evaluate_model(quickstart, tmp_path, StopRequest(), attention_dropout=p) for p in (0.0, 0.5))
    assert found == expected > 0


SYNC = {**saves(1), "checkpoint.save_total_limit": 9}
ASYNC = {**SYNC, "checkpoint.async_save": "true"}


class BlockedSaver(Saver):
    """A saver that starts to write when `may_write` is set."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.may_write = threading.Event()

    def write_and_complete(self, *arguments: object) -> None:
        assert self.may_write.wait(30)
        super().write_and_complete(*arguments)


@pytest.fixture
def saver(tmp_path) -> BlockedSaver:
    """A saver of a small model that has taken a step."""
    plan, accelerator = plan_run(tmp_path, **ASYNC).plan, Accelerator(cpu=True)
    (plan.output_dir / "checkpoints").mkdir(parents=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return BlockedSaver(accelerator, plan, model, optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def test_it_writes_the_state_of_its_step_while_later_steps_change_it(saver, tmp_path):
    before = [p.detach().clone() for p in saver._model.parameters()]
    saver.save(1)
    saver._optimizer.step()  # with the same gradients; the weights and both moments change
    assert names(tmp_path) == [".step-1.partial"]
    saver.may_write.set()
    saver.finish()
    assert names(tmp_path) == ["step-1"]
    after = [p.detach().clone() for p in saver._model.parameters()]
    saver._accelerator.load_state(str(tmp_path / "run" / "checkpoints" / "step-1"))
    loaded = list(saver._model.parameters())
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(loaded, before, after, strict=True))
    assert {int(state["step"]) for state in saver._optimizer.state.values()} == {1}


def test_one_save_runs_at_a_time_and_an_error_ends_the_next_step(saver, tmp_path):
    saver.save(1)
    saver.look()  # still running: no error
    second = threading.Thread(target=saver.save, args=(2,))
    second.start()
    assert names(tmp_path) == [".step-1.partial"]
    saver.may_write.set()
    second.join()
    saver.finish()
    assert names(tmp_path) == ["step-1", "step-2"]
    saver.may_write.clear()
    saver.save(3)
    (tmp_path / "run" / "checkpoints" / ".step-3.partial").rename(tmp_path / "taken away")
    saver.may_write.set()
    saver._running.exception()  # waits for the write
    with pytest.raises(UserError, match=r"step 3 could not be written .* The newest complete one is .*step-2"):
        saver.look()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param({}, id="full"),
        pytest.param({"method.type": "lora"}, id="lora", marks=pytest.mark.slow),
        pytest.param({"method.type": "lora", "method.init_lora_weights": "pissa"}, id="pissa", marks=pytest.mark.slow),
        pytest.param({"train.optim": "muon"}, id="two optimizers", marks=pytest.mark.slow),
    ],
)
def test_it_writes_the_files_of_a_synchronous_save_and_resumes_to_the_same_bits(method, tmp_path):
    found = []
    for name, settings in {"sync": SYNC, "async": ASYNC}.items():
        train(tmp_path / name, **settings, **method)
        assert names(tmp_path / name) == ["step-1", "step-2"]
        progress = tmp_path / name / "run" / "checkpoints" / "step-2" / "progress.json"
        found.append(json.loads(progress.read_text())["files"])
    assert found[0] == found[1]
    assert {"optimizer.bin", "random_states_0.pkl"} < found[0].keys()
    if method:
        return
    run, expected = unfinished(tmp_path / "async"), losses(tmp_path / "async" / "run")
    before = weights(run)
    assert train(tmp_path / "async", **ASYNC, **RESUME).resumed_from == 2
    assert losses(run) == expected
    assert weights(run) == before
