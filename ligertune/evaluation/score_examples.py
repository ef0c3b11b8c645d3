"""Score examples with a model: packed or padded as the plan says, with our kernels, and without stored logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligertune.any_types import AnyModule
from ligertune.data.batching.collate import Batcher, FilePrefetcher, rows_multiple_of
from ligertune.data.batching.packing import Packs, pack
from ligertune.data.examples import Examples
from ligertune.decode.log_probs import document_sums, prepare_to_score
from ligertune.errors import UserError
from ligertune.features.example_scores import ScoredExamples
from ligertune.features.task import Task
from ligertune.models.load import hide_loading_bars
from ligertune.models.save import load_saved
from ligertune.models.shape import base_of
from ligertune.patching.packing_checks import prepare_masks
from ligertune.planning.feature_spec import feature_of
from ligertune.training.build import patch_loaded
from ligertune.training.checks import why_not_padding_free
from ligertune.training.setup import Job

Progress = Callable[[float], None]  # share of the tokens that are scored


@dataclass(frozen=True)
class EvaluationModel:
    """A model with our kernels, ready to score. task: makes the fields of its batches; None for ordinary texts."""

    model: AnyModule
    task: Task | None


def load_to_score(name: str, job: Job, *, trust_remote_code: bool, base: Any = None) -> EvaluationModel:
    """Load a model or an adapter, and put our kernels into it as planned. base: as `load_saved` takes it.

    Raises UserError if documents that share a row would see each other.
    """
    hide_loading_bars()
    plan = job.plan
    model: AnyModule
    model, _ = load_saved(
        name, trust_remote_code=trust_remote_code, base=base, attention=plan.attn_implementation, keep_wrapper=True
    )
    if not torch.cuda.is_available() and base_of(model).dtype == torch.float16:
        model = model.float()  # exact, and a CPU computes few functions in float16
    patch_loaded(model, plan.build)
    inner = base_of(model)
    prepare_masks(inner)
    feature = feature_of(plan.build.task)
    with torch.no_grad():
        feature.check_model(inner, plan)
        why = why_not_padding_free(plan, inner) if plan.rows.is_padding_free else None
    if why is not None:
        raise UserError(f"data.padding_free: {why}", hint="Write --set data.padding_free=false.")
    model.eval()
    if not feature.scores_texts:
        prepare_to_score(model, plan.build.task)
        return EvaluationModel(model, None)
    task = feature.task(plan, model)
    task.prepare(model, [_batcher(job, Examples(), None)])
    return EvaluationModel(model, task)


def score_examples(
    loaded: EvaluationModel, job: Job, examples: Examples, progress: Progress = lambda share: None
) -> ScoredExamples:
    """Return what the model gives each document of the examples. The result does not depend on the batch size."""
    rows = _rows(job, examples.lengths)
    batcher = _batcher(job, examples, loaded.task)
    size = 1 if job.reader is not None and job.reader.needs_equal_counts else job.plan.batching.eval_batch_size
    per_example = examples.documents_per_example
    order = []
    found = []
    with torch.no_grad(), _out_of_memory():
        for start in range(0, len(rows), size):
            chosen = [rows[index] for index in range(start, min(start + size, len(rows)))]
            batcher.prefetch([chosen])
            indices = np.concatenate(chosen)
            found.append(_values(loaded, batcher(chosen), documents=per_example * len(indices)))
            order.append((per_example * indices[:, None] + np.arange(per_example)).ravel())
            progress(min(start + size, len(rows)) / len(rows))
    values = torch.cat(found, dim=1).double().cpu().numpy()
    by_document = np.empty_like(values)
    by_document[:, np.concatenate(order)] = values
    if loaded.task is None:
        log_probs, tokens, correct = by_document
        return ScoredExamples(examples, log_probs, tokens, correct, scores=np.zeros((len(tokens), 0)))
    none = np.zeros(by_document.shape[1])
    return ScoredExamples(examples, none, none, none, scores=by_document.T)


def _values(loaded: EvaluationModel, batch: dict[str, Any], *, documents: int) -> Tensor:
    """Return the numbers of the first documents of a batch, (numbers, documents)."""
    if loaded.task is None:
        return document_sums(loaded.model, batch)[:, :documents]
    scores, _ = loaded.task.predictions(loaded.model, batch)
    return scores.T[:, :documents].float()


def _rows(job: Job, lengths: np.ndarray) -> Packs | np.ndarray:
    """Return the examples of each row: packs, or single examples, longest first, for little padding."""
    plan = job.plan
    return pack(lengths, plan.rows.length) if plan.rows.packed else np.argsort(-lengths, kind="stable")[:, None]


def _batcher(job: Job, examples: Examples, task: Task | None) -> Batcher:
    plan = job.plan
    return Batcher(
        examples,
        packed=plan.rows.is_padding_free,
        multiple_of=plan.rows.multiple_of,
        pad_token_id=job.tokenizer.pad_token_id,
        index_labels=plan.loss_in_head,
        device=torch.device(plan.machine.device),
        more_fields=None if task is None else task.batch_fields,
        rows_multiple_of=rows_multiple_of(plan),
        reader=job.reader,
        prefetcher=None if job.reader is None else FilePrefetcher(job.reader),
    )


@contextlib.contextmanager
def _out_of_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The evaluation ran out of device memory.", hint="Write a smaller --batch-size.", exit_code=1
        ) from error
