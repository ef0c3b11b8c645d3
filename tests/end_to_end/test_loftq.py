"""LoftQ: the adapter of a QLoRA run starts as the best approximation of what 4 bits have lost."""

import json

import pytest
import torch
from peft.utils.loftq_utils import _low_rank_decomposition
from support.command_line import RECIPE, losses
from support.models.merged_adapters import expect_logits_of_adapter
from support.quickstart_runs import plan_run, saves, train
from transformers import AutoModelForCausalLM

from ligertune.models.adapters.loftq import low_rank_factors
from ligertune.patching.lora.fused_lora import adapted_layers
from ligertune.training.build import trained_model
from ligertune.training.parallel.distributed import start_accelerator

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

BASE = RECIPE.parent / "stories260K"
LOFTQ = {
    "method.type": "qlora", "method.init_lora_weights": "loftq", "method.lora_r": 8, "method.lora_alpha": 24,
    "model.model_name_or_path": BASE, "model.dtype": "float32", "train.learning_rate": 0.02,
}  # fmt: skip


@pytest.mark.parametrize(("rows", "cols", "rank"), [(12, 20, 4), (20, 12, 12), (3, 8, 5)], ids=str)
def test_the_factors_are_pefts_for_scale_one_and_the_best_of_their_rank(rows, cols, rank):
    error = torch.randn(rows, cols, dtype=torch.float64)
    b, a = low_rank_factors(error, rank, scale=1.0)
    assert (b.shape, a.shape) == ((rows, rank), (rank, cols))
    if rank < min(rows, cols):
        theirs = _low_rank_decomposition(error, reduced_rank=rank)
        torch.testing.assert_close((b, a), (theirs["L"], theirs["R"]))
    lost = torch.linalg.svdvals(error)[rank:].norm()  # Eckart and Young 1936
    for scale in (1.0, 0.25, 7.0):
        b, a = low_rank_factors(error, rank, scale=scale)
        torch.testing.assert_close((error - scale * (b @ a)).norm(), lost, rtol=1e-9, atol=1e-9)


def test_a_run_starts_nearer_to_the_original_weights_than_qlora_does(tmp_path):
    job = plan_run(tmp_path, **LOFTQ, **{"method.use_rslora": True, "kernels.lora": True})
    assert any("loftq: each process reads the weights once more" in note for note in job.plan.notes)
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    original = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    layers = adapted_layers(model)
    assert len(layers) == 35
    names = {id(module): name for name, module in model.get_base_model().named_modules()}
    for layer in layers:
        base = layer.get_base_layer()
        weight = original.get_submodule(names[id(layer)]).weight
        frozen = bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
        update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        lost = torch.linalg.svdvals(weight - frozen)[8:].norm()
        torch.testing.assert_close((weight - frozen - update).norm(), lost, rtol=1e-3, atol=1e-5)
        assert 0 < lost < (weight - frozen).norm()


@pytest.mark.slow
def test_a_run_resumes_and_its_adapter_works_on_plain_four_bit_weights(tmp_path, ligertune):
    settings = {**LOFTQ, "train.max_steps": 4, **saves(2)}
    train(tmp_path / "first", **settings)
    run = tmp_path / "first" / "run"
    again = {"checkpoint.resume_from_checkpoint": run / "checkpoints" / "step-2"}
    train(tmp_path / "again", **settings, **again)
    assert losses(tmp_path / "again" / "run") == losses(run)[2:]
    saved = json.loads((run / "model" / "adapter_config.json").read_text("utf-8"))
    assert saved["init_lora_weights"] is True and saved["r"] == 8  # PEFT changes no weight when it loads the adapter
    done = ligertune("export", run, "--out", tmp_path / "merged", "--check", "--json")
    assert done.code == 0, done.err
    expect_logits_of_adapter(tmp_path / "merged", run / "model")
