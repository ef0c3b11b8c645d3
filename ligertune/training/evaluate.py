"""Evaluation: the mean loss and the task's measures over an evaluation set, and early stopping.

All decisions follow from the evaluation losses in metrics.jsonl, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ligertune.data.batching.collate import Batcher
from ligertune.data.batching.packing import pack
from ligertune.data.examples import Examples
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.errors import UserError
from ligertune.features.task import RESERVED_NAMES, Task
from ligertune.launcher.signals import StopRequest
from ligertune.patching.deferred_logits import loss_only
from ligertune.planning.plan import Plan
from ligertune.training.parallel.distributed import HostThrottle, reduce_sum, reshard


class EvalPrediction(NamedTuple):
    """All predictions and labels of an evaluation, with the names of transformers' EvalPrediction.

    predictions: logits (N, T, V), or what `preprocess_logits_for_metrics` made of them; scores (N, labels) of
    texts. label_ids: (N, T), -100 where nothing is trained; (N, ...) of texts. Rows are padded with
    -100 to the longest.
    """

    predictions: np.ndarray
    label_ids: np.ndarray


@dataclass(frozen=True)
class EvaluationMetrics:
    """Metrics that a Python user computes after each evaluation, as `compute_metrics` of transformers' Trainer.

    preprocess: makes the logits of a batch smaller, with (logits, labels): all logits of an evaluation are kept.
    """

    compute: Callable[[EvalPrediction], Mapping[str, float]]
    preprocess: Callable[[Tensor, Tensor], Tensor] = lambda logits, labels: logits

    def of_batch(self, task: Task, model: nn.Module, batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return predictions and labels of a batch, in host memory."""
        logits, labels = task.predictions(model, batch)
        kept = self.preprocess(logits, labels)
        # numpy has no bfloat16
        return kept.float().cpu().numpy() if kept.is_floating_point() else kept.cpu().numpy(), labels.cpu().numpy()

    def of_all(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
        """Return the metrics of all batches of this rank and the others. All ranks call it."""
        batches = gather_object(list(batches))
        predictions, labels = (_padded([batch[i] for batch in batches]) for i in range(2))
        found = self.compute(EvalPrediction(predictions, labels))
        if not isinstance(found, Mapping):
            raise TypeError(f"compute_metrics returned {type(found).__name__}. Return a dict of names and numbers")
        return {str(name): _number(name, value) for name, value in found.items()}


def _number(name: object, value: Any) -> float:
    """Return a metric as a number. Raises TypeError and UserError that name it."""
    if name in RESERVED_NAMES:
        raise UserError(
            f"compute_metrics: {name} is the name of a column of metrics.jsonl.", hint="Choose another name."
        )
    try:
        return float(value)
    except OverflowError:
        raise UserError(
            f"compute_metrics: {name} is a whole number above 1.8e308, which no float holds.",
            hint="Return a smaller number, such as its logarithm.",
        ) from None
    except (TypeError, ValueError):
        raise TypeError(f"compute_metrics: {name} is {value!r}, and not a number") from None


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays (B, T, ...) along B, padded along T with -100, as transformers does."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    pads = ([(0, 0), (0, longest - array.shape[1]), *rest] for array in arrays)
    return np.concatenate([np.pad(a, pad, constant_values=IGNORE_INDEX) for a, pad in zip(arrays, pads, strict=True)])


class Evaluation(NamedTuple):
    """The loss over an evaluation set, and the means of the task's measures and the user's metrics by name."""

    loss: float
    measures: dict[str, float]

    def line(self) -> dict[str, float]:
        """Return the columns of metrics.jsonl."""
        return {"eval_loss": self.loss, **{f"eval_{name}": value for name, value in self.measures.items()}}


def evaluate(
    plan: Plan,
    accelerator: Accelerator,
    model: nn.Module,
    batcher: Batcher,
    task: Task,
    stop: StopRequest,
    metrics: EvaluationMetrics | None = None,
) -> Evaluation | None:
    """Return the loss of the batcher's examples as one global batch; None if a signal interrupts it.

    All ranks call it, and each evaluates its share. The result depends neither on the batch size nor on the number of
    ranks. Where kernels compute the loss in the output head, no logits are made.
    """
    examples = batcher.examples
    assert isinstance(examples, Examples)  # evaluation sets are never streamed
    loss_inputs = task.inputs(examples, np.arange(len(examples)))
    rank = accelerator.process_index // plan.batching.cp_size
    world = plan.batching.row_ranks
    lengths = examples.lengths
    size = plan.batching.eval_batch_size
    # Packs as in training, or single examples, longest first: little padding, and an early out-of-memory.
    rows = pack(lengths, plan.rows.length) if plan.rows.packed else np.argsort(-lengths, kind="stable")[:, None]
    if batcher.reader is not None and batcher.reader.needs_equal_counts:
        size = 1  # a batch must hold equally many files in each row
    loss_sum = torch.zeros((), device=accelerator.device, dtype=torch.float32)
    throttle = HostThrottle(accelerator)
    found = None
    batches: list[tuple[np.ndarray, np.ndarray]] = []
    of_training = task.measures.take()
    model.eval()
    with torch.no_grad(), loss_only():
        for start in range(0, len(rows), size * world):
            if throttle(stop.received is not None):
                break
            mine = range(start + rank * size, min(start + (rank + 1) * size, len(rows)))
            batcher.prefetch([[rows[i] for i in mine]])
            # Without rows it is a blank batch: all ranks must make the same collective calls.
            batch = batcher([rows[i] for i in mine])
            loss_sum += task.loss(model, {**batch, **loss_inputs}).float()
            if metrics is not None and mine:
                batches.append(metrics.of_batch(task, model, batch))
        else:
            measured = task.measures.take()
            sums = reduce_sum(accelerator, torch.cat([loss_sum[None], measured.flatten().to(loss_sum)]))
            means = task.measures.means(sums[1:].view_as(measured))
            of_user = {} if metrics is None else metrics.of_all(batches)
            found = Evaluation(float(sums[0]), {**means, **of_user})
    task.measures.take()  # of an interrupted evaluation
    task.measures.put_back(of_training)
    model.train()
    reshard(model)
    return found


class EarlyStopping:
    """Track the lowest evaluation loss and stop after `patience` evaluations without a lower one (None: never).

    A feature may judge by a measure, whose negative is the loss here (`FeatureSpec.judged`). A loss that is lower by at
    most `threshold` is the lowest from then on, and counts as none, as in transformers.
    """

    def __init__(self, patience: int | None = None, losses: Sequence[float] = (), *, threshold: float = 0.0) -> None:
        self.patience = patience
        self.threshold = threshold
        self.best = math.inf
        self.since_best = 0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Add an evaluation loss; return whether it is the lowest so far."""
        lowest = loss < self.best
        self.since_best = 0 if lowest and self.best - loss > self.threshold else self.since_best + 1
        self.best = loss if lowest else self.best
        return lowest

    @property
    def should_stop(self) -> bool:
        return self.patience is not None and self.since_best >= self.patience
