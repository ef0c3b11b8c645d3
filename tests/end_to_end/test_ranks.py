"""One global batch, cut in four ways: the losses are the same to 1e-5."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import losses, overrides, run

STEPS = 5
SETTINGS = {
    "train.max_steps": STEPS,
    "train.global_batch_size": 8,
    "logging.logging_steps": 1,
    "checkpoint.save_strategy": "no",
    "data.datasets.0.max_samples": 35,  # an epoch ends inside a step
    "checkpoint.output_dir": "run",
    "model.dtype": "float32",
}


def two_ranks(*launcher: str) -> list[str]:
    """`accelerate launch` of ligertune with two processes."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--num_processes", "2"]
    quiet = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return [*accelerate, *quiet, "-m", "ligertune"]


def train(
    recipe: Path, cwd: Path, *, packing: bool, micro: int, launcher: tuple[str, ...] = (), **changes: object
) -> list[float]:
    """Losses of a run; `launcher` starts two ranks. Without packing, batches are grouped by length."""
    start = two_ranks(*launcher) if launcher else [sys.executable, "-m", "ligertune"]
    settings = {**SETTINGS, "data.packing": packing, "train.per_device_train_batch_size": micro, **changes}
    done = run([*start, "train", str(recipe), *overrides(settings)], cwd=cwd)
    assert done.code == 0, done.err[-3000:]
    return losses(cwd / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quickstart):
    """packing -> losses with micro batch 8, no accumulation, one process."""
    recipe = quickstart / "stories260k.yaml"
    return {packing: train(recipe, tmp_path_factory.mktemp("whole"), packing=packing, micro=8)
            for packing in (True, False)}  # fmt: skip


FSDP2 = ("--use_fsdp", "--fsdp_version", "2")
RECOMPUTED = {"kernels.recompute": True}  # reads weights in the backward that are gathered for others
GATES = {"train.gradient_checkpointing": "offload_gate"}
LEFT_OUT = {"train.gradient_checkpointing": "offload_both", "train.gradient_checkpointing_layers": 3, **RECOMPUTED}


@pytest.mark.parametrize(
    ("packing", "launcher", "changes"),
    [
        (True, (), {}),
        (True, ("--multi_gpu",), {}),
        (True, FSDP2, {}),
        pytest.param(True, FSDP2, RECOMPUTED, marks=pytest.mark.slow),
        pytest.param(True, FSDP2, GATES, marks=pytest.mark.slow),
        pytest.param(True, FSDP2, LEFT_OUT, marks=pytest.mark.slow),
        (False, (), {}),
        (False, ("--multi_gpu",), {}),
        (False, ("--multi_gpu",), {"data.padding_free": True}),
    ],
    ids=[
        "packed-1x8",
        "packed-ddp-2x4",
        "packed-fsdp2-2x4",
        "recompute-fsdp2-2x4",
        "gates-fsdp2-2x4",
        "left-out-fsdp2-2x4",
        "grouped-1x8",
        "grouped-ddp-2x4",
        "padding-free-ddp-2x4",
    ],
)
def test_losses_do_not_depend_on_how_the_batch_is_cut(whole, packing, launcher, changes, recipe, tmp_path):
    found = train(
        recipe,
        tmp_path,
        packing=packing,
        micro=4 if "data.padding_free" in changes else 1,
        launcher=launcher,
        **changes,
    )
    assert len(found) == STEPS
    assert found == pytest.approx(whole[packing], rel=1e-5)


@pytest.mark.slow
def test_ranks_share_a_stream_as_one_process_takes_it(recipe, tmp_path):
    streamed = {"packing": True, "data.streaming": "true", "data.val_split": 0, "data.datasets.0.max_samples": "null"}
    found = []
    for name, ways in {"alone": {"micro": 8}, "ranks": {"micro": 2, "launcher": ("--multi_gpu",)}}.items():
        (tmp_path / name).mkdir()
        found.append(train(recipe, tmp_path / name, **streamed, **ways))
    assert len(found[0]) == STEPS
    assert found[1] == pytest.approx(found[0], rel=1e-5)


NEEDS_TORCHAO = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("torchao"), reason="needs the package torchao (pip install 'ligertune[quant]')"),
]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="adamw"),
        *(
            pytest.param({"train.optim": name, "model.dtype": "bfloat16"}, id=name, marks=NEEDS_TORCHAO)
            for name in ("adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fp8")
        ),
    ],
)
def test_fsdp_saves_resumes_and_leaves_a_model_that_loads(changes, recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    start = two_ranks("--use_fsdp", "--fsdp_version", "2")
    settings = {
        **SETTINGS,
        "train.per_device_train_batch_size": 4,
        "checkpoint.save_strategy": "steps",
        "checkpoint.save_steps": 2,
        **changes,
    }
    first = run([*start, "train", str(recipe), *overrides(settings)], cwd=tmp_path)
    assert first.code == 0, first.err[-3000:]
    expected = losses(tmp_path / "run")
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "report.json").unlink()  # as if it had been killed after step 4
    again = run([*start, "train", str(recipe), *overrides(settings), "--resume"], cwd=tmp_path)
    assert again.code == 0, again.err[-3000:]
    assert losses(tmp_path / "run") == expected
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == weights
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
