"""Keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ligertune.recipe.document import Document, KeyPath, split
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import EITHER_OR, TrainSpec


@dataclass(frozen=True)
class Rule:
    """`keys` contradict each other where `broken`; `says` names them as {0}, {1} and may quote the recipe."""

    keys: tuple[str, ...]
    broken: Callable[[Recipe], bool]
    says: str


def at(recipe: Recipe, key: str) -> object:
    """The value of `section.name`."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def _is_zero(recipe: Recipe) -> bool:
    return recipe.parallel.strategy.startswith("deepspeed")


PARALLEL_RULES = (
    Rule(
        ("parallel.num_processes", "parallel.strategy"),
        lambda recipe: recipe.parallel.strategy == "single" and recipe.parallel.num_processes not in ("auto", 1),
        "{0} is {recipe.parallel.num_processes}, and {1} is single, which is one process. Keep one of them.",
    ),
    *(
        Rule(
            ("parallel.strategy", key),
            lambda recipe, key=key, values=values: _is_zero(recipe) and at(recipe, key) not in values,
            f"{{0}} is {{recipe.parallel.strategy}}, which does not go with {{1}}. {way}",
        )
        for key, values, way in (
            ("train.optim", ("adamw_torch_fused", "adamw_torch", "lion", "sgd"), "Write adamw_torch_fused, or fsdp."),
            ("train.optim_in_backward", (False,), "DeepSpeed steps after the backward. Leave that out."),
            ("train.optim_offload", (False,), "DeepSpeed keeps the states itself. Leave that out."),
            ("train.torch_compile", (False,), "Leave that out, or write ddp or fsdp."),
            ("train.fp8", (False,), "Leave that out, or write ddp or fsdp."),
            ("checkpoint.async_save", (False,), "DeepSpeed's ranks write together, and wait. Leave that out."),
            ("kernels.optimizer", (False,), "DeepSpeed takes the step. Leave that out."),
            ("kernels.recompute", (False,), "Leave that out, or write ddp or fsdp."),
            ("method.type", ("full", "lora", "freeze"), "Write method.type: lora, or ddp."),
        )
    ),
    Rule(
        ("parallel.strategy", "task"),
        lambda recipe: _is_zero(recipe) and recipe.task == "medusa",
        "{0} is {recipe.parallel.strategy}, and {1} is medusa. Write ddp or fsdp.",
    ),
    Rule(
        ("parallel.cpu_offload", "parallel.strategy"),
        lambda recipe: recipe.parallel.cpu_offload and recipe.parallel.strategy not in ("auto", "fsdp"),
        "{0} is true, and {1} is {recipe.parallel.strategy}, which keeps all on the device. Write fsdp.",
    ),
    Rule(
        ("parallel.dp_replicate_size", "parallel.strategy"),
        lambda recipe: recipe.parallel.dp_replicate_size > 1 and recipe.parallel.strategy != "fsdp",
        "{0} is {recipe.parallel.dp_replicate_size}, and {1} is {recipe.parallel.strategy}; copies that are shared are "
        "those of fsdp. Write parallel.strategy: fsdp.",
    ),
    Rule(
        ("parallel.dp_replicate_size", "parallel.cpu_offload"),
        lambda recipe: recipe.parallel.dp_replicate_size > 1 and recipe.parallel.cpu_offload,
        "{0} makes copies whose gradients stay on the device until they meet, and {1} keeps none there. "
        "Leave one of them out.",
    ),
    *(
        Rule(
            ("parallel.cp_size", key),
            lambda recipe, key=key, values=values: recipe.parallel.cp_size > 1 and at(recipe, key) not in values,
            f"{{0}} is {{recipe.parallel.cp_size}}, which does not go with {{1}}. {way}",
        )
        for key, values, way in (
            ("parallel.strategy", ("fsdp",), "Write parallel.strategy: fsdp."),
            ("parallel.dp_replicate_size", (1,), "Leave one of them out."),
            ("data.packing", (True,), "Rows that processes share are packed. Write data.packing: true."),
            ("train.torch_compile", (False,), "Leave one of them out."),
        )
    ),
    Rule(
        ("parallel.cp_size", "task"),
        lambda recipe: recipe.parallel.cp_size > 1 and recipe.task == "medusa",
        "{0} is {recipe.parallel.cp_size}, and {1} is medusa, whose heads look past their part of a row. "
        "Leave {0} out.",
    ),
    Rule(
        ("parallel.cpu_offload", "train.optim"),
        lambda recipe: recipe.parallel.cpu_offload and OPTIMIZERS[recipe.train.optim].needs is not None,
        "{0} takes the step on the CPU, and {1} is {recipe.train.optim}, which runs on a GPU. Write adamw_torch_fused.",
    ),
    Rule(
        ("parallel.cpu_offload", "train.optim_offload"),
        lambda recipe: recipe.parallel.cpu_offload and recipe.train.optim_offload,
        "{0} keeps the optimizer's states in host memory already. Leave {1} out.",
    ),
    Rule(
        ("parallel.cpu_offload", "train.optim_in_backward"),
        lambda recipe: recipe.parallel.cpu_offload and recipe.train.optim_in_backward,
        "{0} copies gradients to host memory during the backward, and {1} could step before they are there. "
        "Leave one of them out.",
    ),
)


