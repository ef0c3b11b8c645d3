"""Optimizers by recipe name (`train.optim`), built over a model's trainable parameters.

`recipe.optimizer_table` holds the facts that the plan needs (bytes of state, source); this file holds the builders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ligertune.any_types import AnyModule
from ligertune.planning.optimization import Optimizer
from ligertune.training.optim.algorithms import AdamWBf16, GaLoreAdamW, Lion
from ligertune.training.optim.combined import CombinedOptimizer, OffloadedOptimizer, OptimizerInBackward, host_copy_of
from ligertune.training.optim.parameter_groups import ParameterGroup, Settings, group_settings_of, parameter_groups

Builder = Callable[[list[ParameterGroup], Optimizer], torch.optim.Optimizer]


def _adamw(fused: bool) -> Builder:
    return lambda groups, plan: torch.optim.AdamW(groups, lr=0.0, betas=plan.betas, eps=plan.eps, fused=fused)


def _bitsandbytes(name: str) -> Builder:
    def build(groups: list[ParameterGroup], plan: Optimizer) -> torch.optim.Optimizer:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(groups, lr=0.0, betas=plan.betas, eps=plan.eps)

    return build


def _torchao(name: str) -> Builder:
    def build(groups: list[ParameterGroup], plan: Optimizer) -> torch.optim.Optimizer:
        import torch._functorch.config
        import torchao.optim

        base: Any = getattr(torchao.optim, name)

        class ShardableOptimizer(base):  # type: ignore[misc]  # torchao has no types
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


# lr=0.0: `set_learning_rate` sets the rate of each group before each step.
BUILDERS: dict[str, Builder] = {
    "adamw_torch_fused": _adamw(fused=True),
    "adamw_torch": _adamw(fused=False),
    "adamw_bf16": lambda groups, plan: AdamWBf16(groups, betas=plan.betas, eps=plan.eps),
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "paged_adamw_32bit": _bitsandbytes("PagedAdamW32bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_fp8": _torchao("AdamWFp8"),
    # its rate is relative to each parameter's root mean square (Shazeer and Stern 2018)
    "adafactor": lambda groups, plan: torch.optim.Adafactor(groups, lr=0.0),
    # scaled to the size of AdamW's updates, so that one learning rate serves both (Liu et al. 2025, section 2.2)
    "muon": lambda groups, plan: torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw"),
    "galore_adamw": lambda groups, plan: GaLoreAdamW(groups, betas=plan.betas, eps=plan.eps, **asdict(plan.galore)),
    "lion": lambda groups, plan: Lion(groups, betas=plan.betas),
    "sgd": lambda groups, plan: torch.optim.SGD(groups, lr=0.0),
}
FALLBACK = "adamw_torch_fused"  # for the parameters that an optimizer of matrices does not take


def build_optimizer(model: nn.Module, plan: Optimizer) -> torch.optim.Optimizer:
    """Build the plan's optimizer over the trainable parameters, with a rate of 0 that the loop sets before each step.

    Parameters are grouped as `parameter_groups` says. Raises UserError for a group that no parameter is in.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = group_settings_of(model, plan)
    hidden = hidden_parameters(model)
    if plan.in_backward:
        return OptimizerInBackward([_build(plan, hidden, settings, [p]) for p in trained])
    if plan.offload:
        copies = [host_copy_of(p) for p in trained]
        hidden.update([copy for p, copy in zip(trained, copies, strict=True) if p in hidden])
        settings |= {copy: settings[p] for p, copy in zip(trained, copies, strict=True)}
        return OffloadedOptimizer(trained, [_build(plan, hidden, settings, [copy]) for copy in copies])
    return _build(plan, hidden, settings, trained)


def _build(
    plan: Optimizer, hidden: set[nn.Parameter], settings: Settings, trained: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Build one optimizer, or a matrix optimizer such as Muon together with AdamW for all other parameters."""
    own = [p for p in trained if not plan.matrices_only or (p.ndim == 2 and p in hidden)]
    chosen = set(own)
    rest = [p for p in trained if p not in chosen]
    parts = [
        BUILDERS[name](parameter_groups(parameters, settings, plan.weight_decay), plan)
        for name, parameters in ((plan.name, own), (FALLBACK, rest))
        if parameters
    ]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def hidden_parameters(model: AnyModule) -> set[nn.Parameter]:
    """Return all parameters except those of the input embedding and the output head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {p for module in ends if module is not None for p in module.parameters()}
    return {p for p in model.parameters() if p not in outside}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group, times the group's `lr_multiplier`."""
    for group in optimizer.param_groups:
        own = rate * group.get("lr_multiplier", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)  # torchao's compiled step reads this tensor, so it must stay the same one
        else:
            group["lr"] = own
