"""Trackers that fail to start: one sentence, and nothing is left in or as the run's folder."""

from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from support.command_line import ROOT, run, train_command
from support.quickstart_runs import plan_run, recipe_for

from ligertune.errors import UserError
from ligertune.launcher.run_lock import locked_folder
from ligertune.planning import preflight
from ligertune.planning.plan import Plan
from ligertune.training.metrics.metrics_logger import open_trackers


class RefusedTracker(GeneralTracker):
    """A tracker as users of accelerate write them, whose service refuses the login after a folder was made."""

    name, requires_logging_directory = "refused", True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        (self.folder / "trackers" / "run").mkdir(parents=True)
        raise RuntimeError("No API key was found.\nLog in first.")


@pytest.fixture
def plan(tmp_path) -> Plan:
    plan = plan_run(tmp_path).plan
    return replace(plan, logging=plan.logging.model_copy(update={"report_to": ["jsonl", "refused"]}))


def test_a_tracker_that_fails_to_start_is_one_sentence_and_leaves_nothing(plan, tmp_path):
    accelerator = Accelerator(cpu=True, log_with=RefusedTracker(plan.output_dir))
    with pytest.raises(UserError) as refused, locked_folder(plan.output_dir):
        open_trackers(plan, accelerator)
    assert refused.value.message == "logging.report_to: refused could not be started: No API key was found."
    assert refused.value.exit_code == 2 and not list(tmp_path.iterdir())


def test_trackers_of_an_earlier_run_stay(plan):
    kept = plan.output_dir / "trackers" / "kept"
    kept.mkdir(parents=True)
    with pytest.raises(UserError):
        open_trackers(plan, Accelerator(cpu=True, log_with=RefusedTracker(plan.output_dir)))
    assert kept.is_dir()


@pytest.mark.slow
def test_an_incomplete_tensorboard_is_refused_before_the_folder_is_made(tmp_path, monkeypatch):
    (tmp_path / "packages" / "tensorboard").mkdir(parents=True)
    (tmp_path / "packages" / "tensorboard" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    settings = {"logging.report_to": "tensorboard", "checkpoint.output_dir": "run"}
    done = run(train_command(**settings), cwd=tmp_path)
    assert done.code == 2 and "logging.report_to: tensorboard could not be started" in done.err, done.err
    assert "Traceback" not in done.err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet_ml"])
def test_a_tracker_is_one_of_accelerate_and_a_missing_package_is_one_sentence(tracker, tmp_path, monkeypatch):
    assert tracker in LOGGER_TYPE_TO_CLASS
    recipe = recipe_for(tmp_path, **{"logging.report_to": tracker})
    assert recipe.logging.report_to == (tracker,)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        preflight.check_packages(recipe)
    needed = f"logging.report_to: {tracker} needs the package {tracker}, which is not installed."
    assert refused.value.message == needed and f"pip install {tracker}" in str(refused.value)
    extra = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("trackers = "))
    assert f'"{tracker}"' in extra
