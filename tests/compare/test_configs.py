"""Recipes of the published experiments: every layer gets its kernels, and batches have the published size."""

from pathlib import Path

import pytest

from ligertune.recipe import load_recipe
from ligertune.training.resolve import plan_for

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# recipe -> the configuration in the corpus, its layers, and the kernel of its MLPs
PLANNED = {
    "llama/llama-3-8b-alpaca-one-gpu.yaml": ("Meta-Llama-3-8B", 32, "swiglu"),
    "qwen/qwen2-7b-alpaca-one-gpu.yaml": ("Qwen2-7B", 28, "swiglu"),
    "mistral/mistral-7b-alpaca-one-gpu.yaml": ("Mistral-7B-v0.1", 32, "swiglu"),
    "gemma/gemma-7b-alpaca-one-gpu.yaml": ("gemma-7b", 28, "geglu"),
    "llama/llama-3-8b-alpaca-lora.yaml": ("Meta-Llama-3-8B", 32, "swiglu"),
}

QUICK = ("llama/llama-3-8b-alpaca-one-gpu.yaml", "llama/llama-3-8b-alpaca-lora.yaml")


def recipe_on_corpus(name, folder, tokenizer, corpus, tmp_path):
    """Load a recipe with the configuration of its model, a tokenizer and data of the corpus."""
    settings = {
        "model.model_name_or_path": corpus / "model_configs" / folder,
        "model.init": "random",
        "model.tokenizer.path": corpus / "tokenizers" / tokenizer,
        "data.datasets.0.path": corpus / "alpaca" / "alpaca_random_head1000.jsonl",
        "data.num_proc": 1,
        "checkpoint.output_dir": tmp_path / "run",
    }
    return load_recipe(CONFIGS / name, overrides=[f"{key}={value}" for key, value in settings.items()])


@pytest.mark.corpus
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PLANNED])
def test_the_kernels_apply_to_every_layer_of_a_published_model(name, corpus, tmp_path):
    folder, layers, mlp = PLANNED[name]
    plan = plan_for(recipe_on_corpus(name, folder, "mistral-7b-v0.1", corpus, tmp_path)).plan
    applied = {line.kernel: line.applied for line in plan.kernels}
    assert applied == {"apply_rope": layers, "rms_norm": 2 * layers + 1, mlp: layers, "linear_cross_entropy": 1}
    assert plan.batching.global_batch_size * plan.rows.length == 32768
    assert plan.rows.packed and plan.rows.fill > 0.98


# recipe -> the configuration in the corpus, a tokenizer, and layers by kernel
HYBRIDS = {
    "nemotron/nemotron-h-8b-alpaca-lora.yaml": ("Nemotron-H-8B", "mistral-7b-v0.1", {"ssd": 24, "rms_norm": 53}),
    "qwen/qwen3.5-4b-alpaca.yaml": ("Qwen3.5-4B", "qwen2.5", {"apply_rope": 8, "gated_delta_rule": 24}),
    "qwen/qwen3.5-4b-alpaca-lora.yaml": ("Qwen3.5-4B", "qwen2.5", {"apply_rope": 8, "gated_delta_rule": 24}),
    "qwen/qwen3.5-35b-a3b-alpaca-lora.yaml": (
        "Qwen3.5-35B-A3B", "qwen2.5", {"apply_rope": 10, "gated_delta_rule": 30},
    ),
    "kimi/kimi-linear-48b-a3b-alpaca-lora.yaml": ("Kimi-Linear-48B-A3B", "qwen2.5", {"kda": 21, "experts": 26}),
}  # fmt: skip
FASTEST_HYBRID, *SLOWER_HYBRIDS = HYBRIDS


@pytest.mark.corpus
@pytest.mark.parametrize("name", [FASTEST_HYBRID, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOWER_HYBRIDS)])
def test_a_hybrid_is_packed_with_a_kernel_in_every_mixer(name, corpus, tmp_path):
    folder, tokenizer, layers = HYBRIDS[name]
    plan = plan_for(recipe_on_corpus(name, folder, tokenizer, corpus, tmp_path)).plan
    lines = {line.kernel: line for line in plan.kernels}
    assert not any(line.left for line in plan.kernels if line.kernel != "swiglu")  # MLPs of Nemotron-H have no gate
    assert {kernel: lines[kernel].applied for kernel in layers} == layers
    assert plan.batching.global_batch_size * plan.rows.length == 32768
    assert plan.rows.packed and plan.rows.fill > 0.97
