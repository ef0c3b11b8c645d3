"""Optimizers and saves that are our own, on two ranks with whole copies of the weights."""

from __future__ import annotations

import pytest
from command_line import losses, overrides, run
from test_ranks import SETTINGS, train, two_ranks

pytestmark = pytest.mark.slow

WAYS = {
    "galore": {"train.optim": "galore_adamw", "train.galore.rank": 8, "train.galore.update_proj_gap": 2},
    "offload": {"train.optim_offload": "true"},
    "async save": {"checkpoint.async_save": "true"},
}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_process_does_and_resume_to_the_same_bits(way, recipe, tmp_path):
    (tmp_path / "alone").mkdir()
    alone = train(recipe, tmp_path / "alone", packing=True, micro=8, **WAYS[way])
    saving = {**SETTINGS, **WAYS[way], "train.per_device_train_batch_size": 4, "checkpoint.save_strategy": "steps",
              "checkpoint.save_steps": 3}  # fmt: skip
    command = [*two_ranks("--multi_gpu"), "train", str(recipe), *overrides(saving)]
    first = run(command, cwd=tmp_path)
    assert first.code == 0, first.err[-2000:]
    found, model = losses(tmp_path / "run"), tmp_path / "run" / "model" / "model.safetensors"
    assert found == pytest.approx(alone, rel=1e-4)
    weights = model.read_bytes()
    (tmp_path / "run" / "report.json").unlink()  # as if it had been killed after step 4
    again = run([*command, "--resume"], cwd=tmp_path)
    assert again.code == 0, again.err[-2000:]
    assert losses(tmp_path / "run") == found
    assert model.read_bytes() == weights
