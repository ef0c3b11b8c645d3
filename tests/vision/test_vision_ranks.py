"""Two ranks train a vision-language model as one does, even if one rank has only text in a step."""

from __future__ import annotations

import json

import pytest
from command_line import losses
from forked_ranks import on_ranks
from image_batches import image_row

from ligertune.data.batching.order import check_images_on_all_rows
from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import plan_for, run


@pytest.mark.slow
@pytest.mark.parametrize(("family", "strategy"), [("qwen2_vl", "ddp"), ("qwen2_vl", "fsdp"), ("mllama", "ddp")])
def test_two_ranks_have_the_losses_of_one(family, strategy, folder_of, image_paths, tmp_path):
    """Three steps of four rows, two of them text."""
    rows = [image_row("<image>What is this?", "Yes. It is a red square.", image_paths["red"]),
            image_row("Who are they?", "a system of user and assistant"),
            image_row("<image> and <image> in 2015?", "a system", image_paths["green"], image_paths["blue"]),
            image_row("What is the value of 38?", "It is 2015.")]  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps(rows * 3), encoding="utf-8")

    def train(name: str, micro_batch: int, strategy: str) -> None:
        recipe = {
            "model": {"model_name_or_path": str(folder_of(family)), "dtype": "float32"},
            "data": {"datasets": [{"path": str(tmp_path / "rows.json")}], "packing": False, "num_proc": 1},
            "train": {"per_device_train_batch_size": micro_batch, "global_batch_size": 4, "learning_rate": 1e-3,
                      "group_by_length": False},
            "vision": {"freeze_vision_tower": False, "freeze_projector": False},
            "parallel": {"strategy": strategy},
            "logging": {"logging_steps": 1},
            "checkpoint": {"output_dir": str(tmp_path / name), "save_strategy": "no"},
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        run(plan_for(load_recipe(tmp_path / f"{name}.yaml")), lambda line: None)

    train("one", 4, "auto")
    on_ranks(2, lambda rank: train("two", 1, strategy))
    expected = losses(tmp_path / "one")
    assert len(expected) == 3 and losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


def test_fsdp_refuses_rows_without_images_for_mllama(prepared_for, image_paths):
    rows = prepared_for("mllama", [image_row("<image>What?", "Yes", image_paths["red"]), image_row("What?", "Yes")])
    check_images_on_all_rows("ddp", rows.train, "Llama-3.2-Vision")
    check_images_on_all_rows("fsdp", rows.train.select([0]), "Llama-3.2-Vision")
    with pytest.raises(UserError, match="cannot train on rows without images"):
        check_images_on_all_rows("fsdp", rows.train, "Llama-3.2-Vision")
