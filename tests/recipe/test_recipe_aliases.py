"""Aliases: a literal table of other tools' names and values -> our key and value; recipes written back."""

import pickle

import pytest

from ligertune.recipe import dump_recipe, recipe_schema
from ligertune.recipe.aliases import ALIASES

SAME = object()  # the value is not converted

# key -> (names, value in the file, value of the key), ...
TABLE: dict[str, list[tuple[str, object, object]]] = {
    "task": [("stage", "sft", SAME)],
    "model.model_name_or_path": [
        ("base_model model model_name model_path model_id pretrained_model_name_or_path", "m", SAME)
    ],
    "model.revision": [("model_revision revision_of_model", "v1", SAME)],
    "model.dtype": [
        ("torch_dtype", "bf16", "bfloat16"),
        ("torch_dtype", "fp16", "float16"),
        ("torch_dtype", "half", "float16"),
        ("torch_dtype", "fp32", "float32"),
        ("torch_dtype", "torch.bfloat16", "bfloat16"),
        ("torch_dtype", "torch.float16", "float16"),
        ("torch_dtype", "torch.float32", "float32"),
        ("bf16", "true", "bfloat16"),
        ("fp16", "yes", "float16"),
        ("bf16 fp16", "false", "auto"),
        ("bf16", "auto", "auto"),
    ],
    "model.attn_implementation": [
        ("attn_impl flash_attention flash_attn use_flash_attention_2", "fa2", "flash_attention_2"),
        ("flash_attention flash_attn use_flash_attention_2", "true", "flash_attention_2"),
        ("attn_impl flash_attn", "fa4", "flash_attention_4"),
        ("attn_impl", "disabled", "eager"),
        ("attn_impl flash_attn sdp_attention flex_attention eager_attention", "false", "auto"),
        ("sdp_attention", "true", "sdpa"),
        ("flex_attention", "true", "flex_attention"),
        ("eager_attention", "true", "eager"),
    ],
    "model.tokenizer.path": [("tokenizer_name_or_path tokenizer_name tokenizer_path tokenizer_config", "t", SAME)],
    "model.tokenizer.add_tokens": [("tokens", "[a, b]", ("a", "b")), ("tokens", "'a, b'", ("a", "b"))],
    "model.tokenizer.add_special_tokens": [("new_special_tokens additional_special_tokens", "[a]", ("a",))],
    "kernels.enabled": [("use_liger_kernel enable_liger_kernel use_liger", "false", False)],
    "kernels.rope": [("liger_rope", "false", False)],
    "kernels.norm": [("liger_rms_norm", "false", False)],
    "kernels.recompute": [("rebuild", "norms", SAME)],  # our key in earlier versions
    "kernels.mlp": [("liger_glu_activation liger_swiglu", "false", False)],
    "kernels.loss": [
        ("liger_fused_linear_cross_entropy", "true", "linear_cross_entropy"),
        ("liger_cross_entropy", "true", "cross_entropy"),
        ("liger_fused_linear_cross_entropy liger_cross_entropy", "false", "linear_cross_entropy"),
    ],
    "method.type": [("adapter finetuning_type train_type", "lora", SAME)],
    "method.lora_r": [("lora_rank", "7", 7)],
    "method.lora_target_modules": [
        ("lora_target", "[q_proj]", ("q_proj",)),
        ("lora_target_linear", "true", "all-linear"),
    ],
    "method.layers_to_transform": [("peft_layers_to_transform lora_layers_to_transform", "[0, 3]", (0, 3))],
    "method.layers_pattern": [("peft_layers_pattern", "layers", ("layers",))],
    "method.lora_target_parameters": [("target_parameters", "[mlp.gate.weight]", ("mlp.gate.weight",))],
    "method.lora_modules_to_save": [("modules_to_save additional_target", "[lm_head]", ("lm_head",))],
    "method.trainable_token_indices": [("peft_trainable_token_indices trainable_tokens", "[3, a]", (3, "a"))],
    "method.init_lora_weights": [
        ("peft_init_lora_weights", "pissa", SAME),
        ("pissa_init", "true", "pissa_niter_16"),
        ("pissa_init", "false", "default"),
    ],
    "method.use_dora": [("peft_use_dora", "true", True)],
    "method.bnb_4bit_quant_type": [("quantization_type", "fp4", "fp4")],
    "method.bnb_4bit_use_double_quant": [("double_quantization use_bnb_nested_quant", "false", False)],
    "method.use_rslora": [("peft_use_rslora", "true", True)],
    "method.trainable": [("unfrozen_parameters", "['norm']", ("norm",))],
    "data.val_split": [("val_set_size val_size test_size split_dataset_ratio", "0.125", 0.125)],
    "data.prompt_template": [("template", "alpaca", SAME)],
    "data.system_prompt": [("system default_system system_message", "Be brief.", SAME)],
    "data.train_on": [
        ("train_on_inputs train_on_prompt", "true", "all"),
        ("train_on_inputs train_on_prompt", "false", "assistant"),
        ("assistant_only_loss", "true", "assistant"),
        ("assistant_only_loss", "false", "all"),
        ("mask_history", "true", "last"),
    ],
    "data.max_length": [("sequence_len seq_len cutoff_len max_seq_length max_seq_len model_max_length", "519", 519)],
    "data.packing": [("sample_packing neat_packing", "false", False)],
    "data.num_proc": [("dataset_num_proc preprocessing_num_workers dataset_processes", "3", 3)],
    "train.per_device_train_batch_size": [
        ("micro_batch_size train_batch_size per_device_batch_size per_gpu_train_batch_size", "3", 3)
    ],
    "train.gradient_accumulation_steps": [
        ("gradient_accumulation grad_accum grad_accum_steps accumulate_grad_batches", "3", 3)
    ],
    "train.num_train_epochs": [("num_epochs epochs n_epochs max_epochs train_epochs", "3", 3.0)],
    "train.max_steps": [("max_train_steps", "3", 3)],
    "train.learning_rate": [("lr", "3e-4", 3e-4)],
    "train.lr_scheduler_type": [("lr_scheduler scheduler", "linear", SAME)],
    "train.warmup_ratio": [("warmup_proportion lr_warmup_fraction", "0.25", 0.25)],
    "train.warmup_steps": [("warmup num_warmup_steps lr_warmup_steps", "3", 3)],
    "train.min_lr_ratio": [("cosine_min_lr_ratio", "0.25", 0.25)],
    "train.optim": [
        ("optimizer", "adamw", "adamw_torch_fused"),
        ("optimizer", "AdamW", "adamw_torch_fused"),
        ("optimizer", "adamw_hf", "adamw_torch"),
        ("optimizer", "adamw_bnb_8bit", "adamw_8bit"),
        ("optimizer", "lion_32bit", "lion"),
        ("optimizer", "adamw_torch", SAME),
    ],
    "train.neftune_noise_alpha": [("neftune_alpha noisy_embedding_alpha", "5", 5.0)],
    "train.max_grad_norm": [("max_norm grad_clip clip_grad max_grad_clip gradient_clipping", "0.25", 0.25)],
    "train.gradient_checkpointing": [
        ("activation_checkpointing enable_activation_checkpointing grad_ckpt", "true", True)
    ],
    "train.fp8": [("fp8", "true", True)],
    "train.seed": [("seed random_seed random_state", "7", 7)],
    "eval.eval_strategy": [("evaluation_strategy", "epoch", SAME)],
    "eval.early_stopping_patience": [("early_stopping_steps", "3", 3)],
    "eval.eval_steps": [("eval_interval eval_freq run_eval_every_n_steps", "7", 7)],
    "eval.per_device_eval_batch_size": [("eval_batch_size per_gpu_eval_batch_size", "7", 7)],
    "checkpoint.save_steps": [("save_interval save_freq save_every_n_steps", "7", 7)],
    "checkpoint.save_total_limit": [("save_total keep_last_n_checkpoints", "7", 7)],
    "checkpoint.resume_from_checkpoint": [("auto_resume_from_checkpoints resume", "never", SAME)],
    "checkpoint.overwrite": [("overwrite_output_dir", "true", True)],
    "checkpoint.output_dir": [("output_dir out_dir", "o", SAME)],
    "logging.logging_steps": [("log_interval log_every_n_steps log_every", "7", 7)],
}
# Aliases of lists accept one path or a list. ITEMS: aliases inside the items.
DATASETS = {
    "data.datasets": "dataset dataset_name data_path train_file train_files",
    "data.eval_datasets": "eval_dataset val_dataset validation_file test_datasets",
}
ITEMS = [
    ("type", "chat_template", "format", "messages"),
    ("type", "completion", "format", "text"),
    ("type", "pretrain", "format", "text"),
    ("subset", "x", "name", "x"),
    ("num_samples", "7", "max_samples", 7),
]
FLAT = {
    "model.model_name_or_path": "base_model: some/model",
    "data.datasets": "dataset: some/data",
    "checkpoint.output_dir": "output_dir: runs/one",
}
NEEDS = {
    "method.trainable": "method: {type: freeze}",
    "method.bnb_4bit_quant_type": "method: {type: qlora}",
    "method.bnb_4bit_use_double_quant": "method: {type: qlora}",
    "method.init_lora_weights": "method: {type: lora}",
    "method.trainable_token_indices": "method: {type: lora}",
    "method.layers_to_transform": "method: {type: lora}",
    "method.layers_pattern": "method: {type: lora, layers_to_transform: [0]}",
    "eval.eval_strategy": "val_size: 0.1",
    "eval.early_stopping_patience": "val_size: 0.1\neval: {eval_strategy: epoch}",
}


