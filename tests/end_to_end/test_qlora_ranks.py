"""QLoRA under FSDP2: two ranks share the bytes of 4-bit weights, and train, resume and export as one process does."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import RECIPE, losses
from support.models import tiny_models
from support.quickstart_runs import TWO_LAYERS, bare_recipe, plan_run, saves, train, train_ranks
from torch.distributed.checkpoint import FileSystemReader

from ligertune.errors import UserError
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.planning.memory.states import states_of
from ligertune.planning.options import MethodOptions
from ligertune.planning.parallelism import check_four_bit_experts
from ligertune.training.build import trained_model
from ligertune.training.parallel.distributed import leave_quant_states, start_accelerator

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

QLORA = {
    "method.type": "qlora", "method.lora_r": 4, "model.model_name_or_path": RECIPE.parent / "stories260K",
    "train.max_steps": 4, "train.learning_rate": 0.02, **saves(2),
}  # fmt: skip
SHARDED = {
    "parallel.strategy": "fsdp", "method.bnb_4bit_quant_storage": "bfloat16", "train.gradient_accumulation_steps": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "changes",
    [
        {"model.dtype": "bfloat16"},
        {"model.dtype": "float32", "method.bnb_4bit_quant_type": "fp4", "method.bnb_4bit_use_double_quant": False},
        {"model.dtype": "bfloat16", "kernels.lora": True, "train.gradient_checkpointing": True},
        {"model.dtype": "float32", "method.init_lora_weights": "pissa", "kernels.lora": True},
    ],
    ids=["nf4", "fp4", "fused", "pissa"],
)
def test_two_ranks_train_resume_and_export_as_one_process(changes, tmp_path, ligertune):
    alone = train_ranks(1, tmp_path / "one", **QLORA, **changes)
    assert train_ranks(2, tmp_path / "two", **QLORA, **SHARDED, **changes) == pytest.approx(alone, rel=1e-5)
    run = tmp_path / "two" / "run"
    one, two = (load_file(tmp_path / name / "run" / "model" / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
    checkpoint = run / "checkpoints" / "step-2"
    stored = FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert len(stored) == 5 * 7 * 2 and all(".lora_" in name for name in stored)
    again = {"checkpoint.resume_from_checkpoint": checkpoint}
    assert train_ranks(2, tmp_path / "again", **QLORA, **SHARDED, **changes, **again) == losses(run)[2:]
    train(tmp_path / "whole", **QLORA, **changes, **again)  # one process reads the shards
    assert losses(tmp_path / "whole" / "run") == pytest.approx(losses(run)[2:], rel=1e-5)
    done = ligertune("export", run, "--out", tmp_path / "merged", "--check", "--json")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_two_ranks_go_on_from_a_checkpoint_of_one_process(tmp_path):
    train(tmp_path / "one", **QLORA, **{"model.dtype": "float32"})
    again = {"checkpoint.resume_from_checkpoint": tmp_path / "one" / "run" / "checkpoints" / "step-2"}
    found = train_ranks(2, tmp_path / "two", **QLORA, **SHARDED, **again, **{"model.dtype": "float32"})
    assert found == pytest.approx(losses(tmp_path / "one" / "run")[2:], rel=1e-5)


def test_fused_adapters_read_the_bytes_that_fsdp_has_gathered(tmp_path):
    settings = {**QLORA, **TWO_LAYERS, "train.max_steps": 2, "checkpoint.save_strategy": "no", "model.dtype": "float32"}
    usual = train_ranks(1, tmp_path / "usual", **settings, **{"kernels.lora": False})
    storage = {"method.bnb_4bit_quant_storage": "float32"}  # four bytes in each element
    fused = train_ranks(2, tmp_path / "fused", **settings, **SHARDED | storage, **{"kernels.lora": True})
    assert fused == pytest.approx(usual, rel=1e-5)
    report = json.loads((tmp_path / "fused" / "run" / "report.json").read_text())
    assert [row["applied"] for row in report["kernels"] if row["kernel"] == "lora_linear"] == [14]


def test_the_plan_shards_the_bytes_and_not_the_scales():
    shape = read_shape(apply_method(tiny_models.make("llama"), MethodOptions(type="qlora", lora_r=4)))
    whole, shard = (
        states_of(bare_recipe("qlora"), shape.parameters, "bfloat16", strategy=strategy, world_size=4)
        for strategy in ("ddp", "fsdp")
    )
    quantised = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    scales = quantised * (1 / 64 + 4 / (64 * 256))
    assert shard.weights == pytest.approx((whole.weights - scales) / 4 + scales, abs=1)
    assert shard.gradients * 4 == pytest.approx(whole.gradients, abs=4)


def test_state_dicts_of_4_bit_layers_hold_bytes_alone():
    layer = bitsandbytes.nn.Linear4bit(64, 32, bias=True).to("cpu")
    model = torch.nn.Sequential(layer, torch.nn.Linear(32, 4))
    assert any("absmax" in name for name in model.state_dict())
    leave_quant_states(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_without_sharding_the_dtype_of_the_bytes_has_no_effect_and_the_plan_says_so(tmp_path):
    job = plan_run(tmp_path, **QLORA, **{"method.bnb_4bit_quant_storage": "bfloat16", "kernels.lora": True})
    assert "method.bnb_4bit_quant_storage: bfloat16 has no effect without parallel.strategy: fsdp" in job.plan.notes
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    stored = {p.dtype for name, p in model.named_parameters() if name.endswith("q_proj.base_layer.weight")}
    assert stored == {torch.uint8}


def test_what_is_not_sharded_is_refused(tmp_path):
    for changes, words in (
        ({"parallel.strategy": "fsdp"}, "uint8, which"),
        ({"parallel.cpu_offload": True}, "are sharded by parallel.strategy: fsdp alone"),
        ({"parallel.strategy": "deepspeed_zero3"}, "Write method.type: lora, or ddp"),
    ):
        with pytest.raises(UserError, match=words):
            plan_run(tmp_path, **QLORA, **changes)


def test_experts_in_four_bits_are_not_sharded():
    method = {"type": "qlora", "bnb_4bit_quant_storage": "bfloat16"}
    recipe = bare_recipe().model_copy(update={"method": MethodOptions(**method)})
    for strategy, experts in (("ddp", True), ("fsdp", False)):
        check_four_bit_experts(recipe, strategy, experts=experts)
    with pytest.raises(UserError, match="4-bit weights of a mixture's experts cannot be sharded"):
        check_four_bit_experts(recipe, "fsdp", experts=True)
