"""A run on interleaved data sets: resumed it continues with the same examples, and two ranks have the losses of one."""

import json
import shutil

import pytest
from support.command_line import RECIPE, losses
from support.data.row_files import write_rows
from support.quickstart_runs import RESUME, TWO_LAYERS, plan_run, saves, train, train_ranks, unfinished

from ligertune.errors import UserError
from ligertune.training.setup import data_order


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, object]:
    """The quickstart's data and ten short rows, three to one."""
    few = [{"instruction": f"Say {n}.", "input": "", "output": f"{n} " * (n + 1)} for n in range(10)]
    other = write_rows(tmp_path_factory.mktemp("rows") / "few.jsonl", few)
    usual = next((RECIPE.parent).glob("*.json*"))
    sets = [{"path": str(usual), "max_samples": 40}, {"path": str(other)}]
    return {
        **TWO_LAYERS,
        "data.datasets": json.dumps(sets),
        "data.datasets.0.max_samples": 40,
        "data.val_split": 0,
        "data.interleave.probabilities": "[0.75, 0.25]",
        "train.max_steps": 6,
        **saves(4),
    }


# a stream reads 4,096 examples ahead
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_continues_with_the_same_examples(streaming, settings, tmp_path):
    settings = {**settings, "data.streaming": streaming, "data.packing": streaming}
    train(tmp_path / "whole", **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(unfinished(tmp_path / "cut") / "model")
    assert train(tmp_path / "cut", **settings, **RESUME).resumed_from == 4
    assert losses(tmp_path / "cut" / "run") == losses(tmp_path / "whole" / "run")
    unfinished(tmp_path / "cut")
    with pytest.raises(UserError, match="trained on other"):
        train(tmp_path / "cut", **{**settings, "data.interleave.probabilities": "[0.5, 0.5]"}, **RESUME)


def test_two_ranks_have_the_losses_of_one(settings, tmp_path):
    short = {**settings, "train.max_steps": 3, "checkpoint.save_strategy": "no"}
    one = train_ranks(1, tmp_path / "one", **short)
    two = train_ranks(2, tmp_path / "two", **{**short, "train.gradient_accumulation_steps": 1})
    assert two == pytest.approx(one, rel=1e-5)


def test_a_longer_strategy_has_more_steps_in_an_epoch(settings, tmp_path):
    epoch = {
        **{key: value for key, value in settings.items() if key != "train.max_steps"},
        "train.num_train_epochs": 1.0,
    }
    first, every = (
        plan_run(tmp_path, **epoch, **{"data.interleave.stopping_strategy": strategy}).plan
        for strategy in ("first_exhausted", "all_exhausted")
    )
    assert first.data.examples < 50 < every.data.examples
    assert first.schedule.total_steps == -(-first.data.examples // 4) < every.schedule.total_steps


def test_a_stream_is_shuffled_by_the_seed_of_the_run(tmp_path):
    def first_rows(seed: int) -> list[list[int]]:
        job = plan_run(tmp_path, **{"data.streaming": True, "data.val_split": 0, "train.seed": seed})
        return [row.tolist() for row in data_order(job.plan, job.data.train, None).step(0)]

    assert first_rows(1) == first_rows(1) != first_rows(2)
