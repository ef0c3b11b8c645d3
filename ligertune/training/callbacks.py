"""Callbacks in the form of transformers' TrainerCallback: events of the loop, and a control that changes it.

An object with any of the methods in EVENTS is a callback, among them a `transformers.TrainerCallback`. Each method is
called as `callback.on_step_end(args, state, control, **values)`: `args` is the run's plan, `state` and `control` are
objects of this module, and a method may return another control.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.planning.plan import Plan

EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


@dataclass
class CallbackState:
    """How far the run is, with the names of transformers' TrainerState."""

    global_step: int = 0  # finished optimizer steps
    max_steps: int = 0
    epoch: float | None = None  # None for a stream, whose length is not known
    log_history: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl of this process
    is_world_process_zero: bool = True


@dataclass
class Control:
    """What callbacks ask for after a step, with the names of transformers' TrainerControl.

    With several ranks, all of them must ask for the same.
    """

    should_training_stop: bool = False
    should_evaluate: bool = False
    should_save: bool = False


class Callbacks:
    """The callbacks of a run, which are called in their order."""

    def __init__(self, callbacks: Sequence[object] = ()) -> None:
        """Raises UserError for an object without a method that is called."""
        if isinstance(callbacks, str | bytes) or not isinstance(callbacks, Iterable):
            raise TypeError(f"callbacks: give a list of objects, and not {type(callbacks).__name__}")
        self._callbacks = tuple(callbacks)  # first: an iterator can be read once
        for callback in self._callbacks:
            if isinstance(callback, type):
                raise TypeError(f"callbacks: {callback.__name__} is a class. Give an object: {callback.__name__}()")
            if not any(callable(getattr(callback, event, None)) for event in EVENTS):
                raise UserError(
                    f"callbacks: {type(callback).__name__} has none of the methods that are called.",
                    hint=f"Define one of {', '.join(EVENTS)}, each (self, args, state, control, **values).",
                )
        self.state = CallbackState()
        self.control = Control()

    def call(self, event: str, plan: Plan, **values: Any) -> Control:
        """Call one event on all callbacks; return the control."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                given = method(plan, self.state, self.control, **values)
                if given is not None and not hasattr(given, "should_training_stop"):
                    name = f"{type(callback).__name__}.{event}"
                    raise TypeError(f"callbacks: {name} returned {type(given).__name__}. Return the control, or None")
                self.control = self.control if given is None else given
        return self.control

    def begin(self, plan: Plan, *, step: int, is_main: bool, model: object) -> None:
        """Set the state of a run that starts at a step, and call on_train_begin."""
        self.state = CallbackState(step, plan.schedule.total_steps, is_world_process_zero=is_main)
        self.control = Control()
        self._set_epoch(plan)
        self.call("on_train_begin", plan, model=model)

    def step_end(self, plan: Plan, step: int, *, model: object) -> Control:
        """Count a step, and call on_step_end."""
        self.state.global_step = step
        self._set_epoch(plan)
        return self.call("on_step_end", plan, model=model)

    def logged(self, plan: Plan, line: Mapping[str, Any]) -> None:
        """Keep a logged line, and call on_log."""
        if self._callbacks:
            self.state.log_history.append(dict(line))
            self.call("on_log", plan, logs=dict(line))

    def take(self, name: str) -> bool:
        """Return whether callbacks asked for an evaluation or a checkpoint, and forget it."""
        asked = getattr(self.control, name)
        setattr(self.control, name, False)
        return asked

    def _set_epoch(self, plan: Plan) -> None:
        rows = plan.rows.count
        self.state.epoch = self.state.global_step * plan.batching.global_batch_size / rows if rows else None
