"""model.rope_parameters: the rotary embeddings of transformers' own configurations, of adapters and of exports."""

import json

import pytest
import torch
import transformers
from support.command_line import run_here
from support.quickstart_runs import train

from ligertune.errors import UserError
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.save import load_plain, load_saved, merge_saved_adapter
from ligertune.planning.options import ModelOptions
from ligertune.planning.saved_model import trained_base

CONTEXT = 512  # of the bundled model
THETA = {"rope_theta": 10000.0}
# what a recipe says -> what the configuration then has, and the context
TYPES = {
    "linear": ({"factor": 2.0}, {}, 2 * CONTEXT),
    "dynamic": ({"factor": 2.0}, {}, CONTEXT),
    "yarn": (
        {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2},
        {"original_max_position_embeddings": CONTEXT},
        4 * CONTEXT,
    ),
    "llama3": (
        {"factor": 8.0, "original_max_position_embeddings": 128},
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        2 * CONTEXT,
    ),
    "default": ({"rope_theta": 500.0}, {}, CONTEXT),
}
YARN = {"model.rope_parameters.rope_type": "yarn", "model.rope_parameters.factor": 4}
LORA = {"method.type": "lora", "method.lora_r": 4}


def options(folder, **rope) -> ModelOptions:
    return ModelOptions(model_name_or_path=str(folder), rope_parameters=rope)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    ids = torch.arange(1, 300)[None] % 400
    return model.eval()(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("kind", TYPES)
def test_the_model_is_transformers_with_these_parameters(kind, quickstart):
    folder = quickstart / "stories260K"
    given, added, context = TYPES[kind]
    spec = options(folder, rope_type=kind, **given)
    config = read_config(spec)
    expected = {"rope_type": kind, **THETA, **added, **given}
    assert config.rope_parameters == expected and config.max_position_embeddings == context
    model = build_model(spec, config, dtype=torch.float32, device="cpu", seed=0)
    plain = transformers.AutoConfig.from_pretrained(folder)
    plain.rope_parameters, plain.max_position_embeddings = expected, context
    truth = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, config=plain, dtype=torch.float32))
    assert torch.equal(logits(model), truth)
    unchanged = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(unchanged), truth) == (kind == "dynamic")  # which differs beyond the context


def test_layers_with_full_attention_are_changed_where_layers_differ(tmp_path):
    transformers.Gemma3TextConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    before = read_config(options(tmp_path)).rope_parameters
    after = read_config(options(tmp_path, rope_type="linear", factor=8.0)).rope_parameters
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"] == {**before["full_attention"], "rope_type": "linear", "factor": 8.0}


def test_a_scaling_of_the_model_is_replaced_or_changed(tmp_path):
    own = {"rope_type": "yarn", "factor": 2.0, "beta_slow": 3.0, "rope_theta": 5e5, LENGTH: 1024}
    transformers.LlamaConfig(rope_parameters=own, max_position_embeddings=2048).save_pretrained(tmp_path)
    changed = read_config(options(tmp_path, factor=8.0))
    assert changed.rope_parameters == {**own, "factor": 8.0} and changed.max_position_embeddings == 8192
    replaced = read_config(options(tmp_path, rope_type="linear", factor=4.0))
    assert replaced.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert replaced.max_position_embeddings == 4096


LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rope_type": "yarn"}, "rope_type: yarn needs a factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 32}, "beta_slow is 32, and beta_fast is 1"),
        ({"factor": 2.0}, "factor has no effect on rope_type: default"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}, "beta_fast has no effect on rope_type: linear"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(given, says, quickstart):
    with pytest.raises(UserError, match=f"model.rope_parameters.*{says}"):
        read_config(options(quickstart / "stories260K", **given))


def test_a_model_without_rotary_embeddings_is_refused(tmp_path):
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a gpt2 configuration has no such parameters"):
        read_config(options(tmp_path, rope_theta=1e6))


def test_an_adapter_is_loaded_on_the_embeddings_that_it_was_trained_on(tmp_path):
    """Longer examples than the model's own context are allowed; the base's folder is as it was."""
    train(tmp_path, **LORA, **YARN, **{"train.max_steps": 1, "data.max_length": 2 * CONTEXT})
    folder = tmp_path / "run" / "model"
    loaded, _ = load_saved(str(folder), trust_remote_code=False)
    merged, *_ = merge_saved_adapter(folder, trained_base(folder), trust_remote_code=False)
    plain = load_plain(folder, trust_remote_code=False)
    assert loaded.config.rope_parameters["factor"] == merged.config.rope_parameters["factor"] == 4.0
    torch.testing.assert_close(logits(plain), logits(loaded), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(merged), logits(loaded), rtol=1e-4, atol=1e-4)
    done = run_here("export", tmp_path / "run", "--out", tmp_path / "out", "--adapter", "--check", cwd=tmp_path)
    assert done.code == 0, done.err
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "rope_type: yarn, factor: 4.0; write them into the base's config.json" in card


def test_a_trained_model_says_them_itself(tmp_path):
    train(tmp_path, **YARN, **{"train.max_steps": 1})
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["rope_parameters"] == {"rope_type": "yarn", "factor": 4.0, **THETA, LENGTH: CONTEXT}
    assert config["max_position_embeddings"] == 4 * CONTEXT
