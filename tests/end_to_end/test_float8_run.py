"""train.fp8, from the recipe to a model that transformers loads. On a CPU float8 is emulated."""

import json
from importlib.util import find_spec

import pytest
from command_line import losses, weights
from quickstart_runs import recipe_for, saves, train, train_ranks

from ligertune.training.resolve import plan_for

WITHOUT = find_spec("torchao") is None
needs_torchao = pytest.mark.skipif(WITHOUT, reason="needs torchao: pip install torchao")
FLOAT8, TORCHAO = {"train.fp8": "true"}, {"train.fp8": "torchao"}
BOTH = [pytest.param(FLOAT8, id="ours"), pytest.param(TORCHAO, id="torchao", marks=needs_torchao)]
BOUND = 0.01  # relative; measured on the quickstart's model (hidden size 64): 0.5 % in 10 steps


def trained(folder, **changes: object) -> list[float]:
    train(folder, **changes)
    return losses(folder / "run")


def test_the_plan_counts_the_converted_layers(tmp_path):
    plans = [plan_for(recipe_for(tmp_path, **changes), for_show=True).plan for changes in ({}, FLOAT8)]
    lines = [{line.kernel: line for line in plan.kernels} for plan in plans]
    assert "float8_linear" not in lines[0]
    converted = lines[1]["float8_linear"]
    assert (converted.applied, converted.left) == (20, 15)  # 172 is not a multiple of 16
    assert "5 down_proj: 172 x 64" in converted.note
    assert "swiglu_float8" not in lines[0]
    assert lines[1]["swiglu_float8"].note == "5 LlamaMLP: a projection is not in float8"
    assert any("emulated" in note for note in plans[1].notes)
    # The float8 copies of all weights of the layers, by rows and by columns.
    copies = plans[1].peak.weights - plans[0].peak.weights
    assert copies == 2 * 5 * 64 * (2 * 64 + 2 * 32 + 3 * 172)


@pytest.mark.parametrize(
    "changes, float8",
    [
        pytest.param({}, FLOAT8, marks=pytest.mark.slow),
        ({"data.packing": True, "train.gradient_checkpointing": "true"}, FLOAT8),
        pytest.param({}, TORCHAO, marks=needs_torchao),
        pytest.param({"data.packing": True}, TORCHAO, marks=needs_torchao),
        pytest.param({"model.dtype": "bfloat16"}, FLOAT8, marks=pytest.mark.slow),
        pytest.param({"model.dtype": "bfloat16"}, TORCHAO, marks=needs_torchao),
        pytest.param({"method.type": "lora"}, FLOAT8, marks=pytest.mark.slow),
        pytest.param({"method.type": "lora", "kernels.lora": "true"}, FLOAT8, marks=pytest.mark.slow),
    ],
)
def test_the_losses_are_close_to_those_without_float8(changes, float8, tmp_path):
    exact = trained(tmp_path / "exact", **changes)
    found = trained(tmp_path / "float8", **changes, **float8)
    assert found == pytest.approx(exact, rel=BOUND)
    assert found != pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("float8", BOTH)
def test_the_saved_model_has_no_float8_and_a_resumed_run_saves_the_same_bits(float8, quickstart, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    settings = {**float8, **saves(2)}
    whole = trained(tmp_path / "whole", **settings)
    step = tmp_path / "whole" / "run" / "checkpoints" / "step-2"
    again = trained(tmp_path / "again", **settings, **{"checkpoint.resume_from_checkpoint": step})
    assert again == whole[2:]
    assert weights(tmp_path / "whole" / "run") == weights(tmp_path / "again" / "run")
    saved = tmp_path / "whole" / "run" / "model"
    # The names, shapes and dtypes of the model that training began with.
    kinds = [{name: (t.shape, t.dtype) for name, t in load_file(folder / "model.safetensors").items()}
             for folder in (saved, quickstart / "stories260K")]  # fmt: skip
    assert kinds[0] == kinds[1]
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert {type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)} == {"Linear"}
    assert "quantization_config" not in json.loads((saved / "config.json").read_text(encoding="utf-8"))


@needs_torchao
@pytest.mark.slow
def test_compiled_layers_have_the_same_losses(tmp_path):
    packed = {**TORCHAO, "data.packing": True, "data.val_split": 0, "data.max_length": 256}
    found = [trained(tmp_path / on, **packed, **{"train.torch_compile": on}) for on in ("false", "true")]
    assert found[1] == pytest.approx(found[0], rel=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, float8", [("ddp", FLOAT8), *(pytest.param(s, TORCHAO, marks=needs_torchao) for s in ("ddp", "fsdp"))]
)
def test_two_ranks_train_as_one_process_does(strategy, float8, tmp_path):
    """Each rank scales its own micro-batch, so the losses are close, not equal."""
    settings = {**float8, "data.packing": True, "train.global_batch_size": 8, "train.max_steps": 5}
    alone = train_ranks(1, tmp_path / "alone", **settings, **{"train.per_device_train_batch_size": 8})
    ranks = {"parallel.strategy": strategy, "train.per_device_train_batch_size": 4}
    found = train_ranks(2, tmp_path / "ranks", **settings, **ranks)
    assert found == pytest.approx(alone, rel=BOUND)
