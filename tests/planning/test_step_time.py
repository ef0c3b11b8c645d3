"""Predicted time of a step, against numbers by hand, for a GPU whose kernels all reach the copy and matmul rates."""

from dataclasses import replace

import pytest
import torch
import transformers
from support.quickstart_runs import bare_recipe

from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.planning.memory.activation_bytes import ActivationPolicy
from ligertune.planning.memory.states import states_of
from ligertune.planning.options import MethodOptions
from ligertune.planning.time.gpu_rates import GpuRates
from ligertune.planning.time.step_time import (
    BACKWARD,
    FOUR_BIT_BYTES,
    HIDDEN,
    HOST_LINK_BANDWIDTH,
    LAYER_SECONDS,
    NETWORK_BYTES,
    NVLINK_BYTES,
    RECORDED_LAYER_SECONDS,
    SUSTAINED,
    WHOLE_STEP,
    SharedModel,
    StepWork,
    step_time,
)

LAYERS, E, F, V, HEADS, KEYS, WIDTH = 2, 64, 160, 1000, 4, 2, 16
Q, K = HEADS * WIDTH, KEYS * WIDTH
IN_LAYER = E * Q + 2 * E * K + Q * E + 3 * E * F
TOKENS, PAIRS = 1000.0, 1000.0 * 250  # documents of 250 tokens
COPY, MATMUL, ADAM = 1e9, 1e12, 5e8
REACHED = SUSTAINED * MATMUL  # by the layers' products
OPS = ("add_rms_norm", "linear_cross_entropy", "document_attention", "dequantize_nf4", "experts", "gated_delta_rule")
RATES = GpuRates(
    copy=COPY,
    matmul=MATMUL,
    linear=((1.0, 1.0, MATMUL),),
    experts=((1.0, 1.0, MATMUL),),
    shares=dict.fromkeys(OPS, (((1, 1, 1, 1, 1), 1.0),)),
    optimizer=ADAM,
    device="a GPU",
)
CONFIG = {"hidden_size": E, "intermediate_size": F, "num_hidden_layers": LAYERS, "vocab_size": V,
          "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "head_dim": WIDTH,
          "tie_word_embeddings": False}  # fmt: skip


def work(method: str = "full", **changes) -> StepWork:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)
        shape = read_shape(apply_method(model, MethodOptions(type=method)))
    states = states_of(bare_recipe(method), shape.parameters, "bfloat16")
    made = StepWork(shape, ActivationPolicy(), states, TOKENS, PAIRS, labels=400.0, accumulation=1)
    return replace(made, **changes)


def time_of(method: str = "full", **changes):
    return step_time(work(method, **changes), RATES)


def scaled(seconds: float) -> object:
    return pytest.approx(WHOLE_STEP * seconds)


def test_a_full_step():
    found = time_of()
    assert found.products == scaled(6 * LAYERS * IN_LAYER * TOKENS / REACHED)
    assert found.attention == scaled(7 * LAYERS * Q * PAIRS / MATMUL)  # two products forward, five backward
    per_layer = 2 * 8 * E + 4 * (Q + K) + 8 * F  # norms, rotary embeddings, gated product
    assert found.elementwise == scaled(2 * LAYERS * per_layer * TOKENS / COPY)
    assert found.loss == scaled(6 * 400 * V * E / MATMUL)
    assert found.gaps == pytest.approx(LAYERS * LAYER_SECONDS)
    n = (
        work().shape.n_parameters
    )  # clipping and AdamW: gradients four times, weights and two moments twice, in bfloat16
    assert found.update == pytest.approx((4 + 2 + 4) * 2 * n / ADAM)
    assert found.total == pytest.approx(sum(vars(found).values()))


