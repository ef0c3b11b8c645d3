"""Every optimizer, compiled layers, and what is kept on the host, in whole runs on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from command_line import losses
from test_keys import read

from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.run import plan_for, run

pytestmark = pytest.mark.gpu

# each step takes the same 16 records, and saves after half of them
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
# sgd moves by the gradient itself, lion by its sign, adafactor by a share of each weight
RATES = {"sgd": 0.1, "lion": 2e-4, "adafactor": 1e-2, "galore_adamw": 5e-3, "muon": 5e-3}
COMPILED = {"train.torch_compile": True, "train.full_determinism": False}
SHORT = {"data.max_length": 256, "data.on_overlength": "truncate"}  # so that most batches have one length
PACKED = {"data.packing": True, "train.per_device_train_batch_size": 1}
HOST = {
    "optimizer in the backward": {"train.optim_in_backward": True, "train.gradient_accumulation_steps": 1,
                                  "train.per_device_train_batch_size": 16, "train.max_grad_norm": 0},
    "optimizer on the host": {"train.optim_offload": True},
    "activations on the host": {"train.gradient_checkpointing": "offload"},
    "gates on the host": {"train.gradient_checkpointing": "offload_gate"},
    "both on the host, a layer left out": {"train.gradient_checkpointing": "offload_both",
                                           "train.gradient_checkpointing_layers": 4, "kernels.recompute": True},
}  # fmt: skip


def one(name: str):
    package = OPTIMIZERS[name].needs
    absent = package is not None and find_spec(package) is None
    changes = {"train.optim": name, "train.learning_rate": RATES.get(name, 1e-3)}
    return pytest.param(changes, id=name, marks=pytest.mark.skipif(absent, reason=f"needs {package}"))


@pytest.mark.parametrize(
    "changes",
    [
        *(one(name) for name in OPTIMIZERS),
        *(pytest.param(changes, id=name) for name, changes in HOST.items()),
        pytest.param({"method.type": "lora", "kernels.lora": True, "train.learning_rate": 1e-2}, id="fused adapters"),
        pytest.param({**COMPILED, **SHORT}, id="compiled"),
        pytest.param({**COMPILED, **SHORT, "train.gradient_checkpointing": True}, id="compiled and checkpointed"),
        pytest.param({**COMPILED, **PACKED}, id="compiled, packed"),
        pytest.param({"train.cuda_graphs": True, **PACKED}, id="CUDA graphs"),
        pytest.param({"kernels.attention": True, **PACKED}, id="our attention"),
        pytest.param(
            {"kernels.attention": True, **PACKED, "train.cuda_graphs": True}, id="our attention in CUDA graphs"
        ),
        pytest.param({"kernels.attention": True, **COMPILED, **PACKED}, id="our attention, compiled"),
        pytest.param(
            {"kernels.attention": True, **PACKED, "train.gradient_checkpointing": True},
            id="our attention, checkpointed",
        ),
    ],
)
def test_the_loss_falls_and_a_run_goes_on_from_its_checkpoint(changes, quickstart, tmp_path):
    run(plan_for(read(quickstart, tmp_path, **{**SETTINGS, **changes})), lambda line: None)
    whole = losses(tmp_path / "run")
    assert len(whole) == 6 and whole[-1] < whole[0] - 0.05
    resumed = {
        **SETTINGS,
        **changes,
        "checkpoint.output_dir": tmp_path / "resumed",
        "checkpoint.resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step-3",
    }
    run(plan_for(read(quickstart, tmp_path, **resumed)), lambda line: None)
    # compiled layers refuse full_determinism
    assert losses(tmp_path / "resumed") == (pytest.approx(whole[3:], rel=1e-2) if COMPILED.items() <= changes.items()
                                            else whole[3:])  # fmt: skip
