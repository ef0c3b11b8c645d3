"""The optimizer in host memory computes what the optimizer beside the weights computes."""

from __future__ import annotations

import copy

import pytest
import torch
from test_optimizers import RATES, plan, saved_and_loaded, steps, tiny

from ligertune.models.shape import read_shape
from ligertune.planning.memory.states import state_bytes
from ligertune.recipe import load_recipe
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.run import plan_for, run
from ligertune.train.optim.optimizer_offload import OffloadedOptimizer
from ligertune.train.optim.optimizers import build_optimizer

ALONE = [name for name, row in OPTIMIZERS.items() if row.needs is None]


@pytest.mark.parametrize("name", ALONE)
def test_it_trains_and_resumes_as_it_does_beside_the_weights(name):
    rate, found = RATES.get(name, 5e-3), []
    for offload in (False, True):
        model, how = tiny(), plan(name, offload=offload)
        optimizer = build_optimizer(model, how)
        losses = steps(model, optimizer, range(4), rate)
        weights, state = copy.deepcopy(model.state_dict()), saved_and_loaded(optimizer.state_dict())
        again = tiny()
        resumed = build_optimizer(again, how)  # its twins have other weights than are loaded now
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        found.append(losses + steps(again, resumed, range(4, 8), rate))
    assert type(resumed) is OffloadedOptimizer
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["adamw_torch_fused", "muon"])
def test_the_device_keeps_nothing_and_the_disk_needs_as_much(name):
    shape = read_shape(tiny()).parameters
    how = {"weight_dtype": "bfloat16", "optim": name, "method": "full"}
    beside, hosted = state_bytes(shape, **how), state_bytes(shape, **how, offload=True)
    assert (hosted.optimizer, hosted.step) == (0, 0)
    assert hosted.in_host_memory == beside.optimizer > 0
    assert hosted.saved_states == beside.saved_states


def test_the_key_trains_a_run_to_the_same_losses(quickstart, tmp_path):
    base = ["data.datasets.0.max_samples=20", "data.val_split=0", "train.max_steps=3", "logging.logging_steps=1",
            "train.gradient_accumulation_steps=1", "train.max_grad_norm=0.5"]  # fmt: skip
    found = []
    for offload in ("false", "true"):
        own = [f"train.optim_offload={offload}", f"checkpoint.output_dir={tmp_path / offload}"]
        job, lines = plan_for(load_recipe(quickstart / "stories260k.yaml", overrides=[*base, *own])), []
        run(job, lines.append)
        found.append(([line["loss"] for line in lines], job.plan.bytes.optimizer > 0))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert [held for _, held in found] == [True, False]


@pytest.mark.gpu
def test_on_a_gpu_the_states_are_on_the_host_and_the_weights_are_the_same():
    found = []
    for offload in (False, True):
        model = tiny().cuda().bfloat16()
        optimizer = build_optimizer(model, plan("adamw_torch", offload=offload))
        for step in range(4):
            ids = torch.arange(24, device="cuda")[None] % (8 + step)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    states = optimizer.state_dict()["state"].values()
    assert {t.device.type for state in states for t in state.values()} == {"cpu"}
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-3)
