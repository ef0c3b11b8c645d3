"""Adapters, processors and prompts from anyone are refused in one sentence; unusual folders load."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import run_here
from support.models import tiny_vlms
from support.models.hostile_folders import (
    CODE,
    CONFIG,
    TOKENIZER,
    Hostile,
    change_json,
    indexed,
    own_code,
    refused,
    weights,
    write,
)

# ---- adapters


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, quickstart):
    """The folder of an adapter of rank 2 on two layers."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(quickstart / "stories260K")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / ADAPTER, changes)


def adapter_weights(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return weights(change, ADAPTER_WEIGHTS)


ENDLESS = "^(([a-z._0-9])+.)+[A-Z]([a-z])+$"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
NINTH = FIRST.replace(".0.", ".9.")
ADAPTERS = (
    Hostile("config is a list", write(ADAPTER, []), (f"{ADAPTER} holds a list",)),
    Hostile("config is cut", write(ADAPTER, "{"), (f"{ADAPTER} is not a valid JSON file",)),
    Hostile("no base model", adapter_config(base_model_name_or_path=...), ("does not name the model",)),
    Hostile("a kind of no name", adapter_config(peft_type="WOBBLE"), ("holds no adapter", "WOBBLE")),
    Hostile("a huge rank", adapter_config(r=10**9), ("r is 1000000000",)),
    Hostile("another rank", adapter_config(r=4), ("holds no adapter of this model", "lora_A")),
    Hostile("a module to import", adapter_config(megatron_config={}, megatron_core="evil"), ("megatron_config",)),
    Hostile("invocation tokens", adapter_config(alora_invocation_tokens=[3]), ("alora_invocation_tokens",)),
    Hostile("no object", adapter_config(monteclora_config="yes"), ('monteclora_config is "yes"', "an object")),
    Hostile("a switch of words", adapter_config(use_rslora="false"), ('use_rslora is "false"', "true or false")),
    Hostile("a switch of a number", adapter_config(use_dora=1), ("use_dora is 1", "true or false")),
    Hostile("a switch of another kind of adapter", adapter_config(peft_type="LOHA", use_effective_conv2d="no"),
            ('use_effective_conv2d is "no"', "true or false")),
    Hostile("no rank", adapter_config(r=-1), ("r is -1",)),
    Hostile("half a rank", adapter_config(r=1.5), ("r is 1.5",)),
    Hostile("a scale of NaN", adapter_config(lora_alpha=float("nan")), ("lora_alpha is NaN",)),
    Hostile("an endless scale", adapter_config(lora_alpha=float("inf")), ("lora_alpha is Infinity",)),
    Hostile("an endless expression", adapter_config(target_modules=ENDLESS), ("which matches no layer",)),
    Hostile("an expression of memory", adapter_config(target_modules="((a{1000}){1000}){1000}"), ("is too long",)),
    Hostile("no expression", adapter_config(target_modules="(("), ("not a regular expression",)),
    Hostile("an expression of nothing", adapter_config(target_modules="x+y"), ("matches no layer",)),
    Hostile("a rank of billions", adapter_config(rank_pattern={"q_proj": 10**9}), ("rank_pattern is",)),
    Hostile("ranks of no object", adapter_config(rank_pattern=["q_proj"]), ("rank_pattern is",)),
    Hostile("a scale of no object", adapter_config(alpha_pattern="x"), ("alpha_pattern is",)),
    Hostile("a module by expression", adapter_config(modules_to_save=[ENDLESS]), ("modules_to_save is",)),
    Hostile("layers by expression", adapter_config(layers_pattern=ENDLESS, layers_to_transform=[0]),
            ("layers_pattern is",)),
    Hostile("billions of layers", adapter_config(layers_to_transform=[10**9]), ("layers_to_transform is 1000000000",)),
    Hostile("copies of layers", adapter_config(layer_replication=[[0, 10**9]]), ("layer_replication is",)),
    Hostile("a billion targets", adapter_config(target_modules=["a"] * 10**5), ("target_modules is", "at most 32,768")),
    Hostile("endless SVD", adapter_config(init_lora_weights="pissa_niter_1000000000"), ("init_lora_weights is",)),
    Hostile("endless LoftQ", adapter_config(init_lora_weights="loftq", loftq_config={"loftq_iter": 10**9}),
            ("loftq_iter is",)),
    Hostile("a token of millions", adapter_config(trainable_token_indices=[30_000_000]),
            ("trainable_token_indices names 30000000", "512 rows")),
    Hostile("a token below 0", adapter_config(trainable_token_indices={"embed_tokens": [-5]}), ("names -5",)),
    Hostile("tokens of no number", adapter_config(trainable_token_indices={"embed_tokens": ["x"]}), ('names "x"',)),
    Hostile("a token of null", adapter_config(trainable_token_indices=[None]), ("names null",)),
    Hostile("an adapter of prompts", adapter_config(peft_type="PROMPT_TUNING", num_virtual_tokens=10**6),
            ("peft_type is PROMPT_TUNING",)),
    Hostile("its own base", adapter_config(base_model_name_or_path="model"), ("model",)),
    Hostile("a base that never ends", adapter_config(base_model_name_or_path="/dev/zero"), ("/dev/zero",)),
    Hostile("tokens of no list", adapter_config(trainable_token_indices=5), ("trainable_token_indices is 5",)),
    Hostile("tokens of null", adapter_config(trainable_token_indices={"embed_tokens": None}),
            ("trainable_token_indices is", "expected a list of ids")),
    Hostile("a base of NUL", adapter_config(base_model_name_or_path="a\0b"), ("NUL character",)),
    Hostile("nested", write(ADAPTER, '{"r": 2, "a": ' + "[" * 50_000 + "]" * 50_000 + "}"), ("nested too deeply",)),
    Hostile("no weights", lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), (f"holds no {ADAPTER_WEIGHTS}",)),
    Hostile("cut weights", write(ADAPTER_WEIGHTS, b"hello"), (f"{ADAPTER_WEIGHTS} is not a complete safetensors",)),
    Hostile("a weight is missing", adapter_weights(lambda w: w.pop(FIRST)), ("lacks 1 weight", "layers.0.self_attn")),
    Hostile("a weight of no layer", adapter_weights(lambda w: w.update({NINTH: torch.ones(2, 64)})), (NINTH,)),
    Hostile("code of the base model", lambda folder: own_code(CONFIG, AutoConfig="C")(folder.parent / "base"),
            ("own Python code", "--trust-remote-code")),
)  # fmt: skip


