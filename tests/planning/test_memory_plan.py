"""The memory plan: bytes by formula, and the micro-batch that fits."""

from dataclasses import replace

import pytest
import torch
import transformers
from ligertune_kernels.ops.distill.linear_jsd import divergence_workspace
from support.quickstart_runs import bare_recipe

from ligertune.models.shape import copied_shape, read_frozen_shape, read_shape
from ligertune.models.trainable import apply_method
from ligertune.planning.batch_layout import choose_batching
from ligertune.planning.memory.activation_bytes import (
    CUBLAS_WORKSPACE,
    ActivationPolicy,
    LayerStack,
    MicroBatch,
    StepBytes,
    backward_bytes,
    divergence_bytes,
    layer_bytes,
    result_bytes,
    step_phases,
)
from ligertune.planning.memory.activation_policy import choose_policy
from ligertune.planning.memory.estimate import CUDA_CONTEXT, INPUT_BYTES, MemoryEstimate, largest
from ligertune.planning.memory.model_shape import ExpertsShape, FrozenModelShape, HeadShape, LayerShape, ModelShape
from ligertune.planning.memory.states import NF4_BYTES, states_of
from ligertune.planning.memory.tiled_bytes import tile_bytes
from ligertune.planning.optimization import make_schedule
from ligertune.planning.options import KernelOptions, MethodOptions
from ligertune.recipe.schema import ParallelSpec

E, F, KV, V, LAYERS = 4096, 14336, 1024, 128256, 32  # of Llama-3-8B; KV: width of keys
LAYER_WEIGHTS = E * (2 * E + 2 * KV) + 3 * E * F
RECOMPUTED = 2 * (2 * E + F)  # bytes per token that recomputation frees: two norms' outputs and the gated product
LLAMA_8B = {"vocab_size": V, "hidden_size": E, "intermediate_size": F, "num_hidden_layers": LAYERS,
            "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
GIB = 2**30


def shape_of(config: transformers.PreTrainedConfig, **method: object) -> ModelShape:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return read_shape(apply_method(model, MethodOptions(**method)))


def llama(layers: int, **method: object) -> ModelShape:
    return shape_of(transformers.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers}), **method)


@pytest.fixture(scope="module")
def shapes() -> dict[str, ModelShape]:
    """Llama-3-8B by method."""
    return {method: llama(LAYERS, type=method) for method in ("full", "lora", "qlora")}


def estimate_of(shape: ModelShape, method: str = "full", **policy: object) -> MemoryEstimate:
    states = states_of(bare_recipe(method), shape.parameters, "bfloat16")
    return MemoryEstimate(
        states, shape.layer, shape.head, ActivationPolicy(attention="varlen", **policy),
        layers=LAYERS, itemsize=2, labelled=1.0,
    )  # fmt: skip


def with_policy(estimate: MemoryEstimate, **changes: object) -> MemoryEstimate:
    return replace(estimate, policy=replace(estimate.policy, **changes))


def total(estimate: MemoryEstimate, rows: int = 4, length: int = 2048, *, accumulates: bool = False) -> int:
    return estimate.peak(rows, length, accumulates=accumulates).total


def bytes_of(layer: LayerShape, length: int = 1, **policy: object) -> int:
    return layer_bytes(layer, ActivationPolicy(**policy), 2, length)


def test_states_of_an_8b_model(shapes):
    n = 8_030_261_248
    full, lora, qlora = (estimate_of(shape, method).states for method, shape in shapes.items())
    assert (full.weights, full.gradients, full.optimizer) == (2 * n, 2 * n, 4 * n)
    assert pytest.approx(4.127, abs=5e-4) == 8 * NF4_BYTES  # bits with double quantisation (QLoRA, section 3)
    adapter = 4 * shapes["lora"].n_trainable  # float32
    assert (lora.weights, lora.gradients, lora.optimizer) == (2 * n + adapter, adapter, 2 * adapter)
    assert lora.model + lora.optimizer == 3 * adapter
    in_layers = LAYERS * LAYER_WEIGHTS
    assert qlora.weights == pytest.approx(2 * (n - in_layers) + in_layers * NF4_BYTES + adapter, rel=1e-9)