def text_of(key: str, line: str) -> str:
    """Return a flat recipe in which `line` sets `key`."""
    return "\n".join([*(other for name, other in FLAT.items() if name != key), NEEDS.get(key, ""), line]) + "\n"


def value_of(recipe: object, key: str) -> object:
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


@pytest.mark.parametrize("key", TABLE)
def test_an_alias_sets_its_key_with_one_notice(key, load):
    for names, written, meant in TABLE[key]:
        for name in names.split():
            recipe = load(text_of(key, f"{name}: {written}"))
            assert value_of(recipe, key) == (written if meant is SAME else meant), name
            assert sum(f": {name} is " in notice and f" {key}" in notice for notice in recipe.notices) == 1, name
    assert load(dump_recipe(recipe)).notices == ()


@pytest.mark.parametrize(
    ("key", "line", "value"),
    [
        ("model.tokenizer.path", "model: {model_name_or_path: m, tokenizer_path: t}", "t"),
        ("data.max_length", "data: {max_seq_len: 7}", 7),
        ("train.learning_rate", "train: {lr: 0.5}", 0.5),
    ],
)
def test_an_alias_is_accepted_in_the_section_of_its_key(key, line, value, load):
    text = text_of("model.model_name_or_path" if line.startswith("model") else key, line)
    assert value_of(load(text), key) == value