def test_adapters_have_no_gradients_of_the_frozen_weights():
    found = time_of("lora")
    trained = work("lora").shape.n_matmul_trainable
    assert 0 < trained < LAYERS * IN_LAYER
    assert found.products == scaled((4 * (LAYERS * IN_LAYER + trained) + 2 * trained) * TOKENS / REACHED)
    assert found.loss == scaled(4 * 400 * V * E / MATMUL)
    states = work("lora").states  # adapters, their gradients and moments are float32
    assert found.update == pytest.approx((4 * states.gradients + 2 * states.trained + 2 * states.optimizer) / ADAM)


@pytest.mark.parametrize(("how", "left_out"), [(True, E * F), ("offload", E * F + Q * E)])
def test_checkpointed_layers_run_again_without_their_last_product(how, left_out):
    plain = time_of()
    again = time_of(policy=ActivationPolicy(checkpointing=how))
    repeated = 2 * LAYERS * (IN_LAYER - left_out) * TOKENS / REACHED
    assert again.products - plain.products == scaled(repeated)
    attends = 2 * LAYERS * Q * PAIRS / MATMUL
    assert again.attention - plain.attention == scaled(attends if how is True else 0)
    half = time_of(policy=ActivationPolicy(checkpointing=how, not_checkpointed=1))
    assert half.products == pytest.approx((plain.products + again.products) / 2)


def test_recomputed_norms_and_products_cost_their_bytes():
    plain, norms, both = (time_of(policy=ActivationPolicy(recompute=kind)) for kind in (False, "norms", True))
    assert norms.elementwise - plain.elementwise == scaled(2 * LAYERS * 4 * E * TOKENS / COPY)
    assert both.elementwise - norms.elementwise == scaled(2 * LAYERS * 3 * F * TOKENS / COPY)


def test_accumulated_micro_batches_repeat_all_but_the_update():
    one, three = time_of(), time_of(accumulation=3)
    assert three.products == pytest.approx(3 * one.products) and three.gaps == pytest.approx(3 * one.gaps)
    gradients = work().states.gradients
    assert three.update - one.update == pytest.approx(2 * 3 * gradients / COPY)


def test_the_gpu_waits_for_launches_and_copies_that_take_longer():
    plain = time_of()
    of_gpu = plain.total - plain.update
    assert time_of(host_seconds=0.5 * of_gpu).host == 0
    recorded = time_of(host_seconds=of_gpu + 1.0, recorded=True)  # a CUDA graph replays the launches
    assert recorded.host == 0 and recorded.gaps == pytest.approx(LAYERS * RECORDED_LAYER_SECONDS)
    assert time_of(host_seconds=of_gpu + 1.0, accumulation=2).host == pytest.approx(2.0)
    slow = time_of(policy=ActivationPolicy(checkpointing="offload"), tokens=1e9, squared_lengths=0.0, labels=0.0)
    copied = 2 * LAYERS * 1e9 * 3 * E * 2 / HOST_LINK_BANDWIDTH
    computed = slow.products + slow.elementwise + slow.gaps
    assert slow.offload == pytest.approx(max(0.0, copied - computed))


def test_weights_in_four_bits_are_dequantised_for_each_use():
    assert time_of("qlora", four_bits=10**6).dequantise == scaled(2 * 10**6 * FOUR_BIT_BYTES / COPY)
    checkpointed = time_of("qlora", four_bits=10**6, policy=ActivationPolicy(checkpointing=True))
    assert checkpointed.dequantise == scaled(3 * 10**6 * FOUR_BIT_BYTES / COPY)


LARGE = 10**12  # bytes


def exchanged(accumulation: int = 1, gradients: int = LARGE, **ranks) -> float:
    """Return the seconds that a step waits for the other ranks, without the copies of what they exchange."""
    states = replace(work().states, weights=LARGE, gathered=LARGE, gradients=gradients)
    shared = SharedModel(**ranks)
    found = time_of(states=states, ranks=shared, accumulation=accumulation).communication
    copied = gradients
    if shared.shards > 1:
        copied = accumulation * ((1 + shared.reshards) * LARGE + shared.shards * gradients)
    return found - 2 * copied / COPY


