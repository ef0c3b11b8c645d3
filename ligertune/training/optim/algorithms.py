"""Optimizers that torch lacks: Lion, AdamW with bfloat16 states, GaLore, and AdamW in our Triton kernel.

What the packages that have them lack (on a CPU with torch 2.13, torchao 0.18, galore-torch 1.0, bitsandbytes 0.50):

- Lion of bitsandbytes gives the same weights bit for bit, but does not step the shards of FSDP2.
- torchao rounds only weights stochastically, not states: after 2,000 small updates of bfloat16 weights they had moved
  3.5 % too far, and 0.4 % too little with AdamWBf16; with torch's AdamW they had not moved at all. Its random bits come
  from the global generator.
- galore-torch stores an object in its state, which torch's restricted reader refuses. Its singular value decomposition
  of a (2048, 8192) gradient takes 39 s on one core, and the subspace iteration here 0.8 s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from ligertune_kernels import AdamWOptions, adamw_step, runs_triton
from ligertune_kernels.launcher import chip_of
from torch import Tensor

from ligertune.training.parallel.distributed import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
# Where the kernel was measured to be faster than torch's fused AdamW: on these chips, and from this mean number of
# elements that a rank holds of a tensor. One launch per tensor takes longer than torch's few below it.
KERNEL_STEP_CHIPS = ("sm90",)
KERNEL_STEP_SIZE = 1 << 22
PIECE = 1 << 24  # elements of AdamWBf16's pieces; the six fp32 temporaries of one take 400 MB
# GaLore: extra directions of the subspace iteration, which make the R kept ones accurate, and its iterations. Share
# of the best P's energy that is kept (1024 x 2048, R 128, singular values that fall as i^-0.5): 78 % without an
# iteration, 97 % with one, 99.0 % with two, 99.5 % with three. Each costs two products and a QR.
OVERSAMPLING = 8
ITERATIONS = 2


class ParameterWise(torch.optim.Optimizer):
    """An optimizer whose `update` changes one parameter that has a gradient. hyperparameters: of all groups."""

    def __init__(self, params: list[dict[str, Any]], **hyperparameters: float | tuple[float, float]) -> None:
        # no default rate: `set_learning_rate` sets that of each group before each step
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, **hyperparameters})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is called
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group, self.state[parameter])

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        raise NotImplementedError


class Lion(ParameterWise):
    """Lion (Chen et al. 2023, algorithm 2): the sign of a momentum. One state in the gradients' dtype, no square root.

        u = sign(beta1 m + (1 - beta1) g)    w = w - lr (u + weight_decay w)    m = beta2 m + (1 - beta2) g

    Every element moves by the same amount, so its learning rate is 3 to 10 times smaller than AdamW's. Needs `betas`.
    """

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
        momentum.lerp_(grad, 1 - beta2)


class AdamWBf16(ParameterWise):
    """AdamW with bfloat16 states: 4 bytes per parameter. What is stored in bfloat16 is rounded stochastically.

    Decoupled weight decay as in Loshchilov and Hutter 2019. bfloat16 keeps 8 bits: round-to-nearest would lose an
    update below 1/256 of a weight each time, and what beta2 = 0.999 adds to the second moment. Stochastic rounding
    rounds up with a probability equal to the fraction that is cut off, so the stored value is right on average
    (Zamirai et al. 2020). Arithmetic is in fp32 over pieces of PIECE elements; fp32 weights stay fp32. Needs `betas`
    and `eps`.

    The random bits come from a generator seeded by the step, not from the global one: a resumed run needs no saved
    state, and ranks with copies of one weight round it alike.
    """

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS})
        for name in MOMENTS:  # load_state_dict casts states to the weights' dtype; casting back is exact
            state[name] = state[name].bfloat16()
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        step = int(state["step"])
        generator = torch.Generator(device=parameter.device).manual_seed(step)
        tensors = (parameter, grad.contiguous(), *(state[name] for name in MOMENTS))
        for piece in zip(*(torch.split(local_shard(t).view(-1), PIECE) for t in tensors), strict=True):
            weight, wide, mean, square = (t.float() for t in piece)
            mean.lerp_(wide, 1 - beta1)
            square.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
            denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            updated = weight.mul(1 - rate * group["weight_decay"])
            updated.addcdiv_(mean, denominator, value=-rate / (1 - beta1**step))
            for stored, value in ((piece[0], updated), (piece[2], mean), (piece[3], square)):
                stored.copy_(stochastic_round(value, generator) if stored.dtype is torch.bfloat16 else value)


def stochastic_round(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 (N,) to bfloat16 (N,), up or down with the probabilities that keep the mean; inf and NaN stay."""
    # A random 16-bit number added to the 16 bits that bfloat16 drops carries into the kept bits with that probability.
    bits = torch.randint(0, 1 << 16, value.shape, generator=generator, dtype=torch.int32, device=value.device)
    bits.add_(value.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


class GaLoreAdamW(ParameterWise):
    """GaLore (Zhao et al. 2024, algorithm 2): AdamW on gradients of matrices, projected to rank R; all weights train.

        G (S, L): a matrix's gradient, its shorter side first      P (S, R): its top R left singular vectors
        Z = P^T G (R, L)        N = AdamW's update of Z        W = W - rate * scale * P N

    Needs `betas`, `eps`, `rank` (R, at most the shorter side), `update_proj_gap` (steps between two computations of P)
    and `scale`. States have the size of Z; they and P have the weights' dtype; arithmetic is in fp32.

    The paper takes P from a singular value decomposition; here it comes from subspace iteration on a random start
    (Halko et al. 2011, algorithm 4.4), which needs only products and a QR of S x R. The start is seeded by the step,
    so ranks with copies of one weight, and resumed runs, project it alike.
    """

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        rows, columns = parameter.shape
        weight, grad = (t if rows <= columns else t.T for t in (parameter, grad))  # (S, L)
        done = int(state["step"]) if state else 0
        if done % group["update_proj_gap"] == 0:
            rank = min(group["rank"], len(grad))
            state["projector"] = top_singular_vectors(grad.float(), rank, seed=done).to(grad.dtype)
        projected = state["projector"].T @ grad  # (R, L)
        if done == 0:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(projected) for name in MOMENTS})
        state["step"] += 1
        direction = _adam(projected, state["exp_avg"], state["exp_avg_sq"], group, step=done + 1)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(state["projector"] @ direction, alpha=-group["lr"] * group["scale"])


