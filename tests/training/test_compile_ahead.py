"""Kernels of the first step that compile while the model is loaded: which ones, and that training does not change."""

import pytest
import torch
from accelerate import Accelerator
from ligertune_kernels.launcher import TRITON_INSTALLED, meta_runs_as
from ligertune_kernels.precompile import launched_forms

if not TRITON_INSTALLED:
    pytest.skip("there is no kernel to compile", allow_module_level=True)
from support.kernels.pretend_gpu import TARGETS, PretendDriver
from support.quickstart_runs import plan_run, recipe_for
from triton.runtime import driver

from ligertune.run import run
from ligertune.training import compile_ahead, session
from ligertune.training.resolve import plan_for

META = torch.device("meta")


@pytest.fixture
def h100(monkeypatch):
    """Let meta tensors run as on an H100, and rehearse runs of the CPU."""
    if torch.cuda.is_available():
        pytest.skip("a run would launch its kernels on the pretended GPU")
    monkeypatch.setattr(driver, "_active", PretendDriver(TARGETS["sm90"]))
    with meta_runs_as(TARGETS["sm90"]):
        yield


@pytest.mark.parametrize(("method", "packing"), [("full", True), ("lora", False)])
def test_a_rehearsal_finds_kernels_of_forward_and_backward(method, packing, h100, tmp_path):
    job = plan_run(tmp_path, **{"method.type": method, "data.packing": packing, "model.dtype": "bfloat16"})
    forms = launched_forms(lambda: session.rehearse_step(job, Accelerator(cpu=True)), META)
    folders = {form.kernel.__module__.split(".")[2] for form in forms}
    assert folders == {"norms", "attention", "mlp", "losses"}
    names = {form.name for form in forms}
    assert {"forward_kernel", "backward_kernel", "_backward_kernel", "row_kernel", "_rope_kernel"} <= names


def losses_of(folder, **changes):
    shown = []
    report = run(plan_for(recipe_for(folder, **changes)), shown.append)
    return [line["loss"] for line in shown if "loss" in line], report


def test_a_rehearsal_and_its_error_change_no_loss(h100, monkeypatch, tmp_path):
    # its weights and its dropout are random
    lora = {"method.type": "lora", "method.lora_dropout": 0.1, "train.max_steps": 2, "checkpoint.save_model": False}
    expected, _ = losses_of(tmp_path / "without", **lora)
    monkeypatch.setattr(session, "is_rehearsed", lambda job, device: True)
    rehearsed = []

    def forms_on_meta(rehearsal, device):
        rehearsed.extend(launched_forms(rehearsal, META))
        return []

    monkeypatch.setattr(compile_ahead, "launched_forms", forms_on_meta)
    found, report = losses_of(tmp_path / "with", **lora)
    assert rehearsed and found == expected
    assert not any("rehearsal" in note for note in report.notes)

    def fail(rehearsal, device):
        raise RuntimeError("no meta kernel")

    monkeypatch.setattr(compile_ahead, "launched_forms", fail)
    found, report = losses_of(tmp_path / "failed", **lora)
    assert found == expected
    assert any("the rehearsal failed: no meta kernel" in note for note in report.notes)


def test_runs_whose_step_needs_values_or_compiled_layers_are_not_rehearsed(tmp_path):
    gpu = torch.device("cuda")
    assert session.is_rehearsed(plan_run(tmp_path), gpu)
    assert not session.is_rehearsed(plan_run(tmp_path), torch.device("cpu"))
    assert not session.is_rehearsed(plan_run(tmp_path, **{"kernels.enabled": False}), gpu)
    assert not session.is_rehearsed(plan_run(tmp_path, **{"train.torch_compile": True}), gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_gpu_trains_with_kernels_that_were_compiled_before(method, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ahead = []
    forms = compile_ahead.launched_forms
    monkeypatch.setattr(compile_ahead, "launched_forms", lambda *args: ahead.extend(found := forms(*args)) or found)
    found, report = losses_of(tmp_path, **{"method.type": method, "data.packing": True, "model.dtype": "bfloat16"})
    assert len(ahead) >= 8 and found[-1] < found[0]
    assert not any("rehearsal" in note or "compiled" in note for note in report.notes)
