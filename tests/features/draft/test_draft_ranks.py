"""Draft heads trained on two ranks have the losses, the measures and the files of one process, with DDP and FSDP2."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.command_line import losses
from support.forked_ranks import on_ranks
from support.tasks.draft_runs import evaluations, train_draft

pytestmark = pytest.mark.slow

SETTINGS = {
    "train.max_steps": 3,
    "train.global_batch_size": 4,
    "logging.logging_steps": 1,
    "data.datasets.0.max_samples": 40,
    "data.max_length": 128,
    "draft.draft_vocab_size": 300,
    "checkpoint.save_strategy": "no",
    "model.dtype": "float32",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(losses, folder) of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return train_draft(folder, **SETTINGS, **{"train.per_device_train_batch_size": 4})[0], folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_the_head_of_one_process(strategy, one, tmp_path) -> None:
    expected, folder = one
    _compare_ranks(tmp_path, expected, folder, **{"parallel.strategy": strategy})


def test_two_ranks_hold_the_target_in_4_bits(tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    four_bits = {"draft.load_in_4bit": True}
    expected, _ = train_draft(tmp_path / "one", **SETTINGS, **four_bits, **{"train.per_device_train_batch_size": 4})
    _compare_ranks(tmp_path, expected, tmp_path / "one", **four_bits)


def _compare_ranks(tmp_path: Path, expected: list[float], folder: Path, **changes: object) -> None:
    settings = {**SETTINGS, "train.per_device_train_batch_size": 1, **changes}
    on_ranks(2, lambda rank: train_draft(tmp_path / "run", **settings) and None)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    found, wanted = evaluations(tmp_path / "run")[-1], evaluations(folder)[-1]
    for name in ("eval_loss", "eval_alpha_1", "eval_alpha_4", "eval_accepted_length"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4)
    for layout in ("eagle3", "speculators"):
        weights, own = (load_file(run / "draft" / layout / "model.safetensors") for run in (tmp_path / "run", folder))
        assert weights.keys() == own.keys()
        assert all((weights[name].float() - own[name].float()).abs().max() < 1e-4 for name in own)
