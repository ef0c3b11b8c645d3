"""Benchmarks of losses: of logits, of a linear layer without its logits, and against a teacher.

Lower bounds. Logits: read once, and their gradient written once. Linear layers: three matrix products over the rows
whose label is not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import ligertune_kernels as kernels
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from ligertune.bench.case import Case, OpBenchmark, Outputs, Tensors, Work, elementwise_work, providers_of

IGNORE_INDEX = -100  # torch's default, which the baselines use
HEAD_WEIGHTS = tuple(0.8**k for k in range(5))  # as in the heads of the default recipe


def _labels(case: Case, n: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return random labels with the case's share of ignored ones at random places."""
    labels = torch.randint(vocab_size, (n,), device=device)
    labels[torch.randperm(n, device=device)[: round(case.ignored * n)]] = IGNORE_INDEX
    return labels


def _causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute transformers' loss of causal language models; logits (N, V), labels (N,) already shifted."""
    return ForCausalLMLoss(logits, None, logits.shape[-1], shift_labels=labels)


def _mean_over(labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss of some rows: their sum divided by the number of all labels."""
    n = (labels != IGNORE_INDEX).sum()
    return lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / n


# ---- Losses of logits


def _logits_inputs(case: Case, device: torch.device) -> Tensors:
    n, vocab_size = case.sizes
    logits = 2.0 * torch.randn(n, vocab_size, dtype=case.dtype, device=device)
    return logits.requires_grad_(), _labels(case, n, vocab_size, device)


def _logits_work(case: Case) -> Work:
    return Work(((1.0 - case.ignored) * case.tensor_bytes(), case.tensor_bytes()))


def _in_place_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    # Autograd forbids overwriting a leaf; in a model logits are not leaves.
    return kernels.cross_entropy(logits.view_as(logits), labels, inplace=True)


CROSS_ENTROPY = OpBenchmark(
    op="cross_entropy",
    dims=("N", "V"),
    sizes=tuple((8192, vocab_size) for vocab_size in (8192, 32000, 65536, 128256, 152064)),
    cpu_sizes=((32, 100), (32, 1000)),
    args=("logits", "labels"),
    inputs=_logits_inputs,
    row_args=("logits", "labels"),
    work=_logits_work,
    reference=lambda case, args: _mean_over(args[1]),
    providers=providers_of(
        kernels.cross_entropy, in_place=_in_place_cross_entropy, eager=_causal_lm_loss, torch=F.cross_entropy
    ),
)


# ---- Losses of linear layers


def _linear_inputs(case: Case, device: torch.device) -> Tensors:
    n, width, vocab_size = case.sizes
    hidden = torch.randn(n, width, dtype=case.dtype, device=device, requires_grad=True)
    # so that the standard deviation of the logits is 2, as in `_logits_inputs`
    weight = torch.randn(vocab_size, width, dtype=case.dtype, device=device) * (2.0 / width**0.5)
    return hidden, weight.requires_grad_(not case.frozen_head), _labels(case, n, vocab_size, device)


def _linear_work(case: Case, heads: int = 1) -> Work:
    n, width, vocab_size = (float(size) for size in case.sizes)
    n *= heads * (1.0 - case.ignored)
    product = 2.0 * n * width * vocab_size
    weight, hidden = (size * width * case.dtype.itemsize for size in (vocab_size, n))
    if case.frozen_head:
        return Work((weight + hidden, weight + hidden), (product, product))
    return Work((weight + hidden, 2.0 * weight + 2.0 * hidden), (product, 2.0 * product))


def _eager_linear(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _causal_lm_loss(F.linear(hidden, weight), labels)


def _torch_linear(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Call torch's fused op where it exists; before, keep logits in the low dtype, unlike transformers."""
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(hidden, weight, labels)
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _linear_reference(case: Case, args: Tensors) -> Callable[..., Outputs]:
    loss = _mean_over(args[2])
    return lambda hidden, weight, labels: loss(F.linear(hidden, weight), labels)


LINEAR_CROSS_ENTROPY = OpBenchmark(
    op="linear_cross_entropy",
    dims=("N", "E", "V"),
    sizes=tuple((n, 4096, 128256) for n in (512, 2048, 4096, 8192, 16384)),
    cpu_sizes=((32, 16, 100), (64, 16, 100)),
    args=("hidden", "weight", "labels"),
    inputs=_linear_inputs,
    row_args=("hidden", "labels"),
    work=_linear_work,
    reference=_linear_reference,
    providers=providers_of(kernels.linear_cross_entropy, eager=_eager_linear, torch=_torch_linear),
)


def _heads_inputs(case: Case, device: torch.device) -> Tensors:
    n, width, vocab_size = case.sizes
    heads = len(HEAD_WEIGHTS)
    hidden = torch.randn(heads, n, width, dtype=case.dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, width, dtype=case.dtype, device=device) * (2.0 / width**0.5)
    return hidden, weight.requires_grad_(), torch.randint(vocab_size, (heads, n), device=device)


def _sum_of_heads(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function that computes the loss of each head and adds them, weighted."""

    def call(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        losses = (loss(F.linear(x, weight), y) for x, y in zip(hidden, labels, strict=True))
        first, *others = (c * loss for c, loss in zip(HEAD_WEIGHTS, losses, strict=True))
        return sum(others, start=first)

    return call


def _our_heads(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return kernels.multi_head_linear_cross_entropy(hidden, weight, labels, HEAD_WEIGHTS)[0]


MULTI_HEAD = OpBenchmark(
    op="multi_head_linear_cross_entropy",
    dims=("N", "E", "V"),
    sizes=tuple((n, 4096, 32000) for n in (512, 2048, 4096)),
    cpu_sizes=((32, 16, 100),),
    args=("hiddens", "weight", "labels"),
    inputs=_heads_inputs,
    work=lambda case: _linear_work(case, heads=len(HEAD_WEIGHTS)),
    reference=lambda case, args: _sum_of_heads(F.cross_entropy),
    providers=providers_of(_our_heads, eager=_sum_of_heads(_causal_lm_loss)),
)


def _log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, 0 where it is ignored, through log_softmax of all logits."""
    logits = F.linear(hidden, weight)
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    found = log_probs.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return found.masked_fill(labels == IGNORE_INDEX, 0.0)


def _our_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return kernels.linear_log_probs(hidden, weight, labels).logprob


LOG_PROBS = OpBenchmark(
    op="linear_log_probs",
    dims=("N", "E", "V"),
    sizes=tuple((n, 4096, 128256) for n in (512, 2048, 4096, 8192)),
    cpu_sizes=((32, 16, 100),),
    args=("hidden", "weight", "labels"),
    inputs=_linear_inputs,
    row_args=("hidden", "labels"),
    work=_linear_work,
    reference=lambda case, args: _log_probs,
    providers=providers_of(_our_log_probs, eager=_log_probs),
)


def _statistics_work(case: Case) -> Work:
    whole = _linear_work(case)
    return Work((whole.traffic[0], 0.0), (whole.flops[0], 0.0))


def _statistics(hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    """Return log-probabilities of the labels, and entropies."""
    logits = F.linear(hidden, weight)
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_probs.gather(1, labels.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)


def _our_statistics(hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    found = kernels.linear_token_statistics(hidden, weight, labels)
    return found.logprob, found.entropy


STATISTICS = OpBenchmark(
    op="linear_token_statistics",
    dims=("N", "E", "V"),
    sizes=tuple((n, 4096, 128256) for n in (512, 2048, 8192)),
    cpu_sizes=((32, 16, 100),),
    args=("hidden", "weight", "labels"),
    inputs=lambda case, device: tuple(t.detach() for t in _linear_inputs(case, device)),
    row_args=("hidden", "labels"),
    work=_statistics_work,
    reference=lambda case, args: _statistics,
    providers=providers_of(_our_statistics, eager=_statistics),
    modes=("forward",),
)

LOSSES = (LINEAR_CROSS_ENTROPY, CROSS_ENTROPY, MULTI_HEAD, LOG_PROBS, STATISTICS)


# ---- Losses against a teacher


def _jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence of log-probabilities (N, V), averaged over the rows."""
    mixture = torch.logaddexp(student, teacher) - math.log(2.0)
    of_student = F.kl_div(mixture, student, reduction="sum", log_target=True)
    of_teacher = F.kl_div(mixture, teacher, reduction="sum", log_target=True)
    return 0.5 * (of_student + of_teacher) / student.shape[0]


OUR_KL_DIV, KL_DIV = (partial(loss, reduction="batchmean") for loss in (kernels.kl_div, F.kl_div))


def _of_all_rows(loss: Callable[..., Tensor]) -> Callable[[Case, Tensors], Callable[..., Outputs]]:
    """Return the reference of a mean over rows: for some rows, their share of the mean over all rows."""
    return lambda case, args: lambda *part: loss(*part) * (part[0].shape[0] / case.sizes[0])


def _divergence(
    op: str,
    args: tuple[str, str],
    teacher: Callable[..., Tensor],
    ours: Callable[..., Tensor],
    baseline: str,
    loss: Callable[..., Tensor],
) -> OpBenchmark:
    """Return the benchmark of a divergence of two tensors (N, V) in fp32.

    The student's are log-probabilities; teacher: makes the other tensor of logits. baseline: the name of `loss` in
    reports.
    """

    def inputs(case: Case, device: torch.device) -> Tensors:
        student, target = (torch.randn(case.sizes, device=device) for _ in range(2))
        return student.log_softmax(-1).to(case.dtype).requires_grad_(), teacher(target, -1).to(case.dtype)

    baselines = {baseline: loss}
    return OpBenchmark(
        op=op,
        dims=("N", "V"),
        sizes=tuple((4096, vocab_size) for vocab_size in (8192, 32000, 65536, 128256)),
        cpu_sizes=((16, 100),),
        args=args,
        inputs=inputs,
        row_args=args,
        work=elementwise_work(2, 1),
        reference=_of_all_rows(loss),
        providers=providers_of(ours, **baselines),
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


def _linear_jsd(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Compute log-probabilities in at least fp32, as TRL's trainers with a teacher do, and their divergence."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    pairs = ((hidden, weight), (teacher_hidden, teacher_weight))
    return _jsd(*(F.linear(x, w).to(wide).log_softmax(-1) for x, w in pairs))


DIVERGENCES = (
    _divergence("kl_div", ("log_probs", "target"), torch.softmax, OUR_KL_DIV, "torch", KL_DIV),
    _divergence("jsd", ("student", "teacher"), torch.log_softmax, kernels.jsd, "eager", _jsd),
    OpBenchmark(
        op="linear_jsd",
        dims=("N", "E", "teacher's E", "V"),
        sizes=tuple((n, 2048, 4096, 128256) for n in (1024, 2048, 4096)),
        cpu_sizes=((16, 8, 12, 100),),
        args=("hidden", "weight", "teacher_hidden", "teacher_weight"),
        inputs=_linear_jsd_inputs,
        row_args=("hidden", "teacher_hidden"),
        work=_linear_jsd_work,
        reference=_of_all_rows(_linear_jsd),
        providers=providers_of(kernels.linear_jsd, eager=_linear_jsd),
    ),
)
