"""Keys of Axolotl, LLaMA-Factory and TRL, from their documentation: signs of a tool's files, its defaults that differ
from ours, and reasons why keys have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligertune.recipe.aliases import Alias


@dataclass(frozen=True)
class Peer:
    """A tool. signs: keys that identify its files; defaults: its defaults that differ from ours, by our keys."""

    name: str
    signs: str  # separated by spaces
    defaults: Mapping[str, Any]


# Defaults of transformers' TrainingArguments, which TRL and LLaMA-Factory extend.
TRAINER = {
    "train.per_device_train_batch_size": 8,
    "train.num_train_epochs": 3,
    "train.lr_scheduler_type": "linear",
    "train.warmup_ratio": 0.0,
    "data.packing": False,
    "checkpoint.save_steps": 500,
}
LAUNCHER = "configure the launcher instead: accelerate launch -m ligertune train RECIPE"
FSDP = "parallel.strategy: fsdp shards weights, gradients and optimizer states per layer, and has no further options"
OWN_TEMPLATE = "conversations use the tokenizer's chat template; data.prompt_template accepts a Jinja file"
PREPARED = "prepared data is cached by content in the user's cache folder"
KERNELS = "ligertune's kernels run wherever a layer is recognised"
NO_HUB = "ligertune train does not upload; the model is in output_dir/model"
FOUND_IN_THE_MODEL = "the model's configuration holds it"
PER_EPOCH = "the steps per epoch are known once the data is read; `ligertune data RECIPE` prints them"

# Keys of any of the tools.
REASONS = {
    "accelerator_config": LAUNCHER,
    "chat_template": OWN_TEMPLATE,
    "chat_template_jinja": OWN_TEMPLATE,
    "chat_template_path": OWN_TEMPLATE,
    "dataset_prepared_path": PREPARED,
    "ddp_timeout": "parallel.timeout is the timeout within a step, in seconds; saves and evaluations have a longer one",
    "conversation": OWN_TEMPLATE,
    "deepspeed": "parallel.strategy chooses DeepSpeed; configure everything else in the launcher",
    "do_eval": "eval.eval_strategy switches evaluations on",
    "do_train": "`ligertune train` trains",
    "env": "set variables in the shell",
    "evals_per_epoch": PER_EPOCH,
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered in their dtype and cast before each product",
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    "fsdp_version": FSDP,
    "gradient_checkpointing_kwargs": "checkpointing is always non-reentrant",
    "hub_model_id": NO_HUB,
    "hub_strategy": NO_HUB,
    "model_type": FOUND_IN_THE_MODEL,
    "overwrite_cache": PREPARED,
    "pad_to_sequence_len": "rows are padded only to a multiple of a few tokens",
    "packing_strategy": "there is one packing strategy, which fills about 99 % of each row",
    "plot_loss": "metrics.jsonl has a line per logged step",
    "plugins": KERNELS,
    "push_to_hub": NO_HUB,
    "saves_per_epoch": PER_EPOCH,
    "strict": "an unknown key is always an error",
    "tf32": "float32 products never use TF32",
    "tokenizer_type": FOUND_IN_THE_MODEL,
    "wandb_entity": "export WANDB_ENTITY",
    "wandb_project": "export WANDB_PROJECT",
}

# Keys that mean something else here; they are removed before aliases are read.
NOT_OURS = {
    "overwrite_output_dir": "`ligertune train --overwrite` replaces a run",
    "resume_from_checkpoint": "checkpoints of other tools cannot be read; `ligertune train --resume` continues a run",
    "template": OWN_TEMPLATE,
}


AXOLOTL = Peer(
    "Axolotl",
    "base_model sequence_len sample_packing micro_batch_size val_set_size num_epochs adapter "
    "dataset_prepared_path train_on_inputs special_tokens pad_to_sequence_len flash_attention "
    "load_in_4bit",
    {"train.per_device_train_batch_size": 1, "data.max_length": 512, "data.packing": False},
)
LLAMA_FACTORY = Peer(
    "LLaMA-Factory",
    "stage finetuning_type cutoff_len template dataset_dir do_train preprocessing_num_workers "
    "overwrite_cache lora_rank lora_target plot_loss quantization_bit neat_packing val_size",
    TRAINER | {"train.learning_rate": 5e-5, "data.max_length": 2048, "method.type": "lora", "method.lora_r": 8},
)
TRL = Peer(
    "TRL",
    "dataset_name dataset_config dataset_train_split dataset_test_split dataset_text_field use_peft "
    "max_seq_length assistant_only_loss completion_only_loss padding_free eos_token dataset_num_proc "
    "model_revision",
    TRAINER | {"train.learning_rate": 2e-5, "data.max_length": 1024, "train.gradient_checkpointing": True},
)
TOOLS = (AXOLOTL, LLAMA_FACTORY, TRL)


def _names(value: Any) -> Any:
    """Convert `all`, and names separated by commas."""
    if value in ("all", "all-linear"):
        return "all-linear"
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


# Aliases for imports only: in a recipe these names would be ambiguous.
IMPORTED = (
    Alias("method.type", ("use_peft",), lambda value: {True: "lora", False: "full"}.get(value, value)),
    Alias("method.lora_target_modules", ("lora_target",), _names),
    Alias("method.lora_modules_to_save", ("additional_target",), _names),
    Alias("train.gradient_checkpointing", ("gradient_checkpointing",), lambda value: value == "unsloth" or value),
    Alias("model.tokenizer.pad_token", ("pad_token",)),
    Alias("model.tokenizer.eos_token", ("eos_token",)),
)
