"""Plan and train short runs of the quickstart's recipe in this process."""

from pathlib import Path

import torch

from ligertune.recipe import Recipe, load_recipe
from ligertune.report import Report
from ligertune.run import run
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Job
from support.command_line import RECIPE, losses, overrides
from support.forked_ranks import on_ranks
from support.kept_ranks import kept_ranks

# The shortest instructions and answers of the quickstart, without a template: a fifth of the tokens.
SHORT_ROWS = {"data.datasets.0.path": Path(__file__).parent / "short_rows.jsonl"}
# The quickstart's rows, with their instructions in Alpaca's prompt.
ALPACA_ROWS = {"data.datasets.0.path": RECIPE.parent / "dolly_short.jsonl"}
SHORT = {
    **SHORT_ROWS,
    "data.datasets.0.max_samples": 40,
    "data.val_split": 0.1,
    "data.packing": False,  # so that a step holds the same number of examples whatever their lengths are
    "train.max_steps": 3,
    "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.warmup_ratio": 0.0,
    "logging.logging_steps": 1,
    "checkpoint.save_strategy": "no",
    "report.warmup_steps": 1,
}
# Two of the model's five layers, untrained: for runs that are compared with each other, half the time.
TWO_LAYERS = {"model.init": "random", "model.num_hidden_layers": 2}
# Steps of one row of 512 tokens, an eighth of the recipe's batch. For tests that expect no fixed losses.
ONE_ROW = {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 1}
# A recipe may hold only one key of each pair: a change of one drops the other.
EXCLUSIVE = {
    "train.max_steps": "train.num_train_epochs",
    "train.gradient_accumulation_steps": "train.global_batch_size",
    "train.warmup_ratio": "train.warmup_steps",
}
RESUME = {"checkpoint.resume_from_checkpoint": "auto"}


def bare_recipe(method: str = "full", **train: object) -> Recipe:
    paths = {"model": {"model_name_or_path": "m"}, "data": {"datasets": [{"path": "d"}]}}
    train = {"per_device_train_batch_size": "auto", **train}
    return Recipe(**paths, checkpoint={"output_dir": "o"}, method={"type": method}, train=train)


def saves(steps: int) -> dict[str, object]:
    """Return the settings that save a checkpoint every `steps` steps."""
    return {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": steps}


def recipe_for(folder: Path, **changes: object) -> Recipe:
    """Return the quickstart's recipe with a short run in `folder / "run"` and these changes."""
    return load_recipe(RECIPE, overrides=overrides(_settings(folder, changes))[1::2])


def _settings(folder: Path, changes: dict[str, object]) -> dict[str, object]:
    short = {key: value for key, value in SHORT.items() if EXCLUSIVE.get(key) not in changes}
    return {**short, "checkpoint.output_dir": folder / "run", **changes}


def plan_run(folder: Path, **changes: object) -> Job:
    """Return the planned run of `recipe_for`."""
    return plan_for(recipe_for(folder, **changes))


def train(folder: Path, **changes: object) -> Report:
    """Train the recipe of `recipe_for`; the run is in `folder / "run"`."""
    return run(plan_run(folder, **changes), lambda line: None)


def train_ranks(ranks: int, folder: Path, **changes: object) -> list[float]:
    """Train on one process or on several ranks. Returns the losses.

    On a CPU the ranks are forks of this process, which saves their imports. A process that uses CUDA cannot fork, and
    keeps its ranks for the next run.
    """
    if ranks == 1:
        train(folder, **changes)
    elif torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            import pytest  # scripts/gpu_check trains without it

            pytest.skip(f"needs {ranks} GPUs")
        kept_ranks(ranks).train(folder, changes)
    else:
        on_ranks(ranks, lambda rank: train(folder, **changes) and None)
    return losses(folder / "run")


def unfinished(folder: Path) -> Path:
    """Remove the report from the run in `folder`, as if the run had been killed. Returns the run's folder."""
    (folder / "run" / "report.json").unlink()
    return folder / "run"


def detach_loss(model: torch.nn.Module) -> None:
    """Let the loss depend on no parameter, as a wrong hook or wrapper would."""

    def detach(module: torch.nn.Module, arguments: tuple, output: object) -> object:
        if output.loss is not None:
            output.loss = output.loss.detach().requires_grad_()
        return output

    model.register_forward_hook(detach)
