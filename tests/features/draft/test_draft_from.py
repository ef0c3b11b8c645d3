"""`ligertune draft RECIPE --from RUN`: the head of a base continues on the model that a run fine-tuned."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.command_line import Done, overrides, run_here
from support.quickstart_runs import ONE_ROW
from support.quickstart_runs import train as train_quickstart
from support.tasks.draft_runs import DRAFT, train_draft

from ligertune.features.draft.files.draft_files import read_draft_files, target_of_draft
from ligertune.models.read_config import read_config
from ligertune.recipe import load_recipe

SHORT = {
    "train.max_steps": 1,
    "train.per_device_train_batch_size": 2,
    "data.datasets.0.max_samples": 20,
    "data.max_length": 64,
    "eval.eval_strategy": "no",
    "checkpoint.save_strategy": "no",
    "draft.draft_vocab_size": 300,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with the head of the base in head/, a full run in tuned/run, and one of LoRA in adapted/run."""
    folder = tmp_path_factory.mktemp("made")
    train_draft(folder / "head", **SHORT, **{"train.learning_rate": 1e-2})
    steps = {"train.max_steps": 1, "train.learning_rate": 1e-2, **ONE_ROW}
    train_quickstart(folder / "tuned", **steps)
    train_quickstart(folder / "adapted", **steps, **{"method.type": "lora", "method.lora_r": 4})
    return folder


def continue_from(run: Path, cwd: Path, *options: object, **settings: object) -> Done:
    """Run the command with the head of the base in the recipe's output_dir; steps hardly change it."""
    recipe = cwd / "recipe.yaml"
    if not recipe.exists():
        values = json.loads(load_recipe(DRAFT).model_dump_json(exclude_unset=True))
        values["checkpoint"]["output_dir"] = str(cwd / "head")
        recipe.write_text(json.dumps(values))
    given = {**SHORT, "train.learning_rate": 1e-12, **settings}
    return run_here("draft", recipe, "--from", run, *options, *overrides(given), cwd=cwd)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_draft_files(folder / "draft" / "eagle3", read_config(load_recipe(DRAFT).model)).tensors)


@pytest.mark.parametrize(
    ("run", "output", "target"),
    [("tuned/run", "head-run", "tuned/run/model"), ("adapted/run/model", "head-run", "adapted/run/model")],
)
def test_the_head_of_the_base_continues_on_the_model_of_a_run(run, output, target, made) -> None:
    before = {path: path.read_bytes() for path in (made / "head").rglob("*") if path.is_file()}
    done = continue_from(made / run, made)
    assert done.code == 0, done.err[-3000:]
    said = " ".join(done.err.split())
    assert f"the target is {made / target}, the head to start from {made / 'head'}, the output {made / output}" in said
    assert target_of_draft(made / output / "draft" / "eagle3") == str(made / target)
    start = tensors(made / "head")
    for name, tensor in tensors(made / output).items():
        torch.testing.assert_close(tensor, start[name], rtol=0, atol=1e-9)
    assert before == {path: path.read_bytes() for path in (made / "head").rglob("*") if path.is_file()}
    checked = run_here("export", made / output, "--check", "--json", cwd=made)
    assert [row["layout"] for row in json.loads(checked.out)["check"]] == ["eagle3", "speculators"]
    again = continue_from(made / run, made)
    assert again.code == 2
    assert f"{output} already holds a run" in " ".join(again.err.split())
    shutil.rmtree(made / output)


def test_head_and_output_can_be_named(made, tmp_path) -> None:
    shutil.copytree(made / "head" / "draft", tmp_path / "other")
    done = continue_from(
        made / "tuned" / "run", tmp_path, "--head", "other", **{"checkpoint.output_dir": tmp_path / "out"}
    )
    assert done.code == 0, done.err[-3000:]
    said = " ".join(done.err.split())
    assert f"the head to start from {tmp_path / 'other'}, the output {tmp_path / 'out'}" in said
    assert (tmp_path / "out" / "draft" / "eagle3" / "config.json").is_file()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no folder", "nowhere is no folder"),
        ("no run", "holds no config.json, so it is not a model"),
        ("no run of ours", "is not a run: it has no plan.json and no ligertune.json"),
        ("no head", "holds no draft head to start from"),
        ("other sizes", "drafts for a model with vocab_size 256, and this one has 512"),
        ("onto the head", "holds the head to start from"),
    ],
)
def test_bad_input_is_one_sentence(case, message, made, quickstart, tmp_path) -> None:
    run = made / "tuned" / "run"
    options: list[object] = []
    settings: dict[str, object] = {}
    if case != "no head":
        shutil.copytree(made / "head" / "draft", tmp_path / "head" / "draft")
    if case == "no folder":
        run = tmp_path / "nowhere"
    if case == "no run":
        run = tmp_path / "empty"
        run.mkdir()
    if case == "no run of ours":
        run = quickstart / "stories260K"
    if case == "other sizes":
        config = tmp_path / "head" / "draft" / "eagle3" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 256, "draft_vocab_size": 200}))
    if case == "onto the head":
        options = ["--overwrite"]
        settings = {"checkpoint.output_dir": tmp_path / "head"}
    done = continue_from(run, tmp_path, *options, **settings)
    assert done.code == 2, done.err
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert not (tmp_path / "head-run").exists()
