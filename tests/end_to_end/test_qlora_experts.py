"""QLoRA of mixtures of experts: from the recipe to an adapter that loads on the 16-bit base and merges."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.command_line import RECIPE, losses
from support.quickstart_runs import saves, train, train_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, Qwen3MoeConfig

from ligertune.models.load import whole_model
from ligertune.models.read_config import read_config
from ligertune.models.save import saved_spec

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=16,
    ),
}  # fmt: skip
SETTINGS = {
    "method.type": "qlora",
    "method.lora_r": 4,
    "model.dtype": "float32",
    "train.max_steps": 6,
    **saves(3),
    "train.learning_rate": 0.02,
    "train.gradient_checkpointing": True,
}


TARGETS = {"mixtral": "[q_proj, v_proj, o_proj]", "qwen3_moe": "all-linear"}  # all-linear: experts, too


def save_mixture(folder: Path, family: str) -> Path:
    """Save a tiny random model in float32 with the bundled tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(RECIPE.parent / "stories260K").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def finished(request, tmp_path_factory) -> Path:
    """A finished run in `run/` on the model in `base/`."""
    folder = tmp_path_factory.mktemp(request.param)
    train(folder, **settings(request.param, save_mixture(folder / "base", request.param)))
    return folder


def settings(family: str, base: Path) -> dict[str, object]:
    return {**SETTINGS, "model.model_name_or_path": base, "method.lora_target_modules": TARGETS[family]}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None].to(model.device)).logits.cpu()


def test_the_loss_falls_and_only_the_adapter_is_saved(finished):
    found = losses(finished / "run")
    assert found[-1] < found[0] - 0.1
    adapts_experts = "qwen3" in finished.name
    for file in ("model/adapter_model.safetensors", "checkpoints/step-3/trained.safetensors"):
        with safe_open(finished / "run" / file, "pt") as opened:
            names = list(opened.keys())
        assert all(".lora_" in name for name in names) and any("experts" in name for name in names) is adapts_experts
    assert not (finished / "run" / "checkpoints" / "step-3" / "model.safetensors").exists()


def test_the_adapter_loads_on_the_16_bit_base_and_merges_into_the_dequantised_weights(finished, tmp_path, ligertune):
    from peft import PeftModel

    done = ligertune("export", finished / "run", "--out", tmp_path / "merged", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["kind"] == "merged model"
    adapter, base = finished / "run" / "model", AutoModelForCausalLM.from_pretrained(finished / "base")
    on_16_bit = logits(PeftModel.from_pretrained(base, adapter))
    spec = saved_spec(str(adapter), trust_remote_code=False)
    dequantised = whole_model(spec, read_config(spec), stored_as="nf4")
    expected = logits(PeftModel.from_pretrained(dequantised, adapter))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    # 4-bit weights differ by 9 %, so that logits differ, but less than those of another model
    assert 1e-3 < (merged - on_16_bit).norm() / on_16_bit.norm() < 0.3


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(finished, tmp_path):
    checkpoint = finished / "run" / "checkpoints" / "step-3"
    family = "qwen3_moe" if "qwen3" in finished.name else "mixtral"
    changes = {"checkpoint.resume_from_checkpoint": checkpoint}
    train(tmp_path, **settings(family, finished / "base"), **changes)
    assert losses(tmp_path / "run") == losses(finished / "run")[3:]
    name = "run/model/adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_two_ranks_have_the_losses_of_one(tmp_path):
    """Under DDP, which broadcasts every parameter that it is not told to ignore."""
    changes = {
        **settings("qwen3_moe", save_mixture(tmp_path / "base", "qwen3_moe")),
        "train.max_steps": 3,
        "checkpoint.save_strategy": "no",
        "train.per_device_train_batch_size": 1,
        "train.global_batch_size": 4,
    }
    one, two = (
        train_ranks(ranks, tmp_path / str(ranks), **{**changes, "parallel.strategy": strategy})
        for ranks, strategy in ((1, "auto"), (2, "auto"))
    )
    assert two == pytest.approx(one, rel=1e-5) and len(two) == 3
