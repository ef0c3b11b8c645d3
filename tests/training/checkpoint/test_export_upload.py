"""`ligertune export --push` against a local hub, its dry run, and the model card."""

import json
import shutil
import sys

import pytest
import yaml
from huggingface_hub import constants
from support.command_line import run_here
from support.data.hub_server import serving
from support.quickstart_runs import ALPACA_ROWS, SHORT, saves, train

from ligertune.training.checkpoint.export_run import files_to_upload


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished LoRA run with a checkpoint: its folder."""
    folder = tmp_path_factory.mktemp("uploaded")
    changes = {
        **SHORT,
        **ALPACA_ROWS,
        "method.type": "lora",
        "train.max_steps": 2,
        "data.system_prompt": "Answer briefly.",
    }
    train(folder, **{**changes, **saves(1), "data.datasets.0.max_samples": 20})
    return folder / "run"


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine, which huggingface_hub uploads to."""
    with serving("me/tiny", {}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        yield server


def test_push_uploads_the_merged_model_with_its_card(run, hub, tmp_path):
    done = run_here("export", run, "--out", "merged", "--push", "me/tiny", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [(made["name"], made["visibility"]) for made in hub.created] == [("tiny", "private")]
    on_disk = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert hub.uploaded == on_disk and {"README.md", "model.safetensors", "ligertune.json"} <= set(on_disk)
    again = run_here("export", "merged", "--push", "me/tiny", "--public", cwd=tmp_path)  # from its folder, as it is
    assert again.code == 0 and not (tmp_path / "merged" / "exported").exists()
    assert hub.created[-1]["visibility"] == "public"


def test_a_dry_run_writes_the_card_which_the_export_keeps(run, tmp_path):
    done = run_here("export", run, "--out", "merged", "--dry-run", cwd=tmp_path)
    card = tmp_path / "merged" / "README.md"
    assert done.code == 0 and [path.name for path in card.parent.iterdir()] == ["README.md"]
    assert f"README.md           {card.stat().st_size:,} bytes" in done.out
    card.write_text(card.read_text() + "Filled in.\n")
    assert run_here("export", run, "--out", "merged", cwd=tmp_path).code == 0
    assert card.read_text().endswith("Filled in.\n") and (card.parent / "model.safetensors").is_file()


def test_the_card_tells_what_was_trained(run, tmp_path):
    assert run_here("export", run / "checkpoints" / "step-1", "--adapter", "--out", "one", cwd=tmp_path).code == 0
    header, card = (tmp_path / "one" / "README.md").read_text().split("---\n", 2)[1:]
    metadata = yaml.safe_load(header)
    assert metadata["library_name"] == "peft" and "lora" in metadata["tags"]
    assert not {"base_model", "datasets"} & set(metadata)  # they are folders here, which no other machine has
    assert str(run.parent) not in card and "configs/quickstart" not in card
    for part in ("The weights are those of step-1", "| method | LoRA, rank 16", "dolly_short.jsonl (a local file)",
                 "| loss, last logged interval |", "tokens/s", "| torch |", "PeftModel", '"Answer briefly."',
                 "Licence of the base model: to fill in"):  # fmt: skip
        assert part in card, part


def test_only_the_files_of_a_model_are_uploaded(quickstart, tmp_path):
    shutil.copytree(quickstart / "stories260K", tmp_path / "model")
    kept = set(files_to_upload(tmp_path / "model"))
    for name in ("optimizer.pt", "optimizer.bin", "random_states_0.pkl", "trainer_state.json", ".hidden"):
        (tmp_path / "model" / name).write_text("state")
    (tmp_path / "model" / "checkpoint-5").mkdir()
    assert set(files_to_upload(tmp_path / "model")) == kept and "model.safetensors" in kept


def test_a_push_that_cannot_succeed_is_refused_with_one_sentence(run, monkeypatch, tmp_path):
    for name, says in (("tiny", "names no user"), ("me/ti ny", "is not a name of a repository")):
        refused = run_here("export", run, "--push", name, cwd=tmp_path)
        assert refused.code == 2 and says in refused.err
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    failed = run_here("export", run, "--adapter", "--push", "me/tiny", cwd=tmp_path)
    assert failed.code == 1 and "Traceback" not in failed.err
    assert f"ligertune export {run}/model --push me/tiny" in " ".join(failed.err.split())


def test_reports_and_cards_hold_no_secrets(tmp_path, monkeypatch):
    """A token in the environment, and others that were written into the command and the recipe by mistake."""
    secrets = {"HF_TOKEN": "hf_" + "A1" * 17, "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    other, password = "hf_" + "B2" * 17, "open-sesame"
    secrets |= {"in the recipe": other, "of an address": password}
    monkeypatch.setattr(sys, "argv", ["ligertune", "train", f"--set=x={secrets['WANDB_API_KEY']}", other])
    prompt = f"Use {other} at https://me:{password}@host/x."
    changes = {**SHORT, **ALPACA_ROWS, "train.max_steps": 2, "data.system_prompt": prompt}
    train(tmp_path, **{**changes, "logging.run_name": secrets["HF_TOKEN"], "data.datasets.0.max_samples": 20})
    assert run_here("export", tmp_path / "run", "--out", "out", cwd=tmp_path).code == 0
    files = [path for folder in (tmp_path / "run", tmp_path / "out") for path in folder.rglob("*")]
    texts = {path.name: path.read_text() for path in files if path.suffix in (".json", ".html", ".yaml", ".md")}
    assert {"report.json", "report.html", "plan.json", "resolved_recipe.yaml", "README.md"} <= set(texts)
    leaks = [(file, name) for file, text in texts.items() for name, secret in secrets.items() if secret in text]
    # the prompt that the model was trained with is part of the model
    assert [leak for leak in leaks if leak[0] != "ligertune.json"] == []
    assert "MASKED" in texts["report.json"] and "MASKED" in texts["report.html"]


def test_a_damaged_plan_is_one_sentence(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    plan = json.loads((run / "plan.json").read_text())
    (tmp_path / "run" / "plan.json").write_text(json.dumps({**plan, "n_parameters": []}))
    done = run_here("export", "run", "--out", "out", cwd=tmp_path)
    assert done.code == 2 and "its model card cannot be written: plan.json" in done.err