@pytest.fixture
def hidden() -> float:
    """Seconds of a micro-batch's computation that hide what the ranks exchange."""
    alone = time_of()
    assert alone.communication == 0
    return HIDDEN * (alone.total - alone.update)


def test_replicas_sum_their_gradients_once_a_step(hidden):
    of_sums = 2 * 3 / 4 * LARGE / NVLINK_BYTES
    waited = pytest.approx(of_sums - BACKWARD * hidden, rel=1e-6)
    assert exchanged(world_size=4) == waited
    assert exchanged(world_size=4, accumulation=3) == waited


def test_sharded_weights_are_gathered_in_each_micro_batch(hidden):
    gradients = LARGE // 4  # a rank's part
    twice, once = (3 / 4 * number * LARGE / NVLINK_BYTES for number in (3, 2))
    shared = {"world_size": 4, "shards": 4, "gradients": gradients, "accumulation": 2}
    assert exchanged(**shared) == pytest.approx(2 * (twice - hidden), rel=1e-6)
    assert exchanged(**shared, reshards=False) == pytest.approx(2 * (once - hidden), rel=1e-6)


def test_a_copy_in_each_node_sends_only_its_gradients_over_the_network(hidden):
    gradients = LARGE // 4
    both = {"world_size": 8, "nodes": 2, "gradients": gradients}
    inside = 3 / 4 * 3 * LARGE / NVLINK_BYTES
    between = 2 * 1 / 2 * LARGE / NETWORK_BYTES
    assert exchanged(**both, shards=4) == pytest.approx(inside - hidden + between, rel=1e-6)
    whole = 7 / 8 * (2 * LARGE + 8 * gradients) / NETWORK_BYTES
    assert exchanged(**both, shards=8) == pytest.approx(whole - hidden, rel=1e-6)
    copies_of_one_node = {**both, "nodes": 1, "shards": 4}
    assert exchanged(**copies_of_one_node) == pytest.approx(inside - hidden + gradients / NVLINK_BYTES, rel=1e-6)


def test_what_the_computation_hides_costs_only_its_copies():
    small = replace(work().states, gradients=1000, gathered=1000)
    found = time_of(states=small, ranks=SharedModel(world_size=4, shards=4)).communication
    assert found == pytest.approx(2 * (2 * 1000 + 4 * 1000) / COPY)


def mixture() -> StepWork:
    """Return a step of four experts, two for each token, in each layer."""
    with torch.device("meta"):
        config = transformers.MixtralConfig(**CONFIG, num_local_experts=4, num_experts_per_tok=2)
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
        shape = read_shape(apply_method(model, MethodOptions(type="full")))
    return replace(work(), shape=shape)


def test_no_product_is_faster_than_in_a_long_step():
    """Alone, products of few rows run at a higher clock."""
    fast = replace(RATES, linear=((1.0, 1.0, 2 * MATMUL),))
    assert step_time(work(), fast).products == time_of().products
    slow = replace(RATES, linear=((1.0, 1.0, REACHED / 2),))
    assert step_time(work(), slow).products == pytest.approx(2 * time_of().products)


def test_experts_compute_at_the_rate_of_their_rows():
    """Each expert has 500 of the 1,000 tokens, at half of the rate that it has for ten times as many."""
    width = (E * F) ** 0.5
    rates = replace(RATES, experts=((width, 500.0, MATMUL / 2), (width, 5000.0, MATMUL)))
    slow = step_time(mixture(), rates).products - step_time(mixture(), RATES).products
    assert slow == scaled(6 * LAYERS * 2 * 3 * E * F * TOKENS / MATMUL)


def test_attention_has_the_rate_of_the_nearest_head_dimension_and_of_the_length():
    rows = (((4, 250, 16), 0.5), ((4, 250, 64), 0.25), ((1, 1000, 16), 1.0))
    found = step_time(work(), replace(RATES, shares={**RATES.shares, "document_attention": rows}))
    assert found.attention == pytest.approx(2 * time_of().attention)
