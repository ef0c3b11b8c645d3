"""Intervals, rates and decays of the plan against numbers by hand."""

import pytest
from support.quickstart_runs import bare_recipe

from ligertune.planning.optimization import LoraPlus, LrGroup, interval, make_optimizer


@pytest.mark.parametrize(
    "steps, total, expected",
    [
        (5, 100, 5),
        (0.1, 25, 3),  # transformers: ceil(2.5)
        (0.5, 7, 4),
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001 in floating point
        (0.29, 100, 29),  # and this 28.999999999999996
        (0.001, 10, 1),  # never 0
    ],
)
def test_a_share_of_all_steps_is_rounded_up_as_in_transformers(steps, total, expected):
    assert interval(steps, total) == expected


def test_each_setting_of_the_optimizer_is_that_of_the_recipe():
    train = {
        "learning_rate": 0.01,
        "weight_decay": 0.3,
        "adam_beta1": 0.8,
        "adam_beta2": 0.7,
        "adam_epsilon": 1e-3,
        "max_grad_norm": 0.4,
        "lr_groups": [
            {"parameters": "norm", "learning_rate": 0.005, "weight_decay": 0.2},
            {"parameters": "embed", "weight_decay": 0.1},
        ],
    }
    found = make_optimizer(bare_recipe(**train))
    assert (found.weight_decay, found.betas, found.eps, found.max_grad_norm) == (0.3, (0.8, 0.7), 1e-3, 0.4)
    assert found.lr_groups == (LrGroup("norm", 0.5, 0.2), LrGroup("embed", 1.0, 0.1))
    assert found.lora_plus is None


def test_the_rates_of_lora_plus_are_relative_to_that_of_the_run():
    recipe = bare_recipe("lora", learning_rate=0.01)
    method = recipe.method.model_copy(update={"loraplus_lr_ratio": 16.0, "loraplus_lr_embedding": 0.002})
    found = make_optimizer(recipe.model_copy(update={"method": method})).lora_plus
    assert found == LoraPlus(16.0, pytest.approx(0.2))
