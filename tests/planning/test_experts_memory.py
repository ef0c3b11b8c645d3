"""The memory plan of mixtures of experts: parameters, saved bytes, gradients, dense layers."""

from dataclasses import replace

import pytest
import torch
import transformers
from support.models.tiny_families import tiny_family
from support.quickstart_runs import bare_recipe
from support.rerun_interpreted import RUNS_TRITON, rerun_interpreted

from ligertune.models.experts.experts_shape import expert_stacks, read_experts
from ligertune.models.shape import read_shape, text_layers
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy, layer_bytes
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.layer_bytes import saved_by_experts
from ligertune.planning.memory.model_shape import ExpertsShape, ModelShape
from ligertune.planning.memory.states import states_of
from ligertune.planning.optimization import optimizer_notes

QWEN3_30B = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
             "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
             "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoe")


def shape_of(config: transformers.PreTrainedConfig) -> ModelShape:
    with torch.device("meta"):
        return read_shape(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def estimate_of(shape: ModelShape, method: str = "full", **policy: object) -> MemoryEstimate:
    return MemoryEstimate(
        states_of(bare_recipe(method), shape.parameters, "bfloat16"), shape.layer, shape.head,
        ActivationPolicy(attention="varlen", **policy), layers=shape.num_hidden_layers, itemsize=2, labelled=1.0,
        other_layers=shape.other_layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (transformers.Qwen3MoeConfig(**QWEN3_30B), 30.53, 3.35),
        (transformers.MixtralConfig(vocab_size=32000), 46.70, 12.88),
        (transformers.DeepseekV3Config(), 671.03, 37.55),
        (transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32), 20.91, 4.19),
    ],
    ids=["Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3", "gpt-oss-20b"],
)
def test_total_and_active_parameters_are_the_published_ones(config, total, active):
    """As the model cards say: 30.5B and 3.3B, 46.7B and 12.9B, 671B and 37B, 20.9B and 3.6B without the embedding."""
    shape = shape_of(config)
    assert (shape.n_parameters / 1e9, shape.n_active / 1e9) == pytest.approx((total, active), abs=0.005)


def test_a_dense_model_has_no_number_of_active_parameters():
    assert shape_of(transformers.LlamaConfig(num_hidden_layers=1)).n_active is None


def saved_bytes(model: torch.nn.Module, block: torch.nn.Module, tokens: int, hidden: int) -> int:
    """Return the bytes that autograd saves in the block's forward, without its parameters and its input."""
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in [x, *model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def counted_and_saved(model: torch.nn.Module, policy: ActivationPolicy, tokens: int) -> tuple[int, int]:
    """Return the bytes of a block with experts by the plan, and as autograd saves them, without the block's input."""
    layer, last = read_shape(model).layer, text_layers(model)[-1]
    (prefix,) = expert_stacks(last, model.config)
    block = last.get_submodule(prefix.removesuffix(".experts."))
    nothing = replace(layer, experts=None, mlp=0, mlp_in=True, mlp_out=False)
    both = (layer_bytes(one, policy, 4, 1) for one in (replace(layer, mlp_in=True), nothing))
    with_block, without = both
    return tokens * (with_block - without), saved_bytes(model, block, tokens, model.config.hidden_size)


@pytest.mark.parametrize("trains", [True, False], ids=["full", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_of_a_block_without_our_kernels(family, trains):
    """Measured with transformers' grouped_mm; the plan may count up to 5 % more, and at most 2 % less."""
    model = tiny_family("causal", family).requires_grad_(trains)
    model.set_experts_implementation("grouped_mm")
    counted, saved = counted_and_saved(model, ActivationPolicy(fused_mlp=False, fused_experts=False), 1024)
    assert 0.98 * saved <= counted <= 1.05 * saved, counted / saved


@pytest.mark.skipif(not RUNS_TRITON, reason="the reference saves more: the next test runs this one again")
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_of_a_block_with_our_kernels(family):
    """The op saves also the end of each expert's rows and a map of tiles, which do not grow with the tokens."""
    model = tiny_family("causal", family)
    patch(model)
    counted, saved = counted_and_saved(model, ActivationPolicy(), 64)
    assert counted == pytest.approx(saved, rel=5e-3)


@pytest.mark.slow
def test_the_bytes_of_our_kernels_under_the_interpreter():
    rerun_interpreted(__file__, "-k", "with_our_kernels")


def test_our_op_saves_less_than_half_of_grouped_mm():
    experts = shape_of(transformers.Qwen3MoeConfig(**QWEN3_30B)).layer.experts
    ours, theirs = (saved_by_experts(experts, 2048, 2, fused=fused) for fused in (True, False))
    assert ours == 8 * (2 * 768 * 2 + 8 + 1 + 2) + experts.router
    assert ours < 0.4 * theirs


def test_gradients_of_a_layers_experts_exist_with_its_activations():
    """A layer of Qwen3-30B-A3B has 604M expert parameters: 1.1 GiB of gradients at once."""
    config = transformers.Qwen3MoeConfig(**{**QWEN3_30B, "num_hidden_layers": 2})
    shape = shape_of(config)
    assert shape.layer.experts.trained == shape.layer.experts.parameters == 128 * 3 * 768 * 2048
    trained = estimate_of(shape)
    frozen = replace(trained, layer=replace(shape.layer, experts=replace(shape.layer.experts, trained=0)))
    backward, other = (
        next(phase for phase in estimate._phases(64, 64, accumulates=False, memory=None) if phase.name == "backward")
        for estimate in (trained, frozen)
    )
    assert backward.working - other.working == pytest.approx(2 * 128 * 3 * 768 * 2048, rel=1e-3)


def test_first_dense_layers_save_what_a_dense_layer_saves():
    config = transformers.DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=3, n_routed_experts=16)
    shape = shape_of(config)
    ((dense, number),) = shape.other_layers
    assert (number, dense.mlp, dense.experts) == (3, 18432, None)
    assert shape.layer.experts.shared == 2048 and shape.layer.query == 128 * 192
    mixed = estimate_of(shape)
    policy = mixed.policy
    saved = [layer_bytes(layer, policy, 2, 512) * 512 for layer in (shape.layer, dense)]
    loss, all_sparse = (
        next(p for p in estimate._phases(512, 512, accumulates=False, memory=None) if p.name == "loss").activations
        for estimate in (mixed, replace(mixed, other_layers=()))
    )
    assert all_sparse - loss == 3 * (saved[0] - saved[1])


def test_layers_with_experts_at_every_second_place_are_counted():
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "num_hidden_layers": 6}
    shape = shape_of(transformers.Qwen2MoeConfig(**sizes, mlp_only_layers=[1]))
    assert shape.other_layers[0][1] == 4 and shape.layer.experts.number == 8 and shape.layer.experts.gates_shared


def test_a_router_in_float32_saves_a_copy_of_its_input_if_it_trains():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Glm4MoeConfig(num_hidden_layers=2, n_routed_experts=8), dtype=torch.bfloat16
        )
    layer = text_layers(model)[-1]
    copies = [
        read_experts(model.config, layer.requires_grad_(trains)).router >= 4 * model.config.hidden_size
        for trains in (True, False)
    ]
    assert copies == [True, False]


