"""Choice of the settings that a recipe leaves open: the fastest plan, by prediction, that fits on the device.

All splits of the global batch are tried, each with all layers saved (also with `kernels.recompute`), with as few layers
checkpointed as fit (also with their inputs offloaded), and with all inputs offloaded; on several GPUs each with the
parallel strategies. Of plans that are close to the fastest the simplest is taken, and one that leaves some memory free
where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ligertune.errors import UserError
from ligertune.hardware import total_memory
from ligertune.planning.parallelism import usable_memory
from ligertune.planning.plan import Plan, TriedSettings
from ligertune.planning.time.open_settings import OpenSettings, with_parallel, with_train
from ligertune.planning.time.step_time import StepTime
from ligertune.recipe.document import leaf
from ligertune.recipe.rules.check_rules import contradicts_itself
from ligertune.recipe.schema import Recipe

CLOSE = 0.01  # relative; the prediction is not more exact
CLOSE_ON_RANKS = 0.05  # on several GPUs, whose communication is a guess
FREE = 0.05  # share of the device's memory that a plan leaves free if another one close to it does
SHARE_OF_HOST = 0.5  # of the host's memory, for offloaded activations: with more of it Linux may end the run
# Share of the device's memory that the settings of a second try leave free: the plan of the first try was wrong.
FREE_IN_SECOND_TRY = 0.08
RECOMPUTED: tuple[Any, ...] = (False, "norms", True)


@dataclass(frozen=True)
class Candidate:
    """A plan without open settings, and the predicted time of its step."""

    recipe: Recipe
    plan: Plan
    time: StepTime

    @property
    def peak(self) -> int:
        """Bytes of the step's peak."""
        assert self.plan.peak is not None  # a candidate has a memory prediction
        return self.plan.peak.total

    @property
    def is_tight(self) -> bool:
        """Whether it leaves less than FREE of the device's memory."""
        return self.peak > (1 - FREE) * self.plan.machine.memory_bytes

    @property
    def effort(self) -> int:
        """How much more than a plain step it does: nothing, recomputing parts or whole layers, or offloading."""
        checkpointing = self.recipe.train.gradient_checkpointing
        if isinstance(checkpointing, str):
            return 3
        return 2 if checkpointing else int(self.recipe.kernels.recompute is not False)

    @property
    def simplicity(self) -> tuple[bool, int, int, float]:
        """Rank among plans that take as long: one that leaves memory free, then little effort, DDP, and resharding."""
        parallel = self.recipe.parallel
        sharding = (self.plan.strategy == "fsdp") + (parallel.reshard_after_forward is False)
        return self.is_tight, self.effort, sharding, self.time.total

    def tried(self) -> TriedSettings:
        """Return the values with their predicted time and memory."""
        train = self.recipe.train
        values: dict[str, Any] = {
            "train.per_device_train_batch_size": self.plan.batching.micro_batch_size,
            "train.gradient_accumulation_steps": self.plan.batching.accumulation,
            "train.gradient_checkpointing": train.gradient_checkpointing,
        }
        if train.gradient_checkpointing_layers != "all":
            values["train.gradient_checkpointing_layers"] = train.gradient_checkpointing_layers
        values["kernels.recompute"] = self.recipe.kernels.recompute
        parallel = self.recipe.parallel
        if self.plan.batching.world_size > 1:
            values["parallel.strategy"] = self.plan.strategy
        if self.plan.strategy == "fsdp":
            values["parallel.reshard_after_forward"] = parallel.reshard_after_forward
        if parallel.dp_replicate_size > 1:
            values["parallel.dp_replicate_size"] = parallel.dp_replicate_size
        return TriedSettings(values, self.time.total, self.peak)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest candidate that is close to the fastest, of those that leave memory free if there are any."""
    fastest = min(candidates, key=lambda one: one.time.total)
    margin = CLOSE if fastest.plan.batching.world_size == 1 else CLOSE_ON_RANKS
    close = [one for one in candidates if one.time.total <= (1 + margin) * fastest.time.total]
    return min(close, key=lambda one: one.simplicity)


def kept_of(candidates: Sequence[Candidate], continued: Recipe | None) -> Candidate | None:
    """Return the candidate with the settings of the run that is continued, or None.

    The fastest may be another one by now: the host's pace differs a little each time, and the first try of that run may
    have run out of memory.
    """
    if continued is None:
        return None
    kept = _chosen_values(continued)
    return next((one for one in candidates if _chosen_values(one.recipe) == kept), None)


def _chosen_values(recipe: Recipe) -> tuple[object, ...]:
    """Return the values that a plan may choose. Accumulation follows from the micro-batch."""
    train = recipe.train
    parallel = recipe.parallel
    return (
        train.per_device_train_batch_size,
        train.gradient_checkpointing,
        train.gradient_checkpointing_layers,
        recipe.kernels.recompute,
        parallel.strategy,
        parallel.reshard_after_forward,
        parallel.dp_replicate_size,
    )


def settings_that_fit(plan: Plan, measured: int | None) -> tuple[TriedSettings, ...]:
    """Return the settings to try after those of the plan ran out of memory, the fastest first.

    measured: peak bytes of the device until then, by whose ratio to the prediction other predictions are raised; None
    if the device does not measure it.
    """
    if not plan.settings_tried:
        return ()
    failed, *others = plan.settings_tried
    too_low = 1.0 if measured is None else max(1.0, measured / failed.peak)
    room = (1 - FREE_IN_SECOND_TRY) * plan.machine.memory_bytes
    fitting = [one for one in others if one.peak < failed.peak and one.peak * too_low <= room]
    return tuple(sorted(fitting, key=lambda one: one.seconds))


def with_tried(recipe: Recipe, tried: TriedSettings) -> Recipe:
    """Return the recipe with the settings that `Candidate.tried` lists. recipe: with usual values."""
    values = {"train.gradient_checkpointing_layers": "all", **tried.values}
    if recipe.train.global_batch_size is not None:
        values["train.gradient_accumulation_steps"] = None  # it follows from the other two
    recompute = values.pop("kernels.recompute")
    train = {leaf(key): value for key, value in values.items() if key.startswith("train.")}
    parallel = {leaf(key): value for key, value in values.items() if key.startswith("parallel.")}
    return _with_recompute(with_parallel(with_train(recipe, **train), **parallel), recompute)


def candidates_of(
    recipe: Recipe,
    given: OpenSettings,
    usual: Plan,
    plan_of: Callable[[Recipe], Plan],
    time_of: Callable[[Plan], StepTime | None],
) -> list[Candidate]:
    """Return the plans that fit. recipe: with usual values; usual: its plan."""
    found = []
    for changed in variants(recipe, given, usual):
        if contradicts_itself(changed):
            continue
        try:
            plan = plan_of(changed)
        except UserError:  # of settings that the model or the machine does not support
            continue
        time = time_of(plan)
        saves_all = plan.memory is not None and plan.memory.policy.not_checkpointed == plan.memory.layers
        if time is None or saves_all or not fits(plan):
            continue
        found.append(Candidate(_with_number_of_layers(changed, plan), plan, time))
    return found


def variants(recipe: Recipe, given: OpenSettings, usual: Plan) -> Iterator[Recipe]:
    """Yield the recipes with each combination of open settings. Larger micro-batches come first.

    recipe: with usual values; usual: its plan.
    """
    batching = usual.batching
    share = batching.micro_batch_size * batching.accumulation
    sizes = [size for size in range(share, 0, -1) if share % size == 0] if given.split else [batching.micro_batch_size]
    for size in sizes:
        split = recipe
        if given.split:
            steps = None if recipe.train.global_batch_size is not None else share // size
            split = with_train(recipe, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        for shared in _strategies(split, given, usual):
            yield from _saved_layers(shared, given)


def _strategies(recipe: Recipe, given: OpenSettings, usual: Plan) -> Iterator[Recipe]:
    """Yield the recipes with each parallel strategy: DDP; FSDP2 with and without resharding, also a copy per node."""
    sharded = recipe
    if given.strategy:
        yield with_parallel(recipe, strategy="ddp")
        sharded = with_parallel(recipe, strategy="fsdp")
    if not given.resharding:
        yield sharded
        return
    for reshards in (True, False):
        yield with_parallel(sharded, reshard_after_forward=reshards)
        if given.copies and 1 < usual.machine.nodes < usual.machine.world_size:
            yield with_parallel(sharded, reshard_after_forward=reshards, dp_replicate_size=usual.machine.nodes)


def _saved_layers(recipe: Recipe, given: OpenSettings) -> Iterator[Recipe]:
    checkpointing = recipe.train.gradient_checkpointing
    if given.checkpointing or not checkpointing:
        without = with_train(recipe, gradient_checkpointing=False)
        for recomputed in RECOMPUTED if given.recompute else (recipe.kernels.recompute,):
            yield _with_recompute(without, recomputed)
    if not given.checkpointing:
        if checkpointing:
            yield recipe
        return
    whole = _with_recompute(recipe, False) if given.recompute else recipe
    yield with_train(whole, gradient_checkpointing=True, gradient_checkpointing_layers="auto")
    for layers in ("auto", "all"):
        yield with_train(whole, gradient_checkpointing="offload", gradient_checkpointing_layers=layers)


def _with_recompute(recipe: Recipe, value: Any) -> Recipe:
    return recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"recompute": value})})


def fits(plan: Plan) -> bool:
    """Return whether the device has room for the plan's step, and the host for what is offloaded."""
    if plan.memory is None:
        return False
    batch = plan.largest_batch
    offloaded = plan.batching.world_size * plan.memory.host_bytes(batch.rows, batch.row_length)
    if offloaded > SHARE_OF_HOST * (total_memory() or math.inf):
        return False
    accumulates = plan.batching.accumulation > 1
    memory = usable_memory(plan.machine)
    return plan.memory.fits(batch.rows, batch.row_length, accumulates=accumulates, memory=memory, labels=batch.labels)


def _with_number_of_layers(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the number of layers that `gradient_checkpointing_layers: auto` has found."""
    if recipe.train.gradient_checkpointing_layers != "auto" or not recipe.train.gradient_checkpointing:
        return recipe
    layers = plan.checkpointed_layers
    return with_train(recipe, gradient_checkpointing_layers="all" if layers is None else layers)