def _either_or(key: str, rival: str) -> tuple[Rule, Rule]:
    names = (f"train.{rival}", f"train.{key}")

    def given(recipe: Recipe) -> int:
        return sum(getattr(recipe.train, name) is not None for name in (key, rival))

    return (
        Rule(names, lambda recipe: given(recipe) == 2, "{0} and {1} are both given. Keep one of them."),
        Rule(names[::-1], lambda recipe: given(recipe) == 0, "{0} is null and {1} is not given. Give one of them."),
    )


def _evaluates_nothing(recipe: Recipe) -> bool:
    return recipe.eval.eval_strategy != "no" and not (recipe.data.val_split or recipe.data.eval_datasets)


def _warms_up_a_constant(recipe: Recipe) -> bool:
    """A warm-up was asked for, by more than the ratio's default, and `constant` has none."""
    train = recipe.train
    default = TrainSpec.model_fields["warmup_ratio"].default
    return train.lr_scheduler_type == "constant" and bool(
        train.warmup_steps or (train.warmup_ratio and train.warmup_ratio != default)
    )


def _joins_untrained_heads(recipe: Recipe) -> bool:
    return recipe.task == "medusa" and recipe.medusa.stage == 2 and recipe.medusa.heads_path is None


def _is_shorter_than_the_heads_reach(recipe: Recipe) -> bool:
    return recipe.task == "medusa" and recipe.data.max_length < recipe.medusa.num_heads + 2


def _splits_a_micro_batch(recipe: Recipe) -> bool:
    train = recipe.train
    if train.global_batch_size is None or train.per_device_train_batch_size == "auto":
        return False
    return train.global_batch_size % train.per_device_train_batch_size != 0


def _accumulates(recipe: Recipe) -> bool:
    train, wanted = recipe.train, recipe.train.global_batch_size
    micro = train.per_device_train_batch_size
    return (train.gradient_accumulation_steps or 1) > 1 or (wanted is not None and micro not in ("auto", wanted))


def _has_adapter(recipe: Recipe) -> bool:
    return recipe.method.type in ("lora", "qlora")


GATES_ON_HOST = ("offload_gate", "offload_both")
ON_HOST = ("offload", *GATES_ON_HOST)  # what checkpointing may leave in host memory

