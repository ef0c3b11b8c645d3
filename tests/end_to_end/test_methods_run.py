"""LoRA, DoRA and freezing: from the recipe to a model that PEFT and transformers load."""

import json
from importlib.util import find_spec

import pytest
import torch
from support.command_line import losses
from support.quickstart_runs import ALPACA_ROWS, TWO_LAYERS, plan_run, recipe_for, saves, train

from ligertune.decode.generate import Decoding, generate_answer, load_model
from ligertune.errors import UserError, pip_install
from ligertune.models.save import read_prompt
from ligertune.planning.preflight import check_packages
from ligertune.training.checkpoint.export_run import ExportPlan, plan_export

slow = pytest.mark.slow

SETTINGS = {
    "model.dtype": "float32",
    "train.max_steps": 6,
    **saves(3),
    "logging.logging_steps": 1,
    "train.learning_rate": 0.01,
    "data.datasets.0.max_samples": 60,
}

ADAPTER = {
    **ALPACA_ROWS,
    "method.type": "lora",
    "method.lora_r": 4,
    "method.lora_target_modules": "[q_proj, up_proj]",
    "data.system_prompt": "Answer briefly.",
    "method.lora_dropout": 0.1,  # a resumed run must draw the same random numbers
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A finished LoRA run: its folder."""
    folder = tmp_path_factory.mktemp("adapted")
    train(folder, **SETTINGS, **ADAPTER)
    return folder / "run"


def export(name, out, *, adapter: bool = False, checkpoint: str | None = None) -> ExportPlan:
    plan = plan_export(str(name), out, adapter=adapter, checkpoint=checkpoint)
    plan.write()
    return plan


def test_an_adapter_of_bfloat16_weights_trains_under_autocast(tmp_path):
    for method, autocast in (("lora", "bf16"), ("full", "no")):
        plan = plan_run(tmp_path, **{"method.type": method, "model.dtype": "bfloat16"}).plan
        assert (plan.precision.weights, plan.precision.autocast) == ("bfloat16", autocast)


@slow
def test_one_process_can_train_in_one_precision_and_then_in_another(tmp_path):
    """A LoRA run on bfloat16 weights uses autocast, which accelerate keeps for the whole process."""
    found = []
    for name, changes in {"whole": {}, "adapter": {"method.type": "lora", "model.dtype": "bfloat16"}}.items():
        train(tmp_path / name, **{**SETTINGS, **changes})
        found.append(losses(tmp_path / name / "run"))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2)


@slow
def test_an_adapters_checkpoint_has_no_frozen_weights_and_resumes_bit_exactly(adapted, tmp_path):
    checkpoint = adapted / "checkpoints" / "step-3"
    assert not (checkpoint / "model.safetensors").exists()
    assert (checkpoint / "trained.safetensors").stat().st_size < 100_000
    train(tmp_path, **SETTINGS, **ADAPTER, **{"checkpoint.resume_from_checkpoint": checkpoint})
    assert losses(tmp_path / "run") == losses(adapted)[3:]
    name = "model/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (adapted / name).read_bytes()


def test_the_adapter_loads_in_peft_and_merges_to_the_same_model(adapted, quickstart, tmp_path, ligertune):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = ligertune("export", adapted, "--out", tmp_path / "merged", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["kind"] == "merged model"
    base = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K")
    with_adapter = PeftModel.from_pretrained(base, adapted / "model").eval()
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K")(ids).logits
        expected = with_adapter(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.1  # the adapter changes the logits


def test_an_adapter_is_exported_alone_and_answers_prompts(adapted, tmp_path):
    assert export(adapted, tmp_path / "alone", adapter=True).kind == "adapter"
    answer = generate_answer(load_model(str(tmp_path / "alone"), raw=False), "Name three colours.", Decoding(5), seed=0)
    assert "Answer briefly." in answer.prompt and "### Instruction:\nName three colours." in answer.prompt


def test_a_checkpoint_is_exported_as_a_model(adapted, tmp_path):
    from transformers import AutoModelForCausalLM

    assert export(adapted, tmp_path / "at-3", checkpoint="step-3").kind == "merged model"
    early, late = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "at-3", adapted / "model"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert not torch.allclose(early(ids).logits, late(ids).logits, atol=1e-3)
    assert read_prompt(tmp_path / "at-3") == {"prompt_template": "alpaca", "system_prompt": "Answer briefly."}


@slow
def test_invalid_exports_are_refused_with_one_sentence(adapted, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    for run_folder, out, checkpoint, words in (
        (tmp_path / "nowhere", tmp_path / "x", None, "there is no folder"),
        (adapted, tmp_path / "full", None, "not an empty folder"),
        (adapted, tmp_path / "x", "step-99", "no checkpoint step-99. It has step-3"),
    ):
        with pytest.raises(UserError, match=words):
            export(run_folder, out, checkpoint=checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("key", "value", "package"),
    [
        ("method.type", "qlora", "bitsandbytes"),
        ("train.optim", "adamw_8bit", "bitsandbytes"),
        ("train.optim", "adamw_torch_4bit", "torchao"),
        ("train.fp8", "torchao", "torchao"),
        ("parallel.strategy", "deepspeed_zero2", "deepspeed"),
        *(("logging.report_to", f"[jsonl, {name}]", name) for name in ("tensorboard", "wandb", "mlflow")),
    ],
)
def test_the_message_for_a_missing_package_says_how_to_install_it(key, value, package, tmp_path):
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=rf"needs the package.*{package}|{package} needs the package") as caught:
        check_packages(recipe_for(tmp_path, **{key: value}))
    assert pip_install(package) in caught.value.hint


def test_a_model_of_plain_prompts_is_saved(tmp_path):
    """`plain` is the template of rows with a prompt and a completion, and may be written for others."""
    train(tmp_path, **TWO_LAYERS, **{"data.prompt_template": "plain", "train.max_steps": 1})
    assert read_prompt(tmp_path / "run" / "model") == {"prompt_template": "raw", "system_prompt": None}
