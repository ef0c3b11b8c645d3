"""LoRA of experts in split form computes what PEFT's ParamWrapper does, in every layout of the weights."""

import copy

import peft
import pytest
import torch
from ligertune_kernels.ops.moe.experts import ExpertLayout, ExpertProjection, GatedActivation, experts
from ligertune_kernels.ops.moe.quantised_weight import to_nf4
from peft.tuners.lora.layer import ParamWrapper
from support.models.tiny_families import inputs_of, tiny_family
from support.rerun_interpreted import rerun_interpreted
from support.same_training import assert_same, assert_same_training, losses_and_gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.models.trainable import apply_method
from ligertune.patching.experts.expert_lora import (
    ARGUMENTS,
    SplitLora,
    expert_adapters,
    merge_parameters,
    why_not_split,
)
from ligertune.patching.patch import patch, unpatch
from ligertune.planning.options import MethodOptions

X, E, K, N = 4, 64, 2, 13
LAYOUTS = {
    "mixtral": ({}, ExpertLayout()),
    "gpt_oss": (
        {"activation": GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)},
        ExpertLayout(transposed=True, interleaved=True),
    ),
}


def slow(*values: object):
    return pytest.param(*values, marks=pytest.mark.slow)


def wrapped_experts(family: str) -> ParamWrapper:
    """Return the experts of a tiny model with random adapters, as PEFT wraps them."""
    model = apply_method(tiny_family("causal", family), MethodOptions(type="lora", lora_r=3))
    randomise(model)
    return model.base_model.model.model.layers[0].mlp.experts


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    """Return expert indices and weights (N, K); expert 1 gets no token."""
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(X - 1, generator=generator)[:K] for _ in range(N)])
    return torch.where(index == 1, 3, index), torch.rand(N, K, generator=generator)


def outcome(outer: ParamWrapper, call) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of every A and B."""
    x = torch.randn(N, E, generator=torch.Generator().manual_seed(2)).requires_grad_()
    outer.zero_grad()
    y = call(x, *routing())
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in outer.parameters() if p.requires_grad)]


def split(outer: ParamWrapper, options: dict, layout: ExpertLayout):
    base = outer.get_base_layer()

    def call(x, index, weights):
        loras = expert_adapters(outer, transposed=layout.transposed)
        gate_up, down = (
            ExpertProjection(getattr(base, name), getattr(base, f"{name}_bias", None), loras[argument])
            for name, argument in ARGUMENTS.items()
        )
        return experts(x, index, weights, gate_up, down, layout=layout, **options)

    return call


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("family", LAYOUTS)
def test_output_and_gradients_equal_pefts(family):
    outer = wrapped_experts(family)
    expected = outcome(outer, lambda *args: ParamWrapper.forward(outer, *args))
    assert len(expected) == 6  # A and B of two weights
    assert_near(outcome(outer, split(outer, *LAYOUTS[family])), expected)


@pytest.mark.slow
def test_the_kernels_agree_under_the_interpreter():
    rerun_interpreted(__file__, "-k", "output_and_gradients")


def test_weights_that_peft_takes_the_other_way_round():
    """Without `is_transposed` (Llama 4) PEFT takes the outputs of transposed weights for their inputs."""
    outer = wrapped_experts("gpt_oss")
    base = outer.get_base_layer()
    del base.is_transposed
    for wrapper in (outer, outer.base_layer):
        wrapper.in_features, wrapper.out_features = wrapper.out_features, wrapper.in_features
        a, b = wrapper.lora_A["default"], wrapper.lora_B["default"]
        a.weight.data, b.weight.data = (
            torch.randn(a.weight.shape[0], b.weight.shape[0]) / 8, torch.randn(a.weight.shape[1], b.weight.shape[1]) / 8
        )  # fmt: skip
        wrapper._did_swap_in_out_features = True
    delta = outer.get_delta_weight("default")  # (X, F, E)
    a, b, scale = expert_adapters(outer, transposed=True)["down_lora"]
    torch.testing.assert_close(scale * (b @ a).transpose(1, 2), delta)


@pytest.mark.parametrize("family", LAYOUTS)
def test_merging_equals_pefts_in_float32_and_rounds_once_in_bfloat16(family):
    outer = wrapped_experts(family)
    exact = copy.deepcopy(outer)
    exact.merge()
    exact.base_layer.merge()
    merge_parameters(outer)
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(getattr(outer.get_base_layer(), name), getattr(exact.get_base_layer(), name))
    assert outer.merged and outer.base_layer.merged
    narrow = wrapped_experts(family)
    narrow.get_base_layer().to(torch.bfloat16)
    wide = copy.deepcopy(narrow)
    wide.get_base_layer().float()
    for wrapper in (narrow, wide):
        merge_parameters(wrapper)
    for name in ("gate_up_proj", "down_proj"):
        once = getattr(wide.get_base_layer(), name).bfloat16()
        assert torch.equal(getattr(narrow.get_base_layer(), name), once)


# ---- whole models, against PEFT's own adapter on the unpatched model


def pair(family: str, folder, *, patch_first: bool = True, checkpointing: bool = False):
    """Return (patched model with our adapter, plain model with the same adapter loaded by PEFT)."""
    plain = tiny_family("causal", family)
    model = copy.deepcopy(plain)
    if patch_first:
        patch(model)
    if checkpointing:
        checkpoint_layers(model, True)
    model = apply_method(model, MethodOptions(type="lora", lora_r=3, lora_alpha=6.0))
    if not patch_first:
        patch(model)
    randomise(model)
    model.save_pretrained(folder)
    return model.train(), peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).train()


def split_layers(model: nn.Module) -> int:
    return sum(isinstance(module, SplitLora) and why_not_split(module) is None for module in model.modules())


@pytest.mark.parametrize(
    ("family", "n_split", "patch_first"),
    [
        ("mixtral", 4, True), ("mixtral", 4, False), ("gpt_oss", 4, True), slow("aria_text", 4, True),
        ("deepseek_v3", 3 + 3 + 3 * 3, True),  # dense and shared layers
    ],
)  # fmt: skip
def test_a_model_trains_as_with_plain_peft(family, n_split, patch_first, tmp_path):
    model, plain = pair(family, tmp_path, patch_first=patch_first)
    assert split_layers(model) == n_split and split_layers(plain) == 0
    assert_same_training(model, plain, inputs_of(family), use_cache=False)


def test_checkpointed_layers_have_the_same_gradients(tmp_path):
    model, plain = pair("mixtral", tmp_path, checkpointing=True)
    assert_same_training(model, plain, inputs_of("mixtral"), use_cache=False)


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients(tmp_path):
    model, plain = pair("mixtral", tmp_path)
    for layer in model.base_model.model.model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    assert_same_training(model, plain, inputs_of("mixtral"), use_cache=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


class Shapes(TorchDispatchMode):
    """Collect the shapes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.found.add(tuple(result.shape))
        return result


