"""Choice and conversion of the linear layers that multiply in float8: with our kernels, or with torchao.

The linear layers inside the decoder layers are converted, in full fine-tuning and under LoRA. The output head (its
error would go straight into the loss), embeddings, routers and towers stay unquantised. Weights that train,
gradients, activations and checkpoints keep the model's dtype.

One scale per batch means that rows, and packed documents, change each other's rounding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError
from ligertune.models.float8.float8_linear import to_float8_linears
from ligertune.models.float8.float8_mlp import float8_mlps, gated_projections, to_float8_mlps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# For both sizes of a weight, and for a batch's tokens, the inner size of dW's product: `torch._scaled_mm` refuses
# operands whose rows are no multiples of 16 bytes.
MULTIPLE_OF = 16
ROUTERS = {"gate", "router", "router_gate"}  # in a mixture of experts, small differences choose the expert


@dataclass(frozen=True)
class Float8Linears:
    """The linear layers that use float8, by name, and the number of skipped ones by reason."""

    taken: dict[str, nn.Linear]
    left: Counter[str]

    def counts(self) -> tuple[int, int, str]:
        """Return (layers in float8, layers skipped, reasons), the fields of the plan's kernel line."""
        return len(self.taken), self.left.total(), "; ".join(f"{count} {why}" for why, count in self.left.items())


def float8_linears(model: PreTrainedModel) -> Float8Linears:
    """Choose the linear layers that use float8. Raises UserError if there are none."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    modality = modality_of(model.config)
    taken: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for outer, layer in model.named_modules():
        if type(layer).__name__ not in kinds or not modality.in_language_model(f"{outer}."):
            continue
        for inner, module in layer.named_modules(prefix=outer):
            reason = _why_skipped(inner, module)
            if reason:
                left[inner] = reason
            elif isinstance(module, nn.Linear):
                taken[inner] = module
    found = Float8Linears(taken, Counter(left.values()))
    if not taken:
        raise UserError(
            f"train.fp8: no linear layer of this {type(model).__name__} can multiply in float8"
            f"{f' ({found.counts()[2]})' if left else ''}.",
            hint="Write train.fp8: false.",
        )
    return found


def _why_skipped(name: str, module: nn.Module) -> str | None:
    """Return why a linear layer or an expert stack stays unquantised; None for float8 layers and other modules."""
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
    """Make the chosen linear layers multiply with our kernels, in place; on a CPU float8 is emulated.

    Call it after `patch` and before adapters are added. Weights, names and checkpoints stay the same.
    """
    taken = float8_linears(model).taken
    mlps = float8_mlps(model, taken)
    of_mlps = {projection for mlp in mlps.taken for projection in gated_projections(mlp)}
    to_float8_linears(list(taken.values()), model.device, ungrouped=of_mlps)
    to_float8_mlps(mlps)


def to_torchao_float8(model: PreTrainedModel) -> None:
    """Convert the chosen linear layers to torchao's, in place, keeping weights and names; emulated on a CPU.

    Call it after `patch` and before FSDP2, DDP or a compiled forward. The layers are no longer `nn.Linear`, so no
    kernel overwrites their outputs in place (`patching.mlps.kernel_mlps.gives_new_unseen_output`). Each tensor is
    scaled by its own largest value (torchao's "tensorwise" recipe, its fastest).
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    taken = set(float8_linears(model).taken)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name in taken,
        # Cross-attention multiplies one row per image patch; nothing else pads that number to MULTIPLE_OF.
        config=Float8LinearConfig(
            emulate=model.device.type == "cpu", pad_inner_dim=not modality_of(model.config).is_text
        ),
    )
