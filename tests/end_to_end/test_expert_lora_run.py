"""LoRA on the experts of a mixture: from the recipe to an adapter that plain PEFT loads, and that merges."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.command_line import RECIPE, losses
from support.quickstart_runs import plan_run, saves, train, train_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, MixtralConfig, Qwen3MoeConfig

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=4, head_dim=16),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=16),
}
SETTINGS = {
    "method.type": "lora",
    "method.lora_r": 4,
    "method.lora_dropout": 0.1,  # a resumed run must draw the same random numbers
    "model.dtype": "float32",
    "train.max_steps": 6,
    **saves(3),
    "train.learning_rate": 0.05,
    "train.gradient_checkpointing": True,
}


def save_mixture(folder: Path, family: str) -> Path:
    """Save a tiny random model in float32 with the bundled tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(RECIPE.parent / "stories260K").save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=["gpt_oss", *(pytest.param(family, marks=pytest.mark.slow) for family in ("mixtral", "qwen3_moe"))],
)
def finished(request, tmp_path_factory) -> Path:
    """A finished run in `run/` on the model in `base/`."""
    folder = tmp_path_factory.mktemp(request.param)
    train(folder, **SETTINGS, **{"model.model_name_or_path": save_mixture(folder / "base", request.param)})
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


def test_the_loss_falls_and_only_adapters_train_those_of_experts_too(finished):
    found = losses(finished / "run")
    assert found[-1] < found[0] - 0.05
    with safe_open(finished / "run/model/adapter_model.safetensors", "pt") as opened:
        names = list(opened.keys())
    assert all(".lora_" in name for name in names)
    assert sum(".mlp.experts." in name for name in names) == 2 * 2 * 2  # A and B of two weights in two layers
    assert not any(".router." in name or ".gate." in name for name in names)
    report = json.loads((finished / "run/report.json").read_text())
    trained = sum(tensor.numel() for tensor in load_file(finished / "run/model/adapter_model.safetensors").values())
    assert report["n_trainable"] == trained


def test_the_plan_names_the_experts_in_split_form(finished):
    plan = json.loads((finished / "run/plan.json").read_text())
    rows = {line["kernel"]: (line["applied"], line["left"]) for line in plan["kernels"]}
    assert rows["expert_lora"] == (2, 0)


def test_trained_saved_and_merged_models_have_the_same_logits(finished, tmp_path, ligertune):
    done = ligertune("export", finished / "run", "--out", tmp_path / "merged", "--check", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["check"]["comparisons"]
    assert [row["name"] for row in rows] == ["saved adapter", "exported merged model"]
    assert all(row["relative"] < 1e-5 and row["same_argmax"] == 1 and row["is_equal"] for row in rows)
    base = AutoModelForCausalLM.from_pretrained(finished / "base")
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, finished / "run/model"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert (expected - before).abs().max() > 0.1


def test_a_wrong_order_of_b_is_found(finished, tmp_path, ligertune):
    """PEFT stores B of experts expert-fastest; a tool that writes it expert-slowest serves another model."""
    assert ligertune("export", finished / "run", "--out", tmp_path / "alone", "--adapter").code == 0
    file = tmp_path / "alone/adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".mlp.experts." in name and "lora_B" in name:
            tensors[name] = tensor.view(len(tensor), -1, 4).transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, file, {"format": "pt"})
    done = ligertune("export", finished / "run", "--out", tmp_path / "alone", "--adapter", "--check")
    assert done.code == 1
    assert "Error: --check: the exported adapter in" in done.err and "computes other logits" in done.err
    assert "saved adapter" in done.out


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(finished, tmp_path):
    checkpoint = finished / "run" / "checkpoints" / "step-3"
    changes = {"model.model_name_or_path": finished / "base", "checkpoint.resume_from_checkpoint": checkpoint}
    train(tmp_path, **SETTINGS, **changes)
    assert losses(tmp_path / "run") == losses(finished / "run")[3:]
    name = "run/model/adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


def test_lora_target_parameters_leaves_the_experts_out(tmp_path):
    base = save_mixture(tmp_path / "base", "mixtral")
    settings = {"model.model_name_or_path": base, "method.type": "lora", "method.lora_r": 4}
    sizes = []
    for value in ("null", "[]", "[mlp.gate.weight]"):
        plan = plan_run(tmp_path, **settings, **{"method.lora_target_parameters": value}).plan
        sizes.append(plan.n_trainable)
    attention = 2 * 4 * (128 + 96 + 96 + 128)
    assert sizes == [attention + 2 * 4 * 4 * (64 + 192 + 96 + 64), attention, attention + 2 * 4 * (64 + 4)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_experts_as_one_process_does_and_their_adapter_loads_in_peft(strategy, tmp_path, ligertune):
    base = save_mixture(tmp_path / "base", "mixtral")
    settings = {**SETTINGS, "model.model_name_or_path": base, "method.lora_dropout": 0.0}
    one = train_ranks(1, tmp_path / "one", **settings)
    halved = {"train.gradient_accumulation_steps": 1, "parallel.strategy": strategy}
    assert train_ranks(2, tmp_path / "two", **settings, **halved) == pytest.approx(one, rel=1e-5)
    name = "run/model/adapter_model.safetensors"
    found, expected = load_file(tmp_path / "two" / name), load_file(tmp_path / "one" / name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key] - tensor).norm() < 1e-2 * tensor.norm(), key
    done = ligertune("export", tmp_path / "two/run", "--out", tmp_path / "merged", "--check", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["check"]["comparisons"]
    assert [row["name"] for row in rows] == ["saved adapter", "exported merged model"]
    assert all(row["is_equal"] for row in rows)
