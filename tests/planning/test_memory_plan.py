"""The memory plan: bytes by formula, and the micro-batch that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from ligertune.errors import UserError
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.planning.memory.activation_bytes import CUBLAS_WORKSPACE, ActivationPolicy, layer_bytes
from ligertune.planning.memory.activation_policy import choose_policy
from ligertune.planning.memory.estimate import MemoryEstimate, largest
from ligertune.planning.memory.model_shape import LayerShape, ModelShape
from ligertune.planning.memory.states import NF4_BYTES, state_bytes
from ligertune.planning.micro_batch import choose_batching
from ligertune.planning.options import KernelOptions, MethodOptions
from ligertune.recipe import Recipe

LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
GIB = 2**30


def shape_of(config: transformers.PreTrainedConfig, **method: object) -> ModelShape:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return read_shape(apply_method(model, MethodOptions(**method)))


@pytest.fixture(scope="module")
def shapes() -> dict[str, ModelShape]:
    """Llama-3-8B by method."""
    config = transformers.LlamaConfig(**LLAMA_8B)
    return {method: shape_of(config, type=method) for method in ("full", "lora", "qlora")}


def estimate_of(
    shapes: dict[str, ModelShape], method: str, *, checkpointing: bool = False, **kept: object
) -> MemoryEstimate:
    shape = shapes[method]
    states = state_bytes(shape.parameters, weight_dtype="bfloat16", optim="adamw_torch_fused", method=method)
    return MemoryEstimate(
        states, shape.layer, shape.head, ActivationPolicy(attention="varlen", checkpointing=checkpointing, **kept),
        layers=32, itemsize=2, step_bytes=0, labelled=1.0,
    )  # fmt: skip


def test_states_of_an_8b_model(shapes):
    n = 8_030_261_248
    full, lora, qlora = (estimate_of(shapes, method).states for method in shapes)
    assert (full.weights, full.gradients, full.optimizer) == (2 * n, 2 * n, 4 * n)
    adapter = 4 * shapes["lora"].n_trainable  # float32
    assert (lora.weights, lora.gradients, lora.optimizer) == (2 * n + adapter, adapter, 2 * adapter)
    assert lora.model + lora.optimizer == 3 * adapter
    ends, layers = 2 * 128256 * 4096, 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    norms = n - ends - layers
    assert qlora.weights == pytest.approx(2 * (ends + norms) + layers * NF4_BYTES + adapter, rel=1e-9)


def test_a_layer_saves_what_our_kernels_save(shapes):
    # 4 x E, 2 x query, 2 x key and 3 x F elements of two bytes; a statistic for each head and norm
    assert layer_bytes(shapes["full"].layer, ActivationPolicy(), 2, 1) == 139_264 + 4 * (32 + 2)
    plain = layer_bytes(
        shapes["full"].layer, ActivationPolicy(fused_norm=False, fused_mlp=False, attention="eager"), 2, 1024
    )
    assert plain > 139_264 + 2 * 4096 * 6 + 14336 * 2 + 32 * 1024 * 8 - 1


def test_recomputation_frees_norm_outputs_and_the_gated_product(shapes):
    """45 of 139 kB per token of a Llama-3-8B layer: 2 x E and F elements, also with adapters on all layers."""
    for method in ("full", "lora"):
        saved, without, without_norms = (
            layer_bytes(shapes[method].layer, ActivationPolicy(recompute=recompute), 2, 1)
            for recompute in (False, True, "norms")
        )
        assert saved - without == 2 * (2 * 4096 + 14336) and saved - without_norms == 2 * 2 * 4096
    peaks = [
        estimate_of(shapes, "full", recompute=recompute).peak(4, 2048, accumulates=False) for recompute in (False, True)
    ]
    # One layer's product is recomputed at a time, and the other layers save none.
    tokens = 4 * 2048
    assert peaks[0].total - peaks[1].total >= 31 * tokens * 2 * (2 * 4096 + 14336)
    checkpointed = [estimate_of(shapes, "full", checkpointing=True, recompute=recompute) for recompute in (False, True)]
    assert len({estimate.peak(4, 2048, accumulates=False).total for estimate in checkpointed}) == 1


@pytest.mark.parametrize(
    ("config", "kept", "expected"),
    [
        (transformers.LlamaConfig(**TINY), {"fused_norm": False}, 96),
        (transformers.LlamaConfig(**TINY), {"fused_mlp": False}, 2 * 64),
        (transformers.Olmo2Config(**TINY), {}, 96),  # its linear layers do not read a norm's output
        (transformers.MixtralConfig(**TINY, num_experts_per_tok=2), {}, 64),  # experts save their sorted tokens
    ],
    ids=["eager norms", "eager mlp", "post-norms", "experts"],
)
def test_tensors_that_our_kernels_do_not_compute_are_not_recomputed(config, kept, expected):
    layer = shape_of(config).layer
    assert (
        layer_bytes(layer, ActivationPolicy(**kept), 2, 1)
        - layer_bytes(layer, ActivationPolicy(**kept, recompute=True), 2, 1)
        == 2 * expected
    )


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        ("all-linear", (True, True, True)),
        (["q_proj", "v_proj"], (True, False, False)),
        (["o_proj"], (False, False, False)),
        (["down_proj"], (False, False, True)),
    ],
    ids=str,
)
def test_adapters_save_only_the_inputs_of_their_layers(targets, kept):
    config = transformers.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 1})
    layer = shape_of(config, type="lora", lora_target_modules=targets).layer
    assert (layer.attn_in, layer.mlp_in, layer.mlp_out) == kept


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.Qwen3Config(num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                  num_key_value_heads=2, head_dim=32, vocab_size=64),
         LayerShape(64, 128, 64, 4, 96, norms=2 * 64 + 128 + 64)),
        (transformers.Gemma2Config(num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                   num_key_value_heads=2, head_dim=16, vocab_size=64),
         LayerShape(64, 64, 32, 4, 96, norms=4 * 64)),
        (transformers.MixtralConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                    num_key_value_heads=2, vocab_size=64, num_experts_per_tok=2),
         LayerShape(64, 64, 32, 4, 192, norms=2 * 64, mlp_out=True, routed=2)),
    ],
    ids=["norms of heads", "four norms", "experts"],
)  # fmt: skip
def test_layers_of_other_families(config, expected):
    assert shape_of(config).layer == expected


def test_parts_add_up_and_checkpointing_lowers_the_peak(shapes):
    for method in shapes:
        peaks = [estimate_of(shapes, method, checkpointing=c).peak(4, 2048, accumulates=False) for c in (False, True)]
        assert all(sum(peak.parts().values()) == peak.total for peak in peaks)
        assert peaks[1].total < peaks[0].total
        assert peaks[1].total >= peaks[1].weights + peaks[1].optimizer
    assert estimate_of(shapes, "full").peak(4, 2048, accumulates=True).total >= peaks[0].total


@pytest.mark.parametrize(
    ("trainable", "in_front"),
    [([r"layers\.[67]\."], 6), (["lm_head"], 8), ([r"model\.norm"], 8), (["embed_tokens"], 0), (["o_proj"], 0)],
    ids=str,
)
def test_frozen_first_layers_save_nothing(shapes, trainable, in_front):
    config = transformers.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 8})
    shape = shape_of(config, type="freeze", trainable=trainable)
    assert shape.in_front == in_front
    whole = replace(estimate_of(shapes, "full"), layer=shape.layer, layers=8)
    some, kept = replace(whole, in_front=in_front), layer_bytes(shape.layer, ActivationPolicy(), 2, 2048)
    loss, loss_of_some = (estimate.peak(4, 2048, accumulates=True).phase.activations for estimate in (whole, some))
    assert loss - loss_of_some == min(in_front, 7) * 4 * 2048 * kept
    # Forward 2, backward 4, or 2 without the weight's gradient. Frozen first layers have no backward.
    each = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336
    assert shape.n_matmul_in_front == in_front * each
    usual = 4 * shape.n_matmul + 2 * shape.n_matmul_trainable
    assert shape.flops(tokens=1, squared_lengths=0) == usual - 2 * in_front * each
    assert shape.flops(tokens=0, squared_lengths=1) == 4096 * (6 * 8 - 4 * in_front)


def test_no_first_layers_are_frozen_if_something_before_them_trains(shapes):
    assert [shape.in_front for shape in shapes.values()] == [0, 0, 0]  # adapters in every layer
    tied = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    assert shape_of(tied, type="freeze", trainable=["embed_tokens"]).in_front == 0


@pytest.mark.parametrize("how", [True, "offload", "offload_gate", "offload_both"])
def test_layers_without_checkpointing_save_everything_but_their_input(shapes, how):
    tokens, layer = 4 * 8192, layer_bytes(shapes["full"].layer, ActivationPolicy(), 2, 8192)
    usual = estimate_of(shapes, "full", checkpointing=how)

    def peak(layers: int) -> int:
        return (
            replace(usual, policy=replace(usual.policy, not_checkpointed=layers)).peak(4, 8192, accumulates=False).total
        )

    offloads_inputs = how in ("offload", "offload_both")
    more = tokens * (layer - (0 if offloads_inputs else 2 * 4096))
    assert peak(9) - peak(8) == peak(20) - peak(19) == more
    assert peak(0) == usual.peak(4, 8192, accumulates=False).total
    none = estimate_of(shapes, "full", checkpointing=False).peak(4, 8192, accumulates=False).total
    assert peak(32) == peak(40) == none
    assert peak(1) < peak(0) + more / 2  # the last layer has all its activations in its backward anyway


def test_layers_without_checkpointing_recompute(shapes):
    usual = estimate_of(shapes, "full", checkpointing=True, recompute=True)
    kept = [replace(usual, policy=replace(usual.policy, not_checkpointed=n, recompute=r)).peak(4, 8192,
                                                                                              accumulates=False)
            for n, r in ((10, False), (10, True))]  # fmt: skip
    assert kept[0].total - kept[1].total > 9 * 4 * 8192 * 2 * (2 * 4096 + 14336)


def test_offloaded_bytes(shapes):
    tokens, found = 4 * 8192, {}
    for how in (True, "offload", "offload_gate", "offload_both"):
        estimate = estimate_of(shapes, "full", checkpointing=how)
        found[how] = replace(estimate, policy=replace(estimate.policy, not_checkpointed=2)).host_bytes(4, 8192)
    inputs, gates = 30 * tokens * 2 * 4096, 30 * tokens * 2 * 14336
    assert list(found.values()) == [0, inputs, gates, inputs + gates]


def test_the_peak_in_the_backward_of_the_first_layer():
    """Measured on an H100 with AdamW: 22.31 GiB for 8 layers of Llama-3-8B, 21.91 for 6 layers of Gemma-7B."""
    gemma = {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 6,
             "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}  # fmt: skip
    for config, batch, measured in (
        (transformers.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 8}), (8, 2048), 22.31),
        (transformers.GemmaConfig(**gemma), (4, 4096), 21.91),
    ):
        estimate = replace(estimate_of({"full": shape_of(config)}, "full", checkpointing=True),
                         layers=config.num_hidden_layers, workspace=CUBLAS_WORKSPACE)  # fmt: skip
        peak = estimate.peak(*batch, accumulates=False)
        assert peak.phase.name == "first layer"
        assert peak.total / GIB == pytest.approx(measured, rel=0.01)


def test_fsdp_gathers_the_ends_and_two_layers(shapes):
    """Each of two ranks holds half of the states, and gathers embedding, head and two layers."""
    alone = estimate_of(shapes, "full", checkpointing=True)
    halves = replace(alone.states, weights=alone.states.weights // 2, gradients=alone.states.gradients // 2,
                     optimizer=alone.states.optimizer // 2)  # fmt: skip
    shared = replace(alone, states=halves, shards=2)
    layer = 2 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096)
    assert shared.layer_weights() == pytest.approx(layer, rel=1e-4)
    ends = 2 * 2 * 128256 * 4096
    least = halves.total + ends + 2 * layer
    assert least < shared.peak(1, 512, accumulates=True).total < least + 2 * ends + layer
    assert (
        alone.shards == 1 and shared.peak(1, 512, accumulates=True).total < alone.peak(1, 512, accumulates=True).total
    )


def test_which_gpus_fit_an_8b_model(shapes):
    """As users report: full training needs 80 GB, LoRA almost fills 24 GB, QLoRA fits in 12 GB."""

    def fits(method: str, gib: int) -> bool:
        estimate = estimate_of(shapes, method, checkpointing=True)
        return estimate.fits(1, 2048, accumulates=False, memory=gib * GIB)

    assert fits("full", 80) and not fits("full", 48)
    assert fits("lora", 24) and not fits("lora", 16)
    assert fits("qlora", 12) and not fits("qlora", 6)


def test_largest_by_bisection():
    for limit in (1, 2, 3, 7, 64, 100):
        for most in range(limit + 3):
            assert largest(lambda n, most=most: n <= most, limit=limit) == min(most, limit)


def recipe(**train: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"datasets": [{"path": "d"}]},
            "checkpoint": {"output_dir": "o"},
            "train": {"per_device_train_batch_size": "auto", **train},
        }
    )


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
    changed = recipe().model_copy(update={"method": MethodOptions(**method), "kernels": KernelOptions(recompute=True)})
    assert choose_policy(changed, "sdpa", {"recompute"}).recompute is recomputes
    assert not choose_policy(changed, "sdpa", {"rms_norm"}).recompute


@pytest.mark.parametrize(
    ("wanted", "world", "room", "micro"),
    [(64, 1, 100, 64), (64, 1, 20, 16), (64, 4, 20, 16), (48, 2, 11, 8), (7, 1, 3, 1)],
)
def test_auto_keeps_the_global_batch(wanted, world, room, micro):
    batching = choose_batching(recipe(global_batch_size=wanted), world, lambda rows, accumulates: rows <= room)
    assert (batching.micro_batch_size, batching.global_batch_size) == (micro, wanted)


def test_auto_considers_the_gradients_of_earlier_micro_batches():
    asked = []
    choose_batching(
        recipe(global_batch_size=4), 1, lambda rows, accumulates: asked.append((rows, accumulates)) or rows == 2
    )
    assert asked == [(4, False), (2, True)]


def test_auto_is_refused_if_no_micro_batch_fits():
    with pytest.raises(UserError, match="not even one row fits"):
        choose_batching(recipe(global_batch_size=4), 1, lambda rows, accumulates: False)
    with pytest.raises(UserError, match="not a multiple of 3 processes"):
        choose_batching(recipe(global_batch_size=4), 3, lambda rows, accumulates: True)
    with pytest.raises(UserError, match="are not understood"):
        choose_batching(recipe(global_batch_size=4), 1, None)


def test_temporaries_of_optimizer_steps():
    parameters = shape_of(transformers.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 1})).parameters
    step = {
        name: state_bytes(parameters, weight_dtype="bfloat16", optim=name, method="full").step
        for name in ("adamw_torch_fused", "adamw_torch", "adamw_bf16")
    }
    elements = sum(kind.elements * count for kind, count in parameters)
    assert step == {"adamw_torch_fused": 0, "adamw_torch": 2 * elements, "adamw_bf16": 12 * 2 * (1 << 24)}
    assert state_bytes(parameters, weight_dtype="bfloat16", optim="sgd", method="full").optimizer == 0


def test_float8_adds_copies_of_the_operands_of_one_product(shapes):
    """The widest weight is 4096 x 14336. Gradient and input of a token exist in two memory orders each."""
    tokens, found = 4 * 2048, {}
    for float8 in ("no", "compiled", "eager"):
        estimate = estimate_of(shapes, "full", checkpointing=True, float8=float8)
        found[float8] = estimate.peak(4, 2048, accumulates=True).total
    not_in_place = 2 * tokens * 14336  # the gradient of gate or up, which is not written over it
    copies = 4096 * 14336 + tokens * 2 * (14336 + 4096)
    assert found["compiled"] - found["no"] == not_in_place + copies
    assert found["eager"] - found["compiled"] == 8 * tokens * 14336
