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

from ligertune.data.packing import pack
from ligertune.errors import UserError
from ligertune.metrics import MetricsFile
from ligertune.model.attention import same_bits
from ligertune.model.shape import ModelShape
from ligertune.plan import Plan
from ligertune.train import checkpoint
from ligertune.train.batcher import Batcher
from ligertune.train.clip import clip_gradients
from ligertune.train.distributed import any_rank, reduce_sum
from ligertune.train.evaluate import evaluate
from ligertune.train.kernel_adamw import in_our_kernel
from ligertune.train.meter import Counts, Meter
from ligertune.train.optim import build_optimizer
from ligertune.train.order import DataOrder
from ligertune.train.schedule import learning_rate
from ligertune.train.stop import StopRequest
from ligertune.train.stream_order import StreamOrder

if TYPE_CHECKING:
    from torch import nn

    from ligertune.data.examples import Examples
    from ligertune.data.prepare import PreparedData
    from ligertune.data.stream import StreamedExamples


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


def fit(
    plan: Plan,
    accelerator: Accelerator,
    model: nn.Module,
    data: PreparedData,
    *,
    pad_token_id: int,
    show: Callable[[dict], None],
) -> Fitted:
    """Train `model` as the plan says. `show` receives each logged line; on the main process only.

    The loss of a step is the sum over the trained tokens of the global batch divided by their number, however the batch
    is cut into micro batches and ranks.
    """
    shape, world = ModelShape.of(model), accelerator.num_processes
    optimizer = build_optimizer(model, plan.optimizer)
    if plan.recipe.kernels.optimizer and plan.recipe.kernels.enabled is not False:
        optimizer = in_our_kernel(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    resumed_from = _resume(plan, accelerator)
    order = _data_order(plan, data.train)
    batcher = _batcher(plan, accelerator, data.train, pad_token_id)
    evaluated = _batcher(plan, accelerator, data.eval, pad_token_id) if data.eval else None
    work_of = _work_of_steps(shape, order, batcher)
    metrics = MetricsFile(
        plan.output_dir / "metrics.jsonl", resumed_from=resumed_from, enabled=accelerator.is_main_process
    )
    meter = Meter(accelerator.device, warmup_steps=plan.recipe.report.warmup_steps)
    loss_sum = torch.zeros((), device=accelerator.device)  # of the steps since the last logged line
    step = last_saved = resumed_from
    eval_loss, grad_norm = None, None
    model.train()

    with StopRequest(enabled=plan.recipe.checkpoint.save_on_signal) as stop:
        while step < plan.schedule.total_steps:
            batches = order.micro_batches(step, accelerator.process_index)
            work = work_of(step)
            rate = learning_rate(plan.schedule, step)
            for group in optimizer.param_groups:
                group["lr"] = rate

            for i, rows in enumerate(batches):
                batch = batcher(rows)
                with _gradient_sync(plan, accelerator, model, last=i == len(batches) - 1):
                    loss = model(**batch, num_items_in_batch=max(work.trained_tokens, 1), use_cache=False).loss
                    with same_bits(plan.recipe.train.full_determinism, plan.attn_implementation):
                        accelerator.backward(
                            loss * world
                        )  # DDP and FSDP average over ranks; the loss is a part of a sum
                loss_sum += loss.detach()

            if plan.optimizer.max_grad_norm > 0:
                grad_norm = clip_gradients(accelerator, optimizer, model.parameters(), plan.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            meter.add(work)

            stopping = any_rank(accelerator, stop.received is not None)
            last = stopping or step == plan.schedule.total_steps
            if step % plan.recipe.logging.logging_steps == 0 or last:
                line = _line(plan, accelerator, meter, step, loss_sum, grad_norm, rate)
                loss_sum.zero_()
                metrics.write(line)
                if accelerator.is_main_process:
                    show(line)
            if evaluated and (plan.due(plan.evaluate, step) or (last and not stopping)):
                with meter.paused():
                    eval_loss = evaluate(plan, accelerator, model, evaluated)
                metrics.write({"step": step, "eval_loss": eval_loss})
                if accelerator.is_main_process:
                    show({"step": step, "eval_loss": eval_loss})
            if (plan.due(plan.save, step) and not last) or (stopping and step > last_saved):
                with meter.paused():
                    checkpoint.save_checkpoint(accelerator, plan, step)
                last_saved = step
            if stopping:
                break
        stopped_by = (stop.received or "a signal on another rank") if step < plan.schedule.total_steps else None

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
        peak_memory=_most_over_ranks(accelerator, meter.peak_memory()),
    )


def _resume(plan: Plan, accelerator: Accelerator) -> int:
    """Load the checkpoint that the plan names; the number of steps already done."""
    folder = checkpoint.resume_folder(plan)
    if folder is None:
        return 0
    step = checkpoint.saved_progress(folder, plan)
    accelerator.load_state(str(folder))
    return step


def _data_order(plan: Plan, examples: Examples | StreamedExamples) -> DataOrder:
    train = plan.recipe.train
    if plan.rows.streamed:
        length = plan.rows.length if plan.rows.packed else None
        return StreamOrder(examples, seed=train.seed, batching=plan.batching, max_length=length)
    whole = plan.schedule.total_steps * plan.batching.global_batch_size
    return DataOrder(
        examples.lengths,
        total_rows=whole if train.max_steps else round(train.num_train_epochs * plan.rows.count),
        seed=train.seed,
        batching=plan.batching,
        packs=pack(examples.lengths, plan.rows.length) if plan.rows.packed else None,
        grouped=plan.rows.kind == "grouped",
    )


def _batcher(plan: Plan, accelerator: Accelerator, examples: Examples | StreamedExamples, pad_token_id: int) -> Batcher:
    return Batcher(
        examples,
        packed=plan.rows.packed,
        multiple_of=plan.rows.multiple_of,
        pad_token_id=pad_token_id,
        index_labels=plan.loss_in_head,
        device=accelerator.device,
    )


def _gradient_sync(
    plan: Plan, accelerator: Accelerator, model: nn.Module, *, last: bool
) -> contextlib.AbstractContextManager:
    """DDP averages gradients once a step. FSDP does at each micro batch, or each rank would hold whole gradients."""
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
            flops=shape.flops(tokens=int(real.sum()), squared_lengths=int((real**2).sum())),
        )

    return work


