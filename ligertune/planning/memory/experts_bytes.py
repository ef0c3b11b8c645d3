"""Memory of a mixture of experts in one layer, by formula.

N tokens are sent to K experts each, so that S = N·K rows go through an expert. Our op (`ligertune_kernels.experts`)
saves the layer's input x (N, E), the pre-activations z (S, 2F), the router's weights and the order of the rows. It
gathers x again and recomputes the activation a (S, F) in the backward. transformers' `grouped_mm` saves the gathered
tokens (S, E), z, a and the experts' outputs (S, E).

All buffers have S rows. How the rows are distributed over the experts changes which rows belong to which expert, and
no size: there is no capacity and no padding, so the worst imbalance needs the same memory as a perfect balance.
"""

from __future__ import annotations

from ligertune.planning.memory.model_shape import ExpertsShape

# Bytes per row (a token sent to one expert) of the order by expert and of the router's weight.
INDEX_BYTES = 16
GROUPED_MM_INDEX_BYTES = 24  # two permutations in int64, and the sorted weights


def saved_by_experts(experts: ExpertsShape, hidden: int, itemsize: int, *, fused: bool) -> int:
    """Return the bytes per token that routed experts and router save, in addition to their input."""
    elements = experts.chosen * (2 * experts.mlp + experts.lora) + experts.gates_shared * hidden
    index = INDEX_BYTES
    if not fused:
        # gathered tokens and activations are the inputs of products; the outputs are multiplied by the router's weights
        inputs = (hidden + experts.mlp) * experts.reads_input
        elements += experts.chosen * (hidden + experts.activation + inputs)
        index = GROUPED_MM_INDEX_BYTES
    return elements * itemsize + experts.chosen * index + experts.router


def experts_backward_elements(experts: ExpertsShape, hidden: int, *, fused: bool) -> int:
    """Return the elements per token that exist at the widest point of the experts' backward, besides what is saved.

    That is the gathered gradient of the outputs (S, E), the activation a and its gradient (S, F), and dz (S, 2F); or
    dz and the gradient of the gathered tokens (S, E) with the gathered tokens.
    """
    if fused:
        return experts.chosen * max(hidden + 4 * experts.mlp, 2 * hidden + 2 * experts.mlp)
    # the gradient of the weighted outputs, that of the outputs, and their product, whose sum is the router's gradient
    return experts.chosen * max(3 * hidden, hidden + 4 * experts.mlp)


def gradient_bytes(experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of one layer's gradients of expert weights and their adapters, whose gradients are float32.

    One call of the backward computes them all, so they exist while the layer's activations do.
    """
    return 0 if experts is None else experts.trained * itemsize + 4 * experts.adapter


def dequantised_bytes(experts: ExpertsShape | None, itemsize: int) -> int:
    """Return the bytes of one layer's expert weights in the compute dtype, if they are stored in four bits."""
    return experts.parameters * itemsize if experts is not None and experts.quantised else 0
