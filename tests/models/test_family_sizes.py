"""Sizes of all families of transformers, on the meta device: attributes that a configuration lacks crash nothing."""

import json
import shutil

import pytest
import torch
import transformers
from quickstart_runs import bare_recipe
from tiny_families import CONFIG_MAPPING, tiny_config

from ligertune.attention.padding_free import choose_batch_layout
from ligertune.errors import UserError
from ligertune.hardware import this_machine
from ligertune.models.shape import read_shape
from ligertune.planning.options import BatchLayoutOptions
from ligertune.planning.precision import choose_precision
from ligertune.recipe import load_recipe
from ligertune.run import run
from ligertune.training.resolve import plan_for

# without attention, with layers of several kinds, with sizes by layer, under other names, or without a number of layers
FAMILIES = (
    "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2",
    "nemotron_h", "lfm2", "lfm2_moe", "falcon_h1", "granitemoehybrid", "minimax", "qwen3_next", "blt", "gemma4_text",
    "doge", "hy_v3", "minimax_m2", "llama", "gpt2",
)  # fmt: skip


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in CONFIG_MAPPING])
def test_sizes_are_those_of_the_built_model_and_packing_is_decided(model_type):
    config = tiny_config(CONFIG_MAPPING[model_type]())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = read_shape(model)
    assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.vocab_size == config.get_text_config().vocab_size
    assert shape.hidden_size == model.get_input_embeddings().weight.shape[1]
    assert shape.flops(tokens=8, squared_lengths=64) > 0
    machine = this_machine()
    for packing in (False, True):
        layout = layout_of(packing)
        try:
            choose_batch_layout(layout, config, machine, choose_precision("float32", machine, method="full"))
        except UserError as refusal:
            assert packing and "data.packing" in str(refusal)


def layout_of(packing: bool) -> BatchLayoutOptions:

    recipe = bare_recipe(per_device_train_batch_size=1)
    return BatchLayoutOptions.of(
        recipe.model_copy(update={"data": recipe.data.model_copy(update={"packing": packing})})
    )


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "rwkv"])
def test_models_without_attention_train_without_packing(model_type, tmp_path, quickstart):
    config = tiny_config(CONFIG_MAPPING[model_type]())
    config.vocab_size = 512
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for file in (quickstart / "stories260K").glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    recipe = {
        "model": {"model_name_or_path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"datasets": [{"path": str(quickstart / "dolly_short.jsonl"), "max_samples": 8}], "max_length": 512,
                 "packing": False, "cache": False},
        "train": {"max_steps": 1, "per_device_train_batch_size": 1},
        "checkpoint": {"output_dir": str(tmp_path / "run"), "save_strategy": "no"},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    report = run(plan_for(load_recipe(tmp_path / "r.yaml")), lambda line: None)
    assert report.steps == 1 and report.loss_last > 0
