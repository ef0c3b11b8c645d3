"""Keys that contradict how processes share the work."""

from __future__ import annotations

from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.rule import Rule, at
from ligertune.recipe.schema import Recipe


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
            ("kernels.rebuild", (False,), "Leave that out, or write ddp or fsdp."),
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
