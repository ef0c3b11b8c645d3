"""Initial adapters: PEFT's values; PiSSA and OLoRA are saved as LoRA that works on the original weights."""

import copy
import warnings

import peft
import pytest
import torch
from support.command_line import losses
from support.models import tiny_models
from support.quickstart_runs import RESUME, saves, train, unfinished
from transformers import PreTrainedTokenizerFast

from ligertune.errors import UserError
from ligertune.features.preference.recipe import PreferenceSpec, reference_of
from ligertune.models.adapters.initial_lora import initial_factors
from ligertune.models.adapters.lora import merged_model
from ligertune.models.save import write_model
from ligertune.models.trainable import apply_method
from ligertune.planning.options import MethodOptions
from ligertune.training.checkpoint.export_check import check_export
from ligertune.training.checkpoint.export_run import plan_export
from ligertune.training.checkpoint.weight_files import load_trained, save_weights, trained

TARGETS = ["q_proj", "down_proj", "lm_head"]
IDS = torch.arange(3, 40)[None]


def adapted(init: str, *, seed: int = 1, **changes: object):
    method = {"type": "lora", "lora_r": 4, "lora_target_modules": TARGETS, "init_lora_weights": init, **changes}
    return apply_method(tiny_models.make("llama"), MethodOptions(**method), seed=seed).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def disturb(model) -> None:
    """Change the adapter as training does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for parameter in trained(model).values():
            parameter += 0.05 * torch.randn_like(parameter)


@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_4"])
def test_adapter_and_weights_start_as_with_peft(init):
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=TARGETS, init_lora_weights=True if init == "default" else init
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        theirs = peft.get_peft_model(tiny_models.make("llama"), config)
    ours = adapted(init)
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name
    torch.testing.assert_close(logits(ours), logits(tiny_models.make("llama").eval()), rtol=1e-4, atol=1e-4)
    assert bool(initial_factors(ours)) == init.startswith(("olora", "pissa"))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("changes", [{"init": "pissa", "use_rslora": True}, {"init": "olora"}])
def test_a_saved_adapter_works_on_the_original_weights(changes, gathered, quickstart, tmp_path):
    model = adapted(**changes)
    disturb(model)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(quickstart / "stories260K" / "tokenizer.json"))
    weights = {name: t.clone() for name, t in model.state_dict().items()} if gathered else None
    config = copy.deepcopy(model.peft_config["default"])
    prompt = {"prompt_template": "raw", "system_prompt": None}
    write_model(model, tokenizer, tmp_path / "m", state_dict=weights, prompt=prompt)
    assert model.peft_config["default"] == config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(tiny_models.make("llama"), tmp_path / "m").eval()
    assert loaded.peft_config["default"].r == 8
    expected = logits(model)
    assert (expected - logits(tiny_models.make("llama").eval())).abs().max() > 0.05
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(merged_model(model)), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_holds_the_initial_adapter_of_another_device(tmp_path):
    """Another seed of the random SVD stands for another device."""
    model, other, same = adapted("pissa_niter_4"), adapted("pissa_niter_4", seed=2), adapted("pissa_niter_4")
    disturb(model)
    save_weights(trained(model) | initial_factors(model), tmp_path / "w.safetensors")
    for again in (other, same):
        load_trained(again, tmp_path / "w.safetensors")
        torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, initial_factors(again).values(), initial_factors(model).values()))
    assert all(map(torch.equal, same.parameters(), model.parameters()))


def test_what_cannot_start_from_the_weights_is_refused():
    with pytest.raises(UserError, match=r"init_lora_weights: pissa is for linear layers, and Embedding is adapted"):
        adapted("pissa", lora_target_modules=["embed_tokens", "q_proj"])
    pissa = MethodOptions(type="lora", init_lora_weights="pissa")
    assert reference_of(PreferenceSpec(), pissa) == "precompute"
    assert reference_of(PreferenceSpec(), MethodOptions(type="lora")) == "adapter"


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa_niter_4", "olora"])
def test_a_run_resumes_bit_exactly_and_its_exports_are_exact(init, tmp_path):
    changes = {"method.type": "lora", "method.init_lora_weights": init, "method.loraplus_lr_ratio": 4}
    changes |= {"train.max_steps": 6, "train.lr_scheduler_type": "constant", **saves(2)}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "part", **{**changes, "train.max_steps": 5})
    run = unfinished(tmp_path / "part")
    assert train(tmp_path / "part", **changes, **RESUME).resumed_from == 4
    assert losses(run) == losses(tmp_path / "whole" / "run")
    name = "model/adapter_model.safetensors"
    assert (run / name).read_bytes() == (tmp_path / "whole" / "run" / name).read_bytes()
    for number, source in enumerate(({"checkpoint": None}, {"checkpoint": "newest"})):
        plan = plan_export(str(run), tmp_path / f"out{number}", adapter=False, **source)
        plan.write()
        check_export(plan).raise_if_different()
