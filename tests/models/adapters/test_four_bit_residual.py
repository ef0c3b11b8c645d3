"""PiSSA and OLoRA under QLoRA: PEFT's factors of the 16-bit weights, and bitsandbytes' quantisation of the rest."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.command_line import losses
from support.models import tiny_models
from support.models.hostile_folders import change_json
from support.quickstart_runs import ONE_ROW, RESUME, plan_run, saves, train, unfinished

from ligertune.errors import UserError
from ligertune.files.base_model import four_bit_format
from ligertune.models.adapters.four_bit_residual import InitialLora
from ligertune.models.adapters.initial_lora import initial_factors
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.save import load_saved, merge_saved_adapter
from ligertune.models.shape import base_of
from ligertune.models.trainable import apply_method
from ligertune.patching.lora.fused_lora import adapted_layers
from ligertune.planning.make_plan import host_memory_parts
from ligertune.planning.memory.estimate import INITIAL_BYTES
from ligertune.planning.options import MethodOptions, ModelOptions
from ligertune.planning.saved_model import trained_base
from ligertune.training.checkpoint.export_check import check_export
from ligertune.training.checkpoint.export_run import load_checkpoint, plan_export
from ligertune.training.checkpoint.weight_files import load_trained, save_weights, trained

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

TARGETS = ["q_proj", "down_proj", "lm_head"]
IDS = torch.arange(3, 40)[None]
RUN = {
    "method.type": "qlora", "method.init_lora_weights": "pissa", "method.lora_r": 4, "method.lora_alpha": 12,
    "method.lora_target_modules": "[q_proj, down_proj]", "train.learning_rate": 0.01, "train.max_steps": 3,
    "train.lr_scheduler_type": "constant", **ONE_ROW, **saves(2),
}  # fmt: skip


def model_of(folder: Path, *, stored_as: str | None = None, dtype: torch.dtype = torch.float32):
    spec = ModelOptions(model_name_or_path=str(folder))
    return build_model(spec, read_config(spec), dtype=dtype, device="cpu", seed=0, stored_as=stored_as).eval()


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Two layers of Llama with trained-like weights, of few large singular values, and GPT-2 with Conv1D layers."""
    tokens = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, **tokens)
    found = {}
    for name, config in {"llama": tiny_models.config_of("llama", vocab_size=512), "gpt2": gpt2}.items():
        model = tiny_models.random_model(transformers.AutoModelForCausalLM, config)
        for weight in (p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "wte" not in n):
            u, s, vh = torch.linalg.svd(weight.detach(), full_matrices=False)
            weight.data = u * (s * torch.exp(-torch.arange(len(s)) / 4.0)) @ vh
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def adapted(folder: Path, init: str, *, seed: int = 1, stored_as: str = "nf4", dtype=torch.float32, **changes: object):
    quant_type, double = four_bit_format(stored_as)
    changes = {"lora_r": 4, "lora_target_modules": TARGETS, **changes}
    stored = {"bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": double}
    method = MethodOptions(type="qlora", init_lora_weights=init, **stored, **changes)
    model = model_of(folder, stored_as=stored_as, dtype=dtype)
    return apply_method(model, method, seed=seed, original=lambda: model_of(folder, dtype=dtype)).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("init", "stored_as", "dtype", "changes"),
    [
        ("pissa", "nf4", torch.float32, {}),
        ("pissa", "fp4_single", torch.bfloat16, {"use_rslora": True}),
        ("olora", "nf4_single", torch.float32, {}),
        ("olora", "fp4", torch.bfloat16, {}),
    ],
)
def test_factors_are_pefts_and_the_rest_is_quantised_by_bitsandbytes(init, stored_as, dtype, changes, bases):
    ours = adapted(bases["llama"], init, stored_as=stored_as, dtype=dtype, **changes)
    original = model_of(bases["llama"], dtype=dtype)
    weights = {name: weight.detach().clone() for name, weight in original.named_parameters()}
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=TARGETS, init_lora_weights=init, **changes)
    theirs = peft.get_peft_model(original, config)
    quant_type, double = four_bit_format(stored_as)
    stored = {"quant_type": quant_type, "compress_statistics": double}
    assert len(adapted_layers(ours)) == 5
    for layer, other in zip(adapted_layers(ours), adapted_layers(theirs), strict=True):
        a, b = (factors["default"].weight for factors in (layer.lora_A, layer.lora_B))
        assert a.dtype == torch.float32
        # PEFT rounds the factors to the dtype of the base
        assert torch.equal(a.to(dtype), other.lora_A["default"].weight.to(dtype))
        assert torch.equal(b.to(dtype), other.lora_B["default"].weight.to(dtype))
        name = next(n for n, module in ours.get_base_model().named_modules() if module is layer)
        rest = weights[f"{name}.weight"].double() - layer.scaling["default"] * (b.double() @ a.double())
        base = layer.get_base_layer()
        torch.testing.assert_close(other.get_base_layer().weight.double(), rest, rtol=1e-2, atol=1e-6)
        if name == "lm_head":  # which is not quantised
            assert torch.equal(base.weight, rest.to(dtype))
            continue
        packed, state = bitsandbytes.functional.quantize_4bit(rest.to(dtype), **stored)
        assert torch.equal(base.weight.data, packed)
        found = bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
        assert found.dtype == dtype
        assert torch.equal(found, bitsandbytes.functional.dequantize_4bit(packed, state))
        plain = bitsandbytes.functional.quantize_4bit(weights[f"{name}.weight"], **stored)
        lost = (found.double() - rest).norm()
        usual = (bitsandbytes.functional.dequantize_4bit(*plain) - weights[f"{name}.weight"]).norm()
        if init == "pissa":  # the largest singular values are left out of what is rounded
            assert lost < 0.8 * usual
    assert all(f"initial.{n}" in initial_factors(ours) for n, _ in ours.named_parameters() if ".lora_" in n)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4"])