def _line(
    plan: Plan,
    accelerator: Accelerator,
    meter: Meter,
    step: int,
    loss_sum: torch.Tensor,
    grad_norm: torch.Tensor | None,
    rate: float,
) -> dict:
    """One line of metrics.jsonl; reading the loss synchronises the device."""
    total = float(reduce_sum(accelerator, loss_sum))
    counts, seconds = meter.lap()
    loss = total / counts.steps
    if not math.isfinite(loss):
        raise UserError(
            f"The loss became {loss} by step {step}; the run stops here.",
            hint="Lower train.learning_rate, or resume from an earlier checkpoint with other data.",
            exit_code=1,
        )
    return {
        "step": step,
        "epoch": round(step * plan.batching.global_batch_size / plan.rows.count, 4) if plan.rows.count else None,
        "loss": loss,
        "grad_norm": None if grad_norm is None else float(_whole(grad_norm)),
        "learning_rate": rate,
        "tokens": counts.tokens,
        "padded_tokens": counts.padded_tokens,
        "trained_tokens": counts.trained_tokens,
        "tokens_per_second": counts.tokens / seconds,
        "seconds": seconds,
        "peak_memory": meter.peak_memory(),
        "remaining_seconds": (plan.schedule.total_steps - step) * seconds / counts.steps,
    }


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A scalar that FSDP may hold as a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _most_over_ranks(accelerator: Accelerator, peak: dict[str, int]) -> dict[str, int]:
    if accelerator.num_processes == 1:
        return peak
    mine = torch.tensor(list(peak.values()), device=accelerator.device, dtype=torch.float64)
    return dict(zip(peak, accelerator.gather(mine[None]).amax(0).long().tolist(), strict=True))