RULES = (
    *(rule for key, rival in EITHER_OR.items() for rule in _either_or(key, rival)),
    Rule(
        ("kernels.attention", "model.attn_implementation"),
        lambda recipe: (
            recipe.kernels.attention is True
            and recipe.kernels.enabled is not False
            and recipe.model.attn_implementation != "auto"
        ),
        "{0} is an attention of its own, and {1} names another. Leave one of them out.",
    ),
    Rule(
        ("kernels.attention", "data.packing", "data.padding_free"),
        lambda recipe: (
            recipe.kernels.attention is True
            and recipe.kernels.enabled is not False
            and not recipe.data.packing
            and recipe.data.padding_free is False
        ),
        "{0} is for examples that lie one behind another in a row, and {1} and {2} are false. Leave one of them out.",
    ),
    Rule(
        ("kernels.optimizer", "train.optim"),
        lambda recipe: recipe.kernels.optimizer and recipe.train.optim != "adamw_torch_fused",
        "{0} is the step of adamw_torch_fused, and {1} is another. Leave {0} out, or change {1}.",
    ),
    Rule(
        ("kernels.optimizer", "train.optim_in_backward"),
        lambda recipe: recipe.kernels.optimizer and recipe.train.optim_in_backward,
        "{0} is one step for all parameters, and {1} is true. Leave {0} out.",
    ),
    Rule(
        ("kernels.recompute", "train.gradient_checkpointing"),
        lambda recipe: (
            recipe.kernels.recompute
            and bool(recipe.train.gradient_checkpointing)
            and recipe.train.gradient_checkpointing_layers == "all"
        ),
        "{0} makes again what a layer keeps, and with {1} it keeps nothing but its input. Leave one of them out, or "
        "write train.gradient_checkpointing_layers: auto.",
    ),
    Rule(
        ("train.gradient_checkpointing_layers", "train.gradient_checkpointing"),
        lambda recipe: recipe.train.gradient_checkpointing_layers != "all" and not recipe.train.gradient_checkpointing,
        "{0} says how many layers are checkpointed, and {1} is false. Write {1}: true.",
    ),
    Rule(
        ("train.gradient_checkpointing_layers", "medusa.stage"),
        lambda recipe: (
            recipe.train.gradient_checkpointing_layers != "all" and recipe.task == "medusa" and recipe.medusa.stage == 1
        ),
        "{0} is for layers that keep something, and in stage 1 ({1}) the heads alone train. Leave {0} out.",
    ),
    Rule(
        ("kernels.recompute", "train.torch_compile"),
        lambda recipe: recipe.kernels.recompute and recipe.train.torch_compile,
        "{0} works on layers that run one by one, and {1} makes graphs of them. Leave one of them out.",
    ),
    Rule(
        ("data.val_split", "data.eval_datasets"),
        lambda recipe: recipe.data.val_split > 0 and bool(recipe.data.eval_datasets),
        "{0} and {1} are both given. Keep one of them.",
    ),
    Rule(
        ("data.eval_datasets",),
        lambda recipe: any(dataset.weight != 1 for dataset in recipe.data.eval_datasets),
        "{0} gives a weight; every example is evaluated once. Leave the weight out.",
    ),
    Rule(
        ("data.streaming", "train.max_steps"),
        lambda recipe: recipe.data.streaming and recipe.train.max_steps is None,
        "{0} reads data whose length is not known. Give {1}.",
    ),
    Rule(
        ("data.streaming", "data.val_split", "data.eval_datasets"),
        lambda recipe: recipe.data.streaming and recipe.data.val_split > 0,
        "{0} cannot draw {1} from what it has not read. Give {2}.",
    ),
    *(
        Rule(
            (key, "data.streaming"),
            lambda recipe, key=key: recipe.data.streaming and at(recipe, key) == "epoch",
            "{0} is epoch, and with {1} no epoch has a known end. Write steps.",
        )
        for key in ("eval.eval_strategy", "checkpoint.save_strategy")
    ),
    Rule(
        ("eval.eval_strategy", "data.val_split", "data.eval_datasets"),
        _evaluates_nothing,
        "{0} asks for an evaluation, and there is nothing to evaluate on. Give {1} or {2}.",
    ),
    Rule(
        ("model.num_hidden_layers", "model.init"),
        lambda recipe: recipe.model.num_hidden_layers is not None and recipe.model.init == "pretrained",
        "{0} cuts random models only, and {1} is pretrained. Write model.init: random, or leave the depth alone.",
    ),
    Rule(
        ("checkpoint.overwrite", "checkpoint.resume_from_checkpoint"),
        lambda recipe: recipe.checkpoint.overwrite and recipe.checkpoint.resume_from_checkpoint != "never",
        "{0} would remove the run that {1} continues. Keep one of them.",
    ),
    Rule(
        ("train.warmup_steps", "train.warmup_ratio", "train.lr_scheduler_type"),
        _warms_up_a_constant,
        "{2} is constant, which has no warm-up. Write train.lr_scheduler_type: constant_with_warmup.",
    ),
    Rule(
        ("train.global_batch_size", "train.per_device_train_batch_size"),
        _splits_a_micro_batch,
        "{0} is {recipe.train.global_batch_size}, and no multiple of {1}, "
        "which is {recipe.train.per_device_train_batch_size}.",
    ),
    Rule(
        ("medusa.stage", "medusa.heads_path"),
        _joins_untrained_heads,
        "{0} is 2, which trains the model with heads that were trained before, and {1} names none. "
        "Train them with medusa.stage: 1 and write the folder that leaves.",
    ),
    Rule(
        ("data.max_length", "medusa.num_heads"),
        _is_shorter_than_the_heads_reach,
        "{0} is {recipe.data.max_length}, and {recipe.medusa.num_heads} heads ({1}) reach further: from one token "
        "to the one {recipe.medusa.num_heads} + 1 behind it. Write a longer one, or fewer heads.",
    ),
    Rule(
        ("train.per_device_train_batch_size", "train.global_batch_size"),
        lambda recipe: recipe.train.per_device_train_batch_size == "auto" and recipe.train.global_batch_size is None,
        "{0} is auto, which keeps the global batch, and that is not given. Give {1}.",
    ),
    Rule(
        ("method.type", "method.trainable"),
        lambda recipe: recipe.method.type == "freeze" and not recipe.method.trainable,
        "{0} is freeze, and nothing is left to train. Give {1}, a list of regular expressions.",
    ),
    Rule(
        ("method.trainable", "method.type"),
        lambda recipe: bool(recipe.method.trainable) and recipe.method.type != "freeze",
        "{0} is read with method.type: freeze only, and {1} is {recipe.method.type}.",
    ),
    Rule(
        ("method.type", "model.init"),
        lambda recipe: recipe.method.type == "qlora" and recipe.model.init == "random",
        "{0} is qlora, which quantises pretrained weights, and {1} is random. Write method.type: lora.",
    ),
    Rule(
        ("train.optim_offload", "train.optim"),
        lambda recipe: recipe.train.optim_offload and OPTIMIZERS[recipe.train.optim].needs is not None,
        "{0} steps on the processor, and {1} is {recipe.train.optim}, which steps on a GPU. Leave one of them out.",
    ),
    *(
        Rule(
            ("train.optim_offload", key),
            lambda recipe, key=key: recipe.train.optim_offload and bool(at(recipe, key)),
            "{0} steps on the processor, and {1} is true, which says how to step on the GPU. Leave one of them out.",
        )
        for key in ("train.optim_in_backward", "kernels.optimizer")
    ),
    Rule(
        ("train.torch_compile", "train.gradient_checkpointing"),
        lambda recipe: recipe.train.torch_compile and recipe.train.gradient_checkpointing in ON_HOST,
        "{0} makes graphs of the layers, which keep nothing in host memory, as {1}: "
        "{recipe.train.gradient_checkpointing} asks. Leave one out.",
    ),
    *(
        Rule(
            ("train.gradient_checkpointing", key),
            lambda recipe, refused=refused: recipe.train.gradient_checkpointing in GATES_ON_HOST and refused(recipe),
            f"{{0}}: {{recipe.train.gradient_checkpointing}} keeps what plain linear layers give, and {why}. "
            "Write {0}: true.",
        )
        for key, refused, why in (
            ("method.type", lambda recipe: recipe.method.type == "qlora", "those of {1}: qlora have four bits"),
            ("train.fp8", lambda recipe: recipe.train.fp8, "{1} has other ones"),
            ("model.dtype", lambda recipe: recipe.model.dtype == "float16", "with {1}: float16 they are cast"),
            (
                "parallel.strategy",
                lambda recipe: recipe.parallel.strategy.startswith("deepspeed"),
                "{1} takes their weights away",
            ),
        )
    ),
    Rule(
        ("data.padding_free", "train.torch_compile"),
        lambda recipe: recipe.data.padding_free is True and not recipe.data.packing and recipe.train.torch_compile,
        "{0} makes rows of ever other documents, and {1} makes graphs of what stays alike. Leave one of them out.",
    ),
    Rule(
        ("data.padding_free", "train.cuda_graphs"),
        lambda recipe: recipe.data.padding_free is True and not recipe.data.packing and recipe.train.cuda_graphs,
        "{0} makes rows of ever other documents, and {1} is for batches that are alike. Leave one of them out.",
    ),
    *(
        Rule(
            ("train.cuda_graphs", key),
            lambda recipe, refused=refused: recipe.train.cuda_graphs and refused(recipe),
            f"{{0}} launches forward and backward at once, and {why}. Leave one of them out.",
        )
        for key, refused, why in (
            (
                "train.gradient_checkpointing",
                lambda recipe: bool(recipe.train.gradient_checkpointing),
                "with {1} the host looks up the random state in between",
            ),
            ("train.torch_compile", lambda recipe: recipe.train.torch_compile, "{1} makes graphs of its own"),
            (
                "train.per_device_train_batch_size",
                lambda recipe: recipe.train.per_device_train_batch_size == "auto",
                "{1}: auto leaves no room for the memory that they keep",
            ),
            ("train.optim_in_backward", lambda recipe: recipe.train.optim_in_backward, "{1} steps in between"),
            (
                "model.dtype",
                lambda recipe: recipe.model.dtype == "float16",
                "{1}: float16 scales the loss anew",
            ),
            ("task", lambda recipe: recipe.task == "medusa", "{1}: medusa weighs its heads anew in each step"),
        )
    ),
    Rule(
        ("train.fp8", "method.type"),
        lambda recipe: recipe.train.fp8 and recipe.method.type != "full",
        "{0} speeds up the products of weights that train, and {1} is {recipe.method.type}. Leave {0} out.",
    ),
    Rule(
        ("train.fp8", "model.dtype"),
        lambda recipe: recipe.train.fp8 and recipe.model.dtype == "float16",
        "{0} casts bfloat16 or float32, and {1} is float16, which is a cast of its own. Write model.dtype: bfloat16.",
    ),
    Rule(
        ("train.fp8", "kernels.recompute"),
        lambda recipe: recipe.train.fp8 and recipe.kernels.recompute,
        "{0} has linear layers of torchao, which keep their input, and {1} lets layers make it again. "
        "Leave one of them out.",
    ),
    Rule(
        ("train.fp8", "vision.freeze_language_model"),
        lambda recipe: recipe.train.fp8 and recipe.vision.freeze_language_model,
        "{0} is for the language model's layers, and {1} keeps them as they are. Leave one of them out.",
    ),
    Rule(
        ("train.fp8", "medusa.stage"),
        lambda recipe: recipe.train.fp8 and recipe.task == "medusa" and recipe.medusa.stage == 1,
        "{0} is for the model's layers, and in stage 1 ({1}) the heads alone train. Leave {0} out.",
    ),
    Rule(
        ("train.optim_in_backward", "train.gradient_accumulation_steps", "train.global_batch_size"),
        lambda recipe: recipe.train.optim_in_backward and _accumulates(recipe),
        "{0} steps with each backward, so nothing can be accumulated. Write train.gradient_accumulation_steps: 1.",
    ),
    Rule(
        ("train.optim_in_backward", "train.max_grad_norm"),
        lambda recipe: recipe.train.optim_in_backward and recipe.train.max_grad_norm > 0,
        "{0} never has all gradients at once, so {1} cannot clip them. Write train.max_grad_norm: 0.",
    ),
    *(
        Rule(
            (key, "eval.eval_strategy"),
            lambda recipe, key=key: bool(at(recipe, key)) and recipe.eval.eval_strategy == "no",
            "{0} goes by evaluations, and {1} is no. Write steps or epoch.",
        )
        for key in ("checkpoint.load_best_model_at_end", "eval.early_stopping_patience")
    ),
    *PARALLEL_RULES,
    Rule(
        ("method.type", "task"),
        lambda recipe: recipe.task == "medusa" and recipe.method.type in ("qlora", "freeze"),
        "{0} is {recipe.method.type}, and {1} is medusa, whose second stage trains the model by full or lora. "
        "Write one of them.",
    ),
    Rule(
        ("method.type", "medusa.stage"),
        lambda recipe: recipe.task == "medusa" and recipe.method.type == "lora" and recipe.medusa.stage == 1,
        "{0} is lora, and in stage 1 ({1}) the heads alone train. Leave {0} out, or write medusa.stage: 2.",
    ),
    *(
        Rule(
            (key, "method.type"),
            lambda recipe, key=key: _has_adapter(recipe) and not at(recipe, key),
            "{0} is false, and {1} is {recipe.method.type}, which freezes all but its adapter. "
            "Leave {0} out, and name what else trains in method.lora_modules_to_save.",
        )
        for key in ("vision.freeze_vision_tower", "vision.freeze_projector")
    ),
    Rule(
        ("vision.freeze_language_model", "method.type"),
        lambda recipe: _has_adapter(recipe) and recipe.vision.freeze_language_model,
        "{0} is true, and {1} is {recipe.method.type}, whose adapter stands in that part. Leave one of them out.",
    ),
)


def contradicts_itself(recipe: Recipe) -> bool:
    """Whether any rule is broken: of a recipe that somebody thinks of writing."""
    return any(rule.broken(recipe) for rule in RULES)


def check_rules(recipe: Recipe, document: Document, faults: Sequence[KeyPath]) -> list[KeyPath]:
    """A complaint for each broken rule, unless one of its keys has one already; the keys that they are about."""
    leads = []
    for rule in RULES:
        paths = [split(key) for key in rule.keys]
        in_doubt = any(fault[: len(path)] == path[: len(fault)] for fault in faults for path in paths)
        if not in_doubt and rule.broken(recipe):
            lead = next((path for path in paths if document.has(path)), paths[0])
            mentions = [document.name(path) if path == lead else document.mention(path) for path in paths]
            document.complain(lead, rule.says.format(*mentions, recipe=recipe))
            leads.append(lead)
    return leads
