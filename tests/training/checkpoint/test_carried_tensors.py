"""No tensor of a base is lost: what the model class does not load is saved with the model, byte for byte."""

import json
import shutil

import pytest
import torch
from base_checkpoints import QUICKSTART, same_bytes, tensors_in, write_base
from command_line import run_here
from quickstart_runs import plan_run, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Glm4MoeForCausalLM

from ligertune.errors import UserError
from ligertune.models.carried_tensors import find_carried, forget_layers
from ligertune.models.load import build_model, carried_by
from ligertune.models.read_config import read_config
from ligertune.planning.options import ModelOptions
from ligertune.training.checkpoint.checkpoint_files import check_space

SETTINGS = {"train.max_steps": 2, "data.datasets.0.max_samples": 8, "data.val_split": 0, "model.dtype": "bfloat16",
            "train.gradient_accumulation_steps": 1, "checkpoint.save_strategy": "steps",
            "checkpoint.save_steps": 1}  # fmt: skip
LORA = {"method.type": "lora", "method.lora_r": 4}
IDS = torch.tensor([[1, 403, 407, 261, 378]])


def extra_tensors():
    """Tensors of parts that LlamaForCausalLM does not have, in several dtypes; NaN must survive, too."""
    generator = torch.Generator().manual_seed(3)
    return {
        "mtp.layers.0.eh_proj.weight": torch.randn(64, 128, generator=generator),
        "mtp.layers.0.norm.weight": torch.full((64,), float("nan"), dtype=torch.bfloat16),
        "model.layers.5.shared_head.norm.weight": torch.randn(64, generator=generator).half(),
        "v_head.summary.weight": torch.randn(1, 64, generator=generator, dtype=torch.float64),
        "mtp.steps": torch.arange(3),
    }


HARMLESS = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


def write_with_extras(folder, **config):
    write_base(folder, extra={**extra_tensors(), **HARMLESS}, num_nextn_predict_layers=1, **config)
    return folder


