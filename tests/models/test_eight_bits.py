"""8-bit LoRA: as with PEFT on transformers' 8-bit model, the plan's bytes, whole runs; needs bitsandbytes."""

import copy
import importlib.util
import warnings

import peft
import pytest
import torch
from support.command_line import losses
from support.models import tiny_models
from support.quickstart_runs import RESUME, bare_recipe, plan_run, recipe_for, saves, train, unfinished
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ligertune.errors import UserError
from ligertune.models.load import build_model, whole_model
from ligertune.models.read_config import read_config
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.memory.states import states_of
from ligertune.planning.options import MethodOptions, ModelOptions
from ligertune.planning.preflight import check_packages
from ligertune.training.checkpoint.export_check import check_export
from ligertune.training.checkpoint.export_run import plan_export

has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes, reason="needs bitsandbytes: pip install bitsandbytes")
LORA = {"type": "lora", "lora_r": 4, "load_in_8bit": True}


def test_the_plan_counts_a_byte_for_each_frozen_linear_weight():
    with torch.device("meta"):
        shape = read_shape(apply_method(tiny_models.make("llama"), MethodOptions(**LORA)))
    plain, eight = (
        states_of(bare_recipe("lora").model_copy(update={"method": method}), shape.parameters, "bfloat16")
        for method in (MethodOptions(type="lora"), MethodOptions(**LORA))
    )
    model = tiny_models.make("llama")
    linear = [m.weight for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert plain.weights - eight.weights == sum(w.numel() - 4 * len(w) for w in linear)
    assert (plain.trained, plain.optimizer) == (eight.trained, eight.optimizer)


def test_a_missing_package_is_an_error_with_the_line_to_install_it(tmp_path):
    if has_bitsandbytes:
        pytest.skip("bitsandbytes is installed")
    recipe = recipe_for(tmp_path, **{"method.type": "lora", "method.load_in_8bit": True})
    with pytest.raises(UserError, match=r"method.load_in_8bit: true needs the package bitsandbytes"):
        check_packages(recipe)


def compare_training(folder, device: str) -> None:
    tiny_models.make("llama").save_pretrained(folder)
    spec = ModelOptions(model_name_or_path=str(folder))
    ours = build_model(spec, read_config(spec), dtype=torch.float32, device=device, seed=0, stored_as="int8")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map={"": device}, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    assert patch(ours).rows == patch(tiny_models.make("llama")).rows  # which the plan shows
    ours = apply_method(ours, MethodOptions(**LORA), seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = peft.get_peft_model(theirs, copy.deepcopy(ours.peft_config["default"]))
    found = []
    torch.manual_seed(0)
    weights = {name: 0.1 * torch.randn(p.shape) for name, p in ours.named_parameters() if p.requires_grad}
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data = weights[name].to(device)
        loss = model.train()(**tiny_models.batch(device=device)).loss
        loss.backward()
        gradients = {name: p.grad.flatten() for name, p in model.named_parameters() if p.requires_grad}
        found.append((loss.detach(), torch.cat([gradients[name] for name in weights])))
    (loss, gradient), (expected, its_gradient) = found
    # another rounding of an input in float32 moves single int8 values by one step
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert (gradient - its_gradient).norm() < 1e-3 * its_gradient.norm()


@needs_bitsandbytes
def test_it_trains_as_with_transformers_and_peft(tmp_path):
    compare_training(tmp_path, "cpu")


@pytest.mark.gpu
@needs_bitsandbytes
def test_it_trains_as_with_transformers_and_peft_on_a_gpu(tmp_path):
    compare_training(tmp_path, "cuda")


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_a_run_resumes_bit_exactly_and_its_exports_are_exact(packing, tmp_path):
    changes = {"method.type": "lora", "method.load_in_8bit": True, "data.packing": packing, "train.max_steps": 6}
    changes |= {"train.lr_scheduler_type": "constant", **saves(2)}
    assert plan_run(tmp_path, **changes).plan.build.method.stored_as == "int8"
    train(tmp_path / "whole", **changes)
    train(tmp_path / "part", **{**changes, "train.max_steps": 5})
    run, whole = unfinished(tmp_path / "part"), tmp_path / "whole" / "run"
    assert train(tmp_path / "part", **changes, **RESUME).resumed_from == 4
    assert losses(run) == losses(whole) and losses(run)[-1] < losses(run)[0]
    for number, checkpoint in enumerate((None, "newest")):
        plan = plan_export(str(run), tmp_path / f"out{number}", adapter=False, checkpoint=checkpoint)
        plan.write()
        check_export(plan).raise_if_different()


@needs_bitsandbytes
def test_merging_uses_the_weights_that_were_trained_on(tmp_path):
    tiny_models.make("llama").save_pretrained(tmp_path)
    spec = ModelOptions(model_name_or_path=str(tmp_path))
    through = whole_model(spec, read_config(spec), stored_as="int8").model.layers[0].mlp.up_proj.weight.cpu()
    plain = whole_model(spec, read_config(spec)).model.layers[0].mlp.up_proj.weight
    steps = through / (plain.abs().amax(1, keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 0.1
    assert 0.4 < (steps - plain / (plain.abs().amax(1, keepdim=True) / 127)).abs().max() < 0.6
