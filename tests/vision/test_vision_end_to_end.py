"""`ligertune train` on real images, and the model that it writes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_vlms
import torch
import transformers
from command_line import losses, run
from image_batches import batch_of

from ligertune.decode.generate import generate_answer
from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import plan_for
from ligertune.run import run as train_job

pytestmark = pytest.mark.corpus

SIZED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def recipe_for(family: str, folder: Path, corpus: Path, output: Path, **changes) -> Path:
    """Write a recipe of three datasets: several images per row, charts with the mark after the question, and text."""
    images = corpus / "images"
    settings = {
        "model": {"model_name_or_path": str(folder)},
        "data": {
            "datasets": [
                {"path": str(images / "mllm_demo" / "mllm_demo.json")},
                {"path": str(images / "qwen_vl_demo" / "single_images.json")},
                {"path": str(images / "xcomposer_demo" / "only_text_example.json")},
            ],
            "num_proc": 1,
            "max_length": 4096 if family == "llava" else 2048,
        },
        "train": {"per_device_train_batch_size": 2, "learning_rate": 2e-3, "max_steps": 4, "warmup_ratio": 0},
        "logging": {"logging_steps": 1},
        "report": {"warmup_steps": 1},
        "vision": {"freeze_vision_tower": False, "freeze_projector": False},
        "checkpoint": {"output_dir": str(output), "save_strategy": "no"},
    }
    if family in SIZED:
        settings["vision"]["image_max_pixels"] = 20_000
    for key, value in changes.items():
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = value
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return path


@pytest.fixture
def trained(folder_of, corpus, tmp_path):
    """trained(family, **changes) -> (job, report, output folder)."""

    def go(family: str, name: str = "run", **changes):
        output = tmp_path / name
        job = plan_for(load_recipe(recipe_for(family, folder_of(family), corpus, output, **changes)))
        return job, train_job(job, lambda line: None), output

    return go


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_a_run_learns_and_its_model_loads(family, trained):
    job, report, output = trained(family)
    assert report.status == "completed" and report.loss_last < report.loss_first
    assert report.throughput.images_per_second > 0
    assert [line.kernel for line in report.kernels if line.left] == []
    model = transformers.AutoModelForImageTextToText.from_pretrained(output / "model").eval()
    reader = tiny_vlms.reader_of(output / "model", **({"image_max_pixels": 20_000} if family in SIZED else {}))
    assert reader.options == job.images.options and reader.identity() == job.images.identity()
    batch = batch_of(job.data, reader, (0,))
    with torch.no_grad():
        first = model(**batch).logits
    model.save_pretrained(output / "again")
    with torch.no_grad():
        again = transformers.AutoModelForImageTextToText.from_pretrained(output / "again").eval()(**batch).logits
    assert torch.equal(first, again)
    before = transformers.AutoModelForImageTextToText.from_pretrained(job.plan.build.model.model_name_or_path)
    moved = {name for name, p in before.named_parameters() if not torch.equal(p, model.get_parameter(name))}
    assert any("language_model" in name for name in moved) and any("vision" in n or "visual" in n for n in moved)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_packed_and_grouped_runs_plan_the_same_tokens(family, trained):
    packed, _, _ = trained(family, "packed", **{"train.max_steps": 1})
    grouped, _, _ = trained(family, "grouped", **{"train.max_steps": 1, "data.packing": False})
    assert packed.plan.rows.packed and grouped.plan.rows.kind == "grouped"
    assert packed.plan.data.tokens == grouped.plan.data.tokens


@pytest.mark.parametrize(
    "change",
    [{"kernels.enabled": False}, {"kernels.attention": True}, {"train.gradient_checkpointing": True}],
    ids=str,
)
def test_kernels_and_checkpointing_change_no_loss(change, trained):
    usual = losses(trained("qwen2_vl", "usual")[2])
    np.testing.assert_allclose(losses(trained("qwen2_vl", "changed", **change)[2]), usual, rtol=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(trained, corpus, folder_of):
    saved = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}
    _, _, output = trained("qwen2_vl", "whole", **saved)
    whole = losses(output)
    shutil.rmtree(output / "model")
    (output / "report.json").unlink()
    recipe = load_recipe(output.with_suffix(".yaml"), overrides=["checkpoint.resume_from_checkpoint=auto"])
    train_job(plan_for(recipe), lambda line: None)
    assert losses(output)[-2:] == whole[-2:]


@pytest.mark.slow
def test_the_command_line_trains_shows_and_generates(corpus, folder_of, tmp_path):
    recipe = recipe_for("qwen2_5_vl", folder_of("qwen2_5_vl"), corpus, tmp_path / "run")

    def ligertune(*arguments) -> str:
        done = run([sys.executable, "-m", "ligertune", *map(str, arguments)], cwd=tmp_path)
        assert done.code == 0, done.err
        return done.out

    shown = json.loads(ligertune("data", recipe, "--examples", 1, "--json"))
    assert shown["images"] == 11 and len(shown["examples"][0]["images"]) == 2
    pieces = [piece["text"] for piece in shown["examples"][0]["pieces"]]
    assert sum(text.startswith("\u27e81.jpg: ") and text.endswith(" tokens\u27e9") for text in pieces) == 2
    report = json.loads(ligertune("train", recipe, "--json"))
    assert report["throughput"]["image_tokens_per_second"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("images", 0) for line in lines) > 0
    image = corpus / "images" / "mllm_demo" / "mllm_demo_data" / "1.jpg"
    ask = ("generate", tmp_path / "run" / "model", "Who is <image>?", "--image", image, "--max-new-tokens", 4)
    answer = json.loads(ligertune(*ask, "--json"))
    assert "Who is <|vision_start|><|image_pad|><|vision_end|>?" in answer["prompt"] and answer["new_tokens"] > 0


def test_generate_refuses_images_for_a_text_model_and_missing_images(quickstart, folder_of):
    how = {"raw": False, "max_new_tokens": 1, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    for model, image, sentence in (
        (quickstart / "stories260K", "a.png", "is a text model"),
        (folder_of("llava"), "missing.png", "image is missing"),
        (folder_of("llava"), "https://example.com/a.png", "image on the network"),
    ):
        with pytest.raises(UserError, match=sentence):
            generate_answer(str(model), "What?", images=[image], **how)


# key -> another value (image_min_pixels: test_image_rows)
CHANGES = {
    "vision.image_max_pixels": 8_000,
    "vision.freeze_vision_tower": True,
    "vision.freeze_projector": True,
    "vision.freeze_language_model": True,
}


@pytest.fixture
def usual(trained):
    return losses(trained("qwen2_vl", "usual", **{"train.max_steps": 3})[2])


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_changes_the_losses(key, trained, usual):
    changed = trained("qwen2_vl", "changed", **{"train.max_steps": 3, key: CHANGES[key]})[2]
    assert losses(changed) != usual


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_padding_free_batches_have_the_losses_of_padded_ones(family, trained):
    found = []
    for padding_free in (False, True):
        alone = {"data.packing": False, "data.padding_free": padding_free}
        job, _, output = trained(family, name=f"run-{padding_free}", **alone)
        assert job.plan.rows.is_padding_free == padding_free
        found.append(losses(output))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
