"""The training loop: steps, and logging, evaluation and saving when they are due."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ligertune.launcher.signals import WRITING, StopRequest
from ligertune.patching.deferred_logits import loss_counts
from ligertune.planning.feature_spec import FeatureSpec, feature_of
from ligertune.progress import Phases
from ligertune.training.checkpoint.weight_files import load_best, save_best
from ligertune.training.checks import kernels_as_run, why_not_fused
from ligertune.training.evaluate import EarlyStopping, Evaluation, evaluate
from ligertune.training.metrics.meter import synchronize
from ligertune.training.metrics.metrics_logger import profiled
from ligertune.training.metrics.train_result import TrainResult
from ligertune.training.optim.gradients import unwrap_optimizer
from ligertune.training.optim.optimizers import set_learning_rate
from ligertune.training.parallel.distributed import any_rank, full_tensor, max_over_ranks, reduce_sum
from ligertune.training.setup import Training


@dataclass
class TrainState:
    """How far a run is, and what it found."""

    step: int  # finished optimizer steps
    total_steps: int
    early_stopping: EarlyStopping
    loss_sum: Tensor  # () on the device: this rank's losses since the last logged line
    grad_norm: Tensor | None = None
    eval_loss: float | None = None
    stopped: Literal["no", "after a step", "during an evaluation"] = "no"  # by a signal
    stopped_by_callback: bool = False

    @property
    def done(self) -> bool:
        return self.complete or self.stopping or self.stopped_by_callback or self.early_stopping.should_stop

    @property
    def complete(self) -> bool:
        return self.step >= self.total_steps

    @property
    def stopping(self) -> bool:
        return self.stopped != "no"

    @property
    def interrupted(self) -> bool:
        """Whether a resumed run has something left to do; a signal after the last evaluation changes nothing."""
        return self.stopped == "during an evaluation" or (self.stopping and not self.complete)

    def advance(self, grad_norm: Tensor | None) -> None:
        """Count a step that the host has launched. Raises TypeError for another value of a user's step."""
        if not isinstance(grad_norm, Tensor | None):
            raise TypeError(f"step returned {type(grad_norm).__name__}. Return the gradient norm as a tensor, or None")
        self.step += 1
        self.grad_norm = grad_norm

    def observe(self, evaluation: Evaluation | None, feature: FeatureSpec) -> bool:
        """Note an evaluation, or None for one that a signal interrupted; return whether it is the best.

        The evaluation before the first step does not count, as in transformers.
        """
        if evaluation is None:
            self.stopped = "during an evaluation"
            return False
        if self.step > 0:
            self.eval_loss = evaluation.loss
        return self.step > 0 and self.early_stopping.add(feature.judged(evaluation.line()))


def fit(training: Training, *, stop: StopRequest, phases: Phases) -> TrainResult:
    """Train as planned. From the first step on, `stop` holds signals: the loop finishes its step, saves and returns.

    The loss of a step is the sum over the trained tokens of the global batch divided by their number (`loss_inputs`),
    however the batch is divided into micro-batches and ranks.
    """
    plan = training.plan
    meter = training.meter
    logger = training.logger
    model = training.model
    loss_sum = torch.zeros((), device=training.accelerator.device)
    state = TrainState(training.resumed_from, plan.schedule.total_steps, training.early_stopping, loss_sum)
    model.train()
    training.prefetch_files(state.step)
    evaluates_first = plan.evaluation.eval_on_start and state.step == 0
    is_main = training.accelerator.is_main_process
    training.callbacks.begin(plan, step=state.step, is_main=is_main, model=model)
    stop.hold()
    with profiled(plan, training.accelerator) as profile, logger:
        if training.owes_evaluation or evaluates_first:
            run_evaluation(training, state, stop)
        answer_before_training(training, state)
        phases.begin("first step")  # an evaluation before training belongs to the preparations
        while not state.done:
            training.callbacks.call("on_step_begin", plan, model=model)
            micro_batches = training.micro_batches(state.step)
            work = training.work(state.step)
            rate = training.rates.at(state.step)
            set_learning_rate(training.optimizer, rate)
            loss_inputs = training.loss_inputs(state.step)
            training.prefetch_files(state.step + 1)  # while this step is computed
            state.advance(training.train_step(micro_batches, training.batcher, loss_inputs, state.loss_sum))
            training.saver.look()
            if state.step == training.resumed_from + 1:
                end_first_step(training, state, phases)
            meter.add(work)
            training.loss_check.add(state.step, state.loss_sum, micro_batches)
            profile()

            if training.throttle(stop.received is not None):
                state.stopped = "after a step"
            wanted = training.callbacks.step_end(plan, state.step, model=model)
            state.stopped_by_callback = wanted.should_training_stop
            training.display.step(state.step)
            logger.flush()  # the line of an earlier step, whose numbers have arrived by now
            if state.step % plan.logging.logging_steps == 0 or state.done:
                measured = training.task.measures.take()
                logger.record(state.step, state.loss_sum, state.grad_norm, rate, measured)
                state.loss_sum.zero_()
            if evaluation_due(training, state):
                run_evaluation(training, state, stop)
            if save_due(training, state):
                save_if_finite(training, state)
        logger.flush()
        training.timeout.leave_steps()
        training.saver.finish()
    return finish(training, state, stop)


