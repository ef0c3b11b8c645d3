"""Model folders from anyone: `train`, `generate` and `export` refuse damaged ones in one sentence and run no code."""

import shutil

import pytest
import torch
from support.command_line import run_here
from support.models.hostile_folders import (
    CONFIG,
    INDEX,
    LOADING,
    OWN_CLASSES,
    RECIPE,
    TOKENIZER,
    Hostile,
    all_in,
    change_json,
    config,
    indexed,
    linked_out,
    own_code,
    pickled,
    refused,
    weights,
    write,
)

WOBBLE = {"rope_type": "wobble", "rope_theta": 10000.0}
CASES = (
    Hostile("config is a list", write(CONFIG, []), ("config.json holds a list",)),
    Hostile("config is null", write(CONFIG, None), ("config.json holds null",)),
    Hostile("config is empty", write(CONFIG, ""), ("config.json is not a valid JSON file",)),
    Hostile("config is not UTF-8", write(CONFIG, b'{"a": "\xff"}'), ("config.json is not a valid JSON file",)),
    Hostile("config nested", write(CONFIG, '{"a": ' * 50_000), ("config.json", "nested too deeply")),
    Hostile("config nested lists", write(CONFIG, '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"), ("nested too deeply",)),
    Hostile("no heads", config(num_attention_heads=0), ("config.json: num_attention_heads is 0",)),
    Hostile("7 heads", config(num_attention_heads=7), ("num_attention_heads is 7", "num_key_value_heads: 4")),
    Hostile("4 value heads share 3 keys", config(linear_num_value_heads=4, linear_num_key_heads=3),
            ("linear_num_value_heads is 4", "linear_num_key_heads: 3")),
    Hostile("no taps", config(linear_conv_kernel_dim=0), ("config.json: linear_conv_kernel_dim is 0",)),
    Hostile("5 of 4 experts", config(num_experts=4, num_experts_per_tok=5),
            ("num_experts_per_tok is 5", "whole number from 1 to 4")),
    Hostile("no expert", config(num_local_experts=4, num_experts_per_tok=0), ("num_experts_per_tok is 0",)),
    Hostile("7 of 64", config(num_attention_heads=7, num_key_value_heads=7, head_dim=None), ("multiple of the",)),
    Hostile("negative width", config(hidden_size=-64), ("hidden_size is -64",)),
    Hostile("width is a text", config(hidden_size="64"), ('hidden_size is "64"', "whole number")),
    Hostile("width is NaN", config(hidden_size=float("nan")), ("hidden_size is NaN",)),
    Hostile("a billion layers", config(num_hidden_layers=10**9), ("num_hidden_layers is 1000000000",)),
    Hostile("a trillion tokens", config(vocab_size=10**12), ("vocab_size is 1000000000000",)),
    Hostile("quadrillions", config(hidden_size=2**18, intermediate_size=2**22, num_hidden_layers=4096), ("make a",)),
    Hostile("16 million tokens", config(vocab_size=2**24), ("model.embed_tokens.weight", "[512, 64]"), LOADING),
    Hostile("billions", config(num_hidden_layers=300, head_dim=4096), ("shape",), ("generate",)),
    Hostile("a trillion labels", config(num_labels=10**12), ("num_labels is 1000000000000",)),
    Hostile("a text model's text model", config(text_config={"a": 1}), ("config.json: text_config",)),
    Hostile("attention maps", config(output_attentions=True), ("config.json: output_attentions",)),
    Hostile("an unknown activation", config(hidden_act="wobble"), ("hidden_act is wobble",), LOADING),
    Hostile("an unknown RoPE", config(rope_parameters=WOBBLE), ("rope_parameters.rope_type is wobble",), LOADING),
    Hostile("an unknown dtype", config(dtype="float33"), ("config.json", "float33")),
    Hostile("a padding id", config(pad_token_id=10**6), ("config.json", "cannot be used"), LOADING),
    Hostile("an id of no token", write("generation_config.json", {"bos_token_id": [1e308]}),
            ("generation_config.json: bos_token_id",), LOADING),
    Hostile("no weights", lambda folder: (folder / "model.safetensors").unlink(), ("holds no model.safetensors",)),
    Hostile("empty weights", write("model.safetensors", b""), ("model.safetensors is not a complete safetensors",)),
    Hostile("cut weights", write("model.safetensors", b"\x10\0\0\0\0\0\0\0{}"), ("not a complete safetensors",)),
    Hostile("missing weights", weights(lambda w: w.pop("model.norm.weight")), ("lacks 1", "norm.weight"), LOADING),
    Hostile(
        "weights of another model",
        weights(lambda w: w.update({"model.layers.5.mlp.up_proj.weight": torch.ones(172, 64)})),
        ("holds 1 weight", "model.layers.5.mlp.up_proj.weight"),
        LOADING,
    ),
    Hostile(
        "another shape",
        weights(lambda w: w.update({"model.norm.weight": torch.ones(65)})),
        ("model.norm.weight", "[64]", "[65]"),
        LOADING,
    ),
    Hostile("NaN", weights(lambda w: [t.fill_(float("nan")) for t in w.values()]), ("hold NaN or inf",), LOADING),
    Hostile("infinity", weights(lambda w: w["model.norm.weight"].fill_(float("inf"))), ("infinity (model.n",), LOADING),
    Hostile("overflow", weights(lambda w: w["model.norm.weight"].fill_(3e38)), ("computes NaN",), LOADING),
    Hostile("a pickle", pickled, (".bin weights", "other Python objects"), LOADING),
    Hostile("a .bin of text", lambda folder: (pickled(folder), write("pytorch_model.bin", "hello")(folder)),
            (".bin weights", "damaged"), LOADING),
    Hostile("an index without a map", indexed({"metadata": {}}), (INDEX, "weight_map")),
    Hostile("an index without metadata", indexed({"weight_map": {"a": "x.safetensors"}}), (INDEX, "metadata")),
    Hostile("an index that is a list", indexed([]), (INDEX, "holds a list")),
    Hostile("a dropout of 10^19", config(attention_dropout=1e19), ("attention_dropout is 1e+19", "from 0 to 1")),
    Hostile("an index of numbers", indexed(all_in(5)), (INDEX, "'5'")),
    Hostile("an index of a missing file", indexed(all_in("y.safetensors")), (INDEX, "y.safetensors, which is not")),
    Hostile("an index of a text", indexed(all_in("config.json")), (INDEX, "'config.json'")),
    Hostile("an index above", indexed(all_in("../x.safetensors"), "../x.safetensors"), (INDEX, "own folder")),
    Hostile("an absolute index", indexed(all_in("/etc/x.safetensors")), (INDEX, "own folder")),
    Hostile("an index over a link", linked_out, ("x.safetensors is a link", "outside")),
    Hostile("weights elsewhere", config(transformers_weights="../x.safetensors"), ("own folder",)),
    Hostile("tokenizer.json is empty", write("tokenizer.json", {}), ("tokenizer.json is not a tokenizer",)),
    Hostile("tokenizer.json is cut", write("tokenizer.json", '{"version":'), ("tokenizer.json is not a valid JSON",)),
    Hostile("tokenizer_config is a list", write(TOKENIZER, []), (f"{TOKENIZER} holds a list",)),
    Hostile("a length of no number", lambda f: change_json(f / TOKENIZER, {"model_max_length": {}}), ("okenizer",)),
    Hostile("a class of no name", lambda f: change_json(f / TOKENIZER, {"tokenizer_class": 5}), ("okenizer",)),
    Hostile("a template of no text", lambda f: ((f / "chat_template.jinja").unlink(),
            change_json(f / TOKENIZER, {"chat_template": 5})), ("chat_template",)),
    Hostile("its own code", own_code(CONFIG, AutoConfig="C", AutoModelForCausalLM="M"), ("own Python code",)),
    Hostile("a tokenizer's own code", own_code(TOKENIZER, AutoTokenizer="T"), ("own Python code",)),
)  # fmt: skip
ALLOW = {
    "train": "write model.trust_remote_code: true",
    "generate": "add --trust-remote-code",
    "export": "add --trust-remote-code",
}


PAIRS = [(case, command) for case in CASES for command in case.commands]


@pytest.mark.parametrize(("case", "command"), PAIRS, ids=[f"{case.name}-{command}" for case, command in PAIRS])
def test_a_hostile_folder_is_refused_in_one_sentence(case, command, place):
    case.damage(place / "model")
    sentence = refused(place, command)
    for words in case.says:
        assert words in sentence
    if "code" in case.name:
        assert ALLOW[command] in sentence


@pytest.mark.parametrize("command", ["plan", "medusa", "data", "chat"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [(CASES[0].damage, "config.json holds a list"), (CASES[-1].damage, "own Python code")],
    ids=["config", "code"],
)
def test_other_commands_load_in_the_same_way(command, damage, says, place):
    damage(place / "model")
    assert says in refused(place, command)


def test_a_recipe_in_the_folder_cannot_allow_the_models_code(place):
    own_code(CONFIG, AutoConfig="C", AutoModelForCausalLM="M")(place / "model")
    recipe = RECIPE.replace("./model}", "./model, trust_remote_code: true}")
    for folder in (place, place / "model"):
        (folder / "resolved_recipe.yaml").write_text(recipe)
    assert "--trust-remote-code" in refused(place, "export") and "--trust-remote-code" in refused(place, "generate")


def test_own_code_runs_if_the_user_allows_it(place):
    own_code(CONFIG, AutoConfig="C", AutoModelForCausalLM="M")(place / "model")
    shutil.rmtree(place / "model" / "custom_generate")
    with (place / "model" / "evil.py").open("a") as code:
        code.write(OWN_CLASSES)
    assert run_here("generate", "./model", "Hi.", "--trust-remote-code", cwd=place).code == 0
    assert (place / "marker").exists()
