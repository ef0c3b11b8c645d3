"""Two ranks train a vision-language model as one does, even if one rank has only text in a step."""

from __future__ import annotations

import json
import sys

import pytest
from command_line import losses, run
from image_batches import image_row

from ligertune.data.batching.order import check_images_on_all_rows
from ligertune.errors import UserError

pytestmark = pytest.mark.slow

FSDP = ("--use_fsdp", "--fsdp_version", "2")
DDP = ("--multi_gpu",)


@pytest.fixture
def train(folder_of, image_paths, tmp_path):
    """train(family, name, launcher, micro batch) -> losses of three steps of four rows, two of them of text."""
    rows = [image_row("<image>What is this?", "Yes. It is a red square.", image_paths["red"]),
            image_row("Who are they?", "a system of user and assistant"),
            image_row("<image> and <image> in 2015?", "a system", image_paths["green"], image_paths["blue"]),
            image_row("What is the value of 38?", "It is 2015.")]  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps(rows * 3), encoding="utf-8")

    def go(family: str, name: str, launcher: tuple[str, ...], micro: int) -> list[float]:
        recipe = {
            "model": {"model_name_or_path": str(folder_of(family)), "dtype": "float32"},
            "data": {"datasets": [{"path": str(tmp_path / "rows.json")}], "packing": False, "num_proc": 1},
            "train": {"per_device_train_batch_size": micro, "global_batch_size": 4, "learning_rate": 1e-3,
                      "group_by_length": False},
            "vision": {"freeze_vision_tower": False, "freeze_projector": False},
            "logging": {"logging_steps": 1},
            "checkpoint": {"output_dir": str(tmp_path / name), "save_strategy": "no"},
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        accelerate = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", "2",
                      "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                      "--main_process_port", "0"]  # fmt: skip
        start = accelerate if launcher else [sys.executable]
        done = run([*start, "-m", "ligertune", "train", str(path)], cwd=tmp_path)
        assert done.code == 0, done.err[-3000:]
        return losses(tmp_path / name)

    return go


@pytest.mark.parametrize(
    ("family", "launcher"),
    [
        pytest.param("qwen2_vl", DDP, id="ddp"),
        pytest.param("qwen2_vl", FSDP, id="fsdp2"),
        pytest.param("mllama", DDP, id="mllama-ddp"),
    ],
)
def test_two_ranks_have_the_losses_of_one(family, launcher, train):
    alone = train(family, "alone", (), 4)
    ranks = train(family, "ranks", launcher, 1)
    assert len(alone) == 3 and ranks == pytest.approx(alone, rel=1e-5)


def test_fsdp_refuses_rows_without_images_for_mllama(prepared_for, image_paths):
    rows = prepared_for(
        "mllama", [image_row("<image>What?", "Yes", image_paths["red"]), image_row("What?", "Yes")]
    ).train
    check_images_on_all_rows("ddp", rows, "Llama-3.2-Vision")
    check_images_on_all_rows("fsdp", rows.select([0]), "Llama-3.2-Vision")
    with pytest.raises(UserError, match="cannot train on rows without images"):
        check_images_on_all_rows("fsdp", rows, "Llama-3.2-Vision")