def _adam(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, group: dict[str, Any], *, step: int) -> Tensor:
    """Return Adam's direction (R, L) in the gradient's dtype; update both moments (R, L) in place."""
    beta1, beta2 = group["betas"]
    wide = grad.float()
    mean = exp_avg.float().lerp(wide, 1 - beta1)
    square = exp_avg_sq.float().lerp(wide * wide, 1 - beta2)
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


class KernelAdamW(torch.optim.AdamW):
    """AdamW in our Triton kernel (`kernels.optimizer`): one pass over weights, gradients and states, clipping included.

    Its states, state dict and numbers are those of torch.optim.AdamW(fused=True); `grad_scale` divides gradients. On an
    H100 with torch 2.11 a step of Llama-3.2-1B's bfloat16 weights takes 6.3 to 7.4 ms, and torch's fused step 9.1 ms.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._steps: dict[Tensor, int] = {}  # the step count of each parameter, on the host

    @property
    def stepped_by_kernel(self) -> int:
        """Parameters whose last step the kernel did."""
        return len(self._steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps.clear()

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch has an overload for each of the two results
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        on_triton = all(runs_triton(p) for group in self.param_groups for p in group["params"])
        # A loss scaler may skip the step on the device (`found_inf`), which torch's kernel supports.
        if closure is not None or getattr(self, "found_inf", None) is not None or not on_triton:
            self._steps.clear()
            return super().step(closure)
        scale = getattr(self, "grad_scale", None)
        scale = None if scale is None else local_shard(scale)
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(5)]
            trained, grads, means, squares, steps = lists
            # private in torch: it appends to these lists, and makes the states that are missing
            self._init_group(group, trained, grads, means, squares, [], steps)
            if not trained:
                continue
            torch._foreach_add_(steps, 1)
            options = AdamWOptions(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for *tensors, step in zip(*lists, strict=True):
                count = self._count(tensors[0], step)
                adamw_step(*map(local_shard, tensors), options, step=count, grad_scale=scale)
        return None

    def _count(self, param: Tensor, step: Tensor) -> int:
        """Return the step count of `param`. Reading `step` synchronises, so it is read once and then counted here."""
        known = self._steps.get(param)
        self._steps[param] = int(step) if known is None else known + 1
        return self._steps[param]


def kernel_step_pays(optimizer: torch.optim.Optimizer, device: torch.device, *, ranks: int) -> bool:
    """Return whether `kernels.optimizer: auto` takes the kernel: for fused AdamW on large tensors of measured chips.

    ranks: the number among which FSDP2 shards each tensor.
    """
    chip = chip_of(device)
    groups = optimizer.param_groups
    fused = type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in groups)
    if not fused or chip is None or chip.arch not in KERNEL_STEP_CHIPS:
        return False
    sizes = [p.numel() for group in groups for p in group["params"]]
    return sum(sizes) >= KERNEL_STEP_SIZE * len(sizes) * ranks


def with_kernel_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a KernelAdamW with the groups and options of `optimizer`, an AdamW that has not stepped yet."""
    known = inspect.signature(torch.optim.AdamW).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return KernelAdamW(optimizer.param_groups, **options)
