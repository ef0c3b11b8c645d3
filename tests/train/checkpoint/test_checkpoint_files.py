"""Checkpoint folders: the newest by number, damage, and checkpoints of another run."""

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from quickstart_runs import RESUME, plan_run
from row_files import flip_a_bit

from ligertune.errors import UserError
from ligertune.planning.options import MethodOptions
from ligertune.storage import newest_checkpoint
from ligertune.train.checkpoint.checkpoint_files import complete, resume_folder
from ligertune.train.checkpoint.load_checkpoint import saved_progress
from ligertune.train.evaluate import EarlyStopping


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


def test_an_incomplete_folder_is_no_checkpoint(saved):
    plan, folder = saved(2, 4)
    (folder / "step-4" / "progress.json").unlink()
    (folder / "step-x").mkdir()
    assert newest_checkpoint(plan.output_dir) == folder / "step-2"


HARMS = {
    "a bit": (lambda folder: flip_a_bit(folder / "weights"), "weights is not what was written"),
    "the end": (lambda folder: (folder / "weights").write_bytes(b"half"), "weights has 4 bytes instead of 2048"),
    "the file": (lambda folder: (folder / "weights").unlink(), "weights is missing"),
    "the last file": (lambda folder: (folder / "progress.json").write_text('{"step"'), "progress.json cannot be read"),
}


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
    complete(plan, 4, aside)
    flip_a_bit(folder / "step-4" / "shards" / "rank-0")
    assert resume_folder(plan)[0] == folder / "step-2"


def test_a_checkpoint_records_its_run_and_that_of_another_run_is_refused(saved):
    plan, folder = saved(4)
    assert saved_progress(folder / "step-4", plan) == 4
    progress = json.loads((folder / "step-4" / "progress.json").read_text())
    assert (progress["data_fingerprint"], progress["method"]) == (plan.data.fingerprint, "full")
    assert progress["files"] == {"weights": [2048, zlib.crc32(bytes(range(256)) * 8)]}
    others = {
        "other examples": replace(plan, data=replace(plan.data, fingerprint="f")),
        "global batch": replace(
            plan, batching=replace(plan.batching, micro_batch_size=3 * plan.batching.micro_batch_size)
        ),
        "rows of at most": replace(plan, rows=replace(plan.rows, length=plan.rows.length // 2)),
        "trained by full": replace(plan, build=replace(plan.build, method=MethodOptions(type="lora"))),
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


def test_newest_needs_an_undamaged_checkpoint_and_auto_does_not(saved):
    plan, folder = saved(2)
    (folder / "step-2" / "weights").write_bytes(b"half")
    auto, newest = (replace(plan, checkpoint=plan.checkpoint.model_copy(update={"resume_from_checkpoint": wanted}))
                    for wanted in ("auto", "newest"))  # fmt: skip
    assert resume_folder(auto)[0] is None
    with pytest.raises(UserError, match=r"no complete checkpoint to continue from\..*step-2 is damaged.*--resume auto"):
        resume_folder(newest)


def test_early_stopping_follows_from_the_losses():
    stopping = EarlyStopping(2, [3.0, 2.0, 2.5])
    assert (stopping.best, stopping.since_best, stopping.should_stop) == (2.0, 1, False)
    assert stopping.add(1.5) is True  # the lowest: counting starts again
    assert [stopping.add(loss) for loss in (1.5, 1.6)] == [False, False]  # equal is not lower
    assert stopping.should_stop and stopping.best == 1.5
    assert not EarlyStopping(None, [1.0] * 50).should_stop
