"""Memory of float8 layers: copies of weights, saved inputs, and the operands of one product."""

from __future__ import annotations

from typing import Literal

from ligertune.planning.memory.model_shape import LayerShape

Float8 = Literal["no", "kernels", "compiled", "eager"]  # ours; torchao's with and without torch.compile


def float8_copies(layer: LayerShape, float8: Float8) -> int:
    """Return the bytes of one layer's weights in float8, by rows and by columns, which our kernels keep.

    Frozen weights of 16 bits are replaced by them, and need as much.
    """
    if float8 != "kernels" or layer.adapters:
        return 0
    return 2 * layer.hidden * (2 * layer.query + 2 * layer.key + 3 * layer.dense_mlp)


def float8_saved(layer: LayerShape, float8: Float8, itemsize: int, *, fused_mlp: bool) -> int:
    """Return the bytes per token by which float8 changes what a layer saves: its linear inputs are saved in float8.

    The attention keeps its output, and the linear layer after it a float8 copy. Adapters save their input as before.
    fused_mlp: the input of the down projection is not saved, but computed again.
    """
    if float8 != "kernels" or layer.adapters:
        return 0
    inputs = layer.attn_in * layer.hidden + layer.mlp_out * layer.dense_mlp
    inputs += (layer.mlp_in and layer.experts is None) * layer.hidden
    return layer.query - (itemsize - 1) * inputs - fused_mlp * layer.mlp_out * layer.dense_mlp


def float8_bytes(layer: LayerShape, float8: Float8, tokens: int, *, fused_mlp: bool) -> int:
    """Return the bytes of float8 copies in the backward of the widest linear layer.

    Ours: the output gradient in two memory orders. fused_mlp: the gradients of gate and up in two memory orders, and
    their product in one. torchao: weight, input and output gradient, input and gradient in
    two memory orders each. Without torch.compile the gradient is also cast once per product, through two float32
    copies.
    """
    if float8 == "no":
        return 0
    width = layer.mlp if layer.experts is None else layer.query  # experts are not linear layers
    if float8 == "kernels":
        return tokens * max(2 * width, fused_mlp * 5 * layer.dense_mlp)
    gradient_copies = {"compiled": 2, "eager": 1 + 8 + 1}[float8]
    return layer.hidden * width + tokens * (gradient_copies * width + 2 * layer.hidden)
