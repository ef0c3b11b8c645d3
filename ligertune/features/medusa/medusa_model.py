"""MedusaModel: a causal language model with Medusa heads, whose forward returns the training loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.features.medusa.heads import NEEDS_PLAIN_HEAD, MedusaHeads
from ligertune.features.medusa.heads_files import HeadsConfig, check_heads_fit, read_heads
from ligertune.features.medusa.heads_loss import (
    LossInputs,
    TeacherOutput,
    fused_loss,
    naive_loss,
    part_weights,
    shifted_targets,
    target_shifts,
)
from ligertune.features.output_head import LogitTransform, backbone_of, check_plain_head, logit_transform
from ligertune.models.score_head import lm_head_of
from ligertune.models.shape import base_of
from ligertune.patching.mixers.recognise_mixers import state_carriers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ligertune.features.medusa.recipe import MedusaSpec


def attach_heads(base_model: PreTrainedModel, spec: MedusaSpec, *, fused: bool) -> MedusaModel:
    """Return `base_model` with the heads in `spec.heads_path`, or with new heads that equal its next-token predictor.

    On the meta device only sizes are checked. Raises UserError if the model has no plain output head, carries a state
    from token to token, or the heads belong to another model or differ from `spec`.
    """
    _refuse_states(base_model)
    weight = check_plain_head(base_model, hint=NEEDS_PLAIN_HEAD).weight.detach()
    on_meta = weight.device.type == "meta"
    if spec.heads_path is not None:
        folder = Path(spec.heads_path)
        config = HeadsConfig.read(folder)
        _check_as_specified(spec, config, folder)
        check_heads_fit(config, folder, weight)
    if spec.heads_path is None or on_meta:
        heads = MedusaHeads(spec.num_heads, spec.num_layers, weight, own_lm_head=spec.lm_head == "own")
    else:
        heads = read_heads(folder, weight)
    transform = LogitTransform() if on_meta else logit_transform(base_model, hint=NEEDS_PLAIN_HEAD)
    return MedusaModel(base_model, heads, spec, transform=transform, fused=fused)


def _refuse_states(model: PreTrainedModel) -> None:
    decoder = base_of(model).get_decoder()
    carriers = " and ".join(sorted({type(module).__name__ for module in state_carriers(decoder)}))
    if carriers:
        raise UserError(
            f"task: medusa: {carriers} layers of the model carry a state from token to token.",
            hint="A guess that is rejected cannot be taken out of a state again. Use a model without such layers.",
        )


def _check_as_specified(spec: MedusaSpec, found: HeadsConfig, folder: Path) -> None:
    for key, wanted, trained in (
        ("num_heads", spec.num_heads, found.medusa_num_heads),
        ("num_layers", spec.num_layers, found.medusa_num_layers),
        ("lm_head", spec.lm_head, "shared" if found.original_lm_head else "own"),
    ):
        if wanted != trained:
            raise UserError(
                f"medusa.{key}: {wanted}, but the heads in {folder} were trained with {trained}.",
                hint=f"Write medusa.{key}: {trained}, or name other heads in medusa.heads_path.",
            )


class MedusaOutput(NamedTuple):
    """The loss, and the mean of each part (S,): in stage 2 the model's next-token loss first, then the heads'.

    Not a dataclass: FSDP2 searches a forward's output for tensors to learn when the backward begins, and older versions
    find none in a dataclass. Here only this output tells it, because a frozen model's layers have no backward.
    """

    loss: Tensor
    part_losses: Tensor


class MedusaModel(nn.Module):
    """`base_model` and `medusa_head`. In stage 1 the base model is frozen and runs without autograd.

    The output head is never called: the loss uses its weight inside this forward, where FSDP2 has already gathered the
    parameters of the root module.
    """

    heads_prefix = "medusa_head."  # of parameters whose rate medusa.lr_multiplier sets; see parameter_groups.py

    def __init__(
        self,
        base_model: PreTrainedModel,
        heads: MedusaHeads,
        spec: MedusaSpec,
        *,
        transform: LogitTransform,
        fused: bool,
    ) -> None:
        super().__init__()
        self.base_model = base_model
        self.medusa_head = heads
        self.spec = spec
        self.transform = transform
        self.fused = fused
        self._no_split_modules = base_model._no_split_modules  # the layer classes that FSDP wraps
        self.teacher: PreTrainedModel | None = None
        if spec.stage == 2 and spec.self_distillation:
            self.teacher = copy.deepcopy(base_model).requires_grad_(False).eval()
        if spec.stage == 1:
            base_model.requires_grad_(False)

    @property
    def config(self) -> PreTrainedConfig:
        return self.base_model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return lm_head_of(self.base_model)

    @property
    def trains_model(self) -> bool:
        return self.spec.stage == 2

    @property
    def shifts(self) -> tuple[int, ...]:
        """How many tokens ahead each part of the loss predicts."""
        return target_shifts(len(self.medusa_head), with_model=self.trains_model)

    def train(self, mode: bool = True) -> MedusaModel:
        """Set the training mode; frozen parts stay in evaluation mode, without dropout."""
        super().train(mode)
        for frozen in (None if self.trains_model else self.base_model, self.teacher):
            if frozen is not None:
                frozen.eval()
        return self

    def last_hidden_state(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the hidden state (B, T, E) of input_ids (B, T) after the final norm."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_model):
            return backbone_of(self.base_model)(input_ids=input_ids, **inputs)[0]

    def _teacher_output(self, **inputs: Any) -> TeacherOutput | None:
        if self.teacher is None:
            return None
        with torch.no_grad():
            hidden = backbone_of(self.teacher)(**inputs)[0]
        return TeacherOutput(hidden, lm_head_of(self.teacher).weight)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        position_ids: Tensor | None = None,
        num_items_in_batch: list[int] | None = None,
        labelled_rows: Tensor | None = None,
        heads_coefficient: float | None = None,
        **inputs: Any,
    ) -> MedusaOutput:
        """Return the loss of input_ids and unshifted labels (B, T).

        num_items_in_batch (S,): divisor of each part. labelled_rows: the rows of (B * T) that have a target, if the
        collator computed them. heads_coefficient: replaces the recipe's during its warm-up.
        """
        inputs["input_ids"] = input_ids
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        spec = self.spec
        coefficient = spec.heads_coefficient if heads_coefficient is None else heads_coefficient
        loss_inputs = LossInputs(
            hidden=self.last_hidden_state(**inputs),
            heads=self.medusa_head,
            weight=lm_head_of(self.base_model).weight,
            targets=shifted_targets(labels, position_ids, self.shifts),
            weights=part_weights(
                len(self.medusa_head), spec.decay_coefficient, coefficient, with_model=self.trains_model
            ),
            counts=num_items_in_batch,
            transform=self.transform,
            rows=labelled_rows,
            teacher=self._teacher_output(**inputs),
        )
        return MedusaOutput(*(fused_loss if self.fused else naive_loss)(loss_inputs))
