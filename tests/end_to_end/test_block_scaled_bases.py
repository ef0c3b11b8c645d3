"""LoRA on MXFP4 and block-float8 bases: losses of the dequantised base, resumption, merged exports in both formats."""

import json
import shutil
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from support.command_line import losses
from support.models.base_checkpoints import same_bytes, tensors_in
from support.models.block_scaled_bases import FAMILIES, dequantised, write_dequantised, write_stored
from support.quickstart_runs import bare_recipe, plan_run, saves, train, train_ranks
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ligertune.errors import UserError
from ligertune.planning.parallelism import check_stored_base

SETTINGS = {
    "method.type": "lora",
    "method.lora_r": 4,
    "model.dtype": "float32",
    "train.max_steps": 5,
    "train.learning_rate": 2e-3,
    "train.gradient_checkpointing": True,
    **saves(3),
}
FORMATS = {"gpt_oss": "mxfp4", "qwen3": "fp8", "qwen3_moe": "fp8"}
SLOW = [pytest.param("qwen3_moe", marks=pytest.mark.slow)]


def settings(base: Path, **changes: object) -> dict[str, object]:
    return {**SETTINGS, "model.model_name_or_path": base, **changes}


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3", *SLOW])
def finished(request, tmp_path_factory) -> Path:
    """A finished run in `run/` on the model in `base/`, in a folder with the family's name."""
    folder = tmp_path_factory.mktemp("finished") / request.param
    write_stored(folder / "base", request.param)
    train(folder, **settings(folder / "base"))
    return folder


def log_probs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 400)[None].to(model.device)).logits.float().log_softmax(-1).cpu()


def divergence(of: nn.Module, other: nn.Module) -> float:
    """Return KL(of || other) per token."""
    p = log_probs(of)
    return float((p.exp() * (p - log_probs(other))).sum(-1).mean())


