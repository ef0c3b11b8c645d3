"""Keys of Axolotl, LLaMA-Factory and TRL that have no counterpart: the reason, what to do instead, and the harm.

The harm says what a run loses without the key: it trains something else, it needs other time or memory, or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAINING = "changes what is trained"
SPEED = "changes speed or memory only"
HARMLESS = "has no effect here"
HARMS = (TRAINING, SPEED, HARMLESS)


@dataclass(frozen=True)
class Reason:
    """Why a key is not imported, and the harm."""

    why: str
    harm: str


OWN_TEMPLATE = (
    "conversations use the tokenizer's chat template; save another one as a Jinja file and name it in "
    "model.tokenizer.chat_template"
)
REFERENCE = "the reference is the model before training"
IN_THE_CONFIG = "set it in the model's config.json"
ENDS_OF_TURNS = "the token that ends an answer is found in the chat template, and trained"
NEW_TOKENS = "the vocabulary grows by model.tokenizer.add_tokens and add_special_tokens only"
NEW_ADAPTER = "the run starts with a new adapter; merge the old one into the model first, with PEFT"
SOME_LAYERS = "write one regular expression in method.lora_target_modules"
ADAPTER_START = "method.init_lora_weights chooses how the adapter starts"
ROUTER_LOSS = "set the coefficient in the model's config.json, from which the model adds its router loss"
MIXTURE = "an epoch reads each of data.datasets as often as its weight says; write the weights"
ONE_LENGTH = "data.max_length bounds prompt and answer together, and cuts the end"
NO_PATTERN = "one rank and one lora_alpha apply to all layers"
ONE_BIAS = "the adapter trains no biases"
BEST = "the evaluation loss decides, and lower is better"
OWN_LOSS = "the loss is the cross-entropy of each trained token"
MIXED_BATCHES = "every epoch shuffles the data by train.seed"

# ---- the run trains something else without these keys
_TRAINING: dict[str, tuple[str, ...]] = {
    OWN_TEMPLATE: ("chat_template", "chat_template_jinja", "chat_template_path", "conversation"),
    ENDS_OF_TURNS: ("eot_tokens", "train_on_eos", "train_on_eot", "replace_eos", "efficient_eos"),
    NEW_TOKENS: ("added_tokens_overrides", "resize_vocab", "resize_token_embeddings_to_32x", "shrink_embeddings",
                 "new_special_tokens_config", "init_special_tokens", "resize_token_embeddings"),
    NEW_ADAPTER: ("adapter_name_or_path", "lora_model_dir", "create_new_adapter"),
    SOME_LAYERS: ("lora_layers_to_transform", "layers_to_transform", "peft_layers_to_transform", "peft_layers_pattern",
                  "layers_pattern", "exclude_modules"),
    ADAPTER_START: ("loftq", "loftq_init", "loftq_config", "peft"),
    NO_PATTERN: ("rank_pattern", "alpha_pattern", "lora_rank_pattern", "lora_alpha_pattern"),
    ONE_BIAS: ("lora_bias", "bias", "lora_use_bias"),
    ROUTER_LOSS: ("router_aux_loss_coef", "moe_aux_loss_coef", "aux_loss_coef", "output_router_logits"),
    MIXTURE: ("interleave_probs", "mix_strategy", "probs", "stopping_strategy"),
    ONE_LENGTH: ("max_prompt_length", "max_completion_length", "max_target_length", "truncation_mode",
                 "max_source_length"),
    BEST: ("metric_for_best_model", "greater_is_better"),
    MIXED_BATCHES: ("shuffle_merged_datasets", "shuffle_dataset", "disable_shuffling", "curriculum_sampling",
                    "sample_packing_sequentially", "shuffle_before_merging_datasets", "train_sampling_strategy",
                    "shuffle"),
    IN_THE_CONFIG: ("rope_scaling", "rope_theta", "overrides_of_model_config", "overrides_of_model_kwargs",
                    "attention_dropout", "image_size", "image_resize_algorithm", "config_overrides",
                    "cls_model_config", "reinit_weights", "freeze_mm_modules"),
    "data.train_on decides which turns are trained": (
        "roles_to_train", "message_field_training", "message_field_training_detail"),
    "the usual names of roles are known; rename others in the data": ("roles",),
    "the usual names of fields are known; rename others in the data": (
        "message_property_mappings", "message_field_role", "message_field_content", "field_tools", "field_thinking",
        "template_thinking_key", "field_human", "field_model", "tags"),
    "system messages are kept": ("drop_system_message", "auto_insert_empty_system_msg"),
    "data.drop_history_reasoning and data.mask_reasoning decide on reasoning": ("split_thinking", "preserve_thinking"),
    "the chat template, or else the tokenizer, decides on BOS": ("add_bos_token",),
    "the tokenizer's own BOS token is used": ("bos_token",),
    "the tokenizer's own token for unknown text is used": ("unk_token",),
    "no schedule of transformers is constant after a cosine": ("cosine_constant_lr_ratio",),
    "the warm-up is linear": ("lr_quadratic_warmup", "warmup_ratio_type"),
    "it belongs to CPO, which ligertune does not have": ("cpo_alpha",),
    "a model that is quantised with GPTQ does not load": ("gptq", "gptq_disable_exllama", "hqq"),
    "method.load_in_8bit and method.type: qlora are the quantised models": ("quantization_bit", "load_in_4bit"),
    "quantised weights are NF4 with double quantisation, or 8-bit": (
        "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "use_bnb_nested_quant",
        "bnb_config_kwargs", "quantization_method", "quantization_type", "double_quantization",
        "bnb_4bit_quant_storage"),
    "model.dtype is the dtype of the weights, in training and in evaluations": (
        "bfloat16", "float16", "amp", "pure_bf16", "upcast_layernorm", "upcast_lmhead_output", "cast_lm_head_to_fp32"),
    "write an item of train.lr_groups for the embedding": ("embedding_lr", "embedding_lr_scale"),
    "the optimizer has other options: adam_beta1, adam_beta2, adam_epsilon and galore, under train": (
        "optim_args", "adam_beta3", "adam_epsilon2", "muon_momentum", "muon_epsilon"),
    "GaLore projects the matrices inside the layers": ("optim_target_modules", "galore_target", "galore_layerwise"),
    "train.galore has rank, update_proj_gap and scale": ("galore_proj_type", "galore_update_interval",
                                                         "galore_rank", "galore_scale"),
    "images are resized as the model's processor does; videos and audio are not read": (
        "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video",
        "audio_sampling_rate", "image_do_pan_and_scan", "crop_to_patches"),
    "it is part of an optimizer that ligertune does not have": (
        "use_apollo", "apollo_target", "apollo_rank", "apollo_update_interval", "apollo_scale", "apollo_layerwise",
        "apollo_proj_type", "apollo_scale_type", "torchao_target_modules", "use_onebitllms"),
    "it is part of a method that ligertune does not have": (
        "module_dropout", "oft_rank", "oft_block_size", "oft_target", "use_pose", "pose_split_on_token_ids",
        "pose_max_context_len", "pose_num_chunks", "relora_prune_ratio", "jagged_restart_steps", "badam_mode",
        "jagged_restart_warmup_steps", "peft_layer_replication", "reward_model", "reward_model_adapters",
        "ppo_buffer_size", "ppo_score_norm", "trl", "llmcompressor"),
    "the schedule has other options: train.lr_scheduler_kwargs": ("lr_div_factor", "log_sweep_min_lr",
                                                                   "log_sweep_max_lr"),
    "data.max_length is the length of training and evaluation rows": ("eval_sequence_len", "max_prompt_len",
                                                                      "truncation_side"),
    "untrained tokens keep their rows": ("fix_untrained_tokens",),
    "tools come with each row": ("tools",),
    "short examples are kept": ("min_sample_len", "sample_packing_min_len"),
    "the prompt of such a format is Stanford's; write a Jinja file in data.prompt_template": (
        "type.format", "type.no_input_format", "type.system_prompt", "type.system_format"),
    "rows are read as they are; write the files' rows so": ("input_transform", "input_format", "user_defined_filter",
                                                            "user_prompt_template", "filter", "dataset_kwargs"),
    "a part of a data set is data.datasets[].max_samples": ("shards", "shards_idx", "preprocess_shards", "skip"),
    "the hub's newest version of the data set is read": ("dataset_revision", "revision"),
    "some weights cannot be chosen by their signal; write method.type: freeze and method.trainable": (
        "spectrum_top_fraction", "spectrum_model_name"),
    "Liger's layer norm is not chosen alone; kernels.norm is": ("liger_layer_norm",),
    "labels come from the conversations": ("label_names",),
    OWN_LOSS: ("ignore_pad_token_for_loss", "eaft_alpha", "dpo_use_weighting", "use_weighting", "pref_bco_weight",
               "loss_weights", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau",
               "use_logits_to_keep", "average_tokens_across_devices"),
    "the preference loss is one of preference.loss_type": ("simpo_cpo_alpha", "disable_dropout"),
}  # fmt: skip

# ---- the run needs other time or memory without these keys
_SPEED: dict[str, tuple[str, ...]] = {
    "there is one packing strategy, which fills about 99 % of each row and keeps documents apart": (
        "packing_strategy", "sample_packing_group_size", "sample_packing_bin_size", "sample_packing_eff_est",
        "multipack_real_batches", "batch_flattening", "pretrain_multipack_attn", "sample_packing_mp_start_method"),
    "parallel.strategy: fsdp shards weights, gradients and optimizer states per layer, without more options": (
        "fsdp", "fsdp_config", "fsdp_version", "dist_config", "fsdp_final_state_dict_type", "fsdp_min_num_params",
        "fsdp_transformer_layer_cls_to_wrap"),
    "parallel.strategy: deepspeed_zero2 and deepspeed_zero3 choose DeepSpeed, without more options": (
        "deepspeed", "zero3_init_flag", "ds3_gather_for_generation"),
    "parallel.strategy: fsdp shards a model that is too large for one GPU": (
        "tensor_parallel_size", "tp_size", "pipeline_parallel_size", "parallelism_config", "expert_parallel_size"),
    "parallel.strategy: fsdp shards over the processes of each replica (parallel.dp_replicate_size)": (
        "dp_shard_size",),
    "parallel.cp_size splits rows as torch does": ("heads_k_stride", "ring_attn_func"),
    "each process holds the model on its GPU, or its shards with parallel.strategy: fsdp": (
        "device_map", "max_memory", "low_cpu_mem_usage", "gpu_memory_limit", "offload_folder"),
    "the experts run in ligertune's own kernels wherever they are recognised": (
        "experts_implementation", "use_scattermoe", "use_sonicmoe", "moe_backend", "kernel_config"),
    "batches are made from prepared arrays, without workers": (
        "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory",
        "dataloader_persistent_workers"),
    "the last step of an epoch takes the rows that are left": ("dataloader_drop_last", "sample_packing_drop_last"),
    "rows are padded only to a multiple of a few tokens": ("pad_to_sequence_len", "pad_to_multiple_of"),
    "weights are gathered in their dtype and cast before each product": ("fp8_enable_fsdp_float8_all_gather",),
    "write train.per_device_train_batch_size: auto, and train.global_batch_size": ("auto_find_batch_size",),
    "train.torch_compile uses inductor in its default mode": ("torch_compile_backend", "torch_compile_mode",
                                                              "torchdynamo", "dynamo_backend"),
    "float32 products never use TF32": ("tf32",),
    "shifted sparse attention is another model": ("s2_attention",),
    "model.attn_implementation: auto chooses an exact attention": ("xformers_attention", "sage_attention"),
    "method.type: qlora quantises the experts, too": ("quantize_moe_experts",),
    "ligertune has no such callback": ("gc_steps", "torch_empty_cache_steps", "profiler_steps", "profiler_steps_start"),
    "processes and kernels are chosen by parallel and kernels": (
        "use_kernels", "use_v1_kernels", "deepcompile", "ddp", "sp_degree", "flex_attn_compile_kwargs", "fp8_backend",
        "better_transformer", "peft_autocast_adapter_dtype", "qlora_sharded_model_loading", "quantization_device_map",
        "mp_parameters", "tpu_num_cores", "use_mps_device"),
    "layers are not swapped out": ("layer_offloading", "embeddings_skip_upcast", "lora_on_cpu"),
    "it is chosen by kernels.lora: auto": ("lora_mlp_kernel", "lora_o_kernel", "lora_qkv_kernel",
                                           "lora_embedding_kernel"),
    "ligertune's kernels run wherever a layer is recognised": (
        "unsloth_cross_entropy_loss", "use_unsloth", "unsloth", "flash_attn_rms_norm", "flash_attn_cross_entropy",
        "flash_attn_fuse_qkv", "flash_attn_fuse_mlp", "flash_optimum", "cut_cross_entropy", "unsloth_lora_mlp",
        "unsloth_lora_qkv", "unsloth_lora_o", "unsloth_rope", "unsloth_rms_norm", "chunked_cross_entropy",
        "chunked_cross_entropy_num_chunks", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp",
        "liger_use_token_scaling", "liger_kernel_config"),
}  # fmt: skip

# ---- nothing is lost without these keys
PREPARED = "prepared data is cached by content in the user's cache folder"
NO_HUB = "ligertune train does not upload; `ligertune export RUN --push USER/NAME` does"
FOUND_IN_THE_MODEL = "the model's configuration holds it"
LAUNCHER = "configure the launcher instead: accelerate launch -m ligertune train RECIPE"
METRICS = "metrics.jsonl has a line per logged step"
GENERATION = "evaluations compute the loss; eval.sample_prompts shows answers"
TRACKERS = "the trackers are tensorboard, wandb and mlflow"
_HARMLESS: dict[str, tuple[str, ...]] = {
    PREPARED: ("dataset_prepared_path", "overwrite_cache", "tokenized_path", "dataset_keep_in_memory",
               "skip_prepare_dataset", "push_dataset_to_hub", "dataset_num_shards", "preprocessing_batch_size",
               "streaming_multipack_buffer_size", "pretrain_multipack_buffer_size", "dataset_exact_deduplication",
               "data_shared_file_system", "dataset_shard_num", "dataset_shard_idx", "buffer_size", "cache_dir",
               "dataset_shards", "dataset_batch_size", "num_of_sequences", "chars_per_token"),
    NO_HUB: ("hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "push_to_hub", "hub_model_revision",
             "hub_always_push", "hub_revision", "push_to_hub_revision", "overwrite_hub_revision",
             "push_to_hub_model_id", "push_to_hub_organization", "export_dir", "export_size", "export_device",
             "export_legacy_format", "export_quantization_bit", "export_hub_model_id"),
    FOUND_IN_THE_MODEL: (
        "model_type", "tokenizer_type", "is_falcon_derived_model", "is_llama_derived_model", "is_mistral_derived_model",
        "is_qwen_derived_model", "base_model_config", "processor_type", "model_class", "init_config",
        "lora_fan_in_fan_out", "tokenizer_use_fast", "use_fast_tokenizer", "tokenizer_legacy", "split_special_tokens",
        "tokenizer_use_mistral_common", "processor_name_or_path", "lora_task_type", "task_type", "peft_type",
        "inference_mode", "model_code_revision", "is_multimodal"),
    "a loss or gradient that is not finite ends the run; no other loss does": (
        "loss_watchdog_threshold", "loss_watchdog_patience"),
    GENERATION: ("eval_table_size", "eval_max_new_tokens", "eval_causal_lm_metrics", "do_causal_lm_eval",
                 "do_bench_eval", "predict_with_generate", "compute_accuracy", "generation_config", "bench_dataset",
                 "include_for_metrics", "dpo_generate_during_eval", "generate_during_eval", "num_print_samples",
                 "batch_eval_metrics", "generation_max_length", "generation_num_beams", "eval_num_beams"),
    "evaluations begin at once, and read each data set": (
        "eval_delay", "eval_on_each_dataset", "eval_do_concat_batches", "eval_use_gather_object"),
    METRICS: ("logging_strategy", "logging_dir", "logging_nan_inf_filter", "log_level", "log_level_replica",
              "disable_tqdm", "include_num_input_tokens_seen", "include_tokens_per_second", "log_on_each_node",
              "plot_loss", "include_tkps", "debug", "skip_memory_metrics", "use_otel_metrics",
              "include_effective_tokens_per_second", "hf_mlflow_log_artifacts", "tpu_metrics_debug",
              "trackio_space_id", "project", "save_predictions", "dataset_stats", "log_completions",
              "log_unique_prompts"),
    TRACKERS: ("swanlab_project", "swanlab_run_name", "swanlab_workspace", "swanlab_mode", "use_swanlab", "use_comet",
               "comet_project_name", "comet_api_key", "comet_workspace",
               "comet_experiment_key", "comet_mode", "comet_online", "comet_experiment_config", "swanlab_api_key",
               "swanlab_logdir", "use_trackio", "trackio_project_name"),
    "set variables in the shell": ("env",),
    LAUNCHER: ("accelerator_config", "local_rank", "use_ray", "ray_num_workers", "ray_run_name", "resources_per_worker",
               "world_size", "ray_storage_path", "ray_scope", "placement_strategy", "num_machines",
               "compute_environment",
               "distributed_type", "main_process_port", "ddp_backend", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    "`ligertune train` trains": ("do_train",),
    "eval.eval_strategy switches evaluations on": ("do_eval",),
    "`ligertune generate RUN PROMPT` answers prompts": ("do_predict",),
    "the ending of a file says its type": ("ds_type", "converter"),
    "evaluations pack rows as training does; the loss does not depend on it": ("eval_sample_packing", "eval_packing"),
    "checkpointing is always non-reentrant": (
        "gradient_checkpointing_kwargs", "use_reentrant_gc", "gradient_checkpointing_use_reentrant"),
    "train.seed decides on the order of the data, too": ("data_seed", "shuffle_seed"),
    "parallel.timeout is the timeout within a step, in seconds; saves and evaluations have a longer one": (
        "ddp_timeout",),
    "every trained parameter is used in each step": ("ddp_find_unused_parameters",),
    "evaluations compute in the dtype of training": (
        "bf16_full_eval", "fp16_full_eval", "eval_accumulation_steps", "prediction_loss_only", "half_precision_backend",
        "fp16_opt_level", "fp16_backend"),
    "training has no cache of keys and values": ("use_cache",),
    "log in with `hf auth login`": ("hf_use_auth_token", "hf_hub_token", "use_auth_token", "ms_hub_token",
                                    "om_hub_token", "push_to_hub_token"),
    "the loss before training is in the report": ("logging_first_step",),
    "the adapter and its reference have no other names": ("model_adapter_name", "ref_adapter_name"),
    "batches and models need no such hint": (
        "label_pad_token_id", "padding_value", "is_encoder_decoder", "force_use_ref_model", "base_model_attribute_name",
        "ignore_bias_buffers", "use_fast_processor"),
    "the adapter is saved as PEFT's": ("pissa_convert",),
    "pairs are recognised by their columns": ("ranking", "formatting", "chat_template_kwarg"),
    "it chooses kernels of the other tool; ligertune's run wherever a layer is recognised": ("plugins",),
    "columns without a meaning are ignored": ("remove_unused_columns", "include_inputs_for_metrics",
                                              "length_column_name", "text_column"),
    "the first save is rehearsed before step 1": ("save_first_step",),
    "a checkpoint holds all that a resume needs; output_dir/model holds the model alone": (
        "save_only_model", "save_on_each_node", "restore_callback_states_from_checkpoint", "ignore_data_skip",
        "save_on_interrupt", "enable_jit_checkpoint"),
    "weights are always safetensors": ("save_safetensors", "safe_serialization"),
    "an unknown key is always an error": ("strict",),
    "the chat template writes tools in its own form": ("tool_format",),
    "export WANDB_ENTITY": ("wandb_entity",),
    "export WANDB_PROJECT": ("wandb_project",),
    "export WANDB_WATCH": ("wandb_watch",),
    "export WANDB_LOG_MODEL": ("wandb_log_model",),
    "export WANDB_MODE": ("wandb_mode",),
    "export WANDB_RUN_GROUP": ("wandb_run_group",),
    "export MLFLOW_TRACKING_URI": ("mlflow_tracking_uri",),
    "export MLFLOW_EXPERIMENT_NAME": ("mlflow_experiment_name",),
    "it belongs to another command of the tool": (
        "vllm", "vllm_gpu_util", "vllm_enforce_eager", "sglang_maxlen", "do_sample", "top_p", "num_beams",
        "max_new_tokens", "repetition_penalty", "length_penalty", "skip_special_tokens", "merge_lora", "use_kv_cache",
        "export_quantization_dataset", "decontaminate", "num_completions_per_prompt", "bench_split", "total_num_tokens",
        "total_supervised_tokens", "use_legacy_prediction_loop", "adapter_folder",
        "infer_backend", "infer_dtype", "vllm_maxlen", "print_param_status", "callbacks", "benchmarks", "seed_dataset",
        "use_cpu", "no_cuda", "past_index", "jit_mode_eval", "use_ipex"),
    f"{REFERENCE}; preference.reference says how it is computed": (
        "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha", "precompute_ref_batch_size"),
}  # fmt: skip
# of a file of preferences: another model as the reference is another loss
REFERENCE_KEYS = dict.fromkeys(
    ("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "reference_free", "ref_model_init_kwargs"),
    Reason(f"{REFERENCE}; preference.reference says how it is computed", TRAINING),
)

_TABLES = ((_TRAINING, TRAINING), (_SPEED, SPEED), (_HARMLESS, HARMLESS))
REASONS = {
    name: Reason(why, harm) for table, harm in _TABLES for why, names in table.items() for name in names
} | REFERENCE_KEYS

# Values of keys without a counterpart that say what is done here, too.
SAME_HERE: dict[str, tuple[object, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "mix_strategy": ("concat",),
    "shuffle_merged_datasets": (True,),
    "shuffle_dataset": (True,),
    "metric_for_best_model": ("eval_loss", "loss"),
    "truncation_mode": ("keep_end_of_prompt",),
    "ignore_pad_token_for_loss": (True,),
    "average_tokens_across_devices": (True,),
    "bnb_4bit_quant_type": ("nf4",),
    "bnb_4bit_use_double_quant": (True,),
    "use_bnb_nested_quant": (True,),
    "double_quantization": (True,),
    "quantization_type": ("nf4",),
    "quantization_method": ("bnb", "bitsandbytes"),
    "lora_bias": ("none",),
    "bias": ("none",),
    "loss_weights": ([1.0], [1]),
    "f_divergence_type": ("reverse_kl",),
    "train_sampling_strategy": ("random",),
    "packing_strategy": ("bfd",),
    "quantize_moe_experts": (True,),
    "create_new_adapter": (True,),
    "disable_dropout": (True,),
}

# roles of messages that are known here, too (ligertune/data/rows/conversation.py)
USUAL_ROLES = {
    "system": {"system"},
    "user": {"user", "human"},
    "assistant": {"assistant", "gpt", "model"},
    "tool": {"tool"},
}

# A value of false switches nothing on, except for these keys, of which it is the choice.
FALSE_MATTERS = (
    "add_bos_token", "shuffle_merged_datasets", "shuffle_dataset", "greater_is_better", "ignore_pad_token_for_loss",
    "average_tokens_across_devices", "bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization",
)  # fmt: skip

# Keys that mean something else here; they are removed before aliases are read.
NOT_OURS = {
    "overwrite_output_dir": Reason("`ligertune train --overwrite` replaces a run", HARMLESS),
    "resume_from_checkpoint": Reason(
        "checkpoints of other tools cannot be read; `ligertune train --resume` continues a run", TRAINING
    ),
    "auto_resume_from_checkpoints": Reason("`ligertune train --resume auto` starts or continues a run", HARMLESS),
    "pad_to_multiple_of": REASONS["pad_to_multiple_of"],
    "temperature": Reason("it is read with task: distill only", HARMLESS),
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
