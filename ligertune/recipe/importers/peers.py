"""Axolotl, LLaMA-Factory and TRL by their documentation: signs of their files, and defaults that differ from ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligertune.recipe.aliases import OPTIMIZER_NAMES, UNSET, Alias
from ligertune.recipe.section import convert_by


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
    "data.on_overlength": "truncate",
    "train.gradient_checkpointing": True,
    "checkpoint.save_steps": 500,
    "checkpoint.save_total_limit": None,
}
TWICE_THE_RANK = "twice the rank"  # LLaMA-Factory's default of lora_alpha

AXOLOTL = Peer(
    "Axolotl",
    "base_model sequence_len sample_packing micro_batch_size val_set_size num_epochs adapter "
    "dataset_prepared_path train_on_inputs special_tokens pad_to_sequence_len flash_attention "
    "load_in_4bit rl evals_per_epoch saves_per_epoch unfrozen_parameters lora_target_linear wandb_entity",
    {
        "train.per_device_train_batch_size": 1,
        "data.max_length": 512,
        "data.packing": False,
        "checkpoint.save_strategy": "epoch",
        "checkpoint.save_total_limit": 4,
    },
)
LLAMA_FACTORY = Peer(
    "LLaMA-Factory",
    "stage finetuning_type cutoff_len template dataset_dir do_train preprocessing_num_workers "
    "overwrite_cache lora_rank lora_target plot_loss quantization_bit neat_packing val_size "
    "train_dataset peft_config dist_config quant_config pref_loss pref_beta freeze_trainable_layers",
    TRAINER
    | {
        "train.learning_rate": 5e-5,
        "data.max_length": 2048,
        "data.prompt_template": "chat",
        "method.type": "lora",
        "method.lora_r": 8,
        "method.lora_alpha": TWICE_THE_RANK,
    },
)
TRL = Peer(
    "TRL",
    "dataset_name dataset_config dataset_train_split dataset_test_split dataset_text_field use_peft "
    "max_seq_length assistant_only_loss completion_only_loss padding_free eos_token dataset_num_proc "
    "model_revision dataset_mixture dataset_mixer dataset_splits test_split_size chat_template_path "
    "precompute_ref_log_probs center_rewards_coefficient reward_funcs num_generations model_init_kwargs",
    TRAINER
    | {
        "train.learning_rate": 2e-5,
        "data.max_length": 1024,
        "data.train_on": "all",
        "method.lora_dropout": 0.05,
        "method.lora_target_modules": ["q_proj", "v_proj"],
    },
)
TOOLS = (AXOLOTL, LLAMA_FACTORY, TRL)


def likely_peer(data: Mapping[str, Any]) -> tuple[Peer, tuple[str, ...]]:
    """Return the tool whose characteristic keys occur most, and those keys; none if no tool's occur."""
    signs = {peer.name: peer.signs.split() for peer in TOOLS}
    if "model_name_or_path" in data and isinstance(data.get("datasets"), list):
        signs[TRL.name].append("datasets")
    found = {name: tuple(key for key in data if key in known) for name, known in signs.items()}
    best = max(TOOLS, key=lambda peer: len(found[peer.name]))
    return best, found[best.name]


def _names(value: Any) -> Any:
    """Convert `all`, and names separated by commas."""
    if value in ("all", "all-linear"):
        return "all-linear"
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


OFFLOADED = ("offload", "offload_disk", "legacy", "disk", "hidden_states")
# Names of optimizers in transformers and Axolotl with the same formula as one of ours.
SAME_OPTIMIZERS = {
    **OPTIMIZER_NAMES,
    "adamw_apex_fused": "adamw_torch_fused",
    "adamw_torch_npu_fused": "adamw_torch_fused",
    "paged_adamw": "paged_adamw_32bit",
    "galore_adamw_layerwise": "galore_adamw",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "ao_adamw_4bit": "adamw_torch_4bit",
    "ao_adamw_fp8": "adamw_torch_fp8",
}
# Aliases for imports only: in a recipe these names would be ambiguous.
IMPORTED = (
    Alias("method.type", ("use_peft",), convert_by({True: "lora", False: "full"})),
    Alias("data.train_on", ("completion_only_loss",), convert_by({False: "all", True: "assistant"})),
    Alias("data.on_overlength", ("excess_length_strategy",)),
    Alias("method.lora_target_modules", ("lora_target",), _names),
    Alias("method.lora_modules_to_save", ("additional_target",), _names),
    Alias("method.lora_modules_to_save", ("lora_modules_to_save",), _names),
    Alias("train.gradient_checkpointing", ("gradient_checkpointing",),
          convert_by({"unsloth": True, **dict.fromkeys(OFFLOADED, "offload")})),
    Alias("train.optim", ("optim", "optimizer"), convert_by(SAME_OPTIMIZERS)),
    Alias("model.tokenizer.pad_token", ("pad_token",)),
    Alias("model.tokenizer.eos_token", ("eos_token",)),
    Alias("vision.freeze_projector", ("freeze_multi_modal_projector",)),
    Alias("parallel.cp_size", ("context_parallel_size", "sequence_parallel_size", "sequence_parallel_degree")),
    Alias("model.tokenizer.add_tokens", ("add_tokens",), _names),
    Alias("model.tokenizer.add_special_tokens", ("add_special_tokens",), _names),
    Alias("data.streaming", ("dataset_streaming",)),
    Alias("data.padding_free", ("dpo_padding_free",)),
    Alias("data.system_prompt", ("default_system_message",)),
    Alias("model.init", ("train_from_scratch",), convert_by({True: "random", False: UNSET})),
    Alias("train.optim", ("use_muon",), convert_by({True: "muon", False: UNSET})),
    Alias("train.optim", ("adafactor",), convert_by({True: "adafactor", False: UNSET})),
    Alias("data.image_dir", ("media_dir",)),
    Alias("data.chat_template_kwargs", ("enable_thinking",), lambda value: {"enable_thinking": value}),
)  # fmt: skip
