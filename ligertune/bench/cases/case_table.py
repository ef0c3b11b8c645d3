"""Every op's subject, and the cases of a bench."""

from __future__ import annotations

import torch

from ligertune.bench.case import Case, Subject
from ligertune.bench.cases import attention_cases as attention
from ligertune.bench.cases import loss_cases as losses
from ligertune.bench.cases import norm_cases as norms
from ligertune.bench.cases import optimizer_cases as optimizers
from ligertune.bench.cases import pointwise_cases as pointwise
from ligertune.errors import UserError

SUBJECTS: tuple[Subject, ...] = (
    losses.LINEAR_CROSS_ENTROPY,
    losses.CROSS_ENTROPY,
    losses.HEADS,
    losses.STATISTICS,
    norms.RMS_NORM,
    norms.ADD_RMS_NORM,
    norms.LAYER_NORM,
    norms.GROUP_NORM,
    pointwise.ROPE,
    attention.ATTENTION,
    pointwise.SWIGLU,
    pointwise.GEGLU,
    pointwise.EMBEDDING,
    losses.KL_DIV,
    losses.JSD,
    losses.LINEAR_JSD,
    pointwise.TERNARY,
    optimizers.ADAMW_STEP,
)
SUBJECT_OF = {subject.op: subject for subject in SUBJECTS}


def subject_of(op: str) -> Subject:
    """The subject of an op that a user named."""
    if op not in SUBJECT_OF:
        raise UserError(f"There is no op {op!r}.", hint=f"The ops are {', '.join(SUBJECT_OF)}.")
    return SUBJECT_OF[op]


def cases_of(subject: Subject, *, dtype: torch.dtype, small: bool) -> list[Case]:
    """An op at all its sizes."""
    return [Case(subject.op, sizes, subject.dtype or dtype) for sizes in (subject.small if small else subject.sizes)]
