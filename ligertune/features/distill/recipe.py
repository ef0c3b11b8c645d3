"""Distillation in a recipe: the section `distill` and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from ligertune.recipe.feature import RecipePart
from ligertune.recipe.rules.rule import NEW_TOKENS, NO_CUDA_GRAPHS, NO_NEW_TOKENS, ONE_OUT, Rule, each
from ligertune.recipe.section import FileOrHub, Section, Share, Switch, Text


class DistillSpec(Section):
    """Distillation from a teacher model; read with task: distill."""

    teacher: FileOrHub | None = None
    """Hub id or folder of the teacher; its vocabulary must be the student's."""
    teacher_revision: Text = "main"
    """Branch, tag or commit of the teacher on the hub."""
    teacher_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the teacher's weights; auto: the dtype in which the student computes."""
    teacher_load_in_4bit: Switch = False
    """Quantise the teacher's layers to 4 bits (NF4) while they are loaded; needs bitsandbytes."""
    teacher_offload: Switch = False
    """Keep the teacher's layers in host memory, and copy each to the device for its part of the forward: slow."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "jsd"
    """forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher); jsd: in between, by beta."""
    beta: Share = 0.5
    """jsd: weight of the teacher in the mixture."""
    temperature: PositiveFloat = 1.0
    """Divisor of both models' logits."""
    sft_weight: Share = 0.0
    """Weight of the cross-entropy of the labels; the divergence has the rest."""
    teacher_file: FileOrHub | None = None
    """Folder of `ligertune distill --write`: train from its log-probabilities, without the teacher."""
    top_k: Annotated[int, Field(ge=1, le=2**20)] = 64
    """ligertune distill --write: number of tokens whose log-probabilities are written for each trained token."""


RULES = (
    Rule("distill.teacher: null, task: distill, distill.teacher_file: null",
         "{1} is distill, and {0} is not given. Give a hub id or a folder."),
    *each(
        "{0} trains from written log-probabilities, and {1}: {v[1]} {why}",
        "distill.teacher_file: not null",
        ("distill.loss: not forward_kl", "needs all of them. Write distill.loss: forward_kl."),
        ("data.streaming", "does not know its tokens before. " + ONE_OUT),
    ),
    Rule("distill.teacher_file: not null, task: not distill",
         "{0} is read with task: distill only, and {1} is {v[1]}. Write task: distill, or leave {0} out."),
    Rule("distill.teacher: not null, task: not distill",
         "{0} is read with task: distill only, and {1} is {v[1]}. Write task: distill, or leave {0} out."),
    Rule("distill.beta: any, distill.loss: not jsd",
         "{0} weights the mixture of jsd, and {1} is {v[1]}. Leave {0} out.",
         also=lambda recipe: recipe.section(DistillSpec).beta != DistillSpec.model_fields["beta"].default),
    Rule("distill.sft_weight: 1, task: distill",
         "{0} is 1, which leaves nothing of the teacher. Write a smaller weight, or task: sft without a teacher."),
    Rule("distill.teacher_offload, distill.teacher_load_in_4bit",
         f"{{0}} copies layers as they are, and {{1}} packs their weights. {ONE_OUT}"),
    Rule("kernels.loss: cross_entropy, task: distill, kernels.enabled: not false",
         "{0} is cross_entropy, and {1} is distill, whose loss is a divergence. Leave {0} out."),
    *(Rule(f"{key}, task: distill", NO_NEW_TOKENS) for key in NEW_TOKENS),
    *each(NO_CUDA_GRAPHS, "train.cuda_graphs: true", ("task: distill", "{1}: distill runs the teacher in between")),
)  # fmt: skip

PART = RecipePart(
    order=3,
    tasks={"distill": "from a teacher"},
    sections={"distill": DistillSpec},
    rules=RULES,
    loss_of_labels=False,
    models=("distill.teacher",),
    packages={"distill.teacher_load_in_4bit": "bitsandbytes"},
)
