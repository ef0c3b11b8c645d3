"""Compare an op with float64: its error may not exceed that of plain torch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from ligertune_kernels.launcher import INTERPRETED

Op = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

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
) -> None:
    """Run op and reference forward and backward; assert that the op's error is at most `times` the reference's.

    grads: which inputs need a gradient, by default all.
    """
    grads = [True] * len(inputs) if grads is None else grads
    ours, upstream = _run(op, [t.detach() for t in inputs], grads)
    plain, _ = _run(reference, [t.detach() for t in inputs], grads, upstream)
    truth, _ = _run(reference, [t.detach().double() for t in inputs], grads, upstream)
    for name, value in ours.items():
        assert_close(name, value, plain[name], truth[name], inputs[0].dtype, times=times)


def _run(
    f: Op, inputs: list[torch.Tensor], grads: Sequence[bool], upstream: list[torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return outputs and gradients by name, and the upstream gradients they were computed with."""
    leaves = [t.requires_grad_(needed) for t, needed in zip(inputs, grads, strict=True)]
    outputs = f(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(y) for y in outputs] if upstream is None else upstream
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)])
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient {i}": t.grad for i, t in enumerate(leaves) if t.requires_grad}, upstream


def assert_close(
    name: str,
    ours: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    dtype: torch.dtype,
    slack: float = 1.0,
    times: float = AS_MUCH,
) -> None:
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
