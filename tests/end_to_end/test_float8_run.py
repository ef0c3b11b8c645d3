"""train.fp8, from the recipe to a model that others load. On a CPU float8 is emulated, by torchao."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from command_line import losses, overrides
from test_keys import read
from test_ranks import FSDP2, train

from ligertune.errors import UserError
from ligertune.planning.preflight import check_packages
from ligertune.run import plan_for, run

WITHOUT = find_spec("torchao") is None
needs_torchao = pytest.mark.skipif(WITHOUT, reason="needs torchao: pip install 'ligertune[quant]'")
FLOAT8 = {"train.fp8": "true"}
# Of the quickstart's model, 64 wide; measured: 0.5 % in 10 steps.
BOUND = 0.01


def trained(quickstart, folder, **changes: object) -> list[float]:
    folder.mkdir(exist_ok=True)
    run(plan_for(read(quickstart, folder, **changes)), lambda line: None)
    return losses(folder / "run")


@needs_torchao
def test_the_key_is_in_the_plan_with_what_it_takes_and_leaves(quickstart, tmp_path):
    plans = [plan_for(read(quickstart, tmp_path, **changes), for_show=True).plan for changes in ({}, FLOAT8)]
    lines = [{line.kernel: line for line in plan.kernels} for plan in plans]
    assert "float8_linear" not in lines[0]
    taken = lines[1]["float8_linear"]
    assert (taken.applied, taken.left) == (20, 15)  # 172 is no multiple of 16
    assert "5 down_proj: 172 x 64" in taken.note
    assert any("emulated" in note for note in plans[1].notes)
    assert plans[1].peak.total > plans[0].peak.total


@pytest.mark.skipif(not WITHOUT, reason="torchao is installed")
def test_without_torchao_a_sentence_says_how_to_get_it(recipe, quickstart, tmp_path, ligertune):
    with pytest.raises(UserError, match=r"train\.fp8: true needs the package torchao"):
        check_packages(read(quickstart, tmp_path, **FLOAT8))
    done = ligertune("train", recipe, *overrides({**FLOAT8, "checkpoint.output_dir": "run"}))
    assert done.code == 2 and "pip install 'ligertune[quant]'" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


@needs_torchao
@pytest.mark.parametrize(
    "changes",
    [{}, {"data.packing": True}, {"kernels.enabled": "false"}, {"model.dtype": "bfloat16"}],
    ids=["ours", "packed", "plain", "bf16"],
)
def test_the_curve_is_close_to_the_unquantised_one(changes, quickstart, tmp_path):
    exact = trained(quickstart, tmp_path / "exact", **changes)
    found = trained(quickstart, tmp_path / "float8", **changes, **FLOAT8)
    assert found == pytest.approx(exact, rel=BOUND)
    assert found != pytest.approx(exact, rel=1e-5)


@needs_torchao
def test_checkpointing_changes_no_bit(quickstart, tmp_path):
    usual = trained(quickstart, tmp_path / "usual", **FLOAT8)
    for kept in ("true", "offload"):
        assert trained(quickstart, tmp_path / kept, **FLOAT8, **{"train.gradient_checkpointing": kept}) == usual


@needs_torchao
def test_the_saved_model_is_a_plain_one_and_a_resumed_run_leaves_the_same(quickstart, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    saves = {**FLOAT8, "checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}
    whole = trained(quickstart, tmp_path / "whole", **saves)
    step = tmp_path / "whole" / "run" / "checkpoints" / "step-2"
    again = trained(quickstart, tmp_path / "again", **saves, **{"checkpoint.resume_from_checkpoint": step})
    assert again == whole[2:]
    one, other = (tmp_path / name / "run" / "model" for name in ("whole", "again"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    # as the model that training began with: the same names, shapes and dtypes, and nothing of float8
    kinds = [{name: (t.shape, t.dtype) for name, t in load_file(folder / "model.safetensors").items()}
             for folder in (one, quickstart / "stories260K")]  # fmt: skip
    assert kinds[0] == kinds[1]
    model, info = AutoModelForCausalLM.from_pretrained(one, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert {type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)} == {"Linear"}
    assert "quantization_config" not in json.loads((one / "config.json").read_text(encoding="utf-8"))


@needs_torchao
@pytest.mark.slow
def test_compiled_layers_train_as_others_do(quickstart, tmp_path):
    packed = {**FLOAT8, "data.packing": True, "data.val_split": 0, "data.max_length": 256}
    found = [trained(quickstart, tmp_path / on, **packed, **{"train.torch_compile": on}) for on in ("false", "true")]
    assert found[1] == pytest.approx(found[0], rel=BOUND)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("--multi_gpu",), FSDP2], ids=["ddp", "fsdp"])
def test_two_ranks_train_as_one_does(launcher, recipe, tmp_path):
    """A rank's micro batch has scales of its own, so the curves are close, not equal."""
    alone = train(recipe, tmp_path, packing=True, micro=8, **FLOAT8)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    found = train(recipe, ranks, packing=True, micro=4, launcher=launcher, **FLOAT8)
    assert found == pytest.approx(alone, rel=BOUND)
