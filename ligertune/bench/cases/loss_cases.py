"""Subjects: the losses of logits, of a linear layer without its logits, and of distillation.

Floors. Of logits: read once, their gradient written once. Of a linear layer: its three matrix products, of labelled
rows only.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from ligertune.bench.case import Case, Outputs, Provider, Subject, Tensors, Work, compiled, function, ours
from ligertune.bench.cases import eager as huggingface

IGNORED = -100


def _labels(case: Case, n: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """The same share of every part of the rows is ignored, spread at random."""
    labels = torch.randint(vocab_size, (n,), device=device)
    labels[torch.randperm(n, device=device)[: round(case.ignored * n)]] = IGNORED
    return labels


def _summed(labels: torch.Tensor):
    """Of a part of the rows: the sum of its losses over the number of labels of the whole."""
    n = (labels != IGNORED).sum()
    return lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / n


# ---- of logits


def _logits_inputs(case: Case, device: torch.device) -> Tensors:
    logits = 2.0 * torch.randn(case.sizes, dtype=case.dtype, device=device)
    return logits.requires_grad_(), _labels(case, *case.sizes, device)


def _logits_work(case: Case) -> Work:
    one = float(case.sizes[0] * case.sizes[1] * case.dtype.itemsize)
    return Work(((1.0 - case.ignored) * one, one))


CROSS_ENTROPY_EAGER = function("eager", huggingface.causal_lm_loss)
CROSS_ENTROPY = Subject(
    op="cross_entropy",
    dims=("N", "V"),
    axis="V",
    sizes=tuple((8192, vocab_size) for vocab_size in (8192, 32000, 65536, 128256, 152064)),
    small=((32, 100), (32, 1000)),
    args=("logits", "labels"),
    inputs=_logits_inputs,
    rows=("logits", "labels"),
    work=_logits_work,
    plain=lambda case, args: _summed(args[1]),
    providers=(
        ours("ours", lambda kernels, case, logits, labels: kernels.cross_entropy(logits, labels)),
        ours(
            "ours, in place",
            lambda kernels, case, logits, labels: kernels.cross_entropy(_view(logits), labels, inplace=True),
            overwrites=True,
        ),
        CROSS_ENTROPY_EAGER,
        function("torch", F.cross_entropy),
        compiled(CROSS_ENTROPY_EAGER),
    ),
)


def _view(leaf: torch.Tensor) -> torch.Tensor:
    """autograd lets nobody write over a leaf; in a model logits are none."""
    return leaf.view_as(leaf)


# ---- of a linear layer


def _linear_inputs(case: Case, device: torch.device) -> Tensors:
    n, width, vocab_size = case.sizes
    hidden = torch.randn(n, width, dtype=case.dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, width, dtype=case.dtype, device=device) * (2.0 / width**0.5)
    return hidden, weight.requires_grad_(not case.frozen_head), _labels(case, n, vocab_size, device)


def _linear_work(case: Case) -> Work:
    n, width, vocab_size = (float(size) for size in case.sizes)
    n *= 1.0 - case.ignored
    product = 2.0 * n * width * vocab_size
    weight, hidden = (size * width * case.dtype.itemsize for size in (vocab_size, n))
    if case.frozen_head:
        return Work((weight + hidden, weight + hidden), (product, product))
    return Work((weight + hidden, 2.0 * weight + 2.0 * hidden), (product, 2.0 * product))


def _our_linear(case: Case, args: Tensors):
    """Which rows have a label was found when the batch was made."""
    import ligertune_kernels

    hidden, weight, labels = args
    rows = ligertune_kernels.labelled_rows(labels.cpu()).to(labels.device) if case.ignored else None
    return lambda: ligertune_kernels.linear_cross_entropy(hidden, weight, labels, labelled_rows=rows)


def _eager_linear(case: Case, args: Tensors):
    hidden, weight, labels = args
    return lambda: huggingface.causal_lm_loss(F.linear(hidden, weight), labels)


def _torch_linear(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The fused op of newer torch; before, logits in the low dtype, where transformers makes a copy in fp32."""
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(hidden, weight, labels)
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _plain_linear(case: Case, args: Tensors):
    loss = _summed(args[2])
    return lambda hidden, weight, labels: loss(F.linear(hidden, weight), labels)


