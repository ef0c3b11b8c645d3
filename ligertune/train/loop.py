"""The whole of training, read from top to bottom."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ligertune.data.batching.batcher import Batcher, alike_of, rows_multiple_of
from ligertune.data.batching.context_parallel_rows import RowParts, row_parts
from ligertune.data.batching.image_order import ByImageCount, check_sharded
from ligertune.data.batching.order import DataOrder
from ligertune.data.batching.packing import pack
from ligertune.data.batching.stream_order import StreamOrder
from ligertune.metrics import MetricsFile
from ligertune.planning.plan import Plan
from ligertune.progress import Phases
from ligertune.tasks.objectives import Objective, objective_of
from ligertune.train.checkpoint import checkpoint_files as checkpoint
from ligertune.train.checkpoint.reshard import load_states
from ligertune.train.checkpoint.saver import Saver
from ligertune.train.context_parallel_check import check_parts
from ligertune.train.distributed import any_rank, most_over_ranks
from ligertune.train.early_stopping import Evaluations, keep_best, take_best
from ligertune.train.evaluate import evaluate
from ligertune.train.host_throttle import Pace
from ligertune.train.loss_check import LossWatch
from ligertune.train.meter import Counts, Meter, synchronize
from ligertune.train.metrics_logger import Lines, whole
from ligertune.train.optim.clipping import clip_gradients
from ligertune.train.optim.gradient_check import check_gradients, follow_parameters
from ligertune.train.optim.kernel_adamw import in_our_kernel
from ligertune.train.optim.lr_schedule import learning_rate
from ligertune.train.optim.optimizers import build_optimizer, set_learning_rate
from ligertune.train.process_group_timeout import Patience
from ligertune.train.signals import StopRequest
from ligertune.train.step import MicroStep
from ligertune.train.trackers import open_trackers, profiled, track
from ligertune.train.zero import is_zero
from ligertune.vision.prefetch import PicturesAhead

if TYPE_CHECKING:
    from torch import nn

    from ligertune.data.batching.collate import Alike
    from ligertune.data.examples import Examples
    from ligertune.data.prepare import PreparedData
    from ligertune.data.stream import StreamedExamples
    from ligertune.models.shape import ModelShape
    from ligertune.vision.reader import ImageReader


@dataclass(frozen=True)
class Fitted:
    """What training came to. Losses are means over the logged interval; `step` is the last finished one."""

    model: nn.Module
    step: int
    resumed_from: int
    stopped_by: str | None
    last_eval_loss: float | None
    work: Counts
    seconds: float
    warmup_excluded: bool
    peak_memory: dict[str, int]
    notes: tuple[str, ...] = ()
    best_weights: dict[str, torch.Tensor] | None = None  # of the best model, where the model itself is sharded


def fit(
    plan: Plan,
    accelerator: Accelerator,
    model: nn.Module,
    data: PreparedData,
    *,
    pad_token_id: int,
    show: Callable[[dict], None],
    stop: StopRequest,
    images: ImageReader | None = None,
    answer: Callable[[nn.Module], list[dict[str, str]]] | None = None,
    phases: Phases,
) -> Fitted:
    """Train `model` as the plan says. `show` receives each logged line; on the main process only.

    stop: holds signals from the first step on, for whoever writes the model, too. images: how the model sees, where it
    does. answer: gives the model's answers to the recipe's prompts, which are shown and kept after each evaluation.
    phases: end with the first step.

    The loss of a step is the sum over the trained tokens of the global batch divided by their number, however the batch
    is cut into micro batches and ranks.
    """
    phases.begin("preparing to train")
    objective = objective_of(plan, model)
    optimizer = build_optimizer(model, plan.optimizer)
    if plan.build.kernels.optimizer and plan.build.kernels.enabled is not False:
        optimizer = in_our_kernel(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    follow_parameters(optimizer)
    micro_step = MicroStep(plan, accelerator, model)
    resumed_from, notes = _resume(plan, accelerator, model, optimizer)
    saver = Saver(accelerator, plan, model, optimizer)
    order = _data_order(plan, data.train, images)
    parts = row_parts(plan)
    alike = alike_of(plan, order.packs)
    shared = plan, accelerator, pad_token_id, objective, images, parts, alike
    batcher = _batcher(data.train, *shared)
    evaluated = _batcher(data.eval, *shared) if data.eval else None
    check_parts(plan, model, batcher, vocab_size=objective.shape.vocab_size)
    work_of = _work_of_steps(objective.shape, order, batcher)
    metrics = MetricsFile(
        plan.output_dir / "metrics.jsonl", resumed_from=resumed_from, enabled=accelerator.is_main_process
    )
    meter = Meter(accelerator.device, warmup_steps=plan.measurement.warmup_steps)
    loss_sum = torch.zeros((), device=accelerator.device)  # of the steps since the last logged line
    step = last_saved = resumed_from
    eval_loss, grad_norm = None, None
    watch = LossWatch(plan.output_dir, batcher, rank=accelerator.process_index)
    evaluations = Evaluations(_evaluated_before(accelerator, metrics))
    keeps_best, patience = plan.checkpoint.load_best_model_at_end, plan.evaluation.early_stopping_patience
    open_trackers(plan, accelerator)
    log = _logger(accelerator, metrics, show)
    for note in notes:
        log({"step": resumed_from, "note": note})
    lines, pace = Lines(plan, accelerator, meter, watch, log), Pace(accelerator)
    waiting = Patience(accelerator, model, seconds=plan.parallel.timeout, parts=parts)
    missed = stopping = False
    hopeless = evaluations.hopeless(patience)
    model.train()
    parameters: tuple[nn.Parameter, ...] = ()
    _expect(plan, accelerator, order, batcher, step)

    phases.begin("first step")
    stop.hold()
    with profiled(plan, accelerator) as profile, lines:

        def hold_out() -> bool:
            """Evaluate, and do what follows from it; False where a signal came in between."""
            nonlocal eval_loss
            lines.flush()
            with meter.paused(), waiting.long():
                found = evaluate(plan, accelerator, model, evaluated, objective, stop)
                if found is None:
                    return False
                eval_loss = found
                log({"step": step, "eval_loss": eval_loss})
                if evaluations.add(eval_loss) and keeps_best:
                    keep_best(accelerator, model, plan.output_dir, step=step, loss=eval_loss)
                if answer and accelerator.is_main_process:
                    with accelerator.autocast():
                        log({"step": step, "samples": answer(accelerator.unwrap_model(model))})
            return True

        if evaluated and _owes_evaluation(plan, accelerator, metrics, resumed_from):
            missed = stopping = not hold_out()
            hopeless = evaluations.hopeless(patience)
        while step < plan.schedule.total_steps and not hopeless and not stopping:
            batches = order.micro_batches(step, accelerator.process_index // plan.batching.cp_size)
            work = work_of(step)
            rate = learning_rate(plan.schedule, step)
            set_learning_rate(optimizer, rate)
            targets = objective.inputs(data.train, np.concatenate(order.step(step)), step=step)

            _expect(plan, accelerator, order, batcher, step + 1)
            for i, rows in enumerate(batches):
                batch = batcher(rows)
                with _gradient_sync(plan, accelerator, model, last=i == len(batches) - 1):
                    loss_sum += micro_step({**batch, **targets})

            if not is_zero(accelerator):  # its engine has taken the step, and the gradients with it
                check_gradients(optimizer)
            if plan.optimizer.max_grad_norm > 0:
                # once, since it takes the host longer than to clip; behind a backward: FSDP may show others before
                parameters = parameters or tuple(model.parameters())
                grad_norm = clip_gradients(accelerator, optimizer, parameters, plan.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            saver.look()
            if step == resumed_from + 1:
                synchronize(accelerator.device)
                phases.end()
                waiting.steps()
            meter.add(work)
            watch.add(step, loss_sum, batches)
            profile()

            stopping = pace(stop.received is not None)
            last = stopping or step == plan.schedule.total_steps
            lines.flush()  # that of the step before
            if step % plan.logging.logging_steps == 0 or last:
                lines.mark(step, loss_sum, grad_norm, rate)
                loss_sum.zero_()
            if evaluated and (plan.due(plan.evaluate, step) or step == plan.schedule.total_steps):
                missed = not hold_out()
                stopping = stopping or missed
                hopeless = evaluations.hopeless(patience)
            if (plan.due(plan.save, step) and not last) or (stopping and step > last_saved):
                if any_rank(accelerator, not watch.is_finite(_judged(plan, grad_norm))):
                    raise watch.complaint()
                lines.flush()
                with meter.paused(), waiting.long():
                    saver.save(step)
                last_saved = step
        lines.flush()
        waiting.end()
        saver.finish()
        stopped_by = None
        if stopping and (missed or step < plan.schedule.total_steps):
            stopped_by = stop.received or "a signal on another rank"

    if hopeless and not stopping:
        notes += (f"stopped early at step {step}: {patience} evaluations without a loss below {evaluations.best:.4f}",)
    best_weights = None
    if keeps_best and stopped_by is None and evaluations.best < math.inf:
        best_step, best_weights = take_best(accelerator, model, plan.output_dir)
        notes += (f"the model is that of step {best_step}, with the lowest evaluation loss, {evaluations.best:.4f}",)
    if micro_step.graphs is not None:
        notes += (micro_step.graphs.note(),)
        meter.peaked(micro_step.graphs.peak)
    work, seconds, warmup_excluded = meter.total()
    return Fitted(
        model=model,
        step=step,
        resumed_from=resumed_from,
        stopped_by=stopped_by,
        last_eval_loss=eval_loss,
        work=work,
        seconds=seconds,
        warmup_excluded=warmup_excluded,
        peak_memory=most_over_ranks(accelerator, meter.peak_memory()),
        notes=notes,
        best_weights=best_weights,
    )


def _resume(
    plan: Plan, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, tuple[str, ...]]:
    """Load the checkpoint that the plan names; the number of steps already done, and what was odd on the way."""
    found = [checkpoint.resume_folder(plan) if accelerator.is_main_process else None]
    folder, notes = broadcast_object_list(found)[0]
    if folder is None:
        return 0, notes
    step = checkpoint.saved_progress(folder, plan)
    load_states(accelerator, folder, model, optimizer)
    return step, notes


def _evaluated_before(accelerator: Accelerator, metrics: MetricsFile) -> list[float]:
    """The losses of the evaluations up to the step that is resumed from; every rank hears the same."""
    known = [line["eval_loss"] for line in metrics.lines() if "eval_loss" in line] if metrics.enabled else None
    return broadcast_object_list([known])[0]


def _owes_evaluation(plan: Plan, accelerator: Accelerator, metrics: MetricsFile, resumed_from: int) -> bool:
    """Whether a signal kept the run before from the evaluation of its last step."""
    if not resumed_from:
        return False
    wanted = plan.due(plan.evaluate, resumed_from) or resumed_from == plan.schedule.total_steps
    lines = metrics.lines() if metrics.enabled else []
    done = any(line["step"] == resumed_from and "eval_loss" in line for line in lines)
    return wanted and not broadcast_object_list([done])[0]


def _logger(accelerator: Accelerator, metrics: MetricsFile, show: Callable[[dict], None]) -> Callable[[dict], None]:
    """line -> metrics.jsonl, trackers and whoever watches; on the main process only."""

    def log(line: dict) -> None:
        if accelerator.is_main_process:
            metrics.write(line)
            track(accelerator, line)
            show(line)

    return log


def _judged(plan: Plan, grad_norm: torch.Tensor | None) -> torch.Tensor | None:
    """The gradients' norm where it must be finite: with a scaled loss, a step whose gradients are not is left out."""
    return None if grad_norm is None or plan.precision.autocast == "fp16" else whole(grad_norm)


