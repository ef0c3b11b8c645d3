"""Optimizers by recipe name, on the parameters of a model that train.

What each keeps, and where it comes from, stands in `optimizer_states`; here is how each is built.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ligertune.planning.plan import Optimizer
from ligertune.train.optim.adamw_bf16 import AdamWBf16
from ligertune.train.optim.combined import Combined, SteppedInBackward
from ligertune.train.optim.galore import GaLoreAdamW
from ligertune.train.optim.lion import Lion
from ligertune.train.optim.optimizer_offload import OffloadedOptimizer, twin_of

Build = Callable[[list[dict], Optimizer], torch.optim.Optimizer]


def _adamw(fused: bool) -> Build:
    return lambda groups, plan: torch.optim.AdamW(groups, lr=0.0, betas=plan.betas, eps=plan.eps, fused=fused)


def _adafactor(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
    """Its rate is relative to each parameter's root mean square, as in the paper (Shazeer and Stern 2018)."""
    return torch.optim.Adafactor(groups, lr=0.0)


def _muon(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
    """With updates as large as AdamW's, so that one learning rate serves both (Liu et al. 2025, section 2.2)."""
    return torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw")


def _galore(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
    own = {"rank": plan.galore.rank, "update_proj_gap": plan.galore.update_proj_gap, "scale": plan.galore.scale}
    return GaLoreAdamW(groups, betas=plan.betas, eps=plan.eps, **own)


def _bitsandbytes(name: str) -> Build:
    def build(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(groups, lr=0.0, betas=plan.betas, eps=plan.eps)

    return build


def _torchao(name: str) -> Build:
    def build(groups: list[dict], plan: Optimizer) -> torch.optim.Optimizer:
        import torch._functorch.config
        import torchao.optim

        kind = getattr(torchao.optim, name)

        class Mended(kind):
            """States call themselves float32: FSDP2 takes a view of each, which forgets another dtype.

            The compiled step is not kept on the disk, where torch takes that of one class of states for another's.
            """

            @staticmethod
            def _subclass_zeros(p: torch.Tensor, *others: object) -> torch.Tensor:
                return kind._subclass_zeros(p.new_empty(1, dtype=torch.float32).expand(p.shape), *others)

            def step(self, closure: Callable[[], float] | None = None) -> float | None:
                with torch._functorch.config.patch(enable_autograd_cache=False):
                    return super().step(closure)

        return Mended(groups, lr=0.0, betas=plan.betas, eps=plan.eps, bf16_stochastic_round=True)

    return build


BUILDERS: dict[str, Build] = {
    "adamw_torch_fused": _adamw(fused=True),
    "adamw_torch": _adamw(fused=False),
    "adamw_bf16": lambda groups, plan: AdamWBf16(groups, betas=plan.betas, eps=plan.eps),
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_fp8": _torchao("AdamWFp8"),
    "adafactor": _adafactor,
    "muon": _muon,
    "galore_adamw": _galore,
    "lion": lambda groups, plan: Lion(groups, betas=plan.betas),
    "sgd": lambda groups, plan: torch.optim.SGD(groups, lr=0.0),
}
OTHERS = "adamw_torch_fused"  # what takes the parameters that an optimizer of matrices does not


def build_optimizer(model: nn.Module, plan: Optimizer) -> torch.optim.Optimizer:
    """Over what trains; norms and biases (fewer than two dimensions) are not decayed.

    The loop sets the rate, times a group's `lr_multiplier`, which Medusa heads have, their biases too.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained, heads = [p for _, p in named], {p for name, p in named if name.startswith("medusa_head.")}
    inside = inside_layers(model)
    if plan.in_backward:
        return SteppedInBackward([_build(plan, inside, heads, [p]) for p in trained])
    if plan.offload:
        return _offloaded(plan, inside, heads, trained)
    return _build(plan, inside, heads, trained)


def _offloaded(
    plan: Optimizer, inside: set[nn.Parameter], heads: set[nn.Parameter], trained: list[nn.Parameter]
) -> OffloadedOptimizer:
    parts = []
    for parameter in trained:
        twin = twin_of(parameter)
        of_twin = ({twin} if parameter in known else set() for known in (inside, heads))
        parts.append(_build(plan, *of_twin, [twin]))
    return OffloadedOptimizer(trained, parts)


def _build(
    plan: Optimizer, inside: set[nn.Parameter], heads: set[nn.Parameter], trained: list[nn.Parameter]
) -> torch.optim.Optimizer:
    suited = [p for p in trained if not plan.matrices_only or (p.ndim == 2 and p in inside)]
    chosen = set(suited)
    rest = [p for p in trained if p not in chosen]
    parts = [
        BUILDERS[name](_groups(parameters, heads, plan), plan)
        for name, parameters in ((plan.name, suited), (OTHERS, rest))
        if parameters
    ]
    return parts[0] if len(parts) == 1 else Combined(parts)


def _groups(parameters: list[nn.Parameter], heads: set[nn.Parameter], plan: Optimizer) -> list[dict]:
    groups = []
    for of_heads, multiplier in ((False, 1.0), (True, plan.heads_lr_multiplier)):
        mine = [p for p in parameters if (p in heads) is of_heads]
        own = {"lr_multiplier": multiplier} if multiplier != 1.0 else {}
        groups += [
            {"params": [p for p in mine if p.ndim >= 2], "weight_decay": plan.weight_decay, **own},
            {"params": [p for p in mine if p.ndim < 2], "weight_decay": 0.0, **own},
        ]
    return [group for group in groups if group["params"]]


def inside_layers(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that are neither the input embedding's nor the output head's."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {p for module in ends if module is not None for p in module.parameters()}
    return {p for p in model.parameters() if p not in outside}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """In every group; torchao keeps the rate as a tensor, which must stay the same one."""
    for group in optimizer.param_groups:
        own = rate * group.get("lr_multiplier", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
