"""Optimizers by recipe name (`train.optim`), built over a model's trainable parameters.

`recipe.optimizer_table` holds the facts that the plan needs (bytes of state, source); this file holds the builders.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ligertune.planning.optimization import Optimizer
from ligertune.train.optim.adamw_bf16 import AdamWBf16
from ligertune.train.optim.combined import CombinedOptimizer, OptimizerInBackward
from ligertune.train.optim.galore import GaLoreAdamW
from ligertune.train.optim.optimizer_offload import OffloadedOptimizer, host_copy_of

Builder = Callable[[list[dict], Optimizer], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): the sign of a momentum. One state in the gradients' dtype, no square root.

        u = sign(beta1 m + (1 - beta1) g)    w = w - lr (u + weight_decay w)    m = beta2 m + (1 - beta2) g

    Every element moves by the same amount, so its learning rate is 3 to 10 times smaller than AdamW's.
    """

    def __init__(self, params: list[dict], *, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum, grad = state["exp_avg"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(grad, 1 - beta2)


def _adamw(fused: bool) -> Builder:
    return lambda groups, plan: torch.optim.AdamW(groups, lr=0.0, betas=plan.betas, eps=plan.eps, fused=fused)


def _muon(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
    """Scale updates to AdamW's size, so that one learning rate serves both (Liu et al. 2025, section 2.2)."""
    return torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw")


def _galore(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
    own = {"rank": plan.galore.rank, "update_proj_gap": plan.galore.update_proj_gap, "scale": plan.galore.scale}
    return GaLoreAdamW(groups, betas=plan.betas, eps=plan.eps, **own)


def _bitsandbytes(name: str) -> Builder:
    def build(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(groups, lr=0.0, betas=plan.betas, eps=plan.eps)

    return build


def _torchao(name: str) -> Builder:
    def build(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
        import torch._functorch.config
        import torchao.optim

        base = getattr(torchao.optim, name)

        class ShardableOptimizer(base):
            @staticmethod
            def _subclass_zeros(p: torch.Tensor, *others: object) -> torch.Tensor:
                # FSDP2 takes a view of each state, which forgets a dtype other than float32.
                return base._subclass_zeros(p.new_empty(1, dtype=torch.float32).expand(p.shape), *others)

            def step(self, closure: Callable[[], float] | None = None) -> float | None:
                # torch's on-disk cache takes the compiled step of one class of states for another's.
                with torch._functorch.config.patch(enable_autograd_cache=False):
                    return super().step(closure)

        return ShardableOptimizer(groups, lr=0.0, betas=plan.betas, eps=plan.eps, bf16_stochastic_round=True)

    return build


BUILDERS: dict[str, Builder] = {
    "adamw_torch_fused": _adamw(fused=True),
    "adamw_torch": _adamw(fused=False),
    "adamw_bf16": lambda groups, plan: AdamWBf16(groups, betas=plan.betas, eps=plan.eps),
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_fp8": _torchao("AdamWFp8"),
    # its rate is relative to each parameter's root mean square (Shazeer and Stern 2018)
    "adafactor": lambda groups, plan: torch.optim.Adafactor(groups, lr=0.0),
    "muon": _muon,
    "galore_adamw": _galore,
    "lion": lambda groups, plan: Lion(groups, betas=plan.betas),
    "sgd": lambda groups, plan: torch.optim.SGD(groups, lr=0.0),
}
FALLBACK = "adamw_torch_fused"  # for the parameters that an optimizer of matrices does not take


def build_optimizer(model: nn.Module, plan: Optimizer) -> torch.optim.Optimizer:
    """Build the plan's optimizer over the trainable parameters, with a rate of 0 that the loop sets before each step.

    Norms and biases (fewer than two dimensions) get no weight decay. Parameters of Medusa heads, biases included, get
    the group entry `lr_multiplier`.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained, heads = [p for _, p in named], {p for name, p in named if name.startswith("medusa_head.")}
    hidden = hidden_parameters(model)
    if plan.in_backward:
        return OptimizerInBackward([_build(plan, hidden, heads, [p]) for p in trained])
    if plan.offload:
        return _build_offloaded(plan, hidden, heads, trained)
    return _build(plan, hidden, heads, trained)


def _build_offloaded(
    plan: Optimizer, hidden: set[nn.Parameter], heads: set[nn.Parameter], trained: list[nn.Parameter]
) -> OffloadedOptimizer:
    parts = []
    for parameter in trained:
        copy = host_copy_of(parameter)
        copy_sets = ({copy} if parameter in known else set() for known in (hidden, heads))
        parts.append(_build(plan, *copy_sets, [copy]))
    return OffloadedOptimizer(trained, parts)


def _build(
    plan: Optimizer, hidden: set[nn.Parameter], heads: set[nn.Parameter], trained: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Build one optimizer, or a matrix optimizer such as Muon together with AdamW for all other parameters."""
    own = [p for p in trained if not plan.matrices_only or (p.ndim == 2 and p in hidden)]
    chosen = set(own)
    rest = [p for p in trained if p not in chosen]
    parts = [
        BUILDERS[name](_groups(parameters, heads, plan), plan)
        for name, parameters in ((plan.name, own), (FALLBACK, rest))
        if parameters
    ]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _groups(parameters: list[nn.Parameter], heads: set[nn.Parameter], plan: Optimizer) -> list[dict]:
    """Return up to four groups: (other parameters, Medusa heads) x (with, without weight decay)."""
    groups = []
    for in_heads, multiplier in ((False, 1.0), (True, plan.heads_lr_multiplier)):
        mine = [p for p in parameters if (p in heads) is in_heads]
        own = {"lr_multiplier": multiplier} if multiplier != 1.0 else {}
        groups += [
            {"params": [p for p in mine if p.ndim >= 2], "weight_decay": plan.weight_decay, **own},
            {"params": [p for p in mine if p.ndim < 2], "weight_decay": 0.0, **own},
        ]
    return [group for group in groups if group["params"]]


def hidden_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return all parameters except those of the input embedding and the output head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {p for module in ends if module is not None for p in module.parameters()}
    return {p for p in model.parameters() if p not in outside}
