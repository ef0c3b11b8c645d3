"""Loading of MXFP4 and block-float8 bases: transformers' weights, their bytes, what stays in 16 bits, and refusals."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from ligertune_kernels import Mxfp4
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from safetensors.torch import load_file, save_file
from support.models import tiny_models
from support.models.block_scaled_bases import FAMILIES, dequantised, write_stored
from torch import nn

from ligertune.errors import UserError
from ligertune.models.adapters.lora import add_adapter
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.shape import read_shape
from ligertune.patching.lora.fused_lora import FusedLora, fuse_adapters
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions, ModelOptions

HELD = {"gpt_oss": 4, "qwen3": 14, "qwen3_moe": 12, "deepseek_v3": 18}  # weights that stay as they are stored


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    write_stored(folder, request.param)
    return folder


def load(folder: Path, stored_as: str | None = "as in the files", dtype=torch.float32, device="cpu"):
    spec = ModelOptions(model_name_or_path=str(folder))
    return build_model(spec, read_config(spec), dtype=dtype, device=device, seed=0, stored_as=stored_as)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_held_base_has_the_weights_of_transformers_dequantisation(base, dtype):
    held = load(base, dtype=dtype)
    dense = load(base, stored_as=None, dtype=dtype)
    expected = dequantised(base, dtype)
    for (name, weight), whole, truth in zip(
        held.named_parameters(), dense.parameters(), expected.parameters(), strict=True
    ):
        assert weight.dtype == whole.dtype in (dtype, torch.float32) and whole.requires_grad  # routers are in float32
        values = weight.dequantize() if isinstance(weight, QuantisedWeight) else weight
        assert torch.equal(values.to(dtype), truth) and torch.equal(whole, values), name
    packed = [weight for weight in held.parameters() if isinstance(weight, QuantisedWeight)]
    assert len(packed) == HELD[base.name] and not any(weight.requires_grad for weight in packed)
    assert getattr(held.config, "quantization_config", None) is None
    if dtype is torch.float32:  # products of bfloat16 are rounded by the order of their sums
        tokens = torch.arange(3, 30)[None]
        torch.testing.assert_close(held(tokens).logits, expected(tokens).logits, rtol=1e-5, atol=1e-6)


def test_the_bytes_are_those_of_the_files(base):
    stored = write_stored(base.parent / "again", base.name)
    for name, weight in load(base, dtype=torch.bfloat16).named_parameters():
        if isinstance(weight, QuantisedWeight) and isinstance(weight.stored, Mxfp4):
            assert torch.equal(weight.stored.blocks, stored[f"{name}_blocks"])
            assert torch.equal(weight.stored.scales, stored[f"{name}_scales"])
        elif isinstance(weight, QuantisedWeight) and weight.ndim == 2:
            assert torch.equal(weight.stored.values[0].view(torch.uint8), stored[name].view(torch.uint8))
            assert torch.equal(weight.stored.scales[0], stored[f"{name}_scale_inv"])
        elif isinstance(weight, QuantisedWeight):
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            prefix = name.rpartition(".")[0]
            for expert in range(len(weight)):
                pieces = [stored[f"{prefix}.{expert}.{part}.weight"].view(torch.uint8) for part in parts]
                assert torch.equal(weight.stored.values[expert].view(torch.uint8), torch.cat(pieces))


def test_a_plan_counts_the_stored_bytes(base):
    held = load(base, dtype=torch.bfloat16)
    planned = load(base, dtype=torch.bfloat16, device="meta")
    assert [type(p.data) for p in planned.parameters()] == [type(p.data) for p in held.parameters()]
    kinds = [kind for kind, number in read_shape(planned).parameters for _ in range(number)]
    counted = sum(kind.elements * kind.itemsize("bfloat16") for kind in kinds)
    sizes = [p.stored_bytes if isinstance(p, QuantisedWeight) else 2 * p.numel() for p in held.parameters()]
    assert counted == pytest.approx(sum(sizes), abs=1)
    assert counted < 1.7 * sum(p.numel() for p in held.parameters())  # embeddings and head are in 16 bits


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_scales_of_other_dtypes(scales, tmp_path):
    stored = write_stored(tmp_path / "base", "qwen3", scales=scales)
    found = load(tmp_path / "base").model.layers[0].mlp.down_proj.weight.stored.scales[0]
    assert torch.equal(found, stored["model.layers.0.mlp.down_proj.weight_scale_inv"].float())


def test_scales_of_activations_are_left_out(tmp_path):
    """Of a base for static float8 activations: activations are not quantised."""
    write_stored(tmp_path / "base", "qwen3_moe", activation_scheme="static")
    file = sorted((tmp_path / "base").glob("*.safetensors"))[0]
    tensors = load_file(file)
    scales = [name for name in tensors if name.endswith("proj.weight_scale_inv")]
    more = {name.replace("weight_scale_inv", "activation_scale"): torch.tensor(0.5) for name in scales}
    save_file(tensors | more, file, {"format": "pt"})
    index = tmp_path / "base" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] |= dict.fromkeys(more, file.name)
    index.write_text(json.dumps(values))
    assert any(".experts." in name for name in more) and any("self_attn" in name for name in more)
    held = sum(isinstance(p, QuantisedWeight) for p in load(tmp_path / "base").parameters())
    assert held == HELD["qwen3_moe"]


def test_blocks_at_the_edges_are_smaller(tmp_path):
    """Blocks of 40 x 40 do not divide 64, 96 and 48: the block of the configuration decides, not the scales' number."""
    stored = write_stored(tmp_path / "base", "qwen3_moe", block=(40, 40))
    model = load(tmp_path / "base")
    weight = model.model.layers[1].mlp.experts.gate_up_proj
    assert weight.stored.parts == 2
    up = stored["model.layers.1.mlp.experts.2.up_proj.weight"].float()  # (48, 64)
    scale = stored["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"]
    wide = scale.repeat_interleave(40, 0)[:48].repeat_interleave(40, 1)[:, :64]
    assert torch.equal(weight.dequantize()[2, 48:], up * wide)


