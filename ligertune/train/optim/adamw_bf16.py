"""AdamW with both states in bfloat16, and everything that is stored there rounded stochastically.

bfloat16 keeps 8 bits: an update below 1/256 of a weight would be lost each time by rounding to nearest, and so would
what beta2 = 0.999 adds to the second moment. Rounded up or down by chance, in proportion to what is cut off, the
stored value is right on average (Zamirai et al. 2020). Arithmetic is in fp32, over pieces of PIECE elements.

The chance is drawn from a generator seeded by the step, not from the global one: it needs no saving to be resumed, and
ranks that hold copies of one weight round it alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STATES = ("exp_avg", "exp_avg_sq")
PIECE = 1 << 24  # elements: six fp32 temporaries of a piece take 400 MB


class AdamWBf16(torch.optim.Optimizer):
    """4 bytes of state a parameter. Weights in fp32 are updated as they are, bfloat16 ones are rounded by chance."""

    def __init__(self, params: list[dict], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state.update({name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in STATES})
                for name in STATES:  # torch loads states in the dtype of the weights, which loses nothing here
                    state[name] = state[name].bfloat16()
                state["step"] += 1
                tensors = parameter, parameter.grad.contiguous(), *(state[name] for name in STATES)
                _update(*(_flat(t) for t in tensors), group=group, step=int(state["step"]))


def _flat(t: Tensor) -> Tensor:
    """A view (N,) of this rank's part."""
    return (t.to_local() if hasattr(t, "to_local") else t).view(-1)


def _update(p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, group: dict, step: int) -> None:
    """One step of p (N,), a piece at a time."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    chance = torch.Generator(device=p.device).manual_seed(step)
    for piece in zip(*(t.split(PIECE) for t in (p, grad, exp_avg, exp_avg_sq)), strict=True):
        wide = [t.float() for t in piece]
        wide[2].lerp_(wide[1], 1 - beta1)
        wide[3].mul_(beta2).addcmul_(wide[1], wide[1], value=1 - beta2)
        denominator = (wide[3] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        updated = wide[0].mul(1 - rate * group["weight_decay"])
        updated.addcdiv_(wide[2], denominator, value=-rate / (1 - beta1**step))
        for stored, value in ((piece[0], updated), (piece[2], wide[2]), (piece[3], wide[3])):
            stored.copy_(rounded_by_chance(value, chance) if stored.dtype is torch.bfloat16 else value)


def rounded_by_chance(value: Tensor, chance: torch.Generator) -> Tensor:
    """fp32 (N,) -> bfloat16 (N,): down or up with a probability that makes the mean right; inf and NaN stay."""
    # the 16 bits that bfloat16 lacks, plus a random number of 16 bits, carry into the kept ones as often as they should
    bits = torch.randint(0, 1 << 16, value.shape, generator=chance, dtype=torch.int32, device=value.device)
    bits.add_(value.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)