@pytest.mark.parametrize("key", DATASETS)
def test_aliases_of_data_sets_and_of_their_items(key, load):
    for name in DATASETS[key].split():
        for written, paths in {"a": ["a"], "[a, {path: b}]": ["a", "b"]}.items():
            assert [item.path for item in value_of(load(text_of(key, f"{name}: {written}")), key)] == paths, name
    for name, written, leaf, meant in ITEMS:
        items = f"data: {{{key.split('.')[1]}: [{{path: a, {name}: {written}}}]}}"
        items = items if key == "data.datasets" else items.replace("{eval", "{datasets: [{path: b}], eval")
        recipe = load(text_of("data.datasets", items))
        assert getattr(value_of(recipe, key)[0], leaf) == meant, name


def test_the_tables_contain_every_alias():
    named = {(key, name) for key, rows in TABLE.items() for names, *_ in rows for name in names.split()}
    named |= {(key, name) for key, names in DATASETS.items() for name in names.split()}
    named |= {(f"{key}[].{leaf}", name) for key in DATASETS for name, _, leaf, _ in ITEMS}
    named |= {("train.lr_groups[].parameters", "modules"), ("train.lr_groups[].learning_rate", "lr")}  # the next test
    assert named == {(row.key, name) for row in ALIASES for name in row.names}


