"""`data.packing: auto` packs the families whose documents are isolated, and no other."""

from pathlib import Path

import pytest
import torch
from support.command_line import RECIPE
from support.models import tiny_families, tiny_models
from support.quickstart_runs import plan_run
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ligertune.attention.packed_documents  # noqa: F401  registers its attention with transformers
from ligertune.attention.document_isolation import check_document_isolation, first_of_each_kind
from ligertune.errors import UserError
from ligertune.models.shape import text_layers
from ligertune.patching.packing_checks import prepare_masks
from ligertune.patching.patch import patch
from ligertune.planning.options import RunOptions
from ligertune.recipe.read import load_recipe
from ligertune.training.checks import why_not_packed

# Attention of other kinds: ALiBi, no places of documents, sinks, own classes, chunks, an indexer. Other mixers.
# The others pack. The forward of dbrx and jetmoe fails without weights, so a plan does not see all of it.
FAMILIES = ["bloom", "mpt", "stablelm", "nemotron", "gpt_oss", "falcon", "gpt_neo", "llama4_text", "deepseek_v32",
            "doge", "rwkv", "xlm", "minimax", "mamba", "lfm2", "llama", "gptj", "bart", "mixtral", "dbrx", "jetmoe",
            "qwen3_next"]  # fmt: skip


def is_isolated(model_type: str) -> bool:
    """Return what the check before training says about a tiny model with random weights."""
    config = tiny_families.tiny_config(CONFIG_MAPPING[model_type]())
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="per_document").float()
        patch(model)
        prepare_masks(model)
        check_document_isolation(model, multiple_of=16)
    except (UserError, KeyError):  # KeyError: the family has a table of attention classes
        return False
    return True


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_plan_packs_what_the_check_before_training_accepts(model_type) -> None:
    options = RunOptions.of(load_recipe(RECIPE)).build
    config = tiny_families.tiny_config(CONFIG_MAPPING[model_type]())
    assert (why_not_packed(options, config) is None) == is_isolated(model_type)


@pytest.mark.parametrize(
    "model_type, changes, layers, why",
    [
        (
            "qwen3_next",
            {"linear_conv_kernel_dim": 9},
            "Qwen3NextGatedDeltaNet",
            "its convolution has 9 taps; kernels have 2 to 8",
        ),
        ("mamba", {}, "MambaMixer", "kernels have no mamba_selective_scan, which PyTorch computes"),
        ("minimax", {}, "linear_attention", "their form is not recognised"),
    ],
)
def test_a_plan_says_which_layer_carries_state_and_why(model_type, changes, layers, why) -> None:
    options = RunOptions.of(load_recipe(RECIPE)).build
    config = tiny_families.tiny_config(CONFIG_MAPPING[model_type]())
    for name, value in changes.items():
        setattr(config, name, value)
    does = "layers carry state from one document of a packed row into the next. No kernel keeps them apart"
    assert why_not_packed(options, config) == f"{layers} {does}: {why}"


@pytest.mark.parametrize(
    "model_type, changes, kept",
    [
        ("llama", {"num_hidden_layers": 5}, 1),
        ("gemma3_text", {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}, 3),
        ("qwen3_moe", {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 4]}, 3),
    ],
)
def test_a_plan_looks_at_the_first_layer_of_each_kind(model_type, changes, kept) -> None:
    config = tiny_families.tiny_config(CONFIG_MAPPING[model_type]())
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = text_layers(model)
    before = list(layers)
    with first_of_each_kind(model):
        assert list(layers) == before[:kept]
    assert list(layers) == before


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    config = tiny_families.tiny_config(CONFIG_MAPPING["gpt_oss"](vocab_size=512))
    config.vocab_size = 512  # of the tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_auto_leaves_packing_off_and_says_why(gpt_oss, tmp_path) -> None:
    tokenizer = str(RECIPE.parent / "stories260K")
    settings = {"model.model_name_or_path": str(gpt_oss), "model.tokenizer.path": tokenizer, "data.max_length": 256}
    plan = plan_run(tmp_path, **settings, **{"data.packing": "auto"}).plan
    assert not plan.rows.packed
    assert [note for note in plan.notes if note.startswith("packing is off: ") and "attention sinks" in note]
    with pytest.raises(UserError, match=r"data\.packing: .*attention sinks"):
        plan_run(tmp_path, **settings, **{"data.packing": True})


def test_embeddings_that_depend_on_the_longest_document_are_not_packed(tmp_path) -> None:
    """With longrope, one document longer than the original length changes the angles of its whole row."""
    tokenizer = str(RECIPE.parent / "stories260K")
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    lengths = {"original_max_position_embeddings": 256, "max_position_embeddings": 512}
    config = tiny_models.config_of("phi3", vocab_size=512, rope_parameters=rope, **lengths)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    settings = {"model.model_name_or_path": str(tmp_path / "model"), "model.tokenizer.path": tokenizer}
    short = plan_run(tmp_path, **settings, **{"data.max_length": 256, "data.packing": "auto"}).plan
    assert short.rows.packed
    plan = plan_run(tmp_path, **settings, **{"data.max_length": 512, "data.packing": "auto"}).plan
    told = "packing is off: the rotary angles of phi3 (longrope) change in the whole row if one of its"
    assert not plan.rows.packed and [note for note in plan.notes if note.startswith(told)]
    with pytest.raises(UserError, match=r"data\.packing: the rotary angles of phi3"):
        plan_run(tmp_path, **settings, **{"data.max_length": 512, "data.packing": True})
