"""Decays of recurrences stay float32 in a model of bfloat16 weights: read, random, trained, and for a shard."""

import pytest
import torch
from support.models.tiny_families import tiny_family
from transformers import PreTrainedModel

from ligertune.models.load import build_model
from ligertune.models.mixers.decays import give_weights_one_dtype
from ligertune.models.read_config import read_config
from ligertune.planning.options import ModelOptions

HYBRIDS = ("qwen3_5_text", "olmo_hybrid", "nemotron_h", "kimi_linear")
DECAYS = ("A_log", "dt_bias", "D")


@pytest.fixture(params=HYBRIDS)
def stored(request, tmp_path):
    """A checkpoint in bfloat16, but for the decays, with the values of these."""
    model = tiny_family("causal", request.param).to(torch.bfloat16)
    decays = {}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in DECAYS:
            parameter.data = torch.rand(parameter.shape) + 0.1
            decays[name] = parameter.data
    model.save_pretrained(tmp_path)
    return tmp_path, decays


def build(path, **values) -> PreTrainedModel:
    spec = ModelOptions(model_name_or_path=str(path), **values)
    return build_model(spec, read_config(spec), dtype=torch.bfloat16, device="cpu", seed=0)


def dtypes(model) -> set[torch.dtype]:
    """Return the dtypes of the parameters but decays, and those that transformers keeps in float32."""
    others = (*DECAYS, *(type(model)._keep_in_fp32_modules_strict or ()))
    return {p.dtype for name, p in model.named_parameters() if not name.endswith(others)}


def test_decays_are_read_as_they_are_stored(stored) -> None:
    path, decays = stored
    model = build(path)
    found = dict(model.named_parameters())
    assert decays and dtypes(model) == {torch.bfloat16}
    for name, value in decays.items():
        assert torch.equal(found[name], value)
    assert "A_log" not in (type(model)._keep_in_fp32_modules_strict or ())  # transformers' class is as it was


def test_random_decays_are_float32(stored) -> None:
    path, decays = stored
    model = build(path, init="random")
    assert dtypes(model) == {torch.bfloat16}
    assert {p.dtype for name, p in model.named_parameters() if name in decays} == {torch.float32}


def test_shards_have_weights_of_one_dtype(stored) -> None:
    model = build(stored[0])
    give_weights_one_dtype(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_frozen_decays_stay_for_a_shard(stored) -> None:
    path, decays = stored
    model = build(path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in decays)
    give_weights_one_dtype(model)
    assert {p.dtype for name, p in model.named_parameters() if name in decays} == {torch.float32}
