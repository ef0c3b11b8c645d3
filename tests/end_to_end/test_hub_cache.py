"""Models that come from a hub: read from its cache, without a network."""

from __future__ import annotations

import json
import shutil

import pytest
from command_line import overrides

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
def test_a_revision_is_the_one_asked_for(cached, revision, layers, recipe, ligertune):
    settings = {"model.model_name_or_path": cached, "model.revision": revision, "model.init": "random",
                "train.max_steps": 1, "checkpoint.output_dir": "run"}  # fmt: skip
    done = ligertune("train", recipe, *overrides(settings), "--json")
    assert done.code == 0, done.err
    applied = {line["kernel"]: line["applied"] for line in json.loads(done.out)["kernels"]}
    assert applied["swiglu"] == layers


def test_a_checkpoints_own_code_runs_only_when_trusted(recipe, quickstart, tmp_path, ligertune):
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
