"""Quantised bases: weights by the formats' formulas, LoRA as on the dense weights, plans, and what is refused."""

import copy
import json
import re
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import tiny_vlms
from support.models.packed_checkpoints import DEPTH, PACKINGS, Packing, packed, settings_of_packing, write_packed
from support.quickstart_runs import plan_run, recipe_for
from support.same_training import assert_same, losses_and_gradients
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.quantizers import auto
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from ligertune.errors import UserError
from ligertune.models.load import build_model, whole_model
from ligertune.models.quantised_bases import fit_recipe
from ligertune.models.quantised_bases.base_formats import FORMATS, INFERENCE_ONLY, format_of, layout_of
from ligertune.models.quantised_bases.fit_recipe import fit_to_base
from ligertune.models.quantised_bases.packed_linear import PackedLinear
from ligertune.models.quantised_bases.stored_sizes import with_stored_sizes
from ligertune.models.read_config import read_config
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions, ModelOptions

LORA = MethodOptions(type="lora", lora_r=4)


def packed_model(folder, dtype=torch.float32):
    spec = ModelOptions(model_name_or_path=str(folder))
    return build_model(spec, read_config(spec), dtype=dtype, device="cpu", seed=0)


def dense_model(folder, dtype="float32"):
    spec = ModelOptions(model_name_or_path=str(folder))
    return whole_model(spec, read_config(spec), trained_in=dtype)


def plan_on(folder, packing: Packing = PACKINGS["gptq"], **changes):
    """Plan a short run of the quickstart's recipe on a packed base."""
    if not (folder / "base").exists():
        write_packed(folder / "base", packing)
    base = {"model.model_name_or_path": folder / "base", "model.dtype": "float32", "method.type": "lora"}
    return plan_run(folder, **{**base, "method.lora_r": 4, **changes})


# ---- weights and training


@pytest.mark.parametrize("name", PACKINGS)
def test_weights_are_those_of_the_layout(name, tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS[name])
    packed_layers = [m for m in packed_model(tmp_path / "base").modules() if isinstance(m, PackedLinear)]
    assert len(packed_layers) == 7 * DEPTH
    weights = dense_model(tmp_path / "base").state_dict()
    for key, expected in truth.items():
        torch.testing.assert_close(weights[key], expected, rtol=1e-6, atol=1e-7)
    for key, weight in dense_model(tmp_path / "base", "bfloat16").named_parameters():  # tied ones once
        assert torch.equal(weight, truth[key].bfloat16()), key  # rounded once


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["gptq_v2_act_order", "awq", "hqq", "int4_asymmetric", "int8", "float8"])
def test_lora_trains_as_peft_does_on_the_dense_weights(name, fused, tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS[name])
    dense = AutoModelForCausalLM.from_config(_plain_config(tmp_path / "base"))
    dense.load_state_dict(truth, strict=False)
    ours = packed_model(tmp_path / "base")
    patch(ours)
    ours = apply_method(ours, LORA, seed=1, fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(dense, copy.deepcopy(ours.peft_config["default"]))
    torch.manual_seed(0)
    weights = {name: 0.1 * torch.randn(p.shape) for name, p in ours.named_parameters() if p.requires_grad}
    assert len(weights) == 2 * 7 * DEPTH
    ids = torch.randint(3, 500, (2, 16))
    for model in (ours, theirs):
        for key, value in weights.items():
            model.get_parameter(key).data = value.clone()
    found, expected = (losses_and_gradients(m.train(), {"input_ids": ids, "labels": ids}) for m in (ours, theirs))
    assert_same(found, expected, tolerance=1e-4 if fused else 1e-5)  # our kernels, too: sums in another order


def _plain_config(folder):
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    return LlamaConfig(**values)


def test_products_under_autocast_are_those_of_the_dense_layer(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["gptq_uneven"])
    layer = packed_model(tmp_path / "base", torch.bfloat16).model.layers[0].mlp.down_proj
    x = torch.randn(3, 5, 192, requires_grad=True)
    dy = torch.randn(3, 5, 64)
    results = []
    for one in (layer, layer.dense()):
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = one(x)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), x.grad))
    assert results[0][0].dtype == torch.bfloat16
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_no_dense_weight_is_kept_for_the_backward(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["awq"])
    layer = packed_model(tmp_path / "base").model.layers[0].self_attn.q_proj
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert not kept


