"""A run on rows of token ids trains as the run whose rows they were, on each task of texts, packed or not."""

import pytest
from support.command_line import RECIPE, losses
from support.data.row_files import write_rows
from support.quickstart_runs import TWO_LAYERS, plan_run, train, train_ranks

from ligertune.errors import UserError


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory) -> str:
    """A file with the examples of the quickstart's data set."""
    folder = tmp_path_factory.mktemp("rows")
    examples = plan_run(folder, **{"data.val_split": 0}).data.train
    rows = [{"input_ids": one.input_ids.tolist(), "labels": one.labels.tolist()} for one in examples]
    return str(write_rows(folder / "rows.jsonl", rows))


@pytest.mark.parametrize("packing", [False, True])
def test_losses_are_those_of_the_rows(tokenized, packing, tmp_path):
    settings = {**TWO_LAYERS, "data.packing": packing, "data.val_split": 0}
    train(tmp_path / "a", **settings)
    train(tmp_path / "b", **settings, **{"data.datasets.0.path": tokenized})
    assert losses(tmp_path / "a" / "run") == losses(tmp_path / "b" / "run")


def test_two_ranks_have_the_losses_of_one(tokenized, tmp_path):
    settings = {**TWO_LAYERS, "data.val_split": 0, "data.datasets.0.path": tokenized}
    one = train_ranks(1, tmp_path / "one", **settings)
    halved = {**settings, "train.gradient_accumulation_steps": 1}
    assert train_ranks(2, tmp_path / "two", **halved) == pytest.approx(one, rel=1e-5)


def test_medusa_and_distillation_read_them_and_preferences_refuse_them(tokenized, tmp_path):
    here = {"data.datasets.0.path": tokenized, "data.val_split": 0}
    assert plan_run(tmp_path, **here, task="medusa").plan.data.examples == 40
    teacher = {"distill.teacher": str(RECIPE.parent / "stories260K")}
    train(tmp_path / "distill", **here, **teacher, task="distill")
    assert losses(tmp_path / "distill" / "run")[0] == pytest.approx(0, abs=1e-4)  # the student is its own teacher
    with pytest.raises(UserError, match="rows are token ids, and this task needs preference pairs"):
        plan_run(tmp_path, **here, task="dpo")