def test_a_layer_saves_what_our_kernels_save(shapes):
    # 4 x E, 2 x query, 2 x key and 3 x F elements of two bytes, and a statistic per head and norm
    assert bytes_of(shapes["full"].layer) == 139_264 + 4 * (32 + 2)
    eager = bytes_of(shapes["full"].layer, 1024, fused_norm=False, fused_mlp=False, attention="eager")
    assert eager > 139_264 + 2 * E * 6 + F * 2 + 32 * 1024 * 8 - 1


@pytest.mark.parametrize("trains", [True, False])
def test_eager_norms_save_no_more_than_the_plan_counts(trains):
    """Counted as torch saves it, in transformers' RMSNorm; the estimate for norms that train has two bytes to spare."""
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(E).to(torch.bfloat16).requires_grad_(trains)
    saved = {}

    def pack(tensor):
        if tensor.numel() >= E and tensor is not norm.weight:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(torch.randn(8, E, dtype=torch.bfloat16, requires_grad=True))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 8 / E
    layer = LayerShape(E, E, E, 32, F, norms=E, norms_train=trains)
    counted = (bytes_of(layer, fused_norm=False) - bytes_of(replace(layer, norms=0), fused_norm=False) - 4) / E
    assert (measured, counted) == ((6, 8) if trains else (4, 4))


def test_the_loss_of_transformers_on_an_8b_model_with_adapters(shapes):
    """Measured on an H100, 2 rows of 4096 tokens with kernels.enabled: false: 72.6 GiB."""
    plain = {"fused_norm": False, "fused_mlp": False, "fused_loss": False}
    peak = total(estimate_of(shapes["lora"], "lora", **plain), 2, 4096) / GIB
    assert 72.6 < peak < 1.05 * 72.6


def test_a_frozen_model_adds_its_weights_and_a_teacher_the_loss_of_its_hidden_states(shapes):
    with torch.device("meta"):
        teacher = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA_8B))
    student = estimate_of(shapes["full"])
    taught = read_frozen_shape(teacher, "bfloat16")
    frozen = replace(taught, gives_hidden_states=False)
    assert frozen.weights == student.states.weights
    assert total(replace(student, frozen_model=frozen)) == total(student) + frozen.weights
    with_teacher = replace(student, frozen_model=taught)
    peak = with_teacher.peak(4, 8192, accumulates=False)
    assert sum(peak.parts().values()) == peak.total
    rows = 4 * 8192  # the loss: hidden states of both models, gradients, and logits of 1 GiB
    (loss,) = [phase.loss for phase in with_teacher._phases(rows, 8192, accumulates=False, memory=None)[1:2]]
    assert 2 * rows * 2 * E + 2 * V * E + GIB < loss < 2 * rows * 2 * E + 2 * V * E + 4 * V * E + 1.1 * GIB
    one_layer = with_policy(replace(with_teacher, layers=1), checkpointing=True)
    assert one_layer._phases(rows, 8192, accumulates=False, memory=None)[0].name == "frozen model"


@pytest.mark.parametrize("trains", [True, False])
def test_the_divergence_from_a_teacher_by_formula(trains):
    """Half of 1000 tokens are labelled; the student has 64 and the teacher 96 elements per token, of 2 and 4 bytes."""
    head, batch = HeadShape(vocab=512, hidden=64, head_trains=trains), MicroBatch(1000, 500, 1000, False)
    frozen = FrozenModelShape(weights=7, hidden=96, widest=1, itemsize=4, gives_hidden_states=True)
    teacher_rows, student_rows, weight = 1000 * 96 * 4, 500 * 64 * 2, 512 * 64
    gathered = 500 * (64 * 2 + 96 * 4)
    # 500 rows of both models' logits; the gradient of a small weight is summed in float32
    workspace = 512 * 500 * (2 + 4) + trains * 4 * weight
    fused = divergence_bytes(head, frozen, ActivationPolicy(), batch, 2)
    assert fused == pytest.approx(
        teacher_rows + gathered + workspace + student_rows + trains * 2 * weight, rel=0.05 if trains else 0.03
    )
    assert divergence_bytes(head, frozen, ActivationPolicy(fused_loss=False), batch, 2) == teacher_rows + 512_000 * 18
    # of bfloat16 logits (500, 512), those of the teacher in float32; nothing else without a weight's gradient
    sizes = divergence_workspace(500, 64, 512, torch.bfloat16, torch.float32, needs_dw=False)
    assert sizes == pytest.approx(512 * 500 * 6, rel=0.03)


