"""4-bit experts: loaded without a 16-bit copy, equal to the model with dequantised weights, and frozen."""

import copy
import importlib.util
import json

import peft
import pytest
import torch
import transformers
from ligertune_kernels.ops.moe import dequantize_nf4
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight, to_nf4
from support.models import tiny_models
from torch import nn

from ligertune.errors import UserError
from ligertune.files.base_model import four_bit_format
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.patching.experts.kernel_experts import KernelExperts
from ligertune.patching.patch import patch
from ligertune.planning.options import ModelOptions

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install bitsandbytes"
)
SIZES = {**tiny_models.BASE, "num_experts_per_tok": 2}
FAMILIES = {
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=4, head_dim=16),
    # transposed and interleaved, with biases; the checkpoint holds 3-D tensors
    "gpt_oss": transformers.GptOssConfig(
        **SIZES, num_local_experts=4, head_dim=16, layer_types=["full_attention"] * 2, rope_parameters=None
    ),
    "granitemoe": transformers.GraniteMoeConfig(**SIZES, num_local_experts=4),  # experts' 3-D `weight` is not gated
}
EXPERTS = 4  # 3-D weights of a model with two layers


def make(family: str, *, implementation: str = "grouped_mm") -> transformers.PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(FAMILIES[family]), dtype=torch.float32, experts_implementation=implementation
        )


def four_bit_and_dense(family: str, implementation: str) -> tuple[nn.Module, nn.Module]:
    """Return a model with 4-bit experts, and one with the same weights dequantised."""
    packed, dense = make(family, implementation=implementation), make(family, implementation=implementation)
    for path, parameter in list(packed.named_parameters()):
        if parameter.ndim == 3:
            owner, _, name = path.rpartition(".")
            weight = to_nf4(parameter)
            setattr(packed.get_submodule(owner), name, nn.Parameter(weight, requires_grad=False))
            whole = weight.dequantize().clone()
            setattr(dense.get_submodule(owner), name, nn.Parameter(whole, requires_grad=False))
    assert sum(isinstance(p, QuantisedWeight) for p in packed.parameters()) == EXPERTS
    return packed, dense


def add_lora(model: nn.Module, **options: object) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **options)
        return peft.get_peft_model(model, config)


def gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = {name: value for name, value in tiny_models.batch().items() if name != "attention_mask"}
    loss = model.train()(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---- compute


@pytest.mark.parametrize(
    ("family", "implementation", "on_experts"),
    [
        ("mixtral", "eager", True),
        ("mixtral", "grouped_mm", False),
        ("qwen3_moe", "grouped_mm", True),
        ("qwen3_moe", "batched_mm", False),
        ("gpt_oss", "eager", False),
        ("gpt_oss", "grouped_mm", True),
        ("granitemoe", "eager", False),
    ],
)
def test_loss_and_adapter_gradients_are_those_of_the_dequantised_weights(family, implementation, on_experts):
    """Exactly, in float32; with PEFT's adapter on experts, too, which reads the weights as parameters."""
    options = {"target_parameters": ["gate_up_proj", "down_proj"]} if on_experts else {}
    (loss, found), (dense_loss, expected) = (
        gradients(add_lora(model, **options)) for model in four_bit_and_dense(family, implementation)
    )
    assert torch.equal(loss, dense_loss) and found.keys() == expected.keys() and found
    assert all(".lora_" in name for name in found) and any("experts" in name for name in found) is on_experts
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_patch_recognises_them_and_computes_the_same(family):
    models = four_bit_and_dense(family, "eager")
    for model in models:
        patch(model)
        assert sum(isinstance(module, KernelExperts) for module in model.modules()) == 2
    (loss, found), (dense_loss, expected) = (gradients(add_lora(model)) for model in models)
    assert torch.equal(loss, dense_loss) and found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_no_dequantised_weight_is_kept_for_the_backward():
    largest = []
    for model in four_bit_and_dense("qwen3_moe", "grouped_mm"):
        weights = {p.numel() for p in model.parameters() if p.ndim == 3}
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(t) or t, lambda t: t):
            model(**tiny_models.batch(rows=1, length=4))
        dense = [t for t in saved if t.numel() in weights and t.ndim == 3 and type(t) is not QuantisedWeight]
        largest.append(len(dense))
    assert largest[0] == 0 < largest[1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_layer_is_dequantised_twice_a_step_and_the_last_one_once(checkpointed, monkeypatch):
    calls, real = [], dequantize_nf4.dequantize_nf4
    monkeypatch.setattr(dequantize_nf4, "dequantize_nf4", lambda *args: calls.append(args) or real(*args))
    model, _ = four_bit_and_dense("qwen3_moe", "grouped_mm")
    calls.clear()
    model = add_lora(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients(model)
    # forward: 2 weights of 2 layers; then the first layer's again. The second forward of a checkpointed layer and its
    # backward share them, and the last layer's are those of its forward.
    assert len(calls) == 2 * 2 + 2


# ---- loading


@needs_bitsandbytes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "stored_as"), [(torch.float32, "nf4"), (torch.bfloat16, "nf4"), (torch.float32, "fp4_single")], ids=str
)
def test_a_loaded_model_has_the_quantised_weights_of_its_checkpoint(family, dtype, stored_as, tmp_path):
    model = make(family).to(dtype)
    model.save_pretrained(tmp_path)
    spec = ModelOptions(model_name_or_path=str(tmp_path))
    loaded = build_model(spec, read_config(spec), dtype=dtype, device="cpu", seed=0, stored_as=stored_as)
    quant_type, double_quant = four_bit_format(stored_as)
    linear = loaded.model.layers[0].self_attn.o_proj.weight.quant_state
    assert (linear.quant_type, linear.nested) == (quant_type, double_quant)
    weights = dict(model.named_parameters())
    experts = {name: p for name, p in loaded.named_parameters() if isinstance(p, QuantisedWeight)}
    assert len(experts) == EXPERTS
    for name, found in experts.items():
        assert found.dtype == dtype and not found.requires_grad and found.shape == weights[name].shape
        expected = to_nf4(weights[name], quant_type=quant_type, double_quant=double_quant).stored
        assert found.stored.quant_type == expected.quant_type
        assert all(torch.equal(a, b) for a, b in zip(found.stored.tensors, expected.tensors, strict=True))
    tokens = torch.arange(3, 30)[None]
    logits = loaded(tokens).logits
    dequantised = loaded.dequantize()
    assert not any(isinstance(p, QuantisedWeight) for p in dequantised.parameters())
    assert torch.equal(dequantised(tokens).logits, logits)
    dequantised.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    assert torch.equal(again(tokens).logits, logits)


