"""Set up training: optimizer, accelerate's wrapping, checkpoint to resume, data order, batches, logging."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedConfig

from ligertune.data.batching.collate import Batcher, FilePrefetcher, rows_multiple_of, static_shapes_of
from ligertune.data.batching.context_parallel import context_parallel_split
from ligertune.data.batching.order import ByFileCount, DataOrder, StreamOrder, check_files_on_all_rows
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Examples
from ligertune.data.modalities.modality import ModalityReader
from ligertune.data.prepare import PreparedData
from ligertune.data.stream import StreamedExamples
from ligertune.decode.answer_metric import answer_measure
from ligertune.decode.generate import SampleAnswers
from ligertune.decode.harness import task_measures
from ligertune.decode.text_scorer import batching_of
from ligertune.errors import UserError
from ligertune.features.task import Task
from ligertune.files.storage import MetricsFile
from ligertune.models.experts.expert_load import ExpertLoad
from ligertune.models.load_tokenizer import LoadedTokenizer
from ligertune.models.mixers.decays import give_weights_one_dtype
from ligertune.models.save import prompt_of
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.optimization import total_rows
from ligertune.planning.plan import Plan, TriedSettings
from ligertune.progress import Display, LogLine
from ligertune.training.callbacks import Callbacks
from ligertune.training.checkpoint.checkpoint_files import Saver
from ligertune.training.checkpoint.choose_checkpoint import agree_on_checkpoint
from ligertune.training.checkpoint.load_checkpoint import explain_unusable, load_states, restore_random_states
from ligertune.training.checkpoint.weight_files import restore_saved_initial, save_float8_scales, save_only_what_trains
from ligertune.training.checks import FiniteLossCheck, check_context_parallel
from ligertune.training.evaluate import EarlyStopping, EvaluationMetrics
from ligertune.training.metrics.meter import Counts, Meter
from ligertune.training.metrics.metrics_logger import MetricsLogger
from ligertune.training.optim.algorithms import kernel_step_pays, with_kernel_step
from ligertune.training.optim.gradients import attach_to_prepared
from ligertune.training.optim.optimizers import build_optimizer, set_learning_rate
from ligertune.training.optim.schedules import LearningRates
from ligertune.training.parallel.distributed import (
    HostThrottle,
    ProcessGroupTimeout,
    autocast_under_fsdp,
    full_tensor,
    is_sharded,
    leave_four_bit_weights,
    leave_quant_states,
    reduce_sum,
    uses_deepspeed,
    wrap_layers_that_are_there,
)
from ligertune.training.step import StepFunction, TrainStep

RunMeasure = Callable[[Any], dict[str, float]]  # the trained model -> measures by name


@dataclass(frozen=True)
class Job:
    """Everything that a run needs except its model. `plan_for` (resolve.py) returns it."""

    plan: Plan
    config: PreTrainedConfig
    tokenizer: LoadedTokenizer
    data: PreparedData
    plan_with: Callable[[TriedSettings], Plan]  # makes a plan with other settings of the same batch
    reader: ModalityReader | None = None  # None for text models
    is_second_try: bool = False  # after one that ran out of memory

    @property
    def prompt(self) -> dict[str, Any]:
        """Prompt template, its variables and system prompt: saved with the model, and used for its sample answers."""
        return prompt_of(self.data.template, self.plan.data_options)


@dataclass(frozen=True)
class Wrapped:
    """The model as accelerate wraps it for DDP, FSDP2 or ZeRO, with its optimizer and its task."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    expert_load: ExpertLoad | None


@dataclass(frozen=True)
class Resumed:
    """Where a run continues.

    step: finished steps, 0 for a new run. evaluations: lines of metrics.jsonl up to it. has_evaluation: whether that
    step has one.
    """

    step: int
    notes: tuple[str, ...]
    metrics: MetricsFile
    evaluations: Sequence[Mapping[str, Any]]
    has_evaluation: bool


@dataclass(frozen=True)
class Custom:
    """What a Python user brings to a run.

    task: makes the task, in place of the recipe's. setup: returns the training with fields that it replaced.
    """

    task: Callable[[Plan, nn.Module], Task] | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    metrics: EvaluationMetrics | None = None
    setup: Callable[[Training], Training] = lambda training: training


