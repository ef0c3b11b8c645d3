"""Largest micro-batch, longest row and longest context that fit on a device, and advice when memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ligertune.errors import UserError, plural
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.memory.activation_bytes import TILE
from ligertune.planning.memory.estimate import MemoryEstimate, largest
from ligertune.planning.plan import Plan
from ligertune.recipe.feature import feature_parts

MAX_ROWS = 4096
MAX_TOKENS = 1 << 20
MAX_CONTEXT = 1 << 23  # tokens that `longest_contexts` tries at most
CONTEXT_STEP = 256  # its results are multiples of this
RecipeLines = dict[str, dict[str, int | bool | str]]  # section -> key -> value


@dataclass(frozen=True)
class Fit:
    """Most rows of the recipe's length, and the longest sequence of a single row in tokens; 0 if none fits.

    many_rows, long_row: what to write in the recipe for each.
    """

    checkpointing: bool
    micro_batch_size: int
    row_length: int
    many_rows: RecipeLines
    long_row: RecipeLines


def largest_fits(plan: Plan) -> tuple[Fit, Fit]:
    """Return what fits without and with checkpointing. Raises UserError if no memory is predicted."""
    if plan.memory is None:
        reason = feature_of(plan.build.task).why_no_memory
        raise UserError(f"--fit: no memory is predicted for {plan.model_family}: {reason}.")
    return _fit(plan, plan.memory.without_checkpointing()), _fit(plan, plan.memory.with_checkpointing())


@dataclass(frozen=True)
class LongContext:
    """The longest single row with some memory settings, in tokens; 0 if none fits. lines: what to write in the recipe.

    peak: predicted bytes on the device, without CUDA's context and fragmentation. host: bytes of pinned host memory.
    """

    tokens: int
    peak: int
    host: int
    lines: RecipeLines


def longest_contexts(plan: Plan) -> tuple[LongContext, ...]:
    """Return the longest row without and with tiles, each with checkpointing and with offloading, and their cost.

    The model's own context is no limit here. Raises UserError if no memory is predicted, or for a sharded model.
    """
    if plan.memory is None:
        raise UserError(f"--fit context: no memory is predicted: {feature_of(plan.build.task).why_no_memory}.")
    execution = plan.build.execution
    memory = plan.memory
    if memory.shards > 1 or memory.cp_size > 1 or memory.heads is not None or memory.layer.experts is not None:
        added = " or ".join(folder.title for part in feature_parts() for folder in part.folders)
        raise UserError(f"--fit context is for dense models, on one device or with ddp, and without {added}.")
    tiles = not (execution.torch_compile or execution.fp8 or plan.build.method.lora_dropout)
    kinds = (True,) if execution.torch_compile else (True, "offload")
    return tuple(
        _longest(plan, memory, kind, tile) for tile in ((0, plan.tile or TILE) if tiles else (0,)) for kind in kinds
    )


def _longest(plan: Plan, memory: MemoryEstimate, checkpointing: bool | str, tile: int) -> LongContext:
    estimate = memory.checkpointed(checkpointing)
    estimate = estimate.tiled(tile) if tile else estimate
    accumulates = plan.batching.accumulation > 1
    memory_bytes = plan.machine.memory_bytes
    step = CONTEXT_STEP * plan.rows.documents
    count = largest(
        lambda count: estimate.fits(1, count * step, accumulates=accumulates, memory=memory_bytes),
        limit=MAX_CONTEXT // CONTEXT_STEP,
    )
    row = max(1, count) * step
    peak = estimate.peak(1, row, accumulates=accumulates, memory=memory_bytes).total
    lines = _recipe_lines(plan, checkpointing, rows=1)
    lines["train"]["tiled_mlp"] = bool(tile) if tile in (0, TILE) else tile
    tokens = count * CONTEXT_STEP
    return LongContext(tokens, peak, estimate.host_bytes(1, row), {"data": {"max_length": tokens}, **lines})


def _fit(plan: Plan, estimate: MemoryEstimate) -> Fit:
    multiple_of = max(64, plan.rows.multiple_of)
    longest = min(MAX_TOKENS, plan.context or MAX_TOKENS)
    fits = partial(estimate.fits, accumulates=plan.batching.accumulation > 1, memory=plan.machine.memory_bytes)
    # other batch sizes have another order: count the longest row, and the most labels, as often as there are rows
    labels = plan.row_length if plan.rows.packed else plan.data.most_trained or None
    rows = largest(
        lambda count: fits(count, plan.row_length, labels=None if labels is None else count * labels), limit=MAX_ROWS
    )
    step = multiple_of * plan.rows.documents  # a row holds all sequences of an example
    length = multiple_of * largest(lambda count: fits(1, count * step), limit=-(-longest // multiple_of))
    length = min(length, longest)
    checkpointing = estimate.policy.checkpointing
    return Fit(
        bool(checkpointing),
        rows,
        length,
        _recipe_lines(plan, checkpointing, rows=_dividing(plan, rows)),
        {"data": {"max_length": length}, **_recipe_lines(plan, checkpointing, rows=1)},
    )


def _dividing(plan: Plan, rows: int) -> int:
    """Return the largest micro-batch of at most `rows` that divides the recipe's `global_batch_size`, if it has one."""
    if plan.settings["train"]["global_batch_size"] is None:
        return rows
    share = plan.batching.global_batch_size // plan.batching.row_ranks
    return next((size for size in range(rows, 0, -1) if share % size == 0), rows)


