"""Rules between recipe keys: which values contradict each other, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligertune.recipe.document import Document, KeyPath, split
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import EITHER_OR, TrainSpec

Condition = Callable[[Any], bool]


@dataclass(frozen=True)
class Rule:
    """A combination of values that a recipe must not have.

    conditions: key -> predicate of its value. The rule is broken if all predicates and `also` hold.
    message: names the keys as {0}, {1}, ... in the order of `conditions`, and their values as {v[0]}, {v[1]}, ...
    """

    conditions: Mapping[str, Condition]
    message: str
    also: Condition = lambda recipe: True

    def is_broken(self, recipe: Recipe) -> bool:
        return all(holds(_value(recipe, key)) for key, holds in self.conditions.items()) and self.also(recipe)


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _is(*values: Any) -> Condition:
    return lambda value: value in values


def _is_not(*values: Any) -> Condition:
    return lambda value: value not in values


def _any(value: Any) -> bool:
    """Hold for every value: the key is in the rule only because the message names it."""
    return True


_on = bool
_off = _is(False, 0, None, ())
_given = _is_not(None)
_not_given = _is(None)
_adapter = _is("lora", "qlora")
_deepspeed = _is("deepspeed_zero2", "deepspeed_zero3")
_above_1 = (2).__le__
MEDUSA_STAGE_1 = {"medusa.stage": _is(1), "task": _is("medusa")}
GATE_OFFLOAD = ("offload_gate", "offload_both")


def _runs_on_gpu(optimizer: str) -> bool:
    """Report whether the optimizer comes from a package whose kernels run on a GPU only."""
    return OPTIMIZERS[optimizer].needs is not None


def _warms_up(recipe: Recipe) -> bool:
    """Report whether the recipe asks for a warm-up, by more than the default of warmup_ratio."""
    default = TrainSpec.model_fields["warmup_ratio"].default
    return bool(recipe.train.warmup_steps) or recipe.train.warmup_ratio not in (None, 0, default)


def _accumulates(recipe: Recipe) -> bool:
    train, wanted = recipe.train, recipe.train.global_batch_size
    micro = train.per_device_train_batch_size
    return (train.gradient_accumulation_steps or 1) > 1 or (wanted is not None and micro not in ("auto", wanted))


BATCH_RULES = (
    *(
        rule
        for key, rival in (("train." + key, "train." + rival) for key, rival in EITHER_OR.items())
        for rule in (
            Rule({rival: _given, key: _given}, "{0} and {1} are both given. Keep one of them."),
            Rule({key: _not_given, rival: _not_given}, "{0} is null and {1} is not given. Give one of them."),
        )
    ),
    Rule(
        {"train.global_batch_size": _given, "train.per_device_train_batch_size": _is_not("auto")},
        "{0} is {v[0]}, which is not a multiple of {1}: {v[1]}.",
        also=lambda recipe: recipe.train.global_batch_size % recipe.train.per_device_train_batch_size != 0,
    ),
    Rule(
        {"train.per_device_train_batch_size": _is("auto"), "train.global_batch_size": _not_given},
        "{0} is auto, which keeps the global batch size. Give {1}.",
    ),
    Rule(
        {"train.warmup_steps": _any, "train.warmup_ratio": _any, "train.lr_scheduler_type": _is("constant")},
        "{2} is constant, which has no warm-up. Write train.lr_scheduler_type: constant_with_warmup.",
        also=_warms_up,
    ),
)

DATA_RULES = (
    Rule({"data.val_split": _on, "data.eval_datasets": _on}, "{0} and {1} are both given. Keep one of them."),
    Rule(
        {"data.eval_datasets": lambda datasets: any(dataset.weight != 1 for dataset in datasets)},
        "{0} has a weight, but an evaluation reads every example once. Leave the weight out.",
    ),
    Rule(
        {"eval.eval_strategy": _is_not("no"), "data.val_split": _off, "data.eval_datasets": _off},
        "{0} is {v[0]}, but there is no evaluation data. Give {1} or {2}.",
    ),
    *(
        Rule({key: _on, "eval.eval_strategy": _is("no")}, "{0} needs evaluations, and {1} is no. Write steps or epoch.")
        for key in ("checkpoint.load_best_model_at_end", "eval.early_stopping_patience")
    ),
    Rule(
        {"data.streaming": _on, "train.max_steps": _not_given},
        "{0} reads data of unknown length. Give {1}.",
    ),
    Rule(
        {"data.streaming": _on, "data.val_split": _on, "data.eval_datasets": _any},
        "{0} cannot split off {1} before it has read the data. Give {2} instead.",
    ),
    *(
        Rule(
            {key: _is("epoch"), "data.streaming": _on},
            "{0} is epoch, and with {1} the end of an epoch is not known. Write steps.",
        )
        for key in ("eval.eval_strategy", "checkpoint.save_strategy")
    ),
    Rule(
        {"data.padding_free": _is(True), "data.packing": _off, "train.torch_compile": _on},
        "{0} gives every batch another length, and {2} compiles for fixed lengths. Leave one of them out.",
    ),
    Rule(
        {"data.padding_free": _is(True), "data.packing": _off, "train.cuda_graphs": _on},
        "{0} gives every batch another length, and {2} replays graphs of fixed lengths. Leave one of them out.",
    ),
    Rule(
        {"checkpoint.overwrite": _on, "checkpoint.resume_from_checkpoint": _is_not("never")},
        "{0} would delete the run that {1} continues. Keep one of them.",
    ),
)

METHOD_RULES = (
    Rule(
        {"model.num_hidden_layers": _given, "model.init": _is("pretrained")},
        "{0} works with random weights only, and {1} is pretrained. Write model.init: random, or leave {0} out.",
    ),
    Rule(
        {"method.type": _is("freeze"), "method.trainable": _off},
        "{0} is freeze, and no parameter is left to train. Give {1}, a list of regular expressions.",
    ),
    Rule(
        {"method.trainable": _on, "method.type": _is_not("freeze")},
        "{0} works with method.type: freeze only, and {1} is {v[1]}.",
    ),
    Rule(
        {"method.type": _is("qlora"), "model.init": _is("random")},
        "{0} is qlora, which quantises pretrained weights, and {1} is random. Write method.type: lora.",
    ),
    *(
        Rule(
            {key: _off, "method.type": _adapter},
            "{0} is false, and {1} is {v[1]}, which trains only the adapter. "
            "Leave {0} out, and name other layers to train in method.lora_modules_to_save.",
        )
        for key in ("vision.freeze_vision_tower", "vision.freeze_projector")
    ),
    Rule(
        {"vision.freeze_language_model": _on, "method.type": _adapter},
        "{0} is true, and {1} is {v[1]}, whose adapter is part of the language model. Leave one of them out.",
    ),
)

MEDUSA_RULES = (
    Rule(
        {"medusa.stage": _is(2), "medusa.heads_path": _not_given, "task": _is("medusa")},
        "{0} is 2, which starts from trained heads, and {1} is not given. "
        "Train the heads with medusa.stage: 1 first, and give their folder.",
    ),
    Rule(
        {"data.max_length": _any, "medusa.num_heads": _any, "task": _is("medusa")},
        "{0} is {v[0]}, too short for {v[1]} heads ({1}): the last head predicts the token {v[1]} + 1 positions ahead. "
        "Write a larger data.max_length, or fewer heads.",
        also=lambda recipe: recipe.data.max_length < recipe.medusa.num_heads + 2,
    ),
    Rule(
        {"method.type": _is("qlora", "freeze"), "task": _is("medusa")},
        "{0} is {v[0]}, and {1} is medusa, which supports full and lora only. Write one of them.",
    ),
    Rule(
        {"method.type": _is("lora"), **MEDUSA_STAGE_1},
        "{0} is lora, and in stage 1 ({1}) only the heads train. Leave {0} out, or write medusa.stage: 2.",
    ),
    Rule(
        {"train.fp8": _on, **MEDUSA_STAGE_1},
        "{0} applies to the model's layers, and in stage 1 ({1}) only the heads train. Leave {0} out.",
    ),
    Rule(
        {"train.gradient_checkpointing_layers": _is_not("all"), **MEDUSA_STAGE_1},
        "{0} applies to layers that save activations, and in stage 1 ({1}) only the heads train. Leave {0} out.",
    ),
)

KERNEL_RULES = (
    Rule(
        {
            "kernels.attention": _is(True),
            "model.attn_implementation": _is_not("auto"),
            "kernels.enabled": _is_not(False),
        },
        "{0} is an attention implementation, and {1} names another. Leave one of them out.",
    ),
    Rule(
        {
            "kernels.attention": _is(True),
            "data.packing": _off,
            "data.padding_free": _is(False),
            "kernels.enabled": _is_not(False),
        },
        "{0} needs rows that hold several examples, and {1} and {2} are false. Leave one of them out.",
    ),
    Rule(
        {"kernels.optimizer": _on, "train.optim": _is_not("adamw_torch_fused")},
        "{0} is the step of adamw_torch_fused, and {1} is {v[1]}. Leave {0} out, or change {1}.",
    ),
    Rule(
        {"kernels.optimizer": _on, "train.optim_in_backward": _on},
        "{0} updates all parameters in one step, and {1} updates them one by one. Leave {0} out.",
    ),
    Rule(
        {
            "kernels.recompute": _on,
            "train.gradient_checkpointing": _on,
            "train.gradient_checkpointing_layers": _is("all"),
        },
        "{0} recomputes what a layer saves, and with {1} a layer saves only its input. Leave one of them out, or "
        "write train.gradient_checkpointing_layers: auto.",
    ),
    Rule(
        {"kernels.recompute": _on, "train.torch_compile": _on},
        "{0} does not work in compiled layers, and {1} is true. Leave one of them out.",
    ),
)

TRAIN_RULES = (
    Rule(
        {"train.gradient_checkpointing_layers": _is_not("all"), "train.gradient_checkpointing": _off},
        "{0} sets how many layers are checkpointed, and {1} is false. Write train.gradient_checkpointing: true.",
    ),
    Rule(
        {"train.optim_offload": _on, "train.optim": _runs_on_gpu},
        "{0} runs the optimizer on the CPU, and {1} is {v[1]}, which runs on a GPU. Leave one of them out.",
    ),
    *(
        Rule(
            {"train.optim_offload": _on, key: _on},
            "{0} runs the optimizer on the CPU, and {1} runs it on the GPU. Leave one of them out.",
        )
        for key in ("train.optim_in_backward", "kernels.optimizer")
    ),
    Rule(
        {"train.optim_in_backward": _on, "train.gradient_accumulation_steps": _any, "train.global_batch_size": _any},
        "{0} updates the weights in every backward, so gradients cannot accumulate. "
        "Write train.gradient_accumulation_steps: 1.",
        also=_accumulates,
    ),
    Rule(
        {"train.optim_in_backward": _on, "train.max_grad_norm": _on},
        "{0} never holds all gradients at once, so {1} cannot clip them. Write train.max_grad_norm: 0.",
    ),
    Rule(
        {"train.torch_compile": _on, "train.gradient_checkpointing": _is("offload", *GATE_OFFLOAD)},
        "{0} compiles whole layers, and {1}: {v[1]} copies their activations to host memory. Leave one of them out.",
    ),
    *(
        Rule(
            {"train.gradient_checkpointing": _is(*GATE_OFFLOAD), key: clashes},
            f"{{0}}: {{v[0]}} saves the outputs of plain linear layers, and {reason}. "
            "Write train.gradient_checkpointing: true.",
        )
        for key, clashes, reason in (
            ("method.type", _is("qlora"), "{1}: qlora quantises them to 4 bits"),
            ("train.fp8", _on, "{1} replaces them"),
            ("model.dtype", _is("float16"), "{1}: float16 casts them"),
            ("parallel.strategy", _deepspeed, "{1}: {v[1]} takes their weights away"),
        )
    ),
    *(
        Rule(
            {"train.cuda_graphs": _on, key: clashes},
            f"{{0}} replays forward and backward as one graph, and {reason}. Leave one of them out.",
        )
        for key, clashes, reason in (
            ("train.gradient_checkpointing", _on, "{1} reads the random state on the host in between"),
            ("train.torch_compile", _on, "{1} makes other graphs"),
            ("train.per_device_train_batch_size", _is("auto"), "{1}: auto leaves no memory for the graph"),
            ("train.optim_in_backward", _on, "{1} updates weights in between"),
            ("model.dtype", _is("float16"), "{1}: float16 changes the loss scale between steps"),
            ("task", _is("medusa"), "{1}: medusa changes the weights of the head losses between steps"),
        )
    ),
    Rule(
        {"train.fp8": _on, "method.type": _is_not("full")},
        "{0} speeds up the matrix products of weights that train, and {1} is {v[1]}. Leave {0} out.",
    ),
    Rule(
        {"train.fp8": _on, "model.dtype": _is("float16")},
        "{0} needs bfloat16 or float32, and {1} is float16. Write model.dtype: bfloat16.",
    ),
    Rule(
        {"train.fp8": _on, "kernels.recompute": _on},
        "{0} uses linear layers of torchao, which save their input, and {1} recomputes it. Leave one of them out.",
    ),
    Rule(
        {"train.fp8": _on, "vision.freeze_language_model": _on},
        "{0} applies to the language model's layers, and {1} freezes them. Leave one of them out.",
    ),
)

PARALLEL_RULES = (
    Rule(
        {"parallel.num_processes": _is_not("auto", 1), "parallel.strategy": _is("single")},
        "{0} is {v[0]}, and {1} is single, which is one process. Keep one of them.",
    ),
    *(
        Rule(
            {"parallel.strategy": _deepspeed, key: _is_not(*supported)},
            f"{{0}} is {{v[0]}}, which does not support {{1}}: {{v[1]}}. {advice}",
        )
        for key, supported, advice in (
            ("train.optim", ("adamw_torch_fused", "adamw_torch", "lion", "sgd"), "Write adamw_torch_fused, or fsdp."),
            ("train.optim_in_backward", (False,), "DeepSpeed steps after the backward. Leave it out."),
            ("train.optim_offload", (False,), "DeepSpeed keeps the optimizer states itself. Leave it out."),
            ("train.torch_compile", (False,), "Leave it out, or write ddp or fsdp."),
            ("train.fp8", (False,), "Leave it out, or write ddp or fsdp."),
            ("checkpoint.async_save", (False,), "DeepSpeed's ranks write together, and wait. Leave it out."),
            ("kernels.optimizer", (False,), "DeepSpeed runs the optimizer. Leave it out."),
            ("kernels.recompute", (False,), "Leave it out, or write ddp or fsdp."),
            ("method.type", ("full", "lora", "freeze"), "Write method.type: lora, or ddp."),
            ("task", ("sft",), "Write ddp or fsdp."),
        )
    ),
    Rule(
        {"parallel.cpu_offload": _on, "parallel.strategy": _is_not("auto", "fsdp")},
        "{0} needs fsdp, and {1} is {v[1]}. Write parallel.strategy: fsdp.",
    ),
    Rule(
        {"parallel.dp_replicate_size": _above_1, "parallel.strategy": _is_not("fsdp")},
        "{0} is {v[0]}, which needs fsdp, and {1} is {v[1]}. Write parallel.strategy: fsdp.",
    ),
    Rule(
        {"parallel.dp_replicate_size": _above_1, "parallel.cpu_offload": _on},
        "{0} averages gradients on the device, and {1} keeps them in host memory. Leave one of them out.",
    ),
    *(
        Rule(
            {"parallel.cp_size": _above_1, key: _is_not(supported)},
            f"{{0}} is {{v[0]}}, which does not support {{1}}: {{v[1]}}. {advice}",
        )
        for key, supported, advice in (
            ("parallel.strategy", "fsdp", "Write parallel.strategy: fsdp."),
            ("parallel.dp_replicate_size", 1, "Leave one of them out."),
            ("data.packing", True, "Only packed rows are split. Write data.packing: true."),
            ("train.torch_compile", False, "Leave one of them out."),
            ("task", "sft", "The heads need tokens of other processes. Leave parallel.cp_size out."),
        )
    ),
    Rule(
        {"parallel.cpu_offload": _on, "train.optim": _runs_on_gpu},
        "{0} runs the optimizer on the CPU, and {1} is {v[1]}, which runs on a GPU. Write adamw_torch_fused.",
    ),
    Rule(
        {"parallel.cpu_offload": _on, "train.optim_offload": _on},
        "{0} already keeps the optimizer states in host memory. Leave {1} out.",
    ),
    Rule(
        {"parallel.cpu_offload": _on, "train.optim_in_backward": _on},
        "{0} copies gradients to host memory during the backward, and {1} could step before the copy ends. "
        "Leave one of them out.",
    ),
)

RULES = (
    *BATCH_RULES, *DATA_RULES, *METHOD_RULES, *MEDUSA_RULES, *KERNEL_RULES, *TRAIN_RULES, *PARALLEL_RULES,
)  # fmt: skip


def contradicts_itself(recipe: Recipe) -> bool:
    """Report whether the recipe breaks a rule, for recipes that the planner derives from the user's."""
    return any(rule.is_broken(recipe) for rule in RULES)


def check_rules(recipe: Recipe, document: Document, faults: Sequence[KeyPath]) -> list[KeyPath]:
    """Add a complaint to `document` for each broken rule, and return the keys that the complaints are about.

    Rules that involve a key in `faults` are skipped: that key has a complaint already.
    """
    leads = []
    for rule in RULES:
        paths = [split(key) for key in rule.conditions]
        in_doubt = any(fault[: len(path)] == path[: len(fault)] for fault in faults for path in paths)
        if in_doubt or not rule.is_broken(recipe):
            continue
        # the complaint names the line of the first key that the user wrote; the others are mentioned with theirs
        lead = next((path for path in paths if document.has(path)), paths[0])
        mentions = [document.name(path) if path == lead else document.mention(path) for path in paths]
        values = [_value(recipe, key) for key in rule.conditions]
        shown = [str(value).lower() if isinstance(value, bool) else value for value in values]
        document.complain(lead, rule.message.format(*mentions, v=shown))
        leads.append(lead)
    return leads
