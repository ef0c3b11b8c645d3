"""Adapters written back into their base's format: every tensor of the files against PEFT's merge, quantised by hand."""

import json
from pathlib import Path

import peft
import pytest
import torch
from ligertune_kernels import Mxfp4, quantize_float8_blocks, quantize_mxfp4
from support.models.base_checkpoints import same_bytes, tensors_in
from support.models.block_scaled_bases import BLOCK, dequantised, write_stored
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.models.adapters.lora import add_adapter
from ligertune.models.block_scaled.block_format import block_format
from ligertune.models.block_scaled.write_back import Rounding, write_back
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.planning.options import MethodOptions, ModelOptions


def adapted_base(folder: Path, *, std: float = 0.05, **method: object) -> nn.Module:
    """Return a held base with an adapter whose B is not 0."""
    spec = ModelOptions(model_name_or_path=str(folder))
    model = build_model(spec, read_config(spec), dtype=torch.float32, device="cpu", seed=0, stored_as="as in the files")
    torch.manual_seed(0)
    adapted = add_adapter(model, MethodOptions(type="lora", lora_r=4, **method))
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=std)
    return adapted


def written(adapted: nn.Module, base: Path, out: Path) -> Rounding:
    out.mkdir()
    for file in ("config.json", "model.safetensors.index.json"):
        (out / file).write_bytes((base / file).read_bytes())
    found = block_format(read_config(ModelOptions(model_name_or_path=str(base))))
    return write_back(adapted, sorted(base.glob("*.safetensors")), out, found)


def merged_by_peft(adapted: nn.Module, base: Path, folder: Path) -> dict[str, Tensor]:
    """Return the weights of the dequantised base with the adapter, merged by PEFT in float32."""
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return dict(peft.PeftModel.from_pretrained(dequantised(base), folder).merge_and_unload().named_parameters())


def expected(name: str, value: Tensor, merged: dict[str, Tensor], scales: torch.dtype) -> Tensor:
    """Return a tensor of the files: the merged weight, quantised as the base is."""
    if name.endswith(("_blocks", "_scales")):
        weight = merged[name.rpartition("_")[0]].transpose(1, 2)
        return getattr(quantize_mxfp4(weight, best_scale=True), name.rpartition("_")[2])
    of_weight = name.removesuffix("_scale_inv")
    weight = merged.get(of_weight)
    if ".experts." in name:
        prefix, number, part, _ = of_weight.rsplit(".", 3)
        stack = merged[f"{prefix}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)]
        weight = stack if part == "down_proj" else stack.chunk(2)[part == "up_proj"]
    if value.dtype == torch.bfloat16 and not name.endswith("_scale_inv"):
        return weight.bfloat16()
    blocks = quantize_float8_blocks(weight[None], block=BLOCK, scale_dtype=scales)
    return blocks.scales[0].to(scales) if name.endswith("_scale_inv") else blocks.values[0]


@pytest.mark.parametrize(
    ("family", "scales"),
    [
        ("gpt_oss", torch.float32),
        ("qwen3", torch.bfloat16),
        ("qwen3_moe", torch.float32),
        ("deepseek_v3", torch.float32),
    ],
    ids=str,
)
def test_every_tensor_is_pefts_merge_quantised_or_the_bytes_of_the_base(family, scales, tmp_path):
    base = tmp_path / "base"
    before = write_stored(base, family, scales=scales)
    adapted = adapted_base(base)
    rounding = written(adapted, base, tmp_path / "merged")
    merged = merged_by_peft(adapted, base, tmp_path / "adapter")
    after = tensors_in(tmp_path / "merged")
    assert after.keys() == before.keys()
    changed = 0
    for name, value in before.items():
        if "_proj" in name and not name.endswith("bias"):
            wanted = expected(name, value, merged, scales)
            same = (after[name].view(torch.uint8) == wanted.view(torch.uint8)).float().mean()
            assert same > 0.99, name  # sums in another order: a few values in the middle of two are rounded otherwise
            changed += 1
        else:
            assert same_bytes(after[name], value), name
    assert rounding.tensors == changed
    assert "keeps 9" in str(rounding) or "keeps 10" in str(rounding)


def test_small_updates_are_said_to_be_lost(tmp_path):
    write_stored(tmp_path / "base", "gpt_oss")
    adapted = adapted_base(tmp_path / "base", std=1e-6)
    rounding = written(adapted, tmp_path / "base", tmp_path / "merged")
    assert "keeps 0% of the adapter's update" in str(rounding)
    before, after = tensors_in(tmp_path / "base"), tensors_in(tmp_path / "merged")
    name = "model.layers.0.mlp.experts.down_proj"
    old, new = (Mxfp4(files[f"{name}_blocks"], files[f"{name}_scales"]) for files in (before, after))
    assert torch.equal(*(one.dequantize(one.shape, torch.float32) for one in (old, new)))  # zeros may change their sign


def test_several_files_and_parts_of_a_weight_in_two_of_them(tmp_path):
    """`write_stored` cuts the sorted names in the middle: experts of one layer lie in both files."""
    before = write_stored(tmp_path / "base", "qwen3_moe")
    places = json.loads((tmp_path / "base" / "model.safetensors.index.json").read_text())["weight_map"]
    layer = {places[name] for name in before if ".layers.0." in name}
    assert len(set(places.values())) == 2
    written(adapted_base(tmp_path / "base"), tmp_path / "base", tmp_path / "merged")
    assert {file.name for file in (tmp_path / "merged").glob("*.safetensors")} == set(places.values()) >= layer


def test_adapters_that_do_more_are_refused(tmp_path):
    write_stored(tmp_path / "base", "qwen3")
    for method, words in (
        ({"use_dora": True}, "is more than s B A on"),
        ({"lora_modules_to_save": ("lm_head",)}, "trains all of lm_head"),
    ):
        adapted = adapted_base(tmp_path / "base", **method)
        with pytest.raises(UserError, match=words):
            written(adapted, tmp_path / "base", tmp_path / words.replace(" ", "-"))