def test_groups_of_learning_rates_are_read_as_axolotl_writes_them(load):
    written = "train: {lr_groups: [{modules: [self_attn.o_proj, norm], lr: 1e-6}]}"
    (group,) = load(text_of("train.lr_groups", written)).train.lr_groups
    assert (group.parameters, group.learning_rate) == (r"self_attn\.o_proj|norm", 1e-6)


SAVED = """\
kernels: {rebuild: norms, gradient_sums: true}
model: {model_name_or_path: m}
data: {datasets: [{path: d}]}
checkpoint: {output_dir: o}
"""


def test_a_recipe_saved_by_an_earlier_version_loads_with_a_notice_per_old_key(load):
    recipe = load(SAVED, "kernels.gradient_sums=false")
    assert recipe.kernels.recompute == "norms"
    assert recipe.notices == (
        "recipe.yaml:1: kernels.gradient_sums is ignored: it has no effect any more.",
        "recipe.yaml:1: kernels.rebuild is read as kernels.recompute.",
        "--set kernels.gradient_sums=false: kernels.gradient_sums is ignored: it has no effect any more.",
    )
    assert load(SAVED.replace("rebuild: norms, ", ""), "kernels.rebuild=true").kernels.recompute is True
    assert load(dump_recipe(recipe)) == recipe and load(dump_recipe(recipe)).notices == ()


def test_a_flat_file_is_the_same_recipe_as_one_with_sections(load, required):
    recipe = load(text_of("", ""))
    assert recipe == load(required)
    assert load("model: some/model\ndataset: [some/data]\noutput_dir: runs/one\n") == recipe


def test_notices_are_in_the_order_of_the_file(load):
    flat = "base_model: m\ndataset: d\noutput_dir: o\ndata: {train_on_inputs: false}"
    assert load(flat).notices == (
        "recipe.yaml:1: base_model is read as model.model_name_or_path.",
        "recipe.yaml:2: dataset is read as data.datasets.",
        "recipe.yaml:3: output_dir is read as checkpoint.output_dir.",
        "recipe.yaml:4: data.train_on_inputs is read as data.train_on.",
    )


def test_an_alias_may_repeat_its_key_and_an_override_replaces_it(load, required):
    assert load(required + "lr: 1e-4\ntrain: {learning_rate: 0.0001}\n").train.learning_rate == 1e-4
    assert load(required + "train: {learning_rate: 1e-3}\n", "lr=1e-4").train.learning_rate == 1e-4


EVERYTHING = """\
model:
  model_name_or_path: some/model
  revision: '12e4567'
  dtype: float32
  init: random
  num_hidden_layers: 2
  tokenizer: {pad_token: '~'}
kernels: {enabled: false, loss: torch}
data: {datasets: [{path: 'a: b', name: 'no', columns: {'on': 'off'}}], system_prompt: "line\\nline \\u2028 é 😀"}
train: {max_steps: 7, global_batch_size: 8, warmup_steps: 0, learning_rate: 1e-7, seed: 0}
eval: {eval_strategy: no}
checkpoint: {output_dir: '2024', save_strategy: off, resume_from_checkpoint: runs/x/checkpoints/step-5}
"""


@pytest.mark.parametrize("text", ["", EVERYTHING], ids=["defaults", "everything"])
def test_a_dumped_recipe_loads_as_the_same_recipe(text, load, required, tmp_path):
    (tmp_path / "some" / "data").mkdir(parents=True)
    recipe = load(text or required)
    again = load(dump_recipe(recipe))
    assert again == recipe and dump_recipe(again) == dump_recipe(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert text or recipe.data.datasets[0].path == str(tmp_path / "some" / "data")  # absolute: the dump may move
    schema, dumped = recipe_schema(), recipe.model_dump(mode="json")
    for section, entry in schema["properties"].items():
        if "$ref" in entry:
            assert set(dumped[section]) == set(schema["$defs"][entry["$ref"].rpartition("/")[2]]["properties"])