def test_the_sum_of_weight_and_update_is_never_made(tmp_path):
    model, plain = pair("mixtral", tmp_path)
    made = []
    for one in (model, plain):
        weights = {tuple(p.shape) for p in one.parameters() if p.ndim == 3}
        with Shapes() as shapes:
            one(**inputs_of("mixtral"), use_cache=False).loss.backward()
        made.append(bool(weights & shapes.found))
    assert made == [False, True]


@pytest.mark.parametrize("family", LAYOUTS)
def test_bfloat16_experts_have_float32_adapters_and_train_under_autocast(family):
    model = tiny_family("causal", family).to(torch.bfloat16)
    patch(model)
    model = apply_method(model, MethodOptions(type="lora", lora_r=3))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    randomise(model)
    outer = model.base_model.model.model.layers[0].mlp.experts
    exact = copy.deepcopy(outer).float()
    expected = outcome(exact, lambda *args: ParamWrapper.forward(exact, *args))

    def autocast(call):
        def run(x, index, weights):
            with torch.autocast("cpu", torch.bfloat16):
                return call(x.bfloat16(), index, weights.bfloat16()).float()

        return run

    found = outcome(outer, autocast(outer))
    assert {t.dtype for t in found} == {torch.float32}
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < 0.015, errors  # two roundings to bfloat16


def off(model: peft.PeftModel) -> None:
    model.base_model.disable_adapter_layers()


def add_second(model: peft.PeftModel) -> None:
    model.add_adapter("second", model.peft_config["default"])
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def only_second(model: peft.PeftModel) -> None:
    add_second(model)
    model.set_adapter("second")


def both(model: peft.PeftModel) -> None:
    add_second(model)
    model.base_model.set_adapter(["default", "second"])


def merged(model: peft.PeftModel) -> None:
    model.merge_adapter()


def unmerged(model: peft.PeftModel) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def merged_and_off(model: peft.PeftModel) -> None:
    model.merge_adapter()
    model.base_model.disable_adapter_layers()


@pytest.mark.parametrize("family", ["mixtral", slow("gpt_oss"), slow("deepseek_v3")])
@pytest.mark.parametrize("change", [off, only_second, both, merged, unmerged, merged_and_off], ids=lambda c: c.__name__)
def test_switched_merged_and_several_adapters_give_pefts_logits(change, family, tmp_path):
    model, plain = (one.eval() for one in pair(family, tmp_path))
    ids = inputs_of(family)["input_ids"]
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        for one in (model, plain):
            change(one)
        expected = plain(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=2e-5)
        with model.disable_adapter(), plain.disable_adapter():  # as a reference of DPO
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=2e-5)
    assert torch.allclose(before, expected, atol=1e-3) is (change in (merged, unmerged))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_in_4_bits_train_as_dequantised_ones(family):
    found = []
    for dequantised in (False, True):
        model = tiny_family("causal", family)
        for path in [name for name, parameter in model.named_parameters() if parameter.ndim == 3]:
            owner, _, name = path.rpartition(".")
            weight = to_nf4(model.get_parameter(path))
            weight = weight.dequantize().clone() if dequantised else weight
            setattr(model.get_submodule(owner), name, nn.Parameter(weight, requires_grad=False))
        patch(model)
        model = apply_method(model, MethodOptions(type="lora", lora_r=3, lora_alpha=6.0))
        randomise(model)
        assert split_layers(model) == 4
        found.append(losses_and_gradients(model.train(), inputs_of(family), use_cache=False))
    assert any("experts" in name for name in found[0][1])
    assert_same(*found)


def test_unpatch_restores_pefts_wrappers(tmp_path):
    model, _ = pair("mixtral", tmp_path)
    unpatch(model)
    wrappers = {type(module) for module in model.modules() if isinstance(module, ParamWrapper)}
    assert wrappers == {ParamWrapper}


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
