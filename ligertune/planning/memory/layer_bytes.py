"""Memory of special layers, by formula: mixtures of experts, float8 layers, FlashAttention-4.

Experts. N tokens are sent to K experts each, so that S = N·K rows go through an expert. Our op
(`ligertune_kernels.experts`) saves the layer's input x (N, E), the pre-activations z (S, 2F), the router's weights,
the order of the rows, and with LoRA the products with A (S, R). It gathers x again and recomputes the activation a
(S, F) in the backward. transformers' `grouped_mm` saves the gathered tokens (S, E), z, a and the experts' outputs (S,
E).

All buffers have S rows. How the rows are distributed over the experts changes which rows belong to which expert, and
no size: there is no capacity and no padding, so the worst imbalance needs the same memory as a perfect balance.
"""

from __future__ import annotations

from typing import Literal

from ligertune.planning.memory.model_shape import ExpertsShape, LayerShape

# The attention's name in transformers, which would look for a package if it contained "flash".
FA4_OR_DOCUMENT_ATTENTION = "fa4_or_document_attention"
MOST_SUMS = 3 << 29  # bytes; document_attention runs rows whose backward would need more
Float8 = Literal["no", "kernels", "compiled", "eager"]  # ours; torchao's with and without torch.compile


def saved_by_experts(experts: ExpertsShape, hidden: int, itemsize: int, *, fused: bool) -> int:
    """Return the bytes per token that routed experts and router save, in addition to their input."""
    elements = experts.chosen * (2 * experts.mlp + experts.lora) + experts.gates_shared * hidden
    if fused:
        # per row: two orders in int32, the expert, and the router's weight
        index = 8 + (1 if experts.number < 256 else 2) + itemsize
    else:
        # gathered tokens and activations are the inputs of products; the outputs are multiplied by the router's weights
        inputs = (hidden + experts.mlp) * experts.reads_input
        elements += experts.chosen * (hidden + experts.activation + inputs)
        index = 16 + 2 * itemsize  # two permutations in int64, and the weights in both orders
    return elements * itemsize + experts.chosen * index + experts.router


def adapter_copies(experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of one layer's adapters of experts in the compute dtype; the op saves them."""
    return 0 if experts is None or itemsize == 4 else experts.adapter * itemsize


def experts_backward_bytes(
    experts: ExpertsShape, hidden: int, tokens: int, itemsize: int, *, fused: bool, gradients: bool
) -> int:
    """Return the bytes at the widest point of the experts' backward, in addition to what is saved.

    Our op writes dz over z. It has a and the gathered dy while it computes the gradient of the down projection, then
    the gathered x while it computes that of gate and up. gradients: count those of the weights and adapters, which one
    call of the backward computes; otherwise they are counted as states.
    """
    rows = tokens * experts.chosen * itemsize
    new = gradients * new_gradients(experts, itemsize)
    if fused:  # a third of the weights is the down projection's
        return max(rows * (hidden + experts.mlp) + new // 3, rows * hidden + new)
    # the gradient of the weighted outputs, that of the outputs, and their product, whose sum is the router's gradient
    return rows * max(3 * hidden, hidden + 4 * experts.mlp) + new


def new_gradients(experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of the gradients of one layer's experts and their adapters."""
    return 0 if experts is None else experts.trained * itemsize + 4 * experts.adapter


def dequantised_bytes(experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of one layer's 4-bit experts, dequantised: the last two weights are kept."""
    return 0 if experts is None else experts.parameters * itemsize


def saved_by_mixer(layer: LayerShape, itemsize: int, *, fused: bool, fused_norm: bool) -> int:
    """Return the bytes per token that a layer's mixer, if it has one, saves besides the inputs of its projections.

    fused: our kernels compute convolution and recurrence.
    """
    if layer.mixer is None:
        return 0
    return layer.mixer.saved(itemsize, fused=fused, fused_norm=fused_norm, trains=layer.norms_train)


def flash_4_memory(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return the bytes of the fp32 sums: of dq, and of dk and dv if query heads share key heads."""
    return n_tokens * width * 4 * (heads + (2 * key_heads if heads != key_heads else 0))


def float8_copies(layer: LayerShape, float8: Float8) -> int:
    """Return the bytes of one layer's weights in float8, by rows and by columns, which our kernels keep.

    Frozen weights of 16 bits are replaced by them, and need as much.
    """
    if float8 != "kernels" or layer.adapters:
        return 0
    mixing = 2 * layer.query + 2 * layer.key + layer.query * layer.gated
    if layer.mixer is not None:
        mixing += layer.mixer.projected + layer.mixer.values
    return 2 * layer.hidden * (mixing + 3 * layer.dense_mlp)


def float8_saved(layer: LayerShape, float8: Float8, itemsize: int, *, fused_mlp: bool) -> int:
    """Return the bytes per token by which float8 changes what a layer saves: its linear inputs are saved in float8.

    The attention keeps its output, and the linear layer after it a float8 copy. Adapters save their input as before.
    fused_mlp: the input of the down projection is not saved, but computed again.
    """
    if float8 != "kernels" or layer.adapters:
        return 0
    inputs = layer.attn_in * layer.hidden + layer.mlp_out * layer.dense_mlp
    inputs += (layer.mlp_in and layer.experts is None) * layer.hidden + layer.gated_out
    copied = 0 if layer.gated_out else layer.query
    return copied - (itemsize - 1) * inputs - fused_mlp * layer.mlp_out * layer.dense_mlp


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