def test_a_frozen_model_computes_at_its_widest_point_and_leaves_less_for_the_loss(shapes):
    frozen = FrozenModelShape(weights=GIB, hidden=E, widest=50_000, itemsize=2)
    estimate = estimate_of(shapes["lora"], "lora")
    with_copy = replace(estimate, frozen_model=frozen)
    first = with_copy._phases(8192, 8192, accumulates=False, memory=None)[0]
    assert (first.name, first.working) == ("frozen model", 8192 * (50_000 * 2 + INPUT_BYTES))
    free = [one._step_bytes(0, 80 * GIB).free for one in (estimate, with_copy)]
    assert free[0] - free[1] == GIB


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_copied_reference_has_all_weights(method, shapes):
    copied = copied_shape(shapes[method], "bfloat16")
    assert (copied.weights, copied.itemsize) == (2 * shapes[method].n_parameters, 2)
    assert (copied.hidden, copied.widest, copied.gives_hidden_states) == (E, 4 * E + 3 * F, False)


def test_a_loss_in_chunks_needs_the_logits_of_a_chunk(shapes):
    estimate = replace(estimate_of(shapes["lora"], "lora"), loss_chunk=1024)
    (loss,) = [phase.loss for phase in estimate._phases(8192, 8192, accumulates=False, memory=None)[:1]]
    assert loss == 1024 * V * 22 + 2 * 8192 * E * 2  # the head is frozen


@pytest.mark.parametrize("method", ["full", "lora"])
def test_recomputation_frees_norm_outputs_and_the_gated_product(method, shapes):
    """45 of 139 kB per token of a Llama-3-8B layer, also with adapters on all layers."""
    layer = shapes[method].layer
    assert bytes_of(layer) - bytes_of(layer, recompute=True) == RECOMPUTED
    assert bytes_of(layer) - bytes_of(layer, recompute="norms") == 2 * 2 * E
    assert bytes_of(layer) - bytes_of(layer, recompute="mlps") == RECOMPUTED - 2 * 2 * E


def test_recomputation_lowers_the_peak_without_checkpointing_only(shapes):
    saved, recomputed = (estimate_of(shapes["full"], recompute=recompute) for recompute in (False, True))
    # One layer's product is recomputed at a time, and the other layers save none.
    assert total(saved) - total(recomputed) >= (LAYERS - 1) * 4 * 2048 * RECOMPUTED
    assert total(with_policy(saved, checkpointing=True)) == total(with_policy(recomputed, checkpointing=True))
    some = {"checkpointing": True, "not_checkpointed": 10}
    peaks = [total(with_policy(estimate, **some), 4, 8192) for estimate in (saved, recomputed)]
    assert peaks[0] - peaks[1] > 9 * 4 * 8192 * RECOMPUTED


@pytest.mark.parametrize(
    ("config", "policy", "elements"),
    [
        (transformers.LlamaConfig(**TINY), {"fused_norm": False}, 96),
        (transformers.LlamaConfig(**TINY), {"fused_mlp": False}, 2 * 64),
        (transformers.Olmo2Config(**TINY), {}, 96),  # its linear layers do not read a norm's output
        (transformers.MixtralConfig(**TINY, num_experts_per_tok=2), {}, 64),  # experts save their sorted tokens
    ],
    ids=["eager norms", "eager mlp", "post-norms", "experts"],
)
def test_tensors_that_our_kernels_do_not_compute_are_not_recomputed(config, policy, elements):
    layer = shape_of(config).layer
    assert bytes_of(layer, **policy) - bytes_of(layer, **policy, recompute=True) == 2 * elements


