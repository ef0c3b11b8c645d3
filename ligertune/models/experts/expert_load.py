"""Load of each expert: how many of the router's choices went to it, counted on the device while a model trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.any_types import AnyModule
from ligertune.models.experts.experts_shape import expert_stacks

DIGITS = 5  # of shares in report.json


class ExpertLoad:
    """Counts of tokens per expert and layer. Hooks on the experts add to them, without a synchronisation of the GPU.

    Evaluation is not counted. A checkpointed layer is counted twice, which changes no share. Padding is counted:
    routers send it to experts, too.
    """

    def __init__(self, model: AnyModule) -> None:
        config = model.config.get_text_config()
        self.auxiliary_loss = auxiliary_losses(config)
        self._counts: dict[str, Tensor] = {}  # (X,) int64 by the experts' name
        device = next(model.parameters()).device
        for prefix, stack in expert_stacks(model, config).items():
            name = prefix.removesuffix(".")
            self._counts[name] = torch.zeros(stack.number, dtype=torch.int64, device=device)
            model.get_submodule(name).register_forward_pre_hook(_counter(self._counts[name]), with_kwargs=True)

    def total(self) -> Tensor | None:
        """Return this rank's counts (layers, X) in float64, or None for a model without experts."""
        counts = list(self._counts.values())
        if not counts:
            return None
        widest = max(len(one) for one in counts)
        padded = [nn.functional.pad(one, (0, widest - len(one))) for one in counts]
        return torch.stack(padded).double()

    def report(self, total: Tensor) -> dict[str, Any] | None:
        """Return the load per layer from counts (layers, X) over all ranks; None if no token was counted.

        imbalance: the largest share of an expert over the mean share; 1 is even. entropy: of the shares, over that of
        an even load. unused: experts that no token was sent to.
        """
        layers = []
        for (name, own), counts in zip(self._counts.items(), total.tolist(), strict=True):
            counts = counts[: len(own)]
            n_choices = sum(counts)
            number = len(counts)
            if not n_choices:
                continue
            shares = [count / n_choices for count in counts]
            even = max(math.log(number), 1e-9)  # log(1) is 0: no 0 / 0 for a single expert
            entropy = -sum(share * math.log(share) for share in shares if share) / even
            layers.append(
                {
                    "layer": name,
                    "experts": number,
                    "min": round(min(shares), DIGITS),
                    "max": round(max(shares), DIGITS),
                    "imbalance": round(max(shares) * number, 3),
                    "entropy": round(entropy, 4),
                    "unused": counts.count(0),
                    "shares": [round(share, DIGITS) for share in shares],
                }
            )
        if not layers:
            return None
        return {"layers": layers, "dropped_tokens": 0, "auxiliary_loss": self.auxiliary_loss}


def _counter(counts: Tensor) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
        if index is None or not module.training:
            return
        # An index outside [0, X) is no expert. On a CPU histc takes floats only, and with CUDA integers are exact.
        index = index.detach().flatten()
        index = index.float() if index.device.type == "cpu" else index.int()
        counts.add_(torch.histc(index, bins=len(counts), min=0, max=len(counts) - 1).to(counts.dtype))

    return count


def auxiliary_losses(config: Any) -> dict[str, float]:
    """Return name -> coefficient of the router losses that the model adds to its loss; empty without any.

    transformers adds them only with `output_router_logits: true` in the model's configuration.
    """
    if not getattr(config, "output_router_logits", False):
        return {}
    names = ("router_aux_loss_coef", "router_z_loss_coef")
    return {name: value for name in names if (value := getattr(config, name, None))}
