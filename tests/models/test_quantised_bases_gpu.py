"""Quantised bases on a GPU: two steps of LoRA on each format against PEFT on the dense weights, and memory."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from support.models.packed_checkpoints import PACKINGS, Packing, write_packed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from ligertune.models.load import build_model
from ligertune.models.quantised_bases.base_formats import PackedLayout
from ligertune.models.quantised_bases.packed_linear import PackedLinear
from ligertune.models.read_config import read_config
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions, ModelOptions

pytestmark = pytest.mark.gpu

STEPS = 2
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RELATIVE = 1e-2  # of the loss: sums in bfloat16


def write_dense(folder: Path, base: Path, truth: dict[str, Tensor]) -> None:
    """Write a packed base as a model with dense weights."""
    shutil.copytree(base, folder)
    save_file(truth, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))


def adapted_by_peft(model: nn.Module) -> nn.Module:
    """Return PEFT's LoRA on all linear layers, with its own code."""
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=LAYERS, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def our_model(folder: Path, *, stored_as: str | None = None, fused: bool) -> nn.Module:
    spec = ModelOptions(model_name_or_path=str(folder))
    model = build_model(spec, read_config(spec), dtype=torch.bfloat16, device="cuda", seed=0, stored_as=stored_as)
    patch(model)
    kind = "qlora" if stored_as in ("nf4", "fp4") else "lora"
    method = MethodOptions(type=kind, lora_r=4, lora_alpha=4, load_in_8bit=stored_as == "int8")
    return apply_method(model, method, seed=1, fused=fused)


