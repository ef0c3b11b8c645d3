"""Linear layers that multiply in float8, by torchao: the decoder layers' own, and no others.

    y = x W'        dx = dy W        dW = dy' x        each of two operands in float8, added up in float32

x and W are cast to e4m3 (3 bits of mantissa), dy to e5m2 (2, and a wider range), where a product reads them. A tensor
has one scale, from its largest value: torchao's "tensorwise" recipe, its fastest. Weights, their gradients, what goes
from layer to layer and what autograd keeps stay in the model's dtype, and so do checkpoints. The output head, where an
error would go straight into the loss, embeddings, routers and the part that sees are left as they are.

One scale for all rows of a batch means that rows, and the documents in them, change each other's rounding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ligertune.errors import UserError
from ligertune.vision.families import family_of, part_of, sees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MULTIPLE_OF = 16  # of both sizes of a weight, and of a batch's tokens, which are the inner size of dW's product
ROUTERS = {"gate", "router", "router_gate"}  # of a mixture: their small differences choose an expert


@dataclass(frozen=True)
class Float8Linears:
    """Names of those that float8 takes, and how many of the layers' others are left, by reason."""

    taken: tuple[str, ...]
    left: Counter[str]

    def counts(self) -> tuple[int, int, str]:
        """(taken, left, why those were left), as the plan's line has it."""
        return len(self.taken), self.left.total(), "; ".join(f"{count} {why}" for why, count in self.left.items())


def float8_linears(model: PreTrainedModel) -> Float8Linears:
    """The linear layers of a model that float8 takes; a UserError where there are none."""
    kinds, family = set(getattr(model, "_no_split_modules", None) or ()), family_of(model.config)
    taken: dict[str, None] = {}
    left: dict[str, str] = {}
    for outer, layer in model.named_modules():
        if type(layer).__name__ not in kinds or (family and part_of(family, f"{outer}.") != "language_model"):
            continue
        for inner, module in layer.named_modules(prefix=outer):
            reason = _refusal(inner, module)
            if reason:
                left[inner] = reason
            elif isinstance(module, nn.Linear):
                taken[inner] = None
    found = Float8Linears(tuple(taken), Counter(left.values()))
    if not taken:
        raise UserError(
            f"train.fp8: no linear layer of this {type(model).__name__} can multiply in float8"
            f"{f' ({found.counts()[2]})' if left else ''}.",
            hint="Write train.fp8: false.",
        )
    return found


def _refusal(name: str, module: nn.Module) -> str | None:
    """Why a module of a layer stays as it is although it multiplies; None of others."""
    if not isinstance(module, nn.Linear):
        experts = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        return f"{type(module).__name__}: its experts are no linear layers" if experts else None
    leaf, (out_features, in_features), parts = name.rpartition(".")[2], module.weight.shape, set(name.split("."))
    if parts & ROUTERS:
        return f"{leaf}: chooses experts"
    if "experts" in parts:
        return f"{leaf}: an expert gets any number of tokens"
    if in_features % MULTIPLE_OF or out_features % MULTIPLE_OF:
        return f"{leaf}: {in_features} x {out_features}, not multiples of {MULTIPLE_OF}"
    return None


def to_float8(model: PreTrainedModel) -> None:
    """Let the linear layers that can multiply in float8 from now on; on a CPU that is emulated.

    Behind what recognises layers by what they compute, before FSDP2 or DDP wrap them, and before a compiled layer runs.
    They keep their weights and names. They are another class than `nn.Linear`, so that nothing is written over what
    they gave (`model.sole_reader`).
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    taken = set(float8_linears(model).taken)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name in taken,
        # cross-attention to pictures reads as many rows as those have, which nothing pads
        config=Float8LinearConfig(emulate=model.device.type == "cpu", pad_inner_dim=sees(model.config)),
    )
