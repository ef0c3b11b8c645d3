"""The load of experts, counted by hooks."""

import pytest
import torch
from support.models.tiny_families import inputs_of, tiny_family

from ligertune.models.experts.expert_load import ExpertLoad
from ligertune.models.shape import text_layers
from ligertune.patching.patch import patch


@pytest.mark.parametrize("patched", [False, True], ids=["transformers", "our kernels"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_counts_are_the_routers_choices_in_training(family, patched):
    model = tiny_family("causal", family)
    if patched:
        patch(model)
    load, chosen = ExpertLoad(model), {}

    def note(module, args):
        chosen.setdefault(id(module), args[1])

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(note)
    model(**inputs_of(family)).loss.backward()
    total = load.total()
    expected = torch.stack([torch.bincount(index.flatten(), minlength=4) for index in chosen.values()])
    assert len(chosen) > 0 and total.tolist() == expected.tolist()
    model.eval()
    model(**inputs_of(family))
    assert load.total().tolist() == expected.tolist()


def test_report_of_uneven_and_unused_experts():
    model = tiny_family("causal", "mixtral")
    load = ExpertLoad(model)
    counts = torch.tensor([[10, 10, 10, 10], [40, 0, 0, 0], [30, 10, 0, 0], [0, 0, 0, 0]])
    even, one, two = load.report(counts.double())["layers"]
    assert (even["imbalance"], even["entropy"], even["unused"], even["min"]) == (1.0, 1.0, 0, 0.25)
    assert (one["imbalance"], one["entropy"], one["unused"]) == (4.0, 0.0, 3)
    assert two["shares"] == [0.75, 0.25, 0.0, 0.0] and two["imbalance"] == 3.0
    assert [layer["layer"].split(".")[2] for layer in (even, one, two)] == ["0", "1", "2"]


def test_an_index_of_no_expert_is_not_counted():
    model = tiny_family("causal", "mixtral")
    load, experts = ExpertLoad(model), text_layers(model)[0].mlp.experts
    index = torch.tensor([[0, 4], [1, 4]])  # 4: another rank's expert
    for hook in experts._forward_pre_hooks.values():
        hook(experts, (torch.zeros(2, 64), index, torch.ones(2, 2)), {})
    assert load.total()[0].tolist() == [1, 1, 0, 0]


def test_dense_models_have_no_load():
    load = ExpertLoad(tiny_family("causal", "llama"))
    assert load.total() is None


def test_router_losses_are_reported_if_the_model_adds_them():
    model = tiny_family("causal", "mixtral")
    counts = torch.ones(4, 4).double()
    assert ExpertLoad(model).report(counts)["auxiliary_loss"] == {}
    model.config.output_router_logits = True
    assert ExpertLoad(model).report(counts)["auxiliary_loss"] == {"router_aux_loss_coef": 0.001}
