"""A vision-language model trained from scratch learns to name the colour and form of drawings.

It cannot learn them if images do not reach the model, come in another order, or labels are shifted by a token: answers
are random and the question is always the same. Takes half a minute on one core.

Two ranks train as one does, even if one rank has only text in a step.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from support.command_line import losses
from support.data.image_batches import batch_of, image_row
from support.forked_ranks import on_ranks
from support.models import tiny_vlms

from ligertune.data.batching.order import check_files_on_all_rows
from ligertune.data.prepare import prepare
from ligertune.data.stream import StreamedExamples
from ligertune.decode.generate import Decoding, generate_answer, load_model
from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import run
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
FORMS = {"square": (1, 1), "pillar": (3, 1), "bar": (1, 3)}  # width and height are divided by these
SIDE = 56  # pixels: 16 patches, 4 tokens
N_TRAIN, N_HELD_OUT, EPOCHS = 1200, 100, 2


def drawing(colour: str, form: str, rng: np.random.Generator) -> Image.Image:
    """Draw a form of random size, place and shade on a dark background."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.integers(0, 60, 3).tolist()))
    half = int(rng.integers(16, 22))
    x, y = rng.integers(half + 1, SIDE - half - 1, 2).tolist()
    shade = np.clip(np.array(COLOURS[colour]) + rng.integers(-30, 31, 3), 0, 255)
    wide, high = (half // part for part in FORMS[form])
    ImageDraw.Draw(image).rectangle((x - wide, y - high, x + wide, y + high), fill=tuple(shade.tolist()))
    return image


def draw(folder, name: str, count: int, rng: np.random.Generator) -> list[str]:
    """Write a dataset of `count` drawings; return its answers."""
    answers = [f"{rng.choice(list(COLOURS))} {rng.choice(list(FORMS))}" for _ in range(count)]
    rows = []
    for number, answer in enumerate(answers):
        drawing(*answer.split(), rng).save(folder / f"{name}{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{name}{number}.png", "conversations": turns})
    (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    return answers


def trained(recipe: dict, output: Path) -> Job:
    """Train all parts of a model into the folder `output`."""
    parts = {"freeze_vision_tower": False, "freeze_projector": False}
    recipe |= {"vision": parts, "checkpoint": {"output_dir": str(output), "save_strategy": "no"}}
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(recipe), encoding="utf-8")
    job = plan_for(load_recipe(path))
    run(job, lambda line: None)
    return job


def right(model, batch: dict) -> torch.Tensor:
    """Return (B,) bool: whether greedy decoding would write the whole answer."""
    batch = dict(batch)
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        written = model(**batch, use_cache=False).logits.argmax(-1)[:, :-1]
    return ((written == labels) | (labels == -100)).all(-1)


@pytest.mark.slow
def test_it_names_held_out_drawings_and_guesses_without_pixels(tmp_path):
    rng = np.random.default_rng(0)
    draw(tmp_path, "train", N_TRAIN, rng)
    answers = draw(tmp_path, "held_out", N_HELD_OUT, rng)
    wide = {"embed_dim": 64, "num_heads": 4, "initializer_range": 0.05}
    tiny_vlms.save("qwen2_vl", tmp_path / "base", vision=wide, text={"initializer_range": 0.05})
    recipe = {
        "model": {"model_name_or_path": str(tmp_path / "base"), "init": "random"},
        "data": {"datasets": [{"path": str(tmp_path / "train.json")}], "num_proc": 1, "cache": False,
                 "packing": False},  # grouping by length would group equal answers
        "train": {"per_device_train_batch_size": 4, "group_by_length": False, "learning_rate": 1.5e-3,
                  "num_train_epochs": EPOCHS, "warmup_ratio": 0.1, "adam_beta2": 0.98, "weight_decay": 0.01},
    }  # fmt: skip
    job = trained(recipe, tmp_path / "run")
    held_out = [job.plan.data_options.datasets[0].model_copy(update={"path": str(tmp_path / "held_out.json")})]
    data = job.plan.data_options.model_copy(update={"datasets": tuple(held_out)})
    rows = prepare(data, job.tokenizer.tokenizer, seed=0, reader=job.reader)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model").eval()
    batch = batch_of(rows, job.reader, range(N_HELD_OUT))
    share = float(right(model, batch).float().mean())
    assert share >= 0.95, share
    without_pixels = right(model, {**batch, "pixel_values": torch.zeros_like(batch["pixel_values"])})
    assert float(without_pixels.float().mean()) <= 0.3  # the same answer for all
    index = right(model, batch).nonzero()[0].item()
    image = str(tmp_path / f"held_out{index}.png")
    found = generate_answer(load_model(str(tmp_path / "run" / "model"), raw=False), "What is it?", Decoding(12), seed=0,
                            images=[image])  # fmt: skip
    assert found.text == answers[index]


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
            "parallel": {"strategy": strategy},
            "logging": {"logging_steps": 1},
        }  # fmt: skip
        trained(recipe, tmp_path / name)

    train("one", 4, "auto")
    on_ranks(2, lambda rank: train("two", 1, strategy))
    expected = losses(tmp_path / "one")
    assert len(expected) == 3 and losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


def test_fsdp_refuses_rows_without_files_for_mllama(prepared_for, reader_of, image_paths):
    rows = prepared_for("mllama", [image_row("<image>What?", "Yes", image_paths["red"]), image_row("What?", "Yes")])
    reader = reader_of("mllama")
    check_files_on_all_rows("ddp", rows.train, reader)
    check_files_on_all_rows("fsdp", rows.train.select([0]), reader)
    with pytest.raises(UserError, match="cannot train on rows without images"):
        check_files_on_all_rows("fsdp", rows.train, reader)
    with pytest.raises(UserError, match="rows without images"):  # of a stream it is not known
        check_files_on_all_rows("fsdp", StreamedExamples.__new__(StreamedExamples), reader)
