"""The recipe's section `medusa`: its keys, defaults and bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ligertune.recipe.section import FileOrHub, Section, Share, Switch


class MedusaSpec(Section):
    """Heads that guess several tokens ahead; with task: medusa. Head k predicts the token k + 1 places on."""

    num_heads: Annotated[int, Field(ge=1, le=16)] = Field(5, description="Heads K.")
    num_layers: PositiveInt = Field(1, description="Residual blocks of each head.")
    stage: Literal[1, 2] = Field(1, description="1: only the heads train; 2: the model trains with them.")
    lm_head: Literal["shared", "own"] = Field(
        "shared", description="Projection of the heads: the model's own, or a trained copy of it for each."
    )
    heads_path: FileOrHub | None = Field(None, description="Folder of trained heads to start from; stage 2 needs it.")
    decay_coefficient: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="Head k's loss counts decay_coefficient to the power k."
    )
    heads_coefficient: NonNegativeFloat = Field(0.2, description="Stage 2: weight of the heads' losses.")
    heads_warmup_ratio: Share = Field(
        0.1, description="Stage 2: share of the steps over which heads_coefficient rises from 0, linearly."
    )
    lr_multiplier: PositiveFloat = Field(4.0, description="Stage 2: the heads' learning rate over the model's.")
    self_distillation: Switch = Field(
        False, description="Stage 2: the model keeps to its own distribution (KL) instead of learning from the data."
    )
    expand_lm_head: Switch = Field(
        False, description="Write a copy of a shared projection for each head, as TensorRT-LLM reads them."
    )
    tree_nodes: Annotated[int, Field(ge=2, le=512)] = Field(
        64, description="Most tokens of the tree of guesses that one decoding step checks."
    )
    eval_prompts: NonNegativeInt = Field(
        8, description="Held-out prompts on which decoding is timed after training; 0 does not."
    )
    eval_new_tokens: PositiveInt = Field(128, description="The most tokens written for each of those prompts.")
