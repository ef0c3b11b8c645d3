"""Runs on quantised bases: training as on the dense weights, resumption, exports in 16 and 32 bits, answers, ranks."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import losses
from support.models.packed_checkpoints import PACKINGS, write_packed
from support.quickstart_runs import saves, train, train_ranks
from transformers import AutoModelForCausalLM

SETTINGS = {"method.type": "lora", "method.lora_r": 4, "model.dtype": "float32", "train.max_steps": 4, **saves(2)}


def write_dense(folder, base, truth) -> None:
    """Write a packed base as a model with dense weights."""
    shutil.copytree(base, folder)
    save_file(truth, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))


def test_a_run_has_the_losses_of_the_dense_weights(tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS["gptq"])
    write_dense(tmp_path / "dense", tmp_path / "base", truth)
    for name in ("base", "dense"):
        train(tmp_path / name / "out", **SETTINGS, **{"model.model_name_or_path": tmp_path / name})
    found, expected = (losses(tmp_path / name / "out" / "run") for name in ("base", "dense"))
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "awq", "hqq", "int4", "int8", "float8"])
def test_a_base_trains_resumes_and_is_merged(name, tmp_path, ligertune):
    base = tmp_path / "base"
    truth = write_packed(base, PACKINGS[name])
    settings = {**SETTINGS, "model.model_name_or_path": base}
    train(tmp_path / "first", **settings)
    run = tmp_path / "first" / "run"
    whole = losses(run)

    again = tmp_path / "again"
    train(again, **settings, **{"checkpoint.resume_from_checkpoint": run / "checkpoints" / "step-2"})
    assert losses(again / "run") == whole[2:]

    done = ligertune("export", run, "--out", tmp_path / "merged", "--check")
    assert done.code == 0, done.err
    done = ligertune("export", run, "--checkpoint", "newest", "--out", tmp_path / "newest", "--dtype", "float32")
    assert done.code == 0, done.err
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert load_file(tmp_path / "newest" / "model.safetensors").keys() == merged.keys()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    from peft import PeftModel

    write_dense(tmp_path / "dense", base, truth)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, run / "model").merge_and_unload().state_dict()
    for key, weight in merged.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6)
    done = ligertune("generate", run, "Hello", "--max-new-tokens", "3")
    assert done.code == 0, done.err


def test_dtype_writes_a_base_with_dense_weights(tmp_path, ligertune):
    truth = write_packed(tmp_path / "base", PACKINGS["awq"])
    done = ligertune("export", tmp_path / "base", "--dtype", "bfloat16", "--out", tmp_path / "dense")
    assert done.code == 0, done.err
    values = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in values and values["dtype"] == "bfloat16"
    for key, weight in load_file(tmp_path / "dense" / "model.safetensors").items():
        assert torch.equal(weight, truth[key].bfloat16()), key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "int4"), "--dtype: int4 is not one of bfloat16, float16, float32."),
        (("--dtype", "float16", "--adapter"), "holds a whole model, and no adapter"),
    ],
)
def test_a_dtype_that_cannot_be_written_is_refused(arguments, message, tmp_path, ligertune, quickstart):
    done = ligertune("export", quickstart / "stories260K", "--out", tmp_path / "out", *arguments)
    assert done.code == 2 and message in " ".join(done.err.split())


@pytest.mark.slow
def test_two_ranks_hold_the_packed_weights_and_train_as_one(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["gptq"])
    settings = {**SETTINGS, "model.model_name_or_path": tmp_path / "base", "train.global_batch_size": 4}
    alone, both = (train_ranks(ranks, tmp_path / str(ranks), **settings) for ranks in (1, 2))
    assert both == pytest.approx(alone, rel=1e-4)
