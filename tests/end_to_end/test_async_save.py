"""checkpoint.async_save: the same files as a synchronous save, written while training goes on, and as safe."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from command_line import losses, weights
from quickstart_runs import RESUME, plan_run, saves, train, unfinished

from ligertune.errors import UserError
from ligertune.train.checkpoint.saver import Saver

SYNC = {**saves(1), "checkpoint.save_total_limit": 9}
ASYNC = {**SYNC, "checkpoint.async_save": "true"}


class BlockedSaver(Saver):
    """A saver that starts to write when `may_write` is set."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.may_write = threading.Event()

    def write(self, *arguments: object) -> None:
        assert self.may_write.wait(30)
        super().write(*arguments)


@pytest.fixture
def saver(tmp_path) -> BlockedSaver:
    """A saver of a small model that has taken a step."""
    plan, accelerator = plan_run(tmp_path, **ASYNC).plan, Accelerator(cpu=True)
    (plan.output_dir / "checkpoints").mkdir(parents=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return BlockedSaver(accelerator, plan, model, optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def test_it_writes_the_state_of_its_step_while_later_steps_change_it(saver, tmp_path):
    before = [p.detach().clone() for p in saver._model.parameters()]
    saver.save(1)
    saver._optimizer.step()  # with the same gradients; the weights and both moments change
    assert names(tmp_path) == [".step-1.partial"]
    saver.may_write.set()
    saver.finish()
    assert names(tmp_path) == ["step-1"]
    after = [p.detach().clone() for p in saver._model.parameters()]
    saver._accelerator.load_state(str(tmp_path / "run" / "checkpoints" / "step-1"))
    loaded = list(saver._model.parameters())
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(loaded, before, after, strict=True))
    assert {int(state["step"]) for state in saver._optimizer.state.values()} == {1}


def test_one_save_runs_at_a_time_and_an_error_ends_the_next_step(saver, tmp_path):
    saver.save(1)
    saver.look()  # still running: no error
    second = threading.Thread(target=saver.save, args=(2,))
    second.start()
    assert names(tmp_path) == [".step-1.partial"]
    saver.may_write.set()
    second.join()
    saver.finish()
    assert names(tmp_path) == ["step-1", "step-2"]
    saver.may_write.clear()
    saver.save(3)
    (tmp_path / "run" / "checkpoints" / ".step-3.partial").rename(tmp_path / "taken away")
    saver.may_write.set()
    saver._running.exception()  # waits for the write
    with pytest.raises(UserError, match=r"step 3 could not be written .* The newest complete one is .*step-2"):
        saver.look()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param({}, id="full"),
        pytest.param({"method.type": "lora"}, id="lora", marks=pytest.mark.slow),
        pytest.param({"train.optim": "muon"}, id="two optimizers", marks=pytest.mark.slow),
    ],
)
def test_it_writes_the_files_of_a_synchronous_save_and_resumes_to_the_same_bits(method, tmp_path):
    found = []
    for name, settings in {"sync": SYNC, "async": ASYNC}.items():
        train(tmp_path / name, **settings, **method)
        assert names(tmp_path / name) == ["step-1", "step-2"]
        progress = tmp_path / name / "run" / "checkpoints" / "step-2" / "progress.json"
        found.append(json.loads(progress.read_text())["files"])
    assert found[0] == found[1]
    assert {"optimizer.bin", "random_states_0.pkl"} < found[0].keys()
    if method:
        return
    run, expected = unfinished(tmp_path / "async"), losses(tmp_path / "async" / "run")
    before = weights(run)
    assert train(tmp_path / "async", **ASYNC, **RESUME).resumed_from == 2
    assert losses(run) == expected
    assert weights(run) == before