def test_a_packed_output_head_becomes_dense(tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS["gptq"])
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    parts, head = packed(truth["model.embed_tokens.weight"].numpy(), PACKINGS["gptq"])
    stored |= {f"lm_head.{part}": torch.from_numpy(value) for part, value in parts.items()}
    stored.pop("lm_head.weight", None)
    save_file(stored, file, {"format": "pt"})
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model = packed_model(tmp_path / "base")
    assert type(model.lm_head) is torch.nn.Linear
    torch.testing.assert_close(model.lm_head.weight, head, rtol=1e-6, atol=1e-7)


def test_layers_are_found_under_the_names_of_older_checkpoints(tmp_path):
    """A vision-language model: layers have biases and other names in the file, and the tower stays dense."""
    folder = tiny_vlms.save("qwen2_5_vl", tmp_path / "base")
    stored = load_file(folder / "model.safetensors")
    packing = PACKINGS["awq"]
    truth = {}
    for name in [name for name in stored if name.startswith("model.layers.") and name.endswith("_proj.weight")]:
        parts, truth[name] = packed(stored.pop(name).numpy(), packing)
        stored |= {f"{name.removesuffix('.weight')}.{part}": torch.from_numpy(one) for part, one in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = settings_of_packing(packing)
    (folder / "config.json").write_text(json.dumps(values))
    found = [name for name, module in packed_model(folder).named_modules() if isinstance(module, PackedLinear)]
    assert len(found) == len(truth) == 14
    assert found[0] == "model.language_model.layers.0.self_attn.q_proj"  # model.layers.0.self_attn.q_proj in the file
    dense = dense_model(folder)
    for name, weight in truth.items():
        layer = dense.get_submodule(f"model.language_{name.removesuffix('.weight')}")
        torch.testing.assert_close(layer.weight, weight, rtol=1e-6, atol=1e-7)
        if layer.bias is not None:
            assert torch.equal(layer.bias, stored[name.replace("weight", "bias")])


# ---- the table


def test_each_format_of_transformers_is_in_the_table_and_no_other():
    # its file is read, because this package and others, such as gptqmodel, register further quantisers
    text = Path(auto.__file__).read_text(encoding="utf-8").partition("AUTO_QUANTIZER_MAPPING = {")[2].partition("}")[0]
    own = set(re.findall(r'^ +"(.+)": ', text, re.MULTILINE))
    assert FORMATS.keys() == own and len(own) > 20


def test_formats_refused_as_for_inference_only_are_not_trainable_in_transformers():
    inference = [name for name, found in FORMATS.items() if found.why == INFERENCE_ONLY]
    assert len(inference) >= 9
    for name in inference:
        trainable = AUTO_QUANTIZER_MAPPING[name].is_trainable
        asked = trainable.fget if isinstance(trainable, property) else trainable
        assert asked(None) is False, name


@pytest.mark.parametrize("name", [name for name, found in FORMATS.items() if found.training == "refused"] + ["new_one"])
def test_other_formats_are_refused_in_a_sentence_before_data_are_read(name, tmp_path):
    write_packed(tmp_path / "base", PACKINGS["gptq"], quant_method=name)
    title = FORMATS[name].title if name in FORMATS else name
    with pytest.raises(UserError) as caught:
        plan_on(tmp_path, **{"data.datasets.0.path": "README.md"})  # which would be refused as data
    assert f"base is quantised in {title}, which cannot be trained or exported here: " in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 2
    with pytest.raises(UserError, match="cannot be trained or exported here"):
        dense_model(tmp_path / "base")


@pytest.mark.parametrize(
    ("packing", "settings", "reason"),
    [
        ("gptq", {"bits": 3}, "its weights have 3 bits, and 2, 4 and 8 are read"),
        ("gptq", {"checkpoint_format": "marlin"}, "its checkpoint_format is marlin"),
        ("awq", {"version": "gemv"}, "its version is gemv, and gemm is read"),
        ("int4", {"format": "marlin-24"}, "its format is marlin-24"),
        ("int4", {"transform_config": {"config_groups": {"u": {}}}}, "it rotates activations"),
        ("hqq", {"quant_config": {"self_attn.q_proj": {}}}, "its quant_config differs between layers"),
    ],
)
def test_layouts_that_are_not_read_are_refused(packing, settings, reason, tmp_path):
    write_packed(tmp_path / "base", PACKINGS[packing], **settings)
    with pytest.raises(UserError, match=reason) as caught:
        plan_on(tmp_path)
    assert caught.value.hint == "Give another checkpoint of it."


def test_quantised_names_only_where_the_weights_are(tmp_path):
    dense = {"quant_method": "compressed-tensors", "format": "dense"}
    assert format_of(LlamaConfig(quantization_config=dense)) is None
    assert format_of(LlamaConfig()) is None
    old = {"load_in_8bit": False, "load_in_4bit": True, "quant_method": "bitsandbytes"}
    assert format_of(LlamaConfig(quantization_config=old)) is FORMATS["bitsandbytes_4bit"]
    assert layout_of(LlamaConfig(quantization_config=settings_of_packing(PACKINGS["awq"]))).group_size == 16


# ---- recipes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.type": "full"}, "method.type: full trains weights, and packed ones have no gradient"),
        ({"method.type": "freeze", "method.trainable": ["norm"]}, "method.type: freeze trains weights"),
        ({"method.type": "qlora"}, "method.type: qlora quantises weights in 16 or 32 bits"),
        ({"method.load_in_8bit": True}, "method.load_in_8bit: true quantises weights"),
        ({"method.use_dora": True}, "method.use_dora: true reads the norms"),
        ({"method.init_lora_weights": "pissa"}, "method.init_lora_weights: pissa changes the weights"),
        ({"train.fp8": True}, "train.fp8 multiplies dense weights"),
        ({"train.torch_compile": True}, "train.torch_compile: true was not tested"),
        ({"parallel.strategy": "fsdp"}, "parallel.strategy: fsdp shards weights"),
        ({"method.lora_modules_to_save": ["down_proj"]}, "down_proj is stored packed"),
    ],
)
def test_what_needs_dense_weights_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError) as caught:
        plan_on(tmp_path, **changes)
    assert message in caught.value.message and "GPTQ" in caught.value.message
    assert "16 bits" in caught.value.hint


