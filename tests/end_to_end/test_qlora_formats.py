"""QLoRA in the other formats of 4 bits: a run, its resumption, and the export into the weights that it trained on."""

import json
from pathlib import Path

import pytest
import torch
from support.command_line import RECIPE, losses
from support.quickstart_runs import ONE_ROW, plan_run, saves, train
from transformers import AutoModelForCausalLM

from ligertune.models.load import whole_model
from ligertune.models.read_config import read_config
from ligertune.models.save import saved_spec

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

SETTINGS = {
    "method.type": "qlora",
    "method.lora_r": 4,
    "model.model_name_or_path": RECIPE.parent / "stories260K",
    "model.dtype": "float32",
    "train.max_steps": 4,
    **ONE_ROW,
    **saves(2),
    "train.learning_rate": 0.02,
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None].to(model.device)).logits.cpu()


def test_the_plan_counts_single_scales_and_the_dequantised_weight(tmp_path):
    double, single, lora = (
        plan_run(tmp_path / name, **{**SETTINGS, **changes}).plan
        for name, changes in {
            "double": {},
            "single": {"method.bnb_4bit_use_double_quant": False},
            "lora": {"method.type": "lora"},
        }.items()
    )
    layers, hidden, mlp, keys = 5, 64, 172, 32
    quantised = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * mlp)
    scales = 4 / 64 - (1 / 64 + 4 / (64 * 256))
    assert single.bytes.weights - double.bytes.weights == pytest.approx(quantised * scales, abs=1)
    assert double.memory.workspace - lora.memory.workspace == 4 * hidden * mlp  # the largest weight, in float32


@pytest.mark.parametrize(
    ("quant_type", "double_quant", "stored_as"),
    [
        ("fp4", False, "fp4_single"),
        pytest.param("fp4", True, "fp4", marks=pytest.mark.slow),
        pytest.param("nf4", False, "nf4_single", marks=pytest.mark.slow),
    ],
)
def test_a_format_trains_resumes_and_exports(quant_type, double_quant, stored_as, tmp_path: Path, ligertune):
    from peft import PeftModel

    chosen = {"method.bnb_4bit_quant_type": quant_type, "method.bnb_4bit_use_double_quant": double_quant}
    settings = {**SETTINGS, **chosen}
    first = tmp_path / "first"
    train(first, **settings)
    whole = losses(first / "run")
    assert len(whole) == 4

    again = tmp_path / "again"
    train(again, **settings, **{"checkpoint.resume_from_checkpoint": first / "run" / "checkpoints" / "step-2"})
    assert losses(again / "run") == whole[2:]
    adapter = "run/model/adapter_model.safetensors"
    assert (again / adapter).read_bytes() == (first / adapter).read_bytes()

    done = ligertune("export", first / "run", "--out", tmp_path / "merged", "--check", "--json")
    assert done.code == 0, done.err
    assert json.loads((first / "run" / "model" / "ligertune.json").read_text("utf-8"))["base"]["stored_as"] == stored_as
    spec = saved_spec(str(first / "run" / "model"), trust_remote_code=False)
    dequantised = whole_model(spec, read_config(spec), stored_as=stored_as)
    expected = logits(PeftModel.from_pretrained(dequantised, first / "run" / "model"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    other = whole_model(spec, read_config(spec), stored_as="nf4")
    assert not torch.allclose(logits(PeftModel.from_pretrained(other, first / "run" / "model")), expected, atol=1e-3)