@pytest.mark.parametrize(("targets", "saved"), [(["w1", "w3"], (False, True, False)), (["w2"], (False, False, True))])
def test_adapters_on_projections_of_other_names_save_their_inputs_too(targets, saved):
    config = transformers.Lfm2Config(**TINY, layer_types=["full_attention"])
    layer = shape_of(config, type="lora", lora_target_modules=targets).layer
    assert (layer.attn_in, layer.mlp_in, layer.mlp_out) == saved


@pytest.mark.parametrize(
    ("targets", "saved"),
    [
        ("all-linear", (True, True, True)),
        (["q_proj", "v_proj"], (True, False, False)),
        (["o_proj"], (False, False, False)),
        (["down_proj"], (False, False, True)),
    ],
    ids=str,
)
def test_adapters_save_only_the_inputs_of_their_layers(targets, saved):
    layer = llama(1, type="lora", lora_target_modules=targets).layer
    assert (layer.attn_in, layer.mlp_in, layer.mlp_out) == saved


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.Qwen3Config(**TINY, head_dim=32), LayerShape(64, 128, 64, 4, 96, norms=2 * 64 + 128 + 64)),
        (transformers.Gemma2Config(**TINY, head_dim=16), LayerShape(64, 64, 32, 4, 96, norms=4 * 64)),
        (transformers.MixtralConfig(**TINY, num_experts_per_tok=2),
         LayerShape(64, 64, 32, 4, 192, norms=2 * 64, mlp_out=True,
                    experts=ExpertsShape(8, 2, 96, parameters=8 * 3 * 64 * 96, trained=8 * 3 * 64 * 96, router=60,
                                         activation=96))),
    ],
    ids=["norms of heads", "four norms", "experts"],
)  # fmt: skip
def test_layers_of_other_families(config, expected):
    assert shape_of(config).layer == expected


def test_parts_add_up_and_checkpointing_lowers_the_peak(shapes):
    for method, shape in shapes.items():
        usual, checkpointed = (
            estimate_of(shape, method, checkpointing=c).peak(4, 2048, accumulates=False) for c in (False, True)
        )
        assert all(sum(peak.parts().values()) == peak.total for peak in (usual, checkpointed))
        assert checkpointed.weights + checkpointed.optimizer <= checkpointed.total < usual.total
    full = estimate_of(shapes["full"])
    assert total(full, accumulates=True) >= total(full)


@pytest.mark.parametrize(
    ("trainable", "in_front"),
    [([r"layers\.[67]\."], 6), (["lm_head"], 8), ([r"model\.norm"], 8), (["embed_tokens"], 0), (["o_proj"], 0)],
    ids=str,
)
def test_frozen_first_layers_save_nothing(shapes, trainable, in_front):
    shape = llama(8, type="freeze", trainable=trainable)
    assert shape.in_front == in_front
    whole = replace(estimate_of(shapes["full"]), layer=shape.layer, layers=8)
    all_layers, some = (
        estimate.peak(4, 2048, accumulates=True).phase.activations
        for estimate in (whole, replace(whole, in_front=in_front))
    )
    assert all_layers - some == min(in_front, 7) * 4 * 2048 * bytes_of(shape.layer, 2048)
    # Forward 2, backward 4, or 2 without the weight's gradient. Frozen first layers have no backward.
    assert shape.n_matmul_in_front == in_front * LAYER_WEIGHTS
    usual = 4 * shape.n_matmul + 2 * shape.n_matmul_trainable
    assert shape.flops(tokens=1, squared_lengths=0) == usual - 2 * in_front * LAYER_WEIGHTS
    assert shape.flops(tokens=0, squared_lengths=1) == E * (6 * 8 - 4 * in_front)


def test_no_first_layers_are_frozen_if_something_before_them_trains(shapes):
    assert [shape.in_front for shape in shapes.values()] == [0, 0, 0]  # adapters in every layer
    tied = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    assert shape_of(tied, type="freeze", trainable=["embed_tokens"]).in_front == 0
    assert shape_of(tied).n_matmul == shape_of(transformers.LlamaConfig(**TINY)).n_matmul  # the head multiplies
    assert shapes["lora"].n_matmul_trainable == shapes["lora"].n_trainable


