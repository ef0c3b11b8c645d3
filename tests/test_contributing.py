"""CONTRIBUTING.md: the paths it names exist, and its list of the files that a batch visits is what a run shows."""

import re
import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch
from torch import nn

from ligertune.data.prepare import prepare
from ligertune.data.rows.row_kind import row_kinds
from ligertune.recipe import load_recipe
from ligertune.run import run
from ligertune.training.optim.optimizers import set_learning_rate
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Training
from ligertune.training.step import TrainStep

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\d+\. `([\w/.]+)`", TEXT.split("### One batch")[1].split("\n## ")[0], flags=re.MULTILINE)
MAX_FILES = 27


class FileTrace:
    """Record the files of ligertune/ that run below `roots`, apart from the model's forward and backward."""

    def __init__(self, roots: set[CodeType]) -> None:
        self.files: set[str] = set()
        self._roots, self._depth = roots, 0
        self._model, self._inside_model = {nn.Module._wrapped_call_impl.__code__, torch.Tensor.backward.__code__}, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code, change = frame.f_code, {"call": 1, "return": -1}.get(event, 0)
        self._depth += change * (code in self._roots)
        self._inside_model += change * (code in self._model)
        if event == "call" and self._depth and not self._inside_model:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT / "ligertune"):
                self.files.add(path.relative_to(ROOT).as_posix())


def test_every_path_that_it_names_exists():
    named = set(re.findall(r"`((?:ligertune|kernels|tests|configs)/[\w/.-]+)`", TEXT))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    scripts = re.findall(r"`(?:scripts/)?((?:bench|check|plant|build|support)_\w+(?:\.py)?|gpu_check|sanitize)\b", TEXT)
    assert [name for name in scripts if not (ROOT / "scripts" / name).exists()] == []


def test_every_script_is_mentioned():
    scripts = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix == ""}
    assert [name for name in sorted(scripts) if f"`{name}" not in TEXT and f"scripts/{name}" not in TEXT] == []
    assert len(scripts) <= 12  # what else runs lies in a package below scripts/


def test_every_function_named_in_an_answer_is_defined_there():
    answers = re.findall(r"`([\w.]+)` in `([\w/.]+\.py)`", TEXT)
    assert len(answers) >= 6
    for name, path in answers:
        source = (ROOT / path).read_text(encoding="utf-8")
        for part in name.split("."):
            defined = re.search(rf"(def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE)
            assert defined, f"{path} does not define {name}"


@pytest.mark.slow
def test_the_files_that_a_batch_visits_are_listed(tmp_path, quickstart):
    """Two steps of the quickstart: reading the records, choosing the rows of a step, and the step itself."""
    roots = (prepare, Training.micro_batches, TrainStep.__call__, set_learning_rate)
    trace = FileTrace({root.__code__ for root in roots})
    settings = {
        "checkpoint.output_dir": tmp_path / "run",
        "train.max_steps": 2,
        "data.num_proc": 1,
        "data.cache": False,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    row_kinds()  # imports the kinds of rows of all features, which is no visit of the batch
    sys.setprofile(trace)
    try:
        run(plan_for(load_recipe(quickstart / "stories260k.yaml", overrides=overrides)), lambda line: None)
    finally:
        sys.setprofile(None)
    assert sorted(trace.files - set(LISTED)) == []
    assert len(LISTED) <= MAX_FILES