@dataclass
class Training:
    """All objects that the loop uses. Every rank makes one, by `start`; each field can be replaced."""

    job: Job
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    train_step: StepFunction
    order: DataOrder | StreamOrder | ByFileCount
    batcher: Batcher
    eval_batcher: Batcher | None
    rates: LearningRates
    early_stopping: EarlyStopping
    saver: Saver
    meter: Meter
    logger: MetricsLogger
    loss_check: FiniteLossCheck
    throttle: HostThrottle
    timeout: ProcessGroupTimeout
    display: Display
    resumed: Resumed
    notes: tuple[str, ...]
    expert_load: ExpertLoad | None = None
    answer: SampleAnswers | None = None  # answers eval.sample_prompts
    run_measures: tuple[RunMeasure, ...] = ()  # of eval.metric and eval.tasks; on the main rank only
    callbacks: Callbacks = field(default_factory=Callbacks)
    metrics: EvaluationMetrics | None = None

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def resumed_from(self) -> int:
        return self.resumed.step

    @property
    def owes_evaluation(self) -> bool:
        """Whether a signal stopped the interrupted run after a step was saved, and before its evaluation."""
        plan = self.plan
        due = plan.due(plan.evaluate, self.resumed_from) or self.resumed_from == plan.schedule.total_steps
        return bool(self.eval_batcher and self.resumed_from and due and not self.resumed.has_evaluation)

    def all_work(self) -> Counts:
        """Return the work of all steps, also of those before a resume. Only the main rank knows the earlier ones."""
        total = self._work_before() if self.accelerator.is_main_process else Counts()
        total.add(self.meter.counts)
        return total

    def _work_before(self) -> Counts:
        """Return the tokens of the steps before a resume: the logged ones, and counted those that no line contains."""
        total = Counts()
        lines = self.resumed.metrics.lines()
        logged = [line for line in lines if "loss" in line and line["step"] <= self.resumed_from]
        for line in logged:
            total.add(Counts(**{name: line.get(name, 0) for name in ("tokens", "padded_tokens", "trained_tokens")}))
        for step in range(logged[-1]["step"] if logged else 0, self.resumed_from):
            total.add(self.work(step))
        return total

    def run_step(self, step: int) -> tuple[float, float | None]:
        """Train on the global batch of `step` (0 is the first); return its loss, and the gradient norm if it clips.

        For a loop of one's own: it waits for the device, which `fit` does not. All ranks call it.
        """
        if not 0 <= step < self.plan.schedule.total_steps:
            raise ValueError(
                f"run_step: the plan has the steps 0 to {self.plan.schedule.total_steps - 1}, and not {step}"
            )
        loss_sum = torch.zeros((), device=self.accelerator.device)
        set_learning_rate(self.optimizer, self.rates.at(step))
        grad_norm = self.train_step(self.micro_batches(step), self.batcher, self.loss_inputs(step), loss_sum)
        loss = float(reduce_sum(self.accelerator, loss_sum))
        if not math.isfinite(loss):
            raise UserError(f"The loss of step {step + 1} is {loss}.", hint="Lower train.learning_rate.", exit_code=1)
        return loss, None if grad_norm is None else float(full_tensor(grad_norm))

    def micro_batches(self, step: int) -> list[list[np.ndarray]]:
        """Return this rank's rows of each micro-batch of `step`. Context-parallel ranks share rows."""
        return self.order.micro_batches(step, self.accelerator.process_index // self.plan.batching.cp_size)

    def prefetch_files(self, step: int) -> None:
        """Start to read the files of `step` in the background. A stream cannot look ahead."""
        if self.batcher.prefetcher is None or self.plan.rows.streamed or step >= self.plan.schedule.total_steps:
            return
        self.batcher.prefetch(self.order.micro_batches(step, self.accelerator.process_index))

    def loss_inputs(self, step: int) -> dict[str, Any]:
        """Return the loss's normalisation over the global batch of `step`: every rank knows every example's count."""
        return self.task.inputs(self.batcher.examples, np.concatenate(self.order.step(step)), step=step)

    def work(self, step: int) -> Counts:
        """Return the work of `step` over all ranks: every rank knows every length."""
        rows = self.order.step(step)
        batcher = self.batcher
        size = self.order.batching.micro_batch_size
        indices = np.concatenate(rows)
        tokens = int(batcher.examples.lengths[indices].sum())
        squared_lengths = int(batcher.examples.squared_lengths[indices].sum())
        return Counts(
            steps=1,
            tokens=tokens,
            padded_tokens=sum(batcher.padded_tokens(rows[i : i + size]) for i in range(0, len(rows), size)),
            trained_tokens=int(batcher.examples.trained[indices].sum()),
            images=int(batcher.examples.n_media[indices].sum()) if batcher.reader else 0,
            image_tokens=batcher.file_tokens(indices),
            flops=self.task.shape.flops(tokens=tokens, squared_lengths=squared_lengths),
        )


def start(
    job: Job, accelerator: Accelerator, model: nn.Module, *, show: LogLine, display: Display, custom: Custom
) -> Training:
    """Wrap the model, load the checkpoint to resume from, and do what the task needs before the first step.

    All ranks call it. show: receives each logged line, on the main rank only. display: shows the steps.
    """
    folder, step, notes = agree_on_checkpoint(accelerator, job.plan)
    if folder is not None:
        with explain_unusable(folder):
            restore_saved_initial(model, folder)
    wrapped = _wrap(job.plan, accelerator, model, custom)
    if folder is not None:
        with explain_unusable(folder):
            load_states(accelerator, folder, wrapped.model, wrapped.optimizer)
            restore_random_states(folder, accelerator.process_index)
    resumed = _resumed(job.plan, accelerator, step, notes)
    training = custom.setup(setup(job, accelerator, wrapped, resumed, show=show, display=display, custom=custom))
    task = training.task
    if training.metrics is not None and not task.gives_predictions:
        raise no_predictions(job.plan.build.task)
    check_context_parallel(job.plan, training.model, training.batcher, vocab_size=task.shape.vocab_size)
    task.resumed = resumed.step > 0
    task.order = training.order
    task.say = display.begins
    task.prepare(training.model, [b for b in (training.batcher, training.eval_batcher) if b is not None])
    for note in training.notes:
        training.logger.log({"step": resumed.step, "note": note})
    return training


def no_predictions(task: str) -> UserError:
    """Return the error of metrics for a task whose batches give no predictions."""
    return UserError(
        f"compute_metrics: task: {task} makes no predictions that metrics could be computed from.",
        hint="Leave it out: report.json and metrics.jsonl hold the task's own measures.",
    )


def setup(
    job: Job,
    accelerator: Accelerator,
    wrapped: Wrapped,
    resumed: Resumed,
    *,
    show: LogLine,
    display: Display,
    custom: Custom,
) -> Training:
    """Return the training of a wrapped model. Nothing is opened, loaded or computed."""
    plan = job.plan
    model = wrapped.model
    order = data_order(plan, job.data.train, job.reader)
    batcher, eval_batcher = make_batchers(job, accelerator, order, wrapped.task)
    meter = Meter(accelerator.device, warmup_steps=plan.measurement.warmup_steps)
    loss_check = FiniteLossCheck(plan.output_dir, batcher, rank=accelerator.process_index)
    patience = plan.evaluation.early_stopping_patience
    judged = [feature_of(plan.build.task).judged(line) for line in resumed.evaluations]
    return Training(
        job=job,
        accelerator=accelerator,
        model=model,
        optimizer=wrapped.optimizer,
        task=wrapped.task,
        train_step=TrainStep(plan, accelerator, model, wrapped.optimizer, wrapped.task),
        order=order,
        batcher=batcher,
        eval_batcher=eval_batcher,
        rates=LearningRates(plan.schedule, [line["eval_loss"] for line in resumed.evaluations]),
        early_stopping=EarlyStopping(patience, judged, threshold=plan.evaluation.early_stopping_threshold),
        saver=Saver(accelerator, plan, model, wrapped.optimizer),
        meter=meter,
        logger=MetricsLogger(
            plan, accelerator, meter, loss_check, resumed.metrics, show, wrapped.task.measures, custom.callbacks
        ),
        loss_check=loss_check,
        throttle=HostThrottle(accelerator),
        timeout=ProcessGroupTimeout(accelerator, model, plan.parallel.timeout, batcher.context_parallel),
        display=display,
        resumed=resumed,
        notes=resumed.notes,
        expert_load=wrapped.expert_load,
        answer=_sample_answers(job),
        run_measures=_run_measures(job) if accelerator.is_main_process else (),
        callbacks=custom.callbacks,
        metrics=custom.metrics,
    )


def _wrap(plan: Plan, accelerator: Accelerator, model: nn.Module, custom: Custom) -> Wrapped:
    """Make the task, build the optimizer, and let accelerate wrap model and optimizer for DDP, FSDP2 or ZeRO."""
    save_only_what_trains(accelerator, model)
    save_float8_scales(accelerator, model)
    feature = feature_of(plan.build.task)
    task = (custom.task or feature.task)(plan, model)
    expert_load = ExpertLoad(model) if feature.counts_experts else None
    if plan.strategy not in ("single", "ddp"):
        give_weights_one_dtype(model)
    optimizer = build_optimizer(model, plan.optimizer)
    if _takes_kernel_step(plan, accelerator, optimizer):
        optimizer = with_kernel_step(optimizer)
    leave_four_bit_weights(model)
    leave_quant_states(model)
    wrap_layers_that_are_there(accelerator, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    autocast_under_fsdp(accelerator, model)
    attach_to_prepared(optimizer)
    return Wrapped(model, optimizer, task, expert_load)


def _takes_kernel_step(plan: Plan, accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> bool:
    kernels = plan.build.kernels
    wanted = kernels.enabled is not False and kernels.optimizer
    if wanted != "auto":
        return wanted
    ranks = accelerator.num_processes if is_sharded(accelerator) else 1
    return not uses_deepspeed(accelerator) and kernel_step_pays(optimizer, accelerator.device, ranks=ranks)


def _resumed(plan: Plan, accelerator: Accelerator, step: int, notes: tuple[str, ...]) -> Resumed:
    """Drop what was logged after the step of a checkpoint, and return where the run continues. All ranks call it."""
    metrics = MetricsFile(plan.output_dir / "metrics.jsonl", enabled=accelerator.is_main_process)
    metrics.begin(after=step)
    evaluations, has_evaluation = _earlier_evaluations(metrics, step)
    return Resumed(step, notes, metrics, evaluations, has_evaluation)


def _earlier_evaluations(metrics: MetricsFile, resumed_from: int) -> tuple[list[dict[str, Any]], bool]:
    """Return (all evaluations up to the step resumed from, whether that step has one), on every rank."""
    lines = [line for line in metrics.lines() if "eval_loss" in line] if metrics.enabled else []
    counted = [line for line in lines if line["step"] > 0]  # without the one before the first step
    found = counted, any(line["step"] == resumed_from for line in lines)
    return broadcast_object_list([found])[0]


def data_order(
    plan: Plan, examples: Examples | StreamedExamples, reader: ModalityReader | None
) -> DataOrder | StreamOrder | ByFileCount:
    """Return which rows each rank trains on in each step."""
    order: StreamOrder | DataOrder
    if isinstance(examples, StreamedExamples):
        length = plan.rows.length if plan.rows.packed else None
        order = StreamOrder(examples, seed=plan.build.seed, batching=plan.batching, max_length=length)
    else:
        order = DataOrder(
            examples.longest_documents,
            total_rows=total_rows(
                plan.rows.count,
                plan.batching.global_batch_size,
                epochs=plan.num_train_epochs,
                max_steps=plan.schedule.total_steps if plan.num_train_epochs is None else None,
            ),
            seed=plan.build.seed,
            batching=plan.batching,
            packs=pack(examples.lengths, plan.rows.length) if plan.rows.packed else None,
            grouped=plan.rows.kind == "grouped",
        )
    if reader is None or not reader.needs_equal_counts:
        return order
    check_files_on_all_rows(plan.strategy, examples, reader)
    return ByFileCount(order, examples.n_media)


def make_batchers(
    job: Job, accelerator: Accelerator, order: DataOrder | StreamOrder | ByFileCount, task: Task
) -> tuple[Batcher, Batcher | None]:
    """Return what makes batches of training and of evaluation examples. All ranks call it."""
    plan = job.plan
    data = job.data
    reader = job.reader
    prefetchers = [None if reader is None else FilePrefetcher(reader) for _ in range(2)]
    batcher = Batcher(
        data.train,
        packed=plan.rows.is_padding_free,
        multiple_of=plan.rows.multiple_of,
        pad_token_id=job.tokenizer.pad_token_id,
        index_labels=plan.loss_in_head,
        device=accelerator.device,
        label_shifts=task.label_shifts,
        more_fields=task.batch_fields,
        rows_multiple_of=rows_multiple_of(plan),
        reader=reader,
        prefetcher=prefetchers[0],
        context_parallel=context_parallel_split(plan),
        static_shapes=static_shapes_of(plan, order.packs),
    )
    return batcher, replace(batcher, examples=data.eval, prefetcher=prefetchers[1]) if data.eval else None


def is_rehearsed(job: Job, device: torch.device) -> bool:
    """Return whether a step on the meta device launches the run's kernels: of a language model, on texts in memory."""
    plan = job.plan
    feature = feature_of(plan.build.task)
    writes_text = feature.shape is None and not feature.scores_texts  # a model without added heads
    compiled = plan.build.execution.torch_compile  # inductor has its own launches
    plain = job.reader is None and plan.batching.cp_size == 1 and not isinstance(job.data.train, StreamedExamples)
    ours = plan.build.kernels.enabled is not False and not compiled
    return device.type == "cuda" and writes_text and plain and ours


def first_batch_on_meta(job: Job, accelerator: Accelerator, task: Task) -> dict[str, Any]:
    """Return the first micro-batch of this rank, with its tensors on the meta device."""
    order = data_order(job.plan, job.data.train, job.reader)
    batcher, _ = make_batchers(job, accelerator, order, task)
    batcher = replace(batcher, device=torch.device("meta"))
    batch = batcher(order.micro_batches(0, accelerator.process_index)[0])
    inputs = task.inputs(batcher.examples, np.concatenate(order.step(0)), step=0)
    values = {**batch, **inputs}
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _sample_answers(job: Job) -> SampleAnswers | None:
    """Return a function that answers `eval.sample_prompts`; None without prompts, or if ranks share the weights."""
    prompts = job.plan.evaluation.sample_prompts
    if not prompts or job.plan.shares_weights:
        return None
    return SampleAnswers(prompts, job.tokenizer.tokenizer, job.prompt)


def _run_measures(job: Job) -> tuple[RunMeasure, ...]:
    """Return what `eval.metric` and `eval.tasks` measure with each evaluation. Raises UserError."""
    wanted = job.plan.evaluation
    tokenizer = job.tokenizer.tokenizer
    rows = job.plan.rows
    found: list[RunMeasure] = []
    if (wanted.metric or wanted.tasks) and job.plan.shares_weights:
        raise UserError(
            f"eval.{'metric' if wanted.metric else 'tasks'} needs a whole model on one process, and "
            f"{job.plan.strategy} shards it.",
            hint="Leave it out, and run `ligertune eval` on the trained model.",
        )
    if wanted.metric is not None and job.data.eval is not None:
        found.append(
            answer_measure(
                wanted.metric,
                job.data.eval,
                tokenizer,
                max_samples=wanted.answer_samples,
                max_new_tokens=wanted.answer_tokens,
            )
        )
    if wanted.tasks:
        batching = batching_of(tokenizer, packed=rows.is_padding_free, multiple_of=rows.multiple_of)
        found.append(
            task_measures(
                wanted.tasks, tokenizer, batching, max_samples=wanted.answer_samples, task=job.plan.build.task
            )
        )
    return tuple(found)
