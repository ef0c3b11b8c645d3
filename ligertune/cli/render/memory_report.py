"""Output of `ligertune plan`: the predicted memory by kind, and what fits, as lines to write in the recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ligertune.cli.render.console import sentence, table, text
from ligertune.errors import format_bytes, plural
from ligertune.recipe.plain_yaml import dump

if TYPE_CHECKING:
    from ligertune.planning.memory.fit import Fit, LongContext
    from ligertune.planning.plan import Plan

# StepPhase.name -> words
PHASES = {
    "forward": "in the forward",
    "frozen model": "in the forward of the frozen model",
    "loss": "in the loss",
    "backward": "at the beginning of the backward",
    "run again": "in the backward, when the first checkpointed layer is recomputed",
    "first layer": "in the backward of the first layer",
    "gradients": "at the end of the backward",
    "step": "in the optimizer step",
}


def show_memory(plan: Plan, fits: Iterable[Fit] | None) -> None:
    """Print the predicted peak memory by kind, and the largest batch and row that fit."""
    if plan.peak is not None:
        text()
        kinds = {"working": "temporary", "frozen_model": "frozen model"}
        parts = plan.peak.parts().items()
        rows = [(kinds.get(kind, kind), format_bytes(n_bytes)) for kind, n_bytes in parts if n_bytes]
        place = "tensors in each process" if plan.machine.vendor == "cpu" else "each device"
        table(f"Peak memory of {place}, reached {PHASES[plan.peak.phase.name]}", rows)
    for fit in fits or ():
        text("\n" + "\n".join(_fit_lines(plan, fit)))


def show_contexts(plan: Plan, found: Iterable[LongContext]) -> None:
    """Print the longest row of each way to save memory, and the lines of the recipe for the longest."""
    found = [one for one in found if one.tokens]
    where = format_bytes(plan.machine.memory_bytes)
    if not found:
        sentence(f"\nNot even a row of a few hundred tokens fits in {where}.")
        return
    text()
    table(f"Longest row in {where}", [_context_row(one.lines["train"], one) for one in found])
    longest = max(found, key=lambda one: one.tokens)
    text(f"\nFor {longest.tokens:,} tokens, write in the recipe:\n" + dump(longest.lines).rstrip())
    if plan.context is not None and longest.tokens > plan.context:
        sentence(f"The model's own context is {plan.context:,} tokens (max_position_embeddings in its config.json).")


def _context_row(settings: dict[str, Any], found: LongContext) -> tuple[str, str]:
    how = "offload" if settings["gradient_checkpointing"] == "offload" else "checkpointing"
    name = f"{how}, tiled_mlp" if settings["tiled_mlp"] else how
    host = f" and {format_bytes(found.host)} of host memory" if found.host else ""
    return name, f"{found.tokens:,} tokens, in {format_bytes(found.peak)}{host}"


def _fit_lines(plan: Plan, fit: Fit) -> Iterable[str]:
    """Yield what fits in the device's memory, and the lines of the recipe that use it."""
    how = f"{'with' if fit.checkpointing else 'without'} checkpointing"
    where = f"in {format_bytes(plan.machine.memory_bytes)}"
    length = f"{plan.row_length:,} tokens"
    if not fit.micro_batch_size:
        yield f"Not even one row of {length} fits {where} {how}."
    else:
        fits = "fits" if fit.micro_batch_size == 1 else "fit"
        yield f"{plural(fit.micro_batch_size, 'row')} of {length} {fits} {where} {how}. Write in the recipe:"
        yield dump(fit.many_rows).rstrip()
    if fit.row_length != plan.sequence_length and fit.row_length:
        whole = " (the model's context)" if fit.row_length == plan.context else ""
        one = "row of" if plan.rows.documents == 1 else f"pair of {plan.rows.documents} x"
        yield f"One {one} {fit.row_length:,} tokens{whole} fits {how}. Write in the recipe:"
        yield dump(fit.long_row).rstrip()
