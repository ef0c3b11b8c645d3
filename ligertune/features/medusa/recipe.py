"""Medusa heads in a recipe: the section `medusa` and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from ligertune.recipe.feature import RecipePart, TrainedFolder
from ligertune.recipe.rules.rule import (
    NEW_TOKENS,
    NO_CUDA_GRAPHS,
    NO_NEW_TOKENS,
    NO_NOISE,
    NO_TILES,
    ONE_OUT,
    TILES,
    Rule,
    each,
)
from ligertune.recipe.section import FileOrHub, Section, Share, Switch

MEDUSA_STAGE_1 = "medusa.stage: 1, task: medusa"


class MedusaSpec(Section):
    """Medusa heads; read with task: medusa."""

    # Medusa (Cai et al. 2024): head k predicts the token k + 1 positions ahead

    num_heads: Annotated[int, Field(ge=1, le=16)] = 5
    """Number of heads."""
    num_layers: Annotated[int, Field(ge=1, le=64)] = 1
    """Residual blocks per head."""
    stage: Literal[1, 2] = 1
    """1: train the heads only; 2: train the model and the heads."""
    lm_head: Literal["shared", "own"] = "shared"
    """Output projection of the heads; shared: the model's; own: a trained copy per head."""
    heads_path: FileOrHub | None = None
    """Folder of trained heads to start from; required in stage 2."""
    decay_coefficient: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of the loss of head k: decay_coefficient to the power k."""
    heads_coefficient: NonNegativeFloat = 0.2
    """Stage 2: weight of the sum of the head losses."""
    heads_warmup_ratio: Share = 0.1
    """Stage 2: share of the steps in which heads_coefficient rises linearly from 0."""
    lr_multiplier: PositiveFloat = 4.0
    """Stage 2: learning rate of the heads, relative to the model's."""
    self_distillation: Switch = False
    """Stage 2: train the model towards its initial distribution (KL) instead of the labels."""
    expand_lm_head: Switch = False
    """Write a copy of a shared projection for each head, as TensorRT-LLM expects."""
    tree_nodes: Annotated[int, Field(ge=2, le=512)] = 64
    """Maximum number of candidate tokens that one decoding step verifies."""
    eval_prompts: NonNegativeInt = 8
    """Held-out prompts to time decoding on after training; 0: none."""
    eval_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Maximum number of new tokens per prompt."""


RULES = (
    Rule("medusa.stage: 2, medusa.heads_path: null, task: medusa",
         "{0} is 2, which starts from trained heads, and {1} is not given. "
         "Train the heads with medusa.stage: 1 first, and give their folder."),
    Rule("data.max_length: any, medusa.num_heads: any, task: medusa",
         "{0} is {v[0]}, too short for {v[1]} heads ({1}): the last head predicts the token {v[1]} + 1 positions "
         "ahead. Write a larger data.max_length, or fewer heads.",
         also=lambda recipe: recipe.data.max_length < recipe.section(MedusaSpec).num_heads + 2),
    Rule("method.type: qlora|freeze, task: medusa",
         "{0} is {v[0]}, and {1} is medusa, which supports full and lora only. Write one of them."),
    Rule(f"method.type: lora, {MEDUSA_STAGE_1}",
         "{0} is lora, and in stage 1 ({1}) only the heads train. Leave {0} out, or write medusa.stage: 2."),
    *(
        Rule(f"{key}, {MEDUSA_STAGE_1}",
             f"{{0}} applies to {what}, and in stage 1 ({{1}}) only the heads train. Leave {{0}} out.")
        for key, what in (
            ("train.fp8", "the model's layers"),
            ("train.gradient_checkpointing_layers: not all", "layers that save activations"),
        )
    ),
    *(
        Rule(f"{key}, task: medusa", "{0} measures a model, and {1} is medusa, which trains heads. Leave {0} out.")
        for key in ("eval.metric", "eval.tasks")
    ),
    Rule("eval.sample_prompts, task: medusa",
         "{0} are answered by a model, and {1} is medusa, which trains heads. Leave {0} out."),
    Rule("train.neftune_noise_alpha: not null, task: medusa", NO_NOISE),
    Rule("train.lr_groups, task: medusa",
         "{0} names parameters of the model, and {1} is medusa, whose heads have medusa.lr_multiplier. Leave {0} out."),
    Rule("method.trainable_token_indices, task: medusa",
         "{0} trains rows of the output head, and {1} is medusa, whose heads share it. Leave {0} out."),
    *(Rule(f"{key}, task: medusa", NO_NEW_TOKENS) for key in NEW_TOKENS),
    Rule("method.load_in_8bit, task: medusa", "{0} is not supported with {1}: medusa. Leave it out."),
    *each(NO_TILES, TILES, ("task: medusa", "medusa heads are no part of it")),
    *each(
        NO_CUDA_GRAPHS,
        "train.cuda_graphs: true",
        ("task: medusa", "{1}: medusa changes the weights of the head losses between steps"),
    ),
    Rule("train.fp8: true, task: medusa, method.type: lora",
         f"{{0}}: true keeps frozen weights in float8, and {{1}} merges the adapter of {{2}} into them. {ONE_OUT}"),
)  # fmt: skip

HEADS_FOLDER = TrainedFolder(
    key="medusa.heads_path",
    name="medusa",
    files=("config.json", "medusa_lm_head.safetensors"),
    holds="trained heads",
    title="Medusa heads",
    hint="Name the folder medusa/ that `ligertune medusa --stage 1` wrote into its output_dir.",
    use="`ligertune generate` decodes with them if --medusa is given.",
)
PART = RecipePart(
    order=1,
    tasks={"medusa": "Medusa heads"},
    sections={"medusa": MedusaSpec},
    rules=RULES,
    why_whole_rows="The heads need tokens of other processes",
    folders=(HEADS_FOLDER,),
    report_keys=("medusa",),
    run_files=("medusa", "medusa_report.json", "medusa_report.png"),
)