def original(family: str) -> nn.Module:
    """Return the 16-bit model that `write_stored` has quantised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.bfloat16).float()


def test_losses_are_those_of_the_dequantised_base(finished, tmp_path):
    train(tmp_path, **settings(write_dequantised(tmp_path / "dense", finished / "base")))
    found = losses(finished / "run")
    assert found == pytest.approx(losses(tmp_path / "run"), rel=1e-5) and len(found) == 5
    assert found[-1] < found[0]


def test_a_merged_export_is_pefts_merge_into_the_dequantised_base(finished, tmp_path, ligertune):
    from peft import PeftModel

    done = ligertune("export", finished / "run", "--out", tmp_path / "merged")
    assert done.code == 0, done.err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    expected = PeftModel.from_pretrained(dequantised(finished / "base"), finished / "run" / "model")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    torch.testing.assert_close(log_probs(merged), log_probs(expected.merge_and_unload()), rtol=1e-4, atol=1e-5)


def test_an_export_in_the_format_of_the_base_changes_the_adapted_tensors_only(finished, tmp_path, ligertune):
    base = finished / "base"
    name = FORMATS[finished.name]
    done = ligertune("export", finished / "run", "--out", tmp_path / "merged", "--format", name)
    assert done.code == 0, done.err
    assert "rounding moves the quantised weights by" in done.out + done.err
    for file in ("config.json", "model.safetensors.index.json", "generation_config.json"):
        assert (tmp_path / "merged" / file).read_bytes() == (base / file).read_bytes()
    for file in sorted(base.glob("*.safetensors")):
        header = int.from_bytes(file.read_bytes()[:8], "little") + 8
        assert (tmp_path / "merged" / file.name).read_bytes()[:header] == file.read_bytes()[:header]
    before, after = tensors_in(base), tensors_in(tmp_path / "merged")
    adapted = ("_proj_blocks", "_proj_scales", "_proj.weight", "_proj.weight_scale_inv")
    for tensor, value in before.items():
        changed = tensor.endswith(adapted)
        assert same_bytes(after[tensor], value) is not changed or tensor.endswith(("_scales", "_scale_inv")), tensor
        assert after[tensor].dtype == value.dtype and after[tensor].shape == value.shape

    # what the format loses of the merge, and of the weights before the base was quantised
    ligertune("export", finished / "run", "--out", tmp_path / "dense")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    requantised = dequantised(tmp_path / "merged")
    lost = divergence(merged, requantised)
    lost_by_base = divergence(original(finished.name), dequantised(base))
    print(f"KL per token, {finished.name}: merge to {name} {lost:.2e}, base to {name} {lost_by_base:.2e}")
    assert 0 < lost < 1.5 * lost_by_base
    weights = [name for name, p in merged.named_parameters() if "_proj" in name and p.ndim > 1]
    errors = {name: relative_error(merged.get_parameter(name), requantised.get_parameter(name)) for name in weights}
    # what rounding to these formats takes of normal weights; attention of gpt-oss is in 16 bits
    assert max(errors.values()) < {"mxfp4": 0.13, "fp8": 0.03}[FORMATS[finished.name]]


def relative_error(weight: Tensor, rounded: Tensor) -> float:
    return float((weight - rounded).norm() / weight.norm())


def test_generate_reads_the_adapter(finished, ligertune):
    done = ligertune("generate", finished / "run", "Once upon", "--max-new-tokens", "4")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(finished, tmp_path):
    checkpoint = {"checkpoint.resume_from_checkpoint": finished / "run" / "checkpoints" / "step-3"}
    train(tmp_path, **settings(finished / "base", **checkpoint))
    assert losses(tmp_path / "run") == losses(finished / "run")[3:]
    name = "run/model/adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.parametrize("family", FORMATS)
def test_two_ranks_have_the_losses_of_one(family, tmp_path):
    """Under DDP, which broadcasts every parameter that it is not told to ignore."""
    write_stored(tmp_path / "base", family)
    changes = {"train.max_steps": 3, "checkpoint.save_strategy": "no", "train.per_device_train_batch_size": 1,
               "train.global_batch_size": 4}  # fmt: skip
    one, two = (train_ranks(ranks, tmp_path / str(ranks), **settings(tmp_path / "base", **changes)) for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-5) and len(two) == 3


def test_the_plan_counts_stored_bytes_and_the_largest_dequantised_weight(finished, tmp_path):
    base = finished / "base"
    held = plan_run(tmp_path / "held", **settings(base)).plan
    dense = plan_run(tmp_path / "dense", **settings(write_dequantised(tmp_path / "base", base))).plan
    files = tensors_in(base)
    saved = sum(
        4 * dequantised_size(name, value) - value.nbytes - scales_of(name, files).nbytes
        for name, value in files.items()
        if name.endswith("_blocks") or value.dtype == torch.float8_e4m3fn
    )
    assert dense.bytes.weights - held.bytes.weights == pytest.approx(saved, abs=8)
    parameters = dequantised(base).named_parameters()
    sizes = [p.numel() for name, p in parameters if "layers.0." in name and (p.ndim == 3 or "_proj.weight" in name)]
    # gate_up and down of one layer are kept; of linear layers the largest
    buffer = 4 * (max(sizes) if finished.name == "qwen3" else sum(size for size in sizes if size > 8192))
    extra = held.memory.workspace - dense.memory.workspace
    assert extra >= buffer if finished.name != "qwen3" else extra == buffer


def dequantised_size(name: str, value: Tensor) -> int:
    return value.numel() * (2 if name.endswith("_blocks") else 1)


def scales_of(name: str, files: dict[str, Tensor]) -> Tensor:
    return files[name.replace("_blocks", "_scales") if name.endswith("_blocks") else f"{name}_scale_inv"]


REFUSALS = {
    "train.fp8: the base's weights stay in": {"train.fp8": True, "model.dtype": "bfloat16"},
    "method.init_lora_weights: pissa changes the weights of the base": {"method.init_lora_weights": "pissa"},
    r"lora_modules_to_save: model.layers.0.mlp.down_proj stays in the block-scaled format": {
        "method.lora_modules_to_save": ["down_proj"], "method.lora_target_modules": ["q_proj"],
    },
    r"are quantised already \(fp8\)": {"method.type": "qlora"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_what_does_not_work_on_such_a_base_is_refused_before_training(message, tmp_path):
    write_stored(tmp_path / "base", "qwen3")
    with pytest.raises(UserError, match=message):
        plan_run(tmp_path, **settings(tmp_path / "base", **REFUSALS[message]))


def test_weights_of_few_bits_are_not_sharded():
    with pytest.raises(UserError, match=r"parallel\.strategy: fsdp shards weights, and the base's weights stay"):
        check_stored_base(bare_recipe("lora"), "fsdp", is_stored=True)
    check_stored_base(bare_recipe("lora"), "ddp", is_stored=True)
    check_stored_base(bare_recipe("lora"), "fsdp", is_stored=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_compiled_layers_have_the_same_losses(family, tmp_path, monkeypatch):
    """aot_eager saves half a minute of the C++ compiler."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    write_stored(tmp_path / "base", family)
    changes = {"train.max_steps": 2, "checkpoint.save_strategy": "no"}
    for compiled in (False, True):
        train(tmp_path / str(compiled), **settings(tmp_path / "base", **changes, **{"train.torch_compile": compiled}))
    found, expected = (losses(tmp_path / str(compiled) / "run") for compiled in (True, False))
    assert found == pytest.approx(expected, rel=1e-5)


