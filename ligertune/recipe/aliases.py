"""Aliases: keys of Axolotl, LLaMA-Factory, TRL and earlier versions, read as recipe keys with a notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ligertune.recipe.document import ITEM, Document, KeyPath, dotted, keys, leaf, parent, schema_key, split
from ligertune.recipe.section import ValueTable, convert_by

UNSET = object()  # the alias sets nothing: `bf16: false` leaves model.dtype as it is


@dataclass(frozen=True)
class Alias:
    """Other names of `key`; `convert` turns their values into values of `key`.

    A name is accepted at the top level, because other tools' files are flat, and in every section around its key.
    """

    key: str
    names: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value


def _flag(value: Any) -> Callable[[Any], Any]:
    """Convert a switch of another tool: true selects `value`, false selects nothing."""
    return convert_by({True: value, False: UNSET})


def _datasets(value: Any) -> Any:
    """Turn one path or a list of paths into a list of data sets."""
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


def _any_of(value: Any) -> Any:
    """Turn parts of parameters' names into a regular expression."""
    is_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return "|".join(map(re.escape, value)) if is_list else value


def _list_of(value: Any) -> Any:
    """Split names that LLaMA-Factory separates by commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_DTYPES: ValueTable = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    **{f"torch.{name}": name for name in ("bfloat16", "float16", "float32")},
}
OPTIMIZER_NAMES: ValueTable = {
    "adamw": "adamw_torch_fused",
    "AdamW": "adamw_torch_fused",
    "adamw_hf": "adamw_torch",
    "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion",
}
_FORMATS: ValueTable = {"chat_template": "messages", "completion": "text", "pretrain": "text"}
_ATTENTION: ValueTable = {
    "fa2": "flash_attention_2",
    "flash_attn": "flash_attention_2",
    "fa4": "flash_attention_4",
    "disabled": "eager",
    False: UNSET,
}
_FLASH: ValueTable = {**_ATTENTION, True: "flash_attention_2"}

ALIASES = (
    Alias("task", ("stage",)),
    Alias("model.model_name_or_path",
          ("base_model", "model", "model_name", "model_path", "model_id", "pretrained_model_name_or_path")),
    Alias("model.revision", ("model_revision", "revision_of_model")),
    Alias("model.dtype", ("torch_dtype",), convert_by(_DTYPES)),
    Alias("model.dtype", ("bf16",), _flag("bfloat16")),
    Alias("model.dtype", ("fp16",), _flag("float16")),
    Alias("model.attn_implementation", ("attn_impl",), convert_by(_ATTENTION)),
    Alias("model.attn_implementation", ("flash_attention", "flash_attn", "use_flash_attention_2"), convert_by(_FLASH)),
    Alias("model.attn_implementation", ("sdp_attention",), _flag("sdpa")),
    Alias("model.attn_implementation", ("flex_attention",), _flag("flex_attention")),
    Alias("model.attn_implementation", ("eager_attention",), _flag("eager")),
    Alias("model.tokenizer.path", ("tokenizer_name_or_path", "tokenizer_name", "tokenizer_path", "tokenizer_config")),
    Alias("model.tokenizer.add_tokens", ("tokens",), _list_of),
    Alias("model.tokenizer.add_special_tokens", ("new_special_tokens", "additional_special_tokens"), _list_of),
    Alias("kernels.enabled", ("use_liger_kernel", "enable_liger_kernel", "use_liger")),
    Alias("kernels.recompute", ("rebuild",)),  # our own name until version 0.1
    Alias("kernels.rope", ("liger_rope",)),
    Alias("kernels.norm", ("liger_rms_norm",)),
    Alias("kernels.mlp", ("liger_glu_activation", "liger_swiglu")),
    Alias("kernels.loss", ("liger_fused_linear_cross_entropy",), _flag("linear_cross_entropy")),
    Alias("kernels.loss", ("liger_cross_entropy",), _flag("cross_entropy")),
    Alias("method.type", ("adapter", "finetuning_type", "train_type")),
    Alias("method.lora_r", ("lora_rank",)),
    Alias("method.lora_target_modules", ("lora_target",)),
    Alias("method.lora_target_modules", ("lora_target_linear",), _flag("all-linear")),
    Alias("method.layers_to_transform", ("peft_layers_to_transform", "lora_layers_to_transform")),
    Alias("method.layers_pattern", ("peft_layers_pattern",)),
    Alias("method.lora_target_parameters", ("target_parameters",)),
    Alias("method.lora_modules_to_save", ("modules_to_save", "additional_target")),
    Alias("method.trainable_token_indices", ("peft_trainable_token_indices", "trainable_tokens")),
    Alias("method.init_lora_weights", ("peft_init_lora_weights",)),
    Alias("method.init_lora_weights", ("pissa_init",), _flag("pissa_niter_16")),  # LLaMA-Factory's pissa_iter
    Alias("method.use_dora", ("peft_use_dora",)),
    Alias("method.bnb_4bit_quant_type", ("quantization_type",)),
    Alias("method.bnb_4bit_use_double_quant", ("double_quantization", "use_bnb_nested_quant")),
    Alias("method.use_rslora", ("peft_use_rslora",)),
    Alias("method.trainable", ("unfrozen_parameters",)),
    Alias("data.datasets", ("dataset", "dataset_name", "data_path", "train_file", "train_files"), _datasets),
    Alias("data.datasets[].format", ("type",), convert_by(_FORMATS)),
    Alias("data.datasets[].name", ("subset",)),
    Alias("data.datasets[].max_samples", ("num_samples",)),
    Alias("data.eval_datasets", ("eval_dataset", "val_dataset", "validation_file", "test_datasets"), _datasets),
    Alias("data.eval_datasets[].format", ("type",), convert_by(_FORMATS)),
    Alias("data.eval_datasets[].name", ("subset",)),
    Alias("data.eval_datasets[].max_samples", ("num_samples",)),
    Alias("data.val_split", ("val_set_size", "val_size", "test_size", "split_dataset_ratio")),
    Alias("data.prompt_template", ("template",)),
    Alias("data.system_prompt", ("system", "default_system", "system_message")),
    Alias("data.train_on", ("train_on_inputs", "train_on_prompt"), convert_by({True: "all", False: "assistant"})),
    Alias("data.train_on", ("assistant_only_loss",), convert_by({True: "assistant", False: "all"})),
    Alias("data.train_on", ("mask_history",), _flag("last")),
    Alias("data.max_length",
          ("sequence_len", "seq_len", "cutoff_len", "max_seq_length", "max_seq_len", "model_max_length")),
    Alias("data.packing", ("sample_packing", "neat_packing")),
    Alias("data.num_proc", ("dataset_num_proc", "preprocessing_num_workers", "dataset_processes")),
    Alias("train.per_device_train_batch_size",
          ("micro_batch_size", "train_batch_size", "per_device_batch_size", "per_gpu_train_batch_size")),
    Alias("train.gradient_accumulation_steps",
          ("gradient_accumulation", "grad_accum", "grad_accum_steps", "accumulate_grad_batches")),
    Alias("train.num_train_epochs", ("num_epochs", "epochs", "n_epochs", "max_epochs", "train_epochs")),
    Alias("train.max_steps", ("max_train_steps",)),
    Alias("train.learning_rate", ("lr",)),
    Alias("train.lr_scheduler_type", ("lr_scheduler", "scheduler")),
    Alias("train.warmup_ratio", ("warmup_proportion", "lr_warmup_fraction")),
    Alias("train.warmup_steps", ("warmup", "num_warmup_steps", "lr_warmup_steps")),
    Alias("train.min_lr_ratio", ("cosine_min_lr_ratio",)),
    Alias("train.optim", ("optimizer",), convert_by(OPTIMIZER_NAMES)),
    Alias("train.neftune_noise_alpha", ("neftune_alpha", "noisy_embedding_alpha")),
    Alias("train.lr_groups[].parameters", ("modules",), _any_of),
    Alias("train.lr_groups[].learning_rate", ("lr",)),
    Alias("train.max_grad_norm", ("max_norm", "grad_clip", "clip_grad", "max_grad_clip", "gradient_clipping")),
    Alias("train.gradient_checkpointing", ("activation_checkpointing", "enable_activation_checkpointing", "grad_ckpt")),
    Alias("train.fp8", ("fp8",)),
    Alias("train.seed", ("seed", "random_seed", "random_state")),
    Alias("eval.eval_strategy", ("evaluation_strategy",)),
    Alias("eval.early_stopping_patience", ("early_stopping_steps",)),
    Alias("eval.eval_steps", ("eval_interval", "eval_freq", "run_eval_every_n_steps")),
    Alias("eval.per_device_eval_batch_size", ("eval_batch_size", "per_gpu_eval_batch_size")),
    Alias("checkpoint.output_dir", ("output_dir", "out_dir")),
    Alias("checkpoint.save_steps", ("save_interval", "save_freq", "save_every_n_steps")),
    Alias("checkpoint.save_total_limit", ("save_total", "keep_last_n_checkpoints")),
    Alias("checkpoint.resume_from_checkpoint", ("auto_resume_from_checkpoints", "resume")),
    Alias("checkpoint.overwrite", ("overwrite_output_dir",)),
    Alias("logging.logging_steps", ("log_interval", "log_every_n_steps", "log_every")),
)  # fmt: skip

# Keys of earlier versions that saved recipes still hold: accepted, reported and ignored.
RETIRED = {"kernels.gradient_sums": "it has no effect any more"}

KEY_OF_ALIAS = {name: row.key for row in ALIASES for name in row.names if ITEM not in row.key}


def apply_aliases(document: Document, rows: Sequence[Alias] = ALIASES) -> None:
    """Move values from aliases to their keys and drop retired keys, with a notice for each.

    An alias and its key with different values are a complaint.
    """
    for path, why in ((split(key), why) for key, why in RETIRED.items()):
        if document.has(path):
            document.notice(document.place(path), f"{dotted(path)} is ignored: {why}.")
            document.remove(path)
    for row in rows:
        for section in _sections_around(row.key, document):
            for name in row.names:
                if document.has((*section, name)) and not _is_key((*section, name), document):
                    _move((*section, name), row, document)


def _sections_around(key: str, document: Document) -> list[KeyPath]:
    """Return where an alias may stand: in the key's section and those around it, or in each item of the key's list."""
    head, is_item, _ = key.partition(ITEM + ".")
    if is_item:
        items = document.get(split(head)) if document.has(split(head)) else None
        return [(*split(head), index) for index in range(len(items))] if isinstance(items, list) else []
    section = split(parent(key)) if parent(key) else ()
    return [section[:length] for length in range(len(section) + 1)]


def _is_key(path: KeyPath, document: Document) -> bool:
    """Report whether `path` is a recipe key itself. `model: some/model` is the alias, not the section `model`."""
    entry = keys().get(schema_key(path))
    return entry is not None and not (entry.get("type") == "object" and isinstance(document.get(path), str))


def _move(alias: KeyPath, row: Alias, document: Document) -> None:
    key = (*alias[:-1], leaf(row.key)) if ITEM in row.key else split(row.key)
    place = document.place(alias)
    value = row.convert(document.get(alias))
    document.remove(alias)
    if value is UNSET:
        document.notice(place, f"{dotted(alias)} is ignored: it does not set {dotted(key)}.")
        return
    document.notice(place, f"{dotted(alias)} is read as {dotted(key)}.")
    replaces = place.override and not document.place(key).override
    if document.has(key) and document.get(key) != value and not replaces:
        both = f"{dotted(alias)} and {document.mention(key)}"
        document.complain(alias, f"{both} are two names of one key, with different values. Keep one of them.")
        return
    # if the section is not a mapping, validation reports that
    with suppress(KeyError):
        document.put(key, value, replace(place, written=dotted(alias)))
