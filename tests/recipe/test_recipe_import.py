"""`ligertune recipe import`: files as Axolotl's, LLaMA-Factory's and TRL's documentation shows them."""

import json
from pathlib import Path

import pytest

from ligertune.cli.app import app
from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.recipe.importers.import_recipe import import_recipe
from ligertune.recipe.importers.import_state import Import

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
load_in_8bit: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: json
    data_files: mine.jsonl
    ds_type: json
    type: chat_template
    field_messages: turns
    message_property_mappings: {role: from, content: value}
    shards: 4
  - path: some/data
    type: {field_instruction: question, field_output: answer, format: '{instruction}'}
test_datasets:
  - path: some/tests
    type: completion
val_set_size: 0.0
output_dir: ./outputs/out
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 2
num_epochs: 2
optimizer: adamw_torch_8bit_or_so
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
train_on_inputs: false
gradient_checkpointing: unsloth
saves_per_epoch: 1
wandb_project:
weight_decay: 0.0
special_tokens: {pad_token: <pad>}
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
finetuning_type: full
dataset: mine, chats, unknown_demo
dataset_dir: sets
template: llama3
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/sft
save_steps: 250
overwrite_output_dir: true
per_device_train_batch_size: 1
learning_rate: 1.0e-4
lr_scheduler_type: cosine
bf16: true
"""
DATASET_INFO = {
    "mine": {"file_name": "mine.json", "columns": {"prompt": "question", "response": "output"}, "num_samples": 5},
    "chats": {"hf_hub_url": "some/chats", "formatting": "sharegpt", "subset": "en", "columns": {"messages": "talk"}},
}
TRL = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
dataset_config: main
dataset_test_split: held_out
eval_strategy: steps
eval_steps: 100
packing: true
padding_free: true
max_steps: 50
eos_token: <|im_end|>
chat_template_path: HuggingFaceTB/SmolLM3-3B
completion_only_loss: false
output_dir: out
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """imported(text): the result, after checking that its recipe loads without notices."""
    monkeypatch.chdir(tmp_path)

    def imported(text: str) -> Import:
        Path("tool.yml").write_text(text)
        result = import_recipe(Path("tool.yml"))
        Path("ours.yaml").write_text(result.text)
        assert load_recipe(Path("ours.yaml")).notices == ()
        return result

    return imported


def left(result: Import) -> dict[str, str]:
    return {item.key: item.why for item in result.left}


def test_an_axolotl_file(imported):
    result = imported(AXOLOTL)
    recipe = load_recipe(Path("ours.yaml"))
    assert result.peer.name == "Axolotl"
    assert (recipe.model.model_name_or_path, recipe.model.tokenizer.pad_token) == ("NousResearch/Llama-3.2-1B", "<pad>")
    assert (recipe.data.max_length, recipe.data.packing, recipe.data.train_on) == (4096, True, "assistant")
    assert (recipe.train.num_train_epochs, recipe.train.learning_rate) == (2.0, 0.0002)
    assert recipe.train.gradient_checkpointing is True
    assert recipe.train.per_device_train_batch_size == 1  # its default, where ours is 4
    alpaca, chats, fields = recipe.data.datasets
    assert (alpaca.path, alpaca.format) == ("teknium/GPT4-LLM-Cleaned", "alpaca")
    assert (chats.path, chats.format, chats.columns) == ("mine.jsonl", "sharegpt", {"conversations": "turns"})
    # its prompt is the instruction alone, without Stanford's sentences
    assert (fields.format, fields.columns) == ("prompt_completion", {"prompt": "question", "completion": "answer"})
    assert recipe.data.eval_datasets[0].format == "text"
    reasons = left(result)
    assert recipe.checkpoint.save_strategy == "epoch"
    assert set(reasons) == {"model_type", "optimizer", "datasets[1].shards"}
    assert "must be" in reasons["optimizer"]  # the complaint lists the optimizers


def test_a_llama_factory_file(imported, tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    result = imported(LLAMA_FACTORY)
    recipe = load_recipe(Path("ours.yaml"))
    mine, chats, unknown = recipe.data.datasets
    assert (mine.path, mine.format, mine.columns) == ("sets/mine.json", "alpaca", {"instruction": "question"})
    assert (mine.max_samples, chats.max_samples) == (5, 1000)
    assert (chats.path, chats.name, chats.format) == ("some/chats", "en", "sharegpt")
    assert chats.columns == {"conversations": "talk"} and unknown.path == "unknown_demo"
    assert (recipe.train.num_train_epochs, recipe.train.warmup_ratio, recipe.data.packing) == (3.0, 0.0, False)
    assert recipe.train.lr_scheduler_type == "cosine" and recipe.checkpoint.save_steps == 250
    assert recipe.checkpoint.overwrite is False
    assert (recipe.model.tokenizer.chat_template, recipe.data.prompt_template) == ("llama3", "chat")
    assert {"overwrite_output_dir", "dataset"} <= set(left(result))


def test_a_trl_file(imported):
    result = imported(TRL)
    recipe = load_recipe(Path("ours.yaml"))
    assert recipe.data.datasets[0].name == "main" and recipe.data.eval_datasets[0].split == "held_out"
    assert (recipe.train.max_steps, recipe.train.num_train_epochs) == (50, None)
    assert (recipe.data.max_length, recipe.train.gradient_checkpointing) == (1024, True)
    assert recipe.data.padding_free is True
    assert recipe.model.tokenizer.eos_token == "<|im_end|>"
    assert list(left(result)) == ["chat_template_path"]
    assert result.left[0].line == 11
    assert (
        '# NOT IMPORTED, changes what is trained:\n#   chat_template_path: "HuggingFaceTB/SmolLM3-3B" (' in result.text
    )
    assert "# Defaults of TRL:" in result.text


ADAPTER = "model_name_or_path: a/b\ndataset: some/data\nstage: sft\nfinetuning_type: lora\n"


def test_steps_win_over_epochs_and_minus_one_is_not_given(imported):
    result = imported(TRL + "num_train_epochs: 3\nwarmup_steps: 10\nwarmup_ratio: 0.1\n")
    recipe = load_recipe(Path("ours.yaml"))
    assert (recipe.train.max_steps, recipe.train.num_train_epochs) == (50, None)
    assert (recipe.train.warmup_steps, recipe.train.warmup_ratio) == (10, None)
    assert left(result)["num_train_epochs"] == "train.max_steps replaces it, as in the tool"
    imported(TRL.replace("max_steps: 50", "max_steps: -1\nwarmup_steps: 0") + "num_train_epochs: 2\n")
    recipe = load_recipe(Path("ours.yaml"))
    assert (recipe.train.max_steps, recipe.train.num_train_epochs, recipe.train.warmup_ratio) == (None, 2.0, 0.0)


def test_trl_trains_the_prompt_too_without_completion_only_loss(imported):
    for more, train_on in (("", "all"), ("assistant_only_loss: true\n", "assistant")):
        imported(TRL + more)
        assert load_recipe(Path("ours.yaml")).data.train_on == train_on
    imported(TRL.replace("completion_only_loss: false", "completion_only_loss: true"))
    assert load_recipe(Path("ours.yaml")).data.train_on == "assistant"


def test_llama_factorys_defaults_of_template_lora_and_memory(imported):
    for more, rank, alpha, template, checkpointing in (
        ("", 8, 16, "chat", True),
        ("lora_rank: 32\ntemplate: qwen\n", 32, 64, "chat", True),
        ("lora_alpha: 4\ntemplate: alpaca\ndisable_gradient_checkpointing: true\n", 8, 4, "alpaca", False),
    ):
        imported(ADAPTER + more)
        recipe = load_recipe(Path("ours.yaml"))
        assert (recipe.method.type, recipe.method.lora_r, recipe.method.lora_alpha) == ("lora", rank, alpha)
        assert (recipe.data.prompt_template, recipe.train.gradient_checkpointing) == (template, checkpointing)
        assert recipe.data.on_overlength == "truncate"
    text = imported(ADAPTER.replace("lora", "full")).text
    assert "lora_r:" not in text  # full fine-tuning has no rank


def test_adapted_weights_of_experts_are_read_from_axolotl_trl_and_peft(imported):
    axolotl = "adapter: lora\nlora_target_linear: true\nlora_target_parameters: [mlp.experts.down_proj]\n"
    for text in (
        AXOLOTL + axolotl,
        TRL + "use_peft: true\nlora_target_parameters: [mlp.experts.down_proj]\n",
        TRL + "use_peft: true\ntarget_parameters: [mlp.experts.down_proj]\n",
    ):
        imported(text)
        assert load_recipe(Path("ours.yaml")).method.lora_target_parameters == ("mlp.experts.down_proj",)


def test_pretraining_reads_raw_text(imported, tmp_path):
    (tmp_path / "data").mkdir()
    info = {"some/data": {"file_name": "c4.json", "columns": {"prompt": "body"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    imported(ADAPTER.replace("stage: sft", "stage: pt").replace("lora", "full"))
    recipe = load_recipe(Path("ours.yaml"))
    assert (recipe.task, recipe.data.packing, recipe.data.prompt_template) == ("sft", True, "auto")
    assert (recipe.data.datasets[0].format, recipe.data.datasets[0].columns) == ("text", {"text": "body"})


def test_nulls_are_not_given_and_one_tracker_is_a_list(imported):
    imported(ADAPTER + "fp16:\noutput_dir:\nreport_to: wandb\n")
    recipe = load_recipe(Path("ours.yaml"))
    assert (recipe.checkpoint.output_dir, recipe.logging.report_to) == ("runs/tool", ("wandb",))


DPO_OF_TRL = "dataset_name: a/b\nmodel_name_or_path: c/d\nprecompute_ref_log_probs: true\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AXOLOTL + "rl: dpo\nrl_beta: 0.2\nrpo_alpha: 0.5\n", {"loss_type": "sigmoid", "beta": 0.2, "sft_weight": 0.5}),
        (AXOLOTL + "rl: orpo\norpo_alpha: 0.3\n", {"loss_type": "orpo", "orpo_alpha": 0.3}),
        (AXOLOTL + "rl: kto\nkto_undesirable_weight: 0.5\n", {"loss_type": "kto", "undesirable_weight": 0.5}),
        (ADAPTER.replace("sft", "dpo") + "pref_beta: 0.3\npref_loss: ipo\nref_model: x/y\n",
         {"loss_type": "ipo", "beta": 0.3}),
        (ADAPTER.replace("sft", "dpo") + "pref_beta: 0.3\npref_loss: orpo\n", {"loss_type": "orpo", "orpo_alpha": 0.3}),
        (ADAPTER.replace("sft", "kto") + "kto_chosen_weight: 2.0\n", {"loss_type": "kto", "desirable_weight": 2.0}),
        (DPO_OF_TRL + "beta: 0.05\nld_alpha: 0.5\n",
         {"loss_type": "sigmoid", "beta": 0.05, "ld_alpha": 0.5, "reference": "precompute"}),
        (DPO_OF_TRL + "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\n",
         {"loss_type": "sigmoid", "sft_weight": 0.2, "reference": "precompute"}),
        (DPO_OF_TRL + "loss_type: [sigmoid_norm]\n",
         {"loss_type": "sigmoid", "length_normalization": True, "reference": "precompute"}),
    ],
)  # fmt: skip
def test_preference_optimisation_is_task_dpo_with_the_loss_of_the_file(text, expected, imported):
    found = imported(text)
    recipe = load_recipe(Path("ours.yaml"))
    assert recipe.task == "dpo"
    assert recipe.train.learning_rate == (1e-6 if text.startswith(DPO_OF_TRL) else recipe.train.learning_rate)
    assert {key: value for key, value in recipe.preference.model_dump().items() if key in expected} == expected
    if "ref_model" in text:
        assert ("ref_model", "the reference is the model before training") in [
            (item.key, item.why.split(";")[0]) for item in found.left
        ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (ADAPTER.replace("sft", stage), rf"tool\.yml:3: stage: {stage} is not supported.*not on rewards")
            for stage in ("ppo",)
        ),
        (AXOLOTL + "rl: grpo\n", r"rl: grpo is not supported"),
        (
            ADAPTER.replace("sft", "dpo") + "pref_loss: kto_pair\n",
            r'preference.loss_type \(written as pref_loss\) is "kto_pair"',
        ),
        (ADAPTER.replace("lora", "oft"), 'method.type .* is "oft"'),
        (ADAPTER.replace("lora", "freeze"), "freeze trains the last 2 layers, and a/b is no folder"),
        ("model: {model_name_or_path: a/b}\n", "recipe check"),
        ("learning_rate: 1.0\n", "has none of the keys"),
        ("base_model: a/b\nsequence_len: 10\n", "data.datasets is missing"),
        ("dataset_name: a/b\nuse_peft: false\n", "model.model_name_or_path is missing"),
        ("- 1\n", "a recipe is a mapping"),
    ],
)
def test_other_files_are_refused(text, words, imported):
    with pytest.raises(UserError, match=words):
        imported(text)


def test_an_invalid_dataset_info_is_refused(imported, tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset_info\.json is not a valid JSON file"):
        imported(LLAMA_FACTORY)


def test_the_command_overwrites_no_file(imported, tmp_path):
    from typer.testing import CliRunner

    imported(TRL)
    arguments = ["recipe", "import", "tool.yml", "--out", "new.yaml"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["peer"] == "TRL"
    assert isinstance(CliRunner().invoke(app, arguments).exception, UserError)
    printed = CliRunner().invoke(app, arguments[:3])
    assert printed.stdout == Path("new.yaml").read_text()


TORCHTUNE = """\
model: {_component_: torchtune.models.qwen2.qwen2_0_5b}
tokenizer: {path: vocab.json}
checkpointer: {checkpoint_dir: m}
metric_logger: {log_dir: logs}
"""
UNSLOTH = "model: a/b\ndata: {dataset: x/y}\ntraining: {num_epochs: 1}\nlora: {lora_r: 8}\nlogging: {}\n"
TEXTS = [
    (AXOLOTL, "Axolotl"),
    (LLAMA_FACTORY, "LLaMA-Factory"),
    (TRL, "TRL"),
    (TORCHTUNE, "torchtune"),
    (UNSLOTH, "unsloth"),
]


@pytest.mark.parametrize(("text", "tool"), TEXTS, ids=[tool for _, tool in TEXTS])
def test_a_file_of_another_tool_is_named_and_sent_to_the_import(text, tool, complaints):
    (line,) = complaints(text)
    assert line.startswith(f"recipe.yaml looks like a file of {tool} (")
    assert line.endswith(" Convert it: ligertune recipe import recipe.yaml --out recipe.yaml")


def test_a_recipe_with_one_section_of_another_tool_keeps_its_own_complaints(required, complaints):
    assert not any("looks like" in line for line in complaints(f"{required}lora: {{lora_r: 8}}\n"))


def test_a_recipe_with_a_key_of_another_tool_keeps_its_own_complaints(required, complaints):
    assert complaints(f"{required}sample_packing: true\nval_set_size: 2\n") == [
        "recipe.yaml:5: data.val_split (written as val_set_size) is 2 (an integer); it must be a number (at least 0, "
        "below 1)."
    ]