def test_a_layer_without_all_parts_is_refused_before_training(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["awq"])
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.1.mlp.up_proj.scales"]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj lacks scales\."):
        plan_on(tmp_path, PACKINGS["awq"])


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_base_whose_files_are_not_here_is_planned_and_not_loaded(damage, tmp_path):
    """The cache of the hub may hold a configuration without weights."""
    write_packed(tmp_path / "base", PACKINGS["gptq"])
    whole = plan_on(tmp_path).plan.bytes.weights
    file = tmp_path / "base" / "model.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:4000])
    assert plan_on(tmp_path).plan.bytes.weights == pytest.approx(whole, rel=0.1)  # by bits and groups
    with pytest.raises(UserError):
        packed_model(tmp_path / "base")


def test_bits_that_the_tensors_do_not_have_are_refused(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["gptq"], bits=8)
    with pytest.raises(UserError, match=r"12,288 weights in 6,144 bytes, which is not 8 bits each"):
        plan_on(tmp_path)


@pytest.mark.parametrize(
    ("of_most", "of_some", "settings"),
    [("gptq", "gptq_8bit", {"dynamic": {"+:.*down_proj": {"bits": 8}, "-:.*lm_head": {}}}), ("int4", "int8", {})],
)
def test_layers_of_one_base_may_have_other_bits(of_most, of_some, settings, tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS[of_most], **settings)
    of_eight = write_packed(tmp_path / "other", PACKINGS[of_some])
    stored, others = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "other"))
    stored = {name: tensor for name, tensor in stored.items() if "down_proj" not in name}
    stored |= {name: tensor for name, tensor in others.items() if "down_proj" in name}
    save_file(stored, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    if of_most == "int4":
        configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "other")]
        groups, more = (one["quantization_config"] for one in configs)
        groups["config_groups"]["group_1"] = {**more["config_groups"]["group_0"], "format": more["format"]}
        (tmp_path / "base" / "config.json").write_text(json.dumps(configs[0]))
    plan_on(tmp_path, PACKINGS[of_most])
    layers = packed_model(tmp_path / "base").model.layers
    for number, layer in enumerate(layers):
        name = f"model.layers.{number}.mlp"
        torch.testing.assert_close(layer.mlp.up_proj.dequantize(), truth[f"{name}.up_proj.weight"])
        torch.testing.assert_close(layer.mlp.down_proj.dequantize(), of_eight[f"{name}.down_proj.weight"])


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_model_does_not_have_must_be_zero(value, tmp_path):
    """AutoGPTQ wrote zeros for layers without a bias."""
    write_packed(tmp_path / "base", PACKINGS["gptq"])
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    biases = {name.replace("scales", "bias"): t[0] for name, t in stored.items() if name.endswith("scales")}
    save_file({**stored, **{name: torch.full_like(t, value) for name, t in biases.items()}}, file, {"format": "pt"})
    if value:
        with pytest.raises(UserError, match="a packed layer has a bias, and the model"):
            packed_model(tmp_path / "base")
        return
    assert packed_model(tmp_path / "base").model.layers[0].mlp.up_proj.bias is None