def evaluation_due(training: Training, state: TrainState) -> bool:
    """Whether this step is followed by an evaluation: by the recipe, after the last step, or by a callback."""
    plan = training.plan
    wanted = training.callbacks.take("should_evaluate")
    due = plan.due(plan.evaluate, state.step) or state.complete or wanted
    return training.eval_batcher is not None and due


def save_due(training: Training, state: TrainState) -> bool:
    """Whether this step is saved: by the recipe, for a signal, or by a callback. The last one is the model itself."""
    plan = training.plan
    wanted = training.callbacks.take("should_save")
    return state.stopping or (not state.complete and (plan.due(plan.save, state.step) or wanted))


def end_first_step(training: Training, state: TrainState, phases: Phases) -> None:
    """Wait for the first step, in which kernels were compiled, and say if its loss was not fused as planned.

    From now on ranks wait only briefly for each other.
    """
    synchronize(training.accelerator.device)
    # Loading and compiling leave millions of objects. A later garbage collection would visit them all, which takes
    # 0.6 s in the middle of a step, on each rank in another step.
    gc.collect()
    gc.freeze()
    if state.step == 1:
        training.logger.record_first_loss(state.loss_sum)
    not_fused = why_not_fused(training.plan.kernels, loss_counts(training.model))
    for note in (*([not_fused] if not_fused else []), *training.task.notes):
        training.notes += (note,)
        training.logger.log({"step": state.step, "note": note})
    phases.end()
    training.timeout.enter_steps()


def run_evaluation(training: Training, state: TrainState, stop: StopRequest) -> None:
    """Evaluate, log the loss, keep the best weights, and answer `eval.sample_prompts`."""
    plan = training.plan
    accelerator = training.accelerator
    model = training.model
    batcher = training.eval_batcher
    assert batcher is not None  # no evaluation is due without examples for it
    training.logger.flush()
    training.display.begins("evaluating")
    with training.meter.paused(), training.timeout.extended():
        found = evaluate(plan, accelerator, model, batcher, training.task, stop, training.metrics)
        is_best = state.observe(found, feature_of(plan.build.task))
        if found is None:
            return
        if state.step:  # schedules do not see the evaluation before the first step, as in transformers
            training.rates.observe(found.loss)
        wanted = state.step > 0 or plan.settings["eval"]["eval_on_start"] is True  # auto counts no time for answers
        of_answers = run_measures(training) if wanted else {}
        line = found._replace(measures={**found.measures, **of_answers}).line()
        training.logger.log({"step": state.step, **line})
        training.callbacks.call("on_evaluate", plan, metrics=line)
        if is_best and plan.checkpoint.load_best_model_at_end:
            save_best(accelerator, model, plan.output_dir, step=state.step, loss=found.loss)
        if training.answer and wanted and accelerator.is_main_process:
            with accelerator.autocast():
                samples = training.answer(accelerator.unwrap_model(model))
            training.logger.log({"step": state.step, "samples": samples})


