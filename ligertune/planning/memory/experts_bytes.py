"""Memory of a mixture of experts in one layer, by formula.

N tokens are sent to K experts each, so that S = N·K rows go through an expert. Our op (`ligertune_kernels.experts`)
saves the layer's input x (N, E), the pre-activations z (S, 2F), the router's weights, the order of the rows, and with
LoRA the products with A (S, R). It gathers x again and recomputes the activation a (S, F) in the backward.
transformers' `grouped_mm` saves the gathered tokens (S, E), z, a and the experts' outputs (S, E).

All buffers have S rows. How the rows are distributed over the experts changes which rows belong to which expert, and
no size: there is no capacity and no padding, so the worst imbalance needs the same memory as a perfect balance.
"""

from __future__ import annotations

from ligertune.planning.memory.model_shape import ExpertsShape


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
    new = gradients * (experts.trained * itemsize + 4 * experts.adapter)
    if fused:  # a third of the weights is the down projection's
        return max(rows * (hidden + experts.mlp) + new // 3, rows * hidden + new)
    # the gradient of the weighted outputs, that of the outputs, and their product, whose sum is the router's gradient
    return rows * max(3 * hidden, hidden + 4 * experts.mlp) + new


def dequantised_bytes(experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of one layer's 4-bit experts, dequantised: the last two weights are kept."""
    return 0 if experts is None else experts.parameters * itemsize
