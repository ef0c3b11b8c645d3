"""`ligertune train` on real images, and the model that it writes."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from support.command_line import losses, run_here
from support.data.image_batches import batch_of
from support.models import tiny_vlms

from ligertune.decode.generate import Decoding, generate_answer, load_model
from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import run as train_job
from ligertune.training.resolve import plan_for

pytestmark = pytest.mark.corpus
MAX_PIXELS = 10_000  # of images whose number of tokens follows their size


@pytest.fixture
def recipe_for(folder_of, corpus, tmp_path):
    """recipe_for(family, name, **changes) of three datasets: several images per row, charts, and text."""

    def write(family: str, name: str = "run", **changes):
        images = corpus / "images"
        files = ("mllm_demo/mllm_demo.json", "qwen_vl_demo/single_images.json", "xcomposer_demo/only_text_example.json")
        settings = {
            "model": {"model_name_or_path": str(folder_of(family))},
            "data": {"datasets": [{"path": str(images / file)} for file in files], "num_proc": 1,
                     "max_length": 4096 if family == "llava" else 2048},
            "train": {"per_device_train_batch_size": 2, "learning_rate": 2e-3, "max_steps": 4, "warmup_ratio": 0},
            "logging": {"logging_steps": 1},
            "report": {"warmup_steps": 1},
            "vision": {"freeze_vision_tower": False, "freeze_projector": False},
            "checkpoint": {"output_dir": str(tmp_path / name), "save_strategy": "no"},
        }  # fmt: skip
        if family in tiny_vlms.QWEN:
            settings["vision"]["image_max_pixels"] = MAX_PIXELS
        for key, value in changes.items():
            section, _, key_in_section = key.partition(".")
            settings.setdefault(section, {})[key_in_section] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        return path

    return write


@pytest.fixture
def trained(recipe_for, tmp_path):
    """trained(family, name, **changes) -> (job, report, output folder)."""

    def go(family: str, name: str = "run", **changes):
        job = plan_for(load_recipe(recipe_for(family, name, **changes)))
        return job, train_job(job, lambda line: None), tmp_path / name

    return go


QUICK = ("qwen2_vl", "llava")  # one whose images have grids, one of a fixed number of tokens


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tiny_vlms.FAMILIES]
)
def test_a_run_learns_and_its_model_loads(family, trained):
    job, report, output = trained(family)
    assert report.status == "completed" and report.loss_last < report.loss_first
    assert report.throughput.images_per_second > 0
    assert [line.kernel for line in report.kernels if line.left] == []
    load = transformers.AutoModelForImageTextToText.from_pretrained
    model = load(output / "model").eval()
    limits = {"image_max_pixels": MAX_PIXELS} if family in tiny_vlms.QWEN else {}
    reader = tiny_vlms.reader_of(output / "model", **limits)
    assert reader.options == job.reader.options and reader.identity() == job.reader.identity()
    batch = batch_of(job.data, reader, (0,))
    model.save_pretrained(output / "again")
    with torch.no_grad():
        assert torch.equal(load(output / "again").eval()(**batch).logits, model(**batch).logits)
    before = load(job.plan.build.model.model_name_or_path)
    changed = {name for name, p in before.named_parameters() if not torch.equal(p, model.get_parameter(name))}
    assert any("language_model" in name for name in changed) and any("vision" in n or "visual" in n for n in changed)


@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_packed_grouped_and_padding_free_runs(family, trained):
    """All plan the same tokens; padding-free batches have the losses of padded ones."""
    packed, _, _ = trained(family, "packed", **{"train.max_steps": 1})
    unpacked = {"data.packing": False, "data.padding_free": False}
    grouped, _, padded = trained(family, "grouped", **unpacked)
    flat, _, padding_free = trained(family, "flat", **unpacked | {"data.padding_free": True})
    assert packed.plan.rows.packed and grouped.plan.rows.kind == "grouped"
    assert packed.plan.data.tokens == grouped.plan.data.tokens
    assert (grouped.plan.rows.is_padding_free, flat.plan.rows.is_padding_free) == (False, True)
    assert losses(padding_free) == pytest.approx(losses(padded), rel=1e-4)


@pytest.mark.slow
def test_vision_keys_change_the_losses_and_kernels_and_checkpointing_do_not(trained):
    """After two steps: the first loss comes before any update. image_min_pixels: test_image_rows."""
    two = {"train.max_steps": 2, "train.per_device_train_batch_size": 1}
    usual = losses(trained("qwen2_vl", "usual", **two)[2])
    for change in ({"kernels.enabled": False}, {"kernels.attention": True}, {"train.gradient_checkpointing": True}):
        np.testing.assert_allclose(
            losses(trained("qwen2_vl", next(iter(change)), **two, **change)[2]), usual, rtol=1e-4
        )
    freeze = {f"freeze_{part}": True for part in ("vision_tower", "projector", "language_model")}
    for key, value in {"image_max_pixels": 4_000, **freeze}.items():
        assert losses(trained("qwen2_vl", key, **two, **{f"vision.{key}": value})[2]) != usual, key


def test_a_resumed_run_equals_an_uninterrupted_one(trained):
    saved = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}
    _, _, output = trained("qwen2_vl", "run", **saved)
    expected = losses(output)
    shutil.rmtree(output / "model")
    (output / "report.json").unlink()
    trained("qwen2_vl", "run", **saved, **{"checkpoint.resume_from_checkpoint": "auto"})
    assert losses(output)[-2:] == expected[-2:]


@pytest.mark.slow
def test_commands_train_show_and_generate(corpus, recipe_for, tmp_path):
    recipe = recipe_for("qwen2_5_vl")

    def ligertune(*arguments: object) -> dict:
        done = run_here(*arguments, "--json", cwd=tmp_path)
        assert done.code == 0, done.err
        return json.loads(done.out)

    shown = ligertune("data", recipe, "--examples", 1)
    assert shown["images"] == 11 and len(shown["examples"][0]["images"]) == 2
    pieces = [piece["text"] for piece in shown["examples"][0]["pieces"]]
    assert sum(text.startswith("\u27e81.jpg: ") and text.endswith(" tokens\u27e9") for text in pieces) == 2
    assert ligertune("train", recipe)["throughput"]["image_tokens_per_second"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("images", 0) for line in lines) > 0
    image = corpus / "images" / "mllm_demo" / "mllm_demo_data" / "1.jpg"
    options = ("--image", image, "--max-new-tokens", 4)
    answer = ligertune("generate", tmp_path / "run" / "model", "Who is <image>?", *options)
    assert "Who is <|vision_start|><|image_pad|><|vision_end|>?" in answer["prompt"] and answer["new_tokens"] > 0


def test_generate_refuses_images_for_a_text_model_and_missing_images(quickstart, folder_of):
    for model, image, message in (
        (quickstart / "stories260K", "a.png", "is a text model"),
        (folder_of("llava"), "missing.png", "image is missing"),
        (folder_of("llava"), "https://example.com/a.png", "image on the network"),
    ):
        with pytest.raises(UserError, match=message):
            generate_answer(load_model(str(model), raw=False), "What?", Decoding(1), seed=0, images=[image])


@pytest.mark.slow
@pytest.mark.parametrize("family", QUICK)
def test_eval_of_a_run_has_the_loss_of_its_last_evaluation(family, trained, tmp_path):
    _, report, folder = trained(family, **{"data.val_split": 0.3})
    done = run_here("eval", folder, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    loss = json.loads(done.out)["metrics"]["loss"]
    assert loss["value"] == pytest.approx(report.eval_loss, rel=1e-5)
    assert loss["base"]["value"] > loss["value"]
    refused = run_here("eval", folder, "--metric", "exact_match", cwd=tmp_path)
    assert refused.code == 2
    assert "prompts with images are not generated" in " ".join(refused.err.split())
