"""Checkpoint folders: the newest by number, damage to all that a resumed run reads, and checkpoints of another run."""

import errno
import json
import os
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.data.row_files import flip_a_bit
from support.quickstart_runs import RESUME, plan_run

from ligertune.errors import UserError
from ligertune.files.storage import newest_checkpoint, read_metrics
from ligertune.planning.options import MethodOptions
from ligertune.training.checkpoint.checkpoint_files import complete, explain_failed_save
from ligertune.training.checkpoint.choose_checkpoint import resume_folder
from ligertune.training.checkpoint.load_checkpoint import check_unfinished, saved_progress
from ligertune.training.checkpoint.weight_files import damage_of_best, load_best, save_best
from ligertune.training.evaluate import EarlyStopping


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The plan of a run that keeps two checkpoints and resumes from the newest undamaged one."""
    return plan_run(
        tmp_path_factory.mktemp("run"), **RESUME, **{"checkpoint.save_total_limit": 2, "train.max_steps": 10}
    ).plan


@pytest.fixture
def saved(plan, tmp_path):
    """saved(8, 9, 10): write these checkpoints, each with one file, and return (their plan, their folder)."""
    mine = replace(plan, checkpoint=plan.checkpoint.model_copy(update={"output_dir": str(tmp_path)}))

    def save(*steps: int) -> tuple[object, Path]:
        for step in steps:
            aside = tmp_path / "checkpoints" / f".step-{step}.partial"
            aside.mkdir(parents=True)
            (aside / "weights").write_bytes(bytes(range(256)) * 8)
            complete(mine, step, aside)
        return mine, tmp_path / "checkpoints"

    return save


def test_the_newest_has_the_highest_step_and_the_oldest_are_removed(saved):
    plan, folder = saved(8, 9, 10)
    assert newest_checkpoint(plan.output_dir) == folder / "step-10"  # step-9 is the last by name
    assert {path.name for path in folder.iterdir()} == {"step-9", "step-10"}
    assert resume_folder(plan) == (folder / "step-10", ())


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file of /proc that cannot be read")
def test_a_save_that_cannot_be_read_back_fails_and_leaves_the_older_checkpoint(saved):
    """A record with a reason in the place of a checksum would be damaged, and found only at the next resume."""
    plan, folder = saved(8)
    partial = folder / ".step-9.partial"
    partial.mkdir()
    (partial / "weights").symlink_to("/proc/self/mem")  # its first byte is not mapped: EIO
    with pytest.raises(UserError, match=r"step 9 .*Input/output error"), explain_failed_save(plan, 9, partial):
        complete(plan, 9, partial)
    assert resume_folder(plan) == (folder / "step-8", ())
    assert not partial.exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("enforce fail at inline_container.cc\nframe 0"), "enforce fail at inline_container.cc"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=["system", "torch", "no message"],
)
def test_a_failed_save_is_one_sentence_and_leaves_the_checkpoint_before_it(error, reason, saved):
    plan, folder = saved(8)
    partial = folder / ".step-9.partial"
    partial.mkdir()
    with pytest.raises(UserError) as failed, explain_failed_save(plan, 9, partial):
        raise error
    assert f"({reason}). The newest complete one is {folder / 'step-8'}." in failed.value.message
    assert failed.value.exit_code == 1 and [path.name for path in folder.iterdir()] == ["step-8"]


def test_an_incomplete_folder_is_no_checkpoint(saved):
    plan, folder = saved(2, 4)
    (folder / "step-4" / "progress.json").unlink()
    (folder / "step-x").mkdir()
    assert newest_checkpoint(plan.output_dir) == folder / "step-2"


HARMS = {
    "a bit": (lambda folder: flip_a_bit(folder / "weights"), "weights is not what was written"),
    "the end": (lambda folder: (folder / "weights").write_bytes(b"half"), "weights has 4 bytes instead of 2048"),
    "the file": (lambda folder: (folder / "weights").unlink(), "weights is missing"),
    "a file that is a folder": (lambda folder: make_a_folder(folder / "weights"), "weights is not a regular file"),
    "progress.json": (lambda folder: (folder / "progress.json").unlink(), "progress.json is missing"),
    "a bit of progress.json": (lambda folder: flip_a_bit(folder / "progress.json"), "progress.json "),
    **{
        f"progress.json as {content[:20]!r}": (
            lambda folder, content=content: (folder / "progress.json").write_bytes(content), f"progress.json {words}"
        )
        for content, words in (
            (b"", "cannot be read"), (b'{"step"', "cannot be read"), (b"\xff", "cannot be read"),
            (b"[" * 100_000, "cannot be read"), (b"[]", "is not a JSON object"), (b"null", "is not a JSON object"),
            (b"{}", "has no step"), (b'{"files": [1]}', "has no step"), (b'{"step": "4"}', "holds a wrong step"),
            (b'{"step": true}', "holds a wrong step"),
        )
    },
}  # fmt: skip


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rewrite(folder: Path, **changes: object) -> None:
    """Change progress.json as a program would that knows its checksum."""
    progress = json.loads((folder / "progress.json").read_text()) | changes
    progress.pop("crc32")
    checksum = zlib.crc32(json.dumps(progress, sort_keys=True).encode())
    (folder / "progress.json").write_text(json.dumps(progress | {"crc32": checksum}))


@pytest.mark.parametrize("lost", HARMS)
def test_resuming_skips_a_damaged_checkpoint(lost, saved):
    harm, words = HARMS[lost]
    plan, folder = saved(2, 4)
    harm(folder / "step-4")
    found, notes = resume_folder(plan)
    assert found == folder / "step-2" and words in notes[0]


def test_files_in_folders_have_checksums(saved, tmp_path):
    plan, folder = saved(2)
    aside = folder / ".step-4.partial"
    (aside / "shards").mkdir(parents=True)
    (aside / "shards" / "rank-0").write_bytes(bytes(64))
    (aside / "weights").write_bytes(bytes(64))  # a record without any file counts as damaged
    complete(plan, 4, aside)
    flip_a_bit(folder / "step-4" / "shards" / "rank-0")
    assert resume_folder(plan)[0] == folder / "step-2"


def test_a_checkpoint_records_its_run_and_that_of_another_run_is_refused(saved):
    plan, folder = saved(4)
    assert saved_progress(folder / "step-4", plan) == 4
    progress = json.loads((folder / "step-4" / "progress.json").read_text())
    assert (progress["data_fingerprint"], progress["method"]["type"]) == (plan.data.fingerprint, "full")
    assert progress["files"] == {"weights": [2048, zlib.crc32(bytes(range(256)) * 8)]}
    others = {
        "other examples": replace(plan, data=replace(plan.data, fingerprint="f")),
        "global batch": replace(
            plan, batching=replace(plan.batching, micro_batch_size=3 * plan.batching.micro_batch_size)
        ),
        "rows of at most": replace(plan, rows=replace(plan.rows, length=plan.rows.length // 2)),
        "trained by full": replace(plan, build=replace(plan.build, method=MethodOptions(type="lora"))),
        r"method.lora_r: 16; this recipe has 8": replace(
            plan, build=replace(plan.build, method=MethodOptions(lora_r=8))
        ),
        r"train\.seed: 42; this recipe has 9": replace(plan, build=replace(plan.build, seed=9)),
        "LlamaForCausalLM with 260,032 parameters, .*; this recipe's model is": replace(plan, n_parameters=1),
        "states of": replace(plan, optimizer=replace(plan.optimizer, name="lion")),
        "past this recipe": replace(plan, schedule=replace(plan.schedule, total_steps=3)),
    }
    for words, other in others.items():
        with pytest.raises(UserError, match=words):
            saved_progress(folder / "step-4", other)


def test_never_and_a_folder_select_the_checkpoint(saved):
    plan, folder = saved(2, 4)
    never, named = (replace(plan, checkpoint=plan.checkpoint.model_copy(update={"resume_from_checkpoint": wanted}))
                    for wanted in ("never", str(folder / "step-2")))  # fmt: skip
    assert resume_folder(never) == (None, ())
    assert resume_folder(named) == (folder / "step-2", ())
    (folder / "step-2" / "weights").write_bytes(b"half")
    with pytest.raises(UserError, match="step-2 is damaged: weights has 4 bytes instead of 2048"):
        resume_folder(named)
    shutil.rmtree(folder / "step-2")
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        resume_folder(named)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(saved):
    plan, folder = saved(2)
    (folder / "step-2" / "weights").write_bytes(b"half")
    for wanted in ("auto", "newest"):
        again = replace(plan, checkpoint=plan.checkpoint.model_copy(update={"resume_from_checkpoint": wanted}))
        with pytest.raises(UserError, match=r"no undamaged checkpoint\..*step-2 is damaged.*--overwrite") as refused:
            resume_folder(again)
        assert refused.value.exit_code == 2
    shutil.rmtree(folder / "step-2")
    assert resume_folder(plan) == (None, ())
    newest = replace(plan, checkpoint=plan.checkpoint.model_copy(update={"resume_from_checkpoint": "newest"}))
    with pytest.raises(UserError, match=r"no complete checkpoint to continue from\. .*--resume auto"):
        resume_folder(newest)


def test_a_record_without_files_is_damaged(saved):
    plan, folder = saved(2, 4)
    rewrite(folder / "step-4", files={})
    assert "it lists no files" in resume_folder(plan)[1][0]


BROKEN = (b"[1]", b"null", b"\xff\xfe", b"{}", b'{"step": "6"}', b'{"step": 6, "eval_loss": "low"}', b"[" * 100_000)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda line: repr(line[:30]))
def test_damaged_lines_of_metrics_are_left_out_and_said(broken, saved):
    plan, folder = saved(4, 8)
    path = plan.output_dir / "metrics.jsonl"
    lines = [b'{"step": 5, "loss": 2.0}', broken, b'{"step": 7, "loss": 1.9}', b'{"step": 8, "lo']
    path.write_bytes(b"\n".join(lines))
    assert [line["step"] for line in read_metrics(path)] == [5, 7]
    found, notes = resume_folder(plan)
    assert found == folder / "step-8" and notes == (f"{path} has 1 damaged line, whose numbers are lost (line 2)",)
    # its evaluations decide when this run stops, so it continues from where none is lost
    stopping = replace(plan, evaluation=plan.evaluation.model_copy(update={"early_stopping_patience": 3}))
    found, notes = resume_folder(stopping)
    assert found == folder / "step-4" and f"line 2 of {path}, which may be an evaluation, is damaged" in notes[0]


@pytest.mark.parametrize("harm", ["flip", "record", "gone"])
def test_damaged_best_weights_are_made_again_from_an_earlier_checkpoint(harm, saved):
    plan, folder = saved(4, 8)
    plan = replace(plan, checkpoint=plan.checkpoint.model_copy(update={"load_best_model_at_end": True}))
    lines = [{"step": step, "eval_loss": loss} for step, loss in ((3, 2.0), (6, 1.0), (7, 1.5))]
    (plan.output_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 2)
    save_best(accelerator, model, plan.output_dir, step=6, loss=1.0)
    assert resume_folder(plan) == (folder / "step-8", ())
    best = plan.output_dir / "best"
    if harm == "flip":
        flip_a_bit(best / "trained.safetensors")
    elif harm == "record":
        (best / "best.json").write_text("[]")
    else:
        shutil.rmtree(best)
    found, notes = resume_folder(plan)
    assert (
        found == folder / "step-4"
        and "step-8 cannot be continued from: the best weights, which it needs, are damaged (" in notes[0]
    )
    with pytest.raises(UserError, match=r"The best weights in .* are damaged"):
        load_best(accelerator, model, plan.output_dir)
    # A checkpoint is written after the evaluation of its step, so one of the best step does not repeat it either.
    lines = [{"step": step, "eval_loss": loss} for step, loss in ((4, 2.0), (8, 1.0))]
    (plan.output_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resume_folder(plan)[0] == folder / "step-4"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{}", b"\xff", b'{"status": 1, "steps": 3, "model_path": null}']
)
def test_a_damaged_report_is_left_alone_and_said(content, saved):
    plan, _ = saved(4)
    (plan.output_dir / "report.json").write_bytes(content)
    (note,) = check_unfinished(plan)
    assert "report.json is damaged and left alone" in note


def test_early_stopping_follows_from_the_losses():
    stopping = EarlyStopping(2, [3.0, 2.0, 2.5])
    assert (stopping.best, stopping.since_best, stopping.should_stop) == (2.0, 1, False)
    assert stopping.add(1.5) is True  # the lowest: counting starts again
    assert [stopping.add(loss) for loss in (1.5, 1.6)] == [False, False]  # equal is not lower
    assert stopping.should_stop and stopping.best == 1.5
    assert not EarlyStopping(None, [1.0] * 50).should_stop


def forge(folder: Path, **changes: object) -> None:
    """Change a record, with the checksum that belongs to it."""
    values = {**json.loads((folder / "progress.json").read_text()), **changes}
    values.pop("crc32")
    crc = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    (folder / "progress.json").write_text(json.dumps({**values, "crc32": crc}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -5}, "progress.json holds a wrong step"),
        ({"files": {"weights": 3}}, "progress.json holds wrong files"),
        ({"files": {"weights": [2048]}}, "progress.json holds wrong files"),
        ({"files": {"weights": [2048, 10**400]}}, "progress.json holds wrong files"),
        ({"files": {"../../../etc/passwd": [1, 1]}}, "names a file outside of the checkpoint"),
        ({"files": {"/etc/passwd": [1, 1]}}, "names a file outside of the checkpoint"),
        ({"files": {"pipe": [0, 0]}}, "pipe is not a regular file"),
        ({"files": {"zero": [0, 0]}}, "zero is not a regular file"),
        ({"files": {"hole": [5, 0]}}, "hole has 1099511627776 bytes instead of 5"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_forged_record_is_damage_and_nothing_endless_is_read(changes, words, saved):
    plan, folder = saved(2, 4)
    os.mkfifo(folder / "step-4" / "pipe")
    (folder / "step-4" / "zero").symlink_to("/dev/zero")
    with (folder / "step-4" / "hole").open("wb") as file:
        file.truncate(2**40)
    forge(folder / "step-4", **changes)
    found, notes = resume_folder(plan)
    assert found == folder / "step-2" and words in notes[0]


@pytest.mark.parametrize(
    "record", [{}, {"step": "6"}, {"files": []}, {"files": {"trained.safetensors": [1e999, 0]}}, {"step": None}]
)
def test_a_damaged_record_of_the_best_weights_is_said(record, saved):
    plan, _ = saved(4)
    save_best(Accelerator(cpu=True), torch.nn.Linear(3, 2), plan.output_dir, step=6, loss=1.0)
    path = plan.output_dir / "best" / "best.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **record} if record else {}))
    assert damage_of_best(plan.output_dir) == f"{path} is damaged"
