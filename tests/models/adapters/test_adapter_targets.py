"""Which layers and parameters an adapter reaches in a mixture of experts."""

import copy
import json

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.layer import ParamWrapper
from support.models import tiny_models
from support.models.tiny_families import inputs_of, tiny_config, tiny_family
from torch import nn

from ligertune.errors import UserError
from ligertune.models.adapters.adapter_targets import adapter_notes, find_targets, shortest_names
from ligertune.models.trainable import apply_method
from ligertune.planning.options import MethodOptions

X, E, F, R = 4, 64, 96, 3  # of the tiny mixtures


def adapted(family: str, **changes: object) -> peft.PeftModel:
    return apply_method(tiny_family("causal", family), MethodOptions(**{"type": "lora", "lora_r": R, **changes}))


def adapted_weights(model: peft.PeftModel) -> dict[str, int]:
    """Return the trainable elements of the last layer by the weight that they adapt."""
    found: dict[str, int] = {}
    for name, module in model.base_model.model.model.layers[-1].named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            weight = f".{module.parameter_name}" if isinstance(module, ParamWrapper) else ""
            parts = module.lora_A["default"].weight, module.lora_B["default"].weight
            found[name.replace(".base_layer", "") + weight] = sum(p.numel() for p in parts if p.requires_grad)
    return found


ATTENTION = {
    "self_attn.q_proj": R * (E + E), "self_attn.k_proj": R * (E + 32), "self_attn.v_proj": R * (E + 32),
    "self_attn.o_proj": R * (E + E),
}  # fmt: skip
EXPERTS = {"mlp.experts.gate_up_proj": X * R * (E + 2 * F), "mlp.experts.down_proj": X * R * (F + E)}
SHARED = {f"mlp.shared_experts.{name}.weight": R * (E + F) for name in ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mixtral", ATTENTION | EXPERTS),
        ("qwen3_moe", ATTENTION | EXPERTS),
        ("gpt_oss", ATTENTION | EXPERTS),
        ("phimoe", ATTENTION | EXPERTS),  # its router is a linear layer
        ("glm4_moe", ATTENTION | EXPERTS | SHARED),
    ],
)
def test_all_linear_adapts_every_layer_and_the_experts_but_no_router(family, expected):
    assert adapted_weights(adapted(family)) == expected


def test_the_experts_are_left_out_by_an_empty_list_and_by_a_list_of_layers():
    assert adapted_weights(adapted("mixtral", lora_target_parameters=[])) == ATTENTION
    only_query = {"self_attn.q_proj": ATTENTION["self_attn.q_proj"]}
    assert adapted_weights(adapted("mixtral", lora_target_modules=["q_proj"])) == only_query


def test_named_parameters_are_adapted_a_router_too():
    model = adapted("mixtral", lora_target_modules=["q_proj"], lora_target_parameters=["gate.weight", "down_proj"])
    assert adapted_weights(model) == {
        "self_attn.q_proj": ATTENTION["self_attn.q_proj"],
        "mlp.gate.weight": R * (E + X),
        "mlp.experts.down_proj": EXPERTS["mlp.experts.down_proj"],
    }


def test_a_named_layer_is_not_taken_for_the_experts():
    """PEFT replaces down_proj by the experts' weight, and leaves the shared expert's layer out."""
    model = adapted("glm4_moe", lora_target_modules=["down_proj"])
    assert adapted_weights(model) == {"mlp.shared_experts.down_proj.weight": R * (E + F)}
    assert type(model.base_model.model.model.layers[0].mlp.down_proj).__name__ == "ParamWrapper"  # a dense layer


def test_dense_layers_of_a_family_of_mixtures_are_adapted_without_any_experts(tmp_path):
    """PEFT takes gate_proj, up_proj and down_proj for the experts of this family, which such a model has not."""
    config = tiny_config(transformers.Qwen3MoeConfig())
    config.mlp_only_layers = [0, 1, 2, 3]
    base = tiny_models.random_model(transformers.AutoModelForCausalLM, config).eval()
    model = apply_method(copy.deepcopy(base), MethodOptions(type="lora", lora_r=R)).eval()
    mlps = {f"mlp.{name}.weight": R * (E + F) for name in ("gate_proj", "up_proj", "down_proj")}
    assert adapted_weights(model) == ATTENTION | mlps
    (note,) = adapter_notes(copy.deepcopy(base), MethodOptions(type="qlora"))
    assert "12 layers" in note and "mlp.gate_proj" in note
    randomise(model)
    model.save_pretrained(tmp_path)
    plain, ids = peft.PeftModel.from_pretrained(base, tmp_path).eval(), inputs_of("qwen3_moe")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_what_trains_in_full_next_to_4_bits_is_not_stored_in_them():
    for name in ("lm_head", "embed_tokens", "gate", "norm"):
        assert find_targets(tiny_family("causal", "mixtral"), MethodOptions(type="qlora", lora_modules_to_save=[name]))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "llama4_text", "jetmoe"])
def test_plain_peft_loads_the_adapter_to_the_same_logits(family, tmp_path):
    base = tiny_family("causal", family).eval()
    model = apply_method(copy.deepcopy(base), MethodOptions(type="lora", lora_r=R)).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    ids = inputs_of(family)["input_ids"]
    with torch.no_grad():
        expected, before = model(input_ids=ids).logits, base(input_ids=ids).logits
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - before).abs().max() > 0.1
    assert not plain.peft_config["default"].rank_pattern  # PEFT has replaced none of our names


