"""method.layers_to_transform and layers_pattern: the layers that PEFT adapts by its own configuration."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.models import tiny_models
from support.models.tiny_families import inputs_of, tiny_family
from support.quickstart_runs import bare_recipe, plan_run, train

from ligertune.errors import UserError
from ligertune.models.adapters.adapter_targets import adapter_notes
from ligertune.models.adapters.numbered_layers import layer_number
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.planning.memory.activation_bytes import ActivationPolicy, layer_bytes
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.memory.states import states_of
from ligertune.planning.options import MethodOptions

R = 3


def base_model(family: str):
    return tiny_models.make(family) if family in tiny_models.FAMILIES else tiny_family("causal", family)


def adapted(family: str, **changes: object) -> peft.PeftModel:
    return apply_method(base_model(family), MethodOptions(**{"type": "lora", "lora_r": R, **changes}))


def trained(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


def numbers_of(model: torch.nn.Module) -> set[int]:
    return {number for name in trained(model) if (number := layer_number(name, ())) is not None}


# family, lora_target_modules, layers_to_transform, layers_pattern
CASES = [
    ("llama", ["q_proj", "down_proj"], [1], []),
    ("llama", ["q_proj"], 0, "layers"),
    ("llama", ["q_proj", "lm_head"], [0], []),  # a whole name is adapted in any case
    ("llama", ["q_proj", "embed_tokens"], [0], []),  # a layer without a number is not
    ("llama", ["q_proj", "model.layers.1.self_attn.v_proj"], [0], ["layers"]),
    ("gpt2", ["c_attn", "c_proj"], [0, 2], ["h"]),
    ("gpt2", ["c_attn"], [3], []),
    ("mixtral", ["q_proj", "v_proj"], [1], ["layers"]),
    ("qwen3_5_text", ["q_proj", "in_proj_qkv"], [0, 3], []),  # attention is in the last layer only
    ("deepseek_v3", ["o_proj", "q_b_proj"], [0, 2], ["layers"]),
]


@pytest.mark.parametrize(("family", "targets", "numbers", "pattern"), CASES, ids=lambda value: str(value))
def test_the_adapted_layers_are_those_of_pefts_own_configuration(family, targets, numbers, pattern):
    ours = adapted(family, lora_target_modules=targets, layers_to_transform=numbers, layers_pattern=pattern)
    config = peft.LoraConfig(r=R, target_modules=targets, layers_to_transform=numbers, layers_pattern=pattern or None)
    assert trained(ours) == trained(peft.get_peft_model(base_model(family), config))


def test_layers_whose_names_peft_takes_for_those_of_experts():
    """PEFT reads down_proj as the experts' weight in this family, so that it is told the names of the weights."""
    ours = adapted("deepseek_v3", lora_target_modules=["o_proj", "down_proj"], layers_to_transform=[0, 2])
    mlps = ("layers.0.mlp.down_proj.weight", "layers.2.mlp.shared_experts.down_proj.weight")
    config = peft.LoraConfig(r=R, target_modules=["o_proj"], layers_to_transform=[0, 2], target_parameters=[*mlps])
    plain = peft.get_peft_model(base_model("deepseek_v3"), config)
    assert sorted(trained(ours).values()) == sorted(trained(plain).values()) and len(trained(ours)) == 8


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_5_text", "gpt2"])
def test_all_linear_adapts_every_linear_layer_and_the_experts_of_these_layers(family):
    every = adapted(family)
    some = adapted(family, layers_to_transform=[1])
    assert trained(some) == {name: size for name, size in trained(every).items() if layer_number(name, ()) == 1}
    assert trained(some)


