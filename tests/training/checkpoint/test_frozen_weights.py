"""Two ranks under FSDP2: checkpoints leave frozen weights out, and a resumed run has those of the base model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft  # noqa: F401  # once here, and not in each rank
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import RECIPE, losses, weights
from support.forked_ranks import on_ranks
from support.quickstart_runs import RESUME, TWO_LAYERS, plan_run, recipe_for, saves, train_ranks, unfinished
from torch.distributed.checkpoint import FileSystemReader

from ligertune.errors import UserError
from ligertune.features.task import Task
from ligertune.models.adapters.initial_lora import PREFIX, initial_factors, restore_initial
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.plan import Plan
from ligertune.run import run
from ligertune.training.checkpoint.checkpoint_files import Saver, check_space, save_checkpoint
from ligertune.training.checkpoint.load_checkpoint import MODEL_SHARDS
from ligertune.training.checkpoint.weight_files import INITIAL_FILE
from ligertune.training.resolve import plan_for
from ligertune.training.setup import Custom, Training

SETTINGS = {
    **TWO_LAYERS,
    "data.datasets.0.max_samples": 20,
    "train.max_steps": 3,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 0.01,
    "model.dtype": "float32",
    "parallel.strategy": "fsdp",
    **saves(2),
}
LORA = {"method.type": "lora", "method.lora_r": 4}
FREEZE = {"method.type": "freeze", "method.trainable": "[layers.1.mlp, norm.weight]"}
PRETRAINED = {"model.init": "pretrained", "model.num_hidden_layers": "null"}
METHODS_FROM_WEIGHTS = {
    "pissa": {**LORA, "method.init_lora_weights": "pissa"},
    "qlora, pissa": {
        **PRETRAINED,
        "method.type": "qlora", "method.lora_r": 4, "method.init_lora_weights": "pissa",
        "method.bnb_4bit_quant_storage": "float32",
    },
}  # fmt: skip
# by the number of ranks: one process accumulates, and takes the batch that two ranks take
ON = {1: {"parallel.strategy": "single", "train.gradient_accumulation_steps": 2}, 2: {}}
ASYNC = {"checkpoint.async_save": True}


def stored_in(checkpoint: Path) -> dict[str, int]:
    """Return the bytes of each weight in the shards of a checkpoint."""
    entries = FileSystemReader(checkpoint / MODEL_SHARDS).read_metadata().state_dict_metadata
    return {name.removeprefix("model."): entry.size.numel() * entry.properties.dtype.itemsize
            for name, entry in entries.items()}  # fmt: skip


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_model(run_folder: Path) -> bytes:
    """Return the saved model of a run, or its adapter."""
    adapter = run_folder / "model" / "adapter_model.safetensors"
    return adapter.read_bytes() if adapter.is_file() else weights(run_folder)


def resumes_to_the_same_bits(folder: Path, settings: dict[str, object]) -> None:
    expected, model = losses(folder / "run"), run_model(unfinished(folder))
    assert train_ranks(2, folder, **settings, **RESUME) == expected
    assert json.loads((folder / "run" / "report.json").read_text())["resumed_from"] == 2
    assert run_model(folder / "run") == model


@pytest.mark.parametrize(
    ("method", "save"),
    [
        (LORA, {}),
        (FREEZE, ASYNC),
        pytest.param(LORA, ASYNC, marks=pytest.mark.slow),
        pytest.param(FREEZE, {}, marks=pytest.mark.slow),
    ],
    ids=["lora", "freeze, async", "lora, async", "freeze"],
)
def test_a_checkpoint_holds_what_trains_and_resumes_to_the_same_bits(method, save, tmp_path):
    settings = {**SETTINGS, **method, **save}
    train_ranks(2, tmp_path, **settings)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    trained = 4 * plan["n_trainable"]
    frozen = 4 * plan["n_parameters"] - trained
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    assert sum(stored_in(checkpoint).values()) == trained
    assert bytes_in(checkpoint / MODEL_SHARDS) < trained + frozen / 2  # each tensor has a header of 1 to 2 kB
    resumes_to_the_same_bits(tmp_path, settings)


class EarlierSaver(Saver):
    """Writes checkpoints as earlier versions did: with frozen weights, and without initial adapters."""

    def save(self, step: int) -> None:
        save_checkpoint(self._accelerator, self._plan, step)


def with_earlier_saver(training: Training) -> Training:
    plan = training.plan
    return replace(training, saver=EarlierSaver(training.accelerator, plan, training.model, training.optimizer))


def on_another_base(model: torch.nn.Module) -> None:
    """Change a frozen weight, so that a resumed run shows which one it has."""
    model.get_submodule("model.embed_tokens").weight.data.mul_(1.5)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_checkpoint_of_an_earlier_version_gives_its_frozen_weights_back(ranks, tmp_path):
    settings = {**SETTINGS, **LORA}
    earlier = Custom(setup=with_earlier_saver)

    def train_earlier(rank: int) -> None:
        run(plan_run(tmp_path, **settings), lambda line: None, change=on_another_base, custom=earlier)

    on_ranks(2, train_earlier)
    expected = losses(unfinished(tmp_path))
    assert any("base_layer" in name for name in stored_in(tmp_path / "run" / "checkpoints" / "step-2"))
    assert train_ranks(ranks, tmp_path, **{**settings, **RESUME, **ON[ranks]}) == pytest.approx(expected, rel=1e-6)
    assert losses(tmp_path / "run")[:2] == expected[:2]


def start_elsewhere(plan: Plan, model: torch.nn.Module) -> Task:
    """Return the task of a run whose machine has computed other initial adapters than this one."""
    factors = initial_factors(model)
    restore_initial(model, {name: t * 1.5 if ".lora_A." in name else t for name, t in factors.items()})
    return feature_of("sft").task(plan, model)


@pytest.mark.parametrize(
    ("method", "save", "ranks"),
    [
        ("pissa", {}, 2),
        pytest.param("pissa", ASYNC, 1, marks=pytest.mark.slow),
        pytest.param("qlora, pissa", ASYNC, 2, marks=pytest.mark.slow),
        pytest.param("qlora, pissa", {}, 1, marks=pytest.mark.slow),
    ],
    ids=["pissa", "pissa on one process", "qlora", "qlora on one process"],
)
def test_initial_adapters_of_a_checkpoint_replace_those_that_a_resumed_run_computes(method, save, ranks, tmp_path):
    settings = {**SETTINGS, **METHODS_FROM_WEIGHTS[method], **save}

    def train_elsewhere(rank: int) -> None:
        run(plan_run(tmp_path, **settings), lambda line: None, custom=Custom(task=start_elsewhere))

    on_ranks(2, train_elsewhere)
    expected = losses(unfinished(tmp_path))
    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    assert all(".lora_" in name for name in stored_in(checkpoint))
    saved = load_file(checkpoint / INITIAL_FILE)
    assert len(saved) == len(stored_in(checkpoint)) and all(name.startswith(PREFIX) for name in saved)
    assert train_ranks(ranks, tmp_path, **{**settings, **RESUME, **ON[ranks]}) == pytest.approx(expected, rel=1e-5)
    found = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all((found[name] - adapter[name]).abs().max() < 1e-5 for name in adapter)


@pytest.mark.parametrize("method", [pytest.param(LORA, marks=pytest.mark.slow), FREEZE], ids=["lora", "freeze"])
def test_the_best_weights_are_those_that_train_and_the_final_model_has_them(method, tmp_path):
    """The learning rate of the second step is too high."""
    evaluated = {"data.val_split": 0.2, "eval.eval_strategy": "steps", "eval.eval_steps": 1}
    rising = {"train.max_steps": 2, "train.learning_rate": 0.03, "train.warmup_steps": 2}
    best_at_end = {"checkpoint.load_best_model_at_end": True}
    settings = {**SETTINGS, **PRETRAINED, **method, **evaluated, **rising, **best_at_end}
    train_ranks(2, tmp_path, **settings)
    folder = tmp_path / "run"
    found = losses(folder, "eval_loss")
    assert min(found) < found[-1]
    best = load_file(folder / "best" / "trained.safetensors")
    assert sum(t.numel() for t in best.values()) == json.loads((folder / "plan.json").read_text())["n_trainable"]
    expected = {name.replace(".default.", "."): t for name, t in best.items()}
    if method is FREEZE:
        base = load_file(RECIPE.parent / "stories260K" / "model.safetensors")
        assert expected.keys() < base.keys()
        expected = base | expected
    model = load_file(next((folder / "model").glob("*.safetensors")))
    assert model.keys() == expected.keys() and all(torch.equal(model[name], t) for name, t in expected.items())


@pytest.mark.parametrize("method", [LORA, FREEZE, METHODS_FROM_WEIGHTS["pissa"]], ids=["lora", "freeze", "pissa"])
def test_space_is_checked_for_what_checkpoints_hold(method, tmp_path, monkeypatch):
    plan = plan_for(recipe_for(tmp_path, **SETTINGS, **method), processes=2).plan
    trained = 4 * plan.n_trainable
    starts = trained if "method.init_lora_weights" in method else 0
    checkpoint = 3 * trained + starts  # with both moments of AdamW
    model = trained if method["method.type"] == "lora" else 4 * plan.n_parameters
    for free in (3 * checkpoint + model + 16, 3 * checkpoint + model - 16):  # bytes of shards are rounded
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        if free < 3 * checkpoint + model:
            with pytest.raises(UserError, match="this run's saves need"):
                check_space(plan)
        else:
            check_space(plan)