def _data_order(
    plan: Plan, examples: Examples | StreamedExamples, images: ImageReader | None
) -> DataOrder | ByImageCount:
    order = _order_of_rows(plan, examples)
    if images is None or images.family.layout != "tiles":
        return order
    check_sharded(plan.strategy, examples, images.family.name)
    return ByImageCount(order, examples.n_images)


def _order_of_rows(plan: Plan, examples: Examples | StreamedExamples) -> DataOrder:
    if plan.rows.streamed:
        length = plan.rows.length if plan.rows.packed else None
        return StreamOrder(examples, seed=plan.build.seed, batching=plan.batching, max_length=length)
    whole = plan.schedule.total_steps * plan.batching.global_batch_size
    return DataOrder(
        examples.lengths,
        total_rows=whole if plan.num_train_epochs is None else round(plan.num_train_epochs * plan.rows.count),
        seed=plan.build.seed,
        batching=plan.batching,
        packs=pack(examples.lengths, plan.rows.length) if plan.rows.packed else None,
        grouped=plan.rows.kind == "grouped",
    )


def _batcher(
    examples: Examples | StreamedExamples,
    plan: Plan,
    accelerator: Accelerator,
    pad_token_id: int,
    objective: Objective,
    images: ImageReader | None,
    parts: RowParts | None,
    alike: Alike | None,
) -> Batcher:
    return Batcher(
        examples,
        packed=plan.rows.joined,
        multiple_of=plan.rows.multiple_of,
        pad_token_id=pad_token_id,
        index_labels=plan.loss_in_head,
        rows_multiple_of=rows_multiple_of(plan),
        device=accelerator.device,
        label_shifts=objective.label_shifts,
        images=images,
        ahead=None if images is None else PicturesAhead(images),
        parts=parts,
        alike=alike,
    )