LINEAR_CROSS_ENTROPY_EAGER = Provider("eager", _eager_linear)
LINEAR_CROSS_ENTROPY = Subject(
    op="linear_cross_entropy",
    dims=("N", "E", "V"),
    axis="N",
    sizes=tuple((n, 4096, 128256) for n in (512, 2048, 4096, 8192, 16384)),
    small=((32, 16, 100), (64, 16, 100)),
    args=("hidden", "weight", "labels"),
    inputs=_linear_inputs,
    rows=("hidden", "labels"),
    work=_linear_work,
    plain=_plain_linear,
    providers=(
        Provider("ours", _our_linear),
        LINEAR_CROSS_ENTROPY_EAGER,
        function("torch", _torch_linear),
        compiled(LINEAR_CROSS_ENTROPY_EAGER),
    ),
)


# ---- of several heads, and what is asked of logits without a gradient

COEFFICIENTS = tuple(0.8**k for k in range(5))  # Medusa's five heads over one vocabulary


def _heads_inputs(case: Case, device: torch.device) -> Tensors:
    n, width, vocab_size = case.sizes
    heads = len(COEFFICIENTS)
    hidden = torch.randn(heads, n, width, dtype=case.dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, width, dtype=case.dtype, device=device) * (2.0 / width**0.5)
    return hidden, weight.requires_grad_(), torch.randint(vocab_size, (heads, n), device=device)


def _heads_work(case: Case) -> Work:
    n, width, vocab_size = (float(size) for size in case.sizes)
    return _linear_work(Case(case.op, (len(COEFFICIENTS) * n, width, vocab_size), case.dtype))


def _each_head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = (huggingface.causal_lm_loss(F.linear(x, weight), y) for x, y in zip(hidden, labels, strict=True))
    return sum(c * loss for c, loss in zip(COEFFICIENTS, losses, strict=True))


def _plain_heads(case: Case, args: Tensors):
    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = (F.cross_entropy(F.linear(x, weight), y) for x, y in zip(hidden, labels, strict=True))
        return sum(c * loss for c, loss in zip(COEFFICIENTS, losses, strict=True))

    return loss


HEADS_EAGER = function("eager", _each_head)
HEADS = Subject(
    op="multi_head_linear_cross_entropy",
    dims=("N", "E", "V"),
    axis="N",
    sizes=tuple((n, 4096, 32000) for n in (512, 2048, 4096)),
    small=((32, 16, 100),),
    args=("hiddens", "weight", "labels"),
    inputs=_heads_inputs,
    rows=(),
    work=_heads_work,
    plain=_plain_heads,
    providers=(
        ours("ours", lambda kernels, case, *args: kernels.multi_head_linear_cross_entropy(*args, COEFFICIENTS)[0]),
        HEADS_EAGER,
        compiled(HEADS_EAGER),
    ),
)


def _statistics_inputs(case: Case, device: torch.device) -> Tensors:
    hidden, weight, labels = _linear_inputs(case, device)
    return hidden.detach(), weight.detach(), labels


def _statistics_work(case: Case) -> Work:
    one = _linear_work(case)
    return Work((one.traffic[0], 0.0), (one.flops[0], 0.0))


