"""Models of the Hugging Face hub, read from its cache without a network, and models with their own code."""

from __future__ import annotations

import json
import shutil

import pytest
from command_line import overrides, run, train_command

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def cached(quickstart, tmp_path, monkeypatch):
    """A hub cache that holds tiny/llama at `main` and, cut to two layers, at `short`."""
    repository = tmp_path / "hub" / "models--tiny--llama"
    for revision, layers in (("main", 5), ("short", 2)):
        snapshot = repository / "snapshots" / (revision[0] * 40)
        shutil.copytree(quickstart / "stories260K", snapshot)
        config = json.loads((snapshot / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(revision[0] * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return "tiny/llama"


@pytest.mark.parametrize(("revision", "layers"), [("main", 5), ("short", 2)])
def test_model_revision_selects_the_snapshot(cached, revision, layers, tmp_path):
    """In a new process, because huggingface_hub reads HF_HUB_CACHE when it is imported."""
    settings = {"model.model_name_or_path": cached, "model.revision": revision, "model.init": "random",
                "train.max_steps": 1, "checkpoint.output_dir": "run"}  # fmt: skip
    done = run(train_command("--json", **settings), cwd=tmp_path)
    assert done.code == 0, done.err
    applied = {line["kernel"]: line["applied"] for line in json.loads(done.out)["kernels"]}
    assert applied["swiglu"] == layers


def test_the_code_of_a_model_runs_only_with_trust_remote_code(recipe, quickstart, tmp_path, ligertune):
    folder = tmp_path / "own"
    shutil.copytree(quickstart / "stories260K", folder)
    config = json.loads((folder / "config.json").read_text())
    mapped = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own_llama", "auto_map": mapped}))
    (folder / "modeling_own.py").write_text(CODE)
    settings = {"model.model_name_or_path": folder, "train.max_steps": 1, "checkpoint.output_dir": "run"}
    refused = ligertune("train", recipe, *overrides(settings))
    assert refused.code == 2
    assert "trust_remote_code" in refused.err
    trusted = ligertune("train", recipe, *overrides({**settings, "model.trust_remote_code": "true"}))
    assert trusted.code == 0, trusted.err
