"""What fits: the largest micro batch, and the longest row, of a plan's model on its device."""

from __future__ import annotations

from dataclasses import dataclass

from ligertune.errors import UserError
from ligertune.planning.memory.activation_policy import why_not_predicted
from ligertune.planning.memory.estimate import Budget, largest
from ligertune.planning.plan import Plan, row_length

MOST_ROWS, MOST_TOKENS = 4096, 1 << 20


@dataclass(frozen=True)
class Fit:
    """With or without checkpointing: the most rows of the recipe's length, and the longest single row; 0: none fits."""

    checkpointing: bool
    micro_batch_size: int
    row_length: int


def fits_of(plan: Plan) -> tuple[Fit, Fit]:
    """Without checkpointing, and with it; a UserError where nothing is predicted."""
    if plan.budget is None:
        raise UserError(f"--fit: no memory is predicted of {plan.model_family}: {why_not_predicted(plan.build.task)}.")
    return _fit(plan, plan.budget.without_checkpointing()), _fit(plan, plan.budget.with_checkpointing())


def _fit(plan: Plan, budget: Budget) -> Fit:
    memory, length = plan.machine.memory_bytes, row_length(plan.rows, plan.data)
    accumulates, multiple_of = plan.batching.accumulation > 1, max(64, plan.rows.multiple_of)

    def rows(count: int) -> bool:
        return budget.fits(count, length, accumulates=accumulates, memory=memory)

    def tokens(multiples: int) -> bool:
        return budget.fits(1, multiples * multiple_of, accumulates=accumulates, memory=memory)

    return Fit(
        bool(budget.kept.checkpointing),
        largest(rows, limit=MOST_ROWS),
        multiple_of * largest(tokens, limit=MOST_TOKENS // multiple_of),
    )


def advice(plan: Plan) -> str:
    """What to change where memory ran out, with this plan's numbers; one sentence or two."""
    if plan.budget is None:
        return "Lower train.per_device_train_batch_size or data.max_length, or set train.gradient_checkpointing: true."
    without, with_checkpointing = fits_of(plan)
    micro, length = plan.batching.micro_batch_size, row_length(plan.rows, plan.data)
    here = with_checkpointing if plan.budget.kept.checkpointing else without
    ways = []
    if 0 < here.micro_batch_size < micro:
        ways.append(f"train.per_device_train_batch_size: {here.micro_batch_size} (with train.global_batch_size: "
                    f"{plan.batching.global_batch_size}, which accumulates the rest)")  # fmt: skip
    elif micro > 1:
        ways.append(f"train.per_device_train_batch_size: {micro // 2} (with train.global_batch_size: "
                    f"{plan.batching.global_batch_size}, which accumulates the rest)")  # fmt: skip
    if not plan.budget.kept.checkpointing and with_checkpointing.micro_batch_size > without.micro_batch_size:
        instead = " instead of kernels.recompute" if plan.build.kernels.recompute else ""
        fits = f"(fits {with_checkpointing.micro_batch_size} rows of {length})"
        ways.append(f"train.gradient_checkpointing: true{instead} {fits}")
    if 0 < here.row_length < length:
        ways.append(f"data.max_length: {here.row_length}")
    if plan.build.method.type == "full":
        heads_alone = plan.build.task == "medusa" and plan.build.medusa.stage == 1
        ways.append(f"train.optim: {'adamw_torch_8bit' if plan.strategy == 'fsdp' else 'adamw_8bit'}")
        ways += [] if heads_alone else ["method.type: lora"]
    elif plan.build.method.type == "lora":
        ways.append("method.type: qlora")
    return "Write " + ", or ".join(ways) + "." if ways else "Use a device with more memory, or more of them."
