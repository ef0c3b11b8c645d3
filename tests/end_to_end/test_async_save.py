"""checkpoint.async_save: the same files, written while training goes on, and as safe as the others."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from command_line import environment, losses, overrides
from test_keys import read

from ligertune.errors import UserError
from ligertune.run import plan_for, run
from ligertune.train.checkpoint.saver import Saver

SETTINGS = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 1, "checkpoint.save_total_limit": 9}
ASYNC = {**SETTINGS, "checkpoint.async_save": "true"}


class Held(Saver):
    """Writes when it is let."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.let = threading.Event()

    def write(self, *arguments: object) -> None:
        assert self.let.wait(30)
        super().write(*arguments)


@pytest.fixture
def held(quickstart, tmp_path) -> Held:
    """A saver of a small model that has taken a step."""
    plan, accelerator = plan_for(read(quickstart, tmp_path, **ASYNC)).plan, Accelerator(cpu=True)
    (plan.output_dir / "checkpoints").mkdir(parents=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Held(accelerator, plan, model, optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def test_it_writes_the_state_of_its_step_while_the_next_ones_change_it(held, tmp_path):
    before = [p.detach().clone() for p in held._model.parameters()]
    held.save(1)
    held._optimizer.step()  # with the same gradients; the weights and both means move
    assert names(tmp_path) == [".step-1.partial"]
    held.let.set()
    held.finish()
    assert names(tmp_path) == ["step-1"]
    moved = [p.detach().clone() for p in held._model.parameters()]
    held._accelerator.load_state(str(tmp_path / "run" / "checkpoints" / "step-1"))
    found = list(held._model.parameters())
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(found, before, moved, strict=True))
    assert {int(state["step"]) for state in held._optimizer.state.values()} == {1}


def test_one_is_under_way_at_a_time_and_an_error_ends_the_next_step(held, tmp_path):
    held.save(1)
    held.look()  # still under way: nothing to say
    waits = threading.Thread(target=held.save, args=(2,))
    waits.start()
    assert names(tmp_path) == [".step-1.partial"]
    held.let.set()
    waits.join()
    held.finish()
    assert names(tmp_path) == ["step-1", "step-2"]
    held.let.clear()
    held.save(3)
    (tmp_path / "run" / "checkpoints" / ".step-3.partial").rename(tmp_path / "taken away")
    held.let.set()
    held._under_way.exception()  # waits for it
    with pytest.raises(UserError, match=r"step 3 could not be written .* The newest complete one is .*step-2"):
        held.look()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param({}, id="full"),
        pytest.param({"method.type": "lora"}, id="lora", marks=pytest.mark.slow),
        pytest.param({"train.optim": "muon"}, id="two optimizers", marks=pytest.mark.slow),
    ],
)
def test_its_files_are_those_of_a_save_that_is_waited_for(method, quickstart, tmp_path):
    found = []
    for name, settings in {"waited": SETTINGS, "async": ASYNC}.items():
        run(plan_for(read(quickstart, tmp_path / name, **settings, **method)), lambda line: None)
        assert names(tmp_path / name) == ["step-1", "step-2"]
        progress = tmp_path / name / "run" / "checkpoints" / "step-2" / "progress.json"
        found.append(json.loads(progress.read_text())["files"])
    assert found[0] == found[1]
    assert {"optimizer.bin", "random_states_0.pkl"} < found[0].keys()


def test_a_run_resumes_from_it_to_the_same_bits(quickstart, tmp_path):
    run(plan_for(read(quickstart, tmp_path, **ASYNC)), lambda line: None)
    weights, expected = tmp_path / "run" / "model" / "model.safetensors", losses(tmp_path / "run")
    before = weights.read_bytes()
    (tmp_path / "run" / "report.json").unlink()
    resumed = {**ASYNC, "checkpoint.resume_from_checkpoint": "auto"}
    report = run(plan_for(read(quickstart, tmp_path, **resumed)), lambda line: None)
    assert report.resumed_from == 2
    assert losses(tmp_path / "run") == expected
    assert weights.read_bytes() == before


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_the_same_sentence(recipe, tmp_path):
    """A limit on the size of a file stands in for it."""
    settings = overrides({**ASYNC, "checkpoint.output_dir": "run", "train.max_steps": 50, "data.cache": "false"})
    limited = subprocess.run(
        [sys.executable, "-m", "ligertune", "train", str(recipe), *settings],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
    )  # fmt: skip
    assert limited.returncode == 1, limited.stderr[-2000:]
    assert "Traceback" not in limited.stderr
    assert "The checkpoint of step 1 could not be written" in limited.stderr
    assert "There is no earlier one" in limited.stderr
    assert not names(tmp_path)
