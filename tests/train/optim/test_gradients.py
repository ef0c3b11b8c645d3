"""A step that changes nothing ends the run, however the gradients are clipped and whoever steps."""

from __future__ import annotations

import pytest
import torch
from test_optimizers import plan, tiny

from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import plan_for, run
from ligertune.train.optim.gradients import check_gradients
from ligertune.train.optim.lr_schedule import set_learning_rate
from ligertune.train.optim.optimizers import build_optimizer

SETTINGS = ("data.datasets.0.max_samples=20", "data.val_split=0", "train.max_steps=2", "checkpoint.save_strategy=no",
            "train.gradient_accumulation_steps=1")  # fmt: skip
WAYS = {
    "clipped": {"train.max_grad_norm": 1.0},
    "not clipped": {"train.max_grad_norm": 0},
    "in backward": {"train.max_grad_norm": 0, "train.optim_in_backward": True},
}


def cut_off(model: torch.nn.Module) -> None:
    """Let the loss depend on nothing, as a hook or a wrapper that detaches it does."""

    def detach(module: torch.nn.Module, arguments: tuple, output: object) -> object:
        if output.loss is not None:
            output.loss = output.loss.detach().requires_grad_()
        return output

    model.register_forward_hook(detach)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_depends_on_nothing_ends_the_run_at_its_first_step(way, quickstart, tmp_path):
    changes = [f"{key}={value}" for key, value in WAYS[way].items()]
    overrides = [*SETTINGS, *changes, f"checkpoint.output_dir={tmp_path / 'run'}"]
    job, shown = plan_for(load_recipe(quickstart / "stories260k.yaml", overrides=overrides)), []
    with pytest.raises(UserError, match="No gradient reached any") as caught:
        run(job, shown.append, change=cut_off)
    assert caught.value.exit_code == 1
    assert not shown and not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("in_backward", [False, True])
def test_each_step_is_judged_by_its_own_backward(in_backward):
    model = tiny()
    optimizer = build_optimizer(model, plan("adamw_torch", in_backward=in_backward))
    set_learning_rate(optimizer, 1e-3)
    ids = torch.arange(24)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    check_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="No gradient reached any"):
        check_gradients(optimizer)


def test_a_parameter_that_took_part_is_enough():
    """Of a mixture of experts some get no token in a step."""
    model = tiny()
    optimizer = build_optimizer(model, plan("adamw_torch"))
    model.model.norm.weight.grad = torch.zeros_like(model.model.norm.weight)
    check_gradients(optimizer)
