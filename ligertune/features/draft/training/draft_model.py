"""DraftModel: a frozen causal language model with a draft head, whose forward returns the head's training loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ligertune_kernels import Documents
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.target_states import StateCapture
from ligertune.features.draft.training.draft_loss import DraftLoss, StepRows, TeacherRows, draft_loss
from ligertune.features.draft.training.draft_steps import DraftRows, draft_states
from ligertune.features.output_head import LogitTransform, backbone_of
from ligertune.models.score_head import embedding_of, lm_head_of
from ligertune.untraced_inputs import reveal


class DraftModel(nn.Module):
    """`base_model`, frozen and without autograd, and `draft_head`, which trains.

    Embedding and output head of the base model are never called: their weights are read inside this forward, where
    FSDP2 has already gathered the parameters of the root module.
    """

    heads_prefix = "draft_head."  # of parameters that are added to the model; see parameter_groups.py

    def __init__(
        self,
        base_model: PreTrainedModel,
        head: DraftHead,
        spec: DraftSpec,
        *,
        transform: LogitTransform,
        recompute: bool = False,
    ) -> None:
        """transform: what the base model does to its logits. recompute: keep no activations of the head's layers."""
        super().__init__()
        self.base_model = base_model.requires_grad_(False)
        self.draft_head = head
        self.spec = spec
        self.transform = transform
        self.recompute = recompute
        self._no_split_modules = base_model._no_split_modules  # the layer classes that FSDP wraps

    @property
    def config(self) -> PreTrainedConfig:
        return self.base_model.config

    def get_input_embeddings(self) -> nn.Module:
        return embedding_of(self.base_model)

    def get_output_embeddings(self) -> nn.Module:
        return lm_head_of(self.base_model)

    def train(self, mode: bool = True) -> DraftModel:
        """Set the training mode; the base model stays in evaluation mode, without dropout."""
        super().train(mode)
        self.base_model.eval()
        return self

    @torch.no_grad()
    def target_states(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the states (N, 3E) that the head reads, and the last hidden states (N, E), of B · T = N tokens."""
        with StateCapture(self.base_model, self.draft_head.config.layer_ids) as capture:
            last = backbone_of(self.base_model)(**inputs)[0]
            return capture.take().flatten(0, 1), last.flatten(0, 1)

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        labels: Tensor,  # (B, T), not shifted
        *,
        num_items_in_batch: Sequence[int] | None = None,  # K: labels that each step predicts in the global batch
        labelled_rows: Tensor | None = None,  # (M,): rows of B · T that predict a label, if the collator found them
        target_states: Tensor | None = None,  # (N, 3E): stored, as are `last_states`; None: the target runs
        last_states: Tensor | None = None,  # (N, E)
        keep_states: Callable[[Tensor, Tensor], None] | None = None,  # stores both
        **inputs: Any,
    ) -> DraftLoss:
        """Return the loss, and the acceptance of each step."""
        if target_states is None or last_states is None:
            target_states, last_states = self.target_states(input_ids=input_ids, **inputs)
            if keep_states is not None:
                keep_states(target_states, last_states)
        rows = flat_rows(input_ids, inputs)
        head = self.draft_head
        embedding = embedding_of(self.base_model).weight
        n_steps = self.spec.steps
        found = draft_states(head, target_states, embedding, rows, n_steps, recompute=self.recompute)
        taken = torch.arange(len(last_states), device=last_states.device) if labelled_rows is None else labelled_rows
        sources = taken - torch.arange(1, n_steps + 1, device=taken.device)[:, None]  # (K, M): rows of the head
        counted = (sources >= rows.documents.starts[taken]) & _predicts_label(labels)[taken]
        selected = [state[source.clamp(min=0)] for state, source in zip(found, sources, strict=True)]
        counts = counted.sum(-1).clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        decay = [self.spec.decay_coefficient**step for step in range(n_steps)]
        drafted = head.draft_ids() if head.config.reduces_vocabulary else None
        teacher = TeacherRows(last_states[taken], lm_head_of(self.base_model).weight, self.transform, drafted)
        weights = torch.tensor(decay, dtype=torch.float64, device=taken.device) / torch.as_tensor(
            counts, device=taken.device
        )
        return draft_loss(
            head.norm(torch.stack(selected)), head.lm_head.weight, teacher, StepRows(counted, weights), self.spec.loss
        )


def _predicts_label(labels: Tensor) -> Tensor:
    """Return which of the N rows of labels (B, T) predict a trained token. First labels of documents are ignored."""
    return torch.nn.functional.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1)).flatten()


def flat_rows(input_ids: Tensor, inputs: dict[str, Any]) -> DraftRows:
    """Return the tokens (B, T) of a batch in one row: packed documents, or rows of one document each."""
    flat = input_ids.flatten()
    places = inputs.get("document_places")
    if places is not None:
        starts, ends = places
        documents = Documents(starts, ends, len(reveal(inputs["document_lengths"])))
        return DraftRows(flat, inputs["position_ids"].flatten(), documents)
    n_rows, length = input_ids.shape
    rows = torch.arange(len(flat), device=flat.device, dtype=torch.int32)
    positions = rows % length
    starts = rows - positions
    return DraftRows(flat, positions, Documents(starts, starts + length, n_rows))