@pytest.mark.parametrize("how", [True, "offload", "offload_gate", "offload_both"])
def test_layers_without_checkpointing_save_everything_but_their_input(shapes, how):
    tokens, usual = 4 * 8192, estimate_of(shapes["full"], checkpointing=how)

    def peak(layers: int) -> int:
        return total(with_policy(usual, not_checkpointed=layers), 4, 8192)

    offloads_inputs = how in ("offload", "offload_both")
    more = tokens * (bytes_of(shapes["full"].layer, 8192) - (0 if offloads_inputs else 2 * E))
    assert peak(9) - peak(8) == peak(20) - peak(19) == more
    assert peak(0) == total(usual, 4, 8192)
    assert peak(32) == peak(40) == total(estimate_of(shapes["full"]), 4, 8192)
    assert peak(1) < peak(0) + more / 2  # the last layer has all its activations in its backward anyway


def test_fused_adapters_need_no_memory_for_the_gradients_of_gate_and_up(shapes):
    layer = shapes["lora"].layer
    fused, separate, eager = (
        backward_bytes(layer, ActivationPolicy(**policy), 2, 1)
        for policy in ({"fused_lora": True}, {}, {"fused_lora": True, "fused_mlp": False})
    )
    assert separate - fused == eager - fused == 2 * F
    tiles = [tile_bytes(layer, ActivationPolicy(tile=8, fused_lora=on), 2, 8) for on in (False, True)]
    assert tiles[0] - tiles[1] == 8 * 2 * F


@pytest.mark.parametrize(("attention", "widths"), [("sdpa", 1), ("document_attention", 2)])
def test_results_that_leave_the_device_are_counted_where_the_loss_is_computed(attention, widths, shapes):
    """Those of the last two layers have not left it yet; the statistics of rows stay on it."""
    tokens, found = 8192, {}
    for kind in ("offload", "offload_both"):
        policy = ActivationPolicy(checkpointing=kind, attention=attention)
        estimate = replace(estimate_of(shapes["full"]), policy=policy)
        found[kind] = {phase.name: phase for phase in estimate._phases(tokens, tokens, accumulates=False, memory=None)}
    sums = 4 * 32 * tokens * LAYERS * (widths == 2)
    gates = 2 * tokens * F * 2
    with_results, with_gates = (found[kind]["loss"].activations for kind in ("offload", "offload_both"))
    assert with_results - (with_gates - gates) == 2 * tokens * widths * E * 2 + sums
    policy = ActivationPolicy(checkpointing="offload", attention=attention, tile=4096)
    assert result_bytes(shapes["full"].layer, policy, 2) == 0


def test_offloaded_bytes(shapes):
    found = [
        with_policy(estimate_of(shapes["full"], checkpointing=how), not_checkpointed=2).host_bytes(4, 8192)
        for how in (True, "offload", "offload_gate", "offload_both")
    ]
    inputs, gates = 30 * 4 * 8192 * 2 * E, 30 * 4 * 8192 * 2 * F
    assert found == [0, inputs, gates, inputs + gates]