def test_the_start_is_nearer_to_the_original_model_than_qlora_is(name, init, bases):
    """GPT-2's Conv1D stores transposed weights, which bitsandbytes does not."""
    expected = logits(model_of(bases[name]))
    errors = {
        start: (logits(adapted(bases[name], start, lora_target_modules="all-linear", lora_r=8)) - expected).norm()
        for start in ("default", init)
    }
    assert 0 < errors[init] < 0.8 * errors["default"]


def test_a_checkpoint_of_another_device_quantises_again(bases, tmp_path):
    """Another seed of the random SVD stands for another device."""
    model, other = (adapted(bases["llama"], "pissa_niter_4", seed=seed) for seed in (1, 2))
    before = logits(other)
    save_weights(trained(model) | initial_factors(model), tmp_path / "w.safetensors")
    load_trained(other, tmp_path / "w.safetensors")
    assert torch.equal(logits(other), logits(model)) and not torch.equal(before, logits(model))
    assert all(map(torch.equal, initial_factors(other).values(), initial_factors(model).values()))


def test_the_plan_counts_the_original_weights_and_the_temporaries(bases, tmp_path, quickstart):
    changes = {"method.type": "qlora", "model.model_name_or_path": quickstart / "stories260K"}
    plan = plan_run(tmp_path, **changes, **{"method.init_lora_weights": "pissa_niter_4"}).plan
    assert any("pissa_niter_4: each process reads the weights once more, into host memory" in n for n in plan.notes)
    original = model_of(quickstart / "stories260K")
    size = 4 if plan.precision.weights == "float32" else 2
    elements = sum(p.numel() for p in original.parameters())
    assert host_memory_parts(plan) == {"method.init_lora_weights: pissa_niter_4": (size * elements, 0)}
    assert plan.memory.loading == INITIAL_BYTES * 64 * 172
    found = replace(plan.memory, loading=2**40).peak(1, 64, accumulates=False)
    assert (found.phase.name, found.phase.total) == ("loading", 2**40)
    usual = plan_run(tmp_path / "usual", **changes).plan
    assert usual.memory.loading == 0 and not host_memory_parts(usual)


