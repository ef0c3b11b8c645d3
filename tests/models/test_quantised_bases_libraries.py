"""Quantised bases against the packages that own the formats, on a CPU: their checkpoints, their dequantised weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.command_line import losses
from support.models.base_checkpoints import QUICKSTART
from support.models.packed_checkpoints import DEPTH, WIDTH, Packing, small_llama, write_packed
from support.quickstart_runs import saves, train
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from ligertune.models.load import build_model, whole_model
from ligertune.models.quantised_bases.packed_linear import PackedLinear
from ligertune.models.read_config import read_config
from ligertune.patching.lora.fused_lora import packed_weight
from ligertune.planning.options import ModelOptions
from ligertune.training.checkpoint.export_check import check_export
from ligertune.training.checkpoint.export_run import plan_export

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def small_model() -> LlamaForCausalLM:
    values = json.loads((QUICKSTART / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**{**values, "num_hidden_layers": DEPTH, "intermediate_size": WIDTH}))
    model.load_state_dict(small_llama(), strict=False)
    return model


def dense_weights(folder: Path) -> dict[str, torch.Tensor]:
    spec = ModelOptions(model_name_or_path=str(folder))
    config = read_config(spec)
    model = build_model(spec, config, dtype=torch.float32, device="cpu", seed=0)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 7 * DEPTH
    return whole_model(spec, read_config(spec), trained_in="float32").state_dict()


# activations of W8A8 and FP8 are quantised by the package only; weights are what is compared
@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC"])
def test_weights_are_those_that_compressed_tensors_decompresses(preset, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = small_model()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.strategy == "group":
        scheme.weights.group_size = 16
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight.detach()
        groups = {"group": (len(weight), -1, 16), "channel": (len(weight), 1, -1), "tensor": (1, 1, -1)}
        grouped = weight.reshape(groups[scheme.weights.strategy])
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(
                module.weight_zero_point.dtype
            )
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "base")
    compressor.update_config(str(tmp_path / "base"))
    compressor.decompress_model(model)
    found = dense_weights(tmp_path / "base")
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            torch.testing.assert_close(found[f"{name}.weight"], module.weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bits", "axis"), [(4, 1), (8, 1), (2, 0), (1, 1)])
def test_weights_are_those_that_hqq_dequantises(bits, axis, tmp_path):
    hqq = pytest.importorskip("hqq.core.quantize")
    folder = tmp_path / "base"
    shutil.copytree(QUICKSTART, folder)
    options = hqq.BaseQuantizeConfig(nbits=bits, group_size=16, axis=axis)
    stored = {}
    expected = {}
    for name, module in small_model().named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layer = hqq.HQQLinear(module, options, compute_dtype=torch.float32, device="cpu")
            expected[f"{name}.weight"] = layer.dequantize()
            stored |= {f"{name}.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    others = {name: weight for name, weight in small_llama().items() if name not in expected}
    save_file({**stored, **others}, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    config = {"quant_method": "hqq", "quant_config": options, "skip_modules": ["lm_head"]}
    values |= {"num_hidden_layers": DEPTH, "intermediate_size": WIDTH, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    found = dense_weights(folder)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "packing",
    [
        Packing("gptq", group_size=32),
        Packing("gptq", group_size=32, act_order=True, stored="gptq_v2"),
        Packing("gptq", bits=8, group_size=32, symmetric=True),
        Packing("awq", group_size=32),
    ],
)
def test_weights_are_those_that_gptqmodel_multiplies_by(packing, tmp_path):
    pytest.importorskip("gptqmodel")
    write_packed(tmp_path / "base", packing)
    config = LlamaConfig.from_pretrained(tmp_path / "base")
    config.quantization_config["backend"] = "torch" if packing.method == "gptq" else "torch_awq"
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", config=config, dtype=torch.float16, device_map={"": "cpu"}
    )
    found = dense_weights(tmp_path / "base")
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        layer = model.get_submodule(f"model.layers.1.{name}")
        weight = layer(torch.eye(layer.in_features, dtype=torch.float16)).t()
        expected = found[f"model.layers.1.{name}.weight"].half()
        torch.testing.assert_close(weight, expected, rtol=2e-3, atol=1e-6)  # they multiply in float16


def write_by_bitsandbytes(folder: Path, **options: object) -> None:
    """Write the quickstart's model as bitsandbytes quantises it."""
    model = AutoModelForCausalLM.from_pretrained(
        QUICKSTART, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**options)
    )
    shutil.copytree(QUICKSTART, folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "stored_as"),
    [
        ({**FOUR_BITS, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float16"}, "nf4"),
        (FOUR_BITS, "nf4_single"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}, "fp4"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_stored_weights_of_bitsandbytes_are_those_that_it_quantises(options, stored_as, tmp_path):
    pytest.importorskip("bitsandbytes")
    write_by_bitsandbytes(tmp_path / "base", **options)
    found = []
    # the checkpoint names float32 or float16; the weights that bitsandbytes quantises itself are in float32
    for folder, dtype in ((tmp_path / "base", torch.bfloat16), (QUICKSTART, torch.float32)):
        spec = ModelOptions(model_name_or_path=str(folder))
        model = build_model(spec, read_config(spec), dtype=dtype, device="cpu", seed=0, stored_as=stored_as)
        layer = model.model.layers[0].mlp.up_proj
        packed = packed_weight(layer)
        assert packed is None if stored_as == "int8" else packed.dtype == dtype  # so that our kernels compute it
        found.append(layer.weight if packed is None else packed.dequantize().to(torch.bfloat16, copy=True))
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "run", "method"),
    [
        (
            {**FOUR_BITS, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float16"},
            {"kernels.lora": True},
            {"method.type": "qlora"},
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            {"kernels.lora": False},
            {"method.type": "qlora", "method.bnb_4bit_quant_type": "fp4", "method.bnb_4bit_use_double_quant": False},
        ),
        ({"load_in_8bit": True}, {}, {"method.type": "lora", "method.load_in_8bit": True}),
    ],
)
def test_a_bitsandbytes_base_trains_as_the_method_that_quantises_it(options, run, method, tmp_path):
    pytest.importorskip("bitsandbytes")
    write_by_bitsandbytes(tmp_path / "base", **options)
    settings = {"model.dtype": "float32", "method.lora_r": 4, "train.max_steps": 4, **saves(2), **run}
    stored = {**settings, "method.type": "lora", "model.model_name_or_path": tmp_path / "base"}
    train(tmp_path / "stored", **stored)
    folder = tmp_path / "stored" / "run"
    train(tmp_path / "fly", **settings, **method, **{"model.model_name_or_path": QUICKSTART})
    assert losses(folder) == losses(tmp_path / "fly" / "run")
    train(tmp_path / "again", **stored, **{"checkpoint.resume_from_checkpoint": folder / "checkpoints" / "step-2"})
    assert losses(tmp_path / "again" / "run") == losses(folder)[2:]
    plan = plan_export(str(folder), tmp_path / "merged", adapter=False, checkpoint=None)
    assert not plan.write()  # no note on scales that are not loaded
    check_export(plan).raise_if_different()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
