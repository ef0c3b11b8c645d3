"""What other tools' YAML files say, as their documentation has it: how they are told apart, their defaults where ours
differ, and what becomes of keys that have no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligertune.recipe.aliases import Alias


@dataclass(frozen=True)
class Peer:
    """A tool. `signs` are keys that hardly any other has; `defaults` are its own, by our keys."""

    name: str
    signs: frozenset[str]
    defaults: Mapping[str, Any]


TRAINER = {  # of transformers' TrainingArguments, on which TRL and LLaMA-Factory stand
    "train.per_device_train_batch_size": 8,
    "train.num_train_epochs": 3,
    "train.lr_scheduler_type": "linear",
    "train.warmup_ratio": 0.0,
    "data.packing": False,
    "checkpoint.save_steps": 500,
}
LAUNCHER = "say it to the launcher: accelerate launch -m ligertune train RECIPE"
FSDP = "parallel.strategy: fsdp shares weights, gradients and optimizer states layer by layer, with no more to say"
OWN_TEMPLATE = (
    "conversations are rendered by the tokenizer's own chat template; data.prompt_template takes a jinja file"
)
PREPARED = "prepared data is cached by its content, in the user's cache"
KERNELS = "our own kernels run wherever they are recognised"
NO_HUB = "nothing is uploaded; the model is in output_dir/model"
FOUND_IN_THE_MODEL = "it is read from the model's own configuration"
PER_EPOCH = "steps of an epoch are known once the data is read; `ligertune data RECIPE` says how many"

REASONS = {  # of all three
    "accelerator_config": LAUNCHER,
    "chat_template": OWN_TEMPLATE,
    "chat_template_jinja": OWN_TEMPLATE,
    "chat_template_path": OWN_TEMPLATE,
    "dataset_prepared_path": PREPARED,
    "ddp_timeout": "parallel.timeout is what ranks wait in a step, in seconds; saves and evaluations have longer",
    "conversation": OWN_TEMPLATE,
    "deepspeed": "parallel.strategy says what there is here; everything else about it is the launcher's",
    "do_eval": "an evaluation is asked for by eval.eval_strategy",
    "do_train": "`ligertune train` trains",
    "env": "set variables in the shell",
    "evals_per_epoch": PER_EPOCH,
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered as they are, and cast where they are multiplied",
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    "fsdp_version": FSDP,
    "gradient_checkpointing_kwargs": "recomputation is never reentrant",
    "hub_model_id": NO_HUB,
    "hub_strategy": NO_HUB,
    "model_type": FOUND_IN_THE_MODEL,
    "overwrite_cache": PREPARED,
    "pad_to_sequence_len": "a packed row is as long as its tokens; batches are padded to a multiple only",
    "packing_strategy": "rows are filled to 99 % by length, with nothing to ask for",
    "plot_loss": "metrics.jsonl has a line for each logged step",
    "plugins": KERNELS,
    "push_to_hub": NO_HUB,
    "saves_per_epoch": PER_EPOCH,
    "strict": "a key that is not known is always an error",
    "tf32": "float32 products are exact",
    "tokenizer_type": FOUND_IN_THE_MODEL,
    "wandb_entity": "export WANDB_ENTITY",
    "wandb_project": "export WANDB_PROJECT",
}

# Read before names are: what these say would mean something else here.
NOT_OURS = {
    "overwrite_output_dir": "a run is replaced by `ligertune train --overwrite`, and never unasked",
    "resume_from_checkpoint": "its checkpoints are not ours; `ligertune train --resume` continues a run",
    "template": OWN_TEMPLATE,
}

AXOLOTL = Peer(
    "Axolotl",
    frozenset(
        {
            "base_model",
            "sequence_len",
            "sample_packing",
            "micro_batch_size",
            "val_set_size",
            "num_epochs",
            "adapter",
            "dataset_prepared_path",
            "train_on_inputs",
            "special_tokens",
            "pad_to_sequence_len",
            "flash_attention",
            "load_in_4bit",
        }
    ),
    {"train.per_device_train_batch_size": 1, "data.max_length": 512, "data.packing": False},
)
LLAMA_FACTORY = Peer(
    "LLaMA-Factory",
    frozenset(
        {
            "stage",
            "finetuning_type",
            "cutoff_len",
            "template",
            "dataset_dir",
            "do_train",
            "preprocessing_num_workers",
            "overwrite_cache",
            "lora_rank",
            "lora_target",
            "plot_loss",
            "quantization_bit",
            "neat_packing",
            "val_size",
        }
    ),
    TRAINER | {"train.learning_rate": 5e-5, "data.max_length": 2048, "method.type": "lora", "method.lora_r": 8},
)
TRL = Peer(
    "TRL",
    frozenset(
        {
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            "dataset_test_split",
            "dataset_text_field",
            "use_peft",
            "max_seq_length",
            "assistant_only_loss",
            "completion_only_loss",
            "padding_free",
            "eos_token",
            "dataset_num_proc",
            "model_revision",
        }
    ),
    TRAINER | {"train.learning_rate": 2e-5, "data.max_length": 1024, "train.gradient_checkpointing": True},
)
TOOLS = (AXOLOTL, LLAMA_FACTORY, TRL)


def _names(value: Any) -> Any:
    """`all`, and a list that is written with commas."""
    if value in ("all", "all-linear"):
        return "all-linear"
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


# Names that are read in an import only: in a recipe they would say less than the keys that they stand for.
IMPORTED = (
    Alias("method.type", ("use_peft",), lambda value: {True: "lora", False: "full"}.get(value, value)),
    Alias("method.lora_target_modules", ("lora_target",), _names),
    Alias("method.lora_modules_to_save", ("additional_target",), _names),
    Alias("train.gradient_checkpointing", ("gradient_checkpointing",), lambda value: value == "unsloth" or value),
    Alias("model.tokenizer.pad_token", ("pad_token",)),
    Alias("model.tokenizer.eos_token", ("eos_token",)),
)
