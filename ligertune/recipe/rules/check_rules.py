"""Rules between recipe keys: which values contradict each other, why, and what to write instead; their check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ligertune.recipe.document import Document, KeyPath, split
from ligertune.recipe.feature import feature_parts, modality_parts
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.rules.rule import (
    CHANGES_WEIGHTS,
    INIT_CHANGES_WEIGHTS,
    NO_CUDA_GRAPHS,
    NO_TILES,
    ONE_OUT,
    TILES,
    Rule,
    each,
)
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import EITHER_OR, TrainSpec


def _warms_up(recipe: Recipe) -> bool:
    """Report whether the recipe asks for a warm-up, by more than the default of warmup_ratio."""
    default = TrainSpec.model_fields["warmup_ratio"].default
    return bool(recipe.train.warmup_steps) or recipe.train.warmup_ratio not in (None, 0, default)


def _accumulates(recipe: Recipe) -> bool:
    train = recipe.train
    wanted = recipe.train.global_batch_size
    micro = train.per_device_train_batch_size
    if train.gradient_accumulation_steps not in (1, None, "auto"):
        return True
    return wanted is not None and micro not in ("auto", wanted)


def _trains_other_roles(recipe: Recipe) -> bool:
    return recipe.data.roles_to_train != ("assistant",)


DEEPSPEED = "parallel.strategy: deepspeed_zero2|deepspeed_zero3"
# tasks of features that bring their own rows
OTHER_ROWS = "task: " + "|".join(name for part in feature_parts() if part.brings_rows for name in part.tasks)
# optimizers of packages whose kernels run on a GPU only
GPU_OPTIMIZER = "train.optim: " + "|".join(name for name, row in OPTIMIZERS.items() if row.needs)

RULES = (
    # ---- batch size, epochs and warm-up
    *(
        rule
        for key, rival in EITHER_OR.items()
        for rule in (
            Rule(f"train.{rival}: not null, train.{key}: not null", "{0} and {1} are both given. Keep one of them."),
            Rule(f"train.{key}: null, train.{rival}: null", "{0} is null and {1} is not given. Give one of them."),
        )
    ),
    Rule("train.global_batch_size: not null, train.per_device_train_batch_size: not auto",
         "{0} is {v[0]}, which is not a multiple of {1}: {v[1]}.",
         also=lambda recipe: recipe.train.global_batch_size % recipe.train.per_device_train_batch_size != 0),
    *(
        Rule(f"train.global_batch_tokens: not null, train.{key}: not null|auto",
             "{0} and {1} are both given. Keep one of them.")
        for key in ("global_batch_size", "gradient_accumulation_steps")
    ),
    Rule("train.warmup_steps: any, train.warmup_ratio: any, "
         "train.lr_scheduler_type: constant|reduce_lr_on_plateau|greedy",
         "{2} is {v[2]}, which has no warm-up. Write train.lr_scheduler_type: constant_with_warmup.",
         also=_warms_up),
    Rule("train.lr_scheduler_type: reduce_lr_on_plateau|greedy, eval.eval_strategy: no",
         "{0} is {v[0]}, which changes the rate by the losses of evaluations, and {1} is no. Write steps or epoch."),
    Rule("train.lr_scheduler_type: warmup_stable_decay, no train.lr_scheduler_kwargs",
         "{0} is warmup_stable_decay, which needs {1}: {{num_decay_steps: N}}, the steps in which the rate falls."),
    # ---- data, evaluation and checkpoints
    Rule("data.val_split, data.eval_datasets", "{0} and {1} are both given. Keep one of them."),
    Rule("data.eval_datasets",
         "{0} has a weight, but an evaluation reads every example once. Leave the weight out.",
         also=lambda recipe: any(dataset.weight != 1 for dataset in recipe.data.eval_datasets)),
    Rule("data.interleave.probabilities, data.datasets: any",
         "{0} has another number of entries than {1}. Write one probability for each data set.",
         also=lambda recipe: recipe.data.interleave.probabilities != "round_robin"
         and len(recipe.data.interleave.probabilities) != len(recipe.data.datasets)),
    Rule("data.interleave.probabilities, data.datasets: any",
         "{0} decides how often each data set is read, and one of {1} has a weight. Leave the weight out.",
         also=lambda recipe: any(dataset.weight != 1 for dataset in recipe.data.datasets)),
    Rule("data.interleave.stopping_strategy: not first_exhausted, data.interleave.probabilities: null",
         "{0} says when interleaved data ends, and {1} is not given. Give it, or leave {0} out."),
    Rule("eval.eval_strategy: not no, no data.val_split, no data.eval_datasets",
         "{0} is {v[0]}, but there is no evaluation data. Give {1} or {2}."),
    Rule("eval.eval_on_start: true, no data.val_split, no data.eval_datasets",
         "{0} is true, but there is no evaluation data. Give {1} or {2}."),
    *(
        Rule(f"{key}, no data.val_split, no data.eval_datasets",
             "{0} is measured with each evaluation, but there is no evaluation data. Give {1} or {2}.")
        for key in ("eval.metric", "eval.tasks")
    ),
    *(
        Rule(f"{key}, parallel.strategy: fsdp|deepspeed_zero3",
             "{0} needs a whole model on one process, and {1} is {v[1]}, which shards it. Leave {0} out, and run "
             "`ligertune eval` on the trained model.")
        for key in ("eval.metric", "eval.tasks")
    ),
    Rule("eval.early_stopping_threshold, eval.early_stopping_patience: null",
         "{0} belongs to early stopping, and {1} is not given. Give it, or leave {0} out."),
    *(
        Rule(f"{key}, eval.eval_strategy: no", "{0} needs evaluations, and {1} is no. Write steps or epoch.")
        for key in ("checkpoint.load_best_model_at_end", "eval.early_stopping_patience")
    ),
    Rule("data.mask_reasoning, data.train_on: all",
         "{0} gives reasoning no labels, and {1} is {v[1]}, which gives labels to all tokens. Write assistant."),
    Rule("data.roles_to_train, data.train_on: last|all",
         "{0} chooses among roles, and {1} is {v[1]}, which chooses all by itself. Leave one of them out.",
         also=_trains_other_roles),
    Rule("data.train_on_eos: not turn, data.train_on: all",
         f"{{0}} chooses end tokens, and {{1}} is all, which gives labels to all tokens. {ONE_OUT}"),
    Rule(f"data.roles_to_train, {OTHER_ROWS}",
         "{0} is for conversations, and {1} is {v[1]}, which trains on other rows. Leave {0} out.",
         also=_trains_other_roles),
    Rule(f"data.train_on_eos: not turn, {OTHER_ROWS}",
         "{0} is for conversations, and {1} is {v[1]}, which trains on other rows. Leave {0} out."),
    Rule("data.streaming, train.max_steps: null", "{0} reads data of unknown length. Give {1}."),
    Rule("data.streaming, data.val_split, data.eval_datasets: any",
         "{0} cannot split off {1} before it has read the data. Give {2} instead."),
    *(
        Rule(f"{key}: epoch, data.streaming",
             "{0} is epoch, and with {1} the end of an epoch is not known. Write steps.")
        for key in ("eval.eval_strategy", "checkpoint.save_strategy")
    ),
    *(
        Rule(f"data.padding_free: true, no data.packing, {key}",
             f"{{0}} gives every batch another length, and {{2}} {needs} fixed lengths. {ONE_OUT}")
        for key, needs in (("train.torch_compile", "compiles for"), ("train.cuda_graphs: true", "replays graphs of"))
    ),
    Rule("checkpoint.overwrite, checkpoint.resume_from_checkpoint: not never",
         "{0} would delete the run that {1} continues. Keep one of them."),
    # ---- noise and learning rates
    Rule("train.neftune_noise_alpha: not null, parallel.cp_size: not 1",
         f"{{0}} needs the lengths of whole documents, which {{1}} splits. {ONE_OUT}"),
    Rule("train.lr_groups",
         "{0}: an entry has neither a learning_rate nor a weight_decay. Give it one of them.",
         also=lambda recipe: any(g.learning_rate is None and g.weight_decay is None for g in recipe.train.lr_groups)),
    *(
        Rule(f"{key}: not null, method.type: not lora|qlora",
             "{0} works with method.type: lora or qlora only, and {1} is {v[1]}. Leave {0} out.")
        for key in ("method.loraplus_lr_ratio",)
    ),
    *(
        Rule(f"{key}, method.type: not lora|qlora",
             "{0} works with method.type: lora or qlora only, and {1} is {v[1]}. Leave {0} out.")
        for key in (
            "method.init_lora_weights: not default", "method.trainable_token_indices", "method.layers_to_transform",
        )
    ),
    Rule("method.layers_pattern, no method.layers_to_transform",
         "{0} names the lists whose layers {1} numbers, and {1} is not given. Give it, or leave {0} out."),
    Rule("method.layers_to_transform, method.lora_target_modules: not all-linear",
         "{0} limits names of layers, and {1} is an expression, as in PEFT. Write a list of names, such as [q_proj].",
         also=lambda recipe: isinstance(recipe.method.lora_target_modules, str)),
    *each(
        INIT_CHANGES_WEIGHTS,
        f"method.init_lora_weights: {CHANGES_WEIGHTS}",
        ("method.load_in_8bit", "{1} would quantise what is left. Write method.type: qlora, or leave {1} out."),
        ("method.use_dora", f"{{1}} could not be saved for the original weights then. {ONE_OUT}"),
    ),
    Rule(f"method.init_lora_weights: {CHANGES_WEIGHTS}, method.type: qlora, model.init: random",
         f"{{0}}: {{v[0]}} decomposes weights before they are quantised, and {{2}} makes them in 4 bits. {ONE_OUT}"),
    *each(
        "{0}: loftq starts from the error of 4-bit weights, and {why}",
        "method.init_lora_weights: loftq",
        ("method.type: lora", "{1} is lora. Write method.type: qlora, or init_lora_weights: pissa_niter_16."),
        ("method.use_dora", f"{{1}} has read the adapter before that. {ONE_OUT}"),
        ("model.init: random", f"{{1}} is random, with no weights to compare with. {ONE_OUT}"),
    ),
    *(
        Rule(f"{key}, {DEEPSPEED}", "{0} is not supported by {1}: {v[1]}. Write ddp or fsdp.")
        for key in ("train.lr_groups", "method.loraplus_lr_ratio: not null")
    ),
    # ---- method and model
    Rule("model.num_hidden_layers, model.init: pretrained",
         "{0} works with random weights only, and {1} is pretrained. Write model.init: random, or leave {0} out."),
    Rule("method.type: freeze, no method.trainable",
         "{0} is freeze, and no parameter is left to train. Give {1}, a list of regular expressions."),
    Rule("method.trainable, method.type: not freeze", "{0} works with method.type: freeze only, and {1} is {v[1]}."),
    *(rule for part in modality_parts() for rule in part.rules),
    *(
        Rule(f"{key}, method.type: not qlora",
             "{0} works with method.type: qlora only, and {1} is {v[1]}. Leave {0} out.")
        for key in (
            "method.bnb_4bit_quant_type: not nf4", "no method.bnb_4bit_use_double_quant",
            "method.bnb_4bit_quant_storage: not uint8",
        )
    ),
    Rule("method.load_in_8bit, method.type: qlora",
         "{0} stores weights in 8 bits, and {1} is qlora, which stores them in 4. Leave {0} out."),
    Rule("method.load_in_8bit, method.type: full|freeze",
         "{0} freezes the weights, and {1} is {v[1]}, which trains them. Write method.type: lora."),
    *each(
        "{0} {why}",
        "method.load_in_8bit",
        ("method.use_dora", "loses its scales where {1} reads weights. Write method.type: qlora, or leave {1} out."),
        ("kernels.lora: true", f"multiplies in 8 bits, and {{1}} adds the update inside 16-bit products. {ONE_OUT}"),
        ("train.gradient_checkpointing: offload_gate|offload_both",
         "has no plain linear layers, whose outputs {1}: {v[1]} saves. Write train.gradient_checkpointing: true."),
        ("train.torch_compile", f"runs bitsandbytes' products, which {{1}} does not compile. {ONE_OUT}"),
        ("train.cuda_graphs: true", f"waits for the device in each product, which {{1}} cannot record. {ONE_OUT}"),
        ("model.init: random", "quantises weights of a checkpoint, and {1} is random. Write method.type: qlora."),
        ("parallel.strategy: fsdp|deepspeed_zero2|deepspeed_zero3",
         "stores weights that cannot be sharded, and {1} is {v[1]}. Write parallel.strategy: ddp."),
        ("parallel.cp_size: not 1", f"stores weights that cannot be sharded, which {{1}} needs. {ONE_OUT}"),
    ),
    *(rule for part in feature_parts() for rule in part.rules),
    # ---- kernels
    Rule("kernels.attention: true, model.attn_implementation: not auto, kernels.enabled: not false",
         f"{{0}} is an attention implementation, and {{1}} names another. {ONE_OUT}"),
    Rule("kernels.attention: true, no data.packing, data.padding_free: false, kernels.enabled: not false",
         f"{{0}} needs rows that hold several examples, and {{1}} and {{2}} are false. {ONE_OUT}"),
    Rule("kernels.optimizer: true, train.optim: not adamw_torch_fused",
         "{0} is the step of adamw_torch_fused, and {1} is {v[1]}. Leave {0} out, or change {1}."),
    Rule("kernels.optimizer: true, train.optim_in_backward",
         "{0} updates all parameters in one step, and {1} updates them one by one. Leave {0} out."),
    Rule("kernels.recompute: not false|auto, train.gradient_checkpointing: not false|auto, "
         "train.gradient_checkpointing_layers: all",
         "{0} recomputes what a layer saves, and with {1} a layer saves only its input. Leave one of them out, or "
         "write train.gradient_checkpointing_layers: auto."),
    Rule("kernels.recompute: not false|auto, train.torch_compile",
         f"{{0}} does not work in compiled layers, and {{1}} is true. {ONE_OUT}"),
    # ---- optimizer, memory savings and dtypes
    Rule("train.tiled_mlp: not false|auto, train.gradient_checkpointing: false|auto",
         "{0} is for checkpointed layers, and {1} is {v[1]}. Write train.gradient_checkpointing: offload."),
    *each(
        NO_TILES,
        TILES,
        ("train.gradient_checkpointing: offload_gate|offload_both", "{1}: {v[1]} copies whole gates"),
        ("train.gradient_checkpointing_layers: not all", "with {1} some layers save all that they compute"),
        ("method.lora_dropout", "{1} would drop other values when they run again"),
        ("train.torch_compile", "{1} compiles whole layers"),
        ("train.fp8", "{1} scales whole tensors"),
        ("kernels.enabled: false", "{1}: false recognises no layers"),
        ("kernels.mlp: false", "{1}: false recognises no MLPs"),
        ("parallel.strategy: fsdp|deepspeed_zero2|deepspeed_zero3", "{1}: {v[1]} gathers a layer's weights once"),
        ("parallel.cp_size: not 1", "{1} splits the row already"),
    ),
    Rule("train.gradient_checkpointing_layers: not all, train.gradient_checkpointing: false|auto",
         "{0} sets how many layers are checkpointed, and {1} is {v[1]}. Write train.gradient_checkpointing: true."),
    *each(
        f"{{0}} runs the optimizer on the CPU, and {{1}} {{why}}. {ONE_OUT}",
        "train.optim_offload",
        (GPU_OPTIMIZER, "is {v[1]}, which runs on a GPU"),
        ("train.optim_in_backward", "runs it on the GPU"),
        ("kernels.optimizer: true", "runs it on the GPU"),
    ),
    Rule("train.optim_in_backward, train.gradient_accumulation_steps: any, train.global_batch_size: any",
         "{0} updates the weights in every backward, so gradients cannot accumulate. "
         "Write train.gradient_accumulation_steps: 1.",
         also=_accumulates),
    Rule("train.optim_in_backward, train.max_grad_norm",
         "{0} never holds all gradients at once, so {1} cannot clip them. Write train.max_grad_norm: 0."),
    Rule("train.torch_compile, train.gradient_checkpointing: offload|offload_gate|offload_both",
         f"{{0}} compiles whole layers, and {{1}}: {{v[1]}} copies their activations to host memory. {ONE_OUT}"),
    *each(
        "{0}: {v[0]} saves the outputs of plain linear layers, and {why}. Write train.gradient_checkpointing: true.",
        "train.gradient_checkpointing: offload_gate|offload_both",
        ("method.type: qlora", "{1}: qlora quantises them to 4 bits"),
        ("train.fp8", "{1} replaces them"),
        ("model.dtype: float16", "{1}: float16 casts them"),
        (DEEPSPEED, "{1}: {v[1]} takes their weights away"),
    ),
    *each(
        NO_CUDA_GRAPHS,
        "train.cuda_graphs: true",
        ("train.gradient_checkpointing: offload_gate|offload_both", "{1}: {v[1]} measures its copies"),
        ("train.gradient_checkpointing: not false|auto, method.lora_dropout",
         "{1} reads the random state of {2} on the host"),
        ("train.torch_compile", "{1} makes other graphs"),
        ("train.optim_in_backward", "{1} updates weights in between"),
        ("model.dtype: float16", "{1}: float16 changes the loss scale between steps"),
    ),
    *each(
        "{0} {why}",
        "train.fp8",
        ("method.type: freeze|qlora", "supports full and lora only, and {1} is {v[1]}. Leave {0} out."),
        ("method.load_in_8bit", f"and {{1}} both quantise the same weights. {ONE_OUT}"),
        ("method.use_dora", f"keeps frozen weights in float8, and {{1}} reads their norms. {ONE_OUT}"),
        ("model.dtype: float16", "needs bfloat16 or float32, and {1} is float16. Write model.dtype: bfloat16."),
        ("kernels.recompute: not false|auto",
         f"saves each layer's input in float8, and {{1}} recomputes it. {ONE_OUT}"),
    ),
    Rule("train.fp8: torchao, method.type: lora",
         "{0}: torchao speeds up the matrix products of weights that train, and {1} is lora. Write train.fp8: true."),
    Rule("train.fp8: true, method.init_lora_weights: any",
         "{0}: true keeps frozen weights in float8, and {1}: {v[1]} changes them. Leave one of them out.",
         also=lambda recipe: recipe.method.init_from_weights),
    Rule("train.fp8: true, train.torch_compile",
         "{0}: true runs kernels that {1} does not trace. Leave it out, or write train.fp8: torchao."),
    Rule("train.fp8: true, parallel.strategy: fsdp",
         "{0}: true keeps float8 copies of whole weights, and {1} is fsdp, which shards them. "
         "Write train.fp8: torchao, or parallel.strategy: ddp."),
    # ---- processes
    *each(
        "{0} is qlora, whose 4-bit weights are sharded by parallel.strategy: fsdp alone, and {1}: {v[1]} shards them "
        "in another way. Write method.type: lora, or {why}.",
        "method.type: qlora",
        ("parallel.cp_size: not 1", "leave {1} out"),
        ("parallel.dp_replicate_size: not 1", "leave {1} out"),
        ("parallel.cpu_offload", "leave {1} out"),
    ),
    Rule("method.bnb_4bit_quant_storage: uint8, method.type: qlora, parallel.strategy: fsdp",
         "{0} is uint8, which {2}: fsdp does not shard. Write {0}: bfloat16, or parallel.strategy: ddp."),
    Rule("parallel.num_processes: not auto|1, parallel.strategy: single",
         "{0} is {v[0]}, and {1} is single, which is one process. Keep one of them."),
    *each(
        "{0} is {v[0]}, which does not support {1}: {v[1]}. {why}",
        DEEPSPEED,
        ("train.optim: not adamw_torch_fused|adamw_torch|lion|sgd", "Write adamw_torch_fused, or fsdp."),
        ("train.optim_in_backward", "DeepSpeed steps after the backward. Leave it out."),
        ("train.optim_offload", "DeepSpeed keeps the optimizer states itself. Leave it out."),
        ("train.torch_compile", "Leave it out, or write ddp or fsdp."),
        ("train.fp8", "Leave it out, or write ddp or fsdp."),
        ("checkpoint.async_save", "DeepSpeed's ranks write together, and wait. Leave it out."),
        ("kernels.optimizer: true", "DeepSpeed runs the optimizer. Leave it out."),
        ("kernels.recompute: not false|auto", "Leave it out, or write ddp or fsdp."),
        ("method.type: qlora", "Write method.type: lora, or ddp."),
        ("task: not sft", "Write ddp or fsdp."),
    ),
    *each(
        "{0} is {v[0]}, which does not support {1}: {v[1]}. {why}",
        "parallel.cp_size: not 1",
        ("parallel.strategy: not fsdp", "Write parallel.strategy: fsdp."),
        ("parallel.dp_replicate_size: not 1", ONE_OUT),
        ("no data.packing", "Only packed rows are split. Write data.packing: true."),
        ("train.torch_compile", ONE_OUT),
        # by default, so that a feature of another distribution is refused until it says that it can
        *((f"task: {'|'.join(part.tasks)}", f"{part.why_whole_rows}. Leave parallel.cp_size out.")
          for part in feature_parts() if part.tasks and part.why_whole_rows),
    ),
    Rule("parallel.reshard_after_forward: not auto, parallel.strategy: not fsdp",
         "{0} is {v[0]}, which is a setting of fsdp, and {1} is {v[1]}. Write parallel.strategy: fsdp."),
    Rule("parallel.dp_replicate_size: not 1, parallel.strategy: not fsdp",
         "{0} is {v[0]}, which needs fsdp, and {1} is {v[1]}. Write parallel.strategy: fsdp."),
    Rule("parallel.dp_replicate_size: not 1, parallel.cpu_offload",
         f"{{0}} averages gradients on the device, and {{1}} keeps them in host memory. {ONE_OUT}"),
    *each(
        "{0} {why}",
        "parallel.cpu_offload",
        ("parallel.strategy: not auto|fsdp", "needs fsdp, and {1} is {v[1]}. Write parallel.strategy: fsdp."),
        (GPU_OPTIMIZER,
         "runs the optimizer on the CPU, and {1} is {v[1]}, which runs on a GPU. Write adamw_torch_fused."),
        ("train.optim_offload", "already keeps the optimizer states in host memory. Leave {1} out."),
        ("train.optim_in_backward",
         "copies gradients to host memory during the backward, and {1} could step before the copy ends. " + ONE_OUT),
    ),
)  # fmt: skip


def contradicts_itself(recipe: Recipe) -> bool:
    """Report whether the recipe breaks a rule, for recipes that the planner derives from the user's."""
    return any(rule.is_broken(recipe) for rule in RULES)


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a recipe breaks: the keys of its conditions, and the complaint about the first that is given."""

    paths: tuple[KeyPath, ...]
    lead: KeyPath
    sentence: str


def broken_rules(recipe: Recipe, document: Document, faults: Sequence[KeyPath]) -> Iterator[BrokenRule]:
    """Yield the rules that a recipe breaks, without those on a key in `faults`, which has a complaint already."""
    for rule in RULES:
        paths = tuple(split(key) for key, _ in rule.conditions)
        in_doubt = any(fault[: len(path)] == path[: len(fault)] for fault in faults for path in paths)
        if in_doubt or not rule.is_broken(recipe):
            continue
        # the complaint names the line of the first key that the user wrote; the others are mentioned with theirs
        lead = next((path for path in paths if document.has(path)), paths[0])
        mentions = [document.name(path) if path == lead else document.mention(path) for path in paths]
        values = [attrgetter(key)(recipe) for key, _ in rule.conditions]
        shown = [str(value).lower() if isinstance(value, bool) else value for value in values]
        yield BrokenRule(paths, lead, rule.message.format(*mentions, v=shown))


def check_rules(recipe: Recipe, document: Document, faults: Sequence[KeyPath]) -> None:
    """Add a complaint to `document` for each broken rule."""
    for broken in broken_rules(recipe, document, faults):
        document.complain(broken.lead, broken.sentence)