@needs_bitsandbytes
def test_random_weights_in_4_bits_have_the_models_distribution_and_one_value_for_each_seed(tmp_path):
    config = copy.deepcopy(FAMILIES["qwen3_moe"])
    config.quantization_config = {"quant_method": "mxfp4"}  # of published weights, which are not read
    config.save_pretrained(tmp_path)
    spec = ModelOptions(model_name_or_path=str(tmp_path), init="random")
    config, state = read_config(spec), torch.get_rng_state()
    first, second, third = (
        build_model(spec, config, dtype=torch.float32, device="cpu", seed=seed, stored_as="nf4") for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    tokens = torch.arange(3, 30)[None]
    assert torch.equal(first(tokens).logits, second(tokens).logits)
    assert not torch.allclose(first(tokens).logits, third(tokens).logits, atol=1e-3)
    for (name, weight), expected in zip(first.named_parameters(), make("qwen3_moe").parameters(), strict=True):
        if weight.is_floating_point() and weight.ndim > 1 and weight.numel() > 4000:  # 5 % is four standard errors
            assert weight.std().item() == pytest.approx(expected.std().item(), rel=0.05), name
    gate_up = [p.dequantize() for p in first.parameters() if isinstance(p, QuantisedWeight)][::2]
    assert not torch.equal(*gate_up)  # each layer has its own values


@needs_bitsandbytes
def test_checkpoints_that_cannot_be_quantised_are_refused(tmp_path):
    model = make("mixtral")
    with torch.no_grad():
        next(p for p in model.parameters() if p.ndim == 3)[2, 5, 7] = float("nan")
    model.save_pretrained(tmp_path)
    spec = ModelOptions(model_name_or_path=str(tmp_path))

    def load(device: str = "cpu") -> None:
        build_model(spec, read_config(spec), dtype=torch.float32, device=device, seed=0, stored_as="nf4")

    with pytest.raises(UserError, match=r"hold NaN or infinity \(model.layers.0.mlp.experts.gate_up_proj\)"):
        load()
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    for found in ({"quant_method": "mxfp4"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        file.write_text(json.dumps({**stored, "quantization_config": found}), encoding="utf-8")
        with pytest.raises(UserError, match=rf"are quantised already \({found['quant_method']}\)"):
            load()
        with pytest.raises(UserError, match="are quantised already"):
            load(device="meta")  # as a plan does