def test_experts_that_a_token_does_not_use_cost_no_flops():
    few, many = (
        shape_of(transformers.GptOssConfig(num_hidden_layers=1, num_local_experts=number)) for number in (8, 32)
    )
    router = 2880 * (32 - 8)
    assert many.n_matmul - few.n_matmul == router


def test_no_imbalance_changes_the_saved_bytes():
    """All tokens on one expert: transformers' buffers, like ours, have one row per token and chosen expert."""
    model = tiny_family("causal", "mixtral")
    model.set_experts_implementation("grouped_mm")
    experts = text_layers(model)[-1].mlp.experts
    x, weights = torch.randn(64, 64, requires_grad=True), torch.ones(64, 2, requires_grad=True)
    sizes = []
    for index in (torch.zeros(64, 2, dtype=torch.long), torch.arange(128).reshape(64, 2) % 4):
        saved = {}

        def pack(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            experts(x, index, weights)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    assert sizes[0] == sizes[1]


def test_adapters_of_experts_save_two_small_products():
    experts = ExpertsShape(8, 2, 96, adapter=1000, lora=32)
    without = replace(experts, adapter=0, lora=0)
    assert experts.reads_input and not without.reads_input
    assert saved_by_experts(experts, 64, 2, fused=True) - saved_by_experts(without, 64, 2, fused=True) == 2 * 32 * 2


@pytest.mark.parametrize(("method", "gib"), [("lora", 57), ("qlora", 15.6)])
def test_states_of_qwen3_30b_with_lora(method, gib):
    """30.5B parameters: 57 GiB in bf16. In NF4 the embedding, the head, routers and norms stay in 16 bits."""
    shape = shape_of(transformers.Qwen3MoeConfig(**QWEN3_30B))
    assert states_of(bare_recipe(method), shape.parameters, "bfloat16").weights / 2**30 == pytest.approx(gib, abs=0.3)


def test_a_note_tells_that_matrix_optimizers_leave_experts_to_adamw():
    mixture, dense = shape_of(transformers.Qwen3MoeConfig(**QWEN3_30B)), shape_of(transformers.LlamaConfig())
    (note,) = optimizer_notes("muon", mixture)
    assert "train.optim: muon" in note and "(95% of what trains), and AdamW updates them" in note
    assert optimizer_notes("galore_adamw", mixture) and not optimizer_notes("lion", mixture)
    assert not optimizer_notes("muon", dense)
    frozen = replace(mixture, parameters=tuple((replace(kind, trains=False), n) for kind, n in mixture.parameters))
    assert not optimizer_notes("muon", frozen)