def _statistics(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Outputs:
    """Log-probability of the label, and entropy."""
    logits = F.linear(hidden, weight)
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_probs.gather(1, labels.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)


def _our_statistics(kernels, case: Case, *args: torch.Tensor) -> Outputs:
    found = kernels.linear_token_statistics(*args)
    return found.logprob, found.entropy


STATISTICS_EAGER = function("eager", _statistics)
STATISTICS = Subject(
    op="linear_token_statistics",
    dims=("N", "E", "V"),
    axis="N",
    sizes=tuple((n, 4096, 128256) for n in (512, 2048, 8192)),
    small=((32, 16, 100),),
    args=("hidden", "weight", "labels"),
    inputs=_statistics_inputs,
    rows=("hidden", "labels"),
    work=_statistics_work,
    plain=lambda case, args: _statistics,
    providers=(ours("ours", _our_statistics), STATISTICS_EAGER, compiled(STATISTICS_EAGER)),
    modes=("forward",),
)


# ---- of distillation


def _kl_inputs(case: Case, device: torch.device) -> Tensors:
    student, teacher = (torch.randn(case.sizes, dtype=torch.float32, device=device) for _ in range(2))
    log_probs = student.log_softmax(-1).to(case.dtype).requires_grad_()
    return log_probs, teacher.softmax(-1).to(case.dtype)


def _jsd_inputs(case: Case, device: torch.device) -> Tensors:
    student, teacher = (torch.randn(case.sizes, device=device).log_softmax(-1) for _ in range(2))
    return student.to(case.dtype).requires_grad_(), teacher.to(case.dtype)


def _three_tensors(case: Case) -> Work:
    one = float(case.sizes[0] * case.sizes[1] * case.dtype.itemsize)
    return Work((2.0 * one, one))


def jsd(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence of log probabilities (N, V), averaged over the rows."""
    mixture = torch.logaddexp(student, teacher) - math.log(2.0)
    parts = (F.kl_div(mixture, side, reduction="sum", log_target=True) for side in (student, teacher))
    return 0.5 * sum(parts) / student.shape[0]


def _kl_div(log_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.kl_div(log_probs, target, reduction="batchmean")


KL_SIZES = tuple((4096, vocab_size) for vocab_size in (8192, 32000, 65536, 128256))
KL_DIV_TORCH = function("torch", _kl_div)
KL_DIV = Subject(
    op="kl_div",
    dims=("N", "V"),
    axis="V",
    sizes=KL_SIZES,
    small=((16, 100),),
    args=("log_probs", "target"),
    inputs=_kl_inputs,
    rows=("log_probs", "target"),
    work=_three_tensors,
    plain=lambda case, args: lambda log_probs, target: F.kl_div(log_probs, target, reduction="sum") / case.sizes[0],
    providers=(
        ours("ours", lambda kernels, case, p, q: kernels.kl_div(p, q, reduction="batchmean")),
        KL_DIV_TORCH,
        compiled(KL_DIV_TORCH),
    ),
    dtype=torch.float32,
)

JSD_EAGER = function("eager", jsd)
JSD = Subject(
    op="jsd",
    dims=("N", "V"),
    axis="V",
    sizes=KL_SIZES,
    small=((16, 100),),
    args=("student", "teacher"),
    inputs=_jsd_inputs,
    rows=("student", "teacher"),
    work=_three_tensors,
    plain=lambda case, args: lambda student, teacher: jsd(student, teacher) * (student.shape[0] / case.sizes[0]),
    providers=(
        ours("ours", lambda kernels, case, student, teacher: kernels.jsd(student, teacher)),
        JSD_EAGER,
        compiled(JSD_EAGER),
    ),
    dtype=torch.float32,
)


def _linear_jsd_inputs(case: Case, device: torch.device) -> Tensors:
    n, student_width, teacher_width, vocab_size = case.sizes

    def side(width: int) -> Tensors:
        hidden = torch.randn(n, width, dtype=case.dtype, device=device)
        return hidden, torch.randn(vocab_size, width, dtype=case.dtype, device=device) * (2.0 / width**0.5)

    return *(t.requires_grad_() for t in side(student_width)), *side(teacher_width)


def _linear_jsd_work(case: Case) -> Work:
    n, student_width, teacher_width, vocab_size = (float(size) for size in case.sizes)
    one = 2.0 * n * vocab_size
    weights = vocab_size * (student_width + teacher_width) * case.dtype.itemsize
    return Work((weights, weights), (one * (student_width + teacher_width), 2.0 * one * student_width))


def _linear_jsd(hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor) -> Outputs:
    """Log probabilities in fp32 at the least, as TRL's distillation trainers take them."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return jsd(*(F.linear(x, w).to(wide).log_softmax(-1) for x, w in ((hidden, weight), (teacher, head))))


LINEAR_JSD_EAGER = function("eager", _linear_jsd)
LINEAR_JSD = Subject(
    op="linear_jsd",
    dims=("N", "E", "teacher's E", "V"),
    axis="N",
    sizes=tuple((n, 2048, 4096, 128256) for n in (1024, 2048, 4096)),
    small=((16, 8, 12, 100),),
    args=("hidden", "weight", "teacher_hidden", "teacher_weight"),
    inputs=_linear_jsd_inputs,
    rows=("hidden", "teacher_hidden"),
    work=_linear_jsd_work,
    plain=lambda case, args: lambda *part: _linear_jsd(*part) * (part[0].shape[0] / case.sizes[0]),
    providers=(
        ours("ours", lambda kernels, case, *args: kernels.linear_jsd(*args)),
        LINEAR_JSD_EAGER,
        compiled(LINEAR_JSD_EAGER),
    ),
)
