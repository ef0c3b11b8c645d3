"""Sizes and FLOPs of a model with Medusa heads, for plans and reports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ligertune.models.shape import parameter_kinds, read_shape
from ligertune.planning.memory.model_shape import MedusaHeadsShape, ModelShape
from ligertune.tasks.medusa.medusa_model import MedusaModel


@dataclass(frozen=True, kw_only=True)
class MedusaShape(ModelShape):
    """Sizes of a model and its heads. A frozen model has no backward, and only the heads use its output head."""

    trains_model: bool
    num_heads: int
    n_block: int  # weights in one head's blocks
    n_projection: int  # elements of the output head
    trains_projection: bool  # whether the heads' products give a gradient to the projection

    @staticmethod
    def of_heads(model: MedusaModel) -> MedusaShape:
        """Read the sizes of a built model, which may be on the meta device."""
        base, heads = read_shape(model.base_model), model.medusa_head
        n_heads = sum(p.numel() for p in heads.parameters())
        n_teacher = 0 if model.teacher is None else base.n_parameters
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        return MedusaShape(
            **{
                **fields,
                "family": f"{base.family} with {len(heads)} Medusa heads",
                "n_parameters": base.n_parameters + n_heads + n_teacher,
                "n_trainable": base.n_trainable + n_heads,
                "parameters": parameter_kinds(model),
                "layer": None if model.teacher is not None else base.layer,  # memory with a teacher is not predicted
                "heads": MedusaHeadsShape(
                    len(heads), heads.num_layers, joint=model.trains_model, own_projection=heads.own_lm_head
                ),
            },
            trains_model=model.trains_model,
            num_heads=len(heads),
            n_block=heads.num_layers * base.hidden_size**2,
            n_projection=base.hidden_size * base.vocab_size,
            trains_projection=heads.own_lm_head or model.get_output_embeddings().weight.requires_grad,
        )

    def flops(self, *, tokens: int, squared_lengths: int) -> float:
        """Return model FLOPs as `ModelShape.flops` does, with the heads, each of which is counted for every token.

        A block costs 6 per weight and token, a projection 4, or 6 if it trains. With a frozen model a weight costs 2,
        attention runs forward only, and the first blocks give no gradient to their input.
        """
        unneeded = 0 if self.trains_model else 2 * self.hidden_size**2
        projection = (6 if self.trains_projection else 4) * self.n_projection
        heads = self.num_heads * (6 * self.n_block - unneeded + projection)
        if self.trains_model:
            return super().flops(tokens=tokens, squared_lengths=squared_lengths) + float(heads * tokens)
        attention = 2 * self.num_hidden_layers * self.attention_width * squared_lengths
        return float((2 * (self.n_matmul - self.n_projection) + heads) * tokens + attention)
