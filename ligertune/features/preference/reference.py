"""Log-probabilities of answers under the reference, which is the model as it was before training.

precompute   computed once before the first step, stored in the data cache and in the run's folder
adapter      computed in each step by the model with its LoRA adapter switched off
copy         computed in each step by a frozen copy of the model

A product in 16 bits rounds differently in batches of another shape. So all three compute the batches of training and of
evaluation: as long as policy and reference are the same model, their log-probabilities are the same bits, margins are 0
and the loss of DPO is log 2. `precompute` takes the batches of the first epoch.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ligertune.any_types import AnyModule
from ligertune.data.batching.order import RowOrder
from ligertune.data.batching.packing import pack
from ligertune.errors import UserError
from ligertune.features.preference.answers import answer_log_probs
from ligertune.features.preference.recipe import PreferenceSpec, reference_of
from ligertune.features.preference.stored_log_probs import StoredLogProbs
from ligertune.features.task import examples_in_memory
from ligertune.planning.plan import Plan

if TYPE_CHECKING:
    from ligertune.data.batching.collate import Batcher
    from ligertune.data.examples import Examples

SHOW_EVERY = 10.0  # seconds
Say = Callable[[str], None]
REFERENCE_FIELD = "reference_log_probs"  # of a batch: (A,) of its answers


@dataclass(frozen=True)
class ReferenceRows:
    """Examples whose answers need reference log-probabilities. order: of training; None: that of an evaluation."""

    batcher: Batcher
    order: RowOrder | None


class Reference(Protocol):
    """Where reference log-probabilities come from."""

    def prepare(self, model: nn.Module, rows: Sequence[ReferenceRows], *, resumed: bool, say: Say) -> None:
        """Do what is needed before the first step.

        resumed: the weights of `model` are those of a checkpoint. say: shows the progress.
        """

    def fields(self, examples: Examples, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return what a batch of these examples needs for `log_probs`."""

    def log_probs(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return those of a batch's answers, (A,), and remove `fields` from the batch."""


def choose_reference(plan: Plan, model: nn.Module) -> Reference | None:
    """Return the reference that `preference.reference` names; None for losses without one.

    model: with its initial weights, not yet wrapped.
    """
    chosen = reference_of(plan.build.section(PreferenceSpec), plan.build.method)
    if chosen in ("adapter", "none"):
        return AdapterReference() if chosen == "adapter" else None
    if chosen == "precompute":
        return PrecomputedReference(plan)
    if plan.shares_weights:
        raise UserError(
            f"preference.reference: copy needs a whole model on each process, and {plan.strategy} shards it.",
            hint="Write preference.reference: precompute.",
        )
    return CopiedReference(plan, model)


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Switch the LoRA adapter of a model off, if it has one."""
    adapted: AnyModule = getattr(model, "module", model)  # inside DDP's wrapper
    if not hasattr(adapted, "disable_adapter"):
        yield
        return
    from ligertune.models.adapters.lora import adapter_off  # imports peft, which takes seconds

    with adapter_off(adapted):
        yield


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class AdapterReference:
    """The model with its LoRA adapter switched off."""

    def prepare(self, model: nn.Module, rows: Sequence[ReferenceRows], *, resumed: bool, say: Say) -> None:
        pass

    def fields(self, examples: Examples, indices: Sequence[int]) -> dict[str, Tensor]:
        return {}

    def log_probs(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        with without_adapter(model), without_dropout(model):
            return answer_log_probs(model, batch)


class CopiedReference(AdapterReference):
    """A frozen copy of the model on each process."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        self._autocast = plan.precision.autocast

    def log_probs(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        dtype = torch.float16 if self._autocast == "fp16" else torch.bfloat16
        kind = batch["input_ids"].device.type
        with torch.autocast(kind, dtype, enabled=self._autocast != "no"):
            return answer_log_probs(self._model, batch)


class PrecomputedReference:
    """Log-probabilities of all training and evaluation examples, computed before the first step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._of: dict[int, np.ndarray] = {}  # by the id of the examples

    def prepare(self, model: nn.Module, rows: Sequence[ReferenceRows], *, resumed: bool, say: Say) -> None:
        for one in rows:
            self._of[id(one.batcher.examples)] = self._found(model, one, resumed, say)

    def fields(self, examples: Examples, indices: Sequence[int]) -> dict[str, Tensor]:
        found = self._of.get(id(examples))  # None while they are computed
        return {} if found is None else {REFERENCE_FIELD: torch.from_numpy(found[indices]).flatten()}

    def log_probs(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return batch.pop(REFERENCE_FIELD)

    def _found(self, model: nn.Module, rows: ReferenceRows, resumed: bool, say: Say) -> np.ndarray:
        """Return the log-probabilities (N, answers of an example), stored or computed. All ranks call it."""
        stored = StoredLogProbs(self._plan, examples_in_memory(rows.batcher.examples))
        found = stored.load()
        if found is None and resumed:
            # a run that continues on other ranks, or with other batches, keeps the reference that it began with
            earlier = stored.load_of_other_batches()
            if earlier is not None:
                return earlier
        if found is None:
            has_base = hasattr(getattr(model, "module", model), "disable_adapter")
            if resumed and (not has_base or self._plan.build.method.init_from_weights):
                raise UserError(
                    f"{self._plan.output_dir} has lost its reference log-probabilities ({stored.name}), and a resumed"
                    " run has no initial weights to compute them with.",
                    hint="Train this recipe for one step in another checkpoint.output_dir, which stores them in the"
                    " data cache, and resume then.",
                )
            found = precompute(self._plan, model, rows, say)
        stored.save(found)
        return found


def this_rank() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def rank_batches(
    plan: Plan, lengths: np.ndarray, indices: np.ndarray, *, size: int, rank: int | None = None
) -> Iterator[list[np.ndarray]]:
    """Yield this rank's rows of each forward over the examples at `indices`, packed as the plan says.

    All ranks get equally many batches, some of them empty. lengths: of all examples. size: rows of a batch.
    """
    own_rank, world = this_rank()
    rank = own_rank if rank is None else rank
    own = lengths[indices]
    places = pack(own, plan.rows.length) if plan.rows.packed else np.argsort(-own, kind="stable")[:, None]
    for start in range(0, len(places), size * world):
        mine = range(start + rank * size, min(start + (rank + 1) * size, len(places)))
        yield [indices[places[i]] for i in mine]


def reference_batches(
    plan: Plan, lengths: np.ndarray, order: RowOrder | None
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Return this rank's rows of each forward, and which of their examples (B,) bool get their values from it.

    Every example gets its values from one forward of one rank: from the first micro-batch of the run that holds it.
    Those that the run does not reach are batched at the end. order: of training; None: the batches of an evaluation.
    """
    rank, world = this_rank()
    is_done = np.zeros(len(lengths), dtype=bool)
    found = []
    for step in range(plan.schedule.total_steps if order is not None else 0):
        if order is None or is_done.all():
            break
        for other in range(world):
            for rows in order.micro_batches(step, other):
                indices = indices_of(rows)
                if other == rank:
                    found.append((rows, ~is_done[indices]))
                is_done[indices] = True
    size = plan.batching.eval_batch_size if order is None else plan.batching.micro_batch_size
    rest = np.flatnonzero(~is_done)
    found += [(rows, ~is_done[indices_of(rows)]) for rows in rank_batches(plan, lengths, rest, size=size)]
    return found


def indices_of(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the examples of some rows, in the order in which they are collated."""
    return np.concatenate(rows) if len(rows) else np.zeros(0, dtype=np.int64)


def precompute(plan: Plan, model: nn.Module, rows: ReferenceRows, say: Say) -> np.ndarray:
    """Return the log-probabilities of all answers of the batcher's examples, (N, answers of an example) float32.

    All ranks call it, and each computes its share. say: shows progress.
    """
    batcher = rows.batcher
    lengths = examples_in_memory(batcher.examples).lengths
    found = None
    shown = time.monotonic()
    batches = reference_batches(plan, lengths, rows.order)
    # PiSSA and OLoRA subtract the initial adapter from the weights: before training, the model is the one with it.
    base = contextlib.nullcontext() if plan.build.method.init_from_weights else without_adapter(model)
    with base, without_dropout(model):
        for number, (chosen, is_new) in enumerate(batches):
            if time.monotonic() - shown > SHOW_EVERY:
                say(f"computing reference log-probabilities: {number / len(batches):.0%} of {len(lengths):,} examples")
                shown = time.monotonic()
            log_probs = answer_log_probs(model, batcher(chosen))  # also of a rank without rows: all gather weights
            indices = indices_of(chosen)
            if found is None:
                answers = len(log_probs) // max(len(indices), 1)
                found = torch.zeros(len(lengths), answers, device=log_probs.device)
            if is_new.any():
                values = log_probs.float().view(len(indices), -1)
                places = torch.from_numpy(np.flatnonzero(is_new)).to(found.device)
                found[torch.from_numpy(indices[is_new]).to(found.device)] = values[places]
    for module in model.modules():
        if isinstance(module, FSDPModule):  # it may stay gathered after a forward without backward
            module.reshard()
    assert found is not None  # all ranks compute the same number of batches, at least one
    if dist.is_initialized():
        dist.all_reduce(found)  # each example is zero on all ranks but one
    return found.cpu().numpy()