def two_losses(model: nn.Module, start: dict[str, Tensor]) -> list[float]:
    """Train two steps from given adapters in bfloat16's autocast; return the loss of each, and that after them."""
    for name, value in start.items():
        model.get_parameter(name).data = value.clone().to("cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(start)
    optimizer = torch.optim.SGD(trained, lr=0.2)
    ids = torch.randint(3, 500, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for _ in range(STEPS + 1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        found.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def milliseconds(call: Callable[[], object]) -> float:
    """Return the mean time of 20 calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(20):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20


def start_of(model: nn.Module) -> dict[str, Tensor]:
    """Return adapters with A and B that are not zero."""
    generator = torch.Generator().manual_seed(1)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: 0.02 * torch.randn(p.shape, generator=generator) for name, p in named}


def compare(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=RELATIVE)
    assert found[-1] < found[0] and abs(found[0] - found[-1]) > 1e-3  # it has trained


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", PACKINGS)
def test_two_steps_have_the_losses_of_peft_on_the_dense_weights(name, fused, tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS[name])
    write_dense(tmp_path / "dense", tmp_path / "base", truth)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, device_map={"": "cuda"})
    theirs = adapted_by_peft(plain)
    start = start_of(theirs)
    compare(two_losses(our_model(tmp_path / "base", fused=fused), start), two_losses(theirs, start))


# W8A8 and FP8 quantise activations in the package, which a loss shows: weights alone are in these two
@pytest.mark.parametrize("name", ["int4", "int4_asymmetric"])
def test_two_steps_have_the_losses_of_compressed_tensors(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    write_packed(tmp_path / "base", PACKINGS[name])
    config = LlamaConfig.from_pretrained(tmp_path / "base")
    config.quantization_config["dequantize"] = True
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", config=config, dtype=torch.bfloat16, device_map={"": "cuda"}
    )
    plain.requires_grad_(False)
    theirs = adapted_by_peft(plain)
    start = start_of(theirs)
    compare(two_losses(our_model(tmp_path / "base", fused=True), start), two_losses(theirs, start))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_what_hqq_dequantises_on_the_gpu(bits, tmp_path):
    hqq = pytest.importorskip("hqq.core.quantize")
    write_packed(tmp_path / "base", PACKINGS["hqq" if bits == 4 else "hqq_8bit"])
    spec = ModelOptions(model_name_or_path=str(tmp_path / "base"))
    layer = build_model(spec, read_config(spec), dtype=torch.float32, device="cuda", seed=0).model.layers[0].mlp.up_proj
    parts = layer.parts()
    meta = {"nbits": bits, "group_size": 16, "shape": torch.Size((192, 64)), "axis": 1, "packing": f"{bits}bit_u8"}
    meta |= {"unpack_view_dtype": torch.uint8, "view_as_float": False}
    meta |= {"scale": parts["scale"].float(), "zero": parts["zero"].float(), "compute_dtype": torch.float32}
    expected = hqq.Quantizer.dequantize(parts["W_q"], meta)
    torch.testing.assert_close(layer.dequantize(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_two_steps_have_the_losses_of_gptqmodel(name, tmp_path):
    """The package's own layers under PEFT, in its kernel that trains."""
    pytest.importorskip("gptqmodel")
    write_packed(tmp_path / "base", Packing(name, group_size=32))
    config = LlamaConfig.from_pretrained(tmp_path / "base")
    config.quantization_config["backend"] = "torch" if name == "gptq" else "torch_awq"
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", config=config, dtype=torch.bfloat16, device_map={"": "cuda"}
    )
    theirs = adapted_by_peft(plain)
    start = start_of(theirs)
    compare(two_losses(our_model(tmp_path / "base", fused=True), start), two_losses(theirs, start))


@pytest.mark.parametrize(
    ("options", "stored_as"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}, "fp4"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_two_steps_on_a_bitsandbytes_base_have_the_losses_of_peft(options, stored_as, tmp_path):
    pytest.importorskip("bitsandbytes")
    truth = write_packed(tmp_path / "packed", PACKINGS["gptq"])
    write_dense(tmp_path / "dense", tmp_path / "packed", truth)
    settings = {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": "cuda"}}
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, **settings)
    shutil.copytree(tmp_path / "dense", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    quantised.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16, device_map={"": "cuda"})
    theirs = adapted_by_peft(loaded)
    start = start_of(theirs)
    ours = our_model(tmp_path / "base", stored_as=stored_as, fused=stored_as != "int8")
    compare(two_losses(ours, start), two_losses(theirs, start))


@pytest.mark.parametrize("name", PACKINGS)
def test_a_cuda_graph_records_the_products_of_a_packed_layer(name, tmp_path):
    write_packed(tmp_path / "base", PACKINGS[name])
    spec = ModelOptions(model_name_or_path=str(tmp_path / "base"))
    model = build_model(spec, read_config(spec), dtype=torch.bfloat16, device="cuda", seed=0)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(4, 192, dtype=torch.bfloat16, device="cuda")
    expected = layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_large_layer_stays_packed_in_memory(method, tmp_path):
    """A layer of 4096 by 14336: forward and backward keep no dense weight, and need at most three of them at once."""
    inputs, outputs, group = 14336, 4096, 128
    groups = inputs // group
    shapes = {
        "gptq": {"qweight": (inputs // 8, outputs), "qzeros": (groups, outputs // 8)},
        "awq": {"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8)},
    }[method]
    layer = PackedLinear(outputs, inputs, None, PackedLayout(method, 4, group), torch.bfloat16)
    for name, shape in shapes.items():
        words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
        layer.register_parameter(name, nn.Parameter(words, requires_grad=False))
    scales = torch.rand(groups, outputs, dtype=torch.float16, device="cuda") / 1000
    layer.register_parameter("scales", nn.Parameter(scales, requires_grad=False))
    layer.seal()
    dense = 2 * inputs * outputs
    assert sum(p.numel() * p.itemsize for p in layer.parameters()) < 0.3 * dense
    x = torch.randn(8, inputs, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer(x)
    assert torch.cuda.memory_allocated() - before < 0.02 * dense  # y
    y.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{method}: peak {peak / dense:.2f} dense weights")  # the plan counts 3.5
    print(f"{method}: dequantise {milliseconds(layer.dequantize):.2f} ms", end=", ")
    tokens = torch.randn(4096, inputs, dtype=torch.bfloat16, device="cuda")
    weight = layer.dequantize()
    print(f"product of 4096 tokens {milliseconds(lambda: nn.functional.linear(tokens, weight)):.2f} ms")
    assert peak < 3 * dense
    expected = torch.ones_like(y) @ layer.dequantize()
    assert torch.equal(x.grad, expected)