def test_the_peak_in_the_backward_of_the_first_layer():
    """Measured on an H100 with AdamW: 22.31 GiB for 8 layers of Llama-3-8B, 21.91 for 6 layers of Gemma-7B."""
    gemma = {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 6,
             "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}  # fmt: skip
    for shape, batch, measured in (
        (llama(8), (8, 2048), 22.31),
        (shape_of(transformers.GemmaConfig(**gemma)), (4, 4096), 21.91),
    ):
        usual = estimate_of(shape, checkpointing=True)
        peak = replace(usual, layers=shape.num_hidden_layers, workspace=CUBLAS_WORKSPACE).peak(
            *batch, accumulates=False
        )
        assert peak.phase.name == "first layer"
        assert peak.total / GIB == pytest.approx(measured, rel=0.01)


def test_a_tied_weight_that_accumulates_has_two_new_gradients(shapes):
    """The head's is added to that of earlier micro-batches when the embedding's is computed."""
    layer, step = shapes["full"].layer, StepBytes(2, 0, 0, workspace=0)

    def new_gradients(tied: bool, accumulates: bool) -> int:
        head = HeadShape(hidden=layer.hidden, vocab=1000, tied=tied)
        batch = MicroBatch(16, 16, 16, accumulates)
        phases = step_phases(layer, head, ActivationPolicy(), batch, step, LayerStack(2))
        return next(one.loss for one in phases if one.name == "gradients") // (2 * 1000 * layer.hidden)

    assert (new_gradients(True, True), new_gradients(True, False)) == (2, 1)
    assert (new_gradients(False, True), new_gradients(False, False)) == (1, 0)


def test_fsdp_gathers_the_ends_and_two_layers(shapes):
    """Each of two ranks holds half of the states, and gathers embedding, head and two layers."""
    alone = estimate_of(shapes["full"], checkpointing=True)
    halves = {name: getattr(alone.states, name) // 2 for name in ("weights", "gradients", "optimizer")}
    shared = replace(alone, states=replace(alone.states, **halves), shards=2)
    layer, ends = 2 * (LAYER_WEIGHTS + 2 * E), 2 * 2 * V * E
    assert shared.layer_weights() == pytest.approx(layer, rel=1e-4)
    least, found = shared.states.total + ends + 2 * layer, total(shared, 1, 512, accumulates=True)
    assert least < found < least + 2 * ends + layer
    assert alone.shards == 1 and found < total(alone, 1, 512, accumulates=True)


def test_flops_count_the_experts_that_a_token_meets():
    shape = shape_of(transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2))
    attention, router, experts, head = 64 * (64 + 32 + 32 + 64), 4 * 64, 2 * 3 * 64 * 96, 64 * 64
    assert shape.flops(tokens=1, squared_lengths=0) == 6 * (attention + router + experts + head)


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_gathers_three_layers_in_the_backward(tied, shapes):
    """The layer that computes, the one that is prefetched, and the one whose gradients are reduced."""
    layer, head = shapes["full"].layer, replace(shapes["full"].head, tied=tied)
    batch, step = MicroBatch(2048, 2048, 2048, accumulates=False), StepBytes(2, 0, 0, workspace=0)
    alone, shared = (
        step_phases(layer, head, ActivationPolicy(checkpointing=True), batch, step, LayerStack(4, weights=bytes_))
        for bytes_ in (0, 10**9)
    )
    gathered = {one.name: other.working - one.working for one, other in zip(alone, shared, strict=True)}
    end = 2 * V * E
    assert (gathered["loss"], gathered["backward"]) == (2 * 10**9 + end, 3 * 10**9 + tied * end)


@pytest.mark.parametrize(("method", "enough", "too_little"), [("full", 80, 48), ("lora", 24, 16), ("qlora", 12, 6)])
def test_which_gpus_fit_an_8b_model(method, enough, too_little, shapes):
    """As users report: full training needs 80 GB, LoRA almost fills 24 GB, QLoRA fits in 12 GB."""
    estimate = estimate_of(shapes[method], method, checkpointing=True)
    found = [estimate.fits(1, 2048, accumulates=False, memory=gib * GIB) for gib in (enough, too_little)]
    assert found == [True, False]
    peak = total(estimate, 1, 2048)  # the planner adds 4 % for fragmentation
    found = [estimate.fits(1, 2048, accumulates=False, memory=CUDA_CONTEXT + round(peak * m)) for m in (1.041, 1.039)]
    assert found == [True, False]


def test_largest_by_bisection():
    for limit in (1, 2, 3, 7, 64, 100):
        for most in range(limit + 3):
            assert largest(lambda n, most=most: n <= most, limit=limit) == min(most, limit)


@pytest.mark.parametrize(
    ("method", "recomputes"),
    [
        ({"type": "full", "lora_dropout": 0.1}, True),
        ({"type": "lora"}, True),
        ({"type": "lora", "lora_dropout": 0.1}, False),
        ({"type": "qlora", "use_dora": True}, False),
    ],
    ids=str,
)
def test_adapters_that_copy_their_input_do_not_recompute(method, recomputes):
    changed = bare_recipe().model_copy(
        update={"method": MethodOptions(**method), "kernels": KernelOptions(recompute=True)}
    )
    assert choose_policy(changed, "sdpa", {"recompute"}).recompute is recomputes
    assert not choose_policy(changed, "sdpa", {"rms_norm"}).recompute


def test_a_share_of_the_steps_warms_up_rounded_up():
    train = bare_recipe(num_train_epochs=1, warmup_ratio=0.25)
    schedule = make_schedule(train, rows=10, global_batch_size=2)
    assert (schedule.total_steps, schedule.warmup_steps) == (5, 2)


def test_context_parallel_ranks_share_their_rows(shapes):
    shared = bare_recipe(global_batch_size=8, per_device_train_batch_size=2)
    found = choose_batching(shared.model_copy(update={"parallel": ParallelSpec(cp_size=2)}), 4)
    assert (found.micro_batch_size, found.accumulation, found.row_ranks) == (2, 2, 2)
    estimate = replace(estimate_of(shapes["full"]), cp_size=2, longest_document=10**6)
    assert estimate.visible_keys(100) == 250  # of 200 tokens, rank 0 reads 50 + 200: its pieces are the ends


def test_temporaries_of_optimizer_steps():
    parameters = llama(1).parameters
    states = {
        name: states_of(bare_recipe(optim=name), parameters, "bfloat16")
        for name in ("adamw_torch_fused", "adamw_torch", "adamw_bf16", "sgd")
    }
    elements = sum(kind.elements * count for kind, count in parameters)
    assert [found.step for found in states.values()][:3] == [0, 2 * elements, 12 * 2 * (1 << 24)]
    assert states["sgd"].optimizer == 0


def test_float8_adds_copies_of_the_operands_of_one_product(shapes):
    """The widest weight is E x F. Gradient and input of a token exist in two memory orders each."""
    tokens = 4 * 2048
    no, compiled, eager = (
        total(estimate_of(shapes["full"], checkpointing=True, float8=float8), accumulates=True)
        for float8 in ("no", "compiled", "eager")
    )
    not_in_place = 2 * tokens * F  # the gradient of gate or up, which is not written over it
    assert compiled - no == not_in_place + E * F + tokens * 2 * (F + E)
    assert eager - compiled == 8 * tokens * F


def test_our_float8_keeps_two_copies_of_each_weight_and_saves_linear_inputs_in_one_byte(shapes):
    full, lora = (estimate_of(shapes[name], name, float8="kernels") for name in ("full", "lora"))
    assert full.peak(4, 2048, accumulates=True).weights - full.states.weights == 2 * LAYERS * LAYER_WEIGHTS
    assert lora.peak(4, 2048, accumulates=True).weights == lora.states.weights  # copies instead of the weights
    layer = shapes["full"].layer
    saved = bytes_of(layer, float8="kernels") - bytes_of(layer)
    # The inputs of attention, MLP and down_proj take a byte less; that of o_proj has a float8 copy.
    assert saved == -(E + E + F) + E


def test_float8_mlps_do_not_save_their_product(shapes):
    policies = [ActivationPolicy(float8="kernels", float8_mlp=on) for on in (True, False)]
    fused, separate = (layer_bytes(shapes["full"].layer, policy, 2, 1) for policy in policies)
    assert fused - separate == -F
    fused, separate = (backward_bytes(shapes["full"].layer, policy, 2, 1) for policy in policies)
    # In 16 bits the gradient of the product, not those of gate and up; in float8 the gradients of gate and up by rows
    # and by columns, and the product, not one gradient by rows and by columns.
    assert fused - separate == (2 + 5 * 1 - 2 * 2 - 2 * 1) * F
    lora = [backward_bytes(shapes["lora"].layer, policy, 2, 1) for policy in policies]
    assert lora[0] == lora[1]
