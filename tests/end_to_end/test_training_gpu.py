"""Whole runs on a GPU: every optimizer, compilation, offload, graphs and attention; and a host that runs ahead."""

import collections
import json
import warnings
from importlib.util import find_spec

import pytest
import torch
from support.command_line import losses, metrics
from support.quickstart_runs import plan_run, saves, train

from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.run import run

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
    **saves(3),
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
        pytest.param(
            {"method.type": "qlora", "kernels.lora": True, "train.learning_rate": 1e-2},
            id="fused adapters, 4 bits",
            marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
        ),
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


def synchronisations(folder, *, steps: int, **settings) -> collections.Counter:
    """Count, per source line, how often a run of so many steps synchronises with its device."""
    run_folder = folder / f"of-{steps}-steps"
    shared = {
        "train.max_steps": steps,
        "checkpoint.save_strategy": "no",
        "eval.eval_strategy": "no",
        "data.val_split": 0,
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "parallel.num_processes": 1,
    }
    job = plan_run(run_folder, **shared, **settings)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(job, lambda line: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [line for line in metrics(run_folder / "run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["seconds"] > 0 for line in lines)
    return collections.Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))


WAYS = {
    "packed": {"data.packing": True},
    "padding-free": {"data.packing": False, "data.padding_free": True},
    "padded": {"data.packing": False, "data.padding_free": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_more_steps_do_not_synchronise_more_often(way, tmp_path):
    settings = {**WAYS[way], "logging.logging_steps": 1}
    short, long = (synchronisations(tmp_path, steps=steps, **settings) for steps in (8, 16))
    grown = {place: (short[place], long[place]) for place in long if long[place] > short[place]}
    assert not grown


def test_the_seconds_of_the_lines_add_up_to_the_time_of_the_run(tmp_path):
    """The lines take their seconds from the device, the report from the host's clock."""
    synchronisations(tmp_path, steps=16, **{"logging.logging_steps": 1})
    report = json.loads((tmp_path / "of-16-steps" / "run" / "report.json").read_text())
    logged = [line for line in metrics(tmp_path / "of-16-steps" / "run") if "loss" in line]
    lines = logged[report["throughput"]["warmup_steps_excluded"] :]
    rate = sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)
    assert rate == pytest.approx(report["throughput"]["tokens_per_second"], rel=0.05)