def test_scales_of_a_quantised_cache_are_left_out(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["int4"])
    file = tmp_path / "base" / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    save_file({**load_file(file), **scales}, file, {"format": "pt"})
    plan = plan_on(tmp_path, PACKINGS["int4"]).plan
    assert not any("k_scale" in note for note in plan.notes)
    packed_model(tmp_path / "base")


def test_the_key_of_older_compressed_tensors_is_read(tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS["int4"])
    config = tmp_path / "base" / "config.json"
    values = json.loads(config.read_text())
    values["compression_config"] = values.pop("quantization_config")
    config.write_text(json.dumps(values))
    layer = packed_model(tmp_path / "base").model.layers[0].mlp.up_proj
    torch.testing.assert_close(layer.dequantize(), truth["model.layers.0.mlp.up_proj.weight"])


def test_the_plan_counts_the_stored_bytes_and_names_the_base(tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS["gptq"])
    plan = plan_on(tmp_path).plan
    stored = load_file(tmp_path / "base" / "model.safetensors")
    linear = {name for name in truth if ".layers." in name and truth[name].ndim == 2}
    packed_bytes = sum(t.nbytes for name, t in stored.items() if f"{name.rpartition('.')[0]}.weight" in linear)
    others = sum(4 * truth[name].numel() for name in truth if name not in linear and name != "lm_head.weight")
    assert plan.bytes.weights == pytest.approx(packed_bytes + others + plan.bytes.trained, abs=1)
    assert any(note.startswith("the base is quantised (GPTQ) and stays packed") for note in plan.notes)
    assert plan.memory.workspace > plan_on(tmp_path, **{"model.init": "random"}).plan.memory.workspace
    assert plan.n_parameters == sum(t.numel() for n, t in truth.items() if n != "lm_head.weight") + plan.n_trainable


