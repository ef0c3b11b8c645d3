"""Set up training: optimizer, accelerate's wrapping, checkpoint to resume, data order, batches, logging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedConfig

from ligertune.data.batching.collate import Batcher, context_parallel_split, rows_multiple_of, static_shapes_of
from ligertune.data.batching.order import ByFileCount, DataOrder, StreamOrder, check_files_on_all_rows
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Examples
from ligertune.data.modalities.modality import ModalityReader
from ligertune.data.modalities.prefetch import FilePrefetcher
from ligertune.data.prepare import PreparedData
from ligertune.data.stream import StreamedExamples
from ligertune.decode.generate import SampleAnswers
from ligertune.features.task import Task
from ligertune.files.storage import MetricsFile, newest_checkpoint
from ligertune.models.experts.expert_load import ExpertLoad
from ligertune.models.load_tokenizer import LoadedTokenizer
from ligertune.models.save import prompt_of
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.plan import Plan
from ligertune.progress import Display
from ligertune.train.checkpoint.checkpoint_files import Saver
from ligertune.train.checkpoint.choose_checkpoint import resume_folder
from ligertune.train.checkpoint.float8_scales import save_float8_scales
from ligertune.train.checkpoint.load_checkpoint import (
    explain_unusable,
    load_states,
    restore_random_states,
    saved_progress,
)
from ligertune.train.checkpoint.trained_weights import save_only_what_trains
from ligertune.train.checks import FiniteLossCheck, check_context_parallel
from ligertune.train.distributed import (
    ProcessGroupTimeout,
    autocast_under_fsdp,
    is_sharded,
    leave_four_bit_weights,
    uses_deepspeed,
)
from ligertune.train.evaluate import EarlyStopping
from ligertune.train.meter import Counts, Meter
from ligertune.train.metrics_logger import MetricsLogger
from ligertune.train.optim.algorithms import kernel_step_pays, with_kernel_step
from ligertune.train.optim.gradients import attach_to_prepared
from ligertune.train.optim.optimizers import build_optimizer
from ligertune.train.optim.schedules import LearningRates
from ligertune.train.step import HostThrottle, TrainStep


@dataclass(frozen=True)
class Job:
    """Everything that a run needs except its model. `run.plan_for` returns it."""

    plan: Plan
    config: PreTrainedConfig
    tokenizer: LoadedTokenizer
    data: PreparedData
    reader: ModalityReader | None = None  # None for text models

    @property
    def prompt(self) -> dict[str, Any]:
        """Prompt template, its variables and system prompt: saved with the model, and used for its sample answers."""
        return prompt_of(self.data.template, self.plan.data_options)


class Training:
    """All objects that the loop uses, set up for a job: every rank makes one.

    It prepares `model` for DDP, FSDP2 or ZeRO, and loads the checkpoint to resume from. show: receives each logged
    line, on the main rank only. display: shows the steps.
    """

    def __init__(
        self, job: Job, accelerator: Accelerator, model: nn.Module, *, show: Callable[[dict], None], display: Display
    ) -> None:
        plan = job.plan
        self.display = display
        save_only_what_trains(accelerator, model)
        save_float8_scales(accelerator, model)
        self.plan = plan
        self.accelerator = accelerator
        feature = feature_of(plan.build.task)
        self.task = feature.task(plan, model)
        self.expert_load = ExpertLoad(model) if feature.counts_experts else None
        self.model, self.optimizer = _prepare(plan, accelerator, model)
        self.train_step = TrainStep(plan, accelerator, self.model, self.optimizer, self.task)
        self.resumed_from, self.notes = _resume(plan, accelerator, self.model, self.optimizer)
        self.order = _data_order(plan, job.data.train, job.reader)
        self.batcher, self.eval_batcher = _batchers(job, accelerator, self.order, self.task)
        check_context_parallel(plan, self.model, self.batcher, vocab_size=self.task.shape.vocab_size)
        self.task.resumed = self.resumed_from > 0
        self.task.say = display.begins
        self.task.prepare(self.model, [b for b in (self.batcher, self.eval_batcher) if b is not None])
        self.saver = Saver(accelerator, plan, self.model, self.optimizer)
        self.meter = Meter(accelerator.device, warmup_steps=plan.measurement.warmup_steps)
        self.loss_check = FiniteLossCheck(plan.output_dir, self.batcher, rank=accelerator.process_index)
        self.throttle = HostThrottle(accelerator)
        context_parallel = self.batcher.context_parallel
        self.timeout = ProcessGroupTimeout(accelerator, self.model, plan.parallel.timeout, context_parallel)
        self.answer = _sample_answers(job)

        metrics_path = plan.output_dir / "metrics.jsonl"
        is_main = accelerator.is_main_process
        metrics = MetricsFile(metrics_path, resumed_from=self.resumed_from, enabled=is_main)
        eval_losses, has_last = _earlier_evaluations(accelerator, metrics, self.resumed_from)
        self.early_stopping = EarlyStopping(
            plan.evaluation.early_stopping_patience, eval_losses, threshold=plan.evaluation.early_stopping_threshold
        )
        self.rates = LearningRates(plan.schedule, eval_losses)
        # A signal may have stopped the interrupted run after a step was saved, and before its evaluation.
        due = plan.due(plan.evaluate, self.resumed_from) or self.resumed_from == plan.schedule.total_steps
        self.owes_evaluation = bool(self.eval_batcher and self.resumed_from and due and not has_last)
        self._earlier = self._work_before(metrics.lines()) if is_main else Counts()
        self.logger = MetricsLogger(plan, accelerator, self.meter, self.loss_check, metrics, show, self.task.measures)
        for note in self.notes:
            self.logger.log({"step": self.resumed_from, "note": note})

    def all_work(self) -> Counts:
        """Return the work of all steps, also of those before a resume. Only the main rank knows the earlier ones."""
        total = replace(self._earlier)
        total.add(self.meter.counts)
        return total

    def _work_before(self, lines: list[dict]) -> Counts:
        """Return the tokens of the steps before a resume: the logged ones, and counted those that no line contains."""
        total = Counts()
        logged = [line for line in lines if "loss" in line]
        for line in logged:
            total.add(Counts(**{name: line.get(name, 0) for name in ("tokens", "padded_tokens", "trained_tokens")}))
        for step in range(logged[-1]["step"] if logged else 0, self.resumed_from):
            total.add(self.work(step))
        return total

    def micro_batches(self, step: int) -> list[list[np.ndarray]]:
        """Return this rank's rows of each micro-batch of `step`. Context-parallel ranks share rows."""
        return self.order.micro_batches(step, self.accelerator.process_index // self.plan.batching.cp_size)

    def prefetch_files(self, step: int) -> None:
        """Start to read the files of `step` in the background. A stream cannot look ahead."""
        if self.batcher.prefetcher is None or self.plan.rows.streamed or step >= self.plan.schedule.total_steps:
            return
        self.batcher.prefetch(self.order.micro_batches(step, self.accelerator.process_index))

    def loss_inputs(self, step: int) -> dict:
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


def _prepare(plan: Plan, accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the optimizer, and let accelerate wrap both for DDP, FSDP2 or ZeRO."""
    optimizer = build_optimizer(model, plan.optimizer)
    if _takes_kernel_step(plan, accelerator, optimizer):
        optimizer = with_kernel_step(optimizer)
    leave_four_bit_weights(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    autocast_under_fsdp(accelerator, model)
    attach_to_prepared(optimizer)
    return model, optimizer


def _takes_kernel_step(plan: Plan, accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> bool:
    kernels = plan.build.kernels
    wanted = kernels.enabled is not False and kernels.optimizer
    if wanted != "auto":
        return wanted
    ranks = accelerator.num_processes if is_sharded(accelerator) else 1
    return not uses_deepspeed(accelerator) and kernel_step_pays(optimizer, accelerator.device, ranks=ranks)


def _resume(
    plan: Plan, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, tuple[str, ...]]:
    """Load the checkpoint that the plan names; return (number of finished steps, notes on damaged checkpoints)."""
    found = [resume_folder(plan) if accelerator.is_main_process else None]
    folder, notes = broadcast_object_list(found)[0]
    if folder is None:
        return 0, notes
    step = saved_progress(folder, plan)
    if notes and folder != newest_checkpoint(plan.output_dir):
        notes += (f"continued from step {step} ({folder}) instead",)
    with explain_unusable(folder):
        load_states(accelerator, folder, model, optimizer)
        restore_random_states(folder, accelerator.process_index)
    return step, notes


def _earlier_evaluations(accelerator: Accelerator, metrics: MetricsFile, resumed_from: int) -> tuple[list[float], bool]:
    """Return (all evaluation losses up to the step resumed from, whether that step has one), on every rank."""
    lines = [line for line in metrics.lines() if "eval_loss" in line] if metrics.enabled else []
    losses = [line["eval_loss"] for line in lines if line["step"] > 0]  # without the one before the first step
    found = losses, any(line["step"] == resumed_from for line in lines)
    return broadcast_object_list([found])[0]


def _data_order(
    plan: Plan, examples: Examples | StreamedExamples, reader: ModalityReader | None
) -> DataOrder | StreamOrder | ByFileCount:
    """Return which rows each rank trains on in each step."""
    if plan.rows.streamed:
        length = plan.rows.length if plan.rows.packed else None
        order = StreamOrder(examples, seed=plan.build.seed, batching=plan.batching, max_length=length)
    else:
        whole = plan.schedule.total_steps * plan.batching.global_batch_size
        order = DataOrder(
            examples.longest_documents,
            total_rows=whole if plan.num_train_epochs is None else round(plan.num_train_epochs * plan.rows.count),
            seed=plan.build.seed,
            batching=plan.batching,
            packs=pack(examples.lengths, plan.rows.length) if plan.rows.packed else None,
            grouped=plan.rows.kind == "grouped",
        )
    if reader is None or not reader.needs_equal_counts:
        return order
    check_files_on_all_rows(plan.strategy, examples, reader)
    return ByFileCount(order, examples.n_media)


def _batchers(
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


def _sample_answers(job: Job) -> SampleAnswers | None:
    """Return a function that answers `eval.sample_prompts`; None without prompts, or if ranks share the weights."""
    prompts = job.plan.evaluation.sample_prompts
    if not prompts or job.plan.shares_weights:
        return None
    return SampleAnswers(prompts, job.tokenizer.tokenizer, job.prompt, pad_token_id=job.tokenizer.pad_token_id)
