"""States of the target on disk: equal losses, one forward of the target, and caches that are refused."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.command_line import losses, overrides, run_here
from support.forked_ranks import on_ranks
from support.tasks.draft_runs import DRAFT, evaluations, plan_draft, train_draft

from ligertune.errors import UserError
from ligertune.features.draft.training.draft_model import DraftModel
from ligertune.features.draft.training.state_cache import space_note
from ligertune.recipe import load_recipe
from ligertune.training.resolve import plan_for

EPOCHS = 2
SETTINGS = {
    "train.num_train_epochs": EPOCHS,
    "train.per_device_train_batch_size": 1,
    "train.global_batch_size": 1,
    "logging.logging_steps": 1,
    "eval.eval_strategy": "epoch",
    "data.datasets.0.max_samples": 3,  # stories, which are cut into more examples
    "data.val_split": 0.5,
    "data.max_length": 128,
    "checkpoint.save_strategy": "no",
}
ONE_STEP = {name: value for name, value in SETTINGS.items() if name != "train.num_train_epochs"}
ONE_STEP |= {"train.max_steps": 1, "eval.eval_strategy": "no"}


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """Tokens of each forward of the target."""
    found = []
    original = DraftModel.target_states

    def counted(self, **inputs):
        found.append(inputs["input_ids"].numel())
        return original(self, **inputs)

    monkeypatch.setattr(DraftModel, "target_states", counted)
    return found


def files_of(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}


@pytest.mark.parametrize("packing", [False, True])
def test_losses_are_equal_and_the_target_runs_in_the_first_epoch_only(packing, tmp_path, forwards) -> None:
    settings = {**SETTINGS, "data.packing": packing}
    expected, _ = train_draft(tmp_path / "one", **settings)
    without = len(forwards)
    forwards.clear()
    cached = {**settings, "draft.cache": tmp_path / "cache"}
    found, _ = train_draft(tmp_path / "two", **cached)
    assert found == expected  # bit for bit: each row has the same documents in all epochs
    assert len(forwards) * EPOCHS == without
    examples = len(files_of(tmp_path / "cache"))
    assert examples > 4
    for one, other in zip(evaluations(tmp_path / "one"), evaluations(tmp_path / "two"), strict=True):
        assert one["eval_loss"] == other["eval_loss"]
    forwards.clear()
    again, report = train_draft(tmp_path / "three", **{**cached, "train.seed": 7})  # another order and split
    assert not forwards
    note = next(note for note in report["notes"] if "draft.cache" in note)
    assert f"states of {examples} examples take" in note
    assert note.split(" take ")[1].split(" in ")[0] in note.split("of which")[1]  # all of it is there
    assert again != expected


def test_a_packed_batch_gets_the_states_of_its_documents(tmp_path, forwards) -> None:
    """The states were written by rows of single examples, and two documents share a row."""
    alone = {**SETTINGS, "data.packing": False, "draft.cache": tmp_path / "cache"}
    train_draft(tmp_path / "alone", **alone)
    forwards.clear()
    packed = {**SETTINGS, "data.packing": True, "train.per_device_train_batch_size": 2, "train.global_batch_size": 2}
    found, _ = train_draft(tmp_path / "packed", **packed, **{"draft.cache": tmp_path / "cache"})
    assert not forwards
    expected, _ = train_draft(tmp_path / "without", **packed)
    assert found == pytest.approx(expected, rel=1e-5)  # products of rows of other lengths round differently


def test_a_kill_leaves_whole_files_and_damaged_ones_are_written_again(tmp_path, forwards) -> None:
    settings = {**SETTINGS, "data.packing": False, "draft.cache": tmp_path / "cache"}
    expected, _ = train_draft(tmp_path / "one", **settings)
    paths = sorted(files_of(tmp_path / "cache"), key=lambda path: path.stat().st_size)
    before = {path: path.read_bytes() for path in paths}
    shutil.copy(paths[-1], paths[0])  # of another example, whose length differs
    assert len(before[paths[-1]]) != len(before[paths[0]])
    paths[1].unlink()
    paths[2].write_bytes(before[paths[2]][:-7])  # cut off
    (paths[3].parent / ".left.partial").write_bytes(b"half")
    forwards.clear()
    found, _ = train_draft(tmp_path / "two", **settings)
    assert found == expected
    assert 0 < len(forwards) <= 3  # the evaluation is one batch
    assert {path: path.read_bytes() for path in paths} == before


def test_states_have_the_dtype_of_the_model(tmp_path) -> None:
    settings = {**ONE_STEP, "model.dtype": "bfloat16"}
    job = plan_draft(tmp_path / "run", **settings, **{"draft.cache": tmp_path / "cache"})
    note = next(note for note in job.plan.notes if "draft.cache" in note)
    train_draft(tmp_path / "run", **settings, **{"draft.cache": tmp_path / "cache"})
    path = next(iter(files_of(tmp_path / "cache")))
    tensors = load_file(path)
    width = tensors["last_states"].shape[1]
    assert tensors["target_states"].shape == (len(tensors["last_states"]), 3 * width)
    assert {str(one.dtype) for one in tensors.values()} == {"torch.bfloat16"}
    tokens = int(job.data.train.lengths.sum() + job.data.eval.lengths.sum())
    assert f"{tokens * 4 * width * 2 / 2**20:.1f} MiB" in note


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache of the recipe's target, after one step."""
    folder = tmp_path_factory.mktemp("cached")
    settings = {**ONE_STEP, "draft.cache": folder / "cache"}
    train_draft(folder / "run", **settings)
    return folder / "cache"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft.layer_ids": "[1, 2, 4]"}, "the states of another target: layer_ids in its target.json differs"),
        ({"model.dtype": "bfloat16"}, "the states of another target: dtype in its target.json differs"),
        ({"model.init": "random"}, "the states of another target: weights in its target.json differs"),
        ({"draft.cache_max_gib": 1e-4}, "MiB, and draft.cache_max_gib is 0.0001"),
        ({"data.streaming": True, "data.val_split": 0}, "draft.cache keeps the states of"),
    ],
)
def test_caches_that_do_not_fit_are_refused(changes, message, cache, tmp_path) -> None:
    before = files_of(cache)
    settings = {**ONE_STEP, "draft.cache": cache, **changes, "checkpoint.output_dir": tmp_path / "run"}
    done = run_here("draft", DRAFT, *overrides(settings), cwd=tmp_path)
    assert done.code == 2, done.err[-2000:]
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert files_of(cache) == before
    assert not (tmp_path / "run").exists()


