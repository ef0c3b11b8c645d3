"""Subject: AdamW's step on one tensor of weights."""

from __future__ import annotations

import torch

from ligertune.bench.case import Case, Provider, Subject, Tensors, Work, compiled, function, ours

NUMBERS = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def _inputs(case: Case, device: torch.device) -> Tensors:
    """Weights, their gradient, and both states as a run has them: the squares are positive."""
    made = [torch.randn(case.sizes, dtype=case.dtype, device=device) for _ in range(4)]
    return *made[:3], made[3].abs() + 0.1


def _plain(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """The new weights and nothing in place."""
    import ligertune_kernels

    stepped = param.clone()
    ligertune_kernels.adamw_step_reference(stepped, grad, exp_avg.clone(), exp_avg_sq.clone(), **NUMBERS)
    return stepped


def _ours(kernels, case: Case, param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, squares: torch.Tensor):
    kernels.adamw_step(param, grad, exp_avg, squares, **NUMBERS)
    return param


def _work(case: Case) -> Work:
    """Four tensors read and three written."""
    return Work((7.0 * case.sizes[0] * case.sizes[1] * case.dtype.itemsize, 0.0))


EAGER: Provider = function("eager", _plain)
ADAMW_STEP = Subject(
    op="adamw_step",
    dims=("N", "E"),
    axis="N",
    sizes=((4096, 4096), (14336, 4096), (128256, 4096)),
    small=((16, 8), (64, 24)),
    args=("param", "grad", "exp_avg", "exp_avg_sq"),
    inputs=_inputs,
    rows=("param", "grad", "exp_avg", "exp_avg_sq"),
    work=_work,
    plain=lambda case, args: _plain,
    providers=(ours("ours", _ours, overwrites=True), EAGER, compiled(EAGER)),
    modes=("forward",),
)