def run_measures(training: Training) -> dict[str, float]:
    """Return the measures of `eval.metric` and `eval.tasks` by the main rank. All ranks call it."""
    accelerator = training.accelerator
    wanted = training.plan.evaluation
    if wanted.metric is None and not wanted.tasks:
        return {}
    found: dict[str, float] = {}
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(training.model)
        with accelerator.autocast():
            for measure in training.run_measures:
                found |= measure(model)
    return dict(broadcast_object_list([found])[0])


def answer_before_training(training: Training, state: TrainState) -> None:
    """Answer `eval.sample_prompts` before the first step, for the report, unless the recipe decides on it itself."""
    starts = state.step == 0 and not state.done and training.eval_batcher is not None
    wanted = training.plan.settings["eval"]["eval_on_start"] == "auto"
    if training.answer is None or not (starts and wanted and training.accelerator.is_main_process):
        return
    with training.meter.paused(), training.timeout.extended(), training.accelerator.autocast():
        samples = training.answer(training.accelerator.unwrap_model(training.model))
    training.logger.log({"step": 0, "samples": samples})


def save_if_finite(training: Training, state: TrainState) -> None:
    """Save, unless the loss or a gradient of any rank is not finite, which raises UserError on all ranks."""
    grad_norm = state.grad_norm
    # Under fp16 GradScaler skips steps with infinite gradients, so the norm is not checked.
    judged = None if grad_norm is None or training.plan.precision.autocast == "fp16" else full_tensor(grad_norm)
    if any_rank(training.accelerator, not training.loss_check.is_finite(judged)):
        raise training.loss_check.error()
    training.logger.flush()
    training.display.begins("saving")
    with training.meter.paused(), training.timeout.extended():
        training.saver.save(state.step)
    training.callbacks.call("on_save", training.plan)


def expert_load(training: Training) -> dict[str, Any] | None:
    """Return how the routers of a mixture of experts distributed the tokens of all ranks. All ranks call it."""
    load = training.expert_load
    counts = None if load is None else load.total()
    if load is None or counts is None:
        return None
    return load.report(reduce_sum(training.accelerator, counts))


def finish(training: Training, state: TrainState, stop: StopRequest) -> TrainResult:
    """Load the best model if asked, and collect what the report needs. All ranks call it."""
    stop.hold(WRITING)
    gc.unfreeze()
    plan = training.plan
    accelerator = training.accelerator
    early_stopping = state.early_stopping
    meter = training.meter
    notes = training.notes
    best_weights = None
    losses = loss_counts(training.model)
    feature = feature_of(plan.build.task)
    if early_stopping.should_stop and not state.stopping:
        notes += (
            f"stopped early at step {state.step}: {early_stopping.patience} evaluations without "
            f"{feature.better_words(early_stopping.best)}"
            + (f" by more than {early_stopping.threshold:g}" if early_stopping.threshold else ""),
        )
    if state.stopped_by_callback and not state.complete:
        notes += (f"a callback stopped the run at step {state.step}",)
    if plan.checkpoint.load_best_model_at_end and not state.interrupted and early_stopping.best < math.inf:
        step, best_weights = load_best(accelerator, training.model, plan.output_dir)
        notes += (f"the model is that of step {step}, with {feature.best_words(early_stopping.best)}",)
    graphs = getattr(training.train_step, "graphs", None)  # a step of a Python user has none
    if graphs is not None:
        notes += (graphs.note(),)
        meter.include_peak(graphs.peak)
    return TrainResult(
        model=training.model,
        step=state.step,
        resumed_from=training.resumed_from,
        stopped_by=(stop.received or "a signal on another rank") if state.interrupted else None,
        last_eval_loss=state.eval_loss,
        measured=meter.total(),
        peak_memory={"kind": meter.memory_kind, **max_over_ranks(accelerator, meter.peak_memory())},
        work=training.all_work(),
        kernels=kernels_as_run(plan.kernels, losses, unwrap_optimizer(training.optimizer)),
        losses=losses.as_dict(),
        notes=notes,
        experts=expert_load(training),
        best_weights=best_weights,
    )
