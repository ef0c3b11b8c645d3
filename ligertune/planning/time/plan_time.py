"""Predicted time of a plan's step, and the plan with the fastest settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ligertune.planning.graph_choice import host_seconds
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.plan import Plan, TriedSettings
from ligertune.planning.time.gpu_rates import GpuRates, rates_of
from ligertune.planning.time.host_pace import host_pace
from ligertune.planning.time.open_settings import OpenSettings
from ligertune.planning.time.settings_choice import candidates_of, choose, kept_of
from ligertune.planning.time.step_time import PredictedTime, SharedModel, StepTime, StepWork, step_time
from ligertune.recipe.schema import Recipe

PADDED_FILL = 0.9  # share of real tokens in padded batches of similar length, a guess


def time_of_plan(plan: Plan, shape: ModelShape, rates: GpuRates) -> StepTime | None:
    """Predict a step; None for a model whose layers are not understood.

    Added heads, a second model and a tower are not counted, whose work is the same for each split of the batch.
    """
    memory = plan.memory
    if memory is None:
        return None
    data = plan.data
    tokens = plan.batching.micro_batch_size * _tokens_per_row(plan)
    mean_length = data.squared_lengths / data.tokens if data.tokens else float(data.longest)
    quantised = sum(
        kind.elements * number
        for kind, number in shape.parameters
        if kind.quantised(plan.build.method.type) or kind.stored_size
    )
    work = StepWork(
        shape=shape,
        policy=memory.policy,
        states=plan.bytes,
        tokens=tokens,
        squared_lengths=tokens * mean_length,
        labels=tokens * memory.labelled,
        accumulation=plan.batching.accumulation,
        itemsize=memory.itemsize,
        four_bits=quantised,
        host_seconds=host_pace(plan.machine) * host_seconds(plan),
        recorded=bool(plan.build.execution.cuda_graphs),
        ranks=SharedModel(
            world_size=plan.batching.world_size,
            nodes=plan.machine.nodes,
            shards=memory.shards,
            reshards=memory.reshards,
        ),
    )
    return step_time(work, rates)


def _tokens_per_row(plan: Plan) -> float:
    """Return the mean number of tokens that a row makes the GPU compute."""
    rows = plan.rows
    if not rows.count or not plan.data.tokens:
        return float(plan.row_length)
    mean = plan.data.tokens / rows.count
    return mean if rows.is_padding_free else min(mean / PADDED_FILL, float(plan.row_length))


def with_choice(
    recipe: Recipe,
    given: OpenSettings,
    plan_of: Callable[[Recipe], Plan],
    shape: ModelShape,
    continued: Recipe | None = None,
) -> Plan:
    """Return the plan with the fastest settings in place of the open ones, where the time can be predicted.

    recipe: with usual values. given: which settings the user left open. continued: the resolved recipe of the run that
    goes on; its settings stay if they fit.
    """
    plan = plan_of(recipe)
    rates = rates_of(plan.machine)
    time = None if rates is None else time_of_plan(plan, shape, rates)
    if rates is None or time is None:
        return plan
    found = []
    if given:
        found = candidates_of(recipe, given, plan, plan_of, lambda one: time_of_plan(one, shape, rates))
    tried: tuple[TriedSettings, ...] = ()
    if found:
        best = kept_of(found, continued) or choose(found)
        plan = plan_of(best.recipe)
        if given.strategy:
            plan = replace(plan, strategy_why="the fastest that fits, by prediction")
        time = best.time
        others = sorted((one for one in found if one is not best), key=lambda one: one.time.total)
        tried = tuple(one.tried() for one in (best, *others))
    measured = rates.measured and plan.batching.world_size == 1
    shown = PredictedTime(time, rates.device, measured) if _counts_all(plan) else None
    return replace(plan, time=shown, settings_tried=tried)


def _counts_all(plan: Plan) -> bool:
    """Return whether a predicted time counts all that the step computes."""
    memory = plan.memory
    return memory is not None and memory.heads is None and memory.frozen_model is None and memory.tower is None
