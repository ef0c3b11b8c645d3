"""Task: what a model is trained for. The loop, evaluation and the logger use this class and know no task by name.

`Task` itself is supervised fine-tuning: predict the next token. Other tasks extend it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ligertune.data.batching.order import RowOrder
from ligertune.data.examples import Examples
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.errors import UserError
from ligertune.planning.memory.model_shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ligertune.data.batching.collate import Batcher
    from ligertune.data.prepare import PreparedData
    from ligertune.data.stream import StreamedExamples
    from ligertune.planning.plan import Plan


OF_LOSS = ("labels", "shift_labels", "labelled_rows")  # fields of a batch that only the loss reads
# columns of metrics.jsonl that reports and resumed runs read
RESERVED_NAMES = (
    "step", "epoch", "loss", "eval_loss", "loss_before_training", "grad_norm", "learning_rate", "tokens",
    "padded_tokens", "trained_tokens", "tokens_per_second", "seconds", "peak_memory", "remaining_seconds", "note",
    "samples", "time",
)  # fmt: skip
# Examples; of a task whose rules allow data.streaming also StreamedExamples. Tasks declare which of them they take.
TaskExamples: TypeAlias = Any
AUX_LOSS = "aux_loss"  # the load-balancing loss of a mixture's routers, in TRL's name


class Measures:
    """Means that a task logs next to its loss. They are summed on the device until a line is logged."""

    def __init__(self, names: Sequence[str] = (), device: torch.device | str = "cpu") -> None:
        if isinstance(names, str):
            raise TypeError(f"Measures: give a tuple of names, such as ({names!r},)")
        for name in names:
            if name in RESERVED_NAMES or list(names).count(name) > 1:
                raise UserError(f"Measures: {name} is a column of metrics.jsonl, or given twice.", hint="Rename it.")
        self.names = tuple(names)
        self._sums = torch.zeros(2, len(self.names), device=device)  # sums, and numbers of summands

    def add(self, name: str, values: Tensor, count: Tensor | float | None = None) -> None:
        """Add the sum of `values`, which are `count` summands (default: their number)."""
        at = self.names.index(name)
        if self._sums.device != values.device:  # once: a task that was made without knowing the device
            self._sums = self._sums.to(values.device)
        self._sums[0, at] += values.detach().sum().float()
        self._sums[1, at] += values.numel() if count is None else count

    def take(self) -> Tensor:
        """Return sums and numbers of summands (2, M) of this rank, and begin anew."""
        taken = self._sums.clone()
        self._sums.zero_()  # in place: a recorded CUDA graph adds to this tensor
        return taken

    def put_back(self, taken: Tensor) -> None:
        """Add what `take` returned."""
        self._sums += taken.to(self._sums.device)

    def means(self, taken: Tensor) -> dict[str, float]:
        """Return the means of (2, M) sums over all ranks, without those that have no summands."""
        sums, counts = taken.tolist()
        return {name: s / n for name, s, n in zip(self.names, sums, counts, strict=True) if n}


@dataclass(frozen=True)
class TrainedModel:
    """The trained model of a run, for a feature that writes it in its own format. All ranks hold one.

    weights: gathered from all ranks; None if `model` holds them all. prompt: of training, as
    `models.save.prompt_of` returns it. write: writes a model to output_dir/model: (model, weights or None).
    """

    plan: Plan
    config: PreTrainedConfig
    data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    prompt: dict[str, Any]
    model: nn.Module
    weights: dict[str, Tensor] | None
    is_main: bool
    autocast: Callable[[], AbstractContextManager[None]]
    write: Callable[[nn.Module, dict[str, Tensor] | None], str]


def count_labels_ahead(
    labels: Sequence[np.ndarray], trained: Sequence[int] | np.ndarray, shifts: Sequence[int]
) -> list[int]:
    """Return how many rows of some examples have a trained label each shift ahead; every example is a document.

    labels: of each example. trained: trained labels of each example, without its first label. Only the first labels
    are read: shift s misses those before position s.
    """
    counts = np.full(len(shifts), int(np.sum(trained)), dtype=np.int64)
    furthest = max(shifts)
    for row in labels:
        head = np.asarray(row[1:furthest]) != IGNORE_INDEX
        missed = np.concatenate([[0], np.cumsum(head)])  # trained labels at positions 1 to i
        counts -= missed[[min(shift - 1, len(head)) for shift in shifts]]
    return counts.tolist()


class Task:
    """Supervised fine-tuning; the base of all tasks.

    label_shifts: how many tokens ahead the labels of a row are. measures: what is logged next to the loss. resumed:
    whether the weights at `prepare` are those of a checkpoint. order: of the training rows, known at `prepare`. say:
    shows the progress of `prepare`. notes: what the report says after the first step. gives_predictions: whether
    `predictions` can be called on its batches.
    """

    label_shifts: tuple[int, ...] = (1,)
    resumed: bool = False
    order: RowOrder | None = None
    gives_predictions: bool = True
    notes: tuple[str, ...] = ()
    say: Callable[[str], None] = staticmethod(lambda words: None)

    def __init__(self, shape: ModelShape, measures: Measures | None = None) -> None:
        """measures: with AUX_LOSS among their names, for a model whose loss has the auxiliary loss of its routers."""
        self.shape = shape
        self.measures = measures or Measures()

    def prepare(self, model: nn.Module, batchers: Sequence[Batcher]) -> None:
        """Do what is needed once before the first step. All ranks call it.

        model: prepared for DDP, FSDP2 or ZeRO, with the weights that the first step will see (of the checkpoint, if a
        run is resumed); its forward autocasts. batchers: of training and, if there is one, of evaluation. Ranks
        communicate by torch.distributed.
        """

    def inputs(self, examples: TaskExamples, indices: np.ndarray, *, step: int | None = None) -> dict[str, Any]:
        """Return keywords of `loss` for any part of the global batch, which are the examples at `indices`.

        num_items_in_batch divides the loss: the number of trained tokens. Evaluation passes no step.
        """
        return {"num_items_in_batch": max(int(examples.trained[indices].sum()), 1)}

    def batch_fields(self, examples: TaskExamples, indices: Sequence[int], batch: dict[str, Any]) -> dict[str, Any]:
        """Return what a batch of the examples at `indices` has besides the collator's fields; `loss` removes it again.

        Tensors among it are moved to the device.
        """
        return {}

    def predictions(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return logits (B, T, V) and labels (B, T) of a batch, which are not shifted, for a user's metrics."""
        inputs = {name: value for name, value in batch.items() if name not in OF_LOSS}
        return model(**inputs, use_cache=False).logits, batch["labels"]

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return this batch's part of the loss of the global batch, ().

        batch: the collator's fields, `batch_fields` and `inputs`.
        """
        outputs = model(**batch, use_cache=False)
        aux_loss = getattr(outputs, "aux_loss", None)  # some families have the option but not the loss
        if AUX_LOSS in self.measures.names and aux_loss is not None:
            self.measures.add(AUX_LOSS, aux_loss)
        return outputs.loss


def examples_in_memory(examples: Examples | StreamedExamples) -> Examples:
    """Return the examples of a task whose rules refuse data.streaming, which are no stream."""
    assert isinstance(examples, Examples)
    return examples