def test_dropout_is_of_the_layers_and_the_saved_adapter_has_none(tmp_path):
    model = adapted("mixtral", lora_dropout=0.5)
    dropouts = {
        type(module).__name__: module.lora_dropout["default"]
        for module in model.modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert type(dropouts["ParamWrapper"]) is nn.Identity
    assert isinstance(dropouts["Linear"], nn.Dropout) and dropouts["Linear"].p == 0.5
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0  # or PEFT would refuse it


def test_rslora_scales_experts_and_layers_alike():
    model = adapted("mixtral", use_rslora=True, lora_alpha=8.0)
    scales = {m.scaling["default"] for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert scales == {8 / R**0.5}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"lora_target_parameters": ["experts.gate_proj"]},
         ["lora_target_parameters: the model has no parameter called experts.gate_proj", "mlp.experts.gate_up_proj"]),
        ("mixtral", {"lora_target_parameters": ["mlp.experts.down_porj"]}, ["Did you mean mlp.experts.down_proj?"]),
        ("mixtral", {"lora_target_parameters": ["q_proj.weight"]},
         ["self_attn.q_proj.weight is not a weight of experts or of a router", "lora_target_modules"]),
        ("mixtral", {"lora_target_parameters": ["input_layernorm.weight"]}, ["is not a weight of experts"]),
        ("mixtral", {"lora_target_modules": ["q_proj", "w1"]},
         ["no layer called w1", "lora_target_parameters: [mlp.experts.down_proj, mlp.experts.gate_up_proj]"]),
        ("mixtral", {"use_dora": True}, ["method.use_dora", "mlp.experts.gate_up_proj is a parameter", "[]"]),
        ("llama", {"lora_target_parameters": ["mlp.experts.down_proj"]}, ["no parameter called", "It has no experts."]),
        ("qwen3_5_text", {"lora_target_parameters": ["conv1d.weight"]},
         ["linear_attn.conv1d.weight is not a weight of experts"]),
        ("mixtral", {"lora_target_modules": ["experts"]},
         ["mlp.experts is no layer", "lora_target_parameters: [mlp.experts.down_proj, mlp.experts.gate_up_proj]"]),
        ("mixtral", {"lora_target_modules": ["self_attn"]},
         ["lora_target_modules: MixtralAttention is no linear layer, but holds others. Name other"]),
        ("mixtral", {"lora_modules_to_save": ["experts"]},
         ["lora_modules_to_save: experts trains in full", "mlp.experts.gate_up_proj has an adapter, too", "write []"]),
        ("mixtral", {"lora_modules_to_save": ["mlp"]}, ["mlp trains in full"]),
        ("llama", {"lora_modules_to_save": ["(x+x+)+y.lm_head"]}, ["lora_modules_to_save: the model has no layer"]),
        ("mixtral", {"type": "qlora", "lora_modules_to_save": ["experts"], "lora_target_parameters": []},
         ["lora_modules_to_save: experts is stored in 4 bits"]),
        ("llama", {"type": "qlora", "lora_modules_to_save": ["mlp"], "lora_target_modules": ["q_proj"]},
         ["lora_modules_to_save: mlp is stored in 4 bits"]),
        ("llama", {"load_in_8bit": True, "lora_modules_to_save": ["down_proj"], "lora_target_modules": ["q_proj"]},
         ["lora_modules_to_save: down_proj is stored in 8 bits"]),
    ],
    ids=["unknown", "misspelt", "layer", "norm", "old name", "DoRA", "dense", "filter", "experts", "block",
         "saved experts", "saved block", "saved expression", "4 bits", "linear 4 bits", "8 bits"],
)  # fmt: skip
def test_what_cannot_be_adapted_is_refused(family, changes, words):
    with pytest.raises(UserError) as caught:
        adapted(family, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_dora_adapts_the_layers_of_a_mixture():
    model = adapted("mixtral", use_dora=True, lora_target_parameters=[])
    assert adapted_weights(model) == ATTENTION


def test_the_plan_tells_what_has_no_dropout_and_what_has_no_adapter_in_4_bits():
    def notes(family: str, **changes: object) -> tuple[str, ...]:
        return adapter_notes(tiny_family("causal", family), MethodOptions(**changes))

    assert notes("mixtral", type="lora") == notes("mixtral", type="qlora") == ()
    (dropout,) = notes("mixtral", type="lora", lora_dropout=0.1)
    assert "adapters of experts have none" in dropout
    (left,) = notes("glm4_moe", type="qlora")
    assert "12 layers" in left and "mlp.shared_experts.up_proj" in left  # 3 dense, 3 in each of 3 mixtures
    targets = find_targets(tiny_family("causal", "glm4_moe"), MethodOptions(type="qlora"))
    assert targets.parameters == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def test_shortest_names_match_nothing_else():
    every = ["a.layers.0.mlp.up", "a.layers.1.mlp.up", "a.layers.0.expert.mlp.up", "head"]
    assert shortest_names(["a.layers.0.expert.mlp.up", "head"], every) == ["expert.mlp.up", "head"]
    assert shortest_names(every[:2], every) == every[:2]  # mlp.up would match the expert's


def test_a_dense_model_has_no_adapted_parameters():
    config = apply_method(tiny_models.make("llama"), MethodOptions(type="lora")).peft_config["default"]
    assert config.target_parameters is None
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in config.target_modules} == projections


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def test_an_expression_adapts_the_layers_whose_whole_names_it_matches():
    for family in ("llama", "mixtral"):  # with and without experts, which it does not reach
        model = adapted(family, lora_target_modules=r".*\.self_attn\.(q|v)_proj")
        assert list(adapted_weights(model)) == ["self_attn.q_proj", "self_attn.v_proj"]
        assert not isinstance(model.peft_config["default"].target_modules, str)  # PEFT has no time limit
    for expression in ("q_proj", r"model\.layers\.1\."):
        with pytest.raises(UserError, match="matches no whole name of a layer"):
            adapted("llama", lora_target_modules=expression)