def _recipe_lines(plan: Plan, checkpointing: bool | str, *, rows: int) -> RecipeLines:
    train: dict[str, int | bool | str] = {"per_device_train_batch_size": rows, "gradient_checkpointing": checkpointing}
    if plan.settings["train"]["gradient_checkpointing_layers"] != "all":
        train["gradient_checkpointing_layers"] = "all"
    excluded = checkpointing and plan.build.kernels.recompute  # checkpointed layers run again as a whole
    return {"train": train, **({"kernels": {"recompute": False}} if excluded else {})}


def advice(plan: Plan) -> str:
    """Return one or two sentences: which keys to change when memory ran out, with this plan's numbers."""
    if plan.memory is None:
        return "Lower train.per_device_train_batch_size or data.max_length, or set train.gradient_checkpointing: true."
    without, with_checkpointing = largest_fits(plan)
    here = with_checkpointing if plan.memory.policy.checkpointing else without
    ways = [
        *_smaller_batch(plan, here.micro_batch_size),
        *_checkpointing(plan, plan.memory, without, with_checkpointing),
        *([f"data.max_length: {here.row_length}"] if 0 < here.row_length < plan.sequence_length else []),
        *_cheaper_method(plan),
    ]
    return "Write " + ", or ".join(ways) + "." if ways else "Use a device with more memory, or more devices."


def _smaller_batch(plan: Plan, fitting: int) -> list[str]:
    micro = plan.batching.micro_batch_size
    if micro == 1:
        return []
    smaller = fitting if 0 < fitting < micro else micro // 2
    return [f"train.per_device_train_batch_size: {smaller} (with train.global_batch_size: "
            f"{plan.batching.global_batch_size}, which accumulates the rest)"]  # fmt: skip


def _checkpointing(plan: Plan, memory: MemoryEstimate, without: Fit, with_checkpointing: Fit) -> list[str]:
    if memory.policy.checkpointing or with_checkpointing.micro_batch_size <= without.micro_batch_size:
        return []
    instead = " instead of kernels.recompute" if plan.build.kernels.recompute else ""
    rows = f"(fits {plural(with_checkpointing.micro_batch_size, 'row')} of {plan.row_length})"
    return [f"train.gradient_checkpointing: true{instead} {rows}"]


def _cheaper_method(plan: Plan) -> list[str]:
    if plan.build.method.type == "lora":
        return ["method.type: qlora"]
    if plan.build.method.type != "full":
        return []
    optimizer = f"train.optim: {'adamw_torch_8bit' if plan.strategy == 'fsdp' else 'adamw_8bit'}"
    adapts = feature_of(plan.build.task).uses_method(plan.build)
    return [optimizer, "method.type: lora"] if adapts else [optimizer]