def test_tensors_that_the_files_do_not_quantise_are_loaded_as_they_are(tmp_path):
    """`modules_to_not_convert` is followed, by whole names and by expressions."""
    left = ["lm_head", "model.layers.0.self_attn", r"model.layers.\d+.mlp.gate_proj"]
    write_stored(tmp_path / "base", "qwen3", modules_to_not_convert=left)
    found = load(tmp_path / "base", device="meta")
    held = {name for name, p in found.named_parameters() if isinstance(p, QuantisedWeight)}
    layers = found.model.layers
    assert len(held) == 14 - 4 - 2 and "model.layers.1.self_attn.q_proj.weight" in held
    assert not isinstance(layers[1].mlp.gate_proj.weight, QuantisedWeight)
    assert isinstance(layers[1].mlp.up_proj.weight, QuantisedWeight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "qwen3_moe"])
def test_loss_and_gradients_are_those_of_the_dequantised_weights(family, fused, tmp_path):
    """In float32; the backward dequantises again, and keeps no dequantised weight."""
    write_stored(tmp_path / "base", family)
    results = []
    for stored_as in ("as in the files", None):
        model = load(tmp_path / "base", stored_as).requires_grad_(False)
        if fused:
            patch(model)
        torch.manual_seed(0)
        adapted = add_adapter(model, MethodOptions(type="lora", lora_r=4))
        layers = fuse_adapters(adapted) if fused else 0
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
        batch = {key: value for key, value in tiny_models.batch().items() if key != "attention_mask"}
        whole = {p.numel() for p in model.parameters() if isinstance(p, QuantisedWeight)}
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=kept: into.append(t) or t, lambda t: t):
            loss = adapted.train()(**batch).loss
        if stored_as and fused:
            assert sum(isinstance(module, FusedLora) for module in adapted.modules()) == layers > 0
        if stored_as and fused:  # PEFT's own code keeps W + s B A of experts
            assert not [t for t in kept if type(t) is torch.Tensor and t.ndim == 3 and t.numel() in whole]
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}))
    (loss, found), (expected_loss, expected) = results
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6) and found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_dora_trains_on_float8_layers(tmp_path):
    write_stored(tmp_path / "base", "qwen3")
    losses = []
    for stored_as in ("as in the files", None):
        model = load(tmp_path / "base", stored_as)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        loss = adapted(**tiny_models.batch()).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_damaged_weights_are_refused(tmp_path):
    write_stored(tmp_path / "base", "gpt_oss")
    for file in sorted((tmp_path / "base").glob("*.safetensors")):
        tensors = load_file(file)
        name = "model.layers.1.mlp.experts.down_proj_scales"
        if name in tensors:
            tensors[name][2, 3, 1] = 255
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"hold NaN or infinity \(model.layers.1.mlp.experts.down_proj\)"):
        load(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["intermediate_size"] = 64
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"gives model\.layers\.0\.mlp\.experts\.gate_up_proj_bias the shape"):
        load(tmp_path / "base")


def test_other_formats_of_float8_are_dequantised_as_before(tmp_path):
    write_stored(tmp_path / "base", "qwen3", weight_block_size=None)
    spec = ModelOptions(model_name_or_path=str(tmp_path / "base"))
    config = read_config(spec)
    held = build_model(spec, copy.deepcopy(config), dtype=torch.float32, device="meta", seed=0,
                       stored_as="as in the files")  # fmt: skip
    assert not any(isinstance(p, QuantisedWeight) for p in held.parameters())


LOAD_MEASURED = """
import sys
from pathlib import Path
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.planning.options import ModelOptions
import torch

def resident(name):
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return 1024 * int(line.split()[1])

spec = ModelOptions(model_name_or_path=sys.argv[1])
config = read_config(spec)
Path("/proc/self/clear_refs").write_text("5")  # the highest value starts again
before = resident("VmRSS")
model = build_model(
    spec, config, dtype=torch.float32, device=torch.device("cpu"), seed=0, stored_as="as in the files"
)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_loading_widens_one_weight_at_a_time(tmp_path, monkeypatch):
    """transformers 5.17 widens float8 before our quantizer gets it. The mapped files count as memory, too."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "layer_types": None}
    config = type(FAMILIES["qwen3"])(**{**FAMILIES["qwen3"].to_dict(), **sizes})
    monkeypatch.setitem(FAMILIES, "qwen3", config)
    tensors = write_stored(tmp_path, "qwen3")
    stored = sum(tensor.nbytes for tensor in tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", LOAD_MEASURED, tmp_path], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 3.5 * stored  # in float32 all would take 4 times the bytes more
