"""Context parallel: ranks that share each row train as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import losses, overrides
from test_resume_elsewhere import FSDP, on

from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import plan_for

PARTS = {**FSDP, "parallel.cp_size": 2}
EVALUATED = {"data.val_split": 0.2, "eval.eval_strategy": "steps", "eval.eval_steps": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, quickstart) -> Path:
    """The folder of a run with one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    on(1, quickstart / "stories260k.yaml", folder, **EVALUATED)
    return folder


def eval_losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def test_two_ranks_that_share_rows_have_the_losses_of_one(alone, recipe, tmp_path):
    assert on(2, recipe, tmp_path / "run", **PARTS, **EVALUATED) == pytest.approx(losses(alone), rel=1e-5)
    assert eval_losses(tmp_path / "run") == pytest.approx(eval_losses(alone), rel=1e-5)
    batching = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))["batching"]
    assert (batching["accumulation"], batching["world_size"], batching["global_batch_size"]) == (2, 2, 8)


@pytest.mark.slow
def test_two_pairs_go_on_with_what_one_process_left_and_it_with_what_they_leave(alone, recipe, tmp_path):
    resumed = {"checkpoint.resume_from_checkpoint": alone / "checkpoints" / "step-2", **EVALUATED}
    assert on(4, recipe, tmp_path / "pairs", **PARTS, **resumed) == pytest.approx(losses(alone)[2:], rel=1e-5)
    on(4, recipe, tmp_path / "whole", **PARTS, **EVALUATED)
    resumed["checkpoint.resume_from_checkpoint"] = tmp_path / "whole" / "checkpoints" / "step-2"
    assert on(1, recipe, tmp_path / "one", **resumed) == pytest.approx(losses(alone)[2:], rel=1e-5)


def planned(recipe: Path, folder: Path, processes: int, **changes: object):
    settings = {"checkpoint.output_dir": folder / "run", **PARTS, **changes}
    return plan_for(load_recipe(recipe, overrides=overrides(settings)[1::2]), processes=processes).plan


def test_processes_that_do_not_divide_are_refused(recipe, tmp_path):
    with pytest.raises(UserError, match="2 processes share each row, and this run has 3"):
        planned(recipe, tmp_path, 3)


def test_a_device_computes_its_part_of_a_row(recipe, tmp_path):
    shared, alone = (planned(recipe, tmp_path, 4, **{"parallel.cp_size": size}) for size in (4, 1))
    assert shared.batching.row_ranks == 1 and shared.batching.global_batch_size * 4 == alone.batching.global_batch_size
    assert shared.bytes == alone.bytes and shared.peak.total < alone.peak.total
