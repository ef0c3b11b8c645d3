"""An optimizer in host memory (`train.optim_offload`) computes what it computes on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from quickstart_runs import plan_run
from test_optimizers import RATES, plan, saved_and_loaded, steps, tiny

from ligertune.models.shape import read_shape
from ligertune.planning.memory.states import state_bytes
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.run import run
from ligertune.train.optim.optimizer_offload import OffloadedOptimizer
from ligertune.train.optim.optimizers import build_optimizer


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.needs is None])
def test_it_trains_and_resumes_as_on_the_device(name):
    rate, found = RATES.get(name, 5e-3), []
    for offload in (False, True):
        model, how = tiny(), plan(name, offload=offload)
        optimizer = build_optimizer(model, how)
        losses = steps(model, optimizer, range(4), rate)
        weights, state = copy.deepcopy(model.state_dict()), saved_and_loaded(optimizer.state_dict())
        again = tiny()
        resumed = build_optimizer(again, how)  # its host copies have other weights than are loaded now
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        found.append(losses + steps(again, resumed, range(4, 8), rate))
    assert type(resumed) is OffloadedOptimizer
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["adamw_torch_fused", "muon"])
def test_states_are_planned_in_host_memory_and_on_disk(name):
    shape, how = read_shape(tiny()).parameters, {"weight_dtype": "bfloat16", "optim": name, "method": "full"}
    on_device, hosted = state_bytes(shape, **how), state_bytes(shape, **how, offload=True)
    assert (hosted.optimizer, hosted.step) == (0, 0)
    assert hosted.in_host_memory == on_device.optimizer > 0
    assert hosted.saved_states == on_device.saved_states


def test_a_run_with_the_key_has_the_same_losses(tmp_path):
    found = []
    for offload in ("false", "true"):
        changes = {"data.val_split": 0, "train.max_grad_norm": 0.5, "train.optim_offload": offload}
        job, lines = plan_run(tmp_path / offload, **changes), []
        run(job, lines.append)
        found.append(([line["loss"] for line in lines], job.plan.bytes.optimizer > 0))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert [on_device for _, on_device in found] == [True, False]


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