# Both commands read adapters by the same functions: each case with one of them, and slowly with the other.
WITH_COMMANDS = [
    pytest.param(case, command, id=f"{case.name}-{command}", marks=pytest.mark.slow if (i + j) % 2 else ())
    for i, case in enumerate(ADAPTERS)
    for j, command in enumerate(("generate", "export"))
]


@pytest.mark.parametrize("case, command", WITH_COMMANDS)
def test_a_hostile_adapter_is_refused_in_one_sentence(case, command, place, adapter):
    (place / "model").rename(place / "base")
    shutil.copytree(adapter, place / "model")
    adapter_config(base_model_name_or_path="base")(place / "model")
    shutil.copy(place / "base" / "tokenizer.json", place / "model")
    case.damage(place / "model")
    sentence = refused(place, command)
    for words in case.says:
        assert words in sentence


@pytest.mark.parametrize("key", ["exclude_modules", "rank_pattern", "alpha_pattern"])
def test_an_expression_on_which_re_hangs_takes_no_time(key, place, adapter):
    (place / "model").rename(place / "base")
    shutil.copytree(adapter, place / "model")
    value = ENDLESS if key == "exclude_modules" else {ENDLESS: 4}
    adapter_config(base_model_name_or_path="base", **{key: value})(place / "model")
    start = time.monotonic()
    assert run_here("generate", "./model", "Hi.", "--max-new-tokens", 2, cwd=place).code == 0
    assert time.monotonic() - start < 20  # `re` needs 10^8 times as long for each longer name


def test_an_adapter_without_a_tokenizer_uses_that_of_its_base_model(place, adapter):
    (place / "model").rename(place / "base")
    shutil.copytree(adapter, place / "model")
    adapter_config(base_model_name_or_path="base")(place / "model")
    assert run_here("generate", "./model", "Hi.", "--max-new-tokens", 2, cwd=place).code == 0