# ---- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory, quickstart) -> Path:
    """A finished run, fused; its folder also holds one that PEFT computes, and one that was resumed after step 2."""
    folder = tmp_path_factory.mktemp("pissa")
    base = {"model.model_name_or_path": quickstart / "stories260K", "model.dtype": "float32"}
    train(folder / "fused", **RUN, **base, **{"kernels.lora": True})
    train(folder / "peft", **RUN, **base, **{"kernels.enabled": False, "kernels.lora": False})
    train(folder / "part", **RUN, **base, **{"kernels.lora": True})
    unfinished(folder / "part")
    assert train(folder / "part", **RUN, **base, **{"kernels.lora": True}, **RESUME).resumed_from == 2
    return folder


def test_losses_are_those_of_peft_and_a_resumed_run_is_bit_equal(run):
    fused = losses(run / "fused" / "run")
    assert losses(run / "peft" / "run") == pytest.approx(fused, rel=1e-5)
    assert losses(run / "part" / "run") == fused
    name = "run/model/adapter_model.safetensors"
    assert (run / "part" / name).read_bytes() == (run / "fused" / name).read_bytes()


def test_the_saved_adapter_is_plain_lora_of_twice_the_rank(run, quickstart):
    """On the original weights it differs from the trained model by what 4 bits have lost of the rest, and no more."""
    folder = run / "fused" / "run" / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(model_of(quickstart / "stories260K"), folder)
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.init_lora_weights) == (8, 24, True)
    model, _ = load_saved(str(folder), trust_remote_code=False)
    assert adapted_layers(model)[0].r == {"default": 4}
    for served, ours in zip(adapted_layers(loaded), adapted_layers(model), strict=True):
        a, b = (factors["default"].weight for factors in (served.lora_A, served.lora_B))
        initial = InitialLora(-b[:, 4:], a[4:], 3.0)
        rest = initial.residual(served.get_base_layer().weight)
        lost = rest - ours.get_base_layer().weight
        assert 0 < lost.norm() < 0.1 * served.get_base_layer().weight.norm()
        found = served.get_base_layer().weight + served.get_delta_weight("default")
        expected = ours.get_base_layer().weight + ours.get_delta_weight("default") + lost
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_generate_export_and_checkpoint_have_the_weights_of_training(run, tmp_path):
    folder = run / "fused" / "run"
    source = plan_export(str(folder), tmp_path / "out", adapter=False, checkpoint="newest")
    checkpoint = load_checkpoint(source.source, trust_remote_code=False)
    saved, _ = load_saved(str(folder / "model"), trust_remote_code=False)
    merged, *_ = merge_saved_adapter(folder / "model", trained_base(folder / "model"), trust_remote_code=False)
    for layer, other in zip(adapted_layers(saved), adapted_layers(checkpoint), strict=True):
        assert torch.equal(layer.get_base_layer().weight, other.get_base_layer().weight)
    layer = base_of(saved).get_submodule("model.layers.1.mlp.down_proj")
    a, b = (factors["default"].weight for factors in (layer.lora_A, layer.lora_B))
    expected = layer.get_base_layer().weight + 3 * b @ a
    assert torch.allclose(merged.get_submodule("model.layers.1.mlp.down_proj").weight, expected, atol=1e-6)
    torch.testing.assert_close(logits(merged.eval()), logits(saved), rtol=1e-4, atol=1e-4)
    for number, kind in enumerate(({"adapter": True, "checkpoint": None}, {"adapter": True, "checkpoint": "newest"})):
        plan = plan_export(str(folder), tmp_path / f"out{number}", **kind)
        plan.write()
        check_export(plan).raise_if_different()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("rank", "has rank 7, and one that holds its initial values has an even rank"),
        ("names", "holds no adapter of this model: it lacks "),
        ("shapes", "the initial adapter does not fit the base model"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(damage, words, run, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(run / "fused" / "run" / "model", folder)
    base = trained_base(folder)
    assert base.residual_of == "pissa"
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in weights if name.endswith("lora_B.weight"))
    if damage == "rank":
        change_json(folder / "adapter_config.json", {"r": 7})
    elif damage == "names":
        del weights[name]
    else:
        weights[name] = weights[name][:3].clone()
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=words):
        merge_saved_adapter(folder, base, trust_remote_code=False)