def _expect(plan: Plan, accelerator: Accelerator, order: DataOrder | ByImageCount, batcher: Batcher, step: int) -> None:
    """Begins to read the images of a step, one step before it is due; a stream does not look ahead."""
    if batcher.ahead is not None and not plan.rows.streamed and step < plan.schedule.total_steps:
        batcher.expect(order.micro_batches(step, accelerator.process_index))


def _gradient_sync(
    plan: Plan, accelerator: Accelerator, model: nn.Module, *, last: bool
) -> contextlib.AbstractContextManager:
    """DDP averages gradients once a step. FSDP does at each micro batch, or each rank would hold whole gradients; where
    it has copies of the model, they meet once a step, or each rank would hold its part of the gradients twice."""
    if is_zero(accelerator):
        accelerator.sync_gradients = last
    if plan.parallel.dp_replicate_size > 1:
        model.set_requires_all_reduce(last)
    return accelerator.no_sync(model) if plan.strategy == "ddp" and not last else contextlib.nullcontext()


def _work_of_steps(shape: ModelShape, order: DataOrder, batcher: Batcher) -> Callable[[int], Counts]:
    """step -> its work over all ranks; every rank knows every length."""
    lengths, targets = batcher.examples.lengths, batcher.examples.trained
    size = order.batching.micro_batch_size

    def work(step: int) -> Counts:
        rows = order.step(step)
        indices = np.concatenate(rows)
        real = lengths[indices].astype(np.int64)
        return Counts(
            steps=1,
            tokens=int(real.sum()),
            padded_tokens=sum(batcher.slots(rows[i : i + size]) for i in range(0, len(rows), size)),
            trained_tokens=int(targets[indices].sum()),
            images=int(batcher.examples.n_images[indices].sum()) if batcher.images else 0,
            image_tokens=batcher.image_tokens(indices),
            flops=shape.flops(tokens=int(real.sum()), squared_lengths=int((real**2).sum())),
        )

    return work