# ---- folders that are unusual, and fine


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*self_attn\.(q|v)_proj"},
        {"target_modules": ".*", "exclude_modules": r"(?!.*\.[qv]_proj$).*"},
        {"rank_pattern": {r"layers\.[0-9]+\.self_attn\.q_proj": 2}, "r": 3, "alpha_pattern": {"[qv]_proj": 64},
         "target_modules": r".*q_proj"},
    ],
    ids=["targets", "exclusions", "ranks"],
)  # fmt: skip
def test_expressions_of_an_adapter_mean_what_they_mean_to_peft(changes, place, adapter):
    import peft
    import transformers

    from ligertune.models.adapters.adapter_files import check_adapter
    from ligertune.models.adapters.lora import load_adapter
    from ligertune.models.save import SAVED_MODEL

    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})
    torch.manual_seed(0)
    config.init_lora_weights = False  # random B, so that the adapter changes the logits
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    peft.get_peft_model(model, config).save_pretrained(place / "adapter")

    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(place / "model")

    tokens = torch.arange(1, 30)[None]
    expected = peft.PeftModel.from_pretrained(base(), place / "adapter")(tokens).logits
    assert check_adapter(place / "adapter", SAVED_MODEL)
    found = load_adapter(base(), str(place / "adapter"), SAVED_MODEL)(tokens).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, base()(tokens).logits)


def sharded(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    indexed({"metadata": {}, "weight_map": dict.fromkeys(names, "x.safetensors")})(folder)


def in_the_hubs_cache(folder: Path) -> None:
    """snapshots/REVISION/x.safetensors links to blobs/HASH."""
    sharded(folder)
    snapshot = folder.parent / "cache" / "snapshots" / "main"
    snapshot.parent.mkdir(parents=True)
    (folder.parent / "cache" / "blobs").mkdir()
    folder.rename(snapshot)
    (snapshot / "x.safetensors").rename(folder.parent / "cache" / "blobs" / "1")
    (snapshot / "x.safetensors").symlink_to("../../blobs/1")
    folder.symlink_to(snapshot)


def with_extras(w: dict) -> None:
    embedding = w["model.embed_tokens.weight"]
    w.update({"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


@pytest.mark.parametrize(
    "change",
    [
        sharded,
        in_the_hubs_cache,
        weights(with_extras),
        own_code(TOKENIZER, AutoTokenizer="T", tokenizer_class="PreTrainedTokenizerFast"),
        write("generation_config.json", {"num_beams": 4, "eos_token_id": 2}),
    ],
    ids=["sharded", "the hub's cache", "tied weights and old buffers twice", "code that transformers has too", "beams"],
)
def test_unusual_folders_load_without_running_code(change, place):
    expected = run_here("generate", "./model", "Hi.", "--max-new-tokens", 4, cwd=place).out
    change(place / "model")
    done = run_here("generate", "./model", "Hi.", "--max-new-tokens", 4, cwd=place)
    assert (done.code, done.out) == (0, expected), done.err
    assert not (place / "marker").exists()


# ---- processors, Medusa heads and what is typed


@pytest.mark.parametrize("known", [True, False], ids=["transformers has the class too", "only the folder has it"])
def test_the_code_of_a_processor_never_runs(known, place):
    tiny_vlms.save("qwen2_vl", place / "vlm")
    marks = {"auto_map": {"AutoImageProcessor": "evil.P", "AutoProcessor": "evil.P"}}
    change_json(
        place / "vlm" / "preprocessor_config.json", marks if known else {**marks, "image_processor_type": "Evil"}
    )
    (place / "vlm" / "evil.py").write_text(CODE.format(marker=str(place / "marker")))
    if known:
        assert run_here("generate", "./vlm", "Hi.", "--max-new-tokens", 2, cwd=place).code == 0
        assert not (place / "marker").exists()
    else:
        assert "EvilPil and its own code (auto_map) is not run" in refused(place, "generate", model="./vlm")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("--seed", 10**23), 2, "--seed"),
        (("--seed", -1), 2, "--seed"),
        ((), 2, "Error: The prompt is not UTF-8: character 4"),
    ],
)
def test_what_is_typed_is_checked(argv, code, says, place):
    prompt = "Hi." if argv else os.fsdecode(b"caf\xe9")
    done = run_here("generate", "./model", prompt, *argv, cwd=place)
    assert done.code == code and says in done.err and "Traceback" not in done.err


PROMPTS = ("[]", "{", '{"prompt_template": "wobble"}', '{"prompt_template": "chat", "system_prompt": 1}')


@pytest.mark.parametrize("content", PROMPTS)
def test_a_damaged_prompt_format_is_refused(content, place):
    (place / "model" / "ligertune.json").write_text(content)
    assert "ligertune.json" in refused(place, "generate")


@pytest.mark.parametrize("content", ["[]", '{"max_new_tokens": "many"}', '{"top_k": -1}'])
def test_a_damaged_generation_config_is_refused(content, place):
    (place / "model" / "generation_config.json").write_text(content)
    assert "generation_config" in refused(place, "generate", "--temperature", "1")
