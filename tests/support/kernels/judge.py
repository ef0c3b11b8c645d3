"""Compare an op with float64: its error may not exceed that of plain torch in the same dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import ligertune_kernels
import torch
from ligertune_kernels.launcher import INTERPRETED

Op = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *LOW)

# Relative error of one rounding: half a unit in the last place. The interpreter truncates bf16 at the store instead of
# rounding, which loses up to a whole unit. fp32 results are sums in another order than torch's.
ONE_ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0 ** (-7 if INTERPRETED else -8)}

# Over thousands of numbers the largest errors are similar; in one short row, whose terms cancel, they vary by chance.
AS_MUCH, OF_A_ROW = 1.1, 3.0


def judge(
    op: Op,
    reference: Op,
    inputs: Sequence[torch.Tensor],
    *,
    grads: Sequence[bool] | None = None,
    times: float = AS_MUCH,
    upstream: list[torch.Tensor] | None = None,
    slack: float = 1.0,
) -> None:
    """Run op and reference forward and backward; assert that the op's error is at most `times` the reference's.

    grads: which inputs need a gradient, by default all. upstream: gradients of the outputs, by default random.
    slack: roundings that the op may lose beyond that.
    """
    grads = [True] * len(inputs) if grads is None else grads
    ours, upstream = _run(op, [t.detach() for t in inputs], grads, upstream)
    plain, _ = _run(reference, [t.detach() for t in inputs], grads, upstream)
    truth, _ = _run(reference, [t.detach().double() for t in inputs], grads, upstream)
    for name, value in ours.items():
        assert_close(name, value, plain[name], truth[name], inputs[0].dtype, times=times, slack=slack)


def judge_loss(op: Op, reference: Op, inputs: Sequence[torch.Tensor]) -> None:
    """Judge a loss that computes its gradient in the forward.

    This gradient is rounded in the forward, and again if the upstream gradient is not 1; torch rounds it once. The
    upstream gradient is therefore 1 here. In float16 the division by the number of rows always follows the first
    rounding.
    """
    slack = 2.0 if inputs[0].dtype is torch.float16 else 1.0
    judge(op, reference, inputs, upstream=[torch.ones((), device=inputs[0].device)], slack=slack)


def judge_op(
    op: Op,
    inputs: Sequence[torch.Tensor],
    *constants: Any,
    ours: dict[str, Any] | None = None,
    compare: Callable[[Op, Op, Sequence[torch.Tensor]], None] = judge,
    **options: Any,
) -> None:
    """Judge a public op by the reference of its name, both called as op(*inputs, *constants, **options).

    ours: options of the op alone; with inplace it gets copies, which it may overwrite. compare: judge or judge_loss.
    """
    more = ours or {}
    reference = getattr(ligertune_kernels, f"{op.__name__}_reference")

    def call(*leaves: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        leaves = [t.clone() for t in leaves] if more.get("inplace") else leaves
        return op(*leaves, *constants, **options, **more)

    compare(call, lambda *leaves: reference(*leaves, *constants, **options), inputs)


def _run(
    f: Op, inputs: list[torch.Tensor], grads: Sequence[bool], upstream: list[torch.Tensor] | None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return outputs and gradients by name, and the upstream gradients they were computed with."""
    leaves = [t.requires_grad_(needed) for t, needed in zip(inputs, grads, strict=True)]
    outputs = f(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(y) for y in outputs] if upstream is None else upstream
    torch.autograd.backward(outputs, [g.to(y.dtype, copy=True) for g, y in zip(upstream, outputs, strict=True)])
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient {i}": t.grad for i, t in enumerate(leaves) if t.requires_grad}, upstream


def assert_close(
    name: str, ours: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, *,
    slack: float = 1.0, times: float = AS_MUCH,
) -> None:  # fmt: skip
    """Assert that the error is small in the maximum and the 2-norm, each relative to the truth's norm."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert ours.dtype == plain.dtype, f"{name}: {ours.dtype}, expected {plain.dtype}"
    for norm in (torch.inf, 2):
        size = torch.linalg.vector_norm(truth, norm)
        lost, plain_lost = (torch.linalg.vector_norm(t.double() - truth, norm) for t in (ours, plain))
        allowed = times * plain_lost + slack * ONE_ROUNDING[dtype] * size
        assert lost <= allowed, (
            f"{name}: lost {lost / size:.1e} of {size:.1e} (norm {norm}), torch {plain_lost / size:.1e}"
        )
