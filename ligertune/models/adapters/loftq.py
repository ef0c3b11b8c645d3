"""LoftQ (Li et al. 2023): an adapter that starts as the error of the 4-bit weights, as far as its rank reaches.

    W ≈ Q + s B A        Q: the weight in 4 bits, dequantised; s B A: the largest R singular values of W - Q

This is one step of the paper's iteration, as in PEFT's `replace_lora_weights_loftq`, so that Q stays the weight of any
QLoRA run, and the saved adapter a plain one. PEFT leaves out s, which must be 1 there, and computes on CUDA only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from ligertune.models.adapters.four_bit_residual import weight_of
from ligertune.patching.lora.fused_lora import adapted_layers

if TYPE_CHECKING:
    from peft import PeftModel


@torch.no_grad()
def start_from_error(adapted: PeftModel, original: nn.Module) -> int:
    """Set A and B of each adapter on 4-bit weights; return their number. original: the model before quantisation.

    Other adapted layers keep their initial adapters: their weights have no error.
    """
    names = {id(module): name for name, module in adapted.get_base_model().named_modules()}
    layers = [layer for layer in adapted_layers(adapted) if hasattr(layer.get_base_layer().weight, "quant_state")]
    for layer in layers:
        weight = weight_of(original, names[id(layer)])
        frozen = dequantize_module_weight(layer.get_base_layer()).float()
        rank = layer.r["default"]
        b, a = low_rank_factors(weight.to(frozen) - frozen, rank, scale=layer.scaling["default"])
        layer.lora_A["default"].weight.copy_(a)
        layer.lora_B["default"].weight.copy_(b)
    return len(layers)


def low_rank_factors(error: Tensor, rank: int, *, scale: float) -> tuple[Tensor, Tensor]:
    """Return B (F, R) and A (R, E) for which scale * B A is the best approximation of an error (F, E) in float32."""
    u, s, vh = torch.linalg.svd(error, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    missing = rank - len(root)  # of a rank beyond the sizes of the matrix
    b = nn.functional.pad(u[:, :rank] * root, (0, missing))
    a = nn.functional.pad(root[:, None] * vh[:rank], (0, 0, 0, missing))
    return b, a