def test_full_training_reads_the_dequantised_weights(tmp_path):
    write_stored(tmp_path / "base", "qwen3")
    changes = {"method.type": "full", "train.max_steps": 2, "checkpoint.save_strategy": "no"}
    found = []
    for base in (tmp_path / "base", write_dequantised(tmp_path / "dense", tmp_path / "base")):
        train(tmp_path / f"run_{base.name}", **settings(base, **changes))
        found.append(losses(tmp_path / f"run_{base.name}" / "run"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_formats_that_cannot_be_written_are_refused(finished, tmp_path, ligertune):
    def refusal(*arguments: object) -> str:
        done = ligertune("export", *arguments, "--out", tmp_path / "merged")
        assert done.code == 2 and not (tmp_path / "merged").exists()
        return done.err

    run = finished / "run"
    other = "fp8" if FORMATS[finished.name] == "mxfp4" else "mxfp4"
    stored = FORMATS[finished.name]
    assert f"--format: {other} is not the format of" in refusal(run, "--format", other)
    assert f"Or write --format {stored}" in refusal(run, "--format", other)
    assert "--format: int4 is unknown" in refusal(run, "--format", "int4")
    assert "Leave one out" in refusal(run, "--format", stored, "--adapter")
    assert "rounds to fewer" in refusal(run, "--format", stored, "--check")
    assert "--checkpoint names a checkpoint" in refusal(run, "--format", stored, "--checkpoint", "step-3")
    assert "holds a whole model" in refusal(finished / "base", "--format", stored)


def test_more_than_plain_lora_is_not_written_back(tmp_path, ligertune):
    write_stored(tmp_path / "base", "qwen3")
    changes = {"method.lora_modules_to_save": ["lm_head"], "train.max_steps": 1, "checkpoint.save_strategy": "no"}
    train(tmp_path, **settings(tmp_path / "base", **changes))
    done = ligertune("export", tmp_path / "run", "--out", tmp_path / "merged", "--format", "fp8")
    assert done.code == 2 and "trains all of lm_head, and only plain LoRA is written back" in done.err
    assert not (tmp_path / "merged").exists()
    shutil.rmtree(tmp_path / "run")


def test_plans_say_how_the_base_is_held(finished, tmp_path):
    held, full = (
        plan_run(tmp_path / method, **settings(finished / "base", **{"method.type": method})).plan.notes
        for method in ("lora", "full")
    )
    name = FORMATS[finished.name]
    assert any(note.startswith(f"the weights of the base stay in {name} (") for note in held)
    assert any(f"stored in {name}, and are dequantised while they are loaded: only adapters" in note for note in full)