def test_a_saved_adapter_says_its_layers_and_loads_in_peft(tmp_path):
    for family, targets in (("llama", "all-linear"), ("mixtral", "all-linear"), ("llama", ["q_proj"])):
        base = adapted_base = tiny_models.make(family).eval()
        spec = MethodOptions(type="lora", lora_r=R, lora_target_modules=targets, layers_to_transform=[1],
                             layers_pattern="layers")  # fmt: skip
        model = apply_method(copy.deepcopy(adapted_base), spec).eval()
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(tmp_path / family)
        saved = json.loads((tmp_path / family / "adapter_config.json").read_text())
        if family == "llama":
            assert (saved["layers_to_transform"], saved["layers_pattern"]) == ([1], ["layers"])
            assert {name.rpartition(".")[2] for name in saved["target_modules"]} >= {"q_proj"}
        plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / family).eval()
        assert len(trained(model)) == sum("lora_" in name for name, _ in plain.named_parameters())
        ids = inputs_of(family)["input_ids"] % tiny_models.VOCAB
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
            assert (expected - base(input_ids=ids).logits).abs().max() > 0.01


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers_to_transform": [0, 7]}, ["layers_to_transform: the model has no layer 7.", "Its layers are 0 and 1"]),
        ({"layers_to_transform": [0], "layers_pattern": "layer"},
         ["layers_pattern: the model has no list of layers called layer. Did you mean layers?", "are layers."]),
        ({"layers_to_transform": [0], "layers_pattern": ["layers", "h"]}, ["no list of layers called h."]),
        ({"layers_to_transform": [0], "lora_target_modules": ["embed_tokens"]},
         ["layers_to_transform: 0: nothing that method.lora_target_modules names is in there"]),
    ],
    ids=["beyond", "misspelt", "one of two", "no layer"],
)  # fmt: skip
def test_layers_that_the_model_does_not_have_are_refused(changes, words):
    with pytest.raises(UserError) as caught:
        adapted("llama", **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_layers_of_a_tower_are_none_of_the_language_model():
    model = tiny_family("image-text", "qwen2_5_vl")  # a tower of 2 blocks, a language model of 4 layers
    some = apply_method(model, MethodOptions(type="lora", lora_r=R, layers_to_transform=[1]))
    assert numbers_of(some) == {1} and all("language_model" in name for name in trained(some))


def test_the_plan_says_what_the_numbers_do_not_limit_and_what_they_leave_out():
    def notes(family: str, **changes: object) -> tuple[str, ...]:
        return adapter_notes(tiny_family("causal", family), MethodOptions(type="lora", **changes))

    (note,) = notes("mixtral", layers_to_transform=[1], lora_target_parameters=["mlp.experts.down_proj"])
    assert "does not limit method.lora_target_parameters, as in PEFT" in note
    (note,) = notes("qwen3_5_text", layers_to_transform=[0], lora_target_modules=["q_proj", "down_proj"])
    assert note.startswith("method.layers_to_transform: q_proj is in none of these layers")
    assert notes("mixtral", layers_to_transform=[1]) == ()


def four_layers(numbers: list[int]) -> ModelShape:
    spec = MethodOptions(type="lora", lora_r=R, layers_to_transform=numbers)
    return read_shape(apply_method(tiny_models.make("llama", num_hidden_layers=4), spec))


def saved_bytes(shape: ModelShape) -> int:
    """Return the bytes that 64 tokens save in all layers and around them."""
    estimate = MemoryEstimate(
        states_of(bare_recipe("lora"), shape.parameters, "bfloat16"), shape.layer, shape.head,
        ActivationPolicy(attention="varlen"), layers=4, itemsize=2, labelled=1.0, in_front=shape.in_front,
        other_layers=shape.other_layers,
    )  # fmt: skip
    phases = estimate._phases(64, 64, accumulates=False, memory=None)
    return next(phase.activations for phase in phases if phase.name == "loss")


@pytest.mark.parametrize(("numbers", "in_front", "others"), [([3], 3, 0), ([0], 0, 3), ([1], 1, 2), ([0, 3], 0, 2)])
def test_the_memory_plan_counts_what_layers_with_and_without_an_adapter_save(numbers, in_front, others):
    shape, every = four_layers(numbers), four_layers([])
    assert shape.n_trainable * 4 == every.n_trainable * len(numbers)
    assert (shape.layer, shape.in_front) == (every.layer, in_front)
    ((plain, _),) = four_layers([0]).other_layers
    # a layer without an adapter saves what attention, the norms and the gated product need, but no linear input
    linear_inputs = 2 * 64 + 64 + 96  # of q, k and v, of gate and up; of o, of down
    of_adapter, of_plain = (
        layer_bytes(one, ActivationPolicy(attention="varlen"), 2, 64) for one in (every.layer, plain)
    )
    assert of_adapter - of_plain == 2 * (linear_inputs - 64 + 7 * R)  # o's input is attention's output
    assert saved_bytes(every) - saved_bytes(shape) == 64 * (in_front * of_adapter + others * (of_adapter - of_plain))


def test_a_run_trains_these_layers_alone(tmp_path):
    """method.layers_to_transform and method.layers_pattern."""
    numbers = {"method.layers_to_transform": [1, 3], "method.layers_pattern": "layers"}
    settings = {"method.type": "lora", "method.lora_r": R, "train.max_steps": 1, **numbers}
    plan = plan_run(tmp_path, **settings).plan
    train(tmp_path, **settings)
    saved = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert saved["layers_to_transform"] == [1, 3] and saved["layers_pattern"] == ["layers"]
    weights = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert {layer_number(name, ()) for name in weights} == {1, 3}
    assert plan.n_trainable == sum(t.numel() for t in weights.values())
    every = plan_run(
        tmp_path / "all", **{**settings, "method.layers_to_transform": "[]", "method.layers_pattern": "[]"}
    )
    assert plan.memory.workspace == every.plan.memory.workspace  # the adapters of one layer, and their gradients
