"""AdamW with bfloat16 states and stochastic rounding of everything that is stored in bfloat16.

Decoupled weight decay as in Loshchilov and Hutter 2019. bfloat16 keeps 8 bits: round-to-nearest would lose an update
below 1/256 of a weight each time, and what beta2 = 0.999 adds to the second moment. Stochastic rounding rounds up with
a probability equal to the fraction that is cut off, so the stored value is right on average (Zamirai et al. 2020).
Arithmetic is in fp32 over pieces of PIECE elements.

The random bits come from a generator seeded by the step, not from the global one: a resumed run needs no saved state,
and ranks with copies of one weight round it alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STATES = ("exp_avg", "exp_avg_sq")
PIECE = 1 << 24  # elements; its six fp32 temporaries take 400 MB


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with 4 bytes of state per parameter. fp32 weights are updated as they are, bfloat16 weights are rounded."""

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
                for name in STATES:  # load_state_dict casts states to the weights' dtype; casting back is exact
                    state[name] = state[name].bfloat16()
                state["step"] += 1
                tensors = parameter, parameter.grad.contiguous(), *(state[name] for name in STATES)
                _update(*(_flat(t) for t in tensors), group=group, step=int(state["step"]))


def _flat(t: Tensor) -> Tensor:
    """Return a view (N,) of this rank's shard."""
    return (t.to_local() if hasattr(t, "to_local") else t).view(-1)


def _update(p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, group: dict, step: int) -> None:
    """Update p, exp_avg and exp_avg_sq (N,) in place, one piece at a time."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    generator = torch.Generator(device=p.device).manual_seed(step)
    for piece in zip(*(t.split(PIECE) for t in (p, grad, exp_avg, exp_avg_sq)), strict=True):
        wide = [t.float() for t in piece]
        wide[2].lerp_(wide[1], 1 - beta1)
        wide[3].mul_(beta2).addcmul_(wide[1], wide[1], value=1 - beta2)
        denominator = (wide[3] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        updated = wide[0].mul(1 - rate * group["weight_decay"])
        updated.addcdiv_(wide[2], denominator, value=-rate / (1 - beta1**step))
        for stored, value in ((piece[0], updated), (piece[2], wide[2]), (piece[3], wide[3])):
            stored.copy_(stochastic_round(value, generator) if stored.dtype is torch.bfloat16 else value)


def stochastic_round(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 (N,) to bfloat16 (N,), up or down with the probabilities that keep the mean; inf and NaN stay."""
    # A random 16-bit number added to the 16 bits that bfloat16 drops carries into the kept bits with that probability.
    bits = torch.randint(0, 1 << 16, value.shape, generator=generator, dtype=torch.int32, device=value.device)
    bits.add_(value.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)
