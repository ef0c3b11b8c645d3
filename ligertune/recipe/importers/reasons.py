"""Reasons why keys of Axolotl, LLaMA-Factory and TRL have no counterpart, and what to do instead."""

from __future__ import annotations

OWN_TEMPLATE = (
    "conversations use the tokenizer's chat template; save another one as a Jinja file and name it in "
    "model.tokenizer.chat_template"
)
PREPARED = "prepared data is cached by content in the user's cache folder"
NO_HUB = "ligertune train does not upload; `ligertune export RUN --push USER/NAME` does"
FOUND_IN_THE_MODEL = "the model's configuration holds it"
NOT_FINITE = "a loss or gradient that is not finite ends the run; no other loss does"
EXPERT_KERNELS = "the experts run in ligertune's own kernels wherever they are recognised"
ROUTER_LOSS = "set the coefficient in the model's config.json, from which the model adds its router loss"
ONE_PACKING = "there is one packing strategy, which fills about 99 % of each row and keeps documents apart"
ENDS_OF_TURNS = "the token that ends an answer is found in the chat template, and trained"
IN_THE_SHELL = "set variables in the shell"
LAUNCHER = "configure the launcher instead: accelerate launch -m ligertune train RECIPE"
METRICS = "metrics.jsonl has a line per logged step"
GENERATION = "evaluations compute the loss; eval.sample_prompts shows answers"
NEW_TOKENS = "the vocabulary grows by model.tokenizer.add_tokens and add_special_tokens only"
NO_WATCH = "ligertune has no such callback"
FSDP_OPTIONS = "parallel.strategy: fsdp shards weights, gradients and optimizer states per layer, without more options"