def test_ranks_that_share_the_target_are_refused(tmp_path) -> None:
    settings = {**ONE_STEP, "draft.cache": tmp_path / "cache", "parallel.strategy": "fsdp"}
    settings["train.global_batch_size"] = 2
    with pytest.raises(UserError, match="and fsdp needs all at once"):
        plan_for(load_recipe(DRAFT, overrides=overrides(settings)[1::2]), for_show=True, processes=2)


def test_a_folder_of_other_files_is_refused(tmp_path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is no folder of states: it lacks a readable target\.json"):
        plan_draft(tmp_path / "run", **SETTINGS, **{"draft.cache": tmp_path / "cache"})


def test_states_that_the_disk_has_no_room_for_are_refused(tmp_path) -> None:
    """Files that are there already need no more room."""
    folder = tmp_path / "not" / "yet"
    total = shutil.disk_usage(tmp_path).total
    here = tmp_path / "here"
    here.write_bytes(b"")
    assert "take 8.0 KiB in" in space_note(folder, {folder / "a": 2**13}, 1.0)
    assert "1.00 GiB are there" in space_note(folder, {here: 2**30, folder / "a": 1}, 2.0)
    with pytest.raises(UserError, match=r"of which 0\.0 MiB are there, and .* has .* free"):
        space_note(folder, {folder / "a": total}, total / 2**30 + 1)
    space_note(folder, {here: total}, total / 2**30 + 1)


@pytest.mark.slow
def test_two_ranks_read_what_the_other_wrote(tmp_path, forwards) -> None:
    settings = {**SETTINGS, "data.packing": False, "train.global_batch_size": 2, "model.dtype": "float32"}
    settings |= {"data.val_split": 0, "eval.eval_strategy": "no"}
    expected, _ = train_draft(tmp_path / "one", **settings)
    cached = {**settings, "draft.cache": tmp_path / "cache", "parallel.strategy": "ddp"}

    def run(rank: int) -> None:
        forwards.clear()
        train_draft(tmp_path / "two", **cached)
        (tmp_path / f"forwards-{rank}").write_text(str(len(forwards)))

    on_ranks(2, run)
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
    of_ranks = [int((tmp_path / f"forwards-{rank}").read_text()) for rank in range(2)]
    # each ran its half of the first epoch, whose last batch has a row of the second one
    assert min(of_ranks) > 0
    assert sum(of_ranks) - len(files_of(tmp_path / "cache")) in (0, 1)
