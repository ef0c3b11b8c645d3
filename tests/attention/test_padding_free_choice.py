"""Where `data.padding_free` makes padding-free batches, and where it pads."""

import json

import numpy as np
import pytest
import transformers
from support.models import tiny_models
from test_attention_choice import B200, BF16, CPU, FP32, H100, MI300

from ligertune.attention.padding_free import choose_batch_layout
from ligertune.errors import UserError
from ligertune.planning.options import BatchLayoutOptions
from ligertune.recipe import load_recipe

UNEVEN = np.array([5, 9, 2])


def choose(
    folder, *, config="llama", machine=H100, precision=BF16, lengths: np.ndarray | None = UNEVEN, **sections: dict
):
    """(attention's name, whether batches are padding-free); sections: what the recipe says."""
    data = {"datasets": [{"path": "some/data"}], "packing": False, **sections.pop("data", {})}
    model = {"model_name_or_path": "some/model", **sections.pop("model", {})}
    said = {"model": model, "data": data, "checkpoint": {"output_dir": "run"}, **sections}
    (folder / "recipe.yaml").write_text(json.dumps(said))
    config = tiny_models.config_of(config) if isinstance(config, str) else config
    attention, found = choose_batch_layout(
        BatchLayoutOptions.of(load_recipe(folder / "recipe.yaml")), config, machine, precision, lengths=lengths
    )
    return attention.implementation, found


def test_auto_is_padding_free_where_one_launch_attends_to_all_documents(tmp_path):
    assert choose(tmp_path, machine=B200) == ("varlen", True)
    assert choose(tmp_path, machine=B200, lengths=None) == ("varlen", True)  # streamed
    assert choose(tmp_path, model={"attn_implementation": "varlen"}) == ("varlen", True)


ONE_LENGTH, ONE_EXAMPLE = {"lengths": np.array([7, 7, 7])}, {"train": {"per_device_train_batch_size": 1}}
LONG = {"lengths": np.array([8192])}


@pytest.mark.parametrize("sections", [{}, {"lengths": None}, {"config": "gemma2"}], ids=str)
def test_auto_takes_document_attention_for_padding_free_batches(sections, tmp_path):
    assert choose(tmp_path, **sections) == ("document_attention", True)
    packed, kernels = {"data": {"packing": True}}, {"kernels": {"attention": False}}
    assert choose(tmp_path, **sections, **packed) == ("document_attention", False)
    assert choose(tmp_path, **sections, **packed, **kernels)[0] != "document_attention"


@pytest.mark.parametrize("sections", [{**ONE_EXAMPLE, **LONG}, {"lengths": np.array([1024] * 8)}], ids=str)
def test_large_batches_without_padding_are_padding_free_for_faster_attention(sections, tmp_path):
    rows = {"train": {"per_device_train_batch_size": 8}} | sections
    assert choose(tmp_path, **rows) == ("document_attention", True)
    assert choose(tmp_path, **rows, kernels={"attention": False}) == (None, False)
    assert choose(tmp_path, **{**rows, "lengths": rows["lengths"] // 8}) == (None, False)


def test_one_long_example_is_padding_free_for_faster_attention(tmp_path):
    assert choose(tmp_path, **ONE_EXAMPLE, lengths=np.array([2048, 2048])) == ("document_attention", True)
    assert choose(tmp_path, **ONE_EXAMPLE, lengths=np.array([2000, 2000])) == (None, False)


def test_cuda_graphs_take_padding_free_batches_of_one_length(tmp_path):
    rows = {"train": {"per_device_train_batch_size": 2, "cuda_graphs": True}}
    assert choose(tmp_path, **rows, lengths=np.array([4096, 4096])) == ("document_attention", True)
    assert choose(tmp_path, **rows, lengths=np.array([4096, 4000])) == (None, False)


PADDED = {
    "packed rows": {"data": {"packing": True}},
    "false": {"data": {"padding_free": False}},
    "no kernels": {"kernels": {"enabled": False}},
    "a CPU": {"machine": CPU, "precision": FP32},
    "an attention that launches for each document": {"machine": MI300},
    "the same, chosen": {"model": {"attn_implementation": "sdpa"}},
    "a soft cap": {"config": "gemma2", "machine": B200},
    "float32": {"precision": FP32},
    "compiled layers": {"train": {"torch_compile": True}},
    "one example": ONE_EXAMPLE,
    "examples of one length": ONE_LENGTH,
    "a long example where torch's attention is taken": {**ONE_EXAMPLE, **LONG, "machine": B200},
    "one example of unknown length": {**ONE_EXAMPLE, "lengths": None},
    "CUDA graphs": {"train": {"cuda_graphs": True}},
    "a vision-language model": {"config": transformers.Qwen2VLConfig()},
    "layers with a state": {
        "config": tiny_models.config_of("llama", layer_types=["indexed_attention", "full_attention"])
    },
}


@pytest.mark.parametrize("why", PADDED)
def test_auto_pads(why, tmp_path):
    attention, found = choose(tmp_path, **PADDED[why])
    assert not found
    assert attention == {"packed rows": "document_attention", "the same, chosen": "sdpa"}.get(why)


def test_compiled_layers_use_varlen(tmp_path):
    compiled = {"data": {"packing": True}, "train": {"torch_compile": True}}
    assert choose(tmp_path, **compiled)[0] == "varlen"
    assert choose(tmp_path, **compiled, kernels={"attention": True})[0] == "document_attention"


@pytest.mark.parametrize(("machine", "precision", "attention"), [(CPU, FP32, "per_document"), (B200, BF16, "varlen")])
def test_true_is_padding_free_wherever_that_is_exact(machine, precision, attention, tmp_path):
    asked = {"data": {"padding_free": True}, "machine": machine, "precision": precision}
    for changes in ({}, {"kernels": {"enabled": False}}, {"train": {"per_device_train_batch_size": 1}}):
        assert choose(tmp_path, **asked, **changes) == (attention, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config": PADDED["layers with a state"]["config"]}, "indexed_attention layers"),
        ({"config": transformers.Gemma3Config()}, "each other's images in Gemma 3"),
        ({"model": {"attn_implementation": "varlen"}, "machine": CPU, "precision": FP32}, "varlen cannot be used"),
    ],
)
def test_true_is_refused_where_it_is_not_exact(changes, why, tmp_path):
    with pytest.raises(UserError, match=why) as refused:
        choose(tmp_path, data={"padding_free": True}, **changes)
    assert "data.packing" not in str(refused.value)


OWN_KERNEL = {"kernels": {"attention": True}}


@pytest.mark.parametrize("sections", [{}, {"machine": CPU, "precision": FP32}, {"config": "gemma2"}], ids=str)
def test_document_attention_makes_batches_padding_free_unless_packed(sections, tmp_path):
    assert choose(tmp_path, **OWN_KERNEL, **sections) == ("document_attention", True)
    assert choose(tmp_path, **OWN_KERNEL, data={"packing": True}, **sections) == ("document_attention", False)
    without = {"kernels": {"attention": True, "enabled": False}}
    assert choose(tmp_path, **without, data={"packing": True})[0] == "varlen"


@pytest.mark.parametrize("sections", [{"train": {"torch_compile": True}}, {"config": transformers.Gemma3Config()}])
def test_document_attention_is_refused_where_examples_do_not_share_a_row(sections, tmp_path):
    with pytest.raises(UserError, match=r"kernels\.attention: the examples of a \w+ model do not share a row here"):
        choose(tmp_path, **OWN_KERNEL, **sections)