REASONS: dict[str, str] = {
    **dict.fromkeys(
        ("dataset_prepared_path", "overwrite_cache", "tokenized_path", "dataset_keep_in_memory",
         "skip_prepare_dataset", "push_dataset_to_hub", "dataset_num_shards", "preprocessing_batch_size"), PREPARED,
    ),
    **dict.fromkeys(
        ("hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "push_to_hub", "hub_model_revision"), NO_HUB
    ),
    **dict.fromkeys(
        ("model_type", "tokenizer_type", "is_falcon_derived_model", "is_llama_derived_model",
         "is_mistral_derived_model", "is_qwen_derived_model", "base_model_config", "processor_type", "model_class",
         "init_config"),
        FOUND_IN_THE_MODEL,
    ),
    **dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"), NOT_FINITE),
    **dict.fromkeys(
        ("experts_implementation", "use_scattermoe", "use_sonicmoe", "moe_backend", "kernel_config"), EXPERT_KERNELS
    ),
    **dict.fromkeys(
        ("router_aux_loss_coef", "moe_aux_loss_coef", "output_router_logits", "aux_loss_coef"), ROUTER_LOSS
    ),
    **dict.fromkeys(("chat_template", "chat_template_jinja", "chat_template_path", "conversation"), OWN_TEMPLATE),
    **dict.fromkeys(("eot_tokens", "train_on_eos", "train_on_eot", "replace_eos"), ENDS_OF_TURNS),
    **dict.fromkeys(
        ("packing_strategy", "sample_packing_group_size", "sample_packing_bin_size", "sample_packing_sequentially",
         "sample_packing_eff_est", "multipack_real_batches", "curriculum_sampling", "batch_flattening"), ONE_PACKING,
    ),
    **dict.fromkeys(
        ("added_tokens_overrides", "resize_vocab", "resize_token_embeddings_to_32x", "new_special_tokens_config",
         "embeddings_skip_upcast", "shrink_embeddings"), NEW_TOKENS,
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "fsdp_version", "dist_config", "fsdp_final_state_dict_type"), FSDP_OPTIONS
    ),
    **dict.fromkeys(
        ("eval_table_size", "eval_max_new_tokens", "eval_causal_lm_metrics", "do_causal_lm_eval", "do_bench_eval",
         "predict_with_generate", "compute_accuracy", "generation_config"), GENERATION,
    ),
    **dict.fromkeys(("gc_steps", "torch_empty_cache_steps", "profiler_steps", "include_tkps", "debug"), NO_WATCH),
    "accelerator_config": LAUNCHER,
    "adapter_name_or_path": "the run starts with a new adapter; merge the old one into the model first, with PEFT",
    "lora_model_dir": "the run starts with a new adapter; merge the old one into the model first, with PEFT",
    "add_bos_token": "the chat template, or else the tokenizer, decides on BOS",
    "bos_token": "the tokenizer's own BOS token is used",
    "unk_token": "the tokenizer's own token for unknown text is used",
    "cosine_constant_lr_ratio": "no schedule of transformers is constant after a cosine",
    "lr_quadratic_warmup": "the warm-up is linear",
    "cpo_alpha": "it belongs to CPO, which ligertune does not have",
    "dataloader_num_workers": "batches are made from prepared arrays, without workers",
    "dataloader_prefetch_factor": "batches are made from prepared arrays, without workers",
    "dataloader_pin_memory": "batches are made from prepared arrays, without workers",
    "dataloader_drop_last": "the last step of an epoch takes the rows that are left",
    "data_seed": "train.seed decides on the order of the data, too",
    "ddp_timeout": "parallel.timeout is the timeout within a step, in seconds; saves and evaluations have a longer one",
    "ddp_find_unused_parameters": "every trained parameter is used in each step",
    "deepspeed": "parallel.strategy: deepspeed_zero2 and deepspeed_zero3 choose DeepSpeed, without more options",
    "device_map": "each process holds the model on its GPU, or its shards with parallel.strategy: fsdp",
    "do_eval": "eval.eval_strategy switches evaluations on",
    "do_predict": "`ligertune generate RUN PROMPT` answers prompts",
    "do_train": "`ligertune train` trains",
    "ds_type": "the ending of a file says its type",
    "env": IN_THE_SHELL,
    "eval_sample_packing": "evaluations pack rows as training does; the loss does not depend on it",
    "eval_packing": "evaluations pack rows as training does; the loss does not depend on it",
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered in their dtype and cast before each product",
    "gptq": "a model that is quantised with GPTQ does not load",
    "gradient_checkpointing_kwargs": "checkpointing is always non-reentrant",
    "greater_is_better": "the evaluation loss decides, and lower is better",
    "metric_for_best_model": "the evaluation loss decides",
    "interleave_probs": "write a weight for each of data.datasets",
    "mix_strategy": "data sets are mixed by their sizes; write a weight for each of data.datasets",
    "label_names": "labels come from the conversations",
    "local_rank": LAUNCHER,
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "use_bnb_nested_quant",
         "bnb_config_kwargs", "quantization_method", "quantization_type", "double_quantization"),
        "method.type: qlora is NF4 with double quantisation",
    ),
    **dict.fromkeys(("logging_strategy", "logging_dir", "logging_nan_inf_filter", "log_level", "disable_tqdm",
                     "include_num_input_tokens_seen", "log_on_each_node"), METRICS),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval", "eval_accumulation_steps", "prediction_loss_only",
                     "bfloat16", "float16", "amp", "pure_bf16", "low_cpu_mem_usage"),
                    "model.dtype is the dtype of the weights, in training and in evaluations"),
    **dict.fromkeys(("flash_attn_rms_norm", "flash_attn_cross_entropy", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp",
                     "flash_optimum", "cut_cross_entropy", "unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o",
                     "unsloth_rope", "unsloth_rms_norm"), "ligertune's kernels run wherever a layer is recognised"),
    "average_tokens_across_devices": "the loss is always averaged over the trained tokens of all devices",
    "dataset_kwargs": "special tokens are written once, by the template or the tokenizer",
    "max_prompt_length": "data.max_length bounds prompt and answer together",
    "max_completion_length": "data.max_length bounds prompt and answer together",
    "use_cache": "training has no cache of keys and values",
    "dp_shard_size": "parallel.strategy: fsdp shards over the processes of each replica (parallel.dp_replicate_size)",
    "hf_use_auth_token": "log in with `hf auth login`",
    "use_ray": LAUNCHER,
    "ray_num_workers": LAUNCHER,
    "world_size": LAUNCHER,
    "auto_find_batch_size": "write train.per_device_train_batch_size: auto, and train.global_batch_size",
    "model_init_kwargs": "write its keys under model",
    "torch_compile_backend": "train.torch_compile uses inductor",
    "torch_compile_mode": "train.torch_compile uses the default mode",
    "s2_attention": "shifted sparse attention is another model",
    "xformers_attention": "model.attn_implementation: auto chooses an exact attention",
    "unsloth": "ligertune's kernels run wherever a layer is recognised",
    "logging_first_step": "the loss before training is in the report",
    "lora_fan_in_fan_out": FOUND_IN_THE_MODEL,
    "lora_mlp_kernel": "kernels.lora: true fuses the update of adapters",
    "lora_o_kernel": "kernels.lora: true fuses the update of adapters",
    "lora_qkv_kernel": "kernels.lora: true fuses the update of adapters",
    "lora_on_cpu": FOUND_IN_THE_MODEL,
    "lora_layers_to_transform": "write one regular expression in method.lora_target_modules",
    "layers_to_transform": "write one regular expression in method.lora_target_modules",
    "peft_layers_to_transform": "write one regular expression in method.lora_target_modules",
    "peft_layers_pattern": "write one regular expression in method.lora_target_modules",
    "layers_pattern": "write one regular expression in method.lora_target_modules",
    "loftq": "method.init_lora_weights chooses how the adapter starts",
    "loftq_init": "method.init_lora_weights chooses how the adapter starts",
    "pissa_iter": "method.init_lora_weights chooses how the adapter starts",
    "pissa_convert": "the adapter is saved as PEFT's",
    "embedding_lr": "write an item of train.lr_groups for the embedding",
    "embedding_lr_scale": "write an item of train.lr_groups for the embedding",
    "ranking": "pairs are recognised by their columns",
    "min_sample_len": "short examples are kept",
    "optim_args": "write the options under train: adam_beta1, adam_beta2, adam_epsilon, galore",
    "optim_target_modules": "an optimizer of matrices takes those inside the layers",
    "pad_to_sequence_len": "rows are padded only to a multiple of a few tokens",
    "plot_loss": METRICS,
    "plugins": "ligertune's kernels run wherever a layer is recognised",
    "quantize_moe_experts": "method.type: qlora quantises the experts, too",
    "remove_unused_columns": "columns without a meaning are ignored",
    "roles": "the usual names of roles are known; rename others in the data",
    "roles_to_train": "data.train_on decides which turns are trained",
    "rope_scaling": "set it in the model's config.json",
    "overrides_of_model_config": "change the model's config.json",
    "overrides_of_model_kwargs": "change the model's config.json",
    "save_first_step": "the first save is rehearsed before step 1",
    "save_only_model": "a checkpoint holds all that a resume needs; output_dir/model holds the model alone",
    "save_safetensors": "weights are always safetensors",
    "shuffle_merged_datasets": "the data are shuffled in each epoch, by train.seed",
    "shuffle_dataset": "the data are shuffled in each epoch, by train.seed",
    "disable_shuffling": "the data are shuffled in each epoch, by train.seed",
    "streaming_multipack_buffer_size": PREPARED,
    "strict": "an unknown key is always an error",
    "swanlab_project": "the trackers are tensorboard, wandb and mlflow",
    "use_swanlab": "the trackers are tensorboard, wandb and mlflow",
    "use_comet": "the trackers are tensorboard, wandb and mlflow",
    "tf32": "float32 products never use TF32",
    "tensor_parallel_size": "parallel.strategy: fsdp shards a model that is too large for one GPU",
    "tool_format": "the chat template writes tools in its own form",
    "unsloth_cross_entropy_loss": "ligertune's kernels run wherever a layer is recognised",
    "use_unsloth": "ligertune's kernels run wherever a layer is recognised",
    "wandb_entity": "export WANDB_ENTITY",
    "wandb_project": "export WANDB_PROJECT",
    "wandb_watch": "export WANDB_WATCH",
    "wandb_log_model": "export WANDB_LOG_MODEL",
    "wandb_mode": "export WANDB_MODE",
    "mlflow_tracking_uri": "export MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": "export MLFLOW_EXPERIMENT_NAME",
}  # fmt: skip

