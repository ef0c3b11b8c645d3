"""GaLore (Zhao et al. 2024, algorithm 2): AdamW on gradients that are projected to rank R; all weights train.

    G (S, L): a matrix's gradient, its shorter side first      P (S, R): its top R left singular vectors, every T steps
    Z = P^T G (R, L)        N = AdamW's update of Z        W = W - rate * scale * P N

States have the size of Z. The paper takes P from a singular value decomposition; here it comes from subspace iteration
on a random start (Halko et al. 2011, algorithm 4.4), which needs only products and a QR of S x R. The start is seeded
by the step, so ranks with copies of one weight, and resumed runs, project it alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OVERSAMPLING = 8  # extra directions of the subspace iteration, which make the R kept ones accurate
ITERATIONS = 2


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW for matrices in a projected space. States and P have the weights' dtype; arithmetic is in fp32.

    rank: R, at most the shorter side. update_proj_gap: T, in steps. scale: of the projected update.
    """

    def __init__(
        self,
        params: list[dict],
        *,
        betas: tuple[float, float],
        eps: float,
        rank: int,
        update_proj_gap: int,
        scale: float,
    ) -> None:
        own = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        super().__init__(params, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        rows, columns = parameter.shape
        weight, grad = (t if rows <= columns else t.T for t in (parameter, parameter.grad))  # (S, L)
        state = self.state[parameter]
        done = int(state["step"]) if state else 0
        if done % group["update_proj_gap"] == 0:
            rank = min(group["rank"], len(grad))
            state["projector"] = top_singular_vectors(grad.float(), rank, seed=done).to(grad.dtype)
        projected = state["projector"].T @ grad  # (R, L)
        if done == 0:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(projected) for name in ("exp_avg", "exp_avg_sq")})
        state["step"] += 1
        direction = _adam(projected, state["exp_avg"], state["exp_avg_sq"], group, step=done + 1)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(state["projector"] @ direction, alpha=-group["lr"] * group["scale"])


def _adam(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, group: dict, *, step: int) -> Tensor:
    """Return Adam's direction (R, L) in the gradient's dtype; update both moments (R, L) in place."""
    beta1, beta2 = group["betas"]
    wide = grad.float()
    mean, square = exp_avg.float().lerp(wide, 1 - beta1), exp_avg_sq.float().lerp(wide * wide, 1 - beta2)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    return mean.div_(1 - beta1**step).div_(square.div_(1 - beta2**step).sqrt_().add_(group["eps"])).to(grad.dtype)


def top_singular_vectors(matrix: Tensor, rank: int, *, seed: int) -> Tensor:
    """Approximate the left singular vectors (S, R) of the R largest singular values of `matrix` (S, L), fp32.

    They are sorted by singular value, and the largest element of each is positive. Both matter because the moments
    survive a new P: the part that belongs to an unchanged direction must keep its row and its sign.
    """
    generator = torch.Generator(device=matrix.device).manual_seed(seed)
    width = min(rank + OVERSAMPLING, len(matrix))
    start = torch.randn(matrix.shape[1], width, generator=generator, device=matrix.device)
    basis = torch.linalg.qr(matrix @ start).Q  # (S, R + OVERSAMPLING)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ (matrix.T @ basis)).Q
    inside = basis.T @ matrix
    _, vectors = torch.linalg.eigh(inside @ inside.T)  # by ascending eigenvalue
    found = basis @ vectors.flip(1)[:, :rank]
    largest = found.gather(0, found.abs().argmax(0, keepdim=True))  # (1, R)
    return found * largest.sign()
