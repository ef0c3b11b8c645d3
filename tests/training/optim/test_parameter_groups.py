"""Parameter groups: train.lr_groups with every optimizer, and LoRA+ against PEFT's."""

import copy

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from support.models.tiny_families import tiny_family
from support.quickstart_runs import plan_run
from test_optimizers import RATES, installed, plan, steps, tiny

from ligertune.errors import UserError
from ligertune.planning.optimization import LoraPlus, LrGroup
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.training.optim.optimizers import build_optimizer, set_learning_rate

EMBEDDING, SECOND = LrGroup("embed_tokens", 0.25, None), LrGroup(r"layers\.1\.", 1.0, 0.5)


def rates_and_decays(optimizer, model, rate: float) -> dict[str, tuple[float, float]]:
    """Name of each trainable parameter -> (learning rate, weight decay)."""
    set_learning_rate(optimizer, rate)
    names = {p: name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[p]: (float(g["lr"]), g["weight_decay"]) for g in groups for p in g["params"]}


def test_the_first_group_that_matches_decides_and_shapes_decide_the_decay_of_all_others():
    model = tiny(layers=2)
    groups = (EMBEDDING, LrGroup("layers.1.input_layernorm", 2.0, None), SECOND)
    found = rates_and_decays(build_optimizer(model, plan("adamw_torch", lr_groups=groups)), model, 0.1)
    assert len(found) == len(list(model.parameters()))
    assert found["model.embed_tokens.weight"] == (pytest.approx(0.025), 0.01)
    assert found["model.layers.1.input_layernorm.weight"] == (pytest.approx(0.2), 0.0)
    assert found["model.layers.1.post_attention_layernorm.weight"] == (0.1, 0.5)
    assert found["model.layers.1.mlp.up_proj.weight"] == (0.1, 0.5)
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.1, 0.01)
    assert found["model.norm.weight"] == (0.1, 0.0)


def test_decays_of_recurrences_have_no_weight_decay():
    model = tiny_family("causal", "kimi_linear")
    found = rates_and_decays(build_optimizer(model, plan("adamw_torch")), model, 0.1)
    decays = [name for name in found if name.endswith(("A_log", "dt_bias"))]
    assert any(model.get_parameter(name).ndim == 4 for name in decays)
    assert {found[name] for name in decays} == {(0.1, 0.0)}


def test_a_group_without_parameters_is_an_error():
    with pytest.raises(UserError, match=r"train.lr_groups\[1\].parameters: 'conv' matches no parameter"):
        build_optimizer(tiny(), plan("sgd", lr_groups=(EMBEDDING, LrGroup("conv", 1.0, 0.0))))


@pytest.mark.parametrize("way", ["on the device", "in_backward", "offload"])
@pytest.mark.parametrize("name", [installed(name) for name in OPTIMIZERS])
def test_a_group_trains_as_a_run_with_its_learning_rate(name, way):
    """Two runs whose other parameters differ only in name: all in one group, or the rate of the whole run."""
    if way == "offload" and OPTIMIZERS[name].needs:
        pytest.skip("only torch's optimizers and ours step on the host")
    rate, how = RATES.get(name, 5e-3), {"in_backward": way == "in_backward", "offload": way == "offload"}
    whole, grouped = tiny(), tiny()
    expected = steps(whole, build_optimizer(whole, plan(name, **how)), range(3), rate)
    halved = plan(name, lr_groups=(LrGroup(".", 0.5, None),), **how)
    assert steps(grouped, build_optimizer(grouped, halved), range(3), 2 * rate) == expected
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), grouped.parameters(), strict=True))


def test_the_plan_has_the_groups_of_the_recipe_and_refuses_a_wrong_name(tmp_path):
    written = "[{parameters: embed_tokens, learning_rate: 1e-3}, {parameters: norm, weight_decay: 0.5}]"
    rate = {"train.learning_rate": 4e-3}
    found = plan_run(tmp_path, **{"train.lr_groups": written}, **rate).plan.optimizer.lr_groups
    assert found == (LrGroup("embed_tokens", 0.25, None), LrGroup("norm", 1.0, 0.5))
    with pytest.raises(UserError, match=r"train.lr_groups\[0\].parameters: 'q_proj' matches no parameter"):
        changes = {"method.type": "lora", "method.lora_target_modules": "[v_proj]"}
        plan_run(tmp_path, **{"train.lr_groups": "[{parameters: q_proj, learning_rate: 1e-3}]"}, **changes)
    plus = {"method.type": "lora", "method.loraplus_lr_ratio": 16, "method.loraplus_lr_embedding": 2e-3}
    assert plan_run(tmp_path, **plus, **rate).plan.optimizer.lora_plus == LoraPlus(16.0, 0.5)


def adapted(*, dora: bool = False) -> peft.PeftModel:
    torch.manual_seed(1)
    targets = ["q_proj", "down_proj", *([] if dora else ["embed_tokens"])]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=dora)
    return peft.get_peft_model(tiny(), config).train()


def test_magnitudes_of_dora_have_the_rate_of_b_under_lora_plus():
    """As in PEFT, which gives it to parameters of one dimension."""
    model = adapted(dora=True)
    lora_plus = LoraPlus(b_multiplier=16.0, embedding_multiplier=0.1)
    found = rates_and_decays(build_optimizer(model, plan("adamw_torch", lora_plus=lora_plus)), model, 0.01)
    magnitudes = {(round(rate, 6), decay) for name, (rate, decay) in found.items() if "magnitude" in name}
    assert magnitudes == {(0.16, 0.0)}
    assert {round(rate, 6) for name, (rate, _) in found.items() if "lora_A" in name} == {0.01}


def test_lora_plus_trains_as_with_pefts_optimizer():
    ours, theirs = adapted(), None
    theirs = copy.deepcopy(ours)
    lora_plus = LoraPlus(b_multiplier=16.0, embedding_multiplier=1e-3 / 1e-2)
    optimizer = build_optimizer(ours, plan("adamw_torch", lora_plus=lora_plus))
    peer = create_loraplus_optimizer(
        theirs, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0, loraplus_lr_embedding=1e-3,
        loraplus_weight_decay=0.01, betas=(0.9, 0.99),
    )  # fmt: skip
    expected = {id(p): group["lr"] for group in peer.param_groups for p in group["params"]}
    found = rates_and_decays(optimizer, ours, 1e-2)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            assert found[name] == (pytest.approx(expected[id(parameter)]), 0.01)
    assert {round(rate, 6) for rate, _ in found.values()} == {0.01, 0.16, 0.001}
    for _ in range(2):
        for model, stepper in ((ours, optimizer), (theirs, peer)):
            ids = torch.arange(24)[None]
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            stepper.step()
            stepper.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