# A value of false switches nothing on, except for these keys, of which it is the choice.
FALSE_MATTERS = ("add_bos_token", "shuffle_merged_datasets")

# Keys that mean something else here; they are removed before aliases are read.
NOT_OURS = {
    "overwrite_output_dir": "`ligertune train --overwrite` replaces a run",
    "resume_from_checkpoint": "checkpoints of other tools cannot be read; `ligertune train --resume` continues a run",
    "auto_resume_from_checkpoints": "`ligertune train --resume auto` starts or continues a run",
}

# Values that no key takes, with a better reason than the list of those that it does.
VALUES: dict[tuple[str, str], str] = {
    ("train.lr_scheduler_type", "one_cycle"): "it is no schedule of transformers; cosine with a warm-up is the nearest",
    (
        "train.lr_scheduler_type",
        "rex",
    ): "it is no schedule of transformers; polynomial with power below 1 is the nearest",
    ("train.lr_scheduler_type", "log_sweep"): "it is a search of learning rates, not a schedule",
    ("train.lr_scheduler_type", "relora"): "ReLoRA restarts adapters, which ligertune does not have",
    ("checkpoint.save_strategy", "best"): "checkpoint.load_best_model_at_end: true keeps the best weights",
}
_NO_OPTIMIZER = {
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"),
        "a schedule-free optimizer averages weights instead of a schedule; adamw_torch_fused has a schedule",
    ),
    **dict.fromkeys(
        ("came_pytorch", "came"), "CAME factorises the second moment; adafactor does that, too"
    ),
    **dict.fromkeys(
        ("apollo_adamw", "apollo_adamw_layerwise", "q_galore_adamw8bit", "q_galore"),
        "it projects gradients to a low rank; galore_adamw does that, too",
    ),
    **dict.fromkeys(
        ("lion_8bit", "paged_lion_8bit"), "its states would have 8 bits; lion has them in the dtype of the weights"
    ),
}  # fmt: skip
VALUES |= {("train.optim", name): why for name, why in _NO_OPTIMIZER.items()}