def check_saved(folder, *, values=None):
    """The saved model holds the tensors, and loads without them."""
    found, extras = tensors_in(folder), values or extra_tensors()
    assert all(same_bytes(found[name], tensor) for name, tensor in extras.items())
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    own = {name: tensor for name, tensor in found.items() if name not in extras}
    assert set(own) == set(model.state_dict()) - {"lm_head.weight"}  # tied
    bare = folder.with_name(f"{folder.name}-bare")
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(own, bare / "model.safetensors", {"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(bare)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    return found


@pytest.mark.parametrize(
    "method",
    [
        LORA,
        pytest.param({}, marks=pytest.mark.slow),  # the tests of other kinds of files train in full, too
        pytest.param({"method.type": "freeze", "method.trainable": ["model.layers.4"]}, marks=pytest.mark.slow),
    ],
    ids=["lora", "full", "freeze"],
)
def test_the_model_and_its_exports_hold_them(method, tmp_path):
    base = write_with_extras(tmp_path / "base")
    report = train(tmp_path, **SETTINGS, **method, **{"model.model_name_or_path": base})
    n_bytes = sum(t.numel() * t.element_size() for t in extra_tensors().values())
    assert report.carried == {"names": tuple(sorted(extra_tensors())), "bytes": n_bytes, "dropped": ""}
    assert any("5 tensors of the base (model.layers.5" in note for note in report.notes)
    if method is not LORA:
        check_saved(tmp_path / "run" / "model")
    else:
        assert not list((tmp_path / "run" / "model").glob("model*.safetensors"))
    for arguments in ((), ("--checkpoint", "step-1")):
        out = tmp_path / f"ex{len(arguments)}"
        done = run_here("export", "run", "--out", out, "--check", *arguments, cwd=tmp_path)
        assert done.code == 0, done.err
        check_saved(out)
        assert "5 tensors of the base" in (out / "README.md").read_text()
    if method is LORA:  # the export is a base again
        again = plan_run(tmp_path / "again", **SETTINGS, **{"model.model_name_or_path": tmp_path / "ex0"})
        assert again.plan.carried.names == tuple(sorted(extra_tensors()))


@pytest.mark.parametrize("kind", ["sharded", "bin"])
def test_files_of_other_kinds(kind, tmp_path):
    base = write_with_extras(tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(stored, base / "pytorch_model.bin")
    else:
        parts = [dict(list(stored.items())[i::3]) for i in range(3)]
        names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        for part, name in zip(parts, names, strict=True):
            save_file(part, base / name, {"format": "pt"})
        places = {name: file for part, file in zip(parts, names, strict=True) for name in part}
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    train(tmp_path, **SETTINGS, **{"model.model_name_or_path": base})
    check_saved(tmp_path / "run" / "model")


def test_a_plan_says_it_and_the_space_check_counts_them(tmp_path, monkeypatch):
    base = write_with_extras(tmp_path / "base")
    no_checkpoints = {"checkpoint.save_strategy": "no", "checkpoint.save_on_signal": False}
    plan = plan_run(tmp_path, **(SETTINGS | no_checkpoints | {"model.model_name_or_path": base})).plan
    assert any("they are saved with the model unchanged" in note for note in plan.notes)
    needed = plan.bytes.model + plan.carried.bytes
    usage = type(shutil.disk_usage(tmp_path))
    for free, is_enough in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(free, 0, free))
        if is_enough:
            check_space(plan)
        else:
            with pytest.raises(UserError, match="free, and this run's saves need"):
                check_space(plan)


def test_a_classifier_keeps_them_and_leaves_the_output_head_out(tmp_path):
    write_base(tmp_path / "base", extra=extra_tensors(), num_nextn_predict_layers=1, tie_word_embeddings=False)
    stored = load_file(tmp_path / "base" / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    rows = [{"text": f"story {i}", "label": i % 2} for i in range(8)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": "classification", "data.datasets.0.path": tmp_path / "d.jsonl", "data.prompt_template": "auto"}
    train(tmp_path, **SETTINGS, **data, **{"model.model_name_or_path": tmp_path / "base"})
    found = tensors_in(tmp_path / "run" / "model")
    assert all(same_bytes(found[name], tensor) for name, tensor in extra_tensors().items())
    assert "lm_head.weight" not in found and "score.weight" in found


def test_quantised_layers_are_not_carried_into_a_model_that_is_not(tmp_path):
    """A server would read float8 bytes as weights without their scales."""
    extra = {
        "mtp.layers.0.eh_proj.weight": torch.zeros(64, 128).to(torch.float8_e4m3fn),
        "mtp.layers.0.eh_proj.weight_scale_inv": torch.ones(1, 1),
    }
    write_base(tmp_path / "base", "float8", extra=extra, num_nextn_predict_layers=1)
    report = train(tmp_path, **SETTINGS, **{"model.model_name_or_path": tmp_path / "base"})
    assert any("not saved: they are quantised, and the saved weights are not" in note for note in report.notes)
    assert not any(name.startswith("mtp.") for name in tensors_in(tmp_path / "run" / "model"))
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_random_weights_have_no_such_layers(tmp_path):
    base = write_with_extras(tmp_path / "base")
    train(tmp_path, **SETTINGS, **{"model.model_name_or_path": base, "model.init": "random"})
    assert set(tensors_in(tmp_path / "run" / "model")).isdisjoint(extra_tensors())
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_base_that_disappears_during_the_training_does_not_cost_the_model(tmp_path):
    base = write_with_extras(tmp_path / "base")

    def remove_base(line):
        shutil.rmtree(base, ignore_errors=True)

    from ligertune.run import run

    job = plan_run(tmp_path, **SETTINGS, **{"model.model_name_or_path": base})
    with pytest.raises(UserError, match="no longer holds the 5 tensors that its class does not load"):
        run(job, remove_base)
    saved = tmp_path / "run" / "model"
    assert "model.norm.weight" in tensors_in(saved)
    assert json.loads((saved / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.q_proj.bias", "model.ln.weight"]
)
def test_tensors_of_layers_that_the_model_computes_otherwise_are_refused(name, tmp_path):
    write_base(tmp_path / "base", extra={name: torch.ones(8)})
    spec = ModelOptions(model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(UserError, match="1 weight that the model of its config"):
        build_model(spec, read_config(spec), dtype=torch.float32, device="cpu", seed=0)


def test_merged_experts_are_loaded_and_a_layer_behind_the_last_one_is_not(tmp_path):
    """transformers stacks experts, whose names in the files differ from those of the model, and ignores the layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "n_routed_experts": 4,
             "num_experts_per_tok": 2, "vocab_size": 512, "n_group": 1, "topk_group": 1}  # fmt: skip
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, first_k_dense_replace=1))
    model.save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    assert any(".experts.3." in name for name in stored)
    behind = {name.replace(".1.", ".2.", 1): t.clone() for name, t in stored.items() if ".layers.1." in name}
    save_file(stored | behind, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    spec = ModelOptions(model_name_or_path=str(tmp_path / "base"))
    config = read_config(spec)
    assert set(carried_by(spec, config).names) == set(behind)
    loaded = build_model(spec, config, dtype=torch.float32, device="cpu", seed=0)
    assert find_carried(spec, config, loaded).names == tuple(sorted(behind))


def test_numbers_of_layers_in_a_configuration(tmp_path):
    path = tmp_path / "config.json"
    text = {"mtp_num_hidden_layers": 1, "num_hidden_layers": 4, "mtp_layer_types": ["full"], "mtp_use": True}
    path.write_text(json.dumps({"num_nextn_predict_layers": 2, "num_mtp_layers": 1, "text_config": text}))
    forget_layers(path)
    assert json.loads(path.read_text()) == {
        "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "text_config": {**text, "mtp_num_hidden_layers": 0},
    }  # fmt: skip
    DeepseekV3Config(num_nextn_predict_layers=1).save_pretrained(tmp_path)
    forget_layers(path)
    assert DeepseekV3Config.from_pretrained(tmp_path).num_nextn_predict_layers == 0


def test_a_base_without_such_tensors_is_saved_in_one_file(tmp_path):
    train(tmp_path, **SETTINGS, **{"model.model_name_or_path": QUICKSTART})
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "report.json").read_text())["carried"] is None
