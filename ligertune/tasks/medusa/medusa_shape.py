"""The sizes of a model with Medusa heads, for plans and reports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ligertune.models.shape import parameter_kinds, read_shape
from ligertune.planning.memory.model_shape import MedusaHeadsShape, ModelShape
from ligertune.tasks.medusa.medusa_model import MedusaModel


@dataclass(frozen=True, kw_only=True)
class MedusaShape(ModelShape):
    """Of a model and its heads. A frozen model runs forward only, and its output head is used by the heads alone."""

    trains_model: bool
    num_heads: int
    n_block: int  # parameters of one head's blocks that multiply
    n_projection: int  # elements of the output head
    trains_projection: bool  # in the heads' products

    @staticmethod
    def of_heads(model: MedusaModel) -> MedusaShape:
        """Read from a built model; one on the meta device does."""
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
                "layer": None if model.teacher is not None else base.layer,  # no formula for what a teacher takes
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
        """As `ModelShape.flops`, with the heads: every block 6 a parameter, every projection 4, or 6 where it trains.

        Under a frozen model a weight costs 2, attention is computed forward alone, and first blocks give no gradient to
        their input. All tokens count, though those without a target meet no head.
        """
        spared = 0 if self.trains_model else 2 * self.hidden_size**2
        projection = (6 if self.trains_projection else 4) * self.n_projection
        heads = self.num_heads * (6 * self.n_block - spared + projection)
        if self.trains_model:
            return super().flops(tokens=tokens, squared_lengths=squared_lengths) + float(heads * tokens)
        attention = 2 * self.num_hidden_layers * self.attention_width * squared_lengths
        return float((2 * (self.n_matmul - self.n_projection) + heads) * tokens + attention)
