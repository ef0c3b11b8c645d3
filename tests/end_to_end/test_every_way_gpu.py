"""Whole runs on a GPU: every optimizer, compiled layers, host offload, CUDA graphs and document attention."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from command_line import losses
from quickstart_runs import train

from ligertune.recipe.optimizer_table import OPTIMIZERS

pytestmark = pytest.mark.gpu

# Each step takes the same 16 records.
SETTINGS = {
    "model.dtype": "bfloat16",
    "data.datasets.0.max_samples": 16,
    "data.packing": False,
    "data.val_split": 0,
    "train.per_device_train_batch_size": 8,
    "train.gradient_accumulation_steps": 2,
    "train.max_steps": 6,
    "train.warmup_steps": 0,
    "train.learning_rate": 1e-3,
    "logging.logging_steps": 1,
    "checkpoint.save_strategy": "steps",
    "checkpoint.save_steps": 3,
}
# An SGD step is the gradient itself, a Lion step its sign, an Adafactor step relative to the weight.
LEARNING_RATES = {"sgd": 0.1, "lion": 2e-4, "adafactor": 1e-2, "galore_adamw": 5e-3, "muon": 5e-3}
COMPILED = {"train.torch_compile": True, "train.full_determinism": False}
SHORT = {"data.max_length": 256, "data.on_overlength": "truncate"}  # most batches then have one length
PACKED = {"data.packing": True, "train.per_device_train_batch_size": 1}
OFFLOAD = {
    "optimizer in the backward": {"train.optim_in_backward": True, "train.gradient_accumulation_steps": 1,
                                  "train.per_device_train_batch_size": 16, "train.max_grad_norm": 0},
    "offloaded optimizer": {"train.optim_offload": True},
    "offloaded activations": {"train.gradient_checkpointing": "offload"},
    "offloaded gates": {"train.gradient_checkpointing": "offload_gate"},
    "both offloaded, one layer not checkpointed": {"train.gradient_checkpointing": "offload_both",
                                           "train.gradient_checkpointing_layers": 4, "kernels.recompute": True},
}  # fmt: skip


def optimizer_case(name: str):
    package = OPTIMIZERS[name].needs
    absent = package is not None and find_spec(package) is None
    changes = {"train.optim": name, "train.learning_rate": LEARNING_RATES.get(name, 1e-3)}
    return pytest.param(changes, id=name, marks=pytest.mark.skipif(absent, reason=f"needs {package}"))


@pytest.mark.parametrize(
    "changes",
    [
        *(optimizer_case(name) for name in OPTIMIZERS),
        *(pytest.param(changes, id=name) for name, changes in OFFLOAD.items()),
        pytest.param({"method.type": "lora", "kernels.lora": True, "train.learning_rate": 1e-2}, id="fused adapters"),
        pytest.param({**COMPILED, **SHORT}, id="compiled"),
        pytest.param({**COMPILED, **SHORT, "train.gradient_checkpointing": True}, id="compiled and checkpointed"),
        pytest.param({**COMPILED, **PACKED}, id="compiled, packed"),
        pytest.param({"train.cuda_graphs": True, **PACKED}, id="CUDA graphs"),
        pytest.param({"kernels.attention": True, **PACKED}, id="document attention"),
        pytest.param(
            {"kernels.attention": True, **PACKED, "train.cuda_graphs": True}, id="document attention in CUDA graphs"
        ),
        pytest.param({"kernels.attention": True, **COMPILED, **PACKED}, id="document attention, compiled"),
        pytest.param(
            {"kernels.attention": True, **PACKED, "train.gradient_checkpointing": True},
            id="document attention, checkpointed",
        ),
    ],
)
def test_the_loss_falls_and_a_run_resumes_from_its_checkpoint(changes, tmp_path):
    train(tmp_path, **{**SETTINGS, **changes})
    whole = losses(tmp_path / "run")
    assert len(whole) == 6 and whole[-1] < whole[0] - 0.05
    step_3 = {"checkpoint.resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step-3"}
    train(tmp_path / "resumed", **{**SETTINGS, **changes, **step_3})
    compiled = COMPILED.items() <= changes.items()  # refuses full_determinism
    expected = pytest.approx(whole[3:], rel=1e-2) if compiled else whole[3:]
    assert losses(tmp_path / "resumed" / "run") == expected
