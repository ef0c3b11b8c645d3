"""Terms of the memory plan that traces and runs on GPUs have shown, each by what it changes."""

from dataclasses import replace

import pytest
from ligertune_kernels.ops.losses.tiles import MULTIPLE_OF

from ligertune.planning.memory.activation_bytes import (
    ActivationPolicy,
    LayerStack,
    MicroBatch,
    StepBytes,
    loss_bytes,
    loss_workspace,
    saved_bytes,
    step_phases,
)
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.model_shape import HeadShape, LayerShape
from ligertune.planning.memory.states import StateBytes

HIDDEN, MLP, RANK, LAYERS = 512, 1536, 8, 4
TOKENS = 1024
STATE = HIDDEN * TOKENS * 2  # bytes of one hidden state
# adapters on q, k, v, o, gate, up and down
WIDTHS = (*[(HIDDEN, HIDDEN)] * 4, *[(HIDDEN, MLP)] * 2, (MLP, HIDDEN))
LAYER = LayerShape(
    hidden=HIDDEN, query=HIDDEN, key=HIDDEN, heads=4, mlp=MLP, norms=2 * HIDDEN, adapters=RANK * len(WIDTHS),
    adapter_elements=RANK * sum(map(sum, WIDTHS)),
)  # fmt: skip
HEAD = HeadShape(vocab=4096, hidden=HIDDEN, head_trains=False, embedding_trains=False, tied=False)
FUSED = ActivationPolicy(attention="document_attention", fused_lora=True)
BATCH = MicroBatch(TOKENS, TOKENS, TOKENS, accumulates=False, full_rows=True)
STEP = StepBytes(itemsize=2, gradients=0, optimizer_step=0, workspace=0)


def phases_of(policy=FUSED, batch=BATCH, step=STEP, **stack):
    """Return name of a phase -> its bytes."""
    found = step_phases(LAYER, HEAD, policy, batch, step, LayerStack(LAYERS, **stack))
    return {phase.name: phase.total for phase in found}


def test_fused_adapters_keep_copies_of_their_matrices():
    with_copies = saved_bytes(LAYER, FUSED, 2, BATCH)
    assert with_copies - saved_bytes(LAYER, replace(FUSED, fused_lora=False), 2, BATCH) == 2 * LAYER.adapter_elements


@pytest.mark.parametrize(("missing", "copied"), [(0, False), (MULTIPLE_OF - 1, False), (MULTIPLE_OF, True)])
def test_rows_with_labels_are_copied_if_the_loss_computes_fewer(missing, copied):
    labels = TOKENS - missing
    held = labels * HIDDEN * 2
    workspace = loss_workspace(labels, HEAD, 2, needs_dw=False, free=None)
    batch = replace(BATCH, labels=labels)
    assert loss_bytes(HEAD, FUSED, batch, 2, None) == (workspace + held + copied * held, held)
    # where other rows have other labels, a batch may have a few less than the largest number
    assert loss_bytes(HEAD, FUSED, replace(batch, full_rows=False), 2, None) == (workspace + 2 * held, held)


def test_a_recorded_step_has_no_dequantised_weight_in_the_loss():
    usual = phases_of(step=replace(STEP, workspace=1000))
    recorded = phases_of(step=replace(STEP, workspace=1000, recorded_buffer=600))
    assert usual["loss"] - recorded["loss"] == 600
    assert usual["backward"] == recorded["backward"]


def test_the_backward_of_the_last_mlp_holds_its_gradients_and_what_layers_save():
    """Of the hidden states outside the layers, only the gradient of the MLP's output is left."""
    saved = LAYERS * saved_bytes(LAYER, FUSED, 2, BATCH)
    product = TOKENS * MLP * 2  # the gradient of the gated product
    rotary = 2 * 2 * TOKENS * HIDDEN // LAYER.heads
    assert phases_of()["backward"] == saved + rotary + product + STATE


def test_ddp_accumulates_outside_of_its_buckets():
    states = StateBytes(weights=10**9, gradients=2 * 10**8, optimizer=0, trained=2 * 10**8)
    estimate = MemoryEstimate(states, LAYER, HEAD, FUSED, layers=LAYERS, itemsize=2, labelled=1.0)
    ddp = replace(estimate, keeps_gradients=True)

    def peak(one: MemoryEstimate, accumulates: bool) -> int:
        return one.peak(1, TOKENS, accumulates=accumulates).total

    assert peak(ddp, accumulates=True) - peak(estimate, accumulates=True) == states.gradients
    assert peak(ddp, accumulates=False) == peak(estimate, accumulates=True)


def test_fsdp_scatters_the_gradient_of_the_layer_before():
    weights = 10**6
    for stay in (0, LAYERS):
        stack = LayerStack(LAYERS, weights=weights, stay_gathered=stay)
        # two layers, or all and two buffers; in the backward also one gradient
        assert stack.gathered(LAYERS) == max(2, stay + 2) * weights
        assert stack.gathered(1) == (max(2, stay + 2 - (LAYERS - 1)) + 1) * weights