def test_heads_alone_train_on_a_packed_base(tmp_path):
    plan = plan_on(tmp_path, task="medusa", **{"method.type": "full", "method.lora_r": 16}).plan
    assert any("stays packed" in note for note in plan.notes)


def test_several_processes_hold_whole_copies(tmp_path):
    write_packed(tmp_path / "base", PACKINGS["gptq"])
    recipe = recipe_for(tmp_path, **{"model.model_name_or_path": tmp_path / "base", "method.type": "lora"})
    fitted, _ = fit_to_base(recipe, read_config(recipe.model))
    assert (recipe.parallel.strategy, fitted.parallel.strategy) == ("auto", "ddp")
    assert (recipe.kernels.lora, fitted.kernels.lora) == ("auto", False)  # no GPU has measured it


def test_before_a_download_the_size_follows_from_bits_and_groups():
    with torch.device("meta"):
        shape = read_shape(AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, vocab_size=128)))
    config = LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    sized = with_stored_sizes(shape, ModelOptions(model_name_or_path="nobody/no-such-model"), config)
    (size,) = {kind.stored_size for kind, _ in sized.parameters if kind.linear and kind.inside}
    assert size == pytest.approx(0.5 + (2 + 0.5) / 128, rel=1e-6)
    assert all(kind.stored_size == 0 for kind, _ in sized.parameters if not (kind.linear and kind.inside))


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def bitsandbytes_recipe(folder, stored: dict, **changes):
    write_packed(folder / "base", PACKINGS["gptq"])
    values = json.loads((folder / "base" / "config.json").read_text())
    (folder / "base" / "config.json").write_text(json.dumps({**values, "quantization_config": stored}))
    recipe = recipe_for(folder, **{"model.model_name_or_path": folder / "base", "method.type": "lora", **changes})
    return fit_to_base(recipe, read_config(recipe.model))


@pytest.mark.parametrize(
    ("stored", "stored_as"),
    [
        ({**BNB, "bnb_4bit_use_double_quant": True}, "nf4"),
        (BNB, "nf4_single"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4_single"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ],
)
def test_bitsandbytes_bases_are_the_methods_of_their_format(stored, stored_as, tmp_path):
    pytest.importorskip("bitsandbytes")
    recipe, notes = bitsandbytes_recipe(tmp_path, stored)
    assert recipe.method.stored_as == stored_as
    assert len(notes) == 1 and notes[0].startswith("the base is stored in ")


@pytest.mark.parametrize(
    ("stored", "changes", "message"),
    [
        (BNB, {"method.type": "full"}, "method.type: full does not fit"),
        (BNB, {"method.load_in_8bit": True}, "method.load_in_8bit: true does not fit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"method.type": "qlora"}, "qlora does not fit"),
        (BNB, {"parallel.strategy": "fsdp"}, "parallel.strategy: fsdp shards weights, and the stored ones"),
        (BNB, {"train.fp8": True}, "trains as method with type: qlora.*train.fp8"),
        (BNB, {"method.type": "qlora", "method.init_lora_weights": "loftq"}, "loftq needs the weights before"),
        (BNB, {"method.type": "qlora", "method.init_lora_weights": "pissa"}, "pissa needs the weights before"),
        (BNB, {"method.type": "lora", "method.init_lora_weights": "olora"}, "olora needs the weights before"),
    ],
)
def test_methods_that_do_not_fit_bitsandbytes_bases_are_refused(stored, changes, message, tmp_path):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match=message):
        bitsandbytes_recipe(tmp_path, stored, **changes)


def test_without_bitsandbytes_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(fit_recipe, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="is quantised by bitsandbytes, which is not installed") as caught:
        bitsandbytes_recipe(tmp_path, BNB)
    assert caught.value.hint.startswith("Install it: pip install 'bitsandbytes")
