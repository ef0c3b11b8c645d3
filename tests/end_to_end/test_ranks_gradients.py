"""Gradients that never come, or come in the backward, on two ranks."""

from __future__ import annotations

import pytest
from command_line import losses, overrides, run
from test_ranks import SETTINGS, two_ranks

pytestmark = pytest.mark.slow

IN_BACKWARD = {
    **SETTINGS,
    "train.global_batch_size": "null",
    "train.gradient_accumulation_steps": 1,
    "train.per_device_train_batch_size": 4,
    "train.optim_in_backward": "true",
    "train.max_grad_norm": 0,
}
FSDP = ("--use_fsdp", "--fsdp_version", "2")
CUT_OFF = """
import sys
sys.path.insert(0, {here!r})
from test_gradients import cut_off
from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.run import plan_for, run
try:
    run(plan_for(load_recipe({recipe!r}, overrides={overrides!r})), print, change=cut_off)
except UserError as problem:
    print(problem)
"""


@pytest.mark.parametrize("launcher", [("--multi_gpu",), FSDP], ids=["ddp", "fsdp2"])
def test_a_step_without_gradients_ends_the_run_on_every_rank(launcher, recipe, tmp_path):
    settings = [f"{key}={value}" for key, value in {**SETTINGS, "train.max_grad_norm": 0}.items()]
    here = str(recipe.parents[2] / "tests" / "train" / "optim")
    (tmp_path / "script.py").write_text(CUT_OFF.format(here=here, recipe=str(recipe), overrides=settings))
    done = run([*two_ranks(*launcher)[:-2], "script.py"], cwd=tmp_path)
    assert done.out.count("No gradient reached any") == 2, done.err[-2000:]


def test_in_backward_trains_shards_as_it_trains_the_whole_and_resumes_to_the_same_bits(recipe, tmp_path, ligertune):
    alone = {**IN_BACKWARD, "train.per_device_train_batch_size": 8, "checkpoint.output_dir": "alone"}
    done = ligertune("train", recipe, *overrides(alone))
    assert done.code == 0, done.err[-2000:]
    saving = {**IN_BACKWARD, "checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}
    sharded = [*two_ranks(*FSDP), "train", str(recipe), *overrides(saving)]
    first = run(sharded, cwd=tmp_path)
    assert first.code == 0, first.err[-2000:]
    found, model = losses(tmp_path / "run"), tmp_path / "run" / "model" / "model.safetensors"
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    weights = model.read_bytes()
    (tmp_path / "run" / "report.json").unlink()  # as if it had been killed after step 4
    again = run([*sharded, "--resume"], cwd=tmp_path)
    assert again.code == 0, again.err[-2000:]
    assert losses(tmp_path / "run") == found
    assert model.read_bytes() == weights


def test_in_backward_is_refused_where_gradients_are_averaged_after_it(recipe, tmp_path):
    done = run([*two_ranks("--multi_gpu"), "train", str(recipe), *overrides(IN_BACKWARD)], cwd=tmp_path)
    assert "train.optim_in_backward: under ddp each rank would step with its own gradients" in done.err
    assert not (tmp_path / "run").exists()
